"""The score of a source under a pseudo-query, and the checks that every entry shares.

Letters: N sources, S pseudo-queries.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels.numerics import accumulation_dtype

Sources = jax.Array | Sequence[jax.Array]  # [N,B,T,D], or N arrays [B,T,D]


def stacked(sources: Sources, queries: jax.Array, norms: jax.Array) -> jax.Array:
    """The sources as one checked float32 (float64) array [N,B,T,D]."""
    sources_NBTD = sources if isinstance(sources, jax.Array) else jnp.stack(sources)
    check(sources_NBTD, queries, norms)
    return sources_NBTD.astype(accumulation_dtype(sources_NBTD.dtype))


def scores(
    sources_NBTD: jax.Array, queries_SD: jax.Array, norms_SD: jax.Array, eps: float
) -> jax.Array:
    """scores_NBTS = query . RMSNorm(source), without 1/sqrt(D) (Attention Residuals, Sec. 3).

    RMSNorm(source) = source * rsqrt(mean(source^2) + eps) * norm. The learned vectors are folded
    into one, so that the source is read once for all pseudo-queries and its key never exists.
    Sources are float32 (or float64) here.
    """
    dtype = sources_NBTD.dtype
    weights_SD = queries_SD.astype(dtype) * norms_SD.astype(dtype)
    inverse_rms_NBT = jax.lax.rsqrt(jnp.mean(jnp.square(sources_NBTD), axis=-1) + eps)
    products_NBTS = jnp.einsum(
        "nbtd,sd->nbts", sources_NBTD, weights_SD, precision=jax.lax.Precision.HIGHEST
    )
    return products_NBTS * inverse_rms_NBT[..., None]


def check(sources_NBTD: jax.Array, queries: jax.Array, norms: jax.Array) -> None:
    """Raises ValueError unless sources [N,B,T,D] meet learned vectors [...,D] of one shape."""
    if sources_NBTD.ndim != 4 or sources_NBTD.shape[0] < 1:
        raise ValueError(
            f"sources have shape {sources_NBTD.shape}; stack at least one source to [N,B,T,D]."
        )
    if queries.shape != norms.shape or queries.shape[-1] != sources_NBTD.shape[-1]:
        raise ValueError(
            f"queries {queries.shape} and norms {norms.shape} must have the same shape and end in "
            f"the width of the sources, {sources_NBTD.shape[-1]}."
        )
