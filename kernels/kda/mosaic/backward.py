"""The backward kernel of KDA on the TPU: the chunks in reverse, a chunk of some heads per program.

It carries the gradient of the state and finishes every chunk as it goes, down to the raw inputs.
The algebra: wy.py. What turns raw inputs into operands is differentiated by JAX in the kernel.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, M heads of
a program.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.kda import chunk
from kernels.kda.mosaic.forward import Enters, Factors, enters, factors, missing
from kernels.kda.mosaic.plan import Interpret, Masks, Plan, call, chunk_spec, state_spec
from kernels.kda.mosaic.tokens import (
    Cuts,
    Operands,
    Raw,
    Tokens,
    activate,
    grid_of,
    keep,
    keys_of,
    read_cuts,
    read_masks,
    read_raw,
    read_values,
    token_specs,
    valid_rows,
    values_of,
)


class Kept(NamedTuple):
    """What the forward left, and the gradients that come in."""

    states: jax.Array  # [B, H, N, V, K]
    solved: jax.Array  # [B, H, N, C, 2 C]
    do: jax.Array  # [B, T, H * V]
    d_state: jax.Array  # [B, H, V, K]: of the state behind the last token


class Gradients(NamedTuple):
    q: jax.Array  # [B, T, H * K]: per value head
    k: jax.Array
    v: jax.Array  # [B, T, H * V]
    gate: jax.Array  # [B, T, H * K]
    beta: jax.Array  # [B, P, T, M]
    a_log: jax.Array  # [B, 1, H * K], like dt_bias
    dt_bias: jax.Array
    state: jax.Array  # [B, H, V, K]: of the state before the first token


class ValueSide(NamedTuple):
    """What the value channels say about a chunk's gradients."""

    v_new_CV: jax.Array  # narrow
    dv_CV: jax.Array  # narrow
    dp_CC: jax.Array  # gradient of the scores of q on k
    dl_CC: jax.Array  # of the scores of k on k
    d_own_C1: jax.Array  # diagonal of the gradient of P
    dbeta_C1: jax.Array


def _value_side(
    plan: Plan,
    x: Operands,
    missing_CV: jax.Array,
    p_CC: jax.Array,
    inverse_CC: jax.Array,
    do_CV: jax.Array,
    of_leaving_CV: jax.Array,
) -> ValueSide:
    """of_leaving: k exp(G_C - G) dS'."""
    dot, narrow, wide = plan.dot, plan.narrow, plan.wide
    v_new_CV = dot(inverse_CC, missing_CV)
    dv_new_CV = (dot(p_CC, do_CV, a_columns=True) + of_leaving_CV).astype(narrow)
    d_missing_CV = dot(inverse_CC, dv_new_CV, a_columns=True)
    # With R = d_missing, every term of dbeta is one of R and v_new, because L is linear in beta
    # and (I + L) v_new = beta (v - k exp(G) S).
    dbeta_C1 = jnp.sum(d_missing_CV * (v_new_CV / x.beta_C1), axis=1, keepdims=True)
    v_new_CV, dv_CV = v_new_CV.astype(narrow), (x.beta_C1 * d_missing_CV).astype(narrow)
    return ValueSide(
        v_new_CV,
        dv_CV,
        dot(do_CV, v_new_CV, b_rows=True),
        -dot(dv_CV, v_new_CV, b_rows=True),
        jnp.sum(do_CV.astype(wide) * v_new_CV.astype(wide), axis=1, keepdims=True),
        dbeta_C1,
    )


def _key_side(
    plan: Plan,
    x: Operands,
    decays: chunk.Decays,
    f: Factors,
    s: ValueSide,
    do_CV: jax.Array,
    state_VK: jax.Array,
    d_leaving_VK: jax.Array,
    masks: Masks,
) -> Operands:
    """Gradients of the operands. States: entering, and the gradient of the leaving; both narrow."""
    dot, narrow, wide = plan.dot, plan.narrow, plan.wide
    of_both = dot(jnp.concatenate([do_CV, s.dv_CV]), state_VK)
    d_enter_q_CK, d_enter_k_CK = (
        f.from_start_CK * d_CK for d_CK in (of_both[: plan.num_rows], of_both[plan.num_rows :])
    )
    d_leave_CK = f.to_end_CK * dot(s.v_new_CV, d_leaving_VK)
    overlap_VK = state_VK.astype(wide) * d_leaving_VK.astype(wide)
    d_total_1K = f.total_1K * jnp.sum(overlap_VK, axis=0, keepdims=True)
    of_states = chunk.ScoreGradients(
        d_enter_q_CK + s.d_own_C1 * x.k_CK,
        d_leave_CK - d_enter_k_CK + s.d_own_C1 * x.q_CK,
        x.q_CK * d_enter_q_CK - x.k_CK * d_enter_k_CK,
    )
    pairs = chunk.cut_pairs(s.dp_CC, s.dl_CC, plan.log_tile)
    dq_CK, dk_CK, da_CK = chunk.scores_vjp(
        of_states,
        lambda n: tuple(d_CC.astype(narrow) for d_CC in pairs[n]),
        x.q_CK,
        x.k_CK,
        decays,
        dot,
        lambda a: a.astype(narrow),
    )
    dg_CK = plan.sums_vjp(da_CK, x.k_CK * d_leave_CK, masks) + d_total_1K
    return Operands(dq_CK, dk_CK, math.log(2.0) * dg_CK, s.dbeta_C1)


