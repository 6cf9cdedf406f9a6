"""Tile algebra of one KDA chunk: decay factors, decayed scores, triangular inverse.

Pure functions on [..., C, *] arrays; any leading dims are batch. A chunk of C rows is cut into
tiles of 16 rows. A decayed score is sum_c x_ic k_jc exp(G_ic - G_jc) for i > j, with G the
cumulative log-decay. It becomes a plain matmul by splitting exp(G_i - G_j) at an anchor row that
comes no later than row i, so that no row depends on a later gate, not even through rounding:

- tiles below the diagonal: the anchor is the row tile's first row. Both factors are <= 1.
- diagonal tiles, bounded gate: the anchor is the tile's first row, minus a constant. The column
  factor reaches exp(15 * |lower_bound|), which float32 holds.
- diagonal tiles, any gate: four levels of halving. Two rows i > j part at one block size b of 8, 4,
  2, 1; the anchor is the first row of i's block of that size. Both factors are <= 1 again.

Every exponent is a sum of log-decays, never a difference of two long cumulative sums, so a strong
decay elsewhere in the chunk costs a weak one no accuracy.

Letters: C chunk rows, N tiles of the chunk, I rows and J columns of a tile, X kinds of row operand
(q and beta * k), K key dim.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TILE = 16

_HIGHEST = jax.lax.Precision.HIGHEST


class DiagonalFactors(NamedTuple):
    """A split of exp(G_i - G_j) inside the diagonal tiles, for the pairs that `pairs_IJ` holds."""

    row_NIK: jax.Array
    column_NJK: jax.Array
    pairs_IJ: np.ndarray


class Decay(NamedTuple):
    """Every decay factor of a chunk; (a, b] is the decay of the rows behind a up to b."""

    row_NIK: jax.Array  # (first row of the tile, row]
    column_NJK: jax.Array  # (row, last row of the tile]
    to_anchor: tuple[jax.Array, ...]  # entry r, [..., r, K]: (end of tile s, first row of tile r]
    diagonal: tuple[DiagonalFactors, ...]
    from_start_CK: jax.Array  # from the chunk's start through the row
    to_end_CK: jax.Array  # (row, last row of the chunk]
    total_K: jax.Array  # the whole chunk


def split_tiles(x_CK: jax.Array) -> jax.Array:
    """[..., C, K] -> [..., N, 16, K]."""
    return x_CK.reshape(*x_CK.shape[:-2], -1, TILE, x_CK.shape[-1])


def join_tiles(x_NIK: jax.Array) -> jax.Array:
    """[..., N, 16, K] -> [..., C, K]."""
    return x_NIK.reshape(*x_NIK.shape[:-3], -1, x_NIK.shape[-1])


def decay_factors(g_CK: jax.Array, tile_bound: float | None) -> Decay:
    """All factors of a chunk of finite log-decays g <= 0.

    tile_bound: a lower bound of g in [-5.5, 0) selects one matmul per diagonal tile; None selects
    the split for any g.
    """
    g_NIK = split_tiles(g_CK)
    behind_first_NIK = jnp.concatenate([jnp.zeros_like(g_NIK[..., :1, :]), g_NIK[..., 1:, :]], -2)
    row_NIK = jnp.exp(jnp.cumsum(behind_first_NIK, axis=-2))
    column_NJK = jnp.exp(_sum_behind(g_NIK))

    first_NK = g_NIK[..., 0, :]
    whole_NK = jnp.sum(g_NIK, axis=-2)
    through_first_NK = first_NK + _sum_ahead(whole_NK)
    return Decay(
        row_NIK=row_NIK,
        column_NJK=column_NJK,
        to_anchor=_anchor_factors(first_NK, whole_NK),
        diagonal=(
            _halving_factors(g_NIK)
            if tile_bound is None
            else (_anchored_factors(row_NIK, tile_bound),)
        ),
        from_start_CK=join_tiles(row_NIK * jnp.exp(through_first_NK)[..., None, :]),
        to_end_CK=join_tiles(column_NJK * jnp.exp(_sum_behind(whole_NK))[..., None, :]),
        total_K=jnp.exp(jnp.sum(whole_NK, axis=-2)),
    )


def _sum_ahead(x_NK: jax.Array) -> jax.Array:
    """Sum of the rows ahead of each row: x_0 + ... + x_(n-1)."""
    shifted_NK = jnp.concatenate([jnp.zeros_like(x_NK[..., :1, :]), x_NK[..., :-1, :]], axis=-2)
    return jnp.cumsum(shifted_NK, axis=-2)


def _sum_behind(x_NK: jax.Array) -> jax.Array:
    """Sum of the rows behind each row: x_(n+1) + ... + x_last."""
    shifted_NK = jnp.concatenate([x_NK[..., 1:, :], jnp.zeros_like(x_NK[..., :1, :])], axis=-2)
    return jax.lax.cumsum(shifted_NK, axis=x_NK.ndim - 2, reverse=True)


def _anchor_factors(first_NK: jax.Array, whole_NK: jax.Array) -> tuple[jax.Array, ...]:
    """For each row tile r the decay from the end of every tile s < r to r's first row."""
    factors = []
    between_SK = whole_NK[..., :0, :]
    for r in range(whole_NK.shape[-2]):
        factors.append(jnp.exp(between_SK + first_NK[..., r : r + 1, :]))
        whole_1K = whole_NK[..., r : r + 1, :]
        between_SK = jnp.concatenate([between_SK + whole_1K, jnp.zeros_like(whole_1K)], axis=-2)
    return tuple(factors)


