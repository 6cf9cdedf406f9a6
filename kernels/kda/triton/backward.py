"""The parallel kernels of the backward of KDA on the Triton backend: `solve_vjp` and `grads`.

The algebra: wy.py. Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C
chunk rows, R some of them, S splits, X chains (B x H).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda import chunk
from kernels.kda.triton.plan import (
    Plan,
    chunk_spec,
    for_parts,
    head_spec,
    keep,
    made_once,
)
from kernels.kda.triton.tokens import (
    Raw,
    RowFactors,
    Rows,
    Tokens,
    activate,
    log_decay_vjp,
    read_cuts,
    read_gate,
    read_raw,
    read_rows,
    together,
    token_specs,
    valid_rows,
)
from kernels.numerics import varying_like

# Channels of which a program holds tiles at a time: more, and registers spill; fewer, and more is
# read again. Measured on an H200.
GRADS_PART, VALUE_PART = 32, 64


class ValueSide(NamedTuple):
    """What `solve_vjp` reads: o and do [B, T, H, V], the rest [X, N, ...]."""

    o: jax.Array
    do: jax.Array
    missing: jax.Array  # [V, C]
    dv_new: jax.Array  # [V, C]
    solve: jax.Array  # [C, C]
    beta: jax.Array  # [C]


class Solve(NamedTuple):
    """What the value channels say about a chunk's gradients, all [X, N, ...] but dv."""

    # [S, C, C], ready for the tensor cores: chunk.cut_pairs.
    dp: jax.Array  # gradient of the scores of q on k, without the pairs of different documents
    dl: jax.Array  # of the scores of k on k, likewise
    d_own: jax.Array  # [C]: diagonal of the gradient of P
    # [2, C]: <q, dq> / scale and <k, dk> of the normalised q and k.
    along: jax.Array | None
    dbeta: jax.Array  # [C]: of the logit, if beta is one
    v_new: jax.Array  # [C, V]
    dv: jax.Array  # [B, T, H, V]


def _solve_kernel(plan: Plan, tokens: Tokens, x: ValueSide, out: Solve) -> None:
    rows, wide, narrow = pl.ds(0, plan.num_rows), plan.wide, plan.narrow
    valid_C1, beta_C1 = valid_rows(plan, tokens, rows), x.beta[...].reshape(-1, 1)
    # As the diagonal of solve has it, to take out of v_new and dv just what it brought in.
    inverse_C1 = 1.0 / beta_C1.astype(narrow).astype(wide)
    zeros_CC, zeros_C = (jnp.zeros((plan.num_rows,) * n, wide) for n in (2, 1))

    def values(part: pl.Slice, sums: tuple) -> tuple:
        dp_CC, dl_CC, along_q_C, overlap_C, of_v_C = sums
        # Before anything is written, or it would have to wait for it.
        v_CV, o_CV = keep(valid_C1, tokens.v[:, part]), x.o[:, part]
        do_CV = keep(valid_C1, x.do[:, part]).astype(narrow)
        solve_CC = x.solve[...]  # in every round, so that it comes with what meets it
        # Made again, because the scans would leave them rounded, which dbeta and dp cannot spare.
        v_new_CV = plan.dot(solve_CC, x.missing[part, :], b_rows=True)
        dv_CV = plan.dot(solve_CC, x.dv_new[part, :], a_columns=True, b_rows=True)
        dv_narrow_CV = dv_CV.astype(narrow)
        dp_CC += plan.dot(do_CV, v_new_CV, b_rows=True)
        dl_CC -= plan.dot(dv_narrow_CV, v_new_CV, b_rows=True)
        along_q_C += jnp.sum(do_CV.astype(wide) * o_CV.astype(wide), axis=1)
        # Divided before they meet, because their product may be too small for float32.
        overlap_C += jnp.sum((dv_CV * inverse_C1) * (v_new_CV * inverse_C1), axis=1)
        of_v_C += jnp.sum(dv_narrow_CV.astype(wide) * v_CV.astype(wide), axis=1)
        out.v_new[:, part], out.dv[:, part] = v_new_CV.astype(narrow), dv_narrow_CV
        return dp_CC, dl_CC, along_q_C, overlap_C, of_v_C

    sums = (zeros_CC, zeros_CC, zeros_C, zeros_C, zeros_C)
    sums = for_parts(tokens.v.shape[-1], VALUE_PART, values, sums)
    dp_CC, dl_CC, along_q_C, overlap_C, of_v_C = sums
    # With R = dv / beta, every term of <k, dk> and of dbeta is one of R and v_new, because P, L and
    # both states are linear or bilinear in k and (I + L) v_new = beta (v - k_enter S).
    beta_C = beta_C1.reshape(-1)
    slope_C = beta_C * (1.0 - beta_C) if plan.options.beta_is_logit else 1.0
    out.dbeta[...] = overlap_C * slope_C
    if out.along is not None:
        out.along[0, :] = along_q_C * (1.0 / plan.options.scale)  # o is linear in q
        out.along[1, :] = 2.0 * beta_C * overlap_C - of_v_C
    out.d_own[...] = chunk.diagonal(dp_CC).reshape(-1)
    together_CC = together(tokens, rows, rows)
    dp_CC, dl_CC = (keep(together_CC, d_CC).astype(plan.narrow) for d_CC in (dp_CC, dl_CC))
    for n, cut in enumerate(chunk.cut_pairs(dp_CC, dl_CC, plan.log_tile)):
        out.dp[n, :, :], out.dl[n, :, :] = cut


