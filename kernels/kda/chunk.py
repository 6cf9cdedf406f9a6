"""A chunk of one head, or half of one, as a Pallas program holds it: 2-D tiles and plain matmuls.

Everything here lowers to Triton: no slices, no gathers, no batched products, sizes that are powers
of two. Parts of a tile are named by masks instead.

A decayed score sum_c x_ic k_jc exp(G_ic - G_jc), i > j, needs exp(G_i - G_j) as a product of a row
and a column factor. `Split`s do that for disjoint sets of pairs:

- halvings: at block size s the pairs whose row lies in an odd block and whose column in the even
  block before it. The anchor is the border between the two, so both factors are at most 1, for any
  gate. A row is either on the row or on the column side, so one factor array serves both.
- tiles: the pairs inside a tile of 16 or 32 rows, if the gate is bounded. The anchor is the tile's
  start minus a constant, so the factors use the whole exponent range of bfloat16 and float32.

With a bounded gate the rows take the halvings down to the tiles, and the tiles; any other gate
takes the halvings down to single rows. No factor of a row sees a gate behind the row or its
anchor, and no anchor lies behind the row of a pair: the past does not depend on the future, not
even through rounding.

Letters: R rows of the tile, K key dim, S splits.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Carry = TypeVar("Carry")
Dot = Callable[..., jax.Array]
# dot_both(x, y, z): x and y times z's transpose.
DotBoth = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# row_sums(x)(mask) [R, K]: row i is the sum of the rows j of x where mask [R, R] is 1 and not 0, to
# float32 accuracy; the rows left out leave no trace.
RowSums = Callable[[jax.Array], Callable[[jax.Array], jax.Array]]
Exp2 = Callable[[jax.Array], jax.Array]


class Masks(NamedTuple):
    """0 and 1, made outside: a program would spend a register on every entry it makes."""

    splits: jax.Array  # [S, R, R]: the rows j whose log-decays row i sums for its factor
    sums: jax.Array  # [2, R, R]: the rows through i, and those behind i
    vjps: jax.Array  # [2, R, R]: their transposes


def masks(num_rows: int, log_tile: int) -> Masks:
    """The masks of so many rows: halvings down to the tiles, and the tiles unless log_tile is 0."""
    i_RR, j_RR = np.indices((num_rows, num_rows))
    splits = []
    for log_size in reversed(range(log_tile, num_rows.bit_length() - 1)):
        i_block_RR, j_block_RR = i_RR >> log_size, j_RR >> log_size
        odd_RR = i_block_RR % 2 == 1
        splits.append((i_block_RR == j_block_RR) & np.where(odd_RR, j_RR <= i_RR, j_RR > i_RR))
    if log_tile:
        same_RR = i_RR >> log_tile == j_RR >> log_tile
        splits.append(same_RR & (j_RR <= i_RR))
    sums = np.stack([j_RR <= i_RR, j_RR > i_RR])
    return Masks(np.stack(splits), sums, sums.swapaxes(1, 2))


def _num_halvings(num_rows: int, log_tile: int) -> int:
    return num_rows.bit_length() - 1 - log_tile


def pairs(num_rows: int, log_tile: int, number: int | jax.Array) -> jax.Array:
    """[R, R]: the pairs i > j of the split of this number; a halving's may be traced."""
    i_RR, j_RR = _pair(num_rows)
    if isinstance(number, int) and number == _num_halvings(num_rows, log_tile):
        return (i_RR >> log_tile == j_RR >> log_tile) & (i_RR > j_RR)
    log_size = num_rows.bit_length() - 2 - number
    i_block_RR, j_block_RR = i_RR >> log_size, j_RR >> log_size
    return (i_block_RR == j_block_RR + 1) & (i_block_RR & 1 == 1)


def _shift(bound: float, log_tile: int) -> float:
    """What a tile's exponents are moved by, so that both its factors have a float32 exponent."""
    return float(np.ceil(-bound * (1 << log_tile) / 2))


def start_factor(num_rows: int, bound: float, log_tile: int) -> float:
    """What Decays.from_start_shifted lacks: not 1 where one tile of 32 rows has all of them."""
    wide = 1 << log_tile == num_rows and log_tile > 4
    return 2.0 ** -_shift(bound, log_tile) if wide else 1.0


class Split(NamedTuple):
    """exp(G_i - G_j) = row_i * column_j for the `pairs` of this number."""

    number: int | jax.Array
    row_RK: jax.Array
    column_RK: jax.Array
    # Of a halving, whose two factors are one: the rows of odd blocks [R, 1].
    odd_R1: jax.Array | None


