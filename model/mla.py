"""Gated multi-head latent attention without positions (Kimi K3 report Eq. 7)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from kernels.attention import attention
from model import sharding
from model.config import ModelConfig
from model.layers import einsum, param, rms_norm


def _attend(
    config: ModelConfig,
    specs: tuple[PartitionSpec, PartitionSpec],
    is_spread: bool,
    q_BTHK: jax.Array,
    latents: tuple[jax.Array, jax.Array],
    ups: tuple[jax.Array, jax.Array],
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """o_BTHV in fp32 of this device's queries; the latents of all tokens come to it if spread."""
    first_query, num_queries = 0, q_BTHK.shape[1]
    if is_spread:
        ups = map(partial(sharding.gather, dtype=q_BTHK.dtype), ups, specs)
    if is_spread and jax.lax.axis_size("sequence") > 1:
        first_query = jax.lax.axis_index("sequence") * num_queries
        latents, segment_ids_BS = jax.lax.all_gather(
            (latents, segment_ids_BS), "sequence", axis=1, tiled=True
        )
    (latent_BSR, shared_BSP), (k_up, v_up) = latents, ups
    k_BSHN = einsum("bsr,rhn->bshn", latent_BSR, k_up)
    heads, width = k_BSHN.shape[2:]
    shared_BSHP = jnp.repeat(shared_BSP[:, :, None], heads, axis=2)
    return attention(
        q_BTHK,
        jnp.concatenate([k_BSHN, shared_BSHP], axis=-1),
        einsum("bsr,rhv->bshv", latent_BSR, v_up),
        segment_ids=segment_ids_BS,
        first_query=first_query,
        scale=(width + shared_BSP.shape[-1]) ** -0.5,
        implementation=config.mla.implementation,
    )


class MLALayer(nn.Module):
    """x_BTD -> y_BTD. Keys are [from the latent | shared by all heads]; nothing is rotated (NoPE).

    R: rank of the latent; N: key width from the latent; P: key width shared by the heads.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        config, c = self.config, self.config.mla
        D, H, R, N, P, V = (
            config.dim,
            c.num_heads,
            c.kv_lora_rank,
            c.nope_dim,
            c.rope_dim,
            c.value_dim,
        )
        ones = nn.initializers.ones
        kv_down = param(self, config, "kv_down", (D, R + P), ("embed", "rank"))
        kv_norm = param(self, config, "kv_norm", (R,), ("rank",), ones)
        k_axes, v_axes = ("rank_in", "heads", "key"), ("rank_in", "heads", "value")
        k_up = param(self, config, "k_up", (R, H, N), k_axes)
        v_up = param(self, config, "v_up", (R, H, V), v_axes)
        o_proj = param(self, config, "o_proj", (H, V, D), ("heads", "value", "embed"))

        with jax.named_scope("mla_inputs"):
            q_BTHK = self._queries(x_BTD)
            latent_BTR, shared_BTP = jnp.split(einsum("btd,dr->btr", x_BTD, kv_down), [R], axis=-1)
            latent_BTR = rms_norm(latent_BTR, kv_norm, c.norm_eps)
        specs = tuple(
            sharding.spec_here(up.shape, axes, config.shard_min_size)
            for up, axes in ((k_up, k_axes), (v_up, v_axes))
        )
        attend = sharding.on_each_device(
            partial(_attend, config, specs),
            (sharding.TOKENS, sharding.TOKENS, specs, sharding.TOKENS),
            sharding.TOKENS,
            check_vma=False,  # JAX's own splash kernel does not say how its results vary
        )
        with jax.named_scope("attention"):
            o_BTHV = attend(q_BTHK, (latent_BTR, shared_BTP), (k_up, v_up), segment_ids_BT)
        with jax.named_scope("mla_output"):
            if c.output_gate:
                axes = ("embed", "heads", "value")
                out_gate = param(self, config, "out_gate", (D, H, V), axes)
                gate_BTHV = einsum("btd,dhv->bthv", x_BTD, out_gate)
                o_BTHV = o_BTHV * jax.nn.sigmoid(gate_BTHV.astype(o_BTHV.dtype))
            return einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), o_proj)

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        """Queries, through a normed low-rank latent unless q_lora_rank is None."""
        config, c = self.config, self.config.mla
        H, K = c.num_heads, c.nope_dim + c.rope_dim
        if c.q_lora_rank is None:
            q_proj = param(self, config, "q_proj", (config.dim, H, K), ("embed", "heads", "key"))
            return einsum("btd,dhk->bthk", x_BTD, q_proj)
        R = c.q_lora_rank
        q_down = param(self, config, "q_down", (config.dim, R), ("embed", "rank"))
        q_norm = param(self, config, "q_norm", (R,), ("rank",), nn.initializers.ones)
        q_up = param(self, config, "q_up", (R, H, K), ("rank_in", "heads", "key"))
        latent_BTR = rms_norm(einsum("btd,dr->btr", x_BTD, q_down), q_norm, c.norm_eps)
        return einsum("btr,rhk->bthk", latent_BTR, q_up)
