"""Any implementation of KDA, block after block, with the states in between.

Letters: B batch, T time, H value heads, K key dim, V value dim, N blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.kda.chunked import pad_tokens
from kernels.kda.operands import KdaInputs, KdaOptions

# Every implementation takes the same validated (KdaInputs, KdaOptions).
Implementation = Callable[[KdaInputs, KdaOptions], tuple[jax.Array, jax.Array]]


def kda_by_blocks(
    implementation: Implementation, inputs: KdaInputs, options: KdaOptions, every: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, the final state, and the states [B, N, H, K, V] entering the blocks of `every` tokens."""
    num_tokens = inputs.q_BTQK.shape[1]
    num_blocks = -(-num_tokens // every)
    padded = pad_tokens(inputs, num_blocks * every - num_tokens)

    def block(state_BHKV: jax.Array, index: jax.Array) -> tuple:
        start = index * every
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, every, axis=1), padded[:5]
        )
        segment_BT, entering_BHKV = padded.segment_BT, state_BHKV
        if segment_BT is not None:
            before_B = segment_BT[:, jnp.maximum(start - 1, 0)]
            segment_BT = jax.lax.dynamic_slice_in_dim(segment_BT, start, every, axis=1)
            restart_B = segment_BT[:, 0] != before_B
            segment_BT -= segment_BT[:, :1]  # as KdaInputs has it: 0 where the state enters
            entering_BHKV = jnp.where(restart_B[:, None, None, None], 0.0, state_BHKV)
        lengths_B = None if padded.lengths_B is None else padded.lengths_B - start
        shared = padded.a_log_H, padded.dt_bias_HK
        part = KdaInputs(*part, *shared, entering_BHKV, segment_BT, lengths_B)
        o_BTHV, leaving_BHKV = implementation(part, options)
        return leaving_BHKV, (o_BTHV, state_BHKV)

    blocks = jnp.arange(num_blocks)
    state_BHKV, (o_NBTHV, states_NBHKV) = jax.lax.scan(block, inputs.initial_state_BHKV, blocks)
    o_BNTHV = o_NBTHV.swapaxes(0, 1)
    o_BTHV = o_BNTHV.reshape(o_BNTHV.shape[0], -1, *o_BNTHV.shape[3:])
    return o_BTHV[:, :num_tokens], state_BHKV, states_NBHKV.swapaxes(0, 1)
