"""Blockwise causal attention in plain XLA: softmax online over key blocks, gradients recomputed.

The loop visits only pairs of a query block and a key block on or below the diagonal, one after the
other, so work is the causal half, memory is linear in T, and the program does not grow with T.
Letters: T queries among S keys, N blocks of C tokens; a block array is [N,B,H,C,K].
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.numerics import accumulation_dtype, precision_for


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attention_xla(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    segment_ids_BS: jax.Array | None,
    first_query: jax.Array | None,
    scale: float,
    block_size: int,
) -> jax.Array:
    """See kernels.attention.attention."""
    return _forward(q_BTHK, k_BSHK, v_BSHV, segment_ids_BS, first_query, scale, block_size)[0]


def default_block_size(num_tokens: int) -> int:
    """About eight blocks, of 128 to 1024 tokens: the diagonal wastes little, the loop is short, and
    the scores of one pair of blocks take no more memory than the output does."""
    largest = min(1024, max(128, num_tokens // 8))
    if num_tokens <= largest:
        return num_tokens
    num_blocks = -(-num_tokens // largest)
    return -(-num_tokens // (16 * num_blocks)) * 16  # even blocks: little padding in the last


class _Saved(NamedTuple):
    q_BTHK: jax.Array
    k_BSHK: jax.Array
    v_BSHV: jax.Array
    segment_ids_BS: jax.Array | None
    first_query: jax.Array | None
    o_BTHV: jax.Array
    log_sum_NBHC: jax.Array


def _forward(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    segment_ids_BS: jax.Array | None,
    first_query: jax.Array | None,
    scale: float,
    block_size: int,
) -> tuple[jax.Array, _Saved]:
    dtype = accumulation_dtype(v_BSHV.dtype)
    q_NBHCK, k_NBHCK, v_NBHCV = (_split(x, block_size) for x in (q_BTHK, k_BSHK, v_BSHV))
    pairs = _Pairs(first_query, block_size, q_NBHCK.shape[0], k_NBHCK.shape[0])
    visible = _visible_function(pairs, segment_ids_BS, q_BTHK.shape[1])
    score = _score_function(q_NBHCK, k_NBHCK, visible, scale, dtype)
    matmul = _matmul_for(v_BSHV.dtype, dtype)

    def visit(i: jax.Array, j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_NBHCV, m_NBHC, l_NBHC = state
        o_BHCV, m_BHC, l_BHC = o_NBHCV[i], m_NBHC[i], l_NBHC[i]
        scores_BHCS = score(i, j)
        next_m_BHC = jnp.maximum(m_BHC, jnp.max(scores_BHCS, axis=-1))
        keep_BHC = jnp.exp(m_BHC - next_m_BHC)
        weights_BHCS = jnp.exp(scores_BHCS - next_m_BHC[..., None])
        o_BHCV = o_BHCV * keep_BHC[..., None] + matmul("bhcs,bhsv->bhcv", weights_BHCS, v_NBHCV[j])
        l_BHC = l_BHC * keep_BHC + jnp.sum(weights_BHCS, axis=-1)
        return o_NBHCV.at[i].set(o_BHCV), m_NBHC.at[i].set(next_m_BHC), l_NBHC.at[i].set(l_BHC)

    rows = q_NBHCK.shape[:-1]
    start = (
        jnp.zeros_like(q_NBHCK, shape=(*rows, v_NBHCV.shape[-1]), dtype=dtype),
        # Finite, so that a block without a visible key adds exp(-inf) = 0 and no NaN.
        jnp.full_like(q_NBHCK, jnp.finfo(dtype).min, shape=rows, dtype=dtype),
        jnp.zeros_like(q_NBHCK, shape=rows, dtype=dtype),
    )
    o_NBHCV, m_NBHC, l_NBHC = pairs.visit(visit, start)
    o_BTHV = _join(o_NBHCV / l_NBHC[..., None], q_BTHK.shape[1])
    log_sum_NBHC = m_NBHC + jnp.log(l_NBHC)
    return o_BTHV, _Saved(q_BTHK, k_BSHK, v_BSHV, segment_ids_BS, first_query, o_BTHV, log_sum_NBHC)


def _backward(
    scale: float, block_size: int, saved: _Saved, do_BTHV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    """With P the weights and D = sum(do * o): dS = P * (do v^T - D), dq = scale dS k, and so on."""
    dtype = do_BTHV.dtype
    q_NBHCK, k_NBHCK, v_NBHCV = (
        _split(x, block_size) for x in (saved.q_BTHK, saved.k_BSHK, saved.v_BSHV)
    )
    pairs = _Pairs(saved.first_query, block_size, q_NBHCK.shape[0], k_NBHCK.shape[0])
    visible = _visible_function(pairs, saved.segment_ids_BS, saved.q_BTHK.shape[1])
    score = _score_function(q_NBHCK, k_NBHCK, visible, scale, dtype)
    matmul = _matmul_for(saved.v_BSHV.dtype, dtype)
    do_NBHCV = _split(do_BTHV, block_size)
    delta_NBHC = jnp.sum(do_NBHCV * _split(saved.o_BTHV, block_size), axis=-1)

    def visit(i: jax.Array, j: jax.Array, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq_NBHCK, dk_NBHCK, dv_NBHCV = grads
        do_BHCV = do_NBHCV[i]
        weights_BHCS = jnp.exp(score(i, j) - saved.log_sum_NBHC[i][..., None])
        dweights_BHCS = matmul("bhcv,bhsv->bhcs", do_BHCV, v_NBHCV[j])
        dscores_BHCS = weights_BHCS * (dweights_BHCS - delta_NBHC[i][..., None])
        return (
            dq_NBHCK.at[i].add(matmul("bhcs,bhsk->bhck", dscores_BHCS, k_NBHCK[j])),
            dk_NBHCK.at[j].add(matmul("bhcs,bhck->bhsk", dscores_BHCS, q_NBHCK[i])),
            dv_NBHCV.at[j].add(matmul("bhcs,bhcv->bhsv", weights_BHCS, do_BHCV)),
        )

    start = tuple(jnp.zeros_like(x, dtype=dtype) for x in (q_NBHCK, k_NBHCK, v_NBHCV))
    dq_NBHCK, dk_NBHCK, dv_NBHCV = pairs.visit(visit, start)
    grads = (dq_NBHCK * scale, saved.q_BTHK), (dk_NBHCK * scale, saved.k_BSHK)
    dq, dk, dv = (
        _join(dx, x.shape[1]).astype(x.dtype) for dx, x in (*grads, (dv_NBHCV, saved.v_BSHV))
    )
    return dq, dk, dv, None, None


attention_xla.defvjp(_forward, _backward)


class _Pairs(NamedTuple):
    """The pairs of query block i and key block j that hold a query and a key up to it."""

    first_query: jax.Array | None  # None: 0, known while tracing
    block_size: int
    num_query_blocks: int
    num_key_blocks: int

    @property
    def first(self) -> jax.Array | int:
        return 0 if self.first_query is None else self.first_query

    def last(self, i: jax.Array) -> jax.Array:
        """The last key block that query block i meets."""
        last_query = self.first + (i + 1) * self.block_size - 1
        return jnp.minimum(last_query // self.block_size, self.num_key_blocks - 1)

    def visit(
        self,
        function: Callable[[jax.Array, jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, ...]],
        state: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """function(i, j, state) for all pairs, with the last key block first."""

        def step(_: jax.Array, carry: tuple) -> tuple:
            i, j, state = carry
            state = function(i, j, state)
            row_done = j == 0
            i = jnp.where(row_done, i + 1, i)
            return i, jnp.where(row_done, self.last(i), j - 1), state

        blocks = self.num_query_blocks
        if self.first_query is None:
            num_pairs = blocks * (blocks + 1) // 2
        else:
            num_pairs = jnp.sum(self.last(jnp.arange(blocks)) + 1)
        first = jnp.zeros_like(num_pairs, jnp.int32)
        return jax.lax.fori_loop(0, num_pairs, step, (first, self.last(first), state))[2]


def _visible_function(
    pairs: _Pairs, segment_ids_BS: jax.Array | None, num_queries: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Which keys of block j the queries of block i see, [B, C, C] or [1, C, C]."""
    size, first = pairs.block_size, pairs.first
    offsets_C = jnp.arange(size)
    if segment_ids_BS is not None:
        ids_BT = jax.lax.dynamic_slice_in_dim(segment_ids_BS, first, num_queries, axis=1)
        # Queries of padding must see a key, as all others do, or their sum of weights would be 0.
        ids_BT = jnp.pad(ids_BT, ((0, 0), (0, -num_queries % size)), mode="edge")
        query_ids_NBC, key_ids_NBC = (
            _split(ids[:, :, None, None], size)[:, :, 0, :, 0] for ids in (ids_BT, segment_ids_BS)
        )

    def visible(i: jax.Array, j: jax.Array) -> jax.Array:
        behind_CS = first + (i - j) * size + offsets_C[:, None] - offsets_C[None, :]
        visible_BCS = (behind_CS >= 0)[None]
        if segment_ids_BS is not None:
            visible_BCS &= query_ids_NBC[i][:, :, None] == key_ids_NBC[j][:, None, :]
        return visible_BCS

    return visible


