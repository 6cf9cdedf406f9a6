"""The Attention Residuals mix in its direct form."""

import jax
import jax.numpy as jnp

from kernels.attention_residuals.scores import check, scores
from kernels.numerics import accumulation_dtype


def mix(sources_NBTD: jax.Array, query_D: jax.Array, norm_D: jax.Array, *, eps: float) -> jax.Array:
    """h = sum_n softmax_n(query . RMSNorm(source_n)) source_n (Attention Residuals, Sec. 3).

    Values are not normalised. Scores, softmax and sum are float32 (float64 for float64 sources).

    Args:
      sources_NBTD: the outputs to choose from, N >= 1.
      query_D: the learned pseudo-query of one sublayer; zero means equal weights.
      norm_D: the weight of the RMSNorm on the keys.
      eps: added to the mean square in the RMSNorm.

    Returns:
      h_BTD in the sources' dtype.

    Raises:
      ValueError: shapes do not fit.
    """
    check(sources_NBTD, query_D, norm_D)

    @jax.checkpoint  # recomputing the weights is cheaper than keeping float32 copies of sources
    def in_float32(sources_NBTD: jax.Array, query_D: jax.Array, norm_D: jax.Array) -> jax.Array:
        sources_NBTD = sources_NBTD.astype(accumulation_dtype(sources_NBTD.dtype))
        scores_NBT = scores(sources_NBTD, query_D[None], norm_D[None], eps)[..., 0]
        weights_NBT = jax.nn.softmax(scores_NBT, axis=0)
        return jnp.sum(weights_NBT[..., None] * sources_NBTD, axis=0)

    return in_float32(sources_NBTD, query_D, norm_D).astype(sources_NBTD.dtype)
