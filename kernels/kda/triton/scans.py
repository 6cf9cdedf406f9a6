"""The serial kernels of KDA on the Triton backend: `scan` carries the state over the chunks and
`reverse` its gradient back. A sequence may be cut into pieces that run side by side: pieces.py.

The state lies transposed in a program, [V, K]: then it and all that is made from it are first
factors of products, which stay in registers.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, X chains
(B x H), P pieces.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda.triton.plan import Plan, keep
from kernels.kda.triton.prepare import Prepared, Solved
from kernels.numerics import varying_like

# Chains and pieces from which a program takes 128 value channels and not 64.
WIDE_FROM = 96


class Stream(NamedTuple):
    """What comes chunk by chunk."""

    prepared: Prepared
    solved: Solved
    values: jax.Array | None  # [B, N, C, H, V]: v, or the gradient of o; None for zeros
    lengths: jax.Array | None
    minus_one: jax.Array  # [C, C]: the negative identity
    missing: jax.Array | None  # as in Scanned, if a scan before has left it


class Span(NamedTuple):
    """Which pieces of a sequence a call works on."""

    chunks: int  # of a piece; the sequence's last may have fewer
    first: int
    pieces: int


class Start(NamedTuple):
    """The states [X, P, K, V] before a scan's pieces. A dim of 1 stands for any X or P."""

    states: jax.Array
    only: int | None = None  # the piece that starts there, all others from zeros; None: all


class Scanned(NamedTuple):
    state: jax.Array  # [X, P, K, V]: after the pieces
    o: jax.Array | None  # [B, N, C, H, V]
    states: jax.Array | None  # [X, N, V, K]: entering the chunks
    missing: jax.Array | None  # [X, N, V, C]: v - k_enter S


class Reversed(NamedTuple):
    d_state: jax.Array  # [X, P, K, V]: gradient of the states entering the pieces
    d_leaving: jax.Array | None  # [X, N, V, K]: of the states leaving the chunks
    dv_new: jax.Array | None  # [X, N, V, C]


class Share(NamedTuple):
    """What one program works on."""

    values: pl.Slice  # its value channels
    chain: jax.Array
    row: jax.Array  # the chain's
    head: jax.Array
    start: jax.Array  # first chunk of its piece
    count: int | jax.Array  # of its piece's chunks


def _piece(span: Span) -> jax.Array:
    return span.first + pl.program_id(2)


def _read_start(span: Span, only: int | None, state_in: jax.Array) -> jax.Array:
    return keep(None if only is None else _piece(span) == only, state_in[...]).T


