"""The chunked WY form of KDA and its gradient, on chunks that lie in memory together.

With G the cumulative log-decay of a chunk, kb = beta k, vb = beta v and q already scaled (Kimi
Linear, arXiv 2510.26692, Eq. 3-9):

    P = q k^T decayed by exp(G_i - G_j), j <= i      L = kb k^T decayed likewise, j < i
    T = (I + L)^-1      W = T (kb exp(G))      U = T vb
    v_new = U - W S     o = (q exp(G)) S + P v_new
    S' = diag(exp(G_C)) S + (k exp(G_C - G))^T v_new

Only the last two lines need the entering state S: a scan over the chunks carries it, everything
else is batched over them. The gradient differentiates the triangular solve implicitly: with
R = T^T dv_new the solve contributes dL = -R v_new^T, one product instead of a chain through T.

A restart inside a chunk is exact masking: rows of different segments do not meet in P and L, S
reaches the rows before the first restart, S' hears the rows behind the last one.

Letters: N chunks, M states (batch rows x value heads), C chunk rows, K key dim, V value dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda import tiles
from kernels.kda.sums import sum_halves


class Operands(NamedTuple):
    q_NMCK: jax.Array  # scaled
    k_NMCK: jax.Array
    v_NMCV: jax.Array
    g_NMCK: jax.Array  # log-decay
    beta_NMC1: jax.Array


class Segments(NamedTuple):
    """Masks of the restarts."""

    together_NMCC: jax.Array  # the two rows are of one segment
    enters_NMC1: jax.Array  # the row continues the segment of the previous chunk's last row
    leaves_NMC1: jax.Array  # the row is of the segment of the chunk's last row
    passes_NM1: jax.Array  # one segment spans the chunk and the row before it


class Decays(NamedTuple):
    spans: tiles.Spans
    from_start_NMCK: jax.Array  # exp(G), 0 in rows that the entering state does not reach
    to_end_NMCK: jax.Array  # exp(G_C - G), 0 in rows that the leaving state does not hold
    total_NMK: jax.Array  # exp(G_C), 0 if the state does not pass through


class Solved(NamedTuple):
    """The costly part of a chunk, which the forward hands to the backward."""

    p_NMCC: jax.Array
    inverse_NMCC: jax.Array  # T


class Prepared(NamedTuple):
    """What the state meets in a chunk."""

    w_NMCK: jax.Array
    u_NMCV: jax.Array
    q_enter_NMCK: jax.Array  # q exp(G)
    k_leave_NMCK: jax.Array  # k exp(G_C - G)


def segments(segment_NMC: jax.Array, before_M: jax.Array) -> Segments:
    """Masks from segment numbers, which never decrease; before_M is the row before the chunks."""
    last_NM1 = segment_NMC[..., -1:]
    previous_NM1 = jnp.concatenate([before_M[None, :, None], last_NM1[:-1]])
    return Segments(
        together_NMCC=segment_NMC[..., :, None] == segment_NMC[..., None, :],
        enters_NMC1=(segment_NMC == previous_NM1)[..., None],
        leaves_NMC1=(segment_NMC == last_NM1)[..., None],
        passes_NM1=previous_NM1 == last_NM1,
    )


def decays(g_NMCK: jax.Array, cuts: Segments | None, tile_bound: float | None) -> Decays:
    """Every decay factor of the chunks; tile_bound as in tiles.strict_scores."""
    spans = jax.tree.map(jnp.exp, tiles.span_sums(g_NMCK, with_halves=tile_bound is None))
    from_start_NMCK = tiles.join_tiles(spans.row_NIK * spans.start_NK[..., None, :])
    to_end_NMCK = tiles.join_tiles(spans.column_NJK * spans.end_NK[..., None, :])
    if cuts is None:
        return Decays(spans, from_start_NMCK, to_end_NMCK, spans.total_K)
    return Decays(
        spans,
        jnp.where(cuts.enters_NMC1, from_start_NMCK, 0.0),
        jnp.where(cuts.leaves_NMC1, to_end_NMCK, 0.0),
        jnp.where(cuts.passes_NM1, spans.total_K, 0.0),
    )


def solve(x: Operands, decay: Decays, cuts: Segments | None, tile_bound: float | None) -> Solved:
    """Scores of the chunks and the inverse; tile_bound as in tiles.strict_scores."""
    kb_NMCK = x.beta_NMC1 * x.k_NMCK
    p_NMCC, l_NMCC = tiles.strict_scores((x.q_NMCK, kb_NMCK), x.k_NMCK, decay.spans, tile_bound)
    if cuts is not None:
        p_NMCC = jnp.where(cuts.together_NMCC, p_NMCC, 0.0)
        l_NMCC = jnp.where(cuts.together_NMCC, l_NMCC, 0.0)
    own_NMC1 = sum_halves(x.q_NMCK * x.k_NMCK, -1)
    diagonal_NMCC = _mask(np.eye(p_NMCC.shape[-1], dtype=bool), p_NMCC)
    return Solved(
        p_NMCC=jnp.where(diagonal_NMCC, own_NMC1, p_NMCC),
        inverse_NMCC=tiles.unit_lower_inverse(l_NMCC),
    )


def prepare(
    x: Operands, decay: Decays, inverse_NMCC: jax.Array, precision: jax.lax.Precision
) -> Prepared:
    """The chunks' operands of the products with the state."""
    kb_enter_NMCK = x.beta_NMC1 * x.k_NMCK * decay.from_start_NMCK
    return Prepared(
        w_NMCK=jnp.matmul(inverse_NMCC, kb_enter_NMCK, precision=precision),
        u_NMCV=jnp.matmul(inverse_NMCC, x.beta_NMC1 * x.v_NMCV, precision=precision),
        q_enter_NMCK=x.q_NMCK * decay.from_start_NMCK,
        k_leave_NMCK=x.k_NMCK * decay.to_end_NMCK,
    )


