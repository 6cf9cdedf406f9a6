"""Stable LatentMoE (Kimi K3 report Eq. 11 and 13)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.grouped_matmul import grouped_matmul
from model.balance import Stats, aux_loss_sum, layer_stats
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
    """x_BTD -> (y_BTD, RouterOutput)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, balance: LayerBalance, valid_BT: jax.Array
    ) -> tuple[jax.Array, RouterOutput]:
        config, c = self.config, self.config.moe
        B, T, D = x_BTD.shape
        router = param(self, config, "router", (D, c.num_experts), ("embed", None))
        x_MD = x_BTD.reshape(B * T, D)
        with jax.named_scope("router"):
            routing = route(c, router_scores(c, x_MD, router), balance.bias_E)
            valid_M = valid_BT.reshape(B * T)
            stats = layer_stats(config.balance, routing, balance.bin_range_2, valid_M)
            aux_loss = jnp.zeros((), routing.scores_ME.dtype)
            if config.balance.estimator == "aux_loss":
                aux_loss = aux_loss_sum(config.balance, routing, stats["load"], valid_M)
            out = RouterOutput(stats, aux_loss, routing)
        with jax.named_scope("routed_experts"):
            routed_BTD = self._routed(x_MD, routing).reshape(B, T, D)
        if not c.num_shared_experts:
            return routed_BTD, out
        shared = FFN(config, c.num_shared_experts * c.expert_hidden, name="shared")
        with jax.named_scope("shared_experts"):
            return routed_BTD + shared(x_BTD), out

    def _routed(self, x_MD: jax.Array, routing: Routing) -> jax.Array:
        """W_up RMSNorm(sum_i p_i E_i(W_down x)), or sum_i p_i E_i(x) without a latent."""
        config, c = self.config, self.config.moe
        D, E, F = config.dim, c.num_experts, c.expert_hidden
        R = c.latent_dim or D
        expert_in = ("expert", "latent", "hidden")
        w_gate = param(self, config, "expert_gate", (E, R, F), expert_in)
        w_up = param(self, config, "expert_up", (E, R, F), expert_in)
        w_down = param(self, config, "expert_down", (E, F, R), ("expert", "hidden", "latent"))
        z_MR = x_MD
        if c.latent_dim:
            latent_down = param(self, config, "latent_down", (D, R), ("embed", "latent"))
            z_MR = einsum("md,dr->mr", x_MD, latent_down)

        plan = make_plan(routing.expert_ids_MJ, E, c.row_block)

        def experts(rows: jax.Array, weight: jax.Array) -> jax.Array:
            return grouped_matmul(
                rows,
                weight.astype(rows.dtype),
                plan.group_sizes_E,
                group_multiple=c.row_block,
                implementation=c.implementation,
            )

        rows = dispatch(z_MR, plan)
        rows = experts(glu(experts(rows, w_gate), experts(rows, w_up), config), w_down)
        chosen_MJR = undispatch(rows, plan).astype(at_least_float32(rows.dtype))
        u_MR = jnp.sum(chosen_MJR * routing.weights_MJ[..., None], axis=1).astype(z_MR.dtype)
        if c.latent_norm:
            latent_norm = param(
                self, config, "latent_norm", (R,), ("latent",), nn.initializers.ones
            )
            u_MR = rms_norm(u_MR, latent_norm, config.norm_eps)
        if not c.latent_dim:
            return u_MR
        latent_up = param(self, config, "latent_up", (R, D), ("latent", "embed"))
        return einsum("mr,rd->md", u_MR, latent_up)