def _share(span: Span, num_heads: int, num_values: int, num_chunks: int) -> Share:
    chain = pl.program_id(1)
    start = _piece(span) * span.chunks
    count = span.chunks
    if num_chunks % span.chunks:
        count = jnp.minimum(span.chunks, num_chunks - start)
    values = pl.ds(pl.program_id(0) * num_values, num_values)
    return Share(values, chain, chain // num_heads, chain % num_heads, start, count)


def _read_values(plan: Plan, x: Stream, share: Share, n: jax.Array) -> jax.Array:
    """[C, V] of a chunk, zeros behind the sequence's length."""
    values_CV = x.values[share.row, n, :, share.head, share.values]
    if x.lengths is None:
        return values_CV
    position_C1 = jax.lax.broadcasted_iota(jnp.int32, (plan.num_rows, 1), 0)
    return keep(n * plan.num_rows + position_C1 < x.lengths[share.row], values_CV)


def _scan_kernel(
    plan: Plan,
    span: Span,
    num_heads: int,
    only: int | None,
    x: Stream,
    state_in: jax.Array,
    out: Scanned,
) -> None:
    prepared, solved, narrow = x.prepared, x.solved, plan.narrow
    share = _share(span, num_heads, state_in.shape[-1], prepared.total.shape[1])
    values, chain, row, head, start, count = share

    def write_o(n: int | jax.Array, o_VC: jax.Array) -> None:
        out.o[row, n, :, head, values] = o_VC.T

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> tuple:
        state_VK, last_o_VC = carry
        n = start + i
        # Before anything is written, or it would have to wait for it.
        total_1K = prepared.total[chain, n].reshape(1, -1)
        if out.o is not None:
            # Of the chunk before, while this one's arrays arrive. Of the first there is none, and
            # what is written then is overwritten.
            write_o(jnp.maximum(n - 1, start), last_o_VC)
        state_narrow_VK = state_VK.astype(narrow)
        if out.states is not None:
            out.states[chain, n, values, :] = state_VK.astype(out.states.dtype)
        if x.missing is not None:
            missing_VC = x.missing[chain, n, values, :]
        else:
            less_VC = plan.dot(state_narrow_VK, prepared.k_enter[chain, n], b_rows=True)
            if x.values is not None:
                # A product transposes v; Triton's own way meets conflicts between memory banks.
                v_CV = _read_values(plan, x, share, n).astype(narrow)
                less_VC += plan.dot(v_CV, x.minus_one[...], a_columns=True)
            missing_VC = (-less_VC).astype(narrow)
        if out.missing is not None:
            out.missing[chain, n, values, :] = missing_VC
        v_new_VC = plan.dot(missing_VC, solved.solve[chain, n], b_rows=True).astype(narrow)
        if out.o is not None:
            o_VC = plan.dot(state_narrow_VK, prepared.q_enter[chain, n], b_rows=True)
            o_VC += plan.dot(v_new_VC, solved.p[chain, n], b_rows=True)
            last_o_VC = o_VC.astype(out.o.dtype)
        state_VK = total_1K * state_VK + plan.dot(v_new_VC, prepared.k_leave[chain, n])
        return state_VK, last_o_VC

    no_o_VC = None
    if out.o is not None:
        no_o_VC = jnp.zeros((values.size, plan.num_rows), out.o.dtype)
    carry = _read_start(span, only, state_in), no_o_VC
    state_VK, last_o_VC = jax.lax.fori_loop(0, count, step, carry)
    if out.o is not None:
        write_o(start + count - 1, last_o_VC)
    out.state[...] = state_VK.T


def _reverse_kernel(
    plan: Plan,
    span: Span,
    num_heads: int,
    only: int | None,
    x: Stream,
    d_state_in: jax.Array,
    out: Reversed,
) -> None:
    prepared, solved, narrow = x.prepared, x.solved, plan.narrow
    share = _share(span, num_heads, d_state_in.shape[-1], prepared.total.shape[1])
    values, chain, _, _, start, count = share

    def step(i: jax.Array, d_state_VK: jax.Array) -> jax.Array:
        n = start + count - 1 - i
        # Before anything is written, or it would have to wait for it.
        total_1K = prepared.total[chain, n].reshape(1, -1)
        d_narrow_VK = d_state_VK.astype(narrow)
        if out.d_leaving is not None:
            out.d_leaving[chain, n, values, :] = d_narrow_VK
        do_CV = _read_values(plan, x, share, n).astype(narrow)
        dv_new_VC = plan.dot(do_CV, solved.p[chain, n], a_columns=True)
        dv_new_VC += plan.dot(d_narrow_VK, prepared.k_leave[chain, n], b_rows=True)
        dv_new_VC = dv_new_VC.astype(narrow)
        if out.dv_new is not None:
            out.dv_new[chain, n, values, :] = dv_new_VC
        dv_VC = plan.dot(dv_new_VC, solved.solve[chain, n]).astype(narrow)
        d_state_VK = total_1K * d_state_VK
        d_state_VK += plan.dot(do_CV, prepared.q_enter[chain, n], a_columns=True)
        return d_state_VK - plan.dot(dv_VC, prepared.k_enter[chain, n])

    d_state_VK = _read_start(span, only, d_state_in)
    out.d_state[...] = jax.lax.fori_loop(0, count, step, d_state_VK).T


def _call(
    plan: Plan,
    span: Span,
    num_heads: int,
    kernel: Callable[..., None],
    x: Stream,
    begin: Start,
    out_shape: Scanned | Reversed,
    reads: tuple[int, int],
    kept_bytes: int,
    name: str,
) -> Scanned | Reversed:
    """One program for every piece of a chain and some of the value channels."""
    chains, (*given, key_dim, value_dim) = x.prepared.total.shape[0], begin.states.shape
    values = min(128 if chains * span.pieces >= WIDE_FROM else 64, value_dim)
    block = (None, None, key_dim, values)
    of_piece, whole = pl.BlockSpec(block, lambda v, x, p: (x, p, 0, v)), pl.BlockSpec()
    of_start = pl.BlockSpec(block, lambda v, x, p: (x * (given[0] > 1), p * (given[1] > 1), 0, v))
    return pl.pallas_call(
        partial(kernel, plan, span, num_heads, begin.only),
        grid=(value_dim // values, chains, span.pieces),
        in_specs=(jax.tree.map(lambda _: whole, x), of_start),
        out_specs=(type(out_shape)(of_piece, *(out and whole for out in out_shape[1:])),),
        out_shape=varying_like(begin.states, (out_shape,)),
        compiler_params=plt.CompilerParams(
            num_warps=8 if values == 128 else 4,
            num_stages=_stages(plan, key_dim, values, reads, kept_bytes),
        ),
        interpret=plan.interpret,
        name=name,
    )(x, begin.states)[0]


def _stages(plan: Plan, key_dim: int, values: int, reads: tuple[int, int], kept_bytes: int) -> int:
    """As many chunks in flight as shared memory holds (227 KiB on Hopper), at most 3.

    reads: how many arrays [C, K] and [C, C] a chunk brings; kept_bytes: of an entry of the states
    that leave, if they do.
    """
    rows, narrow = plan.num_rows, plan.narrow.itemsize
    of_chunk = rows * (reads[0] * key_dim + reads[1] * rows + values) * narrow
    scratch = max(rows * narrow, key_dim * kept_bytes) * values
    return max(1, min(3, (227 * 1024 - scratch) // of_chunk))


def scan(
    plan: Plan,
    span: Span,
    num_heads: int,
    x: Stream,
    begin: Start,
    *,
    o: jnp.dtype | None = None,
    keep_states: jnp.dtype | None = None,
    keep_missing: bool = False,
) -> Scanned:
    """Carries the states over the pieces' chunks. o: the output's dtype, to get it."""
    key_dim, value_dim = begin.states.shape[2:]
    chunks = x.prepared.total.shape[:2]

    def shape(dtype: jnp.dtype | None, *dims: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct(dims, dtype)

    out_shape = Scanned(
        state=shape(plan.wide, chunks[0], span.pieces, key_dim, value_dim),
        o=None if o is None else shape(o, *x.values.shape),
        states=shape(keep_states, *chunks, value_dim, key_dim),
        missing=shape(plan.narrow if keep_missing else None, *chunks, value_dim, plan.num_rows),
    )
    reads = (1 if x.missing is not None else 2, 1) if o is None else (3, 2)
    if x.values is not None:
        reads = reads[0], reads[1] + 1  # minus_one
    kept_bytes = 0 if keep_states is None else jnp.dtype(keep_states).itemsize
    return _call(
        plan,
        span,
        num_heads,
        _scan_kernel,
        x,
        begin,
        out_shape,
        reads,
        kept_bytes,
        "kda_scan",
    )


def reverse(
    plan: Plan,
    span: Span,
    num_heads: int,
    x: Stream,
    begin: Start,
    *,
    keep_gradients: bool,
) -> Reversed:
    """Carries the states' gradients back over the pieces' chunks."""
    key_dim, value_dim = begin.states.shape[2:]
    chunks = x.prepared.total.shape[:2]
    d_state = jax.ShapeDtypeStruct((chunks[0], span.pieces, key_dim, value_dim), plan.wide)
    out_shape = Reversed(d_state, None, None)
    if keep_gradients:
        out_shape = out_shape._replace(
            d_leaving=jax.ShapeDtypeStruct((*chunks, value_dim, key_dim), plan.narrow),
            dv_new=jax.ShapeDtypeStruct((*chunks, value_dim, plan.num_rows), plan.narrow),
        )
    kept_bytes = plan.narrow.itemsize if keep_gradients else 0
    return _call(
        plan,
        span,
        num_heads,
        _reverse_kernel,
        x,
        begin,
        out_shape,
        (3, 2),
        kept_bytes,
        "kda_reverse",
    )
