"""What every module shares: declaring a parameter, RMSNorm, precision, short convolution."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model.config import ModelConfig
from model.sharding import Part, gather, num_parts, part, scatter, sizes


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The "fp32" of the design: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(dtype, jnp.float32)


def matrix(
    module: nn.Module,
    config: ModelConfig,
    name: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: nn.initializers.Initializer | None = None,
) -> Part:
    """Declares a parameter of `module`: its whole shape, logical axes, initialiser; dtype is the
    config's. Returns this device's part, for `einsum`, `embed` and model.sharding.gather.

    The default initialiser is normal with config.init_std. Logical axes are kept as Linen metadata
    (nn.Partitioned) until model.transformer.init_params takes the boxes off.
    """
    if sizes() and module.has_variable("params", name):
        value = module.get_variable("params", name)  # param() would refuse a part's shape
    else:
        init = init or nn.initializers.normal(config.init_std)
        boxed = nn.with_logical_partitioning(init, tuple(axes))
        value = module.param(name, boxed, tuple(shape), jnp.dtype(config.param_dtype))
    return part(value, shape, axes, config.shard_min_size)


def param(*args: Any) -> jax.Array:
    """Declares a parameter as `matrix` does and returns all of it, in its own dtype."""
    return gather(matrix(*args))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim; computed in fp32, returned in x's
    dtype."""
    x32 = x.astype(at_least_float32(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight.astype(x32.dtype), x32.shape)
    return (x32 * inverse * weight).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(spec: str, x: jax.Array, weight: Part, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """einsum of an activation and a weight in the activation's dtype, for example
    "btd,dhk->bthk"; the result in out_dtype (None: the activation's), the weight's gradient
    accumulated, summed over devices and returned in the weight's dtype."""
    whole = gather(weight, x.dtype)
    return jnp.einsum(spec, x, whole, preferred_element_type=out_dtype or x.dtype)


def _einsum_fwd(
    spec: str, x: jax.Array, weight: Part, out_dtype: jnp.dtype | None
) -> tuple[jax.Array, tuple[jax.Array, Part]]:
    return einsum(spec, x, weight, out_dtype), (x, weight)


def _einsum_bwd(
    spec: str,
    out_dtype: jnp.dtype | None,
    residuals: tuple[jax.Array, Part],
    dy: jax.Array,
) -> tuple[jax.Array, Part]:
    # The weight's gradient with the narrower of x and dy as the left operand: XLA's CPU backend
    # computes the left one transposed, element by element. Autodiff puts dy there, which took a
    # third of a whole training step.
    x, weight = residuals
    dy = dy.astype(x.dtype)
    (x_dims, w_dims), y_dims = spec.split("->")[0].split(","), spec.split("->")[1]
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, gather(weight, dy.dtype))
    left, right = ((x_dims, x), (y_dims, dy)) if x.size <= dy.size else ((y_dims, dy), (x_dims, x))
    dw = jnp.einsum(
        f"{left[0]},{right[0]}->{w_dims}",
        left[1],
        right[1],
        preferred_element_type=weight.value.dtype,
    )
    return dx, dataclasses.replace(weight, value=scatter(dw, weight.dims))


einsum.defvjp(_einsum_fwd, _einsum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(weight_WD: Part, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows [B, T, D] of tokens in `dtype`; their gradients are summed in the weight's.

    A device that has columns of the table looks up the tokens of all devices that have the others,
    and they exchange what they found: much less than the table.
    """
    return _embed_fwd(weight_WD, tokens_BT, dtype)[0]


def _embed_fwd(
    weight_WD: Part, tokens_BT: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[Part, jax.Array]]:
    tokens_M = tokens_BT.reshape(-1)
    for _, over in weight_WD.dims:
        tokens_M = jax.lax.all_gather(tokens_M, over, tiled=True)
    rows_MD = weight_WD.value.astype(dtype)[tokens_M]
    for _, over in weight_WD.dims:
        rows_MD = jax.lax.all_to_all(rows_MD, over, 0, 1, tiled=True)
    return rows_MD.reshape(*tokens_BT.shape, -1), (weight_WD, tokens_M)


def _embed_bwd(
    _: jnp.dtype, residuals: tuple[Part, jax.Array], dx_BTD: jax.Array
) -> tuple[Part, None]:
    weight_WD, tokens_M = residuals
    dx_MD = dx_BTD.reshape(-1, dx_BTD.shape[-1])
    for _, over in weight_WD.dims:
        dx_MD = jax.lax.all_to_all(dx_MD, over, 1, 0, tiled=True)
    table = weight_WD.value
    dtable_WD = jnp.zeros_like(table).at[tokens_M].add(dx_MD.astype(table.dtype))
    return dataclasses.replace(weight_WD, value=dtable_WD), None


embed.defvjp(_embed_fwd, _embed_bwd)


def short_conv(
    x_BTHK: jax.Array, weight_CHK: jax.Array, segment_ids_BT: jax.Array | None
) -> jax.Array:
    """Causal depthwise convolution over time, then SiLU (Kimi K3 report Eq. 2).

    weight_CHK[-1] meets the present token. A tap that would read before the start of the token's
    own segment reads zero. Inside model.sharding.spread a device must have at least C - 1 tokens.
    """
    T, before = x_BTHK.shape[1], weight_CHK.shape[0] - 1
    weight_CHK = weight_CHK.astype(x_BTHK.dtype)
    x_BSHK = _after_last(x_BTHK, before)
    if segment_ids_BT is not None:
        segment_ids_BS = _after_last(segment_ids_BT, before)
    out = jnp.zeros_like(x_BTHK)
    for lag in range(before + 1):
        start = before - lag
        shifted = x_BSHK[:, start : start + T]
        if lag and segment_ids_BT is not None:
            inside = segment_ids_BS[:, start : start + T] == segment_ids_BT
            shifted = jnp.where(inside[:, :, None, None], shifted, 0)
        out += shifted * weight_CHK[start][None, None]
    return jax.nn.silu(out.astype(at_least_float32(out.dtype))).astype(out.dtype)


def _after_last(x_BT: jax.Array, count: int) -> jax.Array:
    """x behind the last `count` tokens of the device before; zeros on the first one."""
    size = num_parts(("sequence",))
    if size == 1 or not count:
        return jnp.pad(x_BT, ((0, 0), (count, 0)) + ((0, 0),) * (x_BT.ndim - 2))
    if x_BT.shape[1] < count:
        raise ValueError(
            f"{x_BT.shape[1]} tokens on each of {size} devices of the mesh axis 'sequence' are "
            f"fewer than the {count} that a convolution looks back; try mesh.sequence=1"
        )
    pairs = [(n, n + 1) for n in range(size - 1)]
    last = jax.lax.ppermute(x_BT[:, -count:], "sequence", pairs)
    return jnp.concatenate([last, x_BT], axis=1)
