"""One chunk of one head, as a Pallas program holds it: 2-D tiles and plain matmuls.

Everything here lowers to Triton: no slices, no gathers, no batched products, sizes that are powers
of two. Parts of a tile are named by masks instead.

A decayed score sum_c x_ic k_jc exp(G_ic - G_jc), i > j, needs exp(G_i - G_j) as a product of a row
and a column factor. `Split`s do that for disjoint sets of pairs:

- halvings: at block size s the pairs whose row lies in an odd block and whose column in the even
  block before it. The anchor is the border between the two, so both factors are at most 1, for any
  gate. A row is either on the row or on the column side, so one factor array serves both.
- tiles: the pairs inside a tile of 16 or 32 rows, if the gate is bounded. The anchor is the tile's
  start minus a constant, so the factors use the whole exponent range of bfloat16 and float32.

With a bounded gate a chunk of 64 takes the halvings down to the tiles, and the tiles; any other
gate takes the halvings down to single rows. No factor of a row sees a gate behind the row or its
anchor, and no anchor lies behind the row of a pair: the past does not depend on the future, not
even through rounding.

Letters: C chunk rows, K key dim, S splits, N tiles of 16 rows, I rows of a tile.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

LOG_TILE = 4
TILE = 1 << LOG_TILE

Carry = TypeVar("Carry")
Dot = Callable[..., jax.Array]
# row_sums(x)(mask) [C, K]: row i is the sum of the rows j of x where mask [C, C] is 1 and not 0, to
# float32 accuracy; the rows left out leave no trace.
RowSums = Callable[[jax.Array], Callable[[jax.Array], jax.Array]]
Exp2 = Callable[[jax.Array], jax.Array]


class Masks(NamedTuple):
    """0 and 1, made outside: a program would spend a register on every entry it makes."""

    # [splits + 2, C, C]: the rows j whose log-decays row i sums: of each split, from the chunk's
    # start through i, and behind i.
    spans: jax.Array
    pairs: jax.Array  # [splits, C, C]
    vjps: jax.Array  # [2, C, C]: transposes of the last two spans


def masks(num_rows: int, log_tile: int) -> Masks:
    """The masks of a chunk: halvings down to the tiles, and the tiles unless log_tile is 0."""
    i_CC, j_CC = np.indices((num_rows, num_rows))
    spans, pairs = [], []
    for log_size in reversed(range(log_tile, num_rows.bit_length() - 1)):
        i_block_CC, j_block_CC = i_CC >> log_size, j_CC >> log_size
        odd_CC = i_block_CC % 2 == 1
        spans.append((i_block_CC == j_block_CC) & np.where(odd_CC, j_CC <= i_CC, j_CC > i_CC))
        pairs.append((i_block_CC == j_block_CC + 1) & odd_CC)
    if log_tile:
        same_CC = i_CC >> log_tile == j_CC >> log_tile
        spans.append(same_CC & (j_CC <= i_CC))
        pairs.append(same_CC & (j_CC < i_CC))
    through_CC, behind_CC = j_CC <= i_CC, j_CC > i_CC
    return Masks(
        np.stack([*spans, through_CC, behind_CC]),
        np.stack(pairs),
        np.stack([through_CC.T, behind_CC.T]),
    )


class Split(NamedTuple):
    """exp(G_i - G_j) = row_i * column_j for the pairs of the mask of this number."""

    number: int | jax.Array
    row_CK: jax.Array
    column_CK: jax.Array
    # Of a halving, whose two factors are one: the rows of odd blocks [C, 1].
    odd_C1: jax.Array | None


class Decays:
    """Decay factors of one chunk from its base-2 log-decays g [C, K].

    log_tile: the pairs inside a tile of 2 ** log_tile rows take one product, for which half of the
    tile's log-decays, each above `bound`, must fit a float32 exponent, 126; 0 serves any g. Every
    exponent is a sum over a span of rows, never a difference of two longer sums: a strong decay
    elsewhere costs a weak one no accuracy. Factors are made when asked for: a program cannot hold
    all of them.
    """

    def __init__(
        self,
        g_CK: jax.Array,
        masks: Masks,
        bound: float,
        log_tile: int,
        spans: RowSums,
        exp2: Exp2,
    ) -> None:
        self.g_CK, self.masks, self.bound, self.log_tile = g_CK, masks, bound, log_tile
        self.exp2, self.span, self.num_splits = exp2, spans(g_CK), masks.pairs.shape[0]

    def from_start(self) -> jax.Array:
        """[C, K]: from the chunk's start through the row."""
        return self.exp2(self.span(self.masks.spans[self.num_splits]))

    def to_end(self) -> jax.Array:
        """[C, K]: of the rows behind the row."""
        return self.exp2(self.span(self.masks.spans[self.num_splits + 1]))

    def total(self) -> jax.Array:
        """[1, K]: of the whole chunk."""
        return self.exp2(jnp.sum(self.g_CK, axis=0, keepdims=True))

    def accumulate(self, add: Callable[[Split, Carry], Carry], carry: Carry) -> Carry:
        """Folds the splits, which together cover every i > j once.

        A loop and not a list: unrolled, the compiler would keep the tiles of all splits alive.
        """
        num_rows = self.g_CK.shape[0]
        row_C1 = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
        num_halvings = self.num_splits - (self.log_tile > 0)

        def halve(n: jax.Array, carry: Carry) -> Carry:
            near_CK = self.exp2(self.span(self.masks.spans[n]))
            odd_C1 = (row_C1 >> (num_rows.bit_length() - 2 - n)) % 2 == 1
            return add(Split(n, near_CK, near_CK, odd_C1), carry)

        if num_halvings:
            carry = jax.lax.fori_loop(0, num_halvings, halve, carry)
        if self.log_tile:
            shift = -self.bound * (1 << self.log_tile) / 2
            shifted_CK = self.span(self.masks.spans[num_halvings]) + shift
            row_CK, column_CK = self.exp2(shifted_CK), self.exp2(-shifted_CK)
            carry = add(Split(num_halvings, row_CK, column_CK, None), carry)
        return carry