class Decays:
    """Decay factors between rows from their base-2 log-decays g [R, K], in multiples of `unit`.

    masks: of the log-decays, with `unit` for 1.
    log_tile: the pairs inside a tile of 2 ** log_tile rows take one product, for which half of the
    tile's log-decays, each above `bound`, must fit a float32 exponent, 126; 0 serves any g. Every
    exponent is a sum over a span of rows, never a difference of two longer sums: a strong decay
    elsewhere costs a weak one no accuracy. (But for to_end where a wide tile has all rows: beside
    bfloat16 it can spare that.) Factors are made when asked for: a program cannot hold all of them.
    """

    def __init__(
        self,
        g_RK: jax.Array,
        masks: Masks,
        unit: float,
        bound: float,
        log_tile: int,
        spans: RowSums,
        exp2: Exp2,
        unroll: bool = False,
    ) -> None:
        self.g_RK, self.masks, self.unit, self.log_tile = g_RK, masks, unit, log_tile
        self.unroll = unroll
        self.exp2, self.span = exp2, spans(g_RK)
        self.num_halvings = _num_halvings(g_RK.shape[0], log_tile)
        self._shift = _shift(bound, log_tile)
        self.start_factor = start_factor(g_RK.shape[0], bound, log_tile)
        self._sums: jax.Array | None = None
        self._tile: tuple[jax.Array, jax.Array] | None = None

    def from_start(self) -> jax.Array:
        """[R, K]: from the first row through the row."""
        if 1 << self.log_tile == self.g_RK.shape[0]:
            return self._tile_factors()[0] * 2.0**-self._shift
        return self.exp2(self.span(self.masks.sums[0]))

    def from_start_shifted(self) -> jax.Array:
        """[R, K]: from_start / start_factor, which may be what `scores` multiplies rows by."""
        return self.from_start() if self.start_factor == 1.0 else self._tile_factors()[0]

    def to_end(self) -> jax.Array:
        """[R, K]: of the rows behind the row."""
        if self.start_factor == 1.0:
            return self.exp2(self.span(self.masks.sums[1]))
        # Of the tile's own sums, so that it is 1 in the last row.
        return self._tile_factors()[1] * self.exp2(self._tile_total() + self._shift)

    def total(self) -> jax.Array:
        """[1, K]: of all rows."""
        if self.start_factor == 1.0:
            return self.exp2(self.unit * jnp.sum(self.g_RK, axis=0, keepdims=True))
        return self.exp2(self._tile_total())

    def _tile_total(self) -> jax.Array:
        num_rows = self.g_RK.shape[0]
        row_R1 = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
        last_RK = jnp.where(row_R1 == num_rows - 1, self._tile_sums(), 0.0)
        return jnp.sum(last_RK, axis=0, keepdims=True)

    def _tile_sums(self) -> jax.Array:
        if self._sums is None:
            self._sums = self.span(self.masks.splits[self.num_halvings])
        return self._sums

    def _tile_factors(self) -> tuple[jax.Array, jax.Array]:
        if self._tile is None:
            summed_RK = self._tile_sums()
            if 2 * self._shift < 127:
                scale = 2.0**self._shift  # behind the exponential, where it costs no bits
                self._tile = self.exp2(summed_RK) * scale, self.exp2(-summed_RK) / scale
            else:
                # Not what the product starts from: total would lose the weakest decays, which a
                # long sequence adds up.
                shifted_RK = summed_RK + self._shift
                self._tile = self.exp2(shifted_RK), self.exp2(-shifted_RK)
        return self._tile

    def accumulate(self, add: Callable[[Split, Carry], Carry], carry: Carry) -> Carry:
        """Folds the splits, which together cover every i > j once.

        A loop unless unroll: unrolled, Triton would keep the tiles of all splits alive.
        """
        num_rows = self.g_RK.shape[0]
        row_R1 = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)

        def halve(n: jax.Array, carry: Carry) -> Carry:
            near_RK = self.exp2(self.span(self.masks.splits[n]))
            odd_R1 = (row_R1 >> (num_rows.bit_length() - 2 - n)) & 1 == 1
            return add(Split(n, near_RK, near_RK, odd_R1), carry)

        if self.num_halvings == 1 or self.unroll:
            for n in range(self.num_halvings):
                carry = halve(n, carry)
        elif self.num_halvings:
            carry = jax.lax.fori_loop(0, self.num_halvings, halve, carry)
        if self.log_tile:
            carry = add(Split(self.num_halvings, *self._tile_factors(), None), carry)
        return carry


def _pair(size: int) -> tuple[jax.Array, jax.Array]:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (size, size), n) for n in range(2))
    return rows, columns


def diagonal(x_RR: jax.Array) -> jax.Array:
    """The diagonal as a column [R, 1]."""
    i_RR, j_RR = _pair(x_RR.shape[0])
    return jnp.sum(jnp.where(i_RR == j_RR, x_RR, 0.0), axis=1, keepdims=True)


