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
# row_sums(x)(mask) [R, K]: row i is the sum of the rows j of x where mask [R, R] is 1 and not 0, to
# float32 accuracy; the rows left out leave no trace.
RowSums = Callable[[jax.Array], Callable[[jax.Array], jax.Array]]
Exp2 = Callable[[jax.Array], jax.Array]


class Masks(NamedTuple):
    """0 and 1, made outside: a program would spend a register on every entry it makes."""

    # [splits + 2, R, R]: the rows j whose log-decays row i sums: of each split, from the start
    # through i, and behind i.
    spans: jax.Array
    pairs: jax.Array  # [splits, R, R]
    vjps: jax.Array  # [2, R, R]: transposes of the last two spans


def masks(num_rows: int, log_tile: int) -> Masks:
    """The masks of so many rows: halvings down to the tiles, and the tiles unless log_tile is 0."""
    i_RR, j_RR = np.indices((num_rows, num_rows))
    spans, pairs = [], []
    for log_size in reversed(range(log_tile, num_rows.bit_length() - 1)):
        i_block_RR, j_block_RR = i_RR >> log_size, j_RR >> log_size
        odd_RR = i_block_RR % 2 == 1
        spans.append((i_block_RR == j_block_RR) & np.where(odd_RR, j_RR <= i_RR, j_RR > i_RR))
        pairs.append((i_block_RR == j_block_RR + 1) & odd_RR)
    if log_tile:
        same_RR = i_RR >> log_tile == j_RR >> log_tile
        spans.append(same_RR & (j_RR <= i_RR))
        pairs.append(same_RR & (j_RR < i_RR))
    through_RR, behind_RR = j_RR <= i_RR, j_RR > i_RR
    return Masks(
        np.stack([*spans, through_RR, behind_RR]),
        np.stack(pairs),
        np.stack([through_RR.T, behind_RR.T]),
    )


class Split(NamedTuple):
    """exp(G_i - G_j) = row_i * column_j for the pairs of the mask of this number."""

    number: int | jax.Array
    row_RK: jax.Array
    column_RK: jax.Array
    # Of a halving, whose two factors are one: the rows of odd blocks [R, 1].
    odd_R1: jax.Array | None


class Decays:
    """Decay factors between rows from their base-2 log-decays g [R, K].

    log_tile: the pairs inside a tile of 2 ** log_tile rows take one product, for which half of the
    tile's log-decays, each above `bound`, must fit a float32 exponent, 126; 0 serves any g. Every
    exponent is a sum over a span of rows, never a difference of two longer sums: a strong decay
    elsewhere costs a weak one no accuracy. Factors are made when asked for: a program cannot hold
    all of them.
    """

    def __init__(
        self,
        g_RK: jax.Array,
        masks: Masks,
        bound: float,
        log_tile: int,
        spans: RowSums,
        exp2: Exp2,
    ) -> None:
        self.g_RK, self.masks, self.log_tile = g_RK, masks, log_tile
        self.exp2, self.span, self.num_splits = exp2, spans(g_RK), len(masks.spans) - 2
        self._shift = float(np.ceil(-bound * (1 << log_tile) / 2))
        self._tile: tuple[jax.Array, jax.Array] | None = None

    def from_start(self) -> jax.Array:
        """[R, K]: from the first row through the row."""
        if 1 << self.log_tile == self.g_RK.shape[0]:
            return self._tile_factors()[0] * 2.0**-self._shift
        return self.exp2(self.span(self.masks.spans[self.num_splits]))

    def to_end(self) -> jax.Array:
        """[R, K]: of the rows behind the row."""
        return self.exp2(self.span(self.masks.spans[self.num_splits + 1]))

    def total(self) -> jax.Array:
        """[1, K]: of all rows."""
        return self.exp2(jnp.sum(self.g_RK, axis=0, keepdims=True))

    def _tile_factors(self) -> tuple[jax.Array, jax.Array]:
        if self._tile is None:
            summed_RK = self.span(self.masks.spans[self.num_splits - 1])
            if 2 * self._shift < 127:
                scale = 2.0**self._shift  # behind the exponential, where it costs no bits
                self._tile = self.exp2(summed_RK) * scale, self.exp2(-summed_RK) / scale
            else:
                exponents = summed_RK + self._shift, -self._shift - summed_RK
                self._tile = self.exp2(exponents[0]), self.exp2(exponents[1])
        return self._tile

    def accumulate(self, add: Callable[[Split, Carry], Carry], carry: Carry) -> Carry:
        """Folds the splits, which together cover every i > j once.

        A loop and not a list: unrolled, the compiler would keep the tiles of all splits alive.
        """
        num_rows = self.g_RK.shape[0]
        row_R1 = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
        num_halvings = self.num_splits - (self.log_tile > 0)

        def halve(n: jax.Array, carry: Carry) -> Carry:
            near_RK = self.exp2(self.span(self.masks.spans[n]))
            odd_R1 = (row_R1 >> (num_rows.bit_length() - 2 - n)) % 2 == 1
            return add(Split(n, near_RK, near_RK, odd_R1), carry)

        if num_halvings == 1:
            carry = halve(0, carry)
        elif num_halvings:
            carry = jax.lax.fori_loop(0, num_halvings, halve, carry)
        if self.log_tile:
            carry = add(Split(num_halvings, *self._tile_factors(), None), carry)
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
    dot: Dot,
) -> tuple[jax.Array, jax.Array]:
    """Decayed scores (q on k with the diagonal, k on k strictly below it), float32.

    The channels may be a part of the whole; before: the scores of the parts before.
    """
    i_RR, j_RR = _pair(q_RK.shape[0])
    own_R1 = jnp.sum(q_RK * k_RK, axis=1, keepdims=True)
    of_q_RR = jnp.where(i_RR == j_RR, before[0] + own_R1, before[0])

    def add(split: Split, carry: tuple) -> tuple:
        of_q_RR, of_k_RR = carry
        pairs_RR = decays.masks.pairs[split.number] != 0
        column_RK = (k_RK * split.column_RK).astype(narrow)
        row_RK = column_RK if split.odd_R1 is not None else (k_RK * split.row_RK).astype(narrow)
        # A select and not a product: entries outside the mask may have overflowed.
        of_k_RR += jnp.where(pairs_RR, dot(row_RK, column_RK, b_rows=True), 0.0)
        row_RK = (q_RK * split.row_RK).astype(narrow)
        of_q_RR += jnp.where(pairs_RR, dot(row_RK, column_RK, b_rows=True), 0.0)
        return of_q_RR, of_k_RR

    return decays.accumulate(add, (of_q_RR, before[1]))


