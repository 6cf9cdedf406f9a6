"""Stable LatentMoE (Kimi K3 report Eq. 11 and 13)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from kernels.grouped_matmul import grouped_matmul
from model import sharding
from model.balance import Stats, aux_loss_sum, empty_stats, layer_stats
from model.config import ModelConfig
from model.expert_parallel import Chosen, mix_experts
from model.ffn import FFN, glu
from model.layers import einsum, param, rms_norm
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
        D = x_BTD.shape[-1]
        E, F, R = c.num_experts, c.expert_hidden, c.latent_dim or D
        shapes = ExpertWeights((D, E), (E, R, F), (E, R, F), (E, F, R))
        names = ExpertWeights("router", "expert_gate", "expert_up", "expert_down")
        weights = ExpertWeights(
            *(param(self, config, *args) for args in zip(names, shapes, WEIGHT_AXES, strict=True))
        )
        z_BTR = x_BTD
        if c.latent_dim:
            latent_down = param(self, config, "latent_down", (D, R), ("embed", "latent"))
            z_BTR = einsum("btd,dr->btr", x_BTD, latent_down)
        with jax.named_scope("routed_experts"):
            y_BTD, out = _routed(config, (x_BTD, z_BTR, valid_BT), weights, balance)
        if c.latent_norm:
            ones = nn.initializers.ones
            latent_norm = param(self, config, "latent_norm", (R,), ("latent",), ones)
            y_BTD = rms_norm(y_BTD, latent_norm, config.norm_eps)
        if c.latent_dim:
            latent_up = param(self, config, "latent_up", (R, D), ("latent", "embed"))
            y_BTD = einsum("btr,rd->btd", y_BTD, latent_up)
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


WEIGHT_AXES = ExpertWeights(
    router=("embed", None),
    gate=("expert", "expert_in", "hidden"),
    up=("expert", "expert_in", "hidden"),
    down=("expert", "hidden", "expert_in"),
)


def _routed(
    config: ModelConfig,
    tokens: tuple[jax.Array, ...],
    weights: ExpertWeights,
    balance: LayerBalance,
) -> tuple[jax.Array, RouterOutput]:
    """`_route_and_mix` with each device of the mesh routing its own tokens."""
    specs = ExpertWeights(
        *(
            sharding.spec_here(weight.shape, axes, config.shard_min_size)
            for weight, axes in zip(weights, WEIGHT_AXES, strict=True)
        )
    )._replace(router=P())
    of_stats = {"histogram": P("expert"), "margins": P(sharding.AXES)}
    stats_specs = {name: of_stats.get(name, P()) for name in empty_stats(config.balance, 1, 1, 1)}
    out_specs = sharding.TOKENS, RouterOutput(stats_specs, P(), sharding.TOKENS)
    in_specs = sharding.TOKENS, specs, P()
    run = partial(_route_and_mix, config, specs)
    u_BTR, out = sharding.on_each_device(run, in_specs, out_specs)(tokens, weights, balance)
    # In the order of tokens again: [M, ...] of a device was a part of its rows and of its tokens.
    routing = Routing(*(x.reshape(-1, *x.shape[2:]) for x in out.routing))
    return u_BTR, out._replace(routing=routing)


def _route_and_mix(
    config: ModelConfig,
    specs: ExpertWeights,
    is_spread: bool,
    tokens: tuple[jax.Array, ...],
    weights: ExpertWeights,
    balance: LayerBalance,
) -> tuple[jax.Array, RouterOutput]:
    """u_BTR = sum_i p_i E_i(z) over the experts that the router chose for x, and its statistics,
    summed over the mesh if tokens are spread."""
    B, T = tokens[0].shape[:2]
    x_MD, z_MR, valid_M = (x.reshape(B * T, *x.shape[2:]) for x in tokens)
    c = config.moe

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, sharding.AXES) if is_spread else x

    routing = route(c, router_scores(c, x_MD, weights.router), balance.bias_E)
    if is_spread:
        gathered = map(partial(sharding.gather, dtype=z_MR.dtype), weights[1:], specs[1:])
        weights = ExpertWeights(weights.router, *gathered)

    def experts(rows: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
        def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
            return grouped_matmul(
                rows,
                weight.astype(rows.dtype),
                group_sizes_E,
                group_multiple=c.row_block,
                implementation=c.implementation,
            )

        hidden = glu(multiply(rows, weights.gate), multiply(rows, weights.up), config)
        return multiply(hidden, weights.down)

    # Padding goes to no expert, and takes no room.
    ids_MJ = jnp.where(valid_M[:, None], routing.expert_ids_MJ, c.num_experts)
    chosen = Chosen(z_MR, ids_MJ, routing.weights_MJ)
    u_MR, dropped = mix_experts(c, experts, chosen, is_spread)
    stats = layer_stats(config.balance, routing, balance.bin_range_2, valid_M, dropped)
    stats |= {"load": total(stats["load"]), "dropped": total(dropped)}
    if is_spread and "histogram" in stats:
        # The sums of all tokens, but of a part of the experts on each device.
        counts_EX = jax.lax.psum_scatter(stats["histogram"], "expert", tiled=True)
        stats["histogram"] = jax.lax.psum(counts_EX, sharding.FSDP)
    aux_loss = jnp.zeros((), routing.scores_ME.dtype)
    if config.balance.estimator == "aux_loss":
        aux_loss = total(aux_loss_sum(config.balance, routing, stats["load"], valid_M))
    u_BTR, *routing = (x.reshape(B, T, *x.shape[1:]) for x in (u_MR, *routing))
    return u_BTR, RouterOutput(stats, aux_loss, Routing(*routing))
