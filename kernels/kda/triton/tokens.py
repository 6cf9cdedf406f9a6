"""A chunk's inputs as they come into a Triton program of KDA.

Letters: B batch, T time, H value heads, K key dim, N chunks, C chunk rows, R some of them, X chains
(B x H), L threads of a row.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.kda import chunk
from kernels.kda.gates import L2_NORM_EPS, MAX_A_LOG
from kernels.kda.triton.plan import LOG2E, MEASURE_PART, Plan, for_parts, head_spec, keep, made_once

SMALLEST_BETA = 1e-25
THREAD_CHANNELS = 8  # that a thread loads at once, if bfloat16


class Tokens(NamedTuple):
    """The raw inputs of a chunk: arrays outside, references inside a kernel."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    segment: jax.Array | None
    before: jax.Array | None  # [B, N] segment of the token before the chunk
    lengths: jax.Array | None
    masks: chunk.Masks


def token_specs(plan: Plan, tokens: Tokens) -> Tokens:
    """Blocks of one chunk of one head, for the grid (H, N, B)."""
    rows, key_dim, value_dim = plan.num_rows, tokens.q.shape[-1], tokens.v.shape[-1]
    of_group = pl.BlockSpec((None, rows, None, key_dim), lambda h, n, b: (b, n, h // plan.group, 0))
    has_segments = tokens.segment is not None
    return Tokens(
        q=of_group,
        k=of_group,
        v=head_spec(rows, value_dim),
        gate=head_spec(rows, key_dim),
        beta=pl.BlockSpec((None, rows, None), lambda h, n, b: (b, n, h)),
        a_log=pl.BlockSpec((1,), lambda h, n, b: (h,)),
        dt_bias=pl.BlockSpec((None, key_dim), lambda h, n, b: (h, 0)),
        segment=pl.BlockSpec((None, rows), lambda h, n, b: (b, n)) if has_segments else None,
        before=pl.BlockSpec((None, 1), lambda h, n, b: (b, n)) if has_segments else None,
        lengths=None if tokens.lengths is None else pl.BlockSpec((1,), lambda h, n, b: (b,)),
        masks=jax.tree.map(
            lambda mask: pl.BlockSpec(mask.shape, lambda h, n, b: (0, 0, 0)), tokens.masks
        ),
    )


class RowFactors(NamedTuple):
    """What is known of every row once it has been prepared, all [X, N, ...], wide."""

    beta: jax.Array  # [C]
    scales: jax.Array | None  # [2, C]: what normalises, and scales, the rows of q and of k


class Rows(NamedTuple):
    """What belongs to rows of a chunk, all or half of them, and not to their channels."""

    rows: pl.Slice
    q_scale_R1: jax.Array | None
    k_scale_R1: jax.Array | None
    valid_R1: jax.Array | None


class Channels(NamedTuple):
    """Operands of the recurrence in some rows and a part of the key channels."""

    q_RK: jax.Array  # normalised and scaled
    k_RK: jax.Array
    g_RK: jax.Array  # log-decay, base 2, in multiples of plan.decay_unit


def valid_rows(plan: Plan, x: Tokens, rows: pl.Slice) -> jax.Array | None:
    """[R, 1]: which rows lie before the sequence's length."""
    if x.lengths is None:
        return None
    row_R1 = jax.lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0)
    first = pl.program_id(1) * plan.num_rows + rows.start
    return first + row_R1 < x.lengths[...].reshape(1, 1)


def measure_rows(plan: Plan, x: Tokens, factors: RowFactors) -> jax.Array:
    """Writes what is to be known of a chunk's rows; returns <q, k> [C] of the operands."""
    valid_C1 = valid_rows(plan, x, pl.ds(0, plan.num_rows))

    def products(part: pl.Slice, sums: tuple) -> tuple:
        q_CK, k_CK = (keep(valid_C1, r[:, part].astype(plan.wide)) for r in (x.q, x.k))
        pairs = (q_CK, q_CK), (k_CK, k_CK), (q_CK, k_CK)
        return tuple(
            total_CL + jnp.sum((a_CK * b_CK).reshape(*zeros_CL.shape, -1), axis=2)
            for total_CL, (a_CK, b_CK) in zip(sums, pairs, strict=True)
        )

    key_dim = x.q.shape[-1]
    # A thread's channels are summed up at once, and sums of threads at the end.
    lanes = min(MEASURE_PART, key_dim) // THREAD_CHANNELS
    zeros_CL = jnp.zeros((plan.num_rows, lanes), plan.wide)
    sums = for_parts(key_dim, MEASURE_PART, products, (zeros_CL,) * 3)
    qq_C, kk_C, qk_C = (jnp.sum(x_CL, axis=1) for x_CL in sums)
    own_C = plan.options.scale * qk_C
    if factors.scales is not None:
        q_rstd_C, k_rstd_C = (jax.lax.rsqrt(xx_C + L2_NORM_EPS) for xx_C in (qq_C, kk_C))
        factors.scales[0, :] = plan.options.scale * q_rstd_C
        factors.scales[1, :] = k_rstd_C
        own_C *= q_rstd_C * k_rstd_C
    beta_C = x.beta[...].astype(plan.wide)
    if valid_C1 is not None:
        beta_C = jnp.where(valid_C1.reshape(-1), beta_C, 0.0)
    if plan.options.beta_is_logit:
        beta_C = plan.sigmoid(beta_C)
    # Never 0, because gradients divide by it: a rounding of what beta multiplies, no more. That of
    # an invalid row does not matter: its k and v are 0.
    factors.beta[...] = jnp.where(jnp.abs(beta_C) < SMALLEST_BETA, SMALLEST_BETA, beta_C)
    return own_C


def read_rows(plan: Plan, x: Tokens, rows: pl.Slice, factors: RowFactors) -> Rows:
    scales = (None, None)
    if factors.scales is not None:
        scales = (factors.scales[n, rows].reshape(-1, 1) for n in range(2))
    return Rows(rows, *scales, valid_rows(plan, x, rows))


class Raw(NamedTuple):
    """Inputs of some rows and a part of the key channels, as they come."""

    q_RK: jax.Array
    k_RK: jax.Array
    gate_RK: jax.Array


def read_raw(x: Tokens, rows: pl.Slice, part: pl.Slice) -> Raw:
    return Raw(x.q[rows, part], x.k[rows, part], x.gate[rows, part])


class Gate(NamedTuple):
    """What turns a part of the key channels of the raw gate into log-decays."""

    rate: jax.Array  # exp(a_log)
    bias_1K: jax.Array


def read_gate(x: Tokens, part: pl.Slice) -> Gate:
    return Gate(jnp.exp(jnp.minimum(x.a_log[0], MAX_A_LOG)), x.dt_bias[part].reshape(1, -1))


def activate(plan: Plan, rows: Rows, gate: Gate, raw: Raw) -> Channels:
    q_RK, k_RK = (keep(rows.valid_R1, x_RK.astype(plan.wide)) for x_RK in raw[:2])
    if rows.q_scale_R1 is None:
        q_RK *= plan.options.scale
    else:
        q_RK, k_RK = q_RK * rows.q_scale_R1, k_RK * rows.k_scale_R1
    g_RK = made_once(log_decay(plan, rows, gate, raw.gate_RK))
    return Channels(q_RK, k_RK, keep(rows.valid_R1, g_RK))


def _biased(plan: Plan, rows: Rows, gate: Gate, gate_RK: jax.Array) -> jax.Array:
    return keep(rows.valid_R1, gate_RK.astype(plan.wide)) + gate.bias_1K


def _opening(plan: Plan, gate: Gate, z_RK: jax.Array) -> jax.Array:
    """sigmoid(rate z)."""
    return plan.logistic((-LOG2E * gate.rate) * z_RK)


def log_decay(plan: Plan, rows: Rows, gate: Gate, gate_RK: jax.Array) -> jax.Array:
    """Base 2, in multiples of plan.decay_unit."""
    natural, z_RK = LOG2E / plan.decay_unit, _biased(plan, rows, gate, gate_RK)
    if plan.options.gate_kind == "bounded":
        return (natural * plan.options.lower_bound) * _opening(plan, gate, z_RK)
    if plan.options.gate_kind == "softplus":
        g_RK = (-natural * gate.rate) * jax.nn.softplus(z_RK)
    else:
        g_RK = natural * z_RK
    # Finite in float16 too, also of a caller who masks by the smallest number, or who breaks the
    # promise of lower_bound a little.
    return jnp.maximum(g_RK, -float(jnp.finfo(jnp.float16).max))


def _no_decay(plan: Plan) -> float:
    """The natural log-decay below which the decay is 0."""
    return math.log(float(jnp.finfo(plan.wide).smallest_subnormal)) - 1.0


def log_decay_vjp(
    plan: Plan, rows: Rows, gate: Gate, gate_RK: jax.Array, dg_RK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradient of z, and every entry's part of that of a_log; dg: of the natural log-decay."""
    z_RK, rate = _biased(plan, rows, gate, gate_RK), gate.rate
    if plan.options.gate_kind == "bounded":
        open_RK = _opening(plan, gate, z_RK)
        dz_RK = dg_RK * ((plan.options.lower_bound * rate) * (open_RK * (1.0 - open_RK)))
        return dz_RK, dz_RK * z_RK
    if plan.options.gate_kind == "softplus":
        g_RK = -rate * jax.nn.softplus(z_RK)
        # A decay of 0 has no gradient: what rounding leaves of it would meet any rate and any g.
        dg_RK = jnp.where(g_RK > _no_decay(plan), dg_RK, 0.0)
        return dg_RK * (-rate * plan.sigmoid(z_RK)), dg_RK * jnp.maximum(g_RK, _no_decay(plan))
    return dg_RK, jnp.zeros_like(dg_RK)


class Cuts(NamedTuple):
    """Where documents start."""

    enters_R1: jax.Array  # the row continues the document of the token before the chunk
    leaves_R1: jax.Array  # the row is of the document of the chunk's last row
    passes_11: jax.Array  # one document spans the chunk and the token before it


def read_cuts(x: Tokens, rows: pl.Slice) -> Cuts | None:
    if x.segment is None:
        return None
    before_11 = x.before[...].reshape(1, 1)
    last_11 = jnp.max(x.segment[...], axis=0, keepdims=True).reshape(1, 1)  # they never decrease
    segment_R1 = x.segment[rows].reshape(-1, 1)
    return Cuts(segment_R1 == before_11, segment_R1 == last_11, before_11 == last_11)


def together(x: Tokens, rows: pl.Slice, columns: pl.Slice) -> jax.Array | None:
    """[R, R]: the two rows are of one document."""
    if x.segment is None:
        return None
    return x.segment[rows].reshape(-1, 1) == x.segment[columns].reshape(1, -1)
