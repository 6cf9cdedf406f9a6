"""The first kernel of KDA on the Triton backend, `prepare`: all about a chunk but the state.

A chunk is worked on as two halves, because the pairs of a row in the second half and a column in
the first are one product of plain factors: the decay since the border and the decay up to it.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, R rows of
half a chunk, X chains (B x H).
"""

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
    Rows,
    Tokens,
    activate_beta,
    chunk_spec,
    for_parts,
    half_rows,
    keep,
    read_channels,
    read_cuts,
    read_rows,
    together,
    token_specs,
    varying_like,
)


class Prepared(NamedTuple):
    """What the state meets in every chunk, all [X, N, ...]."""

    k_enter: jax.Array  # k exp(G), [C, K]
    q_enter: jax.Array  # q exp(G), [C, K]
    k_leave: jax.Array  # k exp(G_C - G), [C, K]
    total: jax.Array  # [K], wide
    rstd: jax.Array | None  # [2, C], wide: 1 / norm of the rows of q and of k


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
    plan: Plan, tokens: Tokens, out: Prepared, solved: Solved | None, scratch: jax.Array | None
) -> None:
    halves = tuple(read_rows(plan, tokens, half_rows(plan, half)) for half in range(2))
    if out.rstd is not None:
        for rows in halves:
            for n, rstd_R1 in enumerate((rows.q_rstd_R1, rows.k_rstd_R1)):
                out.rstd[n, rows.rows] = rstd_R1.reshape(-1)
    zeros = Halves(*[jnp.zeros((plan.half, plan.half), plan.wide)] * 3)
    if tokens.masks.pairs.shape[0] == 1:
        # Once and not in every round of the loop, whose stores a load could depend on.
        masks = chunk.Masks(
            *(tuple(m[n] for n in range(m.shape[0])) for m in tokens.masks[:2]), None
        )
        tokens = tokens._replace(masks=masks)

    def keys(part: pl.Slice, scores: tuple[Halves, Halves]) -> tuple[Halves, Halves]:
        return _prepare_keys(plan, tokens, halves, part, out, None if solved is None else scores)

    size = PREPARE_PART if solved is None else SOLVE_PART
    scores = (zeros, zeros) if solved is not None else ()
    scores = for_parts(tokens.q.shape[-1], size, keys, scores)
    if solved is not None:
        _solve(plan, tokens, halves, scores, solved, scratch)


def _prepare_keys(
    plan: Plan,
    tokens: Tokens,
    halves: tuple[Rows, Rows],
    part: pl.Slice,
    out: Prepared,
    scores: tuple[Halves, Halves] | None,
) -> tuple[Halves, Halves] | tuple[()]:
    """Writes the factors of a part of the key channels; adds its scores (of q, of k)."""
    narrow = plan.narrow
    first, second = halves
    cuts = [read_cuts(tokens, rows.rows) for rows in halves]

    x = read_channels(plan, tokens, first, part)
    decays = plan.decays(x.g_RK, tokens.masks)
    if scores is not None:
        of_q, of_k = scores
        firsts = chunk.scores((of_q.first, of_k.first), x.q_RK, x.k_RK, decays, narrow, plan.dot)
    enter_RK = keep(cuts[0] and cuts[0].enters_R1, decays.from_start())
    out.q_enter[first.rows, part] = (x.q_RK * enter_RK).astype(narrow)
    out.k_enter[first.rows, part] = (x.k_RK * enter_RK).astype(narrow)
    to_border_RK, first_total_1K = x.k_RK * decays.to_end(), decays.total()

    x = read_channels(plan, tokens, second, part)
    decays = plan.decays(x.g_RK, tokens.masks)
    if scores is not None:
        seconds = chunk.scores((of_q.second, of_k.second), x.q_RK, x.k_RK, decays, narrow, plan.dot)
    total_1K = decays.total()
    out.total[part] = keep(cuts[0] and cuts[0].passes_11, first_total_1K * total_1K).reshape(-1)
    leave_RK = keep(cuts[0] and cuts[0].leaves_R1, to_border_RK * total_1K)
    out.k_leave[first.rows, part] = leave_RK.astype(narrow)
    from_border_RK = decays.from_start()
    enter_RK = keep(cuts[1] and cuts[1].enters_R1, from_border_RK * first_total_1K)
    out.q_enter[second.rows, part] = (x.q_RK * enter_RK).astype(narrow)
    out.k_enter[second.rows, part] = (x.k_RK * enter_RK).astype(narrow)
    leave_RK = keep(cuts[1] and cuts[1].leaves_R1, x.k_RK * decays.to_end())
    out.k_leave[second.rows, part] = leave_RK.astype(narrow)
    if scores is None:
        return ()
    column_RK = to_border_RK.astype(narrow)
    across_q_RR, across_k_RR = (
        before_RR + plan.dot((row_RK * from_border_RK).astype(narrow), column_RK, b_rows=True)
        for before_RR, row_RK in ((of_q.across, x.q_RK), (of_k.across, x.k_RK))
    )
    return (
        Halves(firsts[0], across_q_RR, seconds[0]),
        Halves(firsts[1], across_k_RR, seconds[1]),
    )


