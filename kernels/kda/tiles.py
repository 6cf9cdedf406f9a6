"""Tile algebra of one KDA chunk: decays, decayed scores, triangular inverse.

Pure functions on [..., C, *] arrays; any leading dims are batch. A chunk of C rows is cut into
tiles of 16 rows. A decayed score is sum_c x_ic k_jc exp(G_ic - G_jc) for i > j, with G the
cumulative log-decay. It becomes a plain matmul by splitting exp(G_i - G_j) at an anchor row that
comes no later than row i, so that no row depends on a later gate, not even through rounding:

- tiles below the diagonal: the anchor is the row tile's first row. Both factors are <= 1.
- diagonal tiles, bounded gate: the anchor is the tile's first row, minus a constant. The column
  factor reaches exp(15 * |lower_bound|), which float32 holds.
- diagonal tiles, any gate: four levels of halving. Two rows i > j part at one block size b of 8, 4,
  2, 1; the anchor is the first row of i's block of that size. Both factors are <= 1 again.

Every exponent is a sum of log-decays over a span of rows, never a difference of two longer sums:
a strong decay elsewhere in the chunk costs a weak one no accuracy. The same holds for gradients,
because the gradient of g is the transpose of the sums.

Letters: C chunk rows, N tiles of the chunk, S tiles left of the diagonal, I rows and J columns of a
tile, K key dim. `xs` are the row operands (q and beta * k), which meet the same columns.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda.sums import sum_halves

TILE = 16

_HIGHEST = jax.lax.Precision.HIGHEST


class Spans(NamedTuple):
    """One array per kind of span of rows; (a, b] holds the rows behind a up to b.

    Holds sums of log-decays, the decays themselves (their exponentials), or gradients of the sums.
    """

    row_NIK: jax.Array  # (first row of the tile, row]
    column_NJK: jax.Array  # (row, last row of the tile]
    to_anchor: tuple[jax.Array, ...]  # per tile r > 0, [..., r, K]: (end of tile s, its first row]
    halves: jax.Array | None  # [..., N, levels, 16, K]: between the row and its level's anchor
    start_NK: jax.Array  # from the chunk's first row through the tile's first row
    end_NK: jax.Array  # (last row of the tile, last row of the chunk]
    total_K: jax.Array  # the whole chunk


def split_tiles(x_CK: jax.Array) -> jax.Array:
    """[..., C, K] -> [..., N, 16, K]."""
    return x_CK.reshape(*x_CK.shape[:-2], -1, TILE, x_CK.shape[-1])


def join_tiles(x_NIK: jax.Array) -> jax.Array:
    """[..., N, 16, K] -> [..., C, K]."""
    return x_NIK.reshape(*x_NIK.shape[:-3], -1, x_NIK.shape[-1])


def span_sums(g_CK: jax.Array, with_halves: bool) -> Spans:
    """Sums of the log-decays g over every kind of span; linear in g.

    with_halves: also the levels of halving, which tiles without a bound on g need.
    """
    g_NIK = split_tiles(g_CK)
    behind_first_NIK = jnp.concatenate([jnp.zeros_like(g_NIK[..., :1, :]), g_NIK[..., 1:, :]], -2)
    row_NIK = jnp.cumsum(behind_first_NIK, axis=-2)
    first_NK = g_NIK[..., 0, :]
    whole_NK = first_NK + row_NIK[..., -1, :]
    to_anchor, between_SK = [], jnp.zeros_like(whole_NK[..., :1, :])
    for r in range(1, whole_NK.shape[-2]):
        to_anchor.append(between_SK + first_NK[..., r : r + 1, :])
        whole_1K = whole_NK[..., r : r + 1, :]
        between_SK = jnp.concatenate([between_SK + whole_1K, jnp.zeros_like(whole_1K)], axis=-2)
    start_NK = first_NK + jnp.flip(_sum_behind(jnp.flip(whole_NK, axis=-2)), axis=-2)
    return Spans(
        row_NIK=row_NIK,
        column_NJK=_sum_behind(g_NIK),
        to_anchor=tuple(to_anchor),
        halves=_halving_sums(g_NIK) if with_halves else None,
        start_NK=start_NK,
        end_NK=between_SK,
        total_K=start_NK[..., -1, :] + row_NIK[..., -1, -1, :],
    )


def span_sums_transpose(d_sums: Spans, g_CK: jax.Array) -> jax.Array:
    """Gradient of g [..., C, K] from the gradients of its span sums; g gives the shape only."""
    transpose = jax.linear_transpose(lambda g: span_sums(g, d_sums.halves is not None), g_CK)
    return transpose(d_sums)[0]


def _sum_behind(x_NK: jax.Array) -> jax.Array:
    """Sum of the rows behind each row."""
    shifted_NK = jnp.concatenate([x_NK[..., 1:, :], jnp.zeros_like(x_NK[..., :1, :])], axis=-2)
    return jax.lax.cumsum(shifted_NK, axis=x_NK.ndim - 2, reverse=True)


def _halving_levels() -> tuple[np.ndarray, np.ndarray]:
    """Per level of halving: the rows that a row sums, and the pairs (i, j) that part there.

    Rows of an odd block sum (first row of the block, row], those of an even block (row, first row
    of the next block]: what lies between them and the anchor.
    """
    row_I1, other_1I = np.arange(TILE)[:, None], np.arange(TILE)[None, :]
    summed, pairs = [], []
    for size in (8, 4, 2, 1):
        block_I1, block_1I = row_I1 // size, other_1I // size
        anchor_I1 = (block_I1 + 1 - block_I1 % 2) * size
        before_II = (other_1I > row_I1) & (other_1I <= anchor_I1)
        behind_II = (other_1I > anchor_I1) & (other_1I <= row_I1)
        summed.append(np.where(block_I1 % 2 == 0, before_II, behind_II))
        pairs.append((block_I1 == block_1I + 1) & (block_1I % 2 == 0))
    return np.stack(summed), np.stack(pairs)


_LEVEL_SUMS, _LEVEL_PAIRS = _halving_levels()
_STRICT = np.tri(TILE, k=-1, dtype=bool)


def _halving_sums(g_NIK: jax.Array) -> jax.Array:
    return _einsum("lij,...jk->...lik", jnp.asarray(_LEVEL_SUMS, g_NIK.dtype), g_NIK)


def strict_scores(
    xs_CK: Sequence[jax.Array], k_CK: jax.Array, decay: Spans, tile_bound: float | None
) -> list[jax.Array]:
    """Decayed scores [..., C, C] of each row operand x against k.

    Entry i > j is sum_c x_ic k_jc exp(G_ic - G_jc); entries on and above the diagonal are 0.

    tile_bound: a lower bound of g in [-5.5, 0) takes one matmul per diagonal tile; None takes the
    levels of halving, for any g.
    """
    k_NJK, shift = split_tiles(k_CK), _shift(tile_bound)
    num_rows, num_tiles = k_CK.shape[-2], k_NJK.shape[-3]
    columns = [None] + [
        k_CK[..., : r * TILE, :] * _left_factors(decay, r, shift) for r in range(1, num_tiles)
    ]
    all_scores = []
    for x_NIK in map(split_tiles, xs_CK):
        diagonal_NIJ = 0.0
        for row_NIK, column_NJK, pairs_IJ in _diagonal_factors(decay, tile_bound):
            scores_NIJ = _einsum("...ik,...jk->...ij", x_NIK * row_NIK, k_NJK * column_NJK)
            diagonal_NIJ += _select(pairs_IJ, scores_NIJ)
        rows_NIK, row_tiles = x_NIK * (decay.row_NIK * shift), []
        for r in range(num_tiles):
            parts = [diagonal_NIJ[..., r, :, :]]
            if r > 0:
                left_IC = _einsum("...ik,...ck->...ic", rows_NIK[..., r, :, :], columns[r])
                parts.insert(0, left_IC)
            row_IC = jnp.concatenate(parts, axis=-1)
            row_tiles.append(_pad_dim(row_IC, -1, num_rows - row_IC.shape[-1]))
        all_scores.append(jnp.concatenate(row_tiles, axis=-2))
    return all_scores


def strict_scores_vjp(
    ds_CC: Sequence[jax.Array],
    xs_CK: Sequence[jax.Array],
    k_CK: jax.Array,
    decay: Spans,
    tile_bound: float | None,
) -> tuple[list[jax.Array], jax.Array, Spans]:
    """Gradients of strict_scores: those of the xs, of k, and of the span sums.

    The cotangents ds must be 0 on and above the diagonal. Where a factor exp(sum) multiplies x, the
    gradient of the sum is x * dx.
    """
    xs_NIK, k_NJK = [split_tiles(x_CK) for x_CK in xs_CK], split_tiles(k_CK)
    dxs_NIK, dk_NJK, to_anchor = _left_vjp(ds_CC, xs_NIK, k_NJK, decay, _shift(tile_bound))
    d_row_NIK, d_column_NJK = _sum_products(xs_NIK, dxs_NIK), k_NJK * dk_NJK

    of_rows, of_columns, ds_NIJ = [], [], [_diagonal_tiles(d_CC) for d_CC in ds_CC]
    for row_NIK, column_NJK, pairs_IJ in _diagonal_factors(decay, tile_bound):
        kept_NIJ = [_select(pairs_IJ, d_NIJ) for d_NIJ in ds_NIJ]
        k_column_NJK = k_NJK * column_NJK
        dxs_part = [_einsum("...ij,...jk->...ik", d, k_column_NJK) * row_NIK for d in kept_NIJ]
        dk_part_NJK = column_NJK * sum(
            _einsum("...ij,...ik->...jk", d_NIJ, x_NIK * row_NIK)
            for d_NIJ, x_NIK in zip(kept_NIJ, xs_NIK, strict=True)
        )
        of_rows.append(_sum_products(xs_NIK, dxs_part))
        of_columns.append(k_NJK * dk_part_NJK)
        dxs_NIK = [dx + part for dx, part in zip(dxs_NIK, dxs_part, strict=True)]
        dk_NJK = dk_NJK + dk_part_NJK
    if tile_bound is None:
        levels = [rows + columns for rows, columns in zip(of_rows, of_columns, strict=True)]
        d_halves = jnp.stack(levels, axis=-3)
    else:
        # The columns' factor is the inverse of the rows'.
        d_row_NIK, d_halves = d_row_NIK + of_rows[0] - of_columns[0], None
    d_sums = Spans(
        row_NIK=d_row_NIK,
        column_NJK=d_column_NJK,
        to_anchor=to_anchor,
        halves=d_halves,
        start_NK=jnp.zeros_like(decay.start_NK),
        end_NK=jnp.zeros_like(decay.end_NK),
        total_K=jnp.zeros_like(decay.total_K),
    )
    return [join_tiles(dx_NIK) for dx_NIK in dxs_NIK], join_tiles(dk_NJK), d_sums


def _left_vjp(
    ds_CC: Sequence[jax.Array],
    xs_NIK: Sequence[jax.Array],
    k_NJK: jax.Array,
    decay: Spans,
    shift: float,
) -> tuple[list[jax.Array], jax.Array, tuple[jax.Array, ...]]:
    """The part of the tiles left of the diagonal: gradients of the xs, of k and of to_anchor."""
    num_tiles, row_NIK = k_NJK.shape[-3], decay.row_NIK * shift
    dx_tiles = [[jnp.zeros_like(x_NIK[..., 0, :, :])] for x_NIK in xs_NIK]
    dk_NJK, d_to_anchor = jnp.zeros_like(k_NJK), []
    for r in range(1, num_tiles):
        factors_CK = _left_factors(decay, r, shift)
        columns_CK = join_tiles(k_NJK[..., :r, :, :]) * factors_CK
        d_columns_CK = 0.0
        for d_CC, x_NIK, dx_tile in zip(ds_CC, xs_NIK, dx_tiles, strict=True):
            d_IC = d_CC[..., r * TILE : (r + 1) * TILE, : r * TILE]
            dx_IK = _einsum("...ic,...ck->...ik", d_IC, columns_CK)
            dx_tile.append(dx_IK * row_NIK[..., r, :, :])
            rows_IK = x_NIK[..., r, :, :] * row_NIK[..., r, :, :]
            d_columns_CK += _einsum("...ic,...ik->...ck", d_IC, rows_IK)
        dk_SJK = split_tiles(d_columns_CK * factors_CK)
        d_to_anchor.append(sum_halves(k_NJK[..., :r, :, :] * dk_SJK, -2)[..., 0, :])
        dk_NJK = dk_NJK + _pad_dim(dk_SJK, -3, num_tiles - r)
    dxs_NIK = [jnp.stack(dx_tile, axis=-3) for dx_tile in dx_tiles]
    return dxs_NIK, dk_NJK, tuple(d_to_anchor)


def unit_lower_inverse(l_CC: jax.Array) -> jax.Array:
    """Inverse of I + L for strictly lower triangular L [..., C, C], without powers of L.

    The diagonal tiles are inverted by substitution, all at once; the tiles below follow from
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


