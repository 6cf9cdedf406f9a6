"""jax.lax.ragged_all_to_all on CPU devices, where XLA does not have it."""

import functools

import jax
import jax.numpy as jnp

from model import expert_parallel


def install():
    """From here on the CPU counts as a platform that has ragged_all_to_all."""
    jax.lax.ragged_all_to_all = ragged_all_to_all
    expert_parallel.platform = lambda: "tpu"


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What JAX documents; all NaN where a caller breaks its rules.

    N rows of the output, K slices.
    """
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True
    )
    from_K, sent_K, to_K = map(exchange, (input_offsets, send_sizes, output_offsets))
    size, (K,), N = jax.lax.axis_size(axis_name), to_K.shape, output.shape[0]
    offset_KN = jnp.arange(N)[None, :] - to_K[:, None]
    inside_KN = (offset_KN >= 0) & (offset_KN < sent_K[:, None])
    slice_N = jnp.argmax(inside_KN, axis=0)
    row_N = from_K[slice_N] + offset_KN[slice_N, jnp.arange(N)]
    received = jax.lax.all_gather(operand, axis_name)[slice_N // (K // size), row_N]
    result = jnp.where(jnp.any(inside_KN, axis=0)[:, None], received, output)

    keeps_rules = (
        jnp.all(sent_K == recv_sizes)
        & jnp.all((sent_K >= 0) & (from_K >= 0) & (from_K + sent_K <= operand.shape[0]))
        & jnp.all((to_K >= 0) & (to_K + sent_K <= N))
        & jnp.all(jnp.sum(inside_KN, axis=0) <= 1)
    )
    return jnp.where(keeps_rules, result, jnp.nan).astype(output.dtype)
