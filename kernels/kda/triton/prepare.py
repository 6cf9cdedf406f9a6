"""The first kernel of KDA on the Triton backend, `prepare`: all about a chunk but the state.

A chunk is worked on as two halves, because the pairs of a row in the second half and a column in
the first are one product of plain factors: the decay since the border and the decay up to it.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, R rows of
half a chunk, X chains (B x H).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda import chunk
from kernels.kda.triton.inverse import unit_lower_inverse
from kernels.kda.triton.plan import (
    PREPARE_PART,
    SOLVE_PART,
    Plan,
    chunk_spec,
    for_parts,
    half_rows,
    keep,
    synchronize,
)
from kernels.kda.triton.tokens import (
    RowFactors,
    Rows,
    Tokens,
    activate,
    measure_rows,
    read_cuts,
    read_gate,
    read_raw,
    read_rows,
    together,
    token_specs,
)
from kernels.numerics import Shapes, varying_like


class Prepared(NamedTuple):
    """What the state meets in every chunk, all [X, N, ...]."""

    k_enter: jax.Array  # k exp(G), [C, K]
    q_enter: jax.Array  # q exp(G), [C, K]
    k_leave: jax.Array  # k exp(G_C - G), [C, K]
    total: jax.Array  # [K], wide


class Solved(NamedTuple):
    p: jax.Array  # [X, N, C, C]: decayed scores of q on k
    # [X, N, C, C]: (I + L)^-1 diag(beta), so that v_new = solve (v - k_enter S).
    solve: jax.Array


class Halves(NamedTuple):
    """Blocks [R, R] of a strictly or unit lower triangular tile [C, C]."""

    first: jax.Array
    across: jax.Array  # rows of the second half, columns of the first
    second: jax.Array


BLOCKS = Halves((0, 0), (1, 0), (1, 1))  # the halves of rows and columns


def _prepare_kernel(
    plan: Plan,
    tokens: Tokens,
    out: Prepared,
    factors: RowFactors,
    solved: Solved,
    scratch: jax.Array,
) -> None:
    tokens = _with_masks_read(tokens)
    # By way of memory, from where every layout of them is read at once.
    scratch[:, 0] = measure_rows(plan, tokens, factors)
    synchronize(plan)
    halves = tuple(read_rows(plan, tokens, half_rows(plan, n), factors) for n in range(2))
    owns = tuple(scratch[rows.rows, 0].reshape(-1, 1) for rows in halves)
    synchronize(plan)  # the scratch is written again
    zeros = Halves(*[jnp.zeros((plan.half, plan.half), plan.wide)] * 3)
    keys = partial(_prepare_keys, plan, tokens, halves, out)
    scores = for_parts(tokens.q.shape[-1], SOLVE_PART, keys, (zeros, zeros))
    _solve(plan, tokens, factors, halves, owns, scores, solved, scratch)


def _prepare_again_kernel(plan: Plan, tokens: Tokens, factors: RowFactors, out: Prepared) -> None:
    tokens = _with_masks_read(tokens)
    halves = tuple(read_rows(plan, tokens, half_rows(plan, n), factors) for n in range(2))
    keys = partial(_prepare_keys, plan, tokens, halves, out)
    for_parts(tokens.q.shape[-1], PREPARE_PART, keys, ())


def _with_masks_read(tokens: Tokens) -> Tokens:
    """Reads masks once (not many splits): in every round of a loop they wait for its stores."""
    splits, sums, _ = tokens.masks
    if splits.shape[0] == 1:
        splits = (splits[0],)
    masks = chunk.Masks(splits, (sums[0], sums[1]), None)
    return tokens._replace(masks=masks)


def _prepare_keys(
    plan: Plan,
    tokens: Tokens,
    halves: tuple[Rows, Rows],
    out: Prepared,
    part: pl.Slice,
    scores: tuple[Halves, Halves] | tuple[()],
) -> tuple[Halves, Halves] | tuple[()]:
    """Writes the factors of a part of the key channels; adds its scores (of q, of k), if asked."""
    narrow = plan.narrow
    scores_of = partial(chunk.scores, narrow=narrow, dot_both=plan.dot_both)
    first, second = halves
    cuts = [read_cuts(tokens, rows.rows) for rows in halves]
    gate, raws = read_gate(tokens, part), [read_raw(tokens, rows.rows, part) for rows in halves]

    x = activate(plan, first, gate, raws[0])
    decays = plan.decays(x.g_RK, tokens.masks)
    if scores:
        of_q, of_k = scores
        firsts = scores_of((of_q.first, of_k.first), x.q_RK, x.k_RK, decays)
    shifted_RK = decays.from_start_shifted()
    for array, x_RK in ((out.q_enter, x.q_RK), (out.k_enter, x.k_RK)):
        enter_RK = (x_RK * shifted_RK).astype(narrow) * decays.start_factor  # a power of 2
        array[first.rows, part] = keep(cuts[0] and cuts[0].enters_R1, enter_RK)
    to_border_RK, first_total_1K = x.k_RK * decays.to_end(), decays.total()

    x = activate(plan, second, gate, raws[1])
    decays = plan.decays(x.g_RK, tokens.masks)
    if scores:
        seconds = scores_of((of_q.second, of_k.second), x.q_RK, x.k_RK, decays)
    total_1K = decays.total()
    out.total[part] = keep(cuts[0] and cuts[0].passes_11, first_total_1K * total_1K).reshape(-1)
    leave_RK = keep(cuts[0] and cuts[0].leaves_R1, to_border_RK * total_1K)
    out.k_leave[first.rows, part] = leave_RK.astype(narrow)
    enter_RK = keep(cuts[1] and cuts[1].enters_R1, decays.from_start() * first_total_1K)
    out.q_enter[second.rows, part] = (x.q_RK * enter_RK).astype(narrow)
    out.k_enter[second.rows, part] = (x.k_RK * enter_RK).astype(narrow)
    leave_RK = keep(cuts[1] and cuts[1].leaves_R1, x.k_RK * decays.to_end())
    out.k_leave[second.rows, part] = leave_RK.astype(narrow)
    if not scores:
        return ()
    # Shifted, because these operands are there already; `_solve` makes up for it.
    column_RK, shifted_RK = to_border_RK.astype(narrow), decays.from_start_shifted()
    across_q_RR, across_k_RR = (
        before_RR + plan.dot((row_RK * shifted_RK).astype(narrow), column_RK, b_rows=True)
        for before_RR, row_RK in ((of_q.across, x.q_RK), (of_k.across, x.k_RK))
    )
    return (
        Halves(firsts[0], across_q_RR, seconds[0]),
        Halves(firsts[1], across_k_RR, seconds[1]),
    )


def _solve(
    plan: Plan,
    tokens: Tokens,
    factors: RowFactors,
    halves: tuple[Rows, Rows],
    owns: tuple[jax.Array, jax.Array],
    scores: tuple[Halves, Halves],
    solved: Solved,
    scratch: jax.Array,
) -> None:
    unshift = chunk.start_factor(plan.half, plan.bound, plan.log_tile)
    scores = tuple(x._replace(across=unshift * x.across) for x in scores)
    first, second = (
        chunk.cut(*(x[n] for x in scores), own_R1) for n, own_R1 in zip((0, 2), owns, strict=True)
    )
    same = [together(tokens, *(halves[half].rows for half in block)) for block in BLOCKS]
    p, of_k = (
        Halves(*map(keep, same, (first[n], x.across, second[n]))) for n, x in enumerate(scores)
    )
    _write_blocks(plan, solved.p, halves, p)
    betas = [factors.beta[rows.rows] for rows in halves]
    lower = Halves(
        *(betas[row].reshape(-1, 1) * x for (row, _), x in zip(BLOCKS, of_k, strict=True))
    )
    inverse = unit_lower_inverse(plan, lower, scratch)
    solve = (
        x * betas[column].reshape(1, -1) for (_, column), x in zip(BLOCKS, inverse, strict=True)
    )
    _write_blocks(plan, solved.solve, halves, Halves(*solve))


def _write_blocks(plan: Plan, out: jax.Array, halves: tuple[Rows, Rows], blocks: Halves) -> None:
    first, second = halves
    out[first.rows, second.rows] = jnp.zeros((plan.half, plan.half), plan.narrow)
    for (row, column), x_RR in zip(BLOCKS, blocks, strict=True):
        out[halves[row].rows, halves[column].rows] = x_RR.astype(plan.narrow)


def prepare(plan: Plan, tokens: Tokens) -> tuple[Prepared, RowFactors, Solved]:
    """Everything about the chunks that does not need the state."""
    rows, chunks = plan.num_rows, _chunks(plan, tokens)

    def shape(*dims: int, dtype: jnp.dtype = plan.wide) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*chunks, *dims), dtype)

    of_rows, square = shape(rows), shape(rows, rows, dtype=plan.narrow)
    out_shape = (
        _prepared_shape(plan, tokens),
        RowFactors(of_rows, shape(2, rows) if plan.options.use_qk_l2norm else None),
        Solved(square, square),
        shape(rows, plan.half),
    )
    return _call(plan, tokens, (), _prepare_kernel, out_shape, "kda_prepare")[:3]


def prepare_again(plan: Plan, tokens: Tokens, factors: RowFactors) -> Prepared:
    """What `prepare` says first, if the rest was kept."""
    out_shape = (_prepared_shape(plan, tokens),)
    kernel = _prepare_again_kernel
    return _call(plan, tokens, (factors,), kernel, out_shape, "kda_prepare_again")[0]


def _chunks(plan: Plan, tokens: Tokens) -> tuple[int, int]:
    batch, num_tokens, num_heads, _ = tokens.v.shape
    return batch * num_heads, num_tokens // plan.num_rows


def _prepared_shape(plan: Plan, tokens: Tokens) -> Prepared:
    key_dim, chunks = tokens.q.shape[-1], _chunks(plan, tokens)
    keys = jax.ShapeDtypeStruct((*chunks, plan.num_rows, key_dim), plan.narrow)
    return Prepared(keys, keys, keys, jax.ShapeDtypeStruct((*chunks, key_dim), plan.wide))


def _call(
    plan: Plan, tokens: Tokens, x: tuple, kernel: Callable[..., None], out_shape: Shapes, name: str
) -> Shapes:
    """One program for every chunk of a chain."""
    batch, _, num_heads, _ = tokens.v.shape
    num_chunks = _chunks(plan, tokens)[1]

    def spec(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return chunk_spec(num_heads, *x.shape[2:])

    return pl.pallas_call(
        partial(kernel, plan),
        grid=(num_heads, num_chunks, batch),
        in_specs=(token_specs(plan, tokens), *jax.tree.map(spec, x)),
        out_specs=jax.tree.map(spec, out_shape),
        out_shape=varying_like(tokens.q, out_shape),
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=3),
        interpret=plan.interpret,
        name=name,
    )(tokens, *x)