def solve_vjp(plan: Plan, tokens: Tokens, x: ValueSide) -> Solve:
    """The value side of the chunks' gradients."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    rows = plan.num_rows
    chunks = (batch * num_heads, num_tokens // rows)
    spec = partial(chunk_spec, num_heads)
    cut = (tokens.masks.splits.shape[0], rows, rows)
    along = (2, rows) if plan.options.use_qk_l2norm else None
    dims = Solve(cut, cut, (rows,), along, (rows,), (rows, value_dim), None)
    dtypes = Solve(*[plan.narrow] * 2, *[plan.wide] * 3, *[plan.narrow] * 2)
    shapes = map(lambda d, t: d and jax.ShapeDtypeStruct((*chunks, *d), t), dims, dtypes)
    shapes = Solve(*shapes)._replace(dv=jax.ShapeDtypeStruct(tokens.v.shape, plan.narrow))
    values = head_spec(rows, value_dim)
    return pl.pallas_call(
        partial(_solve_kernel, plan),
        grid=(num_heads, chunks[1], batch),
        in_specs=(
            token_specs(plan, tokens),
            ValueSide(*[values] * 2, *[spec(value_dim, rows)] * 2, spec(rows, rows), spec(rows)),
        ),
        out_specs=(Solve(*(d and spec(*d) for d in dims))._replace(dv=values),),
        out_shape=varying_like(tokens.q, (shapes,)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=_stages(plan)),
        interpret=plan.interpret,
        name="kda_solve_vjp",
    )(tokens, x)[0]


def _stages(plan: Plan) -> int:
    """Parts of the value channels in flight: what is wide fills shared memory alone."""
    return 3 if plan.narrow.itemsize == 2 else 1


class Chain(NamedTuple):
    """What the kernels before leave for `grads`, all [X, N, ...] but do [B, T, H, V]."""

    do: jax.Array
    states: jax.Array
    d_leaving: jax.Array
    total: jax.Array
    factors: RowFactors
    solve: Solve


class Gradients(NamedTuple):
    q: jax.Array  # [B, T, H, K]; per value head
    k: jax.Array
    gate: jax.Array
    gate_params: jax.Array  # [X, N, 2, K]: the chunk's part of d dt_bias and of d a_log


def _grads_kernel(plan: Plan, tokens: Tokens, c: Chain, out: Gradients) -> None:
    whole, solve = pl.ds(0, plan.num_rows), c.solve
    part_dim = out.q.shape[-1]
    num_parts = tokens.q.shape[-1] // part_dim
    part = pl.ds(pl.program_id(0) % num_parts * part_dim, part_dim)
    rows, cuts = read_rows(plan, tokens, whole, c.factors), read_cuts(tokens, whole)
    raw, gate = read_raw(tokens, whole, part), read_gate(tokens, part)
    total_1K = c.total[...].reshape(1, -1)
    # First the states, then the pairs: what a loop starts from is summed up before it, and frees
    # the registers of its parts.
    d_enter_q_CK, d_enter_k_CK, d_leave_CK, d_total_1K = _through_states(plan, rows, c)
    # What is read here is read at once; where it is used, each would be waited for.
    sums, last = tokens.masks.sums, tokens.masks.splits.shape[0] - 1
    tokens = tokens._replace(masks=tokens.masks._replace(sums=(sums[0], sums[1])))
    of_last = solve.dp[last], solve.dl[last]
    d_own_C1 = solve.d_own[...].reshape(-1, 1)
    if solve.along is not None:
        along_q_C1, along_k_C1 = (solve.along[n, :].reshape(-1, 1) for n in range(2))
    x = activate(plan, rows, gate, raw := Raw(*map(made_once, raw)))
    decays = plan.decays(x.g_RK, tokens.masks)
    from_start_CK = keep(cuts and cuts.enters_R1, decays.from_start())
    to_end_CK = keep(cuts and cuts.leaves_R1, decays.to_end())
    d_enter_q_CK, d_enter_k_CK = (from_start_CK * d_CK for d_CK in (d_enter_q_CK, d_enter_k_CK))
    d_leave_CK *= to_end_CK
    # The diagonal of P, and what the normalisation takes back, here and not at the end: q and k
    # would be kept in a second layout for it.
    dq_CK, dk_CK = d_own_C1 * x.k_RK, d_own_C1 * x.q_RK
    if solve.along is not None:
        # Divided by the scale here and there: its square could leave float32.
        dq_CK -= along_q_C1 * ((1.0 / plan.options.scale) * x.q_RK)
        dk_CK -= along_k_C1 * x.k_RK
    of_states = chunk.ScoreGradients(
        d_enter_q_CK + dq_CK,
        d_leave_CK - d_enter_k_CK + dk_CK,
        x.q_RK * d_enter_q_CK - x.k_RK * d_enter_k_CK,
    )
    of_leaving = plan.row_sums(x.k_RK * d_leave_CK)

    def of_split(n: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        return of_last if isinstance(n, int) and n == last else (solve.dp[n], solve.dl[n])

    dq_CK, dk_CK, da_CK = chunk.scores_vjp(
        of_states, of_split, x.q_RK, x.k_RK, decays, plan.dot, plan.rounded
    )

    if rows.q_scale_R1 is None:
        dq_CK *= plan.options.scale
    else:
        dq_CK, dk_CK = rows.q_scale_R1 * dq_CK, rows.k_scale_R1 * dk_CK
    out.q[...], out.k[...] = dq_CK.astype(out.q.dtype), dk_CK.astype(out.k.dtype)

    dg_CK = of_leaving(tokens.masks.vjps[1]) + plan.row_sums(da_CK)(tokens.masks.vjps[0])
    dg_CK += total_1K * d_total_1K
    dg_CK = made_once(keep(rows.valid_R1, dg_CK))
    dz_CK, of_a_log_CK = log_decay_vjp(plan, rows, gate, raw.gate_RK, dg_CK)
    out.gate[...] = dz_CK.astype(out.gate.dtype)
    for n, d_CK in enumerate((dz_CK, of_a_log_CK)):
        out.gate_params[n, :] = jnp.sum(d_CK, axis=0)


def _through_states(plan: Plan, rows: Rows, c: Chain) -> tuple[jax.Array, ...]:
    """do S^T, dv S^T, v_new dS'^T [C, K] and the sum of S dS' over the value dim [1, K]."""
    value_dim, part_dim = c.states.shape

    def values(part: pl.Slice, sums: tuple) -> tuple:
        of_q_CK, of_k_CK, of_leaving_CK, overlap_VK = sums
        do_CV = keep(rows.valid_R1, c.do[:, part]).astype(plan.narrow)
        states_VK, d_leaving_VK = c.states[part, :], c.d_leaving[part, :]
        of_q_CK += plan.dot(do_CV, states_VK)
        of_k_CK += plan.dot(c.solve.dv[:, part], states_VK)
        of_leaving_CK += plan.dot(c.solve.v_new[:, part], d_leaving_VK)
        overlap_VK += states_VK.astype(plan.wide) * d_leaving_VK.astype(plan.wide)
        return of_q_CK, of_k_CK, of_leaving_CK, overlap_VK

    zeros_CK = jnp.zeros((plan.num_rows, part_dim), plan.wide)
    zeros_VK = jnp.zeros((min(VALUE_PART, value_dim), part_dim), plan.wide)
    sums = (zeros_CK, zeros_CK, zeros_CK, zeros_VK)
    *sums, overlap_VK = for_parts(value_dim, VALUE_PART, values, sums)
    return *sums, jnp.sum(overlap_VK, axis=0, keepdims=True)


def grads(plan: Plan, tokens: Tokens, chain: Chain) -> Gradients:
    """The key side of the chunks' gradients, down to the raw inputs."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    key_dim, rows = tokens.q.shape[-1], plan.num_rows
    part_dim = min(GRADS_PART, key_dim)
    num_parts = key_dim // part_dim
    of_keys = (batch, num_tokens, num_heads, key_dim)
    chunks = (batch * num_heads, num_tokens // rows)

    def of_program(spec: pl.BlockSpec, keys: int | None = None) -> pl.BlockSpec:
        """For the grid of heads and parts; keys: the dim that a program takes its part of."""

        def index(i: jax.Array, n: jax.Array, b: jax.Array) -> tuple:
            of_head = spec.index_map(i // num_parts, n, b)
            part = (i % num_parts,)
            return of_head if keys is None else of_head[:keys] + part + of_head[keys + 1 :]

        return pl.BlockSpec(spec.block_shape, index)

    def of_chunk(*dims: int, keys: int | None = None) -> pl.BlockSpec:
        return of_program(chunk_spec(num_heads, *dims), keys)

    values, keys = of_program(head_spec(rows, value_dim)), of_program(head_spec(rows, part_dim), 3)
    states = of_chunk(value_dim, part_dim, keys=3)

    def key_gradient(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of_keys, plan.wide if plan.group > 1 else x.dtype)

    return pl.pallas_call(
        partial(_grads_kernel, plan),
        grid=(num_heads * num_parts, chunks[1], batch),
        in_specs=(
            jax.tree.map(of_program, token_specs(plan, tokens)),
            jax.tree.map(lambda x: of_chunk(*x.shape[2:]), chain)._replace(
                do=values,
                solve=jax.tree.map(lambda x: of_chunk(*x.shape[2:]), chain.solve)._replace(
                    dv=values
                ),
                states=states,
                d_leaving=states,
                total=of_chunk(part_dim, keys=2),
            ),
        ),
        out_specs=(Gradients(keys, keys, keys, of_chunk(2, part_dim, keys=3)),),
        out_shape=varying_like(
            tokens.q,
            (
                Gradients(
                    key_gradient(tokens.q),
                    key_gradient(tokens.k),
                    jax.ShapeDtypeStruct(tokens.gate.shape, tokens.gate.dtype),
                    jax.ShapeDtypeStruct((*chunks, 2, key_dim), plan.wide),
                ),
            ),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=_stages(plan)),
        interpret=plan.interpret,
        name="kda_grads",
    )(tokens, chain)[0]
