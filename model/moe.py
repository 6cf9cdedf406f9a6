"""Stable LatentMoE (Kimi K3 report Eq. 11 and 13)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from kernels.grouped_matmul import grouped_matmul
from model.balance import Stats, aux_loss_sum, empty_stats, layer_stats
from model.config import ModelConfig
from model.dispatch import dispatch, make_plan, undispatch
from model.ffn import FFN, glu
from model.layers import at_least_float32, einsum, param, rms_norm
from model.router import Routing, route, router_scores


class LayerBalance(NamedTuple):
    """One layer's slice of the balance buffers."""

    bias_E: jax.Array  # router bias: it selects, it never weighs (Eq. 13)
    bin_range_2: jax.Array  # this step's histogram range


class RouterOutput(NamedTuple):
    """What a MoE layer says besides its result."""

    stats: Stats  # for the balance update; no gradient
    aux_loss: jax.Array  # Switch loss as a sum over tokens; 0 unless the estimator is "aux_loss"
    routing: Routing


class MoE(nn.Module):
    """x_BTD -> (y_BTD, RouterOutput): sum_j E_shared_j(x) + W_up RMSNorm(sum_i p_i E_i(W_down x)),
    or without W_down and W_up where experts work at full width."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, balance: LayerBalance, valid_BT: jax.Array
    ) -> tuple[jax.Array, RouterOutput]:
        config, c = self.config, self.config.moe
        B, T, D = x_BTD.shape
        E, F, R = c.num_experts, c.expert_hidden, c.latent_dim or D
        expert_in = ("expert", "latent", "hidden")
        weights = ExpertWeights(
            router=param(self, config, "router", (D, E), ("embed", None)),
            gate=param(self, config, "expert_gate", (E, R, F), expert_in),
            up=param(self, config, "expert_up", (E, R, F), expert_in),
            down=param(self, config, "expert_down", (E, F, R), ("expert", "hidden", "latent")),
        )
        x_MD = z_MR = x_BTD.reshape(B * T, D)
        if c.latent_dim:
            latent_down = param(self, config, "latent_down", (D, R), ("embed", "latent"))
            z_MR = einsum("md,dr->mr", x_MD, latent_down)
        with jax.named_scope("routed_experts"):
            rows = x_MD, z_MR, valid_BT.reshape(B * T)
            y_MD, out = _over_data_axis(config, rows, weights, balance)
        if c.latent_norm:
            ones = nn.initializers.ones
            latent_norm = param(self, config, "latent_norm", (R,), ("latent",), ones)
            y_MD = rms_norm(y_MD, latent_norm, config.norm_eps)
        if c.latent_dim:
            latent_up = param(self, config, "latent_up", (R, D), ("latent", "embed"))
            y_MD = einsum("mr,rd->md", y_MD, latent_up)
        y_BTD = y_MD.reshape(B, T, D)
        if not c.num_shared_experts:
            return y_BTD, out
        shared = FFN(config, c.num_shared_experts * F, name="shared")
        with jax.named_scope("shared_experts"):
            return y_BTD + shared(x_BTD), out


class ExpertWeights(NamedTuple):
    router: jax.Array  # [D, E]
    gate: jax.Array  # [E, R, F]
    up: jax.Array  # [E, R, F]
    down: jax.Array  # [E, F, R]


def _over_data_axis(
    config: ModelConfig,
    rows: tuple[jax.Array, ...],
    weights: ExpertWeights,
    balance: LayerBalance,
) -> tuple[jax.Array, RouterOutput]:
    """`_route_and_mix` with each device of the mesh's data axis sorting its own rows only."""
    mesh = jax.sharding.get_abstract_mesh()
    num_rows = rows[0].shape[0]
    if mesh.empty or mesh.shape["data"] == 1 or num_rows % mesh.shape["data"]:
        return _route_and_mix(config, rows, weights, balance, axis=None)
    by_row, whole = PartitionSpec("data"), PartitionSpec()
    stats_specs = {"load": whole, "histogram": whole, "margins": by_row}
    names = empty_stats(config.balance, 1, 1, 1)
    out_specs = RouterOutput({name: stats_specs[name] for name in names}, whole, by_row)
    local = jax.shard_map(
        functools.partial(_route_and_mix, config, axis="data"),
        in_specs=(by_row, whole, whole),
        out_specs=(by_row, out_specs),
    )
    return local(rows, weights, balance)


def _route_and_mix(
    config: ModelConfig,
    rows: tuple[jax.Array, ...],
    weights: ExpertWeights,
    balance: LayerBalance,
    axis: str | None,
) -> tuple[jax.Array, RouterOutput]:
    """u_MR = sum_i p_i E_i(z) over the experts that the router chose for x, and its statistics,
    summed over the mesh axis `axis` if rows are spread over one."""
    x_MD, z_MR, valid_M = rows
    c = config.moe

    def total(x: jax.Array) -> jax.Array:
        return x if axis is None else jax.lax.psum(x, axis)

    routing = route(c, router_scores(c, x_MD, weights.router), balance.bias_E)
    stats = layer_stats(config.balance, routing, balance.bin_range_2, valid_M)
    stats = {name: x if name == "margins" else total(x) for name, x in stats.items()}
    aux_loss = jnp.zeros((), routing.scores_ME.dtype)
    if config.balance.estimator == "aux_loss":
        aux_loss = total(aux_loss_sum(config.balance, routing, stats["load"], valid_M))

    plan = make_plan(routing.expert_ids_MJ, c.num_experts, c.row_block)

    def experts(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return grouped_matmul(
            rows,
            weight.astype(rows.dtype),
            plan.group_sizes_E,
            group_multiple=c.row_block,
            implementation=c.implementation,
        )

    rows = dispatch(z_MR, plan)
    hidden = glu(experts(rows, weights.gate), experts(rows, weights.up), config)
    chosen_MJR = undispatch(experts(hidden, weights.down), plan)
    u_MJR = chosen_MJR.astype(at_least_float32(z_MR.dtype)) * routing.weights_MJ[..., None]
    return u_MJR.sum(axis=1).astype(z_MR.dtype), RouterOutput(stats, aux_loss, routing)
