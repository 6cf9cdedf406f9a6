"""Attention on TPU by the splash kernel that ships with JAX; elsewhere it is interpreted."""

import jax
import jax.numpy as jnp

from kernels.numerics import platform

LANES = 128
MAX_BLOCK_SIZE = 512


def unsupported_by_splash(q_BTHK: jax.Array, k_BSHK: jax.Array) -> str | None:
    """Why splash cannot serve these inputs, or None if it can."""
    if q_BTHK.dtype != jnp.bfloat16:
        return f"its products round to bfloat16, so it takes bfloat16 inputs, not {q_BTHK.dtype}"
    if q_BTHK.shape != k_BSHK.shape:
        return f"it takes a key for every query, not {k_BSHK.shape[1]} for {q_BTHK.shape[1]}"
    return None


def attention_splash(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    segment_ids_BT: jax.Array | None,
    scale: float,
) -> jax.Array:
    """See kernels.attention.attention."""
    # Here, because importing Pallas takes a second that only a TPU should pay.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, num_tokens, num_heads, _ = q_BTHK.shape
    block_size = min(MAX_BLOCK_SIZE, -(-num_tokens // LANES) * LANES)
    padding = -num_tokens % block_size
    padded = num_tokens + padding
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((padded, padded))] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=block_size,
            block_kv=block_size,
            block_q_dkv=block_size,
            block_kv_dkv=block_size,
            block_q_dq=block_size,
            block_kv_dq=block_size,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=platform() != "tpu",
    )

    def heads_first(x_BTHK: jax.Array) -> jax.Array:
        # Splash returns the type of its inputs. In float32 the output and its gradient stay wide,
        # while the matrix unit still multiplies in bfloat16.
        x = jnp.pad(x_BTHK.astype(jnp.float32), ((0, 0), (0, padding), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros_like(q_BTHK, shape=(batch, num_tokens), dtype=jnp.int32)
    # Padding comes after every token, so causality alone hides it, whatever its id.
    ids_BT = jnp.pad(segment_ids_BT.astype(jnp.int32), ((0, 0), (0, padding)))
    # The kernel applies no scale of its own.
    o_BHTV = jax.vmap(kernel)(
        heads_first(q_BTHK) * scale,
        heads_first(k_BSHK),
        heads_first(v_BSHV),
        splash.SegmentIds(ids_BT, ids_BT),
    )
    return o_BHTV.transpose(0, 2, 1, 3)[:, :num_tokens]