def _select(keep_IJ: np.ndarray, x_IJ: jax.Array) -> jax.Array:
    # Not a product with 0 and 1: an entry that is left out may have overflowed.
    return jnp.where(jnp.broadcast_to(keep_IJ, x_IJ.shape), x_IJ, 0.0)


def _sum_products(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> jax.Array:
    return sum(x * y for x, y in zip(xs, ys, strict=True))


def _diagonal_tiles(x_CC: jax.Array) -> jax.Array:
    starts = range(0, x_CC.shape[-1], TILE)
    return jnp.stack([x_CC[..., s : s + TILE, s : s + TILE] for s in starts], axis=-3)


def _shift(tile_bound: float | None) -> float:
    """Centres the range of the factors. A power of two, so that it rounds nothing."""
    if tile_bound is None:
        return 1.0
    return 2.0 ** round(0.5 * (TILE - 1) * -tile_bound / math.log(2.0))


def _diagonal_factors(
    decay: Spans, tile_bound: float | None
) -> list[tuple[jax.Array, jax.Array, np.ndarray]]:
    """Splits of exp(G_i - G_j) inside the diagonal tiles: (rows, columns, pairs they serve)."""
    if tile_bound is None:
        levels = [decay.halves[..., level, :, :] for level in range(len(_LEVEL_PAIRS))]
        return list(zip(levels, levels, _LEVEL_PAIRS, strict=True))
    row_NIK = decay.row_NIK * _shift(tile_bound)
    return [(row_NIK, 1.0 / row_NIK, _STRICT)]


def _left_factors(decay: Spans, r: int, shift: float) -> jax.Array:
    """Decay from every row left of diagonal tile r to the anchor of r, [..., 16 r, K]."""
    to_anchor_S1K = decay.to_anchor[r - 1][..., None, :]
    return join_tiles(decay.column_NJK[..., :r, :, :] * (to_anchor_S1K / shift))
