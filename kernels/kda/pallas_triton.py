"""The "pallas_triton" implementation: KDA on NVIDIA GPUs by Pallas kernels on the Triton backend.

Forward, two kernels:
  prepare  per chunk, all in parallel: norms, gate, scores P, the solve T = (I + L)^-1 diag(beta),
           and the operands that the state meets: k exp(G), q exp(G), k exp(G_C - G).
  scan     per tile of V, chunk after chunk: v_new = T (v - k exp(G) S), o, S'.
Backward, five launches:
  prepare    again, without the norms, P and T, which were kept.
  scan       again, for the states that enter the chunks, from what T solved for.
  reverse    per tile of V, last chunk first: the gradients of v_new and of the leaving states.
  solve_vjp  per chunk: what needs the value channels only, dv and dbeta among it.
  grads      per chunk and part of K: dq, dk and dgate, down to the raw inputs.
Where chains are few, pieces of a sequence are scanned side by side (pieces.py): one or two scans
more forward, one more reverse, and a small kernel each way that links the pieces. Kept for the
backward: the inputs, norms, o, P, T, v - k exp(G) S, and the states and maps of the pieces; "full",
also what makes the first two launches needless; "lean", the inputs alone, and then the forward
kernels run once more instead.

Off the GPU the kernels run in interpret mode, which also takes float64.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, X chains
(B x H).
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda import chunk
from kernels.kda.once import differentiable_once, used_together
from kernels.kda.operands import KdaInputs, KdaOptions, unsupported_by_kernels
from kernels.kda.triton.backward import Chain, ValueSide, grads, solve_vjp
from kernels.kda.triton.pieces import Pieces, entering_states, leaving_gradients, piece_chunks
from kernels.kda.triton.plan import Plan
from kernels.kda.triton.prepare import Prepared, Solved, prepare, prepare_again
from kernels.kda.triton.scans import Span, Start, Stream, reverse, scan
from kernels.kda.triton.tokens import RowFactors, Tokens
from kernels.numerics import vary_together


def kda_pallas_triton(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """Returns o [B, T, H, V] in v's dtype and the final state [B, H, K, V].

    The chunk has 64 rows, or 32 if chunk_size is below 64. Source: Kimi Linear (arXiv 2510.26692),
    Eq. 3-9.
    Raises NotImplementedError for what the compiled kernels do not serve.
    """
    plan, padded = _prepare_call(inputs, options)
    o_BTHV, state_BHKV = used_together(*_kda(plan, padded))
    num_tokens, _, value_dim = inputs.v_BTHV.shape[1:]
    key_dim = inputs.q_BTQK.shape[-1]
    return o_BTHV[:, :num_tokens, :, :value_dim], state_BHKV[:, :, :key_dim, :value_dim]


def kda_states_pallas_triton(
    inputs: KdaInputs, options: KdaOptions, every: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As kda_pallas_triton, with the states [B, N, H, K, V] entering tokens 0, every, 2 every ...

    every: a multiple of 64. Not differentiable.
    """
    plan, padded = _prepare_call(inputs, options)
    o_BTHV, state_BHKV, states_XNVK = _kda_states(plan, padded)
    batch, num_tokens, num_heads, value_dim = inputs.v_BTHV.shape
    key_dim = inputs.q_BTQK.shape[-1]
    states_XNVK = states_XNVK[:, :: every // plan.num_rows]
    states_BHNVK = states_XNVK.reshape(batch, num_heads, *states_XNVK.shape[1:])
    states_BNHKV = states_BHNVK.transpose(0, 2, 1, 4, 3)
    return (
        o_BTHV[:, :num_tokens, :, :value_dim],
        state_BHKV[:, :, :key_dim, :value_dim],
        states_BNHKV[..., :key_dim, :value_dim],
    )


def _prepare_call(inputs: KdaInputs, options: KdaOptions) -> tuple[Plan, KdaInputs]:
    """The plan of a call, and its inputs as the kernels take them."""
    interpret = jax.default_backend() != "gpu"
    limits = unsupported_by_kernels(inputs)
    if limits and not interpret:
        raise NotImplementedError(
            f"implementation 'pallas_triton' takes {limits}: use implementation='xla'"
        )
    wide = jnp.dtype(inputs.compute_dtype)
    all_narrow = all(x.dtype == jnp.bfloat16 for x in inputs[:3])
    plan = Plan(
        options=options,
        num_rows=64 if options.chunk_size >= 64 else 32,
        group=inputs.v_BTHV.shape[2] // inputs.q_BTQK.shape[2],
        narrow=jnp.dtype(jnp.bfloat16) if all_narrow else wide,
        wide=wide,
        interpret=interpret,
    )
    leaves, structure = jax.tree.flatten(_pad(inputs, plan.num_rows))
    return plan, jax.tree.unflatten(structure, vary_together(*leaves))


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _pad(inputs: KdaInputs, rows: int) -> KdaInputs:
    """Whole chunks of inert tokens, and dims that are powers of two."""
    batch, num_tokens, _, value_dim = inputs.v_BTHV.shape
    key_dim = inputs.q_BTQK.shape[-1]
    more_T = -num_tokens % rows
    more_K, more_V = _power_of_two(key_dim) - key_dim, _power_of_two(value_dim) - value_dim
    if more_T == more_K == more_V == 0:
        return inputs

    def pad(x: jax.Array | None, *widths: int, mode: str = "constant") -> jax.Array | None:
        return None if x is None else jnp.pad(x, [(0, w) for w in widths], mode=mode)

    lengths_B = inputs.lengths_B
    if lengths_B is None and more_T:
        lengths_B = jnp.full((batch,), num_tokens, jnp.int32)
    keys = (0, more_T, 0, more_K)
    return KdaInputs(
        q_BTQK=pad(inputs.q_BTQK, *keys),
        k_BTQK=pad(inputs.k_BTQK, *keys),
        v_BTHV=pad(inputs.v_BTHV, 0, more_T, 0, more_V),
        gate_BTHK=pad(inputs.gate_BTHK, *keys),
        beta_BTH=pad(inputs.beta_BTH, 0, more_T, 0),
        a_log_H=inputs.a_log_H,
        dt_bias_HK=pad(inputs.dt_bias_HK, 0, more_K),
        initial_state_BHKV=pad(inputs.initial_state_BHKV, 0, 0, more_K, more_V),
        segment_BT=pad(inputs.segment_BT, 0, more_T, mode="edge"),
        lengths_B=None if lengths_B is None else jnp.minimum(lengths_B, num_tokens),
    )


def _tokens(plan: Plan, inputs: KdaInputs, num_rows: int) -> Tokens:
    """What every kernel reads of a chunk; num_rows: of the masks."""
    num_heads, key_dim = inputs.v_BTHV.shape[2], inputs.q_BTQK.shape[-1]
    a_log_H, dt_bias_HK, segment_BT = inputs.a_log_H, inputs.dt_bias_HK, inputs.segment_BT
    before_BN = None
    if segment_BT is not None:
        # Before the first token lies the first segment, which the initial state belongs to.
        lasts_BN = segment_BT[:, plan.num_rows - 1 :: plan.num_rows]
        before_BN = jnp.pad(lasts_BN[:, :-1], ((0, 0), (1, 0)))
    masks = plan.masks(num_rows)
    _, *masks = vary_together(inputs.q_BTQK, *masks)
    return Tokens(
        *inputs[:5],
        a_log=jnp.zeros((num_heads,), plan.wide) if a_log_H is None else a_log_H,
        dt_bias=(jnp.zeros((num_heads, key_dim), plan.wide) if dt_bias_HK is None else dt_bias_HK),
        segment=segment_BT,
        before=before_BN,
        lengths=inputs.lengths_B,
        masks=chunk.Masks(*masks),
    )


def _chunked(plan: Plan, x_BTHV: jax.Array) -> jax.Array:
    """[B, T, H, V] -> [B, N, C, H, V]."""
    batch, _, num_heads, dim = x_BTHV.shape
    return x_BTHV.reshape(batch, -1, plan.num_rows, num_heads, dim)


def _piece_chunks(plan: Plan, inputs: KdaInputs) -> int:
    batch, num_tokens, num_heads, _ = inputs.v_BTHV.shape
    return piece_chunks(plan.options.num_splits, batch * num_heads, num_tokens // plan.num_rows)


def _chains(x_BHKV: jax.Array) -> jax.Array:
    return x_BHKV.reshape(-1, *x_BHKV.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plan: Plan, inputs: KdaInputs) -> tuple[jax.Array, jax.Array]:
    return _run(plan, inputs, False, None)[0]


def _stream(
    plan: Plan, inputs: KdaInputs, prepared: Prepared, solved: Solved, values_BTHV: jax.Array
) -> Stream:
    minus_one_CC = -jnp.eye(plan.num_rows, dtype=plan.narrow)
    values_BNCHV = _chunked(plan, values_BTHV)
    _, minus_one_CC = vary_together(values_BNCHV, minus_one_CC)
    return Stream(prepared, solved, values_BNCHV, inputs.lengths_B, minus_one_CC, None)


class Kept(NamedTuple):
    """What the backward reads of the forward. None: made again."""

    inputs: KdaInputs
    factors: RowFactors
    solved: Solved
    pieces: Pieces
    o_BTHV: jax.Array
    missing_XNVC: jax.Array
    prepared: Prepared | None
    states_XNVK: jax.Array | None  # entering the chunks


@differentiable_once("pallas_triton", (0, 2, 3))
def _run(plan: Plan, inputs: KdaInputs, keep_missing: bool, keep_states: jnp.dtype | None) -> tuple:
    """Outputs, and what can be kept, some of it on request."""
    prepared, factors, solved = prepare(plan, _tokens(plan, inputs, plan.half))
    v_BTHV, state_BHKV = inputs.v_BTHV, inputs.initial_state_BHKV
    x = _stream(plan, inputs, prepared, solved, v_BTHV)
    num_heads, chunks = v_BTHV.shape[2], _piece_chunks(plan, inputs)
    pieces = entering_states(plan, chunks, num_heads, x, _chains(state_BHKV))
    # The backward reads o too, and rounds no more than its own products do.
    o_dtype = v_BTHV.dtype if plan.narrow == jnp.bfloat16 else plan.wide
    scanned = scan(
        plan,
        Span(chunks, 0, pieces.states.shape[1]),
        num_heads,
        x,
        Start(pieces.states),
        o=o_dtype,
        keep_states=keep_states,
        keep_missing=keep_missing,
    )
    o_BTHV = scanned.o.reshape(v_BTHV.shape)
    state_BHKV = scanned.state[:, -1].reshape(state_BHKV.shape)
    kept = Kept(inputs, factors, solved, pieces, o_BTHV, scanned.missing, prepared, scanned.states)
    return (o_BTHV.astype(v_BTHV.dtype), state_BHKV), kept


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda_states(plan: Plan, inputs: KdaInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    (o_BTHV, state_BHKV), kept = _run(plan, inputs, False, plan.wide)
    return o_BTHV, state_BHKV, kept.states_XNVK


def _no_gradient(plan: Plan, inputs: KdaInputs) -> tuple:
    raise NotImplementedError(
        "kda with states_every has no gradient in implementation 'pallas_triton': leave "
        "states_every out, or use implementation='xla'"
    )


_kda_states.defvjp(_no_gradient, _no_gradient)


def _forward(plan: Plan, inputs: KdaInputs) -> tuple:
    if plan.options.residuals == "full":
        return _run(plan, inputs, True, plan.narrow)
    if plan.options.residuals == "lean":
        return _run(plan, inputs, False, None)[0], inputs
    outputs, kept = _run(plan, inputs, True, None)
    return outputs, kept._replace(prepared=None)


def _backward(plan: Plan, kept: Kept | KdaInputs, cotangents: tuple) -> tuple:
    if plan.options.residuals == "lean":
        # Behind the cotangents, or XLA would find the forward pass's results and keep them.
        inputs, cotangents = jax.lax.optimization_barrier((kept, cotangents))
        _, kept = _run(plan, inputs, True, plan.narrow)
    inputs, factors, solved, pieces, o_BTHV, missing_XNVC, prepared, states_XNVK = kept
    do_BTHV, d_state_BHKV = cotangents
    num_heads, chunks = inputs.v_BTHV.shape[2], _piece_chunks(plan, inputs)
    span = Span(chunks, 0, pieces.states.shape[1])
    if prepared is None:
        prepared = prepare_again(plan, _tokens(plan, inputs, plan.half), factors)
        x = _stream(plan, inputs, prepared, solved, inputs.v_BTHV)
        x = x._replace(values=None, missing=missing_XNVC)
        scanned = scan(plan, span, num_heads, x, Start(pieces.states), keep_states=plan.narrow)
        states_XNVK = scanned.states
    plan = dataclasses.replace(plan, most_log_tile=4)  # nothing bounds a cotangent
    tokens = _tokens(plan, inputs, plan.num_rows)
    x = _stream(plan, inputs, prepared, solved, do_BTHV)
    d_states = leaving_gradients(plan, chunks, num_heads, x, pieces.maps, _chains(d_state_BHKV))
    reversed_ = reverse(plan, span, num_heads, x, Start(d_states), keep_gradients=True)
    x = ValueSide(o_BTHV, do_BTHV, missing_XNVC, reversed_.dv_new, solved.solve, factors.beta)
    solve = solve_vjp(plan, tokens, x)
    chain = Chain(
        do=do_BTHV,
        states=states_XNVK,
        d_leaving=reversed_.d_leaving,
        total=prepared.total,
        factors=factors,
        solve=solve,
    )
    d = grads(plan, tokens, chain)
    batch, num_heads = d_state_BHKV.shape[:2]
    dbeta_BHT = solve.dbeta.reshape(batch, num_heads, -1)
    params_BHN2K = d.gate_params.reshape(batch, num_heads, *d.gate_params.shape[1:])
    params_H2K = jnp.sum(params_BHN2K, axis=(0, 2))
    d_inputs = KdaInputs(
        q_BTQK=_sum_group(plan, d.q).astype(inputs.q_BTQK.dtype),
        k_BTQK=_sum_group(plan, d.k).astype(inputs.k_BTQK.dtype),
        v_BTHV=solve.dv.astype(inputs.v_BTHV.dtype),
        gate_BTHK=d.gate,
        beta_BTH=dbeta_BHT.swapaxes(1, 2).astype(inputs.beta_BTH.dtype),
        a_log_H=None if inputs.a_log_H is None else jnp.sum(params_H2K[:, 1], axis=-1),
        dt_bias_HK=None if inputs.dt_bias_HK is None else params_H2K[:, 0],
        initial_state_BHKV=reversed_.d_state[:, 0].reshape(d_state_BHKV.shape),
        segment_BT=None,
        lengths_B=None,
    )
    return (d_inputs,)


def _sum_group(plan: Plan, dx_BTHK: jax.Array) -> jax.Array:
    if plan.group == 1:
        return dx_BTHK
    batch, num_tokens, _, dim = dx_BTHK.shape
    return jnp.sum(dx_BTHK.reshape(batch, num_tokens, -1, plan.group, dim), axis=3)


_kda.defvjp(_forward, _backward, optimize_remat=True)
