"""The serial kernels of KDA on the Triton backend: `scan` carries the state over the chunks and
`reverse` its gradient back.

Few chains leave most of the GPU idle, so a sequence can be cut into pieces that run side by side. A
piece is an affine map of its entering state, S' = M S + N: N is a scan from zero and M a scan from
the identity that writes nothing (fla calls the same maps KCP). The states between the pieces follow
by products in float32, in a small kernel of their own, `link`.

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

from kernels.kda.triton.plan import Plan, for_parts, keep, synchronize
from kernels.kda.triton.prepare import Prepared, Solved
from kernels.numerics import varying_like

# Chunks: the length of a piece is a multiple of it, whatever T is.
PIECE_UNIT = 16
# A piece costs more than it brings where there are so many already, or where it is shorter.
# Measured on an H200.
ENOUGH_PIECES, SHORTEST_PIECE = 128, 32
# Chains and pieces from which a program takes 128 value channels and not 64.
WIDE_FROM = 96
# Value channels of a program of `link`, and key channels whose products it takes at a time.
LINK_VALUES, LINK_PART = 32, 128


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


def piece_chunks(num_splits: int | None, chains: int, num_chunks: int) -> int:
    """Chunks of a piece, if every chain is cut into so many pieces, or a few less."""
    if num_splits is None:
        num_splits = max(1, min(ENOUGH_PIECES // chains, num_chunks // SHORTEST_PIECE))
    units = -(-num_chunks // PIECE_UNIT)
    return PIECE_UNIT * -(-units // num_splits)


class Pieces(NamedTuple):
    """What a sequence's pieces are to each other."""

    states: jax.Array  # [X, P, K, V]: entering them
    maps: jax.Array | None  # [X, P - 2, K, K]: M of those between the first and the last


def entering_states(
    plan: Plan, chunks: int, num_heads: int, x: Stream, state_XKV: jax.Array
) -> Pieces:
    """The states that enter the pieces of so many chunks."""
    pieces = -(-x.prepared.total.shape[1] // chunks)
    state_X1KV, maps_XPKK = state_XKV[:, None], None
    if pieces == 1:
        return Pieces(state_X1KV, None)
    span = Span(chunks, 0, pieces - 1)
    leaving_XPKV = scan(plan, span, num_heads, x, Start(state_X1KV, only=0)).state
    if pieces > 2:
        key_dim = state_XKV.shape[1]
        # Made of the state, so that it varies over the mesh axes of jax.shard_map as that does.
        zeros_KK = jnp.zeros_like(state_XKV, shape=(key_dim, key_dim))
        identity_11KK = (zeros_KK + jnp.eye(key_dim))[None, None]
        span, linear = Span(chunks, 1, pieces - 2), x._replace(values=None)
        maps_XPKK = scan(plan, span, num_heads, linear, Start(identity_11KK)).state
    return Pieces(_link(plan, False, state_X1KV, leaving_XPKV, maps_XPKK), maps_XPKK)


def leaving_gradients(
    plan: Plan,
    chunks: int,
    num_heads: int,
    x: Stream,
    maps_XPKK: jax.Array | None,
    d_state_XKV: jax.Array,
) -> jax.Array:
    """The gradients [X, P, K, V] of the states that leave the pieces."""
    pieces = -(-x.prepared.total.shape[1] // chunks)
    d_state_X1KV = d_state_XKV[:, None]
    if pieces == 1:
        return d_state_X1KV
    span, begin = Span(chunks, 1, pieces - 1), Start(d_state_X1KV, only=pieces - 1)
    entering_XPKV = reverse(plan, span, num_heads, x, begin, keep_gradients=False).d_state
    return _link(plan, True, d_state_X1KV, entering_XPKV, maps_XPKK)


def _link_kernel(
    plan: Plan,
    backward: bool,
    end: jax.Array,
    constants: jax.Array,
    maps: jax.Array | None,
    out: jax.Array,
) -> None:
    pieces, key_dim, _ = out.shape

    def follow(i: int | jax.Array, _: None = None) -> None:
        """The state on the inner side of piece i, counted from where they start."""
        n = pieces - 1 - i if backward else i
        before, of_constant, of_map = (n + 1, n, n) if backward else (n - 1, n - 1, n - 2)
        synchronize(plan)

        def rows(part: pl.Slice, _: None) -> None:
            def columns(by: pl.Slice, sum_KV: jax.Array) -> jax.Array:
                map_KK = maps[of_map, by, part] if backward else maps[of_map, part, by]
                return sum_KV + plan.dot(map_KK, out[before, by, :], a_columns=backward, exact=True)

            constant_KV = constants[of_constant, part, :]
            out[n, part, :] = for_parts(key_dim, LINK_PART, columns, constant_KV)

        for_parts(key_dim, LINK_PART, rows, None)

    first, second = (pieces - 1, pieces - 2) if backward else (0, 1)
    out[first], out[second] = end[0], constants[second if backward else 0]
    if maps is not None:
        jax.lax.fori_loop(2, pieces, follow, None)


def _link(
    plan: Plan,
    backward: bool,
    end_X1KV: jax.Array,
    constants_XPKV: jax.Array,
    maps_XPKK: jax.Array | None,
) -> jax.Array:
    """States [X, P, K, V] between P pieces, in full precision.

    s_0 = end, s_1 = constants_0, s_i = maps_{i - 2} s_{i - 1} + constants_{i - 1}; or backward from
    the last piece, by the maps' transposes.
    """
    chains, others, key_dim, value_dim = constants_XPKV.shape
    values = min(LINK_VALUES, value_dim)

    def spec(pieces: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, pieces, key_dim, values), lambda v, x: (x, 0, 0, v))

    of_maps = pl.BlockSpec((None, others - 1, key_dim, key_dim), lambda v, x: (x, 0, 0, 0))
    shape = jax.ShapeDtypeStruct((chains, others + 1, key_dim, value_dim), plan.wide)
    return pl.pallas_call(
        partial(_link_kernel, plan, backward),
        grid=(value_dim // values, chains),
        in_specs=(spec(1), spec(others), None if maps_XPKK is None else of_maps),
        out_specs=spec(others + 1),
        out_shape=varying_like(end_X1KV, shape),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=plan.interpret,
        name="kda_link",
    )(end_X1KV, constants_XPKV, maps_XPKK)
