"""KDA with the sequence spread over a mesh axis: exact, by passing states from shard to shard.

A shard maps the state that enters it to the one that leaves it, S -> M S + N, and both M and N are
known without the shards before it. So every shard finds its map, the maps are composed along the
axis in a logarithmic number of rounds, and then each shard runs as usual from its entering state
(Kimi K3 report, section on context parallelism). The gradient of the state passes the other way
in the same manner, by the transposed maps.

Letters: B batch, T time (of a shard), H value heads, Q query/key heads, K key dim, V value dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.api import kda
from kernels.numerics import accumulation_dtype, vary_together

Arrays = dict[str, jax.Array]


def kda_context_parallel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    *,
    axis_name: str,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """`kernels.kda.kda` of a sequence whose tokens lie on the devices of a mesh axis, in order.

    To be called inside jax.shard_map, with this device's tokens in every argument with a dim T.
    Sends 4 K (K + V) bytes a head and row log2(devices) times, whatever T.

    Args:
      axis_name: the mesh axis. With one device on it this is `kda`.
      segment_ids: as in `kda`; documents may cross shards.
      options: further options of `kda`, but for initial_state, lengths and states_every. The maps
        take kernels a value dim of K + V, so a named one refuses more than 256 of that.

    Returns:
      o [B, T, H, V] of this device's tokens, in v's dtype.

    Raises:
      ValueError, NotImplementedError: as `kda`.
    """
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a_log": a_log}
    arrays |= {"dt_bias": dt_bias, "segment_ids": segment_ids}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if jax.lax.axis_size(axis_name) == 1:
        return kda(**arrays, **options)[0]
    arrays = dict(zip(arrays, vary_together(*arrays.values()), strict=True))
    fixed = {} if segment_ids is None else {"segment_ids": arrays.pop("segment_ids")}
    return _chained(axis_name, tuple(sorted(options.items())), arrays, fixed)


class _Map(NamedTuple):
    """S -> linear S + constant."""

    linear: jax.Array  # [B, H, K, K]
    constant: jax.Array  # [B, H, K, V]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _own_map(call: Callable[..., Any], arrays: Arrays, fixed: Arrays) -> _Map:
    """Both parts at once: states beside each other, the first from zero by v, the second from the
    identity without any."""
    v_BTHV = arrays["v"]
    key_dim, value_dim = arrays["k"].shape[-1], v_BTHV.shape[-1]
    dtype = accumulation_dtype(jnp.result_type(*arrays.values()))
    zero_BHKV = jnp.zeros_like(
        v_BTHV, dtype, shape=(v_BTHV.shape[0], v_BTHV.shape[2], key_dim, value_dim)
    )
    linear_BHKK = jnp.zeros_like(zero_BHKV, shape=(*zero_BHKV.shape[:2], key_dim, key_dim))
    linear_BHKK += jnp.eye(key_dim, dtype=dtype)[None, None]
    wide = arrays | {"v": jnp.pad(v_BTHV, ((0, 0), (0, 0), (0, 0), (0, key_dim)))}
    state_BHKX = jnp.concatenate([zero_BHKV, linear_BHKK], axis=-1)
    _, state_BHKX = call(**wide, **fixed, initial_state=state_BHKX)
    constant_BHKV, linear_BHKK = jnp.split(state_BHKX, [value_dim], axis=-1)
    return _Map(linear_BHKK, constant_BHKV)


def _state_before(axis: str, own: _Map, *, reverse: bool = False) -> jax.Array:
    """What the shards before this one (behind it, if reverse) make of a state of zero."""
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    if reverse:
        index = size - 1 - index

    def from_before(x: _Map, distance: int) -> _Map:
        """That of the shard at a distance; zeros where there is none."""
        pairs = [(n, n + distance) for n in range(size - distance)]
        if reverse:
            pairs = [(after, before) for before, after in pairs]
        return jax.lax.ppermute(x, axis, pairs)

    # Of this shard and those up to `distance` before it.
    distance = 1
    while distance < size - 1:
        before = from_before(own, distance)
        joined = _Map(
            _matmul(own.linear, before.linear),
            _matmul(own.linear, before.constant) + own.constant,
        )
        alone = index < distance
        own = jax.tree.map(partial(jnp.where, alone), own, joined)
        distance *= 2
    return from_before(own, 1).constant


def _continues(axis: str, fixed: Arrays) -> jax.Array | float:
    """[B, 1, 1, 1]: 1 where the document of the shard before goes on here, else 0."""
    if not fixed:
        return 1.0
    segment_ids_BT = fixed["segment_ids"]
    size = jax.lax.axis_size(axis)
    pairs = [(n, n + 1) for n in range(size - 1)]
    before_B = jax.lax.ppermute(segment_ids_BT[:, -1], axis, pairs)
    return (before_B == segment_ids_BT[:, 0])[:, None, None, None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chained(axis: str, options: tuple, arrays: Arrays, fixed: Arrays) -> jax.Array:
    return _forward(axis, options, arrays, fixed)[0]


def _forward(axis: str, options: tuple, arrays: Arrays, fixed: Arrays) -> tuple:
    call = partial(kda, **dict(options))
    continues_B111 = _continues(axis, fixed)
    own = _own_map(call, arrays, fixed)
    own = own._replace(linear=own.linear * continues_B111)
    state_BHKV = _state_before(axis, own) * continues_B111

    def run(arrays: Arrays, state_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
        return call(**arrays, **fixed, initial_state=state_BHKV)

    (o_BTHV, _), pull = jax.vjp(run, arrays, state_BHKV)
    return o_BTHV, (pull, own.linear, continues_B111)


def _backward(axis: str, options: tuple, kept: tuple, do_BTHV: jax.Array) -> tuple:
    """The gradient of the leaving state is what the shards behind make of theirs; then the shard's
    own is the usual one. The first pull is read for the entering state alone."""
    pull, linear_BHKK, continues_B111 = kept
    no_gradient_BHKV = jnp.zeros_like(
        do_BTHV, linear_BHKK.dtype, shape=(*linear_BHKK.shape[:3], do_BTHV.shape[-1])
    )
    d_state_BHKV = pull((do_BTHV, no_gradient_BHKV))[1] * continues_B111
    own = _Map(linear_BHKK.swapaxes(-1, -2), d_state_BHKV)
    d_arrays, _ = pull((do_BTHV, _state_before(axis, own, reverse=True)))
    return d_arrays, None


_chained.defvjp(_forward, _backward)
