"""The kernel of one KDA step: everything from the raw inputs, the state read once, written once.

Letters: B batch, T time (1), H value heads, Q query/key heads, K key dim, V value dim (of a tile).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda.gates import L2_NORM_EPS, write_strength
from kernels.kda.operands import (
    Activated,
    KdaInputs,
    KdaOptions,
    log_decay,
    unsupported_by_kernels,
)
from kernels.kda.reference import token_step
from kernels.numerics import vary_together, varying_like

# Elements of the state that a program holds: 64 registers of each of its 128 threads. A row of a
# tile should fill whole sectors of 32 bytes, and small tiles give the GPU more programs.
TILE_SIZE, LARGEST_TILE_V = 8192, 32


class _Operands(NamedTuple):
    """Arrays outside, references to blocks inside the kernel."""

    state: jax.Array  # first, because its index names the aliased buffer
    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    a_log: jax.Array | None
    dt_bias: jax.Array | None
    active: jax.Array | None  # int32: Triton has no arrays of bool in memory


def decode_pallas_triton(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """One token, T = 1: o [B, 1, H, V] in v's dtype and the state [B, H, K, V].

    The state's buffer is the result's: XLA copies it only where the caller still needs the old one.
    Source: Kimi K3 report Eq. 1. Raises NotImplementedError for what the kernel does not serve.
    """
    interpret = jax.default_backend() != "gpu"
    limits = unsupported_by_kernels(inputs)
    if limits and not interpret:
        raise NotImplementedError(
            f"implementation 'pallas_triton' takes {limits}: use implementation='xla'"
        )
    tokens = (x[:, 0] for x in inputs[:5])
    operands = _Operands(
        inputs.initial_state_BHKV, *tokens, inputs.a_log_H, inputs.dt_bias_HK, inputs.lengths_B
    )
    leaves, structure = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(structure, vary_together(*leaves))
    batch, num_heads, key_dim, value_dim = operands.state.shape
    tile_K = _power_of_two(key_dim)
    tile_V = min(_power_of_two(value_dim), LARGEST_TILE_V, TILE_SIZE // tile_K)
    specs = _specs(operands, tile_K, tile_V)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands.v, operands.state))
    o_BHV, state_BHKV = pl.pallas_call(
        partial(_kernel, options, (key_dim, value_dim)),
        grid=(pl.cdiv(value_dim, tile_V), num_heads, batch),
        in_specs=(specs,),
        out_specs=(specs.v, specs.state),
        out_shape=varying_like(operands.state, shapes),
        input_output_aliases={0: 1},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="kda_decode",
    )(operands)
    return o_BHV[:, None], state_BHKV


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _specs(x: _Operands, tile_K: int, tile_V: int) -> _Operands:
    """Blocks of a tile of V of one head, for the grid (V tiles, H, B); dims of 1 are the program's.

    Blocks may be wider than the array: what lies outside is masked.
    """
    group = x.v.shape[1] // x.q.shape[1]
    of_group = pl.BlockSpec((1, 1, tile_K), lambda n, h, b: (b, h // group, 0))
    return _Operands(
        state=pl.BlockSpec((1, 1, tile_K, tile_V), lambda n, h, b: (b, h, 0, n)),
        q=of_group,
        k=of_group,
        v=pl.BlockSpec((1, 1, tile_V), lambda n, h, b: (b, h, n)),
        gate=pl.BlockSpec((1, 1, tile_K), lambda n, h, b: (b, h, 0)),
        beta=pl.BlockSpec((1, 1), lambda n, h, b: (b, h)),
        a_log=None if x.a_log is None else pl.BlockSpec((1,), lambda n, h, b: (h,)),
        dt_bias=None if x.dt_bias is None else pl.BlockSpec((1, tile_K), lambda n, h, b: (h, 0)),
        active=None if x.active is None else pl.BlockSpec((1,), lambda n, h, b: (b,)),
    )


def _kernel(
    options: KdaOptions,
    dims: tuple[int, int],
    x: _Operands,
    o_ref: jax.Array,
    new_state_ref: jax.Array,
) -> None:
    """As arrays of one sequence and one head, so that the step and the gate are everybody's."""
    dtype = x.state.dtype
    _, _, tile_K, tile_V = x.state.shape
    key_dim, value_dim = dims
    inside_11K = jax.lax.broadcasted_iota(jnp.int32, (1, 1, tile_K), 2) < key_dim
    channel_11V = jax.lax.broadcasted_iota(jnp.int32, (1, 1, tile_V), 2)
    inside_11V = pl.program_id(0) * tile_V + channel_11V < value_dim
    moves_11KV = inside_11K[..., None] & inside_11V[:, :, None, :]
    if x.active is not None:
        active_1 = x.active[...] != 0
        moves_11KV &= active_1.reshape(1, 1, 1, 1)

    def read(ref: jax.Array, mask: jax.Array) -> jax.Array:
        return plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype)).astype(dtype)

    q_11K, k_11K = read(x.q, inside_11K), read(x.k, inside_11K)
    if options.use_qk_l2norm:
        q_11K, k_11K = _l2_normalize(q_11K), _l2_normalize(k_11K)
    dt_bias_1K = None if x.dt_bias is None else read(x.dt_bias, inside_11K[0])
    a_log_1 = None if x.a_log is None else x.a_log[...]
    g_111K = log_decay(options, read(x.gate, inside_11K)[:, None], a_log_1, dt_bias_1K)
    beta_11 = write_strength(x.beta[...].astype(dtype), options.beta_is_logit)

    step = Activated(
        q_11K * options.scale, k_11K, read(x.v, inside_11V), g_111K.reshape(q_11K.shape), beta_11
    )
    state_11KV, o_11V = token_step(read(x.state, moves_11KV), step)
    if x.active is not None:
        o_11V = jnp.where(active_1.reshape(1, 1, 1), o_11V, 0.0)
    plt.store(o_ref, o_11V.astype(o_ref.dtype), mask=inside_11V)
    plt.store(new_state_ref, state_11KV, mask=moves_11KV)


def _l2_normalize(x_11K: jax.Array) -> jax.Array:
    return x_11K * jax.lax.rsqrt(jnp.sum(x_11K * x_11K, axis=-1, keepdims=True) + L2_NORM_EPS)
