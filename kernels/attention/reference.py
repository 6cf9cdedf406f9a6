"""Causal attention with all scores in memory: the oracle for short sequences."""

import jax
import jax.numpy as jnp

from kernels.numerics import accumulation_dtype, precision_for


def attention_reference(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    segment_ids_BS: jax.Array | None,
    first_query: jax.Array | None,
    scale: float,
) -> jax.Array:
    """See kernels.attention.attention."""
    positions_T = (0 if first_query is None else first_query) + jnp.arange(q_BTHK.shape[1])
    dtype = accumulation_dtype(v_BSHV.dtype)
    precision = precision_for(q_BTHK.dtype)
    scores_BHTS = scale * jnp.einsum(
        "bthk,bshk->bhts", q_BTHK, k_BSHK, precision=precision, preferred_element_type=dtype
    )
    visible_BTS = (positions_T[:, None] >= jnp.arange(k_BSHK.shape[1])[None, :])[None]
    if segment_ids_BS is not None:
        visible_BTS &= segment_ids_BS[:, positions_T][:, :, None] == segment_ids_BS[:, None, :]
    scores_BHTS = jnp.where(visible_BTS[:, None], scores_BHTS, -jnp.inf)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BSHV.dtype)
    return jnp.einsum(
        "bhts,bshv->bthv",
        weights_BHTS,
        v_BSHV,
        precision=precision,
        preferred_element_type=dtype,
    )
