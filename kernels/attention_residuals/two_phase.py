"""The Attention Residuals mix in two phases (Attention Residuals, Algorithm 1).

Pseudo-queries do not depend on the input, so one pass over the finished blocks serves all S
sublayers of the next block; each sublayer then merges the block's own partial sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention_residuals.scores import Sources, check, scores, stacked


class SourceMix(NamedTuple):
    """Softmax over the finished blocks, not yet normalised, for S pseudo-queries.

    Only for merge_partial: its result does not depend on the shift m, hence m carries no gradient,
    and the gradients of o and l are those at a fixed shift.
    """

    o_SBTD: jax.Array  # sum_n exp(score_n - m) source_n
    m_SBT: jax.Array  # max_n score_n
    l_SBT: jax.Array  # sum_n exp(score_n - m)


def mix_sources(
    sources: Sources, queries_SD: jax.Array, norms_SD: jax.Array, *, eps: float
) -> SourceMix:
    """Phase 1: all S pseudo-queries against N finished blocks at once.

    Args:
      sources: the finished blocks: N >= 1 arrays [B, T, D], or one array [N, B, T, D].
      queries_SD: learned pseudo-queries.
      norms_SD: weights of the RMSNorm on the keys, one per pseudo-query.
      eps: added to the mean square in the RMSNorm.

    Returns:
      SourceMix in float32 (float64 for float64 sources).

    Raises:
      ValueError: shapes do not fit.
    """

    @jax.checkpoint  # recomputing is cheaper than keeping stacked float32 copies of sources
    def in_float32(sources: Sources, queries_SD: jax.Array, norms_SD: jax.Array) -> SourceMix:
        sources_NBTD = stacked(sources, queries_SD, norms_SD)
        scores_NBTS = scores(sources_NBTD, queries_SD, norms_SD, eps)
        m_BTS = jax.lax.stop_gradient(jnp.max(scores_NBTS, axis=0))
        weights_NBTS = jnp.exp(scores_NBTS - m_BTS[None])
        o_SBTD = jnp.einsum(
            "nbts,nbtd->sbtd", weights_NBTS, sources_NBTD, precision=jax.lax.Precision.HIGHEST
        )
        l_BTS = jnp.sum(weights_NBTS, axis=0)
        return SourceMix(o_SBTD, jnp.moveaxis(m_BTS, -1, 0), jnp.moveaxis(l_BTS, -1, 0))

    return in_float32(sources, queries_SD, norms_SD)


def merge_partial(
    o_BTD: jax.Array,
    m_BT: jax.Array,
    l_BT: jax.Array,
    partial_BTD: jax.Array,
    query_D: jax.Array,
    norm_D: jax.Array,
    *,
    eps: float,
    has_partial: bool | jax.Array = True,
) -> jax.Array:
    """Phase 2: adds the partial sum of the current block to one sublayer's mix (online softmax).

    Args:
      o_BTD, m_BT, l_BT: this sublayer's entries of SourceMix.
      partial_BTD: sum of the block's sublayer outputs so far.
      query_D, norm_D: this sublayer's pseudo-query and norm weight, as given to mix_sources.
      eps: as given to mix_sources.
      has_partial: False at the first sublayer of a block: partial is then ignored, whatever it
        holds, and gets zero gradient. May be traced.

    Returns:
      h_BTD in partial's dtype: what `mix` gives for the blocks with the partial sum behind them.

    Raises:
      ValueError: shapes do not fit.
    """
    check(partial_BTD[None], query_D, norm_D)
    if o_BTD.shape != partial_BTD.shape or not m_BT.shape == l_BT.shape == o_BTD.shape[:2]:
        raise ValueError(
            f"o {o_BTD.shape}, m {m_BT.shape} and l {l_BT.shape} are not one sublayer's mix for a "
            f"partial sum {partial_BTD.shape}; index the S dimension of SourceMix first."
        )

    @jax.checkpoint
    def in_float32(
        o_BTD: jax.Array,
        m_BT: jax.Array,
        l_BT: jax.Array,
        partial_BTD: jax.Array,
        query_D: jax.Array,
        norm_D: jax.Array,
        has_partial: jax.Array,
    ) -> jax.Array:
        # Selected before any arithmetic: what is ignored must not reach a gradient as 0 * inf.
        partial_BTD = jnp.where(has_partial, partial_BTD, 0).astype(o_BTD.dtype)
        score_BT = scores(partial_BTD[None], query_D[None], norm_D[None], eps)[0, :, :, 0]
        score_BT = jnp.where(has_partial, score_BT, -jnp.inf)
        shift_BT = jax.lax.stop_gradient(jnp.maximum(m_BT, score_BT))
        old_BT, new_BT = jnp.exp(m_BT - shift_BT), jnp.exp(score_BT - shift_BT)
        total_BTD = old_BT[..., None] * o_BTD + new_BT[..., None] * partial_BTD
        return total_BTD / (old_BT * l_BT + new_BT)[..., None]

    h_BTD = in_float32(o_BTD, m_BT, l_BT, partial_BTD, query_D, norm_D, has_partial)
    return h_BTD.astype(partial_BTD.dtype)
