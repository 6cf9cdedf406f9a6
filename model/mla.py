"""Gated multi-head latent attention without positions (Kimi K3 report Eq. 7)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.attention import attention
from model.config import ModelConfig
from model.layers import einsum, param, rms_norm


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
        k_up = param(self, config, "k_up", (R, H, N), ("rank", "heads", "key"))
        v_up = param(self, config, "v_up", (R, H, V), ("rank", "heads", "value"))
        o_proj = param(self, config, "o_proj", (H, V, D), ("heads", "value", "embed"))

        with jax.named_scope("mla_inputs"):
            q_BTHK = self._queries(x_BTD)
            latent_BTR, shared_BTP = jnp.split(einsum("btd,dr->btr", x_BTD, kv_down), [R], axis=-1)
            latent_BTR = rms_norm(latent_BTR, kv_norm, c.norm_eps)
            k_BTHN = einsum("btr,rhn->bthn", latent_BTR, k_up)
            shared_BTHP = jnp.broadcast_to(shared_BTP[:, :, None], (*k_BTHN.shape[:3], P))
            k_BTHK = jnp.concatenate([k_BTHN, shared_BTHP], axis=-1)
            v_BTHV = einsum("btr,rhv->bthv", latent_BTR, v_up)
        with jax.named_scope("attention"):
            o_BTHV = attention(
                q_BTHK,
                k_BTHK,
                v_BTHV,
                segment_ids=segment_ids_BT,
                scale=(N + P) ** -0.5,
                implementation=c.implementation,
            )
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
        q_up = param(self, config, "q_up", (R, H, K), ("rank", "heads", "key"))
        latent_BTR = rms_norm(einsum("btd,dr->btr", x_BTD, q_down), q_norm, c.norm_eps)
        return einsum("btr,rhk->bthk", latent_BTR, q_up)
