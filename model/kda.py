"""The KDA layer around the operator (Kimi K3 report Eq. 1-6; Kimi Linear section 3)."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.kda import kda, kda_context_parallel
from model.config import ModelConfig
from model.layers import at_least_float32, einsum, matrix, param, rms_norm, short_conv
from model.sharding import num_parts

DT_MIN, DT_MAX = 1e-3, 0.1


def dt_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Inverse softplus of a step size drawn log-uniformly from [1e-3, 0.1] (fla's KDA layer)."""
    uniform = jax.random.uniform(key, shape, dtype)
    dt = jnp.exp(uniform * (math.log(DT_MAX) - math.log(DT_MIN)) + math.log(DT_MIN))
    dt = jnp.maximum(dt, 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))


def log_uniform_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """log U(1, 16): A_log of the softplus gate (Kimi Linear)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def conv_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """U(-1/sqrt(taps), 1/sqrt(taps)), the usual start of a depthwise convolution."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _convolve_and_mix(
    config: ModelConfig,
    tokens: dict[str, jax.Array],
    convs: dict[str, jax.Array],
    of_heads: dict[str, jax.Array],
    segment_ids_BT: jax.Array | None,
) -> jax.Array:
    """o_BTHV of the operator behind its convolutions."""
    c = config.kda
    with jax.named_scope("short_conv"):
        convolved = {
            name: short_conv(tokens[name], weight, segment_ids_BT) for name, weight in convs.items()
        }
    call = dict(
        **(tokens | convolved),
        **of_heads,
        segment_ids=segment_ids_BT,
        gate_kind=c.gate_kind,
        lower_bound=c.lower_bound if c.gate_kind == "bounded" else None,
        chunk_size=c.chunk_size,
        num_splits=c.num_splits,
        # What is kept of a rematerialised layer is gone before the next layer's turn.
        residuals="default" if config.remat == "none" else "full",
        implementation=c.implementation,
    )
    with jax.named_scope("kda"):
        if num_parts(("sequence",)) > 1:
            return kda_context_parallel(**call, axis_name="sequence")
        return kda(**call)[0]


class KDALayer(nn.Module):
    """x_BTD -> y_BTD: projections, short convolutions, gates, KDA, gated head norm, output."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        config, c = self.config, self.config.kda
        D, H, HV, K, V = config.dim, c.num_heads, c.value_heads, c.key_dim, c.value_dim
        qk_axes, v_axes = ("embed", "heads", "key"), ("embed", "heads", "value")
        q_proj = matrix(self, config, "q_proj", (D, H, K), qk_axes)
        k_proj = matrix(self, config, "k_proj", (D, H, K), qk_axes)
        v_proj = matrix(self, config, "v_proj", (D, HV, V), v_axes)
        qk_conv = (c.conv_size, H, K), ("conv", "heads", "key"), conv_init
        q_conv = param(self, config, "q_conv", *qk_conv)
        k_conv = param(self, config, "k_conv", *qk_conv)
        v_conv_axes = ("conv", "heads", "value")
        v_conv = param(self, config, "v_conv", (c.conv_size, HV, V), v_conv_axes, conv_init)
        gate_down = matrix(self, config, "gate_down", (D, c.rank), ("embed", "rank"))
        gate_up = matrix(self, config, "gate_up", (c.rank, HV, K), ("rank_in", "heads", "key"))
        a_log_init = nn.initializers.zeros if c.gate_kind == "bounded" else log_uniform_init
        a_log = param(self, config, "a_log", (HV,), ("heads",), a_log_init)
        dt_bias = param(self, config, "dt_bias", (HV, K), ("heads", "key"), dt_bias_init)
        beta_proj = matrix(self, config, "beta_proj", (D, HV), ("embed", "heads"))
        out_norm = param(self, config, "out_norm", (V,), ("value",), nn.initializers.ones)
        o_proj = matrix(self, config, "o_proj", (HV, V, D), ("heads", "value", "embed"))

        with jax.named_scope("kda_inputs"):
            low_rank_BTR = einsum("btd,dr->btr", x_BTD, gate_down)
            tokens = {
                "q": einsum("btd,dhk->bthk", x_BTD, q_proj),
                "k": einsum("btd,dhk->bthk", x_BTD, k_proj),
                "v": einsum("btd,dhv->bthv", x_BTD, v_proj),
                "gate": einsum("btr,rhk->bthk", low_rank_BTR, gate_up),
                "beta": einsum("btd,dh->bth", x_BTD, beta_proj),
            }
        of_heads = {"a_log": a_log, "dt_bias": dt_bias}
        convs = {"q": q_conv, "k": k_conv, "v": v_conv}
        o_BTHV = _convolve_and_mix(config, tokens, convs, of_heads, segment_ids_BT)
        with jax.named_scope("kda_output"):
            gate_BTHV = self._output_gate(x_BTD)
            gate_BTHV = jax.nn.sigmoid(gate_BTHV.astype(at_least_float32(gate_BTHV.dtype)))
            o_BTHV = rms_norm(o_BTHV, out_norm, config.norm_eps)
            o_BTHV = (o_BTHV * gate_BTHV).astype(x_BTD.dtype)
            return einsum("bthv,hvd->btd", o_BTHV, o_proj)

    def _output_gate(self, x_BTD: jax.Array) -> jax.Array:
        """W_g x: full rank (K3) or through rank value_dim (Kimi Linear)."""
        config, c = self.config, self.config.kda
        D, HV, V = config.dim, c.value_heads, c.value_dim
        if c.output_gate == "full":
            gate = matrix(self, config, "out_gate", (D, HV, V), ("embed", "heads", "value"))
            return einsum("btd,dhv->bthv", x_BTD, gate)
        down = matrix(self, config, "out_gate_down", (D, V), ("embed", "rank"))
        up = matrix(self, config, "out_gate_up", (V, HV, V), ("rank_in", "heads", "value"))
        return einsum("btr,rhv->bthv", einsum("btd,dr->btr", x_BTD, down), up)
