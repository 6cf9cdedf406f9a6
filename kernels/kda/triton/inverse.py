"""Inverse of I + L inside a Triton program, L strictly lower triangular; no powers of L, so stable.

Letters: C chunk rows, R rows of half a chunk, N tiles of 16 rows, I rows and J columns
of a tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from kernels.kda.triton.plan import Plan, half_rows, synchronize

LOG_TILE = 4
TILE = 1 << LOG_TILE


def _iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)


def unit_lower_inverse(
    plan: Plan, lower: tuple[jax.Array, ...], scratch: jax.Array
) -> tuple[jax.Array, ...]:
    """The blocks (first half, across, second half) of the inverse from those of L, each [R, R].

    The 16-row tiles on the diagonal by substitution in float32, all at once; then
    X <- X - X L' X doubles the block size, L' being what lies between two blocks.

    scratch: a reference [C, R] of the wide dtype. Through it every thread gets the factors of its
    rows without an exchange between threads at every step.
    """
    first_RR, across_RR, second_RR = lower
    halves = half_rows(plan, 0), half_rows(plan, 1)
    scratch[halves[0], :], scratch[halves[1], :] = first_RR, second_RR
    synchronize(plan)
    _invert_tiles(plan, scratch)
    synchronize(plan)
    first_RR = _merge(plan, scratch[halves[0], :], first_RR)
    second_RR = _merge(plan, scratch[halves[1], :], second_RR)
    across_RR = plan.dot(second_RR, across_RR)
    return first_RR, -plan.dot(across_RR, first_RR), second_RR


def _invert_tiles(plan: Plan, scratch: jax.Array) -> None:
    """Replaces the tiles of L in the scratch by their inverses."""
    # Loads that are contiguous nowhere give the last dim to the threads, so that with this order
    # of dims a thread holds whole columns of tiles.
    shape_INJ = (TILE, plan.num_rows // TILE, TILE)
    i_INJ, j_INJ = _iota(shape_INJ, 0), _iota(shape_INJ, 2)
    row_INJ = _iota(shape_INJ, 1) * TILE + i_INJ
    start_INJ = row_INJ % plan.half - i_INJ  # of the tile, within its half
    x_INJ = jnp.where(i_INJ == j_INJ, 1.0, 0.0).astype(plan.wide)
    for r in range(TILE - 1):
        factor_INJ = plt.load(scratch.at[row_INJ, start_INJ + r])
        pivot_1NJ = jnp.sum(jnp.where(i_INJ == r, x_INJ, 0.0), axis=0, keepdims=True)
        x_INJ -= jnp.where(i_INJ > r, factor_INJ, 0.0) * pivot_1NJ
    synchronize(plan)
    plt.store(scratch.at[row_INJ, start_INJ + j_INJ], x_INJ)


def _merge(plan: Plan, tiles_RR: jax.Array, l_RR: jax.Array) -> jax.Array:
    """tiles: the inverted tiles, anything beside them."""
    rows, columns = _iota(l_RR.shape, 0), _iota(l_RR.shape, 1)
    x_RR = jnp.where(rows >> LOG_TILE == columns >> LOG_TILE, tiles_RR, 0.0)
    for log_size in range(LOG_TILE, plan.half.bit_length() - 1):
        i_RR, j_RR = rows >> log_size, columns >> log_size
        between_RR = jnp.where((i_RR == j_RR + 1) & (j_RR % 2 == 0), l_RR, 0.0)
        x_RR = x_RR - plan.dot(plan.dot(x_RR, between_RR), x_RR)
    return x_RR