def _score_function(
    q_NBHCK: jax.Array,
    k_NBHCK: jax.Array,
    visible: Callable[[jax.Array, jax.Array], jax.Array],
    scale: float,
    dtype: jnp.dtype,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The scores of query block i with key block j, -inf where a key is not visible."""
    matmul = _matmul_for(q_NBHCK.dtype, dtype)

    def score(i: jax.Array, j: jax.Array) -> jax.Array:
        scores_BHCS = scale * matmul("bhck,bhsk->bhcs", q_NBHCK[i], k_NBHCK[j])
        return jnp.where(visible(i, j)[:, None], scores_BHCS, -jnp.inf)

    return score


def _matmul_for(
    operand_dtype: jnp.dtype, dtype: jnp.dtype
) -> Callable[[str, jax.Array, jax.Array], jax.Array]:
    """einsum with operands narrowed to the inputs' type and sums kept in float32 or wider."""

    def matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts,
            a.astype(operand_dtype),
            b.astype(operand_dtype),
            precision=precision_for(operand_dtype),
            preferred_element_type=dtype,
        )

    return matmul


def _split(x_BTHK: jax.Array, block_size: int) -> jax.Array:
    """[B,T,H,K] to blocks [N,B,H,C,K]; the last block is padded with zeros after the sequence."""
    batch, num_tokens, heads, width = x_BTHK.shape
    num_blocks = -(-num_tokens // block_size)
    padding = num_blocks * block_size - num_tokens
    x = jnp.pad(x_BTHK, ((0, 0), (0, padding), (0, 0), (0, 0)))
    x = x.reshape(batch, num_blocks, block_size, heads, width)
    return x.transpose(1, 0, 3, 2, 4)


def _join(x_NBHCK: jax.Array, num_tokens: int) -> jax.Array:
    """Blocks [N,B,H,C,K] back to [B,T,H,K], without the padding."""
    x = x_NBHCK.transpose(1, 0, 3, 2, 4)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return x[:, :num_tokens]
