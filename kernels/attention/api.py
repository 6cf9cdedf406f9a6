"""The public front of attention: checks the call and chooses an implementation."""

import jax
import jax.numpy as jnp

from kernels.attention.reference import attention_reference
from kernels.attention.splash import attention_splash, unsupported_by_splash
from kernels.attention.xla import attention_xla, default_block_size
from kernels.numerics import platform, vary_together

IMPLEMENTATIONS = ("reference", "xla", "splash")


def attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    first_query: jax.Array | int = 0,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal softmax attention, o_t = sum_s softmax_s(scale q_t . k_s) v_s over visible s <= t.

    The core of Gated MLA (Kimi K3 report Eq. 7), where query and key are wider than the value.

    Args:
      q_BTHK: queries.
      k_BSHK: keys of a sequence that the queries are a part of, S >= T.
      v_BSHV: values; V may differ from K.
      segment_ids: [B,S] integers, or None for one document per row. A token sees the tokens of its
        own id only; nothing else is asked of the ids.
      first_query: the position among the keys of the first query; may be traced, and must then lie
        in [0, S - T].
      scale: K^-1/2 if None.
      implementation: "xla" (blockwise, memory linear in T), "splash" (JAX's TPU kernel; bfloat16
        only; interpreted, hence slow, on other devices), "reference" (all scores in memory, for
        short sequences), or None: splash on a TPU where it supports the call, else xla.

    Returns:
      o_BTHV in float32 (float64 for float64 inputs): the report keeps the attention output wide.

    Raises:
      ValueError: shapes, dtypes or implementation do not fit.
      NotImplementedError: "splash" does not support the call.
    """
    _check(q_BTHK, k_BSHK, v_BSHV, segment_ids, first_query)
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else float(scale)
    known = isinstance(first_query, int) and first_query == 0  # then the loop's length is, too
    first = None if known else jnp.asarray(first_query, jnp.int32)
    leaves, structure = jax.tree.flatten((q_BTHK, k_BSHK, v_BSHV, segment_ids, first))
    arrays = jax.tree.unflatten(structure, vary_together(*leaves))
    why_not_splash = unsupported_by_splash(q_BTHK, k_BSHK)
    if implementation is None:
        implementation = "splash" if platform() == "tpu" and why_not_splash is None else "xla"
    if implementation == "xla":
        return attention_xla(*arrays, scale, default_block_size(q_BTHK.shape[1]))
    if implementation == "splash":
        if why_not_splash is not None:
            raise NotImplementedError(
                f"attention cannot use 'splash': {why_not_splash}. Use 'xla' or None."
            )
        return attention_splash(*arrays[:4], scale)
    if implementation == "reference":
        return attention_reference(*arrays, scale)
    raise ValueError(
        f"attention has no implementation {implementation!r}; use None or one of "
        f"{', '.join(IMPLEMENTATIONS)}."
    )


def _check(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    segment_ids: jax.Array | None,
    first_query: jax.Array | int,
) -> None:
    shapes_fit = (
        q_BTHK.ndim == k_BSHK.ndim == v_BSHV.ndim == 4
        and (q_BTHK.shape[0], *q_BTHK.shape[2:]) == (k_BSHK.shape[0], *k_BSHK.shape[2:])
        and k_BSHK.shape[:3] == v_BSHV.shape[:3]
    )
    if not shapes_fit:
        raise ValueError(
            "attention takes q [B,T,H,K], k [B,S,H,K] and v [B,S,H,V], with the same B and H; got "
            f"{q_BTHK.shape}, {k_BSHK.shape} and {v_BSHV.shape}."
        )
    last = k_BSHK.shape[1] - q_BTHK.shape[1]
    if last < 0 or (isinstance(first_query, int) and not 0 <= first_query <= last):
        raise ValueError(
            f"{q_BTHK.shape[1]} queries from {first_query} on do not lie among {k_BSHK.shape[1]} "
            f"keys; give at least as many keys, and a first_query such as {max(0, last)}."
        )
    dtypes = {q_BTHK.dtype, k_BSHK.dtype, v_BSHV.dtype}
    if len(dtypes) > 1 or not jnp.issubdtype(q_BTHK.dtype, jnp.floating):
        raise ValueError(
            f"q, k and v must share one floating dtype; got {q_BTHK.dtype}, {k_BSHK.dtype} and "
            f"{v_BSHV.dtype}. Cast all three to the compute dtype, for example bfloat16."
        )
    if segment_ids is not None and (
        segment_ids.shape != k_BSHK.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(
            f"segment_ids are integers [B,S], here {k_BSHK.shape[:2]}; got {segment_ids.dtype} "
            f"{segment_ids.shape}."
        )
