"""Dispatch of tokens to rows grouped by expert, and back, by gathers alone.

M tokens (flattened), J choices of a token, A assignments = M * J, R rows, E groups: experts, or
the devices that hold them. Each group's rows are padded to a multiple of `row_block`, so that a
block of rows has one expert (kernels.grouped_matmul's group_multiple).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Plan(NamedTuple):
    """Where every assignment goes."""

    row_of_assignment_MJ: jax.Array  # int32; R where there is no row for it
    token_of_row_R: jax.Array  # int32; 0 on padding rows
    choice_of_row_R: jax.Array  # int32; 0 on padding rows
    filled_R: jax.Array  # bool, False on padding rows
    group_sizes_E: jax.Array  # int32, multiples of row_block
    dropped: jax.Array  # int32, assignments for which the rows did not suffice


def num_rows(num_assignments: int, num_groups: int, row_block: int) -> int:
    """R: an upper bound of the padded rows, whatever the router chose."""
    most_groups = min(num_groups, num_assignments)
    padded = num_assignments + most_groups * (row_block - 1)
    return padded // row_block * row_block


def make_plan(
    ids_MJ: jax.Array,
    num_groups: int,
    row_block: int = 1,
    *,
    rows: int | None = None,
    group_rows: int | None = None,
) -> Plan:
    """Sorts assignments by group (stable, so by token within a group) and pads each group.

    Args:
      ids_MJ: the group of every assignment; num_groups for one that is of no group here.
      row_block: groups are padded to multiples of it.
      rows: R, a multiple of row_block; None: enough for all assignments. What does not fit is
        counted in `dropped`.
      group_rows: lay out every group over exactly so many rows instead, and R is all of them.
    """
    M, J = ids_MJ.shape
    ids_A = ids_MJ.reshape(-1)
    A = ids_A.shape[0]
    order_A = jnp.argsort(ids_A, stable=True)
    rank_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32))
    sizes_E = jnp.bincount(ids_A, length=num_groups).astype(jnp.int32)
    if group_rows is None:
        R = num_rows(A, num_groups, row_block) if rows is None else rows
        padded_E = -(-sizes_E // row_block) * row_block
    else:
        R, row_block = num_groups * group_rows, 1
        padded_E = jnp.full_like(sizes_E, group_rows)
    start_E = jnp.cumsum(sizes_E) - sizes_E
    padded_end_E = jnp.minimum(jnp.cumsum(padded_E), R)
    first_row_E = jnp.cumsum(padded_E) - padded_E
    shift_E = first_row_E - start_E  # from sorted position to row

    block_starts = jnp.arange(R // row_block, dtype=jnp.int32) * row_block
    group_of_block = jnp.searchsorted(padded_end_E, block_starts, side="right")
    group_R = jnp.repeat(jnp.minimum(group_of_block, num_groups - 1), row_block)
    position_R = jnp.arange(R, dtype=jnp.int32) - shift_E[group_R]
    filled_R = position_R < (start_E + sizes_E)[group_R]
    assignment_R = jnp.where(filled_R, order_A[jnp.minimum(position_R, A - 1)], 0)

    row_A = rank_A + shift_E.at[ids_A].get(mode="clip")
    here_A = ids_A < num_groups
    fits_A = here_A & (row_A < padded_end_E.at[ids_A].get(mode="clip"))
    return Plan(
        row_of_assignment_MJ=jnp.where(fits_A, row_A, R).reshape(M, J),
        token_of_row_R=assignment_R // J,
        choice_of_row_R=assignment_R % J,
        filled_R=filled_R,
        group_sizes_E=jnp.diff(padded_end_E, prepend=0),
        dropped=jnp.sum(here_A & ~fits_A, dtype=jnp.int32),
    )


@jax.custom_vjp
def dispatch(x_MD: jax.Array, plan: Plan) -> jax.Array:
    """Copies each token to the rows of its experts: [M, D] -> [R, D]; padding rows are zero."""
    return jnp.where(plan.filled_R[:, None], x_MD[plan.token_of_row_R], 0)


@jax.custom_vjp
def undispatch(rows_RD: jax.Array, plan: Plan) -> jax.Array:
    """Fetches each token's expert results: [R, D] -> [M, J, D]; zeros where there is no row."""
    return rows_RD.at[plan.row_of_assignment_MJ].get(mode="fill", fill_value=0)


def _dispatch_fwd(x_MD: jax.Array, plan: Plan) -> tuple[jax.Array, Plan]:
    return dispatch(x_MD, plan), plan


def _dispatch_bwd(plan: Plan, drows_RD: jax.Array) -> tuple[jax.Array, None]:
    # A gather and a short sum in place of autodiff's scatter-add, which is serial on a CPU.
    return undispatch(drows_RD, plan).sum(axis=1), None


def _undispatch_fwd(rows_RD: jax.Array, plan: Plan) -> tuple[jax.Array, Plan]:
    return undispatch(rows_RD, plan), plan


def _undispatch_bwd(plan: Plan, dy_MJD: jax.Array) -> tuple[jax.Array, None]:
    drows_RD = dy_MJD[plan.token_of_row_R, plan.choice_of_row_R]
    return jnp.where(plan.filled_R[:, None], drows_RD, 0), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
undispatch.defvjp(_undispatch_fwd, _undispatch_bwd)