def _carry_back(
    plan: Plan, e: Enters, f: Factors, s: ValueSide, do_CV: jax.Array, d_state_VK: jax.Array
) -> jax.Array:
    """The gradient of the entering state from that of the leaving one."""
    d_state_VK = f.total_1K * d_state_VK + plan.dot(do_CV, e.q_enter_CK, a_columns=True)
    return d_state_VK - plan.dot(s.dv_CV, e.k_enter_CK, a_columns=True)


class Chunk(NamedTuple):
    """The gradients of a chunk."""

    raw: Raw
    dv_CV: jax.Array
    state_VK: jax.Array  # of the state that enters it


def _chunk(
    plan: Plan,
    valid_C1: jax.Array | None,
    cuts: Cuts | None,
    masks: Masks,
    raw: Raw,
    v_CV: jax.Array,
    do_CV: jax.Array,
    solved_C2C: jax.Array,
    state_VK: jax.Array,
    d_state_VK: jax.Array,
) -> Chunk:
    head, activate_vjp = jax.vjp(partial(activate, plan, valid_C1), raw)
    decays = plan.decays(head.g_CK, masks)
    f = factors(cuts, decays)
    e, d_narrow_VK = enters(plan, head, f), d_state_VK.astype(plan.narrow)
    s = _value_side(
        plan,
        head,
        missing(plan, head, v_CV, plan.dot(e.k_enter_CK, state_VK, b_rows=True)),
        solved_C2C[:, : plan.num_rows],
        solved_C2C[:, plan.num_rows :],
        do_CV,
        plan.dot(e.k_leave_CK, d_narrow_VK, b_rows=True),
    )
    d_state_VK = _carry_back(plan, e, f, s, do_CV, d_state_VK)
    if cuts is not None:
        s = s._replace(**{d: keep(cuts.together_CC, getattr(s, d)) for d in ("dp_CC", "dl_CC")})
    d_head = _key_side(plan, head, decays, f, s, do_CV, state_VK, d_narrow_VK, masks)
    return Chunk(activate_vjp(d_head)[0], s.dv_CV, d_state_VK)


def _backward_kernel(plan: Plan, x: Tokens, kept: Kept, out: Gradients) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        out.state[...] = kept.d_state[...]
        out.a_log[...] = jnp.zeros_like(out.a_log)
        out.dt_bias[...] = jnp.zeros_like(out.dt_bias)

    n = pl.num_programs(2) - 1 - pl.program_id(2)
    valid_C1, cuts, masks = valid_rows(plan, x, n), read_cuts(plan, x), read_masks(plan, x)
    c = jax.vmap(partial(_chunk, plan, valid_C1, cuts))(
        masks,
        read_raw(plan, x, valid_C1),
        read_values(plan, x, x.v, valid_C1),
        read_values(plan, x, kept.do, valid_C1).astype(plan.narrow),
        kept.solved[...],
        kept.states[...],
        out.state[...],
    )
    out.state[...] = c.state_VK
    for m in range(plan.num_heads):
        keys, d_raw = keys_of(plan, x, m), jax.tree.map(lambda a, m=m: a[m], c.raw)
        out.v[:, values_of(plan, x, m)] = c.dv_CV[m].astype(out.v.dtype)
        for to, d_CK in ((out.q, d_raw.q_CK), (out.k, d_raw.k_CK), (out.gate, d_raw.gate_CK)):
            to[:, keys] = keep(valid_C1, d_CK).astype(to.dtype)
        out.beta[:, m : m + 1] = keep(valid_C1, d_raw.beta_C1)
        out.a_log[:, keys] += d_raw.a_log_1K
        out.dt_bias[:, keys] += d_raw.dt_bias_1K


def backward(plan: Plan, x: Tokens, kept: Kept, interpret: Interpret) -> Gradients:
    num_chunks = x.v.shape[1] // plan.num_rows

    def chunk_of(n: jax.Array) -> jax.Array:
        return num_chunks - 1 - n

    specs = token_specs(plan, x, chunk_of)
    of_state, of_chunk = state_spec(plan, kept.d_state), partial(chunk_spec, plan, chunk_of)
    of_params = pl.BlockSpec((None, *specs.a_log.block_shape), lambda b, p, n: (b, 0, p))

    def shape(like: jax.Array, dtype: jnp.dtype | None = None, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*dims, *like.shape), dtype or like.dtype)

    of_keys = shape(x.gate, plan.wide if plan.group > 1 else x.q.dtype)
    of_heads = shape(x.a_log, plan.wide, x.v.shape[0])
    return call(
        partial(_backward_kernel, plan),
        grid_of(plan, x),
        (x, kept),
        interpret,
        in_specs=(
            specs,
            Kept(of_chunk(kept.states), of_chunk(kept.solved), specs.v, of_state),
        ),
        out_specs=(
            Gradients(
                specs.gate,
                specs.gate,
                specs.v,
                specs.gate,
                specs.beta,
                of_params,
                of_params,
                of_state,
            ),
        ),
        out_shape=(
            Gradients(
                of_keys,
                of_keys,
                shape(x.v),
                shape(x.gate),
                shape(x.beta, plan.wide),
                of_heads,
                of_heads,
                shape(kept.d_state, plan.wide),
            ),
        ),
        name="kda_backward",
    )[0]
