"""The public KDA operator: checks a call, completes its arguments, picks an implementation.

Letters: B batch, T time, H value heads, Q query/key heads, K key dim, V value dim.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from kernels.kda.blocks import Implementation, kda_by_blocks
from kernels.kda.checks import check_arrays, check_gate, check_implementation
from kernels.kda.chunked import kda_chunked
from kernels.kda.operands import KdaInputs, KdaOptions, complete, unsupported_by_kernels
from kernels.kda.pallas_mosaic_tpu import kda_pallas_mosaic_tpu
from kernels.kda.pallas_triton import kda_pallas_triton, kda_states_pallas_triton
from kernels.kda.reference import kda_reference
from kernels.kda.tiles import TILE
from kernels.numerics import platform

GateKind = Literal["bounded", "softplus", "log_decay"]
Residuals = Literal["default", "lean", "full"]
RESIDUALS = get_args(Residuals)

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": kda_reference,
    "xla": kda_chunked,
    "pallas_triton": kda_pallas_triton,
    "pallas_mosaic_tpu": kda_pallas_mosaic_tpu,
}


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    *,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    gate_kind: GateKind = "bounded",
    lower_bound: float | None = -5.0,
    beta_is_logit: bool = True,
    use_qk_l2norm: bool = True,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    chunk_size: int = 64,
    num_splits: int | None = None,
    residuals: Residuals = "default",
    states_every: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Kimi Delta Attention, causal over T (Kimi K3 report Eq. 1-5; Kimi Linear Eq. 1-9).

    Per value head a state S [K, V] decays per key channel and is then corrected towards v:

        S  <- diag(exp(g_t)) S
        S  <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale * S^T q_t

    Differentiable in q, k, v, gate, beta, a_log, dt_bias and initial_state, by reverse mode and
    once; gradients have their input's dtype. Arithmetic and state are float32, or float64 if an
    input is.

    Args:
      q, k: [B, T, Q, K]. float32, bfloat16 or float64, like v, gate and beta; float16 is refused,
        because the decay factors overflow it.
      v: [B, T, H, V], H a multiple of Q: value head j reads query/key head j // (H / Q).
      gate: [B, T, H, K]. By gate_kind, with z = gate + dt_bias:
        "bounded": g = lower_bound * sigmoid(exp(a_log) * z);
        "softplus": g = -exp(a_log) * softplus(z), lower_bound is not used;
        "log_decay": g = gate, finite and <= 0, natural logarithm, no a_log or dt_bias.
      beta: [B, T, H]; a logit (its sigmoid is used) or, with beta_is_logit=False, the strength
        itself, which is stable in [0, 2].
      a_log: [H] or None (rate 1). dt_bias: [H, K] or None (no shift).
      lower_bound: a negative number. For "log_decay" it is the caller's promise that no g lies
        below it, and None makes no promise. From -5.5 up, 16-row tiles are plain matmuls; below
        that, or without a promise, a slower path is exact for any g.
      use_qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first.
      scale: default K ** -0.5; applied after the norm. Not 0.
      initial_state: [B, H, K, V] float32 (or float64), zeros if None. Enters the first segment.
      segment_ids: [B, T] integers, compared only with the previous token's: a change restarts the
        state from zero. No value is special. What lies before must be finite all the same.
      lengths: [B] integers. Tokens from there on are inert: o = 0, the state stays, no gradient.
      chunk_size: a multiple of 16; changes speed and rounding only. The kernels take 64 from 64
        up, and 32 below.
      num_splits: into how many pieces "pallas_triton" cuts the sequence, to run them side by side;
        their length is a multiple of 16 chunks, so there may be fewer. None chooses by the shapes.
        Changes speed and rounding only, and other implementations do not read it.
      residuals: what "pallas_triton" keeps for the backward pass. "default": the inputs, o, what
        enters the pieces and the maps between them, norms, and of every chunk its scores, its solve
        and v - k exp(G) S (the last three 512 bytes a token and head in bfloat16 at K = V = 128);
        "lean": the inputs, at the price of one more forward pass; "full": also what the scan reads,
        and the states that enter the chunks (1280 bytes more), for the fastest backward pass. Under
        jax.remat nothing is kept for long, so take "full". "pallas_mosaic_tpu" keeps the inputs
        alone if "lean", else also scores, inverses and entering states (768 bytes).
      states_every: also return the states that enter tokens 0, n, 2 n, ... of this n, a multiple of
        64: for prefix caches. Then "pallas_triton" has no gradient.
      implementation: "reference" (token recurrence, the oracle), "xla" (chunked, pure JAX),
        "pallas_triton" (NVIDIA GPUs) and "pallas_mosaic_tpu" (TPUs), both interpreted elsewhere, or
        None for the best that serves the call on the default backend: that of the GPU or the TPU,
        else "xla".

    Returns:
      o [B, T, H, V] in v's dtype, and final_state [B, H, K, V] after the last valid token.
      With states_every also the states [B, ceil(T / states_every), H, K, V].

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or the implementation is unknown.
      NotImplementedError: the named implementation does not serve this call.
    """
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a_log": a_log}
    arrays |= {"dt_bias": dt_bias, "initial_state": initial_state}
    check_arrays(arrays | {"segment_ids": segment_ids, "lengths": lengths}, has_time=True)
    check_gate(gate_kind, lower_bound, a_log, dt_bias)
    if not isinstance(chunk_size, int) or chunk_size < TILE or chunk_size % TILE:
        raise ValueError(
            f"chunk_size is {chunk_size!r}; it must be a positive multiple of {TILE}, such as 64"
        )
    if scale is not None and scale == 0:
        raise ValueError("scale is 0; it must be another number, such as K ** -0.5")
    if num_splits is not None and not (isinstance(num_splits, int) and num_splits >= 1):
        raise ValueError(
            f"num_splits is {num_splits!r}; it must be None or a positive integer, such as 4"
        )
    if residuals not in RESIDUALS:
        raise ValueError(f"residuals is {residuals!r}; it must be one of {list(RESIDUALS)}")
    if states_every is not None and not (
        isinstance(states_every, int) and states_every >= 1 and states_every % 64 == 0
    ):
        raise ValueError(
            f"states_every is {states_every!r}; it must be None or a positive multiple of 64, such "
            "as 1024"
        )
    check_implementation(implementation, IMPLEMENTATIONS)

    inputs = complete(
        *arrays.values(), segment_BT=_count_restarts(segment_ids, lengths), lengths=lengths
    )
    options = KdaOptions(
        gate_kind=gate_kind,
        lower_bound=None if lower_bound is None else float(lower_bound),
        beta_is_logit=beta_is_logit,
        use_qk_l2norm=use_qk_l2norm,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        chunk_size=chunk_size,
        num_splits=num_splits,
        residuals=residuals,
    )
    name = implementation or default_implementation(inputs)
    if states_every is None:
        return IMPLEMENTATIONS[name](inputs, options)
    if name == "pallas_triton":
        return kda_states_pallas_triton(inputs, options, states_every)
    return kda_by_blocks(IMPLEMENTATIONS[name], inputs, options, states_every)


def default_implementation(inputs: KdaInputs) -> str:
    """The best that serves a call on the default backend."""
    kernels = {"gpu": "pallas_triton", "tpu": "pallas_mosaic_tpu"}
    return "xla" if unsupported_by_kernels(inputs) else kernels.get(platform(), "xla")


def _count_restarts(segment_ids: jax.Array | None, lengths: jax.Array | None) -> jax.Array | None:
    """Number of restarts up to each token [B, T]; tokens behind `lengths` restart nothing."""
    if segment_ids is None:
        return None
    restart_BT = segment_ids[:, 1:] != segment_ids[:, :-1]
    if lengths is not None:
        positions_T = jnp.arange(1, segment_ids.shape[1])
        restart_BT &= positions_T[None, :] < lengths[:, None]
    return jnp.pad(jnp.cumsum(restart_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
