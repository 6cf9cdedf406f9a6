"""The public front of attention: checks the call and chooses an implementation."""

import jax
import jax.numpy as jnp

from kernels.attention.reference import attention_reference
from kernels.attention.splash import attention_splash, unsupported_by_splash
from kernels.attention.xla import attention_xla, default_block_size
from kernels.numerics import vary_together

IMPLEMENTATIONS = ("reference", "xla", "splash")


def attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal softmax attention, o_t = sum_s softmax_s(scale q_t . k_s) v_s over visible s <= t.

    The core of Gated MLA (Kimi K3 report Eq. 7), where query and key are wider than the value.

    Args:
      q_BTHK: queries.
      k_BSHK: keys, one per query (S = T).
      v_BSHV: values; V may differ from K.
      segment_ids: [B,T] integers, or None for one document per row. A token sees the tokens of its
        own id only; nothing else is asked of the ids.
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
    _check(q_BTHK, k_BSHK, v_BSHV, segment_ids)
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else float(scale)
    if segment_ids is None:
        q_BTHK, k_BSHK, v_BSHV = vary_together(q_BTHK, k_BSHK, v_BSHV)
    else:
        q_BTHK, k_BSHK, v_BSHV, segment_ids = vary_together(q_BTHK, k_BSHK, v_BSHV, segment_ids)
    arrays = (q_BTHK, k_BSHK, v_BSHV, segment_ids, scale)
    why_not_splash = unsupported_by_splash(q_BTHK.dtype)
    if implementation is None:
        on_tpu = jax.default_backend() == "tpu"
        implementation = "splash" if on_tpu and why_not_splash is None else "xla"
    if implementation == "xla":
        return attention_xla(*arrays, default_block_size(q_BTHK.shape[1]))
    if implementation == "splash":
        if why_not_splash is not None:
            raise NotImplementedError(
                f"attention cannot use 'splash': {why_not_splash}. Use 'xla' or None."
            )
        return attention_splash(*arrays)
    if implementation == "reference":
        return attention_reference(*arrays)
    raise ValueError(
        f"attention has no implementation {implementation!r}; use None or one of "
        f"{', '.join(IMPLEMENTATIONS)}."
    )


def _check(
    q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHV: jax.Array, segment_ids: jax.Array | None
) -> None:
    if q_BTHK.ndim != 4 or q_BTHK.shape != k_BSHK.shape or k_BSHK.shape[:3] != v_BSHV.shape[:3]:
        raise ValueError(
            "attention takes q and k [B,T,H,K] and v [B,T,H,V], with the same B, T and H; got "
            f"{q_BTHK.shape}, {k_BSHK.shape} and {v_BSHV.shape}."
        )
    dtypes = {q_BTHK.dtype, k_BSHK.dtype, v_BSHV.dtype}
    if len(dtypes) > 1 or not jnp.issubdtype(q_BTHK.dtype, jnp.floating):
        raise ValueError(
            f"q, k and v must share one floating dtype; got {q_BTHK.dtype}, {k_BSHK.dtype} and "
            f"{v_BSHV.dtype}. Cast all three to the compute dtype, for example bfloat16."
        )
    if segment_ids is not None and (
        segment_ids.shape != q_BTHK.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(
            f"segment_ids are integers [B,T], here {q_BTHK.shape[:2]}; got {segment_ids.dtype} "
            f"{segment_ids.shape}."
        )
