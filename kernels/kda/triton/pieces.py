"""Pieces of a sequence that run side by side on the Triton backend, and how they are linked.

Few chains leave most of the GPU idle, so a sequence can be cut into pieces. A piece is an affine
map of its entering state, S' = M S + N: N is a scan from zero and M a scan from the identity that
writes nothing (fla calls the same maps KCP). The states between the pieces follow by products in
float32, in a small kernel of their own, `link`.

Letters: K key dim, V value dim, X chains (batch x value heads), P pieces.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda.triton.plan import Plan, for_parts, synchronize
from kernels.kda.triton.scans import Span, Start, Stream, reverse, scan
from kernels.numerics import varying_like

# Chunks: the length of a piece is a multiple of it, whatever T is.
PIECE_UNIT = 16
# A piece costs more than it brings where there are so many already, or where it is shorter.
# Measured on an H200.
ENOUGH_PIECES, SHORTEST_PIECE = 128, 32
# Value channels of a program of `link`, and key channels whose products it takes at a time.
LINK_VALUES, LINK_PART = 32, 128


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
