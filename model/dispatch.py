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
    """Orders assignments by group, and by token within a group, and pads each group.

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
    rank_A, sizes_E = _ranks(ids_A, num_groups)
    if group_rows is None:
        R = num_rows(A, num_groups, row_block) if rows is None else rows
        padded_E = -(-sizes_E // row_block) * row_block
    else:
        R = num_groups * group_rows
        padded_E = jnp.full_like(sizes_E, group_rows)
    end_E = jnp.minimum(jnp.cumsum(padded_E), R)
    first_E = jnp.cumsum(padded_E) - padded_E

    here_A = ids_A < num_groups
    row_A = rank_A + first_E.at[ids_A].get(mode="clip")
    fits_A = here_A & (row_A < end_E.at[ids_A].get(mode="clip"))
    row_A = jnp.where(fits_A, row_A, R)
    # A for the rows that no assignment has.
    assignment_R = (
        jnp.full(R, A, jnp.int32).at[row_A].set(jnp.arange(A, dtype=jnp.int32), mode="drop")
    )
    filled_R = assignment_R < A
    assignment_R = jnp.where(filled_R, assignment_R, 0)
    return Plan(
        row_of_assignment_MJ=row_A.reshape(M, J),
        token_of_row_R=assignment_R // J,
        choice_of_row_R=assignment_R % J,
        filled_R=filled_R,
        group_sizes_E=jnp.diff(end_E, prepend=0),
        dropped=jnp.sum(here_A & ~fits_A, dtype=jnp.int32),
    )


def _ranks(ids_A: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """The number of assignments of the same group before each one, and of each group in all.

    By counting, in N blocks of B: XLA takes a quarter of a minute to compile a sort for a TPU.
    """
    B = min(128, ids_A.shape[0])
    ids_NB = jnp.pad(ids_A, (0, -ids_A.shape[0] % B), constant_values=num_groups).reshape(-1, B)
    same_NBB = ids_NB[:, :, None] == ids_NB[:, None, :]
    inside_NB = jnp.sum(jnp.tril(same_NBB, -1), axis=-1, dtype=jnp.int32)
    groups_E = jnp.arange(num_groups, dtype=jnp.int32)
    is_of_NBE = ids_NB[:, :, None] == groups_E[None, None, :]
    counts_NE = jnp.sum(is_of_NBE, axis=1, dtype=jnp.int32)
    before_NE = jnp.cumsum(counts_NE, axis=0) - counts_NE
    before_NB = jnp.take_along_axis(before_NE, ids_NB, axis=1, mode="clip")
    return (before_NB + inside_NB).reshape(-1)[: ids_A.shape[0]], counts_NE.sum(axis=0)


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
