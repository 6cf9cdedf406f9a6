"""A chunk's inputs as they come into a TPU program of KDA.

Letters: B batch, T time, Q query/key heads, H value heads, K key dim, V value dim, N chunks, C
chunk rows, M heads of a program, P programs of a chunk (H / M).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.kda.gates import L2_NORM_EPS, MAX_A_LOG
from kernels.kda.mosaic.plan import LOG2E, Masks, Plan, eye

SMALLEST_BETA = 1e-18  # times values down to 1e-20 still a normal float32


class Tokens(NamedTuple):
    """The raw inputs: arrays outside, references to a program's share inside a kernel.

    The heads lie side by side in the lanes, as projections write them: no head is gathered.
    """

    q: jax.Array  # [B, T, Q * K], like k
    k: jax.Array
    v: jax.Array  # [B, T, H * V]
    gate: jax.Array  # [B, T, H * K]
    beta: jax.Array  # [B, P, T, M]
    a_log: jax.Array  # [1, H * K], like dt_bias
    dt_bias: jax.Array
    segment: jax.Array | None  # [B, N, 1, C]
    before: jax.Array | None  # [B, N, 1, 1] segment of the token before the chunk
    lengths: jax.Array | None  # [B, 1, 1]
    masks: Masks


class Raw(NamedTuple):
    """One head's inputs in one chunk, all wide."""

    q_CK: jax.Array
    k_CK: jax.Array
    gate_CK: jax.Array
    beta_C1: jax.Array
    a_log_1K: jax.Array
    dt_bias_1K: jax.Array


class Operands(NamedTuple):
    """What the recurrence takes of them."""

    q_CK: jax.Array  # normalised and scaled
    k_CK: jax.Array
    g_CK: jax.Array  # log-decay, base 2
    beta_C1: jax.Array  # never 0


class Cuts(NamedTuple):
    """Where documents start."""

    together_CC: jax.Array  # the two rows are of one document
    enters_C1: jax.Array  # the row continues the document of the token before the chunk
    leaves_C1: jax.Array  # the row is of the document of the chunk's last row
    passes_11: jax.Array  # one document spans the chunk and the token before it


def keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, jnp.zeros_like(x))


def valid_rows(plan: Plan, x: Tokens, n: jax.Array) -> jax.Array | None:
    """[C, 1]: which rows of chunk n lie before the sequence's length."""
    if x.lengths is None:
        return None
    row_C1 = jax.lax.broadcasted_iota(jnp.int32, (plan.num_rows, 1), 0)
    return n * plan.num_rows + row_C1 < x.lengths[...]


def read_cuts(plan: Plan, x: Tokens) -> Cuts | None:
    if x.segment is None:
        return None
    size, before_11 = plan.num_rows, x.before[...]
    segment_CC = jnp.broadcast_to(x.segment[...], (size, size))
    column_C1 = jnp.sum(eye(size, jnp.int32) * segment_CC, axis=1, keepdims=True)
    last_11 = jnp.max(x.segment[...], axis=1, keepdims=True)  # they never decrease
    return Cuts(
        together_CC=column_C1 == segment_CC,
        enters_C1=column_C1 == before_11,
        leaves_C1=column_C1 == last_11,
        passes_11=before_11 == last_11,
    )


def read_masks(plan: Plan, x: Tokens) -> Masks:
    """Once for every head, in front: batched like what they multiply."""
    return Masks(*(jnp.stack([mask[...]] * plan.num_heads) for mask in x.masks))


def keys_of(plan: Plan, x: Tokens, m: int) -> pl.Slice:
    """Where the program's head m lies among the key channels."""
    key_dim = x.gate.shape[-1] // plan.num_heads
    return pl.ds(m * key_dim, key_dim)


def values_of(plan: Plan, x: Tokens, m: int) -> pl.Slice:
    value_dim = x.v.shape[-1] // plan.num_heads
    return pl.ds(m * value_dim, value_dim)


def read_raw(plan: Plan, x: Tokens, valid_C1: jax.Array | None) -> Raw:
    """With a dim in front for the heads."""
    heads = [_read_raw(plan, x, m, valid_C1) for m in range(plan.num_heads)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads)


def read_values(plan: Plan, x: Tokens, a: jax.Array, valid_C1: jax.Array | None) -> jax.Array:
    """[M, C, V] of an array like v."""
    heads = [a[:, values_of(plan, x, m)] for m in range(plan.num_heads)]
    return jnp.stack([keep(valid_C1, a_CV) for a_CV in heads])


