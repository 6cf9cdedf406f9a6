"""grouped_matmul by jax.lax.ragged_dot: the grouped kernel of XLA on TPU."""

import jax
import jax.numpy as jnp

from kernels.numerics import precision_for


def grouped_matmul_ragged_dot(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """See kernels.grouped_matmul.grouped_matmul. On CPU it costs as much as all E products."""
    in_a_group_M1 = (jnp.arange(x_MK.shape[0]) < group_sizes_E.sum())[:, None]
    # What ragged_dot does with rows past the last group is up to the backend, so they are cut off
    # on both sides: the first select guards the gradients, the second the output.
    y_MN = jax.lax.ragged_dot(
        jnp.where(in_a_group_M1, x_MK, 0),
        w_EKN,
        group_sizes_E.astype(jnp.int32),
        precision=precision_for(x_MK.dtype),
        preferred_element_type=x_MK.dtype,
    )
    return jnp.where(in_a_group_M1, y_MN, 0)
