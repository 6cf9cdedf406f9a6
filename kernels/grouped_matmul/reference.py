"""grouped_matmul by multiplying every row with every matrix: the oracle, E times the work."""

import jax
import jax.numpy as jnp

from kernels.grouped_matmul.groups import group_of_row
from kernels.numerics import accumulation_dtype, precision_for


def grouped_matmul_reference(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """See kernels.grouped_matmul.grouped_matmul."""
    num_rows, num_groups = x_MK.shape[0], w_EKN.shape[0]
    group_M = group_of_row(group_sizes_E, jnp.arange(num_rows))
    # Selected before the product too: 0 * NaN in the gradient of w would be NaN.
    x_MK = jnp.where((group_M < num_groups)[:, None], x_MK, 0)
    y_EMN = jnp.einsum(
        "mk,ekn->emn",
        x_MK,
        w_EKN,
        precision=precision_for(x_MK.dtype),
        preferred_element_type=accumulation_dtype(x_MK.dtype),
    )
    chosen_EM = group_M[None, :] == jnp.arange(num_groups)[:, None]
    return jnp.where(chosen_EM[:, :, None], y_EMN, 0).sum(axis=0).astype(x_MK.dtype)
