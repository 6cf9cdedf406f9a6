"""Where the experts of a layer run: on this device, or spread over the mesh axis "expert".

Every device of the axis holds an equal part of the experts, in order, and its own tokens.
"gather": all tokens of the axis come to every device, which runs its experts on those that chose
them, and the results are added up on the way back. "all_to_all": each choice of a token is sent to
the device that holds its expert, and its result is sent back.

M tokens of a device, J choices of a token, E experts of a device, R width of the experts' input.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import MoEConfig
from model.dispatch import Plan, dispatch, make_plan, num_rows, undispatch
from model.layers import at_least_float32
from model.sharding import num_parts

AXIS = "expert"

# (rows, plan) -> rows: the products with this device's experts.
Experts = Callable[[jax.Array, Plan], jax.Array]


class Chosen(NamedTuple):
    """Tokens and their choices."""

    z_MR: jax.Array
    expert_ids_MJ: jax.Array  # config.num_experts for a choice of none
    weights_MJ: jax.Array


def mix_experts(config: MoEConfig, experts: Experts, chosen: Chosen) -> tuple[jax.Array, jax.Array]:
    """u_MR = sum_j weight_j E_j(z) in z's dtype (Kimi K3 report Eq. 11), summed in fp32.

    Args:
      experts: runs this device's experts.
      chosen: this device's tokens.

    Returns:
      u_MR, and the number of this device's (with "gather": this device's experts') assignments that
      found no room: 0 unless config.buffer_factor bounds the room, which it does where experts are
      spread. With "gather" the last of a device's experts lose, with "all_to_all" the last tokens.
    """
    if num_parts((AXIS,)) == 1:
        plan = make_plan(chosen.expert_ids_MJ, config.num_experts, config.row_block)
        u_MR, dropped = _weighted(experts, chosen, plan), plan.dropped
    else:
        run = {"gather": _gathered, "all_to_all": _exchanged}[config.dispatch]
        u_MR, dropped = run(config, experts, chosen)
    return u_MR.astype(chosen.z_MR.dtype), dropped


def _weighted(experts: Experts, chosen: Chosen, plan: Plan) -> jax.Array:
    rows = experts(dispatch(chosen.z_MR, plan), plan)
    return _combine(undispatch(rows, plan), chosen)


def _combine(y_MJR: jax.Array, chosen: Chosen) -> jax.Array:
    wide = at_least_float32(y_MJR.dtype)
    return jnp.sum(y_MJR.astype(wide) * chosen.weights_MJ[..., None], axis=1)


def _room(config: MoEConfig, num_assignments: int, most: int) -> int:
    """Rows for assignments of which a device gets num_assignments if the load is even, and at most
    `most`."""
    if config.buffer_factor is None:
        return most
    return min(most, max(1, math.ceil(config.buffer_factor * num_assignments)))


def _gathered(config: MoEConfig, experts: Experts, chosen: Chosen) -> tuple[jax.Array, jax.Array]:
    size = jax.lax.axis_size(AXIS)
    E = config.num_experts // size
    every = jax.lax.all_gather(chosen, AXIS, tiled=True)
    ids_MJ = every.expert_ids_MJ - jax.lax.axis_index(AXIS) * E
    M, J = ids_MJ.shape
    room = _room(config, M * J // size, M * min(J, E))
    plan = make_plan(
        jnp.where((ids_MJ >= 0) & (ids_MJ < E), ids_MJ, E),
        E,
        config.row_block,
        rows=num_rows(room, E, config.row_block),
    )
    u_MR = _weighted(experts, every, plan)
    return jax.lax.psum_scatter(u_MR, AXIS, tiled=True), plan.dropped


def _exchanged(config: MoEConfig, experts: Experts, chosen: Chosen) -> tuple[jax.Array, jax.Array]:
    size = jax.lax.axis_size(AXIS)
    E = config.num_experts // size
    M, J = chosen.expert_ids_MJ.shape
    room = _room(config, M * J // size, M * min(J, E))
    send = make_plan(chosen.expert_ids_MJ // E, size, group_rows=room)
    choice_R = (chosen.expert_ids_MJ % E)[send.token_of_row_R, send.choice_of_row_R]
    ids_R = jnp.where(send.filled_R, choice_R, E)

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)

    rows, ids_R = exchange(dispatch(chosen.z_MR, send)), exchange(ids_R)
    plan = make_plan(ids_R[:, None], E, config.row_block)
    rows = undispatch(experts(dispatch(rows, plan), plan), plan)[:, 0]
    return _combine(undispatch(exchange(rows), send), chosen), send.dropped
