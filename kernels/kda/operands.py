"""What every KDA implementation receives, and the activations they share.

Letters: B batch, T time, H value heads, Q query/key heads, K key dim, V value dim.
"""

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda import gates

# Steepest log-decay at which 16 rows still fit one float32 exponent range: 15 * 5.5 = 82.5 < 88.
STEEPEST_TILE_BOUND = -5.5


@dataclass(frozen=True)
class KdaOptions:
    """The static half of a call, validated by the api."""

    gate_kind: str
    lower_bound: float | None
    beta_is_logit: bool
    use_qk_l2norm: bool
    scale: float
    chunk_size: int
    num_splits: int | None = None
    residuals: str = "default"

    @property
    def tile_bound(self) -> float | None:
        """Lower bound of the log-decay if it is high enough for 16-row tile matmuls, else None."""
        if self.gate_kind == "softplus" or self.lower_bound is None:
            return None
        return self.lower_bound if self.lower_bound >= STEEPEST_TILE_BOUND else None


class KdaInputs(NamedTuple):
    """The arrays of a call, validated and completed by the api."""

    q_BTQK: jax.Array
    k_BTQK: jax.Array
    v_BTHV: jax.Array
    gate_BTHK: jax.Array
    beta_BTH: jax.Array
    a_log_H: jax.Array | None  # in the compute dtype
    dt_bias_HK: jax.Array | None  # in the compute dtype
    initial_state_BHKV: jax.Array  # in the compute dtype; zeros if the caller gave none
    segment_BT: jax.Array | None  # int32, 0 in the first segment, +1 at every restart
    lengths_B: jax.Array | None  # int32

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the state and of the arithmetic: float32, or float64 if any input is."""
        return self.initial_state_BHKV.dtype


def unsupported_by_kernels(inputs: KdaInputs) -> str | None:
    """Why the compiled kernels, on whatever backend, do not serve these inputs; None if they do."""
    key_dim, value_dim = inputs.q_BTQK.shape[-1], inputs.v_BTHV.shape[-1]
    if max(key_dim, value_dim) > 256:
        return f"key and value dims up to 256, not {key_dim} and {value_dim}"
    if inputs.compute_dtype == jnp.float64:
        return "bfloat16 and float32, not float64"
    return None


def complete(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
    state: jax.Array | None,
    *,
    segment_BT: jax.Array | None,
    lengths: jax.Array | None,
) -> KdaInputs:
    """Checked arguments with what the caller left out, parameters and state in one dtype."""
    floats = [q, k, v, gate, beta] + [x for x in (a_log, dt_bias, state) if x is not None]
    dtype = reduce(jnp.promote_types, (x.dtype for x in floats), jnp.float32)
    state_shape = (*v[:, 0].shape[:2], q.shape[-1], v.shape[-1])
    return KdaInputs(
        q,
        k,
        v,
        gate,
        beta,
        a_log_H=None if a_log is None else a_log.astype(dtype),
        dt_bias_HK=None if dt_bias is None else dt_bias.astype(dtype),
        initial_state_BHKV=(
            jax.lax.full_like(v, 0, dtype, state_shape) if state is None else state.astype(dtype)
        ),
        segment_BT=segment_BT,
        lengths_B=None if lengths is None else lengths.astype(jnp.int32),
    )


class Activated(NamedTuple):
    """Operands of the recurrence in the compute dtype, all with one head per value head."""

    q_BTHK: jax.Array  # scaled
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    g_BTHK: jax.Array  # log-decay, <= 0
    beta_BTH: jax.Array


def valid_tokens(inputs: KdaInputs) -> jax.Array | None:
    """Mask [B, T] of the tokens before `lengths`; None means all."""
    if inputs.lengths_B is None:
        return None
    positions_T = jnp.arange(inputs.q_BTQK.shape[1], dtype=jnp.int32)
    return positions_T[None, :] < inputs.lengths_B[:, None]


def _keep(x: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return jnp.where(mask_BT.reshape(mask_BT.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))


def log_decay(
    options: KdaOptions,
    gate_BTHK: jax.Array,
    a_log_H: jax.Array | None,
    dt_bias_HK: jax.Array | None,
) -> jax.Array:
    """The log-decay g <= 0 of the call's kind of gate."""
    if options.gate_kind == "bounded":
        return gates.bounded_log_decay(gate_BTHK, a_log_H, dt_bias_HK, options.lower_bound)
    if options.gate_kind == "softplus":
        return gates.softplus_log_decay(gate_BTHK, a_log_H, dt_bias_HK)
    return gate_BTHK


def activate(inputs: KdaInputs, options: KdaOptions, valid_BT: jax.Array | None) -> Activated:
    """Norms, gate, write strength and head groups; a masked-out token becomes inert.

    Inert means q = k = v = 0, g = 0 and beta = 0: it leaves the state alone, reads 0 and, whatever
    its inputs hold (NaN included), sends no gradient to anything.
    """
    q, k, v, gate, beta = inputs[:5]
    if valid_BT is not None:
        q, k, v, gate, beta = (_keep(x, valid_BT) for x in (q, k, v, gate, beta))
    g = log_decay(options, gate, inputs.a_log_H, inputs.dt_bias_HK)
    beta = gates.write_strength(beta, options.beta_is_logit)
    if valid_BT is not None:
        g, beta = _keep(g, valid_BT), _keep(beta, valid_BT)

    dtype = inputs.compute_dtype
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    if options.use_qk_l2norm:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    q, k = (_repeat_heads(x, v.shape[2] // x.shape[2]) for x in (q * options.scale, k))
    return Activated(q, k, v, g, beta)


def _repeat_heads(x_BTQK: jax.Array, group: int) -> jax.Array:
    # A stack, because its gradient adds the group's heads in one fixed order.
    x_BTQGK = jnp.stack([x_BTQK] * group, axis=3)
    return x_BTQGK.reshape(*x_BTQK.shape[:2], -1, x_BTQK.shape[-1])
