"""Forward kernels of KDA on the Triton backend: `prepare` and `scan`.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, X chains
(B x H).
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
    Tokens,
    chunk_spec,
    for_parts,
    keep,
    read_channels,
    read_cuts,
    read_rows,
    token_specs,
    varying_like,
)


class Prepared(NamedTuple):
    """What the state meets in every chunk, all [X, N, ...]."""

    w: jax.Array  # [C, K]
    u: jax.Array  # [C, V]
    q_enter: jax.Array  # q exp(G), [C, K]
    k_leave: jax.Array  # k exp(G_C - G), [C, K]
    total: jax.Array  # [K], wide
    rstd: jax.Array | None  # [2, C], wide: 1 / norm of the rows of q and of k


class Solved(NamedTuple):
    p: jax.Array  # [X, N, C, C]
    inverse: jax.Array  # [X, N, C, C]


def _prepare_kernel(
    plan: Plan, tokens: Tokens, inverse: jax.Array | None, out: Prepared, solved: Solved | None
) -> None:
    rows, cuts, narrow = read_rows(plan, tokens), read_cuts(tokens), plan.narrow
    solves = inverse is None
    if out.rstd is not None:
        for n, rstd_C1 in enumerate((rows.q_rstd_C1, rows.k_rstd_C1)):
            out.rstd[n, :] = rstd_C1.reshape(-1)
    zeros_CC = jnp.zeros((plan.num_rows, plan.num_rows), plan.wide)

    def keys(part: pl.Slice, carry: tuple) -> tuple:
        x = read_channels(plan, tokens, rows, part)
        decays = plan.decays(x.g_CK, tokens.masks)
        out.total[part] = keep(cuts and cuts.passes_11, decays.total()).reshape(-1)
        from_start_CK = keep(cuts and cuts.enters_C1, decays.from_start())
        out.q_enter[:, part] = (x.q_CK * from_start_CK).astype(narrow)
        out.w[:, part] = (rows.beta_C1 * x.k_CK * from_start_CK).astype(narrow)
        to_end_CK = keep(cuts and cuts.leaves_C1, decays.to_end())
        out.k_leave[:, part] = (x.k_CK * to_end_CK).astype(narrow)
        return chunk.scores(carry, x.q_CK, x.k_CK, decays, narrow, plan.dot) if solves else carry

    p_CC, l_CC = for_parts(tokens, keys, (zeros_CC, zeros_CC))
    if solves:
        together_CC = cuts and cuts.together_CC
        solved.p[...] = keep(together_CC, p_CC).astype(narrow)
        l_CC = keep(together_CC, rows.beta_C1 * l_CC)
        inverse_CC = chunk.unit_lower_inverse(l_CC, plan.dot).astype(narrow)
        solved.inverse[...] = inverse_CC
    else:
        inverse_CC = inverse[...]
    vb_CV = rows.beta_C1 * keep(rows.valid_C1, tokens.v[...].astype(plan.wide))
    out.u[...] = plan.dot(inverse_CC, vb_CV.astype(narrow)).astype(narrow)

    def solve(part: pl.Slice, carry: tuple) -> tuple:
        out.w[:, part] = plan.dot(inverse_CC, out.w[:, part]).astype(narrow)
        return carry

    if not plan.interpret:
        plt.debug_barrier()  # out.w may be read by other threads than wrote it
    for_parts(tokens, solve, ())


def prepare(
    plan: Plan, tokens: Tokens, inverse: jax.Array | None
) -> tuple[Prepared, Solved | None]:
    """Everything about the chunks that does not need the state; inverse: T if it is known."""
    batch, num_tokens, num_heads, value_dim = tokens.v.shape
    key_dim, rows = tokens.q.shape[-1], plan.num_rows
    num_chunks, chains = num_tokens // rows, batch * num_heads
    spec = partial(chunk_spec, num_heads)

    def shape(*dims: int, dtype: jnp.dtype = plan.narrow) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((chains, num_chunks, *dims), dtype)

    keys, square = (rows, key_dim), (rows, rows)
    shapes = Prepared(
        w=shape(*keys),
        u=shape(rows, value_dim),
        q_enter=shape(*keys),
        k_leave=shape(*keys),
        total=shape(key_dim, dtype=plan.wide),
        rstd=shape(2, rows, dtype=plan.wide) if plan.options.use_qk_l2norm else None,
    )
    solves = inverse is None
    solved_shapes = Solved(shape(*square), shape(*square)) if solves else None
    return pl.pallas_call(
        partial(_prepare_kernel, plan),
        grid=(num_heads, num_chunks, batch),
        in_specs=(token_specs(plan, tokens), None if solves else spec(*square)),
        out_specs=(
            jax.tree.map(lambda x: spec(*x.shape[2:]), shapes),
            Solved(spec(*square), spec(*square)) if solves else None,
        ),
        out_shape=varying_like(tokens.q, (shapes, solved_shapes)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=plan.interpret,
        name="kda_prepare" if solves else "kda_prepare_again",
    )(tokens, inverse)


class Scanned(NamedTuple):
    o: jax.Array | None  # [B, N, C, H, V]
    state: jax.Array  # [X, K, V]: after the last chunk
    states: jax.Array | None  # [X, N, K, V]: entering the chunks
    v_new: jax.Array | None  # [X, N, C, V]


def _scan_kernel(
    plan: Plan, x: Prepared, p: jax.Array | None, state_in: jax.Array, out: Scanned
) -> None:
    tile = state_in.shape[-1]
    columns = pl.ds(pl.program_id(0) * tile, tile)
    chain, num_chunks = pl.program_id(1), x.w.shape[1]

    def step(n: int, state_KV: jax.Array) -> jax.Array:
        state_narrow_KV = state_KV.astype(plan.narrow)
        seen_CV = plan.dot(x.w[chain, n], state_narrow_KV)
        v_new_CV = (x.u[chain, n, :, columns].astype(plan.wide) - seen_CV).astype(plan.narrow)
        if out.states is not None:
            out.states[chain, n, :, columns] = state_KV.astype(out.states.dtype)
        if out.v_new is not None:
            out.v_new[chain, n, :, columns] = v_new_CV
        if out.o is not None:
            o_CV = plan.dot(x.q_enter[chain, n], state_narrow_KV)
            o_CV += plan.dot(p[chain, n], v_new_CV)
            heads = out.o.shape[3]
            out.o[chain // heads, n, :, chain % heads, columns] = o_CV.astype(out.o.dtype)
        written_KV = plan.dot(x.k_leave[chain, n], v_new_CV, a_columns=True)
        return x.total[chain, n].reshape(-1, 1) * state_KV + written_KV

    out.state[...] = jax.lax.fori_loop(0, num_chunks, step, state_in[...])


class StateTiles(NamedTuple):
    """How the programs of a scan share the state's columns."""

    columns: int
    spec: pl.BlockSpec  # of one state, for the grid (V / columns, X)
    states_shape: tuple[int, ...]  # [X, N, K, V]


