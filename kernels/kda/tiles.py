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
tile, X kinds of row operand (q and beta * k), K key dim.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TILE = 16

_HIGHEST = jax.lax.Precision.HIGHEST


class Spans(NamedTuple):
    """One array per kind of span of rows; (a, b] holds the rows behind a up to b.

    Holds sums of log-decays, the decays themselves (their exponentials), or gradients of the sums.
    """

    row_NIK: jax.Array  # (first row of the tile, row]
    column_NJK: jax.Array  # (row, last row of the tile]
    to_anchor: tuple[jax.Array, ...]  # per tile r > 0, [..., r, K]: (end of tile s, its first row]
    halves: tuple[tuple[jax.Array, jax.Array], ...]  # per level (anchor, row] and (row, anchor]
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
    first_NK, whole_NK = g_NIK[..., 0, :], jnp.sum(g_NIK, axis=-2)
    behind_first_NIK = jnp.concatenate([jnp.zeros_like(g_NIK[..., :1, :]), g_NIK[..., 1:, :]], -2)
    to_anchor, between_SK = [], jnp.zeros_like(whole_NK[..., :1, :])
    for r in range(1, whole_NK.shape[-2]):
        to_anchor.append(between_SK + first_NK[..., r : r + 1, :])
        whole_1K = whole_NK[..., r : r + 1, :]
        between_SK = jnp.concatenate([between_SK + whole_1K, jnp.zeros_like(whole_1K)], axis=-2)
    return Spans(
        row_NIK=jnp.cumsum(behind_first_NIK, axis=-2),
        column_NJK=_sum_behind(g_NIK),
        to_anchor=tuple(to_anchor),
        halves=_halving_sums(g_NIK) if with_halves else (),
        start_NK=first_NK + jnp.flip(_sum_behind(jnp.flip(whole_NK, axis=-2)), axis=-2),
        end_NK=between_SK,
        total_K=jnp.sum(whole_NK, axis=-2),
    )


def span_sums_transpose(d_sums: Spans, g_CK: jax.Array) -> jax.Array:
    """Gradient of g [..., C, K] from the gradients of its span sums; g gives the shape only."""
    transpose = jax.linear_transpose(lambda g: span_sums(g, bool(d_sums.halves)), g_CK)
    return transpose(d_sums)[0]


def _sum_behind(x_NK: jax.Array) -> jax.Array:
    """Sum of the rows behind each row."""
    shifted_NK = jnp.concatenate([x_NK[..., 1:, :], jnp.zeros_like(x_NK[..., :1, :])], axis=-2)
    return jax.lax.cumsum(shifted_NK, axis=x_NK.ndim - 2, reverse=True)


