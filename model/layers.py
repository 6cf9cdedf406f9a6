"""What every module shares: declaring a parameter, RMSNorm, precision, short convolution."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from model.config import ModelConfig
from model.sharding import lay_out, whole


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
    value = module.param(name, boxed, tuple(shape), jnp.dtype(config.param_dtype))
    return lay_out(value, axes, config.shard_min_size)


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
    weight = whole(weight.astype(x.dtype))
    return jnp.einsum(spec, x, weight, preferred_element_type=out_dtype or x.dtype)


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
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, whole(weight.astype(dy.dtype)))
    left, right = ((x_dims, x), (y_dims, dy)) if x.size <= dy.size else ((y_dims, dy), (x_dims, x))
    dw = jnp.einsum(
        f"{left[0]},{right[0]}->{w_dims}", left[1], right[1], preferred_element_type=weight.dtype
    )
    return dx, dw


einsum.defvjp(_einsum_fwd, _einsum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(weight_WD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows [B, T, D] of tokens in `dtype`; their gradients are summed in the weight's."""
    return whole(weight_WD.astype(dtype))[tokens_BT]


def _embed_fwd(
    weight_WD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embed(weight_WD, tokens_BT, dtype), (weight_WD, tokens_BT)


def _embed_bwd(
    _: jnp.dtype, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array
) -> tuple[jax.Array, None]:
    weight_WD, tokens_BT = residuals
    return jnp.zeros_like(weight_WD).at[tokens_BT].add(dx_BTD.astype(weight_WD.dtype)), None


embed.defvjp(_embed_fwd, _embed_bwd)


def short_conv(
    x_BTHK: jax.Array,
    weight_CHK: jax.Array,
    segment_ids_BT: jax.Array | None,
    axis_name: str | None = None,
) -> jax.Array:
    """Causal depthwise convolution over time, then SiLU (Kimi K3 report Eq. 2).

    weight_CHK[-1] meets the present token. A tap that would read before the start of the token's
    own segment reads zero. Inside jax.shard_map, axis_name is the mesh axis over which the tokens
    lie, at least C - 1 on each device.
    """
    T, before = x_BTHK.shape[1], weight_CHK.shape[0] - 1
    weight_CHK = weight_CHK.astype(x_BTHK.dtype)
    x_BSHK = _after_last(x_BTHK, before, axis_name)
    if segment_ids_BT is not None:
        segment_ids_BS = _after_last(segment_ids_BT, before, axis_name)
    out = jnp.zeros_like(x_BTHK)
    for lag in range(before + 1):
        start = before - lag
        shifted = x_BSHK[:, start : start + T]
        if lag and segment_ids_BT is not None:
            inside = segment_ids_BS[:, start : start + T] == segment_ids_BT
            shifted = jnp.where(inside[:, :, None, None], shifted, 0)
        out += shifted * weight_CHK[start][None, None]
    return jax.nn.silu(out.astype(at_least_float32(out.dtype))).astype(out.dtype)


def _after_last(x_BT: jax.Array, count: int, axis_name: str | None) -> jax.Array:
    """x behind the last `count` tokens of the device before; zeros on the first one."""
    size = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    if size == 1 or not count:
        return jnp.pad(x_BT, ((0, 0), (count, 0)) + ((0, 0),) * (x_BT.ndim - 2))
    if x_BT.shape[1] < count:
        raise ValueError(
            f"{x_BT.shape[1]} tokens on each of {size} devices of the mesh axis {axis_name!r} are "
            f"fewer than the {count} that a convolution looks back; try mesh.{axis_name}=1"
        )
    pairs = [(n, n + 1) for n in range(size - 1)]
    last = jax.lax.ppermute(x_BT[:, -count:], axis_name, pairs)
    return jnp.concatenate([last, x_BT], axis=1)