def state_tiles(plan: Plan, prepared: Prepared, value_dim: int) -> StateTiles:
    """Fewer columns to a program where the chains are few."""
    chains, num_chunks, _, key_dim = prepared.w.shape
    columns = min(32 if plan.narrow.itemsize > 2 or chains <= 32 else 64, value_dim)
    spec = pl.BlockSpec((None, key_dim, columns), lambda v, x: (x, 0, v))
    return StateTiles(columns, spec, (chains, num_chunks, key_dim, value_dim))


def scan(
    plan: Plan,
    prepared: Prepared,
    p: jax.Array | None,
    state_XKV: jax.Array,
    *,
    o: jax.ShapeDtypeStruct | None = None,
    keep_states: jnp.dtype | None = None,
    keep_v_new: bool = False,
) -> Scanned:
    """Carries the state over the chunks. o, p: the output's type and the scores, to get it."""
    chains, _, value_dim = state_XKV.shape
    tiles = state_tiles(plan, prepared, value_dim)
    out_shape = Scanned(
        o=o,
        state=jax.ShapeDtypeStruct(state_XKV.shape, plan.wide),
        states=None
        if keep_states is None
        else jax.ShapeDtypeStruct(tiles.states_shape, keep_states),
        v_new=jax.ShapeDtypeStruct(prepared.u.shape, plan.narrow) if keep_v_new else None,
    )
    whole = jax.tree.map(lambda _: pl.BlockSpec(), (prepared, p))
    return pl.pallas_call(
        partial(_scan_kernel, plan),
        grid=(value_dim // tiles.columns, chains),
        in_specs=(*whole, tiles.spec),
        out_specs=(jax.tree.map(lambda _: pl.BlockSpec(), out_shape)._replace(state=tiles.spec),),
        out_shape=varying_like(prepared.w, (out_shape,)),
        # Without outputs two programs share a multiprocessor, if they take no more.
        compiler_params=scan_params(plan, tiles, most=2 if o is None else 3),
        interpret=plan.interpret,
        name="kda_scan",
    )(prepared, p, state_XKV)[0]


def scan_params(plan: Plan, tiles: StateTiles, most: int = 3) -> plt.CompilerParams:
    """As many chunks in flight, up to `most`, as shared memory holds (227 KiB on Hopper)."""
    rows, itemsize = plan.num_rows, plan.narrow.itemsize
    key_dim, tile = tiles.states_shape[2], tiles.columns
    chunk_bytes = (3 * rows * key_dim + rows * tile + rows * rows) * itemsize
    scratch_bytes = (key_dim + rows) * tile * itemsize
    stages = (227 * 1024 - scratch_bytes) // chunk_bytes
    return plt.CompilerParams(num_warps=4, num_stages=max(1, min(most, stages)))
