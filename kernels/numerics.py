"""What operators share: precision of products, and array types inside jax.shard_map."""

import jax
import jax.numpy as jnp


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Full precision for float32 and float64; the hardware's own product for narrower types."""
    wide = jnp.dtype(dtype).itemsize >= 4
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which sums of such values are kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, typed as varying over every manual mesh axis that any of them varies over.

    Inside jax.shard_map a loop must carry what it was started with, and a custom gradient must vary
    like its input. Operators with either call this on their inputs; the gradient of an input that
    was the same on all devices is then summed over them, as it must be. Outside it does nothing.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arrays, varying, strict=True)
    )