def scan_states(
    x: Prepared, total_NMK: jax.Array, state_MKV: jax.Array, precision: jax.lax.Precision
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Carries the state over the chunks: (leaving state, entering states_NMKV, v_new_NMCV)."""

    def chunk(state_MKV: jax.Array, xs: tuple) -> tuple:
        w_MCK, u_MCV, k_leave_MCK, total_MK = xs
        v_new_MCV = u_MCV - jnp.matmul(w_MCK, state_MKV, precision=precision)
        written_MKV = jnp.einsum("mck,mcv->mkv", k_leave_MCK, v_new_MCV, precision=precision)
        return total_MK[..., None] * state_MKV + written_MKV, (state_MKV, v_new_MCV)

    xs = (x.w_NMCK, x.u_NMCV, x.k_leave_NMCK, total_NMK)
    state_MKV, (states_NMKV, v_new_NMCV) = jax.lax.scan(chunk, state_MKV, xs)
    return state_MKV, states_NMKV, v_new_NMCV


def outputs(
    x: Prepared,
    p_NMCC: jax.Array,
    states_NMKV: jax.Array,
    v_new_NMCV: jax.Array,
    precision: jax.lax.Precision,
) -> jax.Array:
    """o_NMCV: what every row reads from the entering state and from its own chunk."""
    read_NMCV = jnp.matmul(x.q_enter_NMCK, states_NMKV, precision=precision)
    return read_NMCV + jnp.matmul(p_NMCC, v_new_NMCV, precision=precision)


def vjp(
    x: Operands,
    decay: Decays,
    cuts: Segments | None,
    solved: Solved,
    states_NMKV: jax.Array,
    do_NMCV: jax.Array,
    d_state_MKV: jax.Array,
    tile_bound: float | None,
    precision: jax.lax.Precision,
) -> tuple[Operands, jax.Array]:
    """Gradients of the operands and of the first chunk's entering state.

    states_NMKV enter the chunks, do_NMCV is the cotangent of the outputs, d_state_MKV that of the
    last chunk's leaving state. Pairs i == j carry no decay and stay out of dg, where they would
    only cancel.
    """
    einsum = partial(jnp.einsum, precision=precision)
    prepared = prepare(x, decay, solved.inverse_NMCC, precision)
    v_new_NMCV = prepared.u_NMCV - einsum("nmck,nmkv->nmcv", prepared.w_NMCK, states_NMKV)
    d_state_MKV, d_leaving_NMKV, dv_new_NMCV = _scan_d_states(
        prepared, decay.total_NMK, solved.p_NMCC, do_NMCV, d_state_MKV, precision
    )
    dvb_NMCV = einsum("nmij,nmiv->nmjv", solved.inverse_NMCC, dv_new_NMCV)

    kb_NMCK = x.beta_NMC1 * x.k_NMCK
    strict_NMCC = _mask(np.tri(do_NMCV.shape[-2], k=-1, dtype=bool), solved.p_NMCC)
    if cuts is not None:
        strict_NMCC &= cuts.together_NMCC
    dp_NMCC = einsum("nmiv,nmjv->nmij", do_NMCV, v_new_NMCV)
    dl_NMCC = -einsum("nmiv,nmjv->nmij", dvb_NMCV, v_new_NMCV)
    dp_NMCC, dl_NMCC = (jnp.where(strict_NMCC, d, 0.0) for d in (dp_NMCC, dl_NMCC))
    (dq_NMCK, dkb_NMCK), dk_NMCK, d_sums = tiles.strict_scores_vjp(
        (dp_NMCC, dl_NMCC), (x.q_NMCK, kb_NMCK), x.k_NMCK, decay.spans, tile_bound
    )
    dq_enter_NMCK = einsum("nmcv,nmkv->nmck", do_NMCV, states_NMKV) * decay.from_start_NMCK
    dkb_enter_NMCK = -einsum("nmcv,nmkv->nmck", dvb_NMCV, states_NMKV) * decay.from_start_NMCK
    dk_leave_NMCK = einsum("nmcv,nmkv->nmck", v_new_NMCV, d_leaving_NMKV) * decay.to_end_NMCK
    d_sums = _add_state_sums(
        d_sums,
        x.q_NMCK * dq_enter_NMCK + kb_NMCK * dkb_enter_NMCK,
        x.k_NMCK * dk_leave_NMCK,
        decay.total_NMK * sum_halves(states_NMKV * d_leaving_NMKV, -1)[..., 0],
    )

    d_own_NMC1 = sum_halves(do_NMCV * v_new_NMCV, -1)
    dkb_NMCK += dkb_enter_NMCK
    dk_NMCK += dk_leave_NMCK + x.beta_NMC1 * dkb_NMCK
    d_operands = Operands(
        q_NMCK=dq_NMCK + dq_enter_NMCK + d_own_NMC1 * x.k_NMCK,
        k_NMCK=dk_NMCK + d_own_NMC1 * x.q_NMCK,
        v_NMCV=x.beta_NMC1 * dvb_NMCV,
        g_NMCK=tiles.span_sums_transpose(d_sums, x.g_NMCK),
        beta_NMC1=sum_halves(dkb_NMCK * x.k_NMCK, -1) + sum_halves(dvb_NMCV * x.v_NMCV, -1),
    )
    return d_operands, d_state_MKV


def _add_state_sums(
    d_sums: tiles.Spans,
    d_from_start_NMCK: jax.Array,
    d_to_end_NMCK: jax.Array,
    d_total_NMK: jax.Array,
) -> tiles.Spans:
    """Adds the gradients of the exponents in front of the state to those of the scores."""
    d_from_start_NIK = tiles.split_tiles(d_from_start_NMCK)
    d_to_end_NJK = tiles.split_tiles(d_to_end_NMCK)
    return d_sums._replace(
        row_NIK=d_sums.row_NIK + d_from_start_NIK,
        column_NJK=d_sums.column_NJK + d_to_end_NJK,
        start_NK=sum_halves(d_from_start_NIK, -2)[..., 0, :],
        end_NK=sum_halves(d_to_end_NJK, -2)[..., 0, :],
        total_K=d_total_NMK,
    )


def _scan_d_states(
    x: Prepared,
    total_NMK: jax.Array,
    p_NMCC: jax.Array,
    do_NMCV: jax.Array,
    d_state_MKV: jax.Array,
    precision: jax.lax.Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gradient of the first entering state, of the leaving states_NMKV, of v_new_NMCV)."""
    einsum = partial(jnp.einsum, precision=precision)

    def chunk(d_state_MKV: jax.Array, xs: tuple) -> tuple:
        dv_new_MCV, d_read_MKV, w_MCK, k_leave_MCK, total_MK = xs
        dv_new_MCV = dv_new_MCV + einsum("mck,mkv->mcv", k_leave_MCK, d_state_MKV)
        d_entering_MKV = total_MK[..., None] * d_state_MKV + d_read_MKV
        d_entering_MKV = d_entering_MKV - einsum("mck,mcv->mkv", w_MCK, dv_new_MCV)
        return d_entering_MKV, (d_state_MKV, dv_new_MCV)

    xs = (
        einsum("nmij,nmiv->nmjv", p_NMCC, do_NMCV),
        einsum("nmck,nmcv->nmkv", x.q_enter_NMCK, do_NMCV),
        x.w_NMCK,
        x.k_leave_NMCK,
        total_NMK,
    )
    d_state_MKV, (d_leaving_NMKV, dv_new_NMCV) = jax.lax.scan(chunk, d_state_MKV, xs, reverse=True)
    return d_state_MKV, d_leaving_NMKV, dv_new_NMCV


def _mask(pattern_CC: np.ndarray, x_NMCC: jax.Array) -> jax.Array:
    return jnp.broadcast_to(pattern_CC, x_NMCC.shape)
