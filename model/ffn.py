"""Gated feed-forward layers: SiTU-GLU (Kimi K3 report Eq. 12) and SwiGLU."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from model.config import ModelConfig
from model.layers import at_least_float32, einsum, matrix


def situ_glu(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float | None) -> jax.Array:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), elementwise.

    SiLU with soft limits: |result| <= beta * linear_beta. linear_beta None passes `up` unchanged.
    Computed in fp32, returned in gate's dtype (Kimi K3 report Eq. 12).
    """
    dtype = at_least_float32(gate.dtype)
    gate32, up32 = gate.astype(dtype), up.astype(dtype)
    limited = beta * jnp.tanh(gate32 / beta) * jax.nn.sigmoid(gate32)
    if linear_beta is not None:
        up32 = linear_beta * jnp.tanh(up32 / linear_beta)
    return (limited * up32).astype(gate.dtype)


def glu(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
    """The configured gated linear unit of every FFN: "situ" or "swiglu"."""
    if config.activation == "situ":
        return situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)
    dtype = at_least_float32(gate.dtype)
    return (jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)).astype(gate.dtype)


class FFN(nn.Module):
    """x_BTD -> y_BTD, hidden width F: the dense layers and the shared experts."""

    config: ModelConfig
    hidden: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        D, F = self.config.dim, self.hidden
        w_gate = matrix(self, self.config, "ffn_gate", (D, F), ("embed", "hidden"))
        w_up = matrix(self, self.config, "ffn_up", (D, F), ("embed", "hidden"))
        w_down = matrix(self, self.config, "ffn_down", (F, D), ("hidden_in", "embed_out"))
        gate_BTF = einsum("btd,df->btf", x_BTD, w_gate)
        up_BTF = einsum("btd,df->btf", x_BTD, w_up)
        return einsum("btf,fd->btd", glu(gate_BTF, up_BTF, self.config), w_down)
