"""Backward kernels of KDA on the Triton backend: `reverse`, `solve_vjp` and `grads`.

The algebra: wy.py. Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C
chunk rows, X chains (B x H).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda import chunk
from kernels.kda.triton.forward import Prepared, scan_params, state_tiles
from kernels.kda.triton.plan import (
    Plan,
    Rows,
    Tokens,
    chunk_spec,
    head_spec,
    keep,
    read_channels,
    read_cuts,
    read_gate,
    read_rows,
    token_specs,
    valid_and_beta,
    varying_like,
)

# Channels of which a program holds tiles at a time: more, and registers spill; fewer, and the
# products waste more of the tensor cores. Measured on an H200.
GRADS_PART = 32
VALUE_PART = 64


class Reversed(NamedTuple):
    d_state: jax.Array  # [X, K, V]: gradient of the state entering the first chunk
    d_leaving: jax.Array  # [X, N, K, V]: of the states leaving the chunks
    dv_new: jax.Array  # [X, N, C, V]


def _reverse_kernel(
    plan: Plan, x: Prepared, p: jax.Array, do: jax.Array, d_state_in: jax.Array, out: Reversed
) -> None:
    tile = d_state_in.shape[-1]
    columns = pl.ds(pl.program_id(0) * tile, tile)
    chain, num_chunks, heads = pl.program_id(1), x.w.shape[1], do.shape[3]

    def step(i: int, d_state_KV: jax.Array) -> jax.Array:
        n = num_chunks - 1 - i
        d_narrow_KV = d_state_KV.astype(plan.narrow)
        out.d_leaving[chain, n, :, columns] = d_narrow_KV
        do_CV = do[chain // heads, n, :, chain % heads, columns].astype(plan.narrow)
        dv_new_CV = plan.dot(p[chain, n], do_CV, a_columns=True)
        dv_new_CV += plan.dot(x.k_leave[chain, n], d_narrow_KV)
        dv_new_CV = dv_new_CV.astype(plan.narrow)
        out.dv_new[chain, n, :, columns] = dv_new_CV
        d_state_KV = x.total[chain, n].reshape(-1, 1) * d_state_KV
        d_state_KV += plan.dot(x.q_enter[chain, n], do_CV, a_columns=True)
        return d_state_KV - plan.dot(x.w[chain, n], dv_new_CV, a_columns=True)

    out.d_state[...] = jax.lax.fori_loop(0, num_chunks, step, d_state_in[...])


def reverse(
    plan: Plan, prepared: Prepared, p: jax.Array, do: jax.Array, d_state_XKV: jax.Array
) -> Reversed:
    """Carries the state's gradient back over the chunks; do: [B, N, C, H, V]."""
    chains, _, value_dim = d_state_XKV.shape
    tiles = state_tiles(plan, prepared, value_dim)
    out_shape = Reversed(
        jax.ShapeDtypeStruct(d_state_XKV.shape, plan.wide),
        jax.ShapeDtypeStruct(tiles.states_shape, plan.narrow),
        jax.ShapeDtypeStruct(prepared.u.shape, plan.narrow),
    )
    whole = jax.tree.map(lambda _: pl.BlockSpec(), (prepared, p, do))
    return pl.pallas_call(
        partial(_reverse_kernel, plan),
        grid=(value_dim // tiles.columns, chains),
        in_specs=(*whole, tiles.spec),
        out_specs=(Reversed(tiles.spec, pl.BlockSpec(), pl.BlockSpec()),),
        out_shape=varying_like(prepared.w, (out_shape,)),
        compiler_params=scan_params(plan, tiles),
        interpret=plan.interpret,
        name="kda_reverse",
    )(prepared, p, do, d_state_XKV)[0]


class ValueSide(NamedTuple):
    """What `solve_vjp` reads, [X, N, ...] but o and do [B, T, H, V]."""

    inverse: jax.Array
    o: jax.Array
    do: jax.Array
    v_new: jax.Array
    dv_new: jax.Array


class Solve(NamedTuple):
    """What the value channels say about a chunk's gradients, all [X, N, ...]."""

    # [splits, C, C], ready for the tensor cores: chunk.cut_pairs.
    dp: jax.Array  # gradient of the scores P, without the pairs of different documents
    dl: jax.Array  # of the decayed scores of k on k, likewise
    d_own: jax.Array  # [C]: diagonal of the gradient of P
    along: jax.Array  # [2, C]: <q, dq> and <k, dk> of the normalised q and k
    dbeta: jax.Array  # [C]: of the logit, if beta is one


def _solve_kernel(plan: Plan, tokens: Tokens, x: ValueSide, out: Solve, dv: jax.Array) -> None:
    cuts, dot, narrow, wide = read_cuts(tokens), plan.dot, plan.narrow, plan.wide
    valid_C1, beta_C1 = valid_and_beta(plan, tokens)
    # R of the module's algebra, the gradient of beta v - (beta k exp(G)) S.
    r_CV = dot(x.inverse[...], x.dv_new[...], a_columns=True)
    v_new_CV = x.v_new[...]
    # Every term of <k, dk> and of dbeta is one of R and v_new, because P, L and both states are
    # linear or bilinear in k and (I + L) v_new = beta v - (beta k exp(G)) S.
    along_C = jnp.sum(r_CV * v_new_CV.astype(wide), axis=1)
    beta_C = beta_C1.reshape(-1)
    dbeta_C = along_C * (1.0 - beta_C) if plan.options.beta_is_logit else along_C / beta_C
    out.dbeta[...] = dbeta_C
    dv_CV = beta_C1 * r_CV
    v_CV = keep(valid_C1, tokens.v[...].astype(wide))
    out.along[1, :] = 2.0 * along_C - jnp.sum(dv_CV * v_CV, axis=1)
    dv_CV = dv_CV.astype(narrow)
    dv[...] = dv_CV.astype(dv.dtype)
    do_CV = keep(valid_C1, x.do[...].astype(wide))
    out.along[0, :] = jnp.sum(do_CV * x.o[...].astype(wide), axis=1)  # o is linear in q
    together_CC = cuts and cuts.together_CC
    dp_CC = dot(do_CV.astype(narrow), v_new_CV, b_rows=True)
    out.d_own[...] = chunk.diagonal(dp_CC).reshape(-1)
    dp_CC = keep(together_CC, dp_CC).astype(narrow)
    dl_CC = keep(together_CC, -dot(dv_CV, v_new_CV, b_rows=True)).astype(narrow)
    num_splits = tokens.masks.pairs.shape[0]
    for n in range(num_splits):
        is_halving = n < num_splits - 1 or plan.log_tile == 0
        cut = chunk.cut_pairs(dp_CC, dl_CC, n, is_halving, tokens.masks)
        out.dp[n, :, :], out.dl[n, :, :] = cut


def solve_vjp(plan: Plan, tokens: Tokens, x: ValueSide) -> tuple[Solve, jax.Array]:
    """The value side of the chunks' gradients; also dv [B, T, H, V]."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    rows = plan.num_rows
    chunks = (batch * num_heads, num_tokens // rows)
    spec = partial(chunk_spec, num_heads)
    cut = (tokens.masks.pairs.shape[0], rows, rows)
    dims = Solve(cut, cut, (rows,), (2, rows), (rows,))
    dtypes = Solve(plan.narrow, plan.narrow, plan.wide, plan.wide, plan.wide)
    values = head_spec(rows, value_dim)
    return pl.pallas_call(
        partial(_solve_kernel, plan),
        grid=(num_heads, chunks[1], batch),
        in_specs=(
            token_specs(plan, tokens),
            ValueSide(spec(rows, rows), values, values, *[spec(rows, value_dim)] * 2),
        ),
        out_specs=(Solve(*(spec(*d) for d in dims)), values),
        out_shape=varying_like(
            tokens.q,
            (
                Solve(*map(lambda d, t: jax.ShapeDtypeStruct((*chunks, *d), t), dims, dtypes)),
                jax.ShapeDtypeStruct(tokens.v.shape, tokens.v.dtype),
            ),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=plan.interpret,
        name="kda_solve_vjp",
    )(tokens, x)


class Chain(NamedTuple):
    """What the kernels before leave for `grads`, all [X, N, ...] but do and dv [B, T, H, V]."""

    do: jax.Array
    dv: jax.Array
    states: jax.Array
    d_leaving: jax.Array
    v_new: jax.Array
    rstd: jax.Array | None


class Gradients(NamedTuple):
    q: jax.Array  # [B, T, H, K]; per value head
    k: jax.Array
    gate: jax.Array
    gate_params: jax.Array  # [X, N, 2, K]: the chunk's part of d dt_bias and of d a_log


def _grads_kernel(plan: Plan, tokens: Tokens, solve: Solve, c: Chain, out: Gradients) -> None:
    rows, cuts = read_rows(plan, tokens, c.rstd), read_cuts(tokens)
    part_dim = out.q.shape[-1]
    num_parts = tokens.q.shape[-1] // part_dim
    part = pl.ds(pl.program_id(0) % num_parts * part_dim, part_dim)
    x = read_channels(plan, tokens, rows, part)
    decays = plan.decays(x.g_CK, tokens.masks)
    # First the states, then the pairs: what a loop starts from is summed up before it, and frees
    # the registers of its parts.
    d_enter_q_CK, d_enter_k_CK, d_leave_CK, d_total_K1 = _through_states(plan, rows, c)
    from_start_CK = keep(cuts and cuts.enters_C1, decays.from_start())
    d_enter_q_CK *= from_start_CK
    d_enter_k_CK *= from_start_CK
    d_leave_CK *= keep(cuts and cuts.leaves_C1, decays.to_end())
    d_own_C1 = solve.d_own[...].reshape(-1, 1)
    of_states = chunk.ScoreGradients(
        d_enter_q_CK + d_own_C1 * x.k_CK,
        d_leave_CK - d_enter_k_CK + d_own_C1 * x.q_CK,
        x.q_CK * d_enter_q_CK - x.k_CK * d_enter_k_CK,
    )
    dg_CK = plan.row_sums(x.k_CK * d_leave_CK)(tokens.masks.vjps[1])
    total_1K = keep(cuts and cuts.passes_11, decays.total())
    dg_CK += total_1K * d_total_K1.reshape(1, -1)
    dq_CK, dk_CK, da_CK = chunk.scores_vjp(
        of_states, solve.dp, solve.dl, x.q_CK, x.k_CK, decays, plan.dot
    )

    q_along_C1, k_along_C1 = (solve.along[n, :].reshape(-1, 1) for n in range(2))
    dq_CK = _normalize_vjp(dq_CK, x.q_CK, q_along_C1, rows.q_rstd_C1, plan.options.scale)
    dk_CK = _normalize_vjp(dk_CK, x.k_CK, k_along_C1, rows.k_rstd_C1, 1.0)
    out.q[...] = dq_CK.astype(out.q.dtype)
    out.k[...] = dk_CK.astype(out.k.dtype)

    dg_CK += plan.row_sums(da_CK)(tokens.masks.vjps[0])
    # Read again: the gate was not worth its registers so far.
    gate = read_gate(plan, tokens, rows.valid_C1, part)
    dg_CK = keep(rows.valid_C1, dg_CK)
    dz_CK = dg_CK * gate.dg_dz_CK
    out.gate[...] = dz_CK.astype(out.gate.dtype)
    out.gate_params[0, :] = jnp.sum(dz_CK, axis=0)
    out.gate_params[1, :] = jnp.sum(dg_CK * gate.dg_da_log_CK, axis=0)


def _through_states(plan: Plan, rows: Rows, c: Chain) -> tuple[jax.Array, ...]:
    """do S^T, dv S^T, v_new dS'^T [C, K] and the sum of S dS' over the value dim [K, 1]."""
    num_rows, value_dim = c.v_new.shape
    size, wide = min(VALUE_PART, value_dim), plan.wide

    def step(n: jax.Array, sums: tuple) -> tuple:
        columns = pl.ds(n * size, size)
        of_q_CK, of_k_CK, of_leaving_CK, overlap_K1 = sums
        do_CV = keep(rows.valid_C1, c.do[:, columns].astype(wide)).astype(plan.narrow)
        states_KV, d_leaving_KV = c.states[:, columns].astype(plan.narrow), c.d_leaving[:, columns]
        of_q_CK += plan.dot(do_CV, states_KV, b_rows=True)
        of_k_CK += plan.dot(c.dv[:, columns].astype(plan.narrow), states_KV, b_rows=True)
        of_leaving_CK += plan.dot(c.v_new[:, columns], d_leaving_KV, b_rows=True)
        overlap_KV = states_KV.astype(wide) * d_leaving_KV.astype(wide)
        overlap_K1 += jnp.sum(overlap_KV, axis=1, keepdims=True)
        return of_q_CK, of_k_CK, of_leaving_CK, overlap_K1

    part_dim = c.states.shape[0]
    zeros = jnp.zeros((num_rows, part_dim), wide)
    sums = (zeros, zeros, zeros, jnp.zeros((part_dim, 1), wide))
    return jax.lax.fori_loop(0, value_dim // size, step, sums)


def _normalize_vjp(
    dy_CK: jax.Array,
    y_CK: jax.Array,
    along_C1: jax.Array,
    rstd_C1: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Gradient of x, where y = scale * x * rstd(x) and along = <y, dy>."""
    if rstd_C1 is None:
        return scale * dy_CK
    return rstd_C1 * (scale * dy_CK - y_CK * (along_C1 * (1.0 / scale)))


def grads(plan: Plan, tokens: Tokens, solve: Solve, chain: Chain) -> Gradients:
    """The key side of the chunks' gradients, down to the raw inputs."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    key_dim, rows = tokens.q.shape[-1], plan.num_rows
    num_chunks, part_dim = num_tokens // rows, min(GRADS_PART, key_dim)
    num_parts = key_dim // part_dim

    def of_chunk(*dims: int, part_of: int | None = None) -> pl.BlockSpec:
        def index(i: jax.Array, n: jax.Array, b: jax.Array) -> tuple:
            last = [i % num_parts if d == part_of else 0 for d in range(len(dims))]
            return b * num_heads + i // num_parts, n, *last

        return pl.BlockSpec((None, None, *dims), index)

    def of_head(dim: int, whole: bool = False) -> pl.BlockSpec:
        def index(i: jax.Array, n: jax.Array, b: jax.Array) -> tuple:
            return b, n, i // num_parts, 0 if whole else i % num_parts

        return pl.BlockSpec((None, rows, None, dim), index)

    specs = jax.tree.map(
        lambda spec: pl.BlockSpec(
            spec.block_shape, lambda i, n, b: spec.index_map(i // num_parts, n, b)
        ),
        token_specs(plan, tokens),
    )
    cut, keys = of_chunk(*solve.dp.shape[2:]), of_head(part_dim)
    states = of_chunk(part_dim, value_dim, part_of=0)
    values = of_chunk(rows, value_dim)
    of_keys = (batch, num_tokens, num_heads, key_dim)
    chunks = (batch * num_heads, num_chunks)

    def key_gradient(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of_keys, plan.wide if plan.group > 1 else x.dtype)

    return pl.pallas_call(
        partial(_grads_kernel, plan),
        grid=(num_heads * num_parts, num_chunks, batch),
        in_specs=(
            specs,
            Solve(cut, cut, of_chunk(rows), of_chunk(2, rows), of_chunk(rows)),
            Chain(
                *[of_head(value_dim, whole=True)] * 2,
                states,
                states,
                values,
                None if chain.rstd is None else of_chunk(2, rows),
            ),
        ),
        out_specs=(
            Gradients(
                keys,
                keys,
                keys,
                of_chunk(2, part_dim, part_of=1),
            ),
        ),
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
