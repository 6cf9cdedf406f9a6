"""What operators share: precision, the platform, and array types inside jax.shard_map."""

from typing import TypeVar

import jax
import jax.numpy as jnp

Shapes = TypeVar("Shapes")  # a tree of jax.ShapeDtypeStruct


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Full precision for float32 and float64; the hardware's own product for narrower types."""
    wide = jnp.dtype(dtype).itemsize >= 4
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which sums of such values are kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def platform() -> str:
    """What the program being traced is for, such as "cpu", "gpu" or "tpu".

    The default backend's, unless jax.sharding.use_abstract_mesh names another device: so programs
    are compiled ahead of time for what is not there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    # A device names its own kind of GPU, a backend does not.
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, typed as varying over every manual mesh axis that any of them varies over.

    Inside jax.shard_map a loop must carry what it was started with, and a custom gradient must vary
    like its input. Operators with either call this on their inputs; the gradient of an input that
    was the same on all devices is then summed over them, as it must be. Outside, and with
    check_vma=False, where nothing is typed, it does nothing.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arrays, varying, strict=True)
    )


def varying_like(x: jax.Array, shapes: Shapes) -> Shapes:
    """The same shapes for outputs that vary over the mesh axes of jax.shard_map as x does."""
    manual = jax.typeof(x).manual_axis_type
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=manual), shapes
    )