def _read_raw(plan: Plan, x: Tokens, m: int, valid_C1: jax.Array | None) -> Raw:
    keys = keys_of(plan, x, m)
    of_group = keys_of(plan, x, m // plan.group if plan.num_heads >= plan.group else 0)
    inputs = x.q[:, of_group], x.k[:, of_group], x.gate[:, keys], x.beta[:, m : m + 1]
    inputs = (keep(valid_C1, a.astype(plan.wide)) for a in inputs)
    return Raw(*inputs, x.a_log[:, keys], x.dt_bias[:, keys])


def activate(plan: Plan, valid_C1: jax.Array | None, raw: Raw) -> Operands:
    """Norms, gate and write strength, differentiable."""
    options, (q_CK, k_CK) = plan.options, raw[:2]
    if options.use_qk_l2norm:
        q_CK, k_CK = (
            x_CK * jax.lax.rsqrt(jnp.sum(x_CK * x_CK, axis=1, keepdims=True) + L2_NORM_EPS)
            for x_CK in (q_CK, k_CK)
        )
    beta_C1 = jax.nn.sigmoid(raw.beta_C1) if options.beta_is_logit else raw.beta_C1
    # Never 0, because gradients divide by it: a rounding of what beta multiplies, no more. That of
    # an invalid row does not matter: its k and v are 0.
    small_C1 = jnp.abs(beta_C1) < SMALLEST_BETA
    beta_C1 += jax.lax.stop_gradient(jnp.where(small_C1, SMALLEST_BETA - beta_C1, 0.0))
    g_CK = keep(valid_C1, _log_decay(plan, raw))
    return Operands(q_CK * options.scale, k_CK, g_CK, beta_C1)


def _log_decay(plan: Plan, raw: Raw) -> jax.Array:
    options, z_CK = plan.options, raw.gate_CK + raw.dt_bias_1K
    rate_1K = jnp.exp(jnp.minimum(raw.a_log_1K, MAX_A_LOG))
    if options.gate_kind == "bounded":
        return (LOG2E * options.lower_bound) * jax.nn.sigmoid(rate_1K * z_CK)
    if options.gate_kind == "softplus":
        g_CK = (-LOG2E * rate_1K) * jax.nn.softplus(z_CK)
    else:
        g_CK = LOG2E * z_CK
    # The decay is 0 below, so there is no gradient; and sums of masked infinities would be NaN.
    return jnp.maximum(g_CK, math.log2(float(jnp.finfo(plan.wide).smallest_subnormal)) - 1.0)


Index = Callable[[jax.Array], jax.Array]


def token_specs(plan: Plan, x: Tokens, chunk_of: Index) -> Tokens:
    """A program's share, for the grid (B, P, N); chunk_of: the chunk of a grid's n."""
    rows, heads = plan.num_rows, plan.num_heads
    all_heads = x.beta.shape[1] * heads
    key_dim, value_dim = (a.shape[-1] // all_heads for a in (x.gate, x.v))
    shared = max(1, plan.group // heads)  # programs that read the same query/key head

    def of_tokens(width: int, shared: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, width), lambda b, p, n: (b, chunk_of(n), p // shared))

    def of_chunk(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, 1, width), lambda b, p, n: (b, chunk_of(n), 0, 0))

    of_group = of_tokens(max(1, heads // plan.group) * key_dim, shared)
    params = pl.BlockSpec((1, heads * key_dim), lambda b, p, n: (0, p))
    return Tokens(
        q=of_group,
        k=of_group,
        v=of_tokens(heads * value_dim),
        gate=of_tokens(heads * key_dim),
        beta=pl.BlockSpec((None, None, rows, heads), lambda b, p, n: (b, p, chunk_of(n), 0)),
        a_log=params,
        dt_bias=params,
        segment=None if x.segment is None else of_chunk(rows),
        before=None if x.before is None else of_chunk(1),
        lengths=None
        if x.lengths is None
        else pl.BlockSpec((None, 1, 1), lambda b, p, n: (b, 0, 0)),
        masks=jax.tree.map(lambda mask: pl.BlockSpec(mask.shape, lambda b, p, n: (0, 0)), x.masks),
    )


def grid_of(plan: Plan, x: Tokens) -> tuple[int, int, int]:
    """(B, P, N)."""
    batch, num_programs, num_tokens, _ = x.beta.shape
    return batch, num_programs, num_tokens // plan.num_rows