def _pair(size: int) -> tuple[jax.Array, jax.Array]:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (size, size), n) for n in range(2))
    return rows, columns


def diagonal(x_CC: jax.Array) -> jax.Array:
    """The diagonal as a column [C, 1]."""
    i_CC, j_CC = _pair(x_CC.shape[0])
    return jnp.sum(jnp.where(i_CC == j_CC, x_CC, 0.0), axis=1, keepdims=True)


def scores(
    before: tuple[jax.Array, jax.Array],
    q_CK: jax.Array,
    k_CK: jax.Array,
    decays: Decays,
    narrow: jnp.dtype,
    dot: Dot,
) -> tuple[jax.Array, jax.Array]:
    """Decayed scores (q on k with the diagonal, k on k strictly below it), float32.

    The channels may be a part of the whole; before: the scores of the parts before.
    """
    i_CC, j_CC = _pair(q_CK.shape[0])
    own_C1 = jnp.sum(q_CK * k_CK, axis=1, keepdims=True)
    of_q_CC = jnp.where(i_CC == j_CC, before[0] + own_C1, before[0])

    def add(split: Split, carry: tuple) -> tuple:
        of_q_CC, of_k_CC = carry
        pairs_CC = decays.masks.pairs[split.number] != 0
        column_CK = (k_CK * split.column_CK).astype(narrow)
        row_CK = column_CK if split.odd_C1 is not None else (k_CK * split.row_CK).astype(narrow)
        # A select and not a product: entries outside the mask may have overflowed.
        of_k_CC += jnp.where(pairs_CC, dot(row_CK, column_CK, b_rows=True), 0.0)
        row_CK = (q_CK * split.row_CK).astype(narrow)
        of_q_CC += jnp.where(pairs_CC, dot(row_CK, column_CK, b_rows=True), 0.0)
        return of_q_CC, of_k_CC

    return decays.accumulate(add, (of_q_CC, before[1]))


def _iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)


