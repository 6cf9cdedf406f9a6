"""A sum whose rounding depends on nothing but its own terms."""

import jax


def sum_halves(x: jax.Array, dim: int) -> jax.Array:
    """Sums over a dim (which stays, with size 1) by adding halves.

    XLA:CPU orders a reduction, or a product with ones, by the shape of the whole array: the same
    row rounds differently alone and in a batch. Elementwise additions leave it no choice.
    """
    size = x.shape[dim]
    if size == 1:
        return x
    half = 1 << ((size - 1).bit_length() - 1)
    head = jax.lax.slice_in_dim(x, 0, half, axis=dim)
    tail = jax.lax.slice_in_dim(x, half, size, axis=dim)
    if size == 2 * half:
        return sum_halves(head + tail, dim)
    return sum_halves(head, dim) + sum_halves(tail, dim)
