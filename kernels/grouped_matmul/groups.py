"""Which group a row belongs to."""

import jax
import jax.numpy as jnp


def group_of_row(group_sizes_E: jax.Array, rows: jax.Array) -> jax.Array:
    """The group that holds each row number; E where the row is past the last group."""
    ends_E = jnp.cumsum(group_sizes_E)
    return jnp.searchsorted(ends_E, rows, side="right", method="compare_all")
