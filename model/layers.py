"""What every module shares: declaring a parameter, RMSNorm, precision, short convolution."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from model.config import ModelConfig


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The "fp32" of the design: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(dtype, jnp.float32)


def param(
    module: nn.Module,
    config: ModelConfig,
    name: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: nn.initializers.Initializer | None = None,
) -> jax.Array:
    """Declares a parameter of `module`: shape, logical axes, initialiser; dtype is the config's.

    The default initialiser is normal with config.init_std. Logical axes are kept as Linen metadata
    (nn.Partitioned) until model.transformer.init_params takes the boxes off.
    """
    init = init or nn.initializers.normal(config.init_std)
    boxed = nn.with_logical_partitioning(init, tuple(axes))
    return module.param(name, boxed, tuple(shape), jnp.dtype(config.param_dtype))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim; computed in fp32, returned in x's
    dtype."""
    x32 = x.astype(at_least_float32(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight.astype(x32.dtype), x32.shape)
    return (x32 * inverse * weight).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(
    spec: str, x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """einsum of an activation and a weight in the activation's dtype, for example
    "btd,dhk->bthk"; the result in out_dtype (None: the activation's), the weight's gradient
    accumulated and returned in the weight's dtype."""
    return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)


def _einsum_fwd(
    spec: str, x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return einsum(spec, x, weight, out_dtype), (x, weight)


def _einsum_bwd(
    spec: str,
    out_dtype: jnp.dtype | None,
    residuals: tuple[jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    # The weight's gradient with the narrower of x and dy as the left operand: XLA's CPU backend
    # computes the left one transposed, element by element. Autodiff puts dy there, which took a
    # third of a whole training step.
    x, weight = residuals
    dy = dy.astype(x.dtype)
    (x_dims, w_dims), y_dims = spec.split("->")[0].split(","), spec.split("->")[1]
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, weight.astype(dy.dtype))
    left, right = ((x_dims, x), (y_dims, dy)) if x.size <= dy.size else ((y_dims, dy), (x_dims, x))
    dw = jnp.einsum(
        f"{left[0]},{right[0]}->{w_dims}", left[1], right[1], preferred_element_type=weight.dtype
    )
    return dx, dw


einsum.defvjp(_einsum_fwd, _einsum_bwd)


def short_conv(
    x_BTHK: jax.Array, weight_CHK: jax.Array, segment_ids_BT: jax.Array | None
) -> jax.Array:
    """Causal depthwise convolution over time, then SiLU (Kimi K3 report Eq. 2).

    weight_CHK[-1] meets the present token. A tap that would read before the start of the token's
    own segment reads zero.
    """
    T = x_BTHK.shape[1]
    num_taps = weight_CHK.shape[0]
    weight_CHK = weight_CHK.astype(x_BTHK.dtype)
    out = jnp.zeros_like(x_BTHK)
    for lag in range(min(num_taps, T)):
        shifted = jnp.pad(x_BTHK, ((0, 0), (lag, 0), (0, 0), (0, 0)))[:, :T]
        if lag and segment_ids_BT is not None:
            earlier = jnp.pad(segment_ids_BT, ((0, 0), (lag, 0)))[:, :T]
            inside = (earlier == segment_ids_BT) & (jnp.arange(T) >= lag)[None]
            shifted = jnp.where(inside[:, :, None, None], shifted, 0)
        out += shifted * weight_CHK[num_taps - 1 - lag][None, None]
    return jax.nn.silu(out.astype(at_least_float32(out.dtype))).astype(out.dtype)
