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
    Rows,
    Tokens,
    activate_beta,
    chunk_spec,
    for_parts,
    head_spec,
    keep,
    read_channels,
    read_cuts,
    read_gate,
    read_rows,
    together,
    token_specs,
    valid_rows,
    varying_like,
)

# Channels of which a program holds tiles at a time: more, and registers spill; fewer, and more is
# read again. Measured on an H200.
GRADS_PART, VALUE_PART = 32, 64


class ValueSide(NamedTuple):
    """What `solve_vjp` reads: o, do and dv [B, T, H, V], v_new [X, N, V, C]."""

    o: jax.Array
    do: jax.Array
    dv: jax.Array
    v_new: jax.Array


class Solve(NamedTuple):
    """What the value channels say about a chunk's gradients, all [X, N, ...]."""

    # [S, C, C], ready for the tensor cores: chunk.cut_pairs.
    dp: jax.Array  # gradient of the scores of q on k, without the pairs of different documents
    dl: jax.Array  # of the scores of k on k, likewise
    d_own: jax.Array  # [C]: diagonal of the gradient of P
    along: jax.Array  # [2, C]: <q, dq> and <k, dk> of the normalised q and k
    dbeta: jax.Array  # [C]: of the logit, if beta is one


def _solve_kernel(plan: Plan, tokens: Tokens, x: ValueSide, out: Solve) -> None:
    rows, wide = pl.ds(0, plan.num_rows), plan.wide
    valid_C1 = valid_rows(plan, tokens, rows)
    beta_C1 = activate_beta(plan, tokens.beta[...].reshape(-1, 1), valid_C1)
    zeros_CC = jnp.zeros((plan.num_rows, plan.num_rows), wide)
    zeros_C = jnp.zeros((plan.num_rows,), wide)

    def values(part: pl.Slice, sums: tuple) -> tuple:
        dp_CC, dl_CC, along_q_C, overlap_C, of_v_C = sums
        do_CV = keep(valid_C1, x.do[:, part])
        dv_CV, v_new_VC = x.dv[:, part], x.v_new[part, :]
        dp_CC += plan.dot(do_CV.astype(plan.narrow), v_new_VC)
        dl_CC -= plan.dot(dv_CV, v_new_VC)
        dv_CV = dv_CV.astype(wide)
        along_q_C += jnp.sum(do_CV.astype(wide) * x.o[:, part].astype(wide), axis=1)
        # Divided before they meet, because their product may be too small for float32.
        missing_CV = v_new_VC.T.astype(wide) / beta_C1
        overlap_C += jnp.sum((dv_CV / beta_C1) * missing_CV, axis=1)
        of_v_C += jnp.sum(dv_CV * keep(valid_C1, tokens.v[:, part]).astype(wide), axis=1)
        return dp_CC, dl_CC, along_q_C, overlap_C, of_v_C

    sums = (zeros_CC, zeros_CC, zeros_C, zeros_C, zeros_C)
    sums = for_parts(tokens.v.shape[-1], VALUE_PART, values, sums)
    dp_CC, dl_CC, along_q_C, overlap_C, of_v_C = sums
    # With R = dv / beta, every term of <k, dk> and of dbeta is one of R and v_new, because P, L and
    # both states are linear or bilinear in k and (I + L) v_new = beta (v - k_enter S).
    beta_C = beta_C1.reshape(-1)
    slope_C = beta_C * (1.0 - beta_C) if plan.options.beta_is_logit else 1.0
    out.dbeta[...] = overlap_C * slope_C
    out.along[0, :] = along_q_C  # o is linear in q
    out.along[1, :] = 2.0 * beta_C * overlap_C - of_v_C
    out.d_own[...] = chunk.diagonal(dp_CC).reshape(-1)
    together_CC = together(tokens, rows, rows)
    dp_CC, dl_CC = (keep(together_CC, d_CC).astype(plan.narrow) for d_CC in (dp_CC, dl_CC))
    num_splits = tokens.masks.pairs.shape[0]
    for n in range(num_splits):
        is_halving = n < num_splits - 1 or plan.log_tile == 0
        cut = chunk.cut_pairs(dp_CC, dl_CC, n, is_halving, tokens.masks)
        out.dp[n, :, :], out.dl[n, :, :] = cut


