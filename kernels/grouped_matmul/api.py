"""The public front of grouped_matmul: checks the call and chooses an implementation."""

import jax
import jax.numpy as jnp

from kernels.grouped_matmul.ragged_dot import grouped_matmul_ragged_dot
from kernels.grouped_matmul.reference import grouped_matmul_reference
from kernels.grouped_matmul.xla import grouped_matmul_xla
from kernels.numerics import platform, vary_together

IMPLEMENTATIONS = ("reference", "xla", "ragged_dot")


def grouped_matmul(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    group_sizes_E: jax.Array,
    *,
    group_multiple: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows with the matrix of its group.

    Rows are sorted by group: the first group_sizes[0] rows meet w[0], the next group_sizes[1] rows
    w[1], and so on. This is the expert product E_i(z) of Stable LatentMoE (Kimi K3 report Eq. 11)
    after tokens are sorted by expert. Differentiable in x and w.

    Args:
      x_MK: rows, floating point.
      w_EKN: one matrix per group, in x's dtype.
      group_sizes_E: rows per group, integers >= 0 with a sum of at most M. Rows past the sum belong
        to no group: their output is 0, their gradient is 0, and their contents (even NaN) are
        never used.
      group_multiple: a promise that every entry of group_sizes is a multiple of this number. With
        64 or 128, "xla" needs no rearranging of rows. A broken promise gives wrong results without
        a word, since group_sizes may be traced.
      implementation: "xla" (work proportional to M, the default on CPU and GPU), "ragged_dot"
        (jax.lax.ragged_dot, the default on TPU), "reference" (every row with every matrix), or
        None for the default.

    Returns:
      y_MN in x's dtype; products are summed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes, group_multiple or implementation do not fit.
    """
    _check(x_MK, w_EKN, group_sizes_E, group_multiple)
    if implementation is None:
        implementation = "ragged_dot" if platform() == "tpu" else "xla"
    x_MK, w_EKN, group_sizes_E = vary_together(x_MK, w_EKN, group_sizes_E)
    if implementation == "xla":
        return grouped_matmul_xla(x_MK, w_EKN, group_sizes_E, group_multiple)
    if implementation == "ragged_dot":
        return grouped_matmul_ragged_dot(x_MK, w_EKN, group_sizes_E)
    if implementation == "reference":
        return grouped_matmul_reference(x_MK, w_EKN, group_sizes_E)
    raise ValueError(
        f"grouped_matmul has no implementation {implementation!r}; use None or one of "
        f"{', '.join(IMPLEMENTATIONS)}."
    )


def _check(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, group_multiple: int
) -> None:
    if x_MK.ndim != 2 or w_EKN.ndim != 3 or group_sizes_E.ndim != 1:
        raise ValueError(
            "grouped_matmul takes x [M,K], w [E,K,N] and group_sizes [E]; got shapes "
            f"{x_MK.shape}, {w_EKN.shape} and {group_sizes_E.shape}."
        )
    if x_MK.shape[1] != w_EKN.shape[1]:
        raise ValueError(
            f"x has rows of width {x_MK.shape[1]} but w multiplies rows of width "
            f"{w_EKN.shape[1]}; the K of x [M,K] and of w [E,K,N] must be equal."
        )
    if group_sizes_E.shape[0] != w_EKN.shape[0]:
        raise ValueError(
            f"group_sizes has {group_sizes_E.shape[0]} entries for the {w_EKN.shape[0]} matrices "
            "of w; give one size per matrix (0 for an empty group)."
        )
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ValueError(f"group_sizes counts rows; got dtype {group_sizes_E.dtype}, use int32.")
    if x_MK.dtype != w_EKN.dtype or not jnp.issubdtype(x_MK.dtype, jnp.floating):
        raise ValueError(
            f"x and w must share one floating dtype; got {x_MK.dtype} and {w_EKN.dtype}. "
            "Cast both to the compute dtype, for example bfloat16."
        )
    if group_multiple < 1:
        raise ValueError(f"group_multiple is {group_multiple}; it must be at least 1 (no promise).")