def scores(
    before: tuple[jax.Array, jax.Array],
    q_RK: jax.Array,
    k_RK: jax.Array,
    decays: Decays,
    narrow: jnp.dtype,
    dot_both: DotBoth,
) -> tuple[jax.Array, jax.Array]:
    """Decayed scores (q on k, k on k), float32, where i > j; the rest is for `cut` to remove.

    The channels may be a part of the whole; before: the scores of the parts before.
    """

    def add(split: Split, carry: tuple) -> tuple:
        column_RK = (k_RK * split.column_RK).astype(narrow)
        row_RK = column_RK if split.odd_R1 is not None else (k_RK * split.row_RK).astype(narrow)
        of_k_RR, of_q_RR = dot_both(row_RK, (q_RK * split.row_RK).astype(narrow), column_RK)
        if decays.num_halvings:
            pairs_RR = pairs(q_RK.shape[0], decays.log_tile, split.number)
            # A select and not a product: entries outside the mask may have overflowed.
            of_q_RR, of_k_RR = (jnp.where(pairs_RR, x_RR, 0.0) for x_RR in (of_q_RR, of_k_RR))
        return carry[0] + of_q_RR, carry[1] + of_k_RR

    return decays.accumulate(add, before)


def cut(of_q_RR: jax.Array, of_k_RR: jax.Array, own_R1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores of q on k with the diagonal, own, and of k on k strictly below it."""
    i_RR, j_RR = _pair(of_q_RR.shape[0])
    of_q_RR, of_k_RR = (jnp.where(i_RR > j_RR, x_RR, 0.0) for x_RR in (of_q_RR, of_k_RR))
    return jnp.where(i_RR == j_RR, own_R1, of_q_RR), of_k_RR


class ScoreGradients(NamedTuple):
    dq_RK: jax.Array
    dk_RK: jax.Array
    # Gradient of the cumulative log-decay at the row: + of the pairs it is the row of, - of those
    # it is the column of.
    dcumulative_RK: jax.Array


def cut_pairs(
    dp_RR: jax.Array, dl_RR: jax.Array, log_tile: int
) -> list[tuple[jax.Array, jax.Array]]:
    """The gradients of the scores of every split, as scores_vjp takes them."""
    num_rows, cut = dp_RR.shape[0], []
    num_halvings = _num_halvings(num_rows, log_tile)
    for n in range(num_halvings + (log_tile > 0)):
        pairs_RR = pairs(num_rows, log_tile, n)
        dp_n_RR, dl_n_RR = (jnp.where(pairs_RR, d_RR, 0.0) for d_RR in (dp_RR, dl_RR))
        # A row of a halving is on one side only, so one product with both serves both.
        cut.append((dp_n_RR, dl_n_RR + dl_n_RR.T if n < num_halvings else dl_n_RR))
    return cut


def scores_vjp(
    before: ScoreGradients,
    of_split: Callable[[int | jax.Array], tuple[jax.Array, jax.Array]],
    q_RK: jax.Array,
    k_RK: jax.Array,
    decays: Decays,
    dot: Dot,
    rounded: Callable[[jax.Array], jax.Array],
) -> ScoreGradients:
    """Adds to `before` the gradients from those of the decayed scores, pairs i > j only.

    of_split(n): dp, the gradient of the scores of q on k, and dl, of those of k on k (cut_pairs).
    Both ends of a pair multiply the same rounded operands, so that what a pair adds to its row's
    cumulative log-decay and takes from its column's cancels to float32 accuracy.
    """
    wide = q_RK.dtype

    def add(split: Split, d: ScoreGradients) -> ScoreGradients:
        # In this order few tiles are alive at once.
        n, row_RK, column_RK, odd_R1 = split
        dp_RR, dl_RR = of_split(n)
        dq_RK, dk_RK, da_RK = d
        k_of_RK = rounded(k_RK * column_RK)
        from_p_RK = dot(dp_RR, k_of_RK)
        q_of_RK = rounded(q_RK * row_RK)
        dq_RK += row_RK * from_p_RK
        da_RK += q_of_RK.astype(wide) * from_p_RK
        of_column_RK = dot(dp_RR, q_of_RK, a_columns=True)
        if odd_R1 is not None:
            of_column_RK += dot(dl_RR, k_of_RK)
            dk_RK += column_RK * of_column_RK
            da_RK += k_of_RK.astype(wide) * jnp.where(odd_R1, of_column_RK, -of_column_RK)
        else:
            k_row_RK = rounded(k_RK * row_RK)
            of_column_RK += dot(dl_RR, k_row_RK, a_columns=True)
            dk_RK += column_RK * of_column_RK
            da_RK -= k_of_RK.astype(wide) * of_column_RK
            from_l_RK = dot(dl_RR, k_of_RK)
            dk_RK += row_RK * from_l_RK
            da_RK += k_row_RK.astype(wide) * from_l_RK
        return ScoreGradients(dq_RK, dk_RK, da_RK)

    return decays.accumulate(add, before)
