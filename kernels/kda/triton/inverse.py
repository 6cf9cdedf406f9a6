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
    # In this order of dims, which the loads keep, a thread holds whole columns of tiles.
    shape_JNI = (TILE, plan.num_rows // TILE, TILE)
    j_JNI, i_JNI = _iota(shape_JNI, 0), _iota(shape_JNI, 2)
    row_JNI = _iota(shape_JNI, 1) * TILE + i_JNI
    start_JNI = row_JNI % plan.half - i_JNI  # of the tile, within its half
    x_JNI = jnp.where(i_JNI == j_JNI, 1.0, 0.0).astype(plan.wide)
    for r in range(TILE - 1):
        factor_JNI = plt.load(scratch.at[row_JNI, start_JNI + r])
        pivot_JN1 = jnp.sum(jnp.where(i_JNI == r, x_JNI, 0.0), axis=2, keepdims=True)
        x_JNI -= jnp.where(i_JNI > r, factor_JNI, 0.0) * pivot_JN1
    synchronize(plan)
    plt.store(scratch.at[row_JNI, start_JNI + j_JNI], x_JNI)


def _merge(plan: Plan, tiles_RR: jax.Array, l_RR: jax.Array) -> jax.Array:
    """tiles: the inverted tiles, anything beside them."""
    rows, columns = _iota(l_RR.shape, 0), _iota(l_RR.shape, 1)
    x_RR = jnp.where(rows >> LOG_TILE == columns >> LOG_TILE, tiles_RR, 0.0)
    for log_size in range(LOG_TILE, plan.half.bit_length() - 1):
        i_RR, j_RR = rows >> log_size, columns >> log_size
        between_RR = jnp.where((i_RR == j_RR + 1) & (j_RR % 2 == 0), l_RR, 0.0)
        x_RR = x_RR - plan.dot(plan.dot(x_RR, between_RR), x_RR)
    return x_RR