def _anchored_factors(row_NIK: jax.Array, tile_bound: float) -> DiagonalFactors:
    # A power of two as the anchor's constant centres the range of the factors without rounding.
    shift = 2.0 ** round(0.5 * (TILE - 1) * -tile_bound / math.log(2.0))
    return DiagonalFactors(row_NIK * shift, 1.0 / (row_NIK * shift), np.tri(TILE, k=-1, dtype=bool))


def _halving_factors(g_NIK: jax.Array) -> tuple[DiagonalFactors, ...]:
    i_I1, j_1J = np.arange(TILE)[:, None], np.arange(TILE)[None, :]
    levels = []
    for size in (8, 4, 2, 1):
        block_I1, block_1J = i_I1 // size, j_1J // size
        since_first_IJ = (j_1J <= i_I1) & (j_1J > block_I1 * size)
        until_anchor_IJ = (j_1J > i_I1) & (j_1J <= (block_I1 + 1) * size)
        row_NIK, column_NJK = (
            jnp.exp(_einsum("ij,...jk->...ik", jnp.asarray(sums, g_NIK.dtype), g_NIK))
            for sums in (since_first_IJ, until_anchor_IJ)
        )
        pairs_IJ = (block_I1 == block_1J + 1) & (block_1J % 2 == 0)
        levels.append(DiagonalFactors(row_NIK, column_NJK, pairs_IJ))
    return tuple(levels)


def strict_scores(
    q_CK: jax.Array, kb_CK: jax.Array, k_CK: jax.Array, decay: Decay
) -> tuple[jax.Array, jax.Array]:
    """Decayed scores of the row operands q and kb against k, [..., C, C] each.

    Entry i > j is sum_c q_ic k_jc exp(G_ic - G_jc); entries on and above the diagonal are 0.
    """
    x_NXIK, k_NJK = _stack_rows(q_CK, kb_CK), split_tiles(k_CK)
    diagonal_NXIJ = _diagonal_scores(x_NXIK, k_NJK, decay)
    row_tiles = []
    for r in range(k_NJK.shape[-3]):
        parts = [diagonal_NXIJ[..., r, :, :, :]]
        if r > 0:
            row_XIK, column_CK = _off_diagonal_operands(x_NXIK, k_NJK, decay, r)
            parts.insert(0, _einsum("...xik,...ck->...xic", row_XIK, column_CK))
        row_XIC = jnp.concatenate(parts, axis=-1)
        row_tiles.append(_pad_dim(row_XIC, -1, k_CK.shape[-2] - row_XIC.shape[-1]))
    scores_XCC = jnp.concatenate(row_tiles, axis=-2)
    return scores_XCC[..., 0, :, :], scores_XCC[..., 1, :, :]


