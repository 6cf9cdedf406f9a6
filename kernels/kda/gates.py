"""Activations in front of the KDA recurrence: log-decay gates, write strength, L2 norm.

Everything is computed in at least float32. Letters: B batch, T time, H heads, K key dim.
"""

import jax
import jax.numpy as jnp

from kernels.kda.sums import sum_halves

L2_NORM_EPS = 1e-6

# exp(60) saturates either gate for any z a float32 can tell from zero; without the cap a huge
# a_log gives exp(a_log) = inf, and the gradient 0 * inf = NaN.
MAX_A_LOG = 60.0


def _fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _shifted(gate_BTHK: jax.Array, dt_bias_HK: jax.Array | None) -> jax.Array:
    z_BTHK = _fp32(gate_BTHK)
    return z_BTHK if dt_bias_HK is None else z_BTHK + _fp32(dt_bias_HK)[None, None]


def _rate(a_log_H: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(_fp32(a_log_H), MAX_A_LOG))[None, None, :, None]


def bounded_log_decay(
    gate_BTHK: jax.Array,
    a_log_H: jax.Array | None,
    dt_bias_HK: jax.Array | None,
    lower_bound: float,
) -> jax.Array:
    """Log-decay g = lower_bound * sigmoid(exp(a_log) * (gate + dt_bias)), in (lower_bound, 0).

    Source: Kimi K3 report Eq. 5. Without a_log the rate is 1.
    """
    z_BTHK = _shifted(gate_BTHK, dt_bias_HK)
    if a_log_H is not None:
        z_BTHK = z_BTHK * _rate(a_log_H)
    return lower_bound * jax.nn.sigmoid(z_BTHK)


def softplus_log_decay(
    gate_BTHK: jax.Array, a_log_H: jax.Array | None, dt_bias_HK: jax.Array | None
) -> jax.Array:
    """Log-decay g = -exp(a_log) * softplus(gate + dt_bias), in (-inf, 0).

    Source: the gate of Kimi Linear (arXiv 2510.26692). Without a_log the rate is 1.
    """
    g_BTHK = -jax.nn.softplus(_shifted(gate_BTHK, dt_bias_HK))
    return g_BTHK if a_log_H is None else g_BTHK * _rate(a_log_H)


def write_strength(beta_BTH: jax.Array, is_logit: bool) -> jax.Array:
    """Strength of the delta rule's write: sigmoid of the logits, or the values as given."""
    return jax.nn.sigmoid(_fp32(beta_BTH)) if is_logit else _fp32(beta_BTH)


@jax.custom_vjp
def l2_normalize(x_BTHK: jax.Array) -> jax.Array:
    """x / sqrt(sum of squares + 1e-6) over the last dim, in x's dtype (Kimi K3 report Eq. 2)."""
    return _l2_normalize(x_BTHK)[0]


def _l2_normalize(x_BTHK: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rstd_BTH1 = jax.lax.rsqrt(sum_halves(jnp.square(x_BTHK), -1) + L2_NORM_EPS)
    y_BTHK = x_BTHK * rstd_BTH1
    return y_BTHK, (y_BTHK, rstd_BTH1)


def _l2_normalize_vjp(saved: tuple[jax.Array, jax.Array], dy_BTHK: jax.Array) -> tuple[jax.Array]:
    y_BTHK, rstd_BTH1 = saved
    along_BTH1 = sum_halves(y_BTHK * dy_BTHK, -1)
    return (rstd_BTH1 * (dy_BTHK - y_BTHK * along_BTH1),)


l2_normalize.defvjp(_l2_normalize, _l2_normalize_vjp)
