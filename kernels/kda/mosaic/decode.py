"""The TPU kernel of one KDA step: the state read once, written once.

XLA alone makes two dozen fusions of the norms, and reads the state twice.

Letters: B batch, T time (1), H value heads, K key dim, V value dim, M heads of a program.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.mosaic.plan import VMEM_LIMIT, Plan
from kernels.kda.mosaic.tokens import Raw, activate
from kernels.kda.operands import KdaInputs, KdaOptions, unsupported_by_kernels
from kernels.kda.pallas_mosaic_tpu import interpret
from kernels.numerics import vary_together, varying_like

HEADS = 8  # of a program, if they divide; blocks of fewer than all need a multiple of 8


class _Operands(NamedTuple):
    """Arrays outside, references to a program's heads inside the kernel."""

    state: jax.Array  # [B, H, K, V]; first, because its index names the aliased buffer
    q: jax.Array  # [B, H, K], like k and gate
    k: jax.Array
    gate: jax.Array
    beta: jax.Array  # [B, H, 1]
    a_log: jax.Array  # [H, K], like dt_bias
    dt_bias: jax.Array
    v: jax.Array  # [B, H, V]
    active: jax.Array | None  # [B, 1, 1] int32


def decode_pallas_mosaic_tpu(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """One token, T = 1: o [B, 1, H, V] in v's dtype and the state [B, H, K, V].

    The state's buffer is the result's: XLA copies it only where the caller still needs the old one.
    Source: Kimi K3 report Eq. 1. Raises NotImplementedError for what the kernel does not serve.
    """
    limits = unsupported_by_kernels(inputs)
    if limits and not interpret():
        raise NotImplementedError(
            f"implementation 'pallas_mosaic_tpu' takes {limits}: use implementation='xla'"
        )
    batch, num_heads, key_dim, value_dim = inputs.initial_state_BHKV.shape
    x = _operands(inputs)
    heads = HEADS if num_heads % HEADS == 0 else num_heads
    wide = jnp.dtype(inputs.compute_dtype)
    plan = Plan(options, num_rows=1, group=1, num_heads=heads, narrow=wide, wide=wide)

    def of_heads(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *dims), lambda b, p: (b, p, *(0,) * len(dims)))

    keys, values, state = of_heads(key_dim), of_heads(value_dim), of_heads(key_dim, value_dim)
    params = pl.BlockSpec((heads, key_dim), lambda b, p: (p, 0))
    active = None if x.active is None else pl.BlockSpec((None, 1, 1), lambda b, p: (b, 0, 0))
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.v, x.state))
    o_BHV, state_BHKV = pl.pallas_call(
        partial(_kernel, plan),
        grid=(batch, num_heads // heads),
        in_specs=(_Operands(state, keys, keys, keys, of_heads(1), params, params, values, active),),
        out_specs=(values, state),
        out_shape=varying_like(x.state, shapes),
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret(),
        name="kda_decode",
    )(x)
    return o_BHV[:, None], state_BHKV


def _operands(inputs: KdaInputs) -> _Operands:
    state_BHKV = inputs.initial_state_BHKV
    num_heads, key_dim = state_BHKV.shape[1:3]
    q, k, v, gate, beta = (x[:, 0] for x in inputs[:5])
    group, zeros_HK = num_heads // q.shape[1], jnp.zeros((num_heads, key_dim), state_BHKV.dtype)
    a_log_HK, dt_bias_HK = (
        zeros_HK if x is None else zeros_HK + x.reshape(num_heads, -1)
        for x in (inputs.a_log_H, inputs.dt_bias_HK)
    )
    active = inputs.lengths_B
    operands = _Operands(
        state=state_BHKV,
        q=jnp.repeat(q, group, axis=1),
        k=jnp.repeat(k, group, axis=1),
        gate=gate,
        beta=beta[..., None],
        a_log=a_log_HK,
        dt_bias=dt_bias_HK,
        v=v,
        active=None if active is None else active[:, None, None],
    )
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, vary_together(*leaves))


def _kernel(plan: Plan, x: _Operands, o: jax.Array, new_state: jax.Array) -> None:
    tokens = (a[...].astype(plan.wide) for a in (x.q, x.k, x.gate, x.beta))
    head = activate(plan, None, Raw(*tokens, x.a_log[...], x.dt_bias[...]))
    # Channels lie in the state's rows.
    q_KM, k_KM, decay_KM = (a_MK.T for a_MK in (head.q_CK, head.k_CK, jnp.exp2(head.g_CK)))
    for m in range(plan.num_heads):
        one = slice(m, m + 1)
        state_KV, k_K1 = x.state[m], k_KM[:, one]
        decayed_KV = decay_KM[:, one] * state_KV
        read_1V = jnp.sum(k_K1 * decayed_KV, axis=0, keepdims=True)
        write_1V = head.beta_C1[one] * (x.v[one].astype(plan.wide) - read_1V)
        after_KV = decayed_KV + k_K1 * write_1V
        o_1V = jnp.sum(q_KM[:, one] * after_KV, axis=0, keepdims=True)
        if x.active is not None:
            active_11 = x.active[...] != 0
            after_KV = jnp.where(active_11, after_KV, state_KV)
            o_1V = jnp.where(active_11, o_1V, 0.0)
        o[one, :], new_state[m] = o_1V.astype(o.dtype), after_KV
