"""Stable LatentMoE (Kimi K3 report Eq. 11 and 13)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.grouped_matmul import grouped_matmul
from model.balance import Stats, aux_loss_sum, layer_stats
from model.config import ModelConfig
from model.expert_parallel import Chosen, mix_experts
from model.ffn import FFN, glu
from model.layers import einsum, matrix, param, rms_norm
from model.router import Routing, route, router_scores
from model.sharding import Part, gather, num_parts, total


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
        weights = ExpertWeights(
            param(self, config, "router", (D, E), ("embed", None)),
            matrix(self, config, "expert_gate", (E, R, F), ("expert", "expert_in", "hidden")),
            matrix(self, config, "expert_up", (E, R, F), ("expert", "expert_in", "hidden")),
            matrix(self, config, "expert_down", (E, F, R), ("expert", "expert_in", "latent")),
        )
        z_BTR = x_BTD
        if c.latent_dim:
            latent_down = matrix(self, config, "latent_down", (D, R), ("embed", "latent"))
            z_BTR = einsum("btd,dr->btr", x_BTD, latent_down)
        with jax.named_scope("routed_experts"):
            y_BTD, out = _route_and_mix(config, (x_BTD, z_BTR, valid_BT), weights, balance)
        if c.latent_norm:
            ones = nn.initializers.ones
            latent_norm = param(self, config, "latent_norm", (R,), ("latent",), ones)
            y_BTD = rms_norm(y_BTD, latent_norm, config.norm_eps)
        if c.latent_dim:
            latent_up = matrix(self, config, "latent_up", (R, D), ("rank_in", "embed_out"))
            y_BTD = einsum("btr,rd->btd", y_BTD, latent_up)
        if not c.num_shared_experts:
            return y_BTD, out
        shared = FFN(config, c.num_shared_experts * F, name="shared")
        with jax.named_scope("shared_experts"):
            return y_BTD + shared(x_BTD), out


class ExpertWeights(NamedTuple):
    router: jax.Array  # [D, E]
    gate: Part  # [E, R, F]; of this device's experts, as the others are
    up: Part  # [E, R, F]
    down: Part  # [E, F, R]


def _route_and_mix(
    config: ModelConfig,
    tokens: tuple[jax.Array, ...],
    weights: ExpertWeights,
    balance: LayerBalance,
) -> tuple[jax.Array, RouterOutput]:
    """u_BTR = sum_i p_i E_i(z) over the experts that the router chose for x, and the statistics of
    this device's tokens; of histograms, those of this device's experts."""
    B, T = tokens[0].shape[:2]
    x_MD, z_MR, valid_M = (x.reshape(B * T, *x.shape[2:]) for x in tokens)
    c = config.moe
    routing = route(c, router_scores(c, x_MD, weights.router), balance.bias_E)
    gate, up, down = (gather(weight, z_MR.dtype) for weight in weights[1:])

    def experts(rows: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
        def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
            return grouped_matmul(
                rows,
                weight,
                group_sizes_E,
                group_multiple=c.row_block,
                implementation=c.implementation,
            )

        return multiply(glu(multiply(rows, gate), multiply(rows, up), config), down)

    # Padding goes to no expert, and takes no room.
    ids_MJ = jnp.where(valid_M[:, None], routing.expert_ids_MJ, c.num_experts)
    chosen = Chosen(z_MR, ids_MJ, routing.weights_MJ)
    u_MR, dropped = mix_experts(c, experts, chosen)
    stats = layer_stats(config.balance, routing, balance.bin_range_2, valid_M, dropped)
    if "histogram" in stats and num_parts(("expert",)) > 1:
        stats["histogram"] = jax.lax.psum_scatter(stats["histogram"], "expert", tiled=True)
    aux_loss = jnp.zeros((), routing.scores_ME.dtype)
    if config.balance.estimator == "aux_loss":
        aux_loss = aux_loss_sum(config.balance, routing, total(stats["load"]), valid_M)
    return u_MR.reshape(B, T, -1), RouterOutput(stats, aux_loss, routing)