def unit_lower_inverse(l_CC: jax.Array, dot: Dot) -> jax.Array:
    """Inverse of I + L, L strictly lower triangular; no powers of L, so stable.

    The 16-row tiles on the diagonal are inverted together, by substitution in float32; then
    X <- X - X L' X doubles the block size, L' being what lies between two blocks.
    """
    num_rows = l_CC.shape[0]
    num_tiles = num_rows // TILE
    shape = (num_tiles, TILE, num_tiles, TILE)
    own_tile = _iota(shape, 0) == _iota(shape, 2)
    l_NII = jnp.sum(jnp.where(own_tile, l_CC.reshape(shape), 0.0), axis=2)
    shape_NII = (num_tiles, TILE, TILE)
    i_NII, j_NII = _iota(shape_NII, 1), _iota(shape_NII, 2)

    def eliminate(r: int, x_NII: jax.Array) -> jax.Array:
        factor_NI1 = jnp.sum(jnp.where(j_NII == r, l_NII, 0.0), axis=2, keepdims=True)
        row_N1I = jnp.sum(jnp.where(i_NII == r, x_NII, 0.0), axis=1, keepdims=True)
        return x_NII - factor_NI1 * row_N1I

    identity_NII = jnp.where(i_NII == j_NII, 1.0, 0.0).astype(l_CC.dtype)
    x_NII = jax.lax.fori_loop(0, TILE - 1, eliminate, identity_NII)
    x_CC = jnp.where(own_tile, x_NII[:, :, None, :], 0.0).reshape(num_rows, num_rows)
    for log_size in range(LOG_TILE, num_rows.bit_length() - 1):
        i_CC, j_CC = (block >> log_size for block in _pair(num_rows))
        between_CC = jnp.where((i_CC == j_CC + 1) & (j_CC % 2 == 0), l_CC, 0.0)
        x_CC = x_CC - dot(dot(x_CC, between_CC, precise=True), x_CC, precise=True)
    return x_CC


class ScoreGradients(NamedTuple):
    dq_CK: jax.Array
    dk_CK: jax.Array
    # Gradient of the cumulative log-decay at the row: + of the pairs it is the row of, - of those
    # it is the column of.
    dcumulative_CK: jax.Array


def cut_pairs(
    dp_CC: jax.Array, dl_CC: jax.Array, n: int, is_halving: bool, masks: Masks
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the scores of split n, as scores_vjp takes them."""
    pairs_CC = masks.pairs[n]
    dp_CC, dl_CC = dp_CC * pairs_CC, dl_CC * pairs_CC
    # A row of a halving is on one side only, so one product with both serves both.
    return dp_CC, dl_CC + dl_CC.T if is_halving else dl_CC


def scores_vjp(
    before: ScoreGradients,
    dp_SCC: jax.Array,
    dl_SCC: jax.Array,
    q_CK: jax.Array,
    k_CK: jax.Array,
    decays: Decays,
    dot: Dot,
) -> ScoreGradients:
    """Adds to `before` the gradients from those of the decayed scores, pairs i > j only.

    dp is the gradient of the scores of q on k, dl of those of k on k, both per split (cut_pairs).
    Both ends of a pair multiply the same rounded operands, so that what a pair adds to its row's
    cumulative log-decay and takes from its column's cancels to float32 accuracy.
    """
    wide = q_CK.dtype

    def add(split: Split, d: ScoreGradients) -> ScoreGradients:
        # In this order few tiles are alive at once.
        n, row_CK, column_CK, odd_C1 = split
        dq_CK, dk_CK, da_CK = d
        narrow = dp_SCC.dtype
        k_of_CK = (k_CK * column_CK).astype(narrow)
        from_p_CK = dot(dp_SCC[n], k_of_CK)
        q_of_CK = (q_CK * row_CK).astype(narrow)
        dq_CK += row_CK * from_p_CK
        da_CK += q_of_CK.astype(wide) * from_p_CK
        of_column_CK = dot(dp_SCC[n], q_of_CK, a_columns=True)
        if odd_C1 is not None:
            of_column_CK += dot(dl_SCC[n], k_of_CK)
            dk_CK += column_CK * of_column_CK
            da_CK += k_of_CK.astype(wide) * jnp.where(odd_C1, of_column_CK, -of_column_CK)
        else:
            k_row_CK = (k_CK * row_CK).astype(narrow)
            of_column_CK += dot(dl_SCC[n], k_row_CK, a_columns=True)
            dk_CK += column_CK * of_column_CK
            da_CK -= k_of_CK.astype(wide) * of_column_CK
            from_l_CK = dot(dl_SCC[n], k_of_CK)
            dk_CK += row_CK * from_l_CK
            da_CK += k_row_CK.astype(wide) * from_l_CK
        return ScoreGradients(dq_CK, dk_CK, da_CK)

    return decays.accumulate(add, before)
