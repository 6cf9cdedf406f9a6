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

Letters: N chunks, B batch, H value heads, C chunk rows, K key dim, V value dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda import tiles


class Operands(NamedTuple):
    q_NBHCK: jax.Array  # scaled
    k_NBHCK: jax.Array
    kb_NBHCK: jax.Array
    vb_NBHCV: jax.Array
    g_NBHCK: jax.Array


class Segments(NamedTuple):
    """Masks of the restarts; the head dim is 1."""

    together_NBHCC: jax.Array  # the two rows are of one segment
    enters_NBHC1: jax.Array  # the row continues the segment of the previous chunk's last row
    leaves_NBHC1: jax.Array  # the row is of the segment of the chunk's last row
    passes_NBH1: jax.Array  # one segment spans the chunk and the row before it


class Prepared(NamedTuple):
    """A chunk before its state is known."""

    decay: tiles.Decay
    p_NBHCC: jax.Array
    inverse_NBHCC: jax.Array
    w_NBHCK: jax.Array
    u_NBHCV: jax.Array
    q_enter_NBHCK: jax.Array  # q exp(G), meets S
    kb_enter_NBHCK: jax.Array  # kb exp(G), meets S
    k_leave_NBHCK: jax.Array  # k exp(G_C - G), writes S'


def segments(segment_NBC: jax.Array, before_B: jax.Array) -> Segments:
    """Masks from segment numbers, which never decrease; before_B is the row before the chunks."""
    last_NB = segment_NBC[..., -1]
    previous_NB = jnp.concatenate([before_B[None], last_NB[:-1]])
    segment_NBHC = segment_NBC[:, :, None]
    return Segments(
        together_NBHCC=segment_NBHC[..., :, None] == segment_NBHC[..., None, :],
        enters_NBHC1=(segment_NBHC == previous_NB[..., None, None])[..., None],
        leaves_NBHC1=(segment_NBHC == last_NB[..., None, None])[..., None],
        passes_NBH1=(previous_NB == last_NB)[..., None, None],
    )


def prepare(
    x: Operands,
    cuts: Segments | None,
    tile_bound: float | None,
    precision: jax.lax.Precision,
) -> Prepared:
    """Everything that can be computed without the state; tile_bound as in tiles.decay_factors."""
    decay = tiles.decay_factors(x.g_NBHCK, tile_bound)
    scores_NBHCC, l_NBHCC = tiles.strict_scores(x.q_NBHCK, x.kb_NBHCK, x.k_NBHCK, decay)
    if cuts is not None:
        scores_NBHCC = jnp.where(cuts.together_NBHCC, scores_NBHCC, 0.0)
        l_NBHCC = jnp.where(cuts.together_NBHCC, l_NBHCC, 0.0)
        decay = decay._replace(
            from_start_CK=jnp.where(cuts.enters_NBHC1, decay.from_start_CK, 0.0),
            to_end_CK=jnp.where(cuts.leaves_NBHC1, decay.to_end_CK, 0.0),
            total_K=jnp.where(cuts.passes_NBH1, decay.total_K, 0.0),
        )
    diagonal_NBHCC = _mask(np.eye(scores_NBHCC.shape[-1], dtype=bool), scores_NBHCC)
    own_NBHC = jnp.sum(x.q_NBHCK * x.k_NBHCK, axis=-1)
    inverse_NBHCC = tiles.unit_lower_inverse(l_NBHCC)
    kb_enter_NBHCK = x.kb_NBHCK * decay.from_start_CK
    return Prepared(
        decay=decay,
        p_NBHCC=jnp.where(diagonal_NBHCC, own_NBHC[..., None], scores_NBHCC),
        inverse_NBHCC=inverse_NBHCC,
        w_NBHCK=jnp.matmul(inverse_NBHCC, kb_enter_NBHCK, precision=precision),
        u_NBHCV=jnp.matmul(inverse_NBHCC, x.vb_NBHCV, precision=precision),
        q_enter_NBHCK=x.q_NBHCK * decay.from_start_CK,
        kb_enter_NBHCK=kb_enter_NBHCK,
        k_leave_NBHCK=x.k_NBHCK * decay.to_end_CK,
    )


