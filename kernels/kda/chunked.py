"""The "xla" implementation: chunked WY form in pure JAX, with its own backward.

The sequence is cut into *slabs* of chunks. An outer scan runs over the slabs; within one, wy.py
prepares all chunks at once and scans over them with the state. So temporaries are as large as a
slab, whatever T.

Saved for the backward, besides the inputs as given: per chunk the entering state, the scores P and
the inverse T. That is K V / C + 2 C numbers per token and head, linear in T. All else (norms, gate,
decays, W, U, v_new) is computed again, last slab first.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks of a slab, C chunk rows,
M states (batch rows x value heads).
"""

from functools import partial

import jax
import jax.numpy as jnp

from kernels.kda import wy
from kernels.kda.operands import KdaInputs, KdaOptions, activate, valid_tokens

# Numbers in one [B, tokens, H, max(K, V)] temporary of a slab; a few dozen are alive at once.
_SLAB_SIZE = 2**22


def kda_chunked(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """Returns o_BTHV in v's dtype and the final state [B, H, K, V].

    float32 and float64 inputs multiply at Precision.HIGHEST. For bfloat16 inputs the products with
    the state and the values run at the backend's default (bfloat16 or TF32 operands, float32 sums);
    the scores and the inverse, whose errors would grow, stay at HIGHEST.
    """
    batch, num_tokens, num_heads, value_dim = inputs.v_BTHV.shape
    chunk_numbers = batch * options.chunk_size * num_heads * max(inputs.q_BTQK.shape[-1], value_dim)
    num_chunks = -(-num_tokens // options.chunk_size)
    num_slabs = -(-num_chunks // max(1, _SLAB_SIZE // chunk_numbers))
    slab_tokens = -(-num_chunks // num_slabs) * options.chunk_size
    padded = pad_tokens(inputs, num_slabs * slab_tokens - num_tokens)
    o_BTHV, final_state_BHKV = _kda_slabs(options, num_slabs, padded)
    return o_BTHV[:, :num_tokens], final_state_BHKV


def pad_tokens(inputs: KdaInputs, amount: int) -> KdaInputs:
    """Appends inert tokens."""
    if amount == 0:
        return inputs
    batch, num_tokens = inputs.q_BTQK.shape[:2]
    lengths_B = inputs.lengths_B
    if lengths_B is None:
        lengths_B = jnp.full((batch,), num_tokens, jnp.int32)
    segment_BT = inputs.segment_BT
    if segment_BT is not None:
        segment_BT = jnp.pad(segment_BT, ((0, 0), (0, amount)), mode="edge")
    arrays = (jnp.pad(x, [(0, 0), (0, amount)] + [(0, 0)] * (x.ndim - 2)) for x in inputs[:5])
    padded = KdaInputs(*arrays, *inputs[5:])
    return padded._replace(segment_BT=segment_BT, lengths_B=jnp.minimum(lengths_B, num_tokens))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda_slabs(
    options: KdaOptions, num_slabs: int, inputs: KdaInputs
) -> tuple[jax.Array, jax.Array]:
    return _forward(options, num_slabs, inputs)[0]


def _forward(options: KdaOptions, num_slabs: int, inputs: KdaInputs) -> tuple:
    precision = _state_precision(inputs)
    batch = inputs.q_BTQK.shape[0]

    def slab(state_MKV: jax.Array, index: jax.Array) -> tuple:
        rows, cuts = _slab_rows(inputs, index, num_slabs, options)
        x = _operands(rows, options)
        decay = wy.decays(x.g_NMCK, cuts, options.tile_bound)
        solved = wy.solve(x, decay, cuts, options.tile_bound)
        prepared = wy.prepare(x, decay, solved.inverse_NMCC, precision)
        state_MKV, states_NMKV, v_new_NMCV = wy.scan_states(
            prepared, decay.total_NMK, state_MKV, precision
        )
        o_NMCV = wy.outputs(prepared, solved.p_NMCC, states_NMKV, v_new_NMCV, precision)
        o_BTHV = _from_chunks(o_NMCV, batch)
        return state_MKV, (o_BTHV.astype(inputs.v_BTHV.dtype), (states_NMKV, solved))

    initial_state_BHKV = inputs.initial_state_BHKV
    final_state_MKV, (o_slabs, saved) = jax.lax.scan(
        slab, _merge_heads(initial_state_BHKV), jnp.arange(num_slabs)
    )
    final_state_BHKV = final_state_MKV.reshape(initial_state_BHKV.shape)
    return (_join_slabs(o_slabs), final_state_BHKV), (inputs, saved)


def _backward(options: KdaOptions, num_slabs: int, residuals: tuple, cotangents: tuple) -> tuple:
    inputs, saved = residuals
    do_BTHV, d_final_state_BHKV = cotangents
    precision = _state_precision(inputs)

    def slab(d_state_MKV: jax.Array, xs: tuple) -> tuple:
        index, (states_NMKV, solved) = xs
        rows, cuts = _slab_rows(inputs, index, num_slabs, options)
        operands, operands_vjp = jax.vjp(
            lambda *arrays: _operands(KdaInputs(*arrays, *rows[7:]), options), *rows[:7]
        )
        decay = wy.decays(operands.g_NMCK, cuts, options.tile_bound)
        do_slab_BTHV = _slab_slice(do_BTHV, index, num_slabs).astype(inputs.compute_dtype)
        do_NMCV = _to_chunks(do_slab_BTHV, options.chunk_size)
        d_operands, d_state_MKV = wy.vjp(
            operands,
            decay,
            cuts,
            solved,
            states_NMKV,
            do_NMCV,
            d_state_MKV,
            options.tile_bound,
            precision,
        )
        return d_state_MKV, operands_vjp(d_operands)

    d_state_MKV, d_slabs = jax.lax.scan(
        slab, _merge_heads(d_final_state_BHKV), (jnp.arange(num_slabs), saved), reverse=True
    )
    d_initial_state_BHKV = d_state_MKV.reshape(d_final_state_BHKV.shape)
    d_tokens = [_join_slabs(d) for d in d_slabs[:5]]
    d_gate_params = [None if d is None else jnp.sum(d, axis=0) for d in d_slabs[5:]]
    return (KdaInputs(*d_tokens, *d_gate_params, d_initial_state_BHKV, None, None),)


_kda_slabs.defvjp(_forward, _backward)


def _state_precision(inputs: KdaInputs) -> jax.lax.Precision:
    narrow = all(x.dtype == jnp.bfloat16 for x in inputs[:3])
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def _merge_heads(x_BHKV: jax.Array) -> jax.Array:
    return x_BHKV.reshape(-1, *x_BHKV.shape[2:])


def _slab_slice(x_BT: jax.Array, index: jax.Array, num_slabs: int) -> jax.Array:
    size = x_BT.shape[1] // num_slabs
    return jax.lax.dynamic_slice_in_dim(x_BT, index * size, size, axis=1)


def _join_slabs(x: jax.Array) -> jax.Array:
    """[slabs, B, tokens, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _to_chunks(x_BTHK: jax.Array, chunk_size: int) -> jax.Array:
    """[B, T, H, K] -> [N, M, C, K]."""
    batch, num_tokens, num_heads, dim = x_BTHK.shape
    x_BNCHK = x_BTHK.reshape(batch, num_tokens // chunk_size, chunk_size, num_heads, dim)
    x_NBHCK = x_BNCHK.transpose(1, 0, 3, 2, 4)
    return x_NBHCK.reshape(-1, batch * num_heads, chunk_size, dim)


def _from_chunks(x_NMCV: jax.Array, batch: int) -> jax.Array:
    """[N, M, C, V] -> [B, T, H, V]."""
    num_chunks, _, chunk_size, dim = x_NMCV.shape
    x_NBHCV = x_NMCV.reshape(num_chunks, batch, -1, chunk_size, dim)
    return x_NBHCV.transpose(1, 0, 3, 2, 4).reshape(batch, num_chunks * chunk_size, -1, dim)


def _slab_rows(
    inputs: KdaInputs, index: jax.Array, num_slabs: int, options: KdaOptions
) -> tuple[KdaInputs, wy.Segments | None]:
    """The inputs of one slab and the masks of its restarts."""
    rows = KdaInputs(*(_slab_slice(x, index, num_slabs) for x in inputs[:5]), *inputs[5:])
    batch, num_tokens = rows.q_BTQK.shape[:2]
    start = index * num_tokens
    if inputs.lengths_B is not None:
        rows = rows._replace(lengths_B=inputs.lengths_B - start)
    if inputs.segment_BT is None:
        return rows, None
    # Before the first token lies the first segment, which the initial state belongs to.
    before_B = jax.lax.dynamic_index_in_dim(
        inputs.segment_BT, jnp.maximum(start - 1, 0), axis=1, keepdims=False
    )
    segment_BT = _slab_slice(inputs.segment_BT, index, num_slabs)
    segment_NBC = segment_BT.reshape(batch, -1, options.chunk_size).swapaxes(0, 1)
    num_heads = rows.v_BTHV.shape[2]
    segment_NMC = jnp.repeat(segment_NBC, num_heads, axis=1)
    return rows, wy.segments(segment_NMC, jnp.repeat(before_B, num_heads))


def _operands(rows: KdaInputs, options: KdaOptions) -> wy.Operands:
    q, k, v, g, beta = activate(rows, options, valid_tokens(rows))
    return wy.Operands(*(_to_chunks(x, options.chunk_size) for x in (q, k, v, g, beta[..., None])))