def strict_scores_vjp(
    d_q_CC: jax.Array,
    d_kb_CC: jax.Array,
    q_CK: jax.Array,
    kb_CK: jax.Array,
    k_CK: jax.Array,
    decay: Decay,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients (dq, dkb, dk) of strict_scores, [..., C, K] each, with the decay held fixed.

    The cotangents must be 0 on and above the diagonal. The decay's own gradient needs no further
    product: G_i receives q_i * dq_i + kb_i * dkb_i - k_i * dk_i (kda_kernels.md, section 4).
    """
    x_NXIK, k_NJK = _stack_rows(q_CK, kb_CK), split_tiles(k_CK)
    d_NXIJ = jnp.stack([_diagonal_tiles(d_q_CC), _diagonal_tiles(d_kb_CC)], axis=-3)
    dx_NXIK, dk_NJK = _diagonal_scores_vjp(d_NXIJ, x_NXIK, k_NJK, decay)
    d_XCC = jnp.stack([d_q_CC, d_kb_CC], axis=-3)
    dx_tiles = [dx_NXIK[..., 0, :, :, :]]
    for r in range(1, k_NJK.shape[-3]):
        row_XIK, column_CK = _off_diagonal_operands(x_NXIK, k_NJK, decay, r)
        d_XIC = d_XCC[..., r * TILE : (r + 1) * TILE, : r * TILE]
        dx_XIK = _einsum("...xic,...ck->...xik", d_XIC, column_CK)
        dx_tiles.append(dx_NXIK[..., r, :, :, :] + dx_XIK * decay.row_NIK[..., r, None, :, :])
        dk_SJK = split_tiles(_einsum("...xic,...xik->...ck", d_XIC, row_XIK))
        dk_SJK = dk_SJK * _off_diagonal_columns(decay, r)
        dk_NJK = dk_NJK + _pad_dim(dk_SJK, -3, k_NJK.shape[-3] - r)
    dx_XCK = jnp.concatenate(dx_tiles, axis=-2)
    return dx_XCK[..., 0, :, :], dx_XCK[..., 1, :, :], join_tiles(dk_NJK)


def unit_lower_inverse(l_CC: jax.Array) -> jax.Array:
    """Inverse of I + L for strictly lower triangular L [..., C, C], without powers of L.

    The 16-row diagonal tiles are inverted by substitution, all at once; the tiles below follow from
    forward substitution by row tiles. Stable for collinear keys, where powers of L overflow.
    """
    tile_NIJ = _diagonal_tiles(l_CC)
    inverse_NIJ = jnp.broadcast_to(jnp.eye(TILE, dtype=l_CC.dtype), tile_NIJ.shape)
    for i in range(TILE - 1):
        inverse_NIJ = inverse_NIJ - tile_NIJ[..., :, i : i + 1] * inverse_NIJ[..., i : i + 1, :]

    num_rows = l_CC.shape[-1]
    above_CC = _pad_dim(inverse_NIJ[..., 0, :, :], -1, num_rows - TILE)
    for start in range(TILE, num_rows, TILE):
        inverse_IJ = inverse_NIJ[..., start // TILE, :, :]
        left_IC = l_CC[..., start : start + TILE, :start]
        left_IC = _einsum("...ij,...jc->...ic", left_IC, above_CC[..., :start])
        left_IC = -_einsum("...ij,...jc->...ic", inverse_IJ, left_IC)
        row_IC = jnp.concatenate([left_IC, inverse_IJ], axis=-1)
        row_IC = _pad_dim(row_IC, -1, num_rows - start - TILE)
        above_CC = jnp.concatenate([above_CC, row_IC], axis=-2)
    return above_CC


def _einsum(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, precision=_HIGHEST)


def _pad_dim(x: jax.Array, dim: int, amount: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, amount)
    return jnp.pad(x, widths)


def _stack_rows(q_CK: jax.Array, kb_CK: jax.Array) -> jax.Array:
    return jnp.stack([split_tiles(q_CK), split_tiles(kb_CK)], axis=-3)


def _diagonal_tiles(x_CC: jax.Array) -> jax.Array:
    starts = range(0, x_CC.shape[-1], TILE)
    return jnp.stack([x_CC[..., s : s + TILE, s : s + TILE] for s in starts], axis=-3)


def _keep_pairs(x_NXIJ: jax.Array, pairs_IJ: np.ndarray) -> jax.Array:
    # A select, not a product: an entry that is left out may have overflowed.
    return jnp.where(jnp.broadcast_to(pairs_IJ, x_NXIJ.shape), x_NXIJ, 0.0)


def _off_diagonal_columns(decay: Decay, r: int) -> jax.Array:
    return decay.column_NJK[..., :r, :, :] * decay.to_anchor[r][..., None, :]


def _off_diagonal_operands(
    x_NXIK: jax.Array, k_NJK: jax.Array, decay: Decay, r: int
) -> tuple[jax.Array, jax.Array]:
    """Row tile r and all columns left of its diagonal tile, seen from the anchor of r."""
    row_XIK = x_NXIK[..., r, :, :, :] * decay.row_NIK[..., r, None, :, :]
    return row_XIK, join_tiles(k_NJK[..., :r, :, :] * _off_diagonal_columns(decay, r))


def _diagonal_scores(x_NXIK: jax.Array, k_NJK: jax.Array, decay: Decay) -> jax.Array:
    def part(factors: DiagonalFactors) -> jax.Array:
        scores_NXIJ = _einsum(
            "...xik,...jk->...xij",
            x_NXIK * factors.row_NIK[..., None, :, :],
            k_NJK * factors.column_NJK,
        )
        return _keep_pairs(scores_NXIJ, factors.pairs_IJ)

    return sum(part(factors) for factors in decay.diagonal)


def _diagonal_scores_vjp(
    d_NXIJ: jax.Array, x_NXIK: jax.Array, k_NJK: jax.Array, decay: Decay
) -> tuple[jax.Array, jax.Array]:
    def part(factors: DiagonalFactors) -> tuple[jax.Array, jax.Array]:
        kept_NXIJ = _keep_pairs(d_NXIJ, factors.pairs_IJ)
        row_NXIK = factors.row_NIK[..., None, :, :]
        dx_NXIK = _einsum("...xij,...jk->...xik", kept_NXIJ, k_NJK * factors.column_NJK)
        dk_NJK = _einsum("...xij,...xik->...jk", kept_NXIJ, x_NXIK * row_NXIK)
        return dx_NXIK * row_NXIK, dk_NJK * factors.column_NJK

    dx_parts, dk_parts = zip(*(part(factors) for factors in decay.diagonal), strict=True)
    return sum(dx_parts), sum(dk_parts)