class ScoreGradients(NamedTuple):
    dq_RK: jax.Array
    dk_RK: jax.Array
    # Gradient of the cumulative log-decay at the row: + of the pairs it is the row of, - of those
    # it is the column of.
    dcumulative_RK: jax.Array


def cut_pairs(
    dp_RR: jax.Array, dl_RR: jax.Array, n: int, is_halving: bool, masks: Masks
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the scores of split n, as scores_vjp takes them."""
    pairs_RR = masks.pairs[n]
    dp_RR, dl_RR = dp_RR * pairs_RR, dl_RR * pairs_RR
    # A row of a halving is on one side only, so one product with both serves both.
    return dp_RR, dl_RR + dl_RR.T if is_halving else dl_RR


def scores_vjp(
    before: ScoreGradients,
    dp_SRR: jax.Array,
    dl_SRR: jax.Array,
    q_RK: jax.Array,
    k_RK: jax.Array,
    decays: Decays,
    dot: Dot,
) -> ScoreGradients:
    """Adds to `before` the gradients from those of the decayed scores, pairs i > j only.

    dp is the gradient of the scores of q on k, dl of those of k on k, both per split (cut_pairs).
    Both ends of a pair multiply the same rounded operands, so that what a pair adds to its row's
    cumulative log-decay and takes from its column's cancels to float32 accuracy.
    """
    wide = q_RK.dtype

    def add(split: Split, d: ScoreGradients) -> ScoreGradients:
        # In this order few tiles are alive at once.
        n, row_RK, column_RK, odd_R1 = split
        dq_RK, dk_RK, da_RK = d
        narrow = dp_SRR.dtype
        k_of_RK = (k_RK * column_RK).astype(narrow)
        from_p_RK = dot(dp_SRR[n], k_of_RK)
        q_of_RK = (q_RK * row_RK).astype(narrow)
        dq_RK += row_RK * from_p_RK
        da_RK += q_of_RK.astype(wide) * from_p_RK
        of_column_RK = dot(dp_SRR[n], q_of_RK, a_columns=True)
        if odd_R1 is not None:
            of_column_RK += dot(dl_SRR[n], k_of_RK)
            dk_RK += column_RK * of_column_RK
            da_RK += k_of_RK.astype(wide) * jnp.where(odd_R1, of_column_RK, -of_column_RK)
        else:
            k_row_RK = (k_RK * row_RK).astype(narrow)
            of_column_RK += dot(dl_SRR[n], k_row_RK, a_columns=True)
            dk_RK += column_RK * of_column_RK
            da_RK -= k_of_RK.astype(wide) * of_column_RK
            from_l_RK = dot(dl_SRR[n], k_of_RK)
            dk_RK += row_RK * from_l_RK
            da_RK += k_row_RK.astype(wide) * from_l_RK
        return ScoreGradients(dq_RK, dk_RK, da_RK)

    return decays.accumulate(add, before)