def scan_states(
    prepared: Prepared, state_BHKV: jax.Array, precision: jax.lax.Precision
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Carries the state over the chunks: (leaving state, entering states_NBHKV, v_new_NBHCV)."""

    def chunk(state_BHKV: jax.Array, xs: tuple) -> tuple:
        w_BHCK, u_BHCV, k_leave_BHCK, total_BHK = xs
        v_new_BHCV = u_BHCV - jnp.matmul(w_BHCK, state_BHKV, precision=precision)
        written_BHKV = jnp.einsum("bhck,bhcv->bhkv", k_leave_BHCK, v_new_BHCV, precision=precision)
        return total_BHK[..., None] * state_BHKV + written_BHKV, (state_BHKV, v_new_BHCV)

    xs = (prepared.w_NBHCK, prepared.u_NBHCV, prepared.k_leave_NBHCK, prepared.decay.total_K)
    state_BHKV, (states_NBHKV, v_new_NBHCV) = jax.lax.scan(chunk, state_BHKV, xs)
    return state_BHKV, states_NBHKV, v_new_NBHCV


def outputs(
    prepared: Prepared,
    states_NBHKV: jax.Array,
    v_new_NBHCV: jax.Array,
    precision: jax.lax.Precision,
) -> jax.Array:
    """o_NBHCV: what every row reads from the entering state and from its own chunk."""
    read_NBHCV = jnp.matmul(prepared.q_enter_NBHCK, states_NBHKV, precision=precision)
    return read_NBHCV + jnp.matmul(prepared.p_NBHCC, v_new_NBHCV, precision=precision)


def vjp(
    x: Operands,
    cuts: Segments | None,
    prepared: Prepared,
    states_NBHKV: jax.Array,
    do_NBHCV: jax.Array,
    d_state_BHKV: jax.Array,
    precision: jax.lax.Precision,
) -> tuple[Operands, jax.Array]:
    """Gradients of the operands and of the first chunk's entering state.

    states_NBHKV enter the chunks, do_NBHCV is the cotangent of the outputs, d_state_BHKV that of
    the last chunk's leaving state. Pairs i == j carry no decay and stay out of dg, where they would
    only cancel.
    """
    matmul = lambda equation, a, b: jnp.einsum(equation, a, b, precision=precision)  # noqa: E731
    decay = prepared.decay
    v_new_NBHCV = prepared.u_NBHCV - matmul("nbhck,nbhkv->nbhcv", prepared.w_NBHCK, states_NBHKV)
    d_state_BHKV, d_leaving_NBHKV, dv_new_NBHCV = _scan_d_states(
        prepared, do_NBHCV, d_state_BHKV, precision
    )
    dvb_NBHCV = matmul("nbhij,nbhiv->nbhjv", prepared.inverse_NBHCC, dv_new_NBHCV)

    strict_NBHCC = _mask(np.tri(do_NBHCV.shape[-2], k=-1, dtype=bool), prepared.p_NBHCC)
    if cuts is not None:
        strict_NBHCC = strict_NBHCC & cuts.together_NBHCC
    dp_NBHCC = matmul("nbhiv,nbhjv->nbhij", do_NBHCV, v_new_NBHCV)
    dl_NBHCC = -matmul("nbhiv,nbhjv->nbhij", dvb_NBHCV, v_new_NBHCV)
    dp_NBHCC, dl_NBHCC = (jnp.where(strict_NBHCC, d, 0.0) for d in (dp_NBHCC, dl_NBHCC))
    dq_NBHCK, dkb_NBHCK, dk_NBHCK = tiles.strict_scores_vjp(
        dp_NBHCC, dl_NBHCC, x.q_NBHCK, x.kb_NBHCK, x.k_NBHCK, decay
    )
    dq_NBHCK += matmul("nbhcv,nbhkv->nbhck", do_NBHCV, states_NBHKV) * decay.from_start_CK
    dkb_NBHCK -= matmul("nbhcv,nbhkv->nbhck", dvb_NBHCV, states_NBHKV) * decay.from_start_CK
    dk_leave_NBHCK = matmul("nbhcv,nbhkv->nbhck", v_new_NBHCV, d_leaving_NBHKV) * decay.to_end_CK
    dk_NBHCK += dk_leave_NBHCK

    # Rows carry exp(G_i) and columns exp(-G_j): G gets row * d_row - column * d_column.
    d_cumulative_NBHCK = x.q_NBHCK * dq_NBHCK + x.kb_NBHCK * dkb_NBHCK - x.k_NBHCK * dk_NBHCK
    d_total_NBHK = jnp.sum(x.k_NBHCK * dk_leave_NBHCK, axis=-2)
    d_total_NBHK += decay.total_K * jnp.sum(states_NBHKV * d_leaving_NBHKV, axis=-1)
    dg_NBHCK = jax.lax.cumsum(d_cumulative_NBHCK, axis=3, reverse=True) + d_total_NBHK[..., None, :]

    d_own_NBHC1 = jnp.sum(do_NBHCV * v_new_NBHCV, axis=-1, keepdims=True)
    d_operands = Operands(
        q_NBHCK=dq_NBHCK + d_own_NBHC1 * x.k_NBHCK,
        k_NBHCK=dk_NBHCK + d_own_NBHC1 * x.q_NBHCK,
        kb_NBHCK=dkb_NBHCK,
        vb_NBHCV=dvb_NBHCV,
        g_NBHCK=dg_NBHCK,
    )
    return d_operands, d_state_BHKV


def _scan_d_states(
    prepared: Prepared,
    do_NBHCV: jax.Array,
    d_state_BHKV: jax.Array,
    precision: jax.lax.Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gradient of the first entering state, of the leaving states_NBHKV, of v_new_NBHCV)."""
    matmul = lambda equation, a, b: jnp.einsum(equation, a, b, precision=precision)  # noqa: E731

    def chunk(d_state_BHKV: jax.Array, xs: tuple) -> tuple:
        dv_new_BHCV, d_read_BHKV, w_BHCK, k_leave_BHCK, total_BHK = xs
        dv_new_BHCV = dv_new_BHCV + matmul("bhck,bhkv->bhcv", k_leave_BHCK, d_state_BHKV)
        d_entering_BHKV = total_BHK[..., None] * d_state_BHKV + d_read_BHKV
        d_entering_BHKV = d_entering_BHKV - matmul("bhck,bhcv->bhkv", w_BHCK, dv_new_BHCV)
        return d_entering_BHKV, (d_state_BHKV, dv_new_BHCV)

    xs = (
        matmul("nbhij,nbhiv->nbhjv", prepared.p_NBHCC, do_NBHCV),
        matmul("nbhck,nbhcv->nbhkv", prepared.q_enter_NBHCK, do_NBHCV),
        prepared.w_NBHCK,
        prepared.k_leave_NBHCK,
        prepared.decay.total_K,
    )
    d_state_BHKV, (d_leaving_NBHKV, dv_new_NBHCV) = jax.lax.scan(
        chunk, d_state_BHKV, xs, reverse=True
    )
    return d_state_BHKV, d_leaving_NBHKV, dv_new_NBHCV


def _mask(pattern_CC: np.ndarray, x_NBHCC: jax.Array) -> jax.Array:
    return jnp.broadcast_to(pattern_CC, x_NBHCC.shape)