def solve_vjp(plan: Plan, tokens: Tokens, x: ValueSide) -> Solve:
    """The value side of the chunks' gradients."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    rows = plan.num_rows
    chunks = (batch * num_heads, num_tokens // rows)
    spec = partial(chunk_spec, num_heads)
    cut = (tokens.masks.pairs.shape[0], rows, rows)
    dims = Solve(cut, cut, (rows,), (2, rows), (rows,))
    dtypes = Solve(*[plan.narrow] * 2, *[plan.wide] * 3)
    values = head_spec(rows, value_dim)
    return pl.pallas_call(
        partial(_solve_kernel, plan),
        grid=(num_heads, chunks[1], batch),
        in_specs=(
            token_specs(plan, tokens),
            ValueSide(*[values] * 3, spec(value_dim, rows)),
        ),
        out_specs=(Solve(*(spec(*d) for d in dims)),),
        out_shape=varying_like(
            tokens.q,
            (Solve(*map(lambda d, t: jax.ShapeDtypeStruct((*chunks, *d), t), dims, dtypes)),),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=plan.interpret,
        name="kda_solve_vjp",
    )(tokens, x)[0]


class Chain(NamedTuple):
    """What the kernels before leave for `grads`, all [X, N, ...] but do and dv [B, T, H, V]."""

    do: jax.Array
    dv: jax.Array
    states: jax.Array
    d_leaving: jax.Array
    v_new: jax.Array
    total: jax.Array
    rstd: jax.Array | None


class Gradients(NamedTuple):
    q: jax.Array  # [B, T, H, K]; per value head
    k: jax.Array
    gate: jax.Array
    gate_params: jax.Array  # [X, N, 2, K]: the chunk's part of d dt_bias and of d a_log


def _grads_kernel(plan: Plan, tokens: Tokens, solve: Solve, c: Chain, out: Gradients) -> None:
    whole = pl.ds(0, plan.num_rows)
    rows, cuts = read_rows(plan, tokens, whole, c.rstd), read_cuts(tokens, whole)
    part_dim = out.q.shape[-1]
    num_parts = tokens.q.shape[-1] // part_dim
    part = pl.ds(pl.program_id(0) % num_parts * part_dim, part_dim)
    x = read_channels(plan, tokens, rows, part)
    decays = plan.decays(x.g_RK, tokens.masks)
    # First the states, then the pairs: what a loop starts from is summed up before it, and frees
    # the registers of its parts.
    d_enter_q_CK, d_enter_k_CK, d_leave_CK, d_total_1K = _through_states(plan, rows, c)
    from_start_CK = keep(cuts and cuts.enters_R1, decays.from_start())
    d_enter_q_CK *= from_start_CK
    d_enter_k_CK *= from_start_CK
    d_leave_CK *= keep(cuts and cuts.leaves_R1, decays.to_end())
    d_own_C1 = solve.d_own[...].reshape(-1, 1)
    of_states = chunk.ScoreGradients(
        d_enter_q_CK + d_own_C1 * x.k_RK,
        d_leave_CK - d_enter_k_CK + d_own_C1 * x.q_RK,
        x.q_RK * d_enter_q_CK - x.k_RK * d_enter_k_CK,
    )
    dg_CK = plan.row_sums(x.k_RK * d_leave_CK)(tokens.masks.vjps[1])
    dg_CK += c.total[...].reshape(1, -1) * d_total_1K
    dq_CK, dk_CK, da_CK = chunk.scores_vjp(
        of_states, solve.dp, solve.dl, x.q_RK, x.k_RK, decays, plan.dot
    )

    q_along_C1, k_along_C1 = (solve.along[n, :].reshape(-1, 1) for n in range(2))
    dq_CK = _normalize_vjp(dq_CK, x.q_RK, q_along_C1, rows.q_rstd_R1, plan.options.scale)
    dk_CK = _normalize_vjp(dk_CK, x.k_RK, k_along_C1, rows.k_rstd_R1, 1.0)
    out.q[...] = dq_CK.astype(out.q.dtype)
    out.k[...] = dk_CK.astype(out.k.dtype)

    dg_CK += plan.row_sums(da_CK)(tokens.masks.vjps[0])
    # Read again: the gate was not worth its registers so far.
    gate = read_gate(plan, tokens, rows, part)
    dg_CK = keep(rows.valid_R1, dg_CK)
    dz_CK = dg_CK * gate.dg_dz_RK
    out.gate[...] = dz_CK.astype(out.gate.dtype)
    out.gate_params[0, :] = jnp.sum(dz_CK, axis=0)
    out.gate_params[1, :] = jnp.sum(dg_CK * gate.dg_da_log_RK, axis=0)


def _through_states(plan: Plan, rows: Rows, c: Chain) -> tuple[jax.Array, ...]:
    """do S^T, dv S^T, v_new dS'^T [C, K] and the sum of S dS' over the value dim [1, K]."""
    value_dim, part_dim = c.states.shape

    def values(part: pl.Slice, sums: tuple) -> tuple:
        of_q_CK, of_k_CK, of_leaving_CK, overlap_1K = sums
        do_CV = keep(rows.valid_R1, c.do[:, part]).astype(plan.narrow)
        states_VK, d_leaving_VK = c.states[part, :].astype(plan.narrow), c.d_leaving[part, :]
        of_q_CK += plan.dot(do_CV, states_VK)
        of_k_CK += plan.dot(c.dv[:, part], states_VK)
        of_leaving_CK += plan.dot(c.v_new[part, :], d_leaving_VK, a_columns=True)
        overlap_VK = states_VK.astype(plan.wide) * d_leaving_VK.astype(plan.wide)
        overlap_1K += jnp.sum(overlap_VK, axis=0, keepdims=True)
        return of_q_CK, of_k_CK, of_leaving_CK, overlap_1K

    zeros_CK = jnp.zeros((plan.num_rows, part_dim), plan.wide)
    sums = (zeros_CK, zeros_CK, zeros_CK, jnp.zeros((1, part_dim), plan.wide))
    return for_parts(value_dim, VALUE_PART, values, sums)


def _normalize_vjp(
    dy_RK: jax.Array,
    y_RK: jax.Array,
    along_R1: jax.Array,
    rstd_R1: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Gradient of x, where y = scale * x * rstd(x) and along = <y, dy>."""
    if rstd_R1 is None:
        return scale * dy_RK
    return rstd_R1 * (scale * dy_RK - y_RK * (along_R1 * (1.0 / scale)))


def grads(plan: Plan, tokens: Tokens, solve: Solve, chain: Chain) -> Gradients:
    """The key side of the chunks' gradients, down to the raw inputs."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    key_dim, rows = tokens.q.shape[-1], plan.num_rows
    part_dim = min(GRADS_PART, key_dim)
    num_parts = key_dim // part_dim
    of_keys, chunks = (
        (batch, num_tokens, num_heads, key_dim),
        (batch * num_heads, num_tokens // rows),
    )

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
            jax.tree.map(lambda x: of_chunk(*x.shape[2:]), solve),
            Chain(
                do=values,
                dv=values,
                states=states,
                d_leaving=states,
                v_new=of_chunk(value_dim, rows),
                total=of_chunk(part_dim, keys=2),
                rstd=None if chain.rstd is None else of_chunk(2, rows),
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
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=3 if plan.narrow.itemsize == 2 else 1
        ),
        interpret=plan.interpret,
        name="kda_grads",
    )(tokens, solve, chain)[0]
