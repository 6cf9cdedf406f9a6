"""Dropless dispatch: tokens to rows grouped by expert, and back, by gathers alone.

M tokens (flattened), A assignments = M * top_k, R rows. Each expert's rows are padded to a multiple
of `row_block`, so that a block of rows has one expert (kernels.grouped_matmul's group_multiple).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Plan(NamedTuple):
    """Where every assignment goes. Nothing is dropped: R holds the worst case."""

    row_of_assignment_MJ: jax.Array  # int32, J = top_k choices of a token
    token_of_row_R: jax.Array  # int32; 0 on padding rows
    choice_of_row_R: jax.Array  # int32; 0 on padding rows
    filled_R: jax.Array  # bool, False on padding rows
    group_sizes_E: jax.Array  # int32, multiples of row_block


def num_rows(num_assignments: int, num_experts: int, row_block: int) -> int:
    """R: an upper bound of the padded rows, whatever the router chose."""
    most_groups = min(num_experts, num_assignments)
    padded = num_assignments + most_groups * (row_block - 1)
    return padded // row_block * row_block


def make_plan(expert_ids_MJ: jax.Array, num_experts: int, row_block: int) -> Plan:
    """Sorts assignments by expert (stable, so by token within an expert) and pads each group."""
    M, J = expert_ids_MJ.shape
    ids_A = expert_ids_MJ.reshape(-1)
    A = ids_A.shape[0]
    order_A = jnp.argsort(ids_A, stable=True)
    rank_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32))
    sizes_E = jnp.bincount(ids_A, length=num_experts).astype(jnp.int32)
    padded_E = -(-sizes_E // row_block) * row_block
    start_E = jnp.cumsum(sizes_E) - sizes_E
    padded_end_E = jnp.cumsum(padded_E)
    shift_E = padded_end_E - padded_E - start_E  # from sorted position to row

    R = num_rows(A, num_experts, row_block)
    block_starts = jnp.arange(R // row_block, dtype=jnp.int32) * row_block
    expert_of_block = jnp.searchsorted(padded_end_E, block_starts, side="right")
    expert_R = jnp.repeat(jnp.minimum(expert_of_block, num_experts - 1), row_block)
    position_R = jnp.arange(R, dtype=jnp.int32) - shift_E[expert_R]
    filled_R = position_R < (start_E + sizes_E)[expert_R]
    assignment_R = jnp.where(filled_R, order_A[jnp.minimum(position_R, A - 1)], 0)
    return Plan(
        row_of_assignment_MJ=(rank_A + shift_E[ids_A]).reshape(M, J),
        token_of_row_R=assignment_R // J,
        choice_of_row_R=assignment_R % J,
        filled_R=filled_R,
        group_sizes_E=padded_E,
    )


@jax.custom_vjp
def dispatch(x_MD: jax.Array, plan: Plan) -> jax.Array:
    """Copies each token to the rows of its experts: [M, D] -> [R, D]; padding rows are zero."""
    return jnp.where(plan.filled_R[:, None], x_MD[plan.token_of_row_R], 0)


@jax.custom_vjp
def undispatch(rows_RD: jax.Array, plan: Plan) -> jax.Array:
    """Fetches each token's expert results: [R, D] -> [M, J, D]."""
    return rows_RD[plan.row_of_assignment_MJ]


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
