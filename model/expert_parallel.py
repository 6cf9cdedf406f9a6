"""Where the experts of a layer run: on this device, or spread over the mesh axis "expert".

Every device of the axis holds an equal part of the experts, in order, and its own tokens.
"gather": all tokens of the axis come to every device, which runs its experts on those that chose
them, and the results are added up on the way back. "all_to_all": each choice of a token is sent to
the device that holds its expert, and its result is sent back; by ragged_all_to_all for GPUs and
TPUs. "even_all_to_all": the same in buffers of one size for each pair of devices; also what
"all_to_all" does where XLA does not have the other, on the CPU.

M tokens of a device, J choices of a token, E experts of a device, R width of the experts' input.
S senders, D devices that hold experts: both are all devices of the axis.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.numerics import platform
from model.config import MoEConfig
from model.dispatch import Plan, dispatch, make_plan, num_rows, undispatch
from model.layers import at_least_float32
from model.sharding import Part, gather, num_parts

AXIS = "expert"

# (rows, group_sizes_E) -> rows: the products with this device's experts.
Experts = Callable[[jax.Array, jax.Array], jax.Array]


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
      spread. Their results are zero. The last of a device's experts lose, and of one expert the
      last tokens; in buffers of one size, which bound each sender by itself, its last tokens.
    """
    if num_parts((AXIS,)) == 1:
        plan = make_plan(chosen.expert_ids_MJ, config.num_experts, config.row_block)
        u_MR, dropped = _weighted(experts, chosen, plan), plan.dropped
    else:
        has_ragged = platform() in ("gpu", "tpu")
        run = {
            "gather": _gathered,
            "all_to_all": _exchanged_ragged if has_ragged else _exchanged_evenly,
            "even_all_to_all": _exchanged_evenly,
        }[config.dispatch]
        u_MR, dropped = run(config, experts, chosen)
    return u_MR.astype(chosen.z_MR.dtype), dropped


def _weighted(experts: Experts, chosen: Chosen, plan: Plan) -> jax.Array:
    rows = experts(dispatch(chosen.z_MR, plan), plan.group_sizes_E)
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
    # The gradient of z, a sum over what all devices' experts say, is summed in fp32.
    z_MR = chosen.z_MR
    own = Part(z_MR.astype(at_least_float32(z_MR.dtype)), ((0, (AXIS,)),))
    labels = jax.lax.all_gather(chosen[1:], AXIS, tiled=True)
    every = Chosen(gather(own, z_MR.dtype), *labels)
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


def _exchanged_evenly(
    config: MoEConfig, experts: Experts, chosen: Chosen
) -> tuple[jax.Array, jax.Array]:
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
    rows = undispatch(experts(dispatch(rows, plan), plan.group_sizes_E), plan)[:, 0]
    return _combine(undispatch(exchange(rows), send), chosen), send.dropped


class Slices(NamedTuple):
    """What a device tells ragged_all_to_all: one slice for each expert of each device, [S * E]."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array  # on the receiver
    recv_sizes: jax.Array


class Exchange(NamedTuple):
    """Which rows travel between the devices that have tokens and those that hold experts."""

    there: Slices
    back: Slices
    group_sizes_E: jax.Array  # rows of this device's experts, multiples of row_block
    dropped: jax.Array  # int32, assignments of this device that found no room


def _exchanged_ragged(
    config: MoEConfig, experts: Experts, chosen: Chosen
) -> tuple[jax.Array, jax.Array]:
    size = jax.lax.axis_size(AXIS)
    E = config.num_experts // size
    M, J = chosen.expert_ids_MJ.shape
    send = make_plan(chosen.expert_ids_MJ, config.num_experts)
    counts_SDE = jax.lax.all_gather(send.group_sizes_E.reshape(size, E), AXIS)
    room = num_rows(_room(config, M * J, M * size * min(J, E)), E, config.row_block)
    exchange = _plan_exchange(counts_SDE, room, config.row_block)

    rows = dispatch(chosen.z_MR, send)
    rows = _travel((M * J, room), rows, exchange.there, exchange.back)
    rows = experts(rows, exchange.group_sizes_E)
    rows = _travel((room, M * J), rows, exchange.back, exchange.there)
    return _combine(undispatch(rows, send), chosen), exchange.dropped


def _plan_exchange(counts_SDE: jax.Array, room: int, row_block: int) -> Exchange:
    """Lays out the rows of a device as "gather" does: by expert, each padded to a multiple of
    row_block, and of one expert by sender; a sender's rows are sorted by expert, without padding.

    counts_SDE: the assignments of each sender to each expert of each device.
    """
    sent_SX = counts_SDE.reshape(counts_SDE.shape[0], -1)
    source_SDE = (jnp.cumsum(sent_SX, axis=1) - sent_SX).reshape(counts_SDE.shape)
    padded_DE = -(-counts_SDE.sum(axis=0) // row_block) * row_block
    end_DE = jnp.cumsum(padded_DE, axis=1)
    before_SDE = jnp.cumsum(counts_SDE, axis=0) - counts_SDE
    target_SDE = jnp.minimum((end_DE - padded_DE)[None] + before_SDE, room)
    size_SDE = jnp.minimum(counts_SDE, room - target_SDE)
    here = jax.lax.axis_index(AXIS)

    def of(x_SDE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For the slices that this device has, and for those that its experts get."""
        return x_SDE[here].reshape(-1), x_SDE[:, here].reshape(-1)

    (source, source_here), (target, target_here) = of(source_SDE), of(target_SDE)
    size, size_here = of(size_SDE)
    return Exchange(
        there=Slices(source, size, target, size_here),
        back=Slices(target_here, size_here, source_here, size),
        group_sizes_E=jnp.diff(jnp.minimum(end_DE[here], room), prepend=0),
        dropped=jnp.sum((counts_SDE - size_SDE)[here], dtype=jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _travel(lengths: tuple[int, int], rows: jax.Array, there: Slices, back: Slices) -> jax.Array:
    """Sends lengths[0] rows where `there` says; of the lengths[1] that come, those that nobody
    sent are zero. `back` is the same exchange in reverse, and so the gradient's: JAX's own rule
    would find it with two more collectives."""
    nothing = jnp.zeros_like(rows, shape=(lengths[1], rows.shape[1]))
    return jax.lax.ragged_all_to_all(rows, nothing, *there, axis_name=AXIS)


def _travel_fwd(
    lengths: tuple[int, int], rows: jax.Array, there: Slices, back: Slices
) -> tuple[jax.Array, tuple[Slices, Slices]]:
    return _travel(lengths, rows, there, back), (there, back)


def _travel_bwd(
    lengths: tuple[int, int], saved: tuple[Slices, Slices], drows: jax.Array
) -> tuple[jax.Array, None, None]:
    there, back = saved
    return _travel(lengths[::-1], drows, back, there), None, None


_travel.defvjp(_travel_fwd, _travel_bwd)
