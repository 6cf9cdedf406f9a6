"""grouped_matmul in plain XLA with work proportional to the rows, not to the number of matrices.

Rows are cut into blocks of which each belongs to one group, so the product is a batched matmul of
blocks with gathered matrices. Letters: J blocks of C rows each.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.grouped_matmul.groups import group_of_row
from kernels.numerics import accumulation_dtype, precision_for

# The matrices gathered for blocks that are multiplied at the same time may take this much memory.
GATHER_BYTES = 256 * 2**20
# Blocks shorter than this would read more weights than rows; such promises are not relied upon.
MIN_BLOCK_ROWS = 16
MAX_BLOCK_ROWS = 128
# Blocks whose weight gradients are summed together before they meet the accumulator.
GRADIENT_BLOCKS = 8


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul_xla(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, group_multiple: int
) -> jax.Array:
    """See kernels.grouped_matmul.grouped_matmul."""
    layout = _layout(x_MK.shape[0], group_sizes_E, group_multiple)
    y_JCN = _multiply_blocks(_to_blocks(x_MK, layout, w_EKN.shape[0]), w_EKN, layout.group_J)
    return _from_blocks(y_JCN, layout, x_MK.shape[0])


def _forward(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, group_multiple: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    y_MN = grouped_matmul_xla(x_MK, w_EKN, group_sizes_E, group_multiple)
    return y_MN, (x_MK, w_EKN, group_sizes_E)


def _backward(
    group_multiple: int, saved: tuple[jax.Array, jax.Array, jax.Array], dy_MN: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, group_sizes_E = saved
    layout = _layout(x_MK.shape[0], group_sizes_E, group_multiple)
    x_JCK = _to_blocks(x_MK, layout, w_EKN.shape[0])
    dy_JCN = _to_blocks(dy_MN, layout, w_EKN.shape[0])
    dx_JCK = _multiply_blocks(dy_JCN, w_EKN, layout.group_J, transpose=True)
    dw_EKN = _sum_outer_products(x_JCK, dy_JCN, layout.group_J, w_EKN)
    return _from_blocks(dx_JCK, layout, x_MK.shape[0]), dw_EKN, None


grouped_matmul_xla.defvjp(_forward, _backward)


class _Layout(NamedTuple):
    """How rows map to the slots of blocks. What belongs to no group gets an index just out of
    range, which reads with mode="fill" turn into zeros."""

    block_rows: int
    group_J: jax.Array  # E for a block of no group
    row_of_slot: jax.Array | None  # [J*C], M for an empty slot; None when slot s holds row s
    slot_of_row: jax.Array | None  # [M], J*C for a row of no group


def _layout(num_rows: int, group_sizes_E: jax.Array, group_multiple: int) -> _Layout:
    num_groups = group_sizes_E.shape[0]
    if group_multiple >= MIN_BLOCK_ROWS:
        # A last, shorter block can only hold rows past the last group.
        starts_J = jnp.arange(num_rows // group_multiple) * group_multiple
        return _Layout(group_multiple, group_of_row(group_sizes_E, starts_J), None, None)

    block_rows = MIN_BLOCK_ROWS
    while block_rows < min(MAX_BLOCK_ROWS, num_rows // num_groups):
        block_rows *= 2
    # Every group that is not empty may waste up to block_rows - 1 slots.
    num_blocks = (num_rows + min(num_rows, num_groups) * (block_rows - 1)) // block_rows
    num_slots = num_blocks * block_rows
    padded_E = -(-group_sizes_E // block_rows) * block_rows
    first_row_E = jnp.cumsum(group_sizes_E) - group_sizes_E
    first_slot_E = jnp.cumsum(padded_E) - padded_E

    slots = jnp.arange(num_slots)
    group_J = group_of_row(padded_E, slots[::block_rows])
    group = jnp.repeat(group_J, block_rows, total_repeat_length=num_slots)
    offset = slots - first_slot_E.at[group].get(mode="clip")
    filled = (group < num_groups) & (offset < group_sizes_E.at[group].get(mode="clip"))
    row_of_slot = jnp.where(filled, first_row_E.at[group].get(mode="clip") + offset, num_rows)

    rows = jnp.arange(num_rows)
    group_M = group_of_row(group_sizes_E, rows)
    slot_M = first_slot_E.at[group_M].get(mode="clip") + rows
    slot_M -= first_row_E.at[group_M].get(mode="clip")
    return _Layout(
        block_rows, group_J, row_of_slot, jnp.where(group_M < num_groups, slot_M, num_slots)
    )


def _to_blocks(x_MK: jax.Array, layout: _Layout, num_groups: int) -> jax.Array:
    """Rows in block form [J,C,K]; slots of no group hold 0, whatever the rows there hold."""
    num_blocks, width = layout.group_J.shape[0], x_MK.shape[1]
    if layout.row_of_slot is not None:
        x = x_MK.at[layout.row_of_slot].get(mode="fill", fill_value=0)
        return x.reshape(num_blocks, layout.block_rows, width)
    x_JCK = x_MK[: num_blocks * layout.block_rows].reshape(num_blocks, layout.block_rows, width)
    return jnp.where((layout.group_J < num_groups)[:, None, None], x_JCK, 0)


def _from_blocks(y_JCN: jax.Array, layout: _Layout, num_rows: int) -> jax.Array:
    """Rows [M,N] out of block form; rows of no group are 0."""
    y = y_JCN.reshape(-1, y_JCN.shape[2])
    if layout.slot_of_row is not None:
        return y.at[layout.slot_of_row].get(mode="fill", fill_value=0)
    return jnp.pad(y, ((0, num_rows - y.shape[0]), (0, 0)))


def _multiply_blocks(
    x_JCK: jax.Array, w_EKN: jax.Array, group_J: jax.Array, *, transpose: bool = False
) -> jax.Array:
    """Each block times its group's matrix (or its transpose), in x's dtype."""
    product = "ck,nk->cn" if transpose else "ck,kn->cn"

    def multiply(x_CK: jax.Array, group: jax.Array) -> jax.Array:
        w_KN = w_EKN.at[group].get(mode="clip")
        y_CN = jnp.einsum(
            product,
            x_CK,
            w_KN,
            precision=precision_for(x_CK.dtype),
            preferred_element_type=accumulation_dtype(x_CK.dtype),
        )
        return y_CN.astype(x_CK.dtype)

    at_once = max(1, GATHER_BYTES * w_EKN.shape[0] // (w_EKN.size * w_EKN.dtype.itemsize))
    if group_J.shape[0] <= at_once:
        return jax.vmap(multiply)(x_JCK, group_J)
    return jax.lax.map(lambda block: multiply(*block), (x_JCK, group_J), batch_size=at_once)


def _sum_outer_products(
    x_JCK: jax.Array, dy_JCN: jax.Array, group_J: jax.Array, w_EKN: jax.Array
) -> jax.Array:
    """The gradient of w: for each group the sum of x^T dy over its blocks.

    Goes over slices of G blocks. Blocks are sorted by group, so in a slice every group is one run:
    the run totals come from a small matmul, and the last block of each run adds its total to the
    accumulator. No two rows of one update collide, hence the result does not depend on the order in
    which a device works.
    """
    num_groups, width_in, width_out = w_EKN.shape
    dtype = accumulation_dtype(w_EKN.dtype)
    matrix_bytes = width_in * width_out * dtype.itemsize
    slice_blocks = max(1, min(GRADIENT_BLOCKS, GATHER_BYTES // matrix_bytes))
    num_slices = -(-group_J.shape[0] // slice_blocks)
    padding = num_slices * slice_blocks - group_J.shape[0]

    def slices(blocks: jax.Array, fill: int) -> jax.Array:
        widths = ((0, padding),) + ((0, 0),) * (blocks.ndim - 1)
        blocks = jnp.pad(blocks, widths, constant_values=fill)
        return blocks.reshape(num_slices, slice_blocks, *blocks.shape[1:])

    def add_slice(sums: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_GCK, dy_GCN, group_G = blocks
        outer_GKN = jnp.einsum(
            "gck,gcn->gkn",
            x_GCK,
            dy_GCN,
            precision=precision_for(x_GCK.dtype),
            preferred_element_type=dtype,
        )
        same_run_GG = (group_G[:, None] == group_G[None, :]).astype(dtype)
        totals_GKN = jnp.einsum(
            "hg,gkn->hkn", same_run_GG, outer_GKN, precision=jax.lax.Precision.HIGHEST
        )
        is_last_G = jnp.append(group_G[1:] != group_G[:-1], True)
        spare_G = num_groups + 1 + jnp.arange(slice_blocks)
        target_G = jnp.where(is_last_G, group_G, spare_G)
        return sums.at[target_G].add(
            totals_GKN, unique_indices=True, mode="promise_in_bounds"
        ), None

    # Rows past E take what belongs to no group: one for empty blocks, one per block of a slice.
    shape = (num_groups + 1 + slice_blocks, width_in, width_out)
    sums = jnp.zeros_like(w_EKN, shape=shape, dtype=dtype)
    blocks = (slices(x_JCK, 0), slices(dy_JCN, 0), slices(group_J, num_groups))
    sums, _ = jax.lax.scan(add_slice, sums, blocks)
    return sums[:num_groups].astype(w_EKN.dtype)
