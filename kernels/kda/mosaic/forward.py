"""The forward kernel of KDA on the TPU: a chunk of some heads per program, chunk after chunk.

Nothing but the inputs, o and what is kept for the backward touches HBM: the scores, the solve and
the state stay in VMEM. The state lies transposed, [V, K], so that a row of decays multiplies it.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, M heads of
a program, P programs of a chunk (H / M).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.kda import chunk
from kernels.kda.mosaic.plan import Interpret, Masks, Plan, call, chunk_spec, state_spec
from kernels.kda.mosaic.tokens import (
    Cuts,
    Operands,
    Raw,
    Tokens,
    activate,
    grid_of,
    keep,
    read_cuts,
    read_masks,
    read_raw,
    read_values,
    token_specs,
    valid_rows,
    values_of,
)


class Enters(NamedTuple):
    """What the state meets in a chunk."""

    k_enter_CK: jax.Array  # k exp(G)
    q_enter_CK: jax.Array  # q exp(G)
    k_leave_CK: jax.Array  # k exp(G_C - G)


class Factors(NamedTuple):
    """Decays between the chunk's rows and its borders, 0 across documents."""

    from_start_CK: jax.Array
    to_end_CK: jax.Array
    total_1K: jax.Array


class Out(NamedTuple):
    o: jax.Array  # [B, T, H * V]
    state: jax.Array  # [B, H, V, K]: behind the last token
    states: jax.Array | None  # [B, H, N, V, K]: entering the chunks
    solved: jax.Array | None  # [B, H, N, C, 2 C]: p and the inverse side by side, which fills lanes


def factors(cuts: Cuts | None, decays: chunk.Decays) -> Factors:
    return Factors(
        keep(cuts and cuts.enters_C1, decays.from_start()),
        keep(cuts and cuts.leaves_C1, decays.to_end()),
        keep(cuts and cuts.passes_11, decays.total()),
    )


def enters(plan: Plan, x: Operands, f: Factors) -> Enters:
    products = x.k_CK * f.from_start_CK, x.q_CK * f.from_start_CK, x.k_CK * f.to_end_CK
    return Enters(*(a.astype(plan.narrow) for a in products))


def missing(plan: Plan, x: Operands, v_CV: jax.Array, of_k_CV: jax.Array) -> jax.Array:
    """beta (v - k exp(G) S) [C, V], narrow; of_k: the product with the narrow state."""
    return (x.beta_C1 * (v_CV.astype(plan.wide) - of_k_CV)).astype(plan.narrow)


class Chunk(NamedTuple):
    """The results of a chunk."""

    o_CV: jax.Array
    state_VK: jax.Array  # behind it
    state_narrow_VK: jax.Array  # entering it
    solved_C2C: jax.Array


def _chunk(
    plan: Plan,
    valid_C1: jax.Array | None,
    cuts: Cuts | None,
    masks: Masks,
    raw: Raw,
    v_CV: jax.Array,
    state_VK: jax.Array,
) -> Chunk:
    dot, narrow = plan.dot, plan.narrow
    x = activate(plan, valid_C1, raw)
    decays = plan.decays(x.g_CK, masks)
    zeros_CC = jnp.zeros((plan.num_rows, plan.num_rows), plan.wide)
    scores = chunk.scores((zeros_CC, zeros_CC), x.q_CK, x.k_CK, decays, narrow, plan.dot_both)
    own_C1 = jnp.sum(x.q_CK * x.k_CK, axis=1, keepdims=True)
    p_CC, of_k_CC = (keep(cuts and cuts.together_CC, s_CC) for s_CC in chunk.cut(*scores, own_C1))
    p_CC, inverse_CC = (a.astype(narrow) for a in (p_CC, plan.inverse(x.beta_C1 * of_k_CC)))
    f = factors(cuts, decays)
    e, state_narrow_VK = enters(plan, x, f), state_VK.astype(narrow)
    of_k_CV, of_q_CV = plan.dot_both(e.k_enter_CK, e.q_enter_CK, state_narrow_VK)
    v_new_CV = dot(inverse_CC, missing(plan, x, v_CV, of_k_CV)).astype(narrow)
    o_CV = of_q_CV + dot(p_CC, v_new_CV)
    state_VK = f.total_1K * state_VK + dot(v_new_CV, e.k_leave_CK, a_columns=True)
    return Chunk(o_CV, state_VK, state_narrow_VK, jnp.concatenate([p_CC, inverse_CC], axis=1))


def _forward_kernel(plan: Plan, x: Tokens, state_in: jax.Array, out: Out) -> None:
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _() -> None:
        out.state[...] = state_in[...]

    valid_C1, cuts, masks = valid_rows(plan, x, n), read_cuts(plan, x), read_masks(plan, x)
    c = jax.vmap(partial(_chunk, plan, valid_C1, cuts))(
        masks, read_raw(plan, x, valid_C1), read_values(plan, x, x.v, valid_C1), out.state[...]
    )
    for m in range(plan.num_heads):
        out.o[:, values_of(plan, x, m)] = c.o_CV[m].astype(out.o.dtype)
    out.state[...] = c.state_VK
    if out.states is not None:
        out.states[...], out.solved[...] = c.state_narrow_VK, c.solved_C2C


def forward(
    plan: Plan, x: Tokens, state_BHVK: jax.Array, *, keep_all: bool, interpret: Interpret
) -> Out:
    """keep_all: also what the backward reads."""
    specs = token_specs(plan, x, lambda n: n)
    chunks = (*state_BHVK.shape[:2], x.v.shape[1] // plan.num_rows)
    square = plan.num_rows, 2 * plan.num_rows
    kept = [
        jax.ShapeDtypeStruct((*chunks, *dims), plan.narrow)
        for dims in (state_BHVK.shape[2:], square)
    ]
    kept_specs = [chunk_spec(plan, lambda n: n, a) for a in kept]
    if not keep_all:
        kept = kept_specs = [None, None]
    of_state = state_spec(plan, state_BHVK)
    state = jax.ShapeDtypeStruct(state_BHVK.shape, plan.wide)
    return call(
        partial(_forward_kernel, plan),
        grid_of(plan, x),
        (x, state_BHVK),
        interpret,
        in_specs=(specs, of_state),
        out_specs=(Out(specs.v, of_state, *kept_specs),),
        out_shape=(Out(jax.ShapeDtypeStruct(x.v.shape, x.v.dtype), state, *kept),),
        name="kda_forward",
    )[0]
