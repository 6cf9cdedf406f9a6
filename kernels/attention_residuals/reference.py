"""The Attention Residuals mix in its direct form."""

import jax
import jax.numpy as jnp

from kernels.attention_residuals.scores import Sources, scores, stacked


def mix(sources: Sources, query_D: jax.Array, norm_D: jax.Array, *, eps: float) -> jax.Array:
    """h = sum_n softmax_n(query . RMSNorm(source_n)) source_n (Attention Residuals, Sec. 3).

    Values are not normalised. Scores, softmax and sum are float32 (float64 for float64 sources).

    Args:
      sources: the outputs to choose from: N >= 1 arrays [B, T, D], or one array [N, B, T, D].
      query_D: the learned pseudo-query of one sublayer; zero means equal weights.
      norm_D: the weight of the RMSNorm on the keys.
      eps: added to the mean square in the RMSNorm.

    Returns:
      h_BTD in the sources' dtype.

    Raises:
      ValueError: shapes do not fit.
    """

    @jax.checkpoint  # recomputing is cheaper than keeping stacked float32 copies of sources
    def in_float32(sources: Sources, query_D: jax.Array, norm_D: jax.Array) -> jax.Array:
        sources_NBTD = stacked(sources, query_D, norm_D)
        scores_NBT = scores(sources_NBTD, query_D[None], norm_D[None], eps)[..., 0]
        weights_NBT = jax.nn.softmax(scores_NBT, axis=0)
        return jnp.sum(weights_NBT[..., None] * sources_NBTD, axis=0)

    return in_float32(sources, query_D, norm_D).astype(sources[0].dtype)