def _solve(
    plan: Plan,
    tokens: Tokens,
    halves: tuple[Rows, Rows],
    scores: tuple[Halves, Halves],
    solved: Solved,
    scratch: jax.Array,
) -> None:
    masks = [together(tokens, *(halves[half].rows for half in block)) for block in BLOCKS]
    p, of_k = (Halves(*map(keep, masks, of)) for of in scores)
    lower = (halves[row].beta_R1 * x for (row, _), x in zip(BLOCKS, of_k, strict=True))
    inverse = unit_lower_inverse(plan, Halves(*lower), scratch)
    zeros = jnp.zeros((plan.half, plan.half), plan.narrow)
    for out in solved:
        out[halves[0].rows, halves[1].rows] = zeros
    for (row, column), p_RR, inverse_RR in zip(BLOCKS, p, inverse, strict=True):
        rows, columns = halves[row].rows, halves[column].rows
        valid_R1 = halves[column].valid_R1
        valid_1R = None if valid_R1 is None else valid_R1.reshape(1, -1)
        beta_1R = activate_beta(plan, tokens.beta[columns].reshape(1, -1), valid_1R)
        solved.p[rows, columns] = p_RR.astype(plan.narrow)
        solved.solve[rows, columns] = (inverse_RR * beta_1R).astype(plan.narrow)


def prepare(plan: Plan, tokens: Tokens, *, solves: bool) -> tuple[Prepared, Solved | None]:
    """Everything about the chunks that does not need the state; on request the scores as well."""
    batch, num_tokens, num_heads, _ = tokens.v.shape
    key_dim, rows = tokens.q.shape[-1], plan.num_rows
    num_chunks, chains = num_tokens // rows, batch * num_heads
    spec = partial(chunk_spec, num_heads)

    def shape(*dims: int, dtype: jnp.dtype = plan.narrow) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((chains, num_chunks, *dims), dtype)

    keys, square = shape(rows, key_dim), shape(rows, rows)
    shapes = (
        Prepared(
            k_enter=keys,
            q_enter=keys,
            k_leave=keys,
            total=shape(key_dim, dtype=plan.wide),
            rstd=shape(2, rows, dtype=plan.wide) if plan.options.use_qk_l2norm else None,
        ),
        Solved(square, square) if solves else None,
        shape(rows, plan.half, dtype=plan.wide) if solves else None,
    )
    return pl.pallas_call(
        partial(_prepare_kernel, plan),
        grid=(num_heads, num_chunks, batch),
        in_specs=(token_specs(plan, tokens),),
        out_specs=jax.tree.map(lambda x: spec(*x.shape[2:]), shapes),
        out_shape=varying_like(tokens.q, shapes),
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=3),
        interpret=plan.interpret,
        name="kda_prepare" if solves else "kda_prepare_again",
    )(tokens)[:2]
