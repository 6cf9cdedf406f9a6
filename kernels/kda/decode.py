"""The KDA operator's single step, for a batch of sequences that grow by one token each.

Letters: B batch, T time (1 here), H value heads, Q query/key heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp

from kernels.kda.api import GateKind, default_implementation
from kernels.kda.blocks import Implementation
from kernels.kda.checks import check_arrays, check_gate, check_implementation
from kernels.kda.mosaic.decode import decode_pallas_mosaic_tpu
from kernels.kda.operands import Activated, KdaInputs, KdaOptions, activate, complete, valid_tokens
from kernels.kda.reference import token_step
from kernels.kda.triton.decode import decode_pallas_triton


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    gate_kind: GateKind = "bounded",
    lower_bound: float | None = -5.0,
    beta_is_logit: bool = True,
    use_qk_l2norm: bool = True,
    scale: float | None = None,
    active: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of kda() for every sequence (Kimi K3 report Eq. 1); for inference.

    T calls, each with the state of the one before, give what one call of kda() over T tokens gives.
    Jit the caller with the state donated, and the kernel updates it in place. Not
    differentiable there: gradients are kda()'s business.

    Args:
      q, k: [B, Q, K]. v: [B, H, V]. gate: [B, H, K]. beta: [B, H]. state: [B, H, K, V] float32 (or
        float64). Dtypes and all options but those below mean what they mean to kda().
      active: [B] bool. A row that is not keeps its state bit for bit, whatever its other inputs
        hold, and its o is 0. None means all are.
      implementation: "xla" (pure JAX), "pallas_triton" and "pallas_mosaic_tpu" (one fused kernel
        for NVIDIA GPUs or TPUs, which reads and writes the state once; interpreted elsewhere), or
        None for the best that serves the call on the default backend.

    Returns:
      o [B, H, V] in v's dtype, and the state [B, H, K, V] after the token.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or the implementation is unknown.
      NotImplementedError: the named implementation does not serve this call.
    """
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a_log": a_log}
    arrays |= {"dt_bias": dt_bias, "state": state, "active": active}
    check_arrays(arrays, has_time=False)
    check_gate(gate_kind, lower_bound, a_log, dt_bias)
    check_implementation(implementation, DECODE_IMPLEMENTATIONS)

    tokens = (x[:, None] for x in (q, k, v, gate, beta))
    inputs = complete(*tokens, a_log, dt_bias, state, segment_BT=None, lengths=active)
    options = KdaOptions(
        gate_kind=gate_kind,
        lower_bound=None if lower_bound is None else float(lower_bound),
        beta_is_logit=beta_is_logit,
        use_qk_l2norm=use_qk_l2norm,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        chunk_size=1,
    )
    name = implementation or default_implementation(inputs)
    o_BTHV, state_BHKV = DECODE_IMPLEMENTATIONS[name](inputs, options)
    return o_BTHV[:, 0], state_BHKV


def _decode_xla(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    valid_BT = valid_tokens(inputs)
    x = activate(inputs, options, valid_BT)
    before_BHKV = inputs.initial_state_BHKV
    state_BHKV, o_BHV = token_step(before_BHKV, Activated(*(array[:, 0] for array in x)))
    if valid_BT is not None:  # an inert token would turn -0 into 0
        state_BHKV = jnp.where(valid_BT[..., None, None], state_BHKV, before_BHKV)
        o_BHV = jnp.where(valid_BT[..., None], o_BHV, 0.0)  # whatever the state holds
    return o_BHV[:, None].astype(inputs.v_BTHV.dtype), state_BHKV


DECODE_IMPLEMENTATIONS: dict[str, Implementation] = {
    "xla": _decode_xla,
    "pallas_triton": decode_pallas_triton,
    "pallas_mosaic_tpu": decode_pallas_mosaic_tpu,
}