def _halving_level(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows summed by (anchor, row], rows summed by (row, anchor], and the pairs that part here."""
    i_I1, j_1J = np.arange(TILE)[:, None], np.arange(TILE)[None, :]
    block_I1, block_1J = i_I1 // size, j_1J // size
    from_anchor_IJ = (j_1J <= i_I1) & (j_1J > block_I1 * size)
    until_anchor_IJ = (j_1J > i_I1) & (j_1J <= (block_I1 + 1) * size)
    return from_anchor_IJ, until_anchor_IJ, (block_I1 == block_1J + 1) & (block_1J % 2 == 0)


_LEVELS = tuple(_halving_level(size) for size in (8, 4, 2, 1))
_STRICT = np.tri(TILE, k=-1, dtype=bool)


def _halving_sums(g_NIK: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    def add(rows_IJ: np.ndarray) -> jax.Array:
        return _einsum("ij,...jk->...ik", jnp.asarray(rows_IJ, g_NIK.dtype), g_NIK)

    return tuple((add(from_anchor), add(until_anchor)) for from_anchor, until_anchor, _ in _LEVELS)


def strict_scores(
    q_CK: jax.Array, kb_CK: jax.Array, k_CK: jax.Array, decay: Spans, tile_bound: float | None
) -> tuple[jax.Array, jax.Array]:
    """Decayed scores of the row operands q and kb against k, [..., C, C] each.

    Entry i > j is sum_c q_ic k_jc exp(G_ic - G_jc); entries on and above the diagonal are 0.

    tile_bound: a lower bound of g in [-5.5, 0) takes one matmul per diagonal tile; None takes the
    levels of halving, for any g.
    """
    x_NXIK, k_NJK = _stack_rows(q_CK, kb_CK), split_tiles(k_CK)
    diagonal_NXIJ = 0.0
    for row_NIK, column_NJK, pairs_IJ in _diagonal_factors(decay, tile_bound):
        scores_NXIJ = _einsum(
            "...xik,...jk->...xij", x_NXIK * row_NIK[..., None, :, :], k_NJK * column_NJK
        )
        diagonal_NXIJ += _keep_pairs(scores_NXIJ, pairs_IJ)

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
    decay: Spans,
    tile_bound: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, Spans]:
    """Gradients of strict_scores: dq, dkb and dk [..., C, K], and those of the span sums.

    The cotangents must be 0 on and above the diagonal.
    """
    x_NXIK, k_NJK = _stack_rows(q_CK, kb_CK), split_tiles(k_CK)
    d_XCC = jnp.stack([d_q_CC, d_kb_CC], axis=-3)
    dx_NXIK, dk_NJK, d_sums = _off_diagonal_vjp(d_XCC, x_NXIK, k_NJK, decay)

    d_NXIJ = jnp.stack([_diagonal_tiles(d_q_CC), _diagonal_tiles(d_kb_CC)], axis=-3)
    halves = []
    for row_NIK, column_NJK, pairs_IJ in _diagonal_factors(decay, tile_bound):
        kept_NXIJ, row_NXIK = _keep_pairs(d_NXIJ, pairs_IJ), row_NIK[..., None, :, :]
        dx_part_NXIK = row_NXIK * _einsum("...xij,...jk->...xik", kept_NXIJ, k_NJK * column_NJK)
        dk_part_NJK = column_NJK * _einsum("...xij,...xik->...jk", kept_NXIJ, x_NXIK * row_NXIK)
        dx_NXIK, dk_NJK = dx_NXIK + dx_part_NXIK, dk_NJK + dk_part_NJK
        halves.append((_row_products(x_NXIK, dx_part_NXIK), k_NJK * dk_part_NJK))
    if tile_bound is None:
        d_sums = d_sums._replace(halves=tuple(halves))
    else:
        ((rows_NIK, columns_NJK),) = halves
        d_sums = d_sums._replace(row_NIK=d_sums.row_NIK + rows_NIK - columns_NJK)
    dq_CK, dkb_CK = (join_tiles(dx_NXIK[..., x, :, :]) for x in range(2))
    return dq_CK, dkb_CK, join_tiles(dk_NJK), d_sums


def _off_diagonal_vjp(
    d_XCC: jax.Array, x_NXIK: jax.Array, k_NJK: jax.Array, decay: Spans
) -> tuple[jax.Array, jax.Array, Spans]:
    num_tiles = k_NJK.shape[-3]
    dx_tiles, d_to_anchor = [jnp.zeros_like(x_NXIK[..., 0, :, :, :])], []
    dk_NJK = jnp.zeros_like(k_NJK)
    for r in range(1, num_tiles):
        row_XIK, column_CK = _off_diagonal_operands(x_NXIK, k_NJK, decay, r)
        d_XIC = d_XCC[..., r * TILE : (r + 1) * TILE, : r * TILE]
        dx_XIK = _einsum("...xic,...ck->...xik", d_XIC, column_CK)
        dx_tiles.append(dx_XIK * decay.row_NIK[..., r, None, :, :])
        dk_SJK = split_tiles(_einsum("...xic,...xik->...ck", d_XIC, row_XIK))
        dk_SJK = dk_SJK * _off_diagonal_columns(decay, r)
        d_to_anchor.append(jnp.sum(k_NJK[..., :r, :, :] * dk_SJK, axis=-2))
        dk_NJK = dk_NJK + _pad_dim(dk_SJK, -3, num_tiles - r)
    dx_NXIK = jnp.stack(dx_tiles, axis=-4)
    d_sums = Spans(
        row_NIK=_row_products(x_NXIK, dx_NXIK),
        column_NJK=k_NJK * dk_NJK,
        to_anchor=tuple(d_to_anchor),
        halves=(),
        start_NK=jnp.zeros_like(decay.start_NK),
        end_NK=jnp.zeros_like(decay.end_NK),
        total_K=jnp.zeros_like(decay.total_K),
    )
    return dx_NXIK, dk_NJK, d_sums


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


def _stack_rows(q_CK: jax.Array, kb_CK: jax.Array) -> jax.Array:
    return jnp.stack([split_tiles(q_CK), split_tiles(kb_CK)], axis=-3)


def _diagonal_tiles(x_CC: jax.Array) -> jax.Array:
    starts = range(0, x_CC.shape[-1], TILE)
    return jnp.stack([x_CC[..., s : s + TILE, s : s + TILE] for s in starts], axis=-3)


def _row_products(x_NXIK: jax.Array, dx_NXIK: jax.Array) -> jax.Array:
    # Not jnp.sum(x * dx, -3): XLA:CPU of jaxlib 0.10.2 crashes on such reductions at rank 7.
    q_NIK, kb_NIK = (x_NXIK[..., x, :, :] * dx_NXIK[..., x, :, :] for x in range(2))
    return q_NIK + kb_NIK


def _keep_pairs(x_NXIJ: jax.Array, pairs_IJ: np.ndarray) -> jax.Array:
    # A select, not a product: an entry that is left out may have overflowed.
    return jnp.where(jnp.broadcast_to(pairs_IJ, x_NXIJ.shape), x_NXIJ, 0.0)


def _diagonal_factors(
    decay: Spans, tile_bound: float | None
) -> list[tuple[jax.Array, jax.Array, np.ndarray]]:
    """Splits of exp(G_i - G_j) inside the diagonal tiles: (rows, columns, pairs they serve)."""
    if tile_bound is None:
        return [(*half, pairs) for half, (_, _, pairs) in zip(decay.halves, _LEVELS, strict=True)]
    # A power of two as the anchor's constant centres the range of the factors without rounding.
    shift = 2.0 ** round(0.5 * (TILE - 1) * -tile_bound / math.log(2.0))
    row_NIK = decay.row_NIK * shift
    return [(row_NIK, 1.0 / row_NIK, _STRICT)]


def _off_diagonal_columns(decay: Spans, r: int) -> jax.Array:
    return decay.column_NJK[..., :r, :, :] * decay.to_anchor[r - 1][..., None, :]


def _off_diagonal_operands(
    x_NXIK: jax.Array, k_NJK: jax.Array, decay: Spans, r: int
) -> tuple[jax.Array, jax.Array]:
    """Row tile r and all columns left of its diagonal tile, seen from the anchor of r."""
    row_XIK = x_NXIK[..., r, :, :, :] * decay.row_NIK[..., r, None, :, :]
    return row_XIK, join_tiles(k_NJK[..., :r, :, :] * _off_diagonal_columns(decay, r))
