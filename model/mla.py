"""Gated multi-head latent attention without positions (Kimi K3 report Eq. 7)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.attention import attention
from model.config import ModelConfig
from model.layers import at_least_float32, einsum, matrix, param, rms_norm
from model.sharding import Part, gather, num_parts

SEQUENCE = ("sequence",)


def _attend(
    config: ModelConfig,
    q_BTHK: jax.Array,
    latents: tuple[jax.Array, jax.Array],
    ups: tuple[Part, Part],
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """o_BTHV in fp32 of this device's queries, to which the latents of all tokens come."""
    dtype, wide = q_BTHK.dtype, at_least_float32(q_BTHK.dtype)
    first_query, (B, T, H, _) = 0, q_BTHK.shape
    if num_parts(SEQUENCE) > 1:
        first_query = jax.lax.axis_index(SEQUENCE) * T
        # Gradients of all queries, and of all groups of heads, are summed in fp32.
        parts = (Part(x.astype(wide), ((1, SEQUENCE),)) for x in latents)
        latents = tuple(gather(x, dtype) for x in parts)
        if segment_ids_BS is not None:
            segment_ids_BS = jax.lax.all_gather(segment_ids_BS, SEQUENCE, axis=1, tiled=True)
    latents = tuple(x.astype(wide) for x in latents)

    def of_heads(q_BTHK: jax.Array, ups: tuple[Part, Part]) -> jax.Array:
        latent_BSR, shared_BSP = (x.astype(dtype) for x in latents)
        k_BSHN = einsum("bsr,rhn->bshn", latent_BSR, ups[0])
        heads, width = k_BSHN.shape[2:]
        shared_BSHP = jnp.repeat(shared_BSP[:, :, None], heads, axis=2)
        return attention(
            q_BTHK,
            jnp.concatenate([k_BSHN, shared_BSHP], axis=-1),
            einsum("bsr,rhv->bshv", latent_BSR, ups[1]),
            segment_ids=segment_ids_BS,
            first_query=first_query,
            scale=(width + shared_BSP.shape[-1]) ** -0.5,
            implementation=config.mla.implementation,
        )

    block = config.mla.head_block or H
    if block == H:
        return of_heads(q_BTHK, ups)

    def grouped(x: jax.Array, axis: int) -> jax.Array:
        """The groups of heads first."""
        shape = *x.shape[:axis], H // block, block, *x.shape[axis + 1 :]
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    groups = grouped(q_BTHK, 2), jax.tree.map(partial(grouped, axis=1), ups)
    # Keys and values of all heads would not exist together in the backward pass either.
    o_GBTHV = jax.lax.map(lambda group: jax.checkpoint(of_heads)(*group), groups)
    return jnp.moveaxis(o_GBTHV, 0, 2).reshape(B, T, H, -1)


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
        kv_down = matrix(self, config, "kv_down", (D, R + P), ("embed", "rank"))
        kv_norm = param(self, config, "kv_norm", (R,), ("rank",), ones)
        k_up = matrix(self, config, "k_up", (R, H, N), ("rank_in", "heads", "key"))
        v_up = matrix(self, config, "v_up", (R, H, V), ("rank_in", "heads", "value"))
        o_proj = matrix(self, config, "o_proj", (H, V, D), ("heads", "value", "embed"))

        with jax.named_scope("mla_inputs"):
            q_BTHK = self._queries(x_BTD)
            latent_BTR, shared_BTP = jnp.split(einsum("btd,dr->btr", x_BTD, kv_down), [R], axis=-1)
            latent_BTR = rms_norm(latent_BTR, kv_norm, c.norm_eps)
        with jax.named_scope("attention"):
            o_BTHV = _attend(config, q_BTHK, (latent_BTR, shared_BTP), (k_up, v_up), segment_ids_BT)
        with jax.named_scope("mla_output"):
            if c.output_gate:
                axes = ("embed", "heads", "value")
                out_gate = matrix(self, config, "out_gate", (D, H, V), axes)
                gate_BTHV = einsum("btd,dhv->bthv", x_BTD, out_gate)
                o_BTHV = o_BTHV * jax.nn.sigmoid(gate_BTHV.astype(o_BTHV.dtype))
            return einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), o_proj)

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        """Queries, through a normed low-rank latent unless q_lora_rank is None."""
        config, c = self.config, self.config.mla
        H, K = c.num_heads, c.nope_dim + c.rope_dim
        if c.q_lora_rank is None:
            q_proj = matrix(self, config, "q_proj", (config.dim, H, K), ("embed", "heads", "key"))
            return einsum("btd,dhk->bthk", x_BTD, q_proj)
        R = c.q_lora_rank
        q_down = matrix(self, config, "q_down", (config.dim, R), ("embed", "rank"))
        q_norm = param(self, config, "q_norm", (R,), ("rank",), nn.initializers.ones)
        q_up = matrix(self, config, "q_up", (R, H, K), ("rank_in", "heads", "key"))
        latent_BTR = rms_norm(einsum("btd,dr->btr", x_BTD, q_down), q_norm, c.norm_eps)
        return einsum("btr,rhk->bthk", latent_BTR, q_up)
