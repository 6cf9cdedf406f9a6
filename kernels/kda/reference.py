"""KDA as its token recurrence: the oracle of every other implementation.

Letters: B batch, T time, H value heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp

from kernels.kda.operands import Activated, KdaInputs, KdaOptions, activate, valid_tokens


def token_step(state_BHKV: jax.Array, x: Activated) -> tuple[jax.Array, jax.Array]:
    """One token (Kimi K3 report Eq. 1): decay, write towards v, read. The operands lack T.

    Returns the state and o [B, H, V]. Sums and not products: exact on every platform, and a kernel
    that holds one head's state can call it too.
    """
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = x
    state_BHKV = state_BHKV * jnp.exp(g_BHK)[..., None]
    seen_BHV = jnp.sum(state_BHKV * k_BHK[..., None], axis=-2)
    write_BHV = beta_BH[..., None] * (v_BHV - seen_BHV)
    state_BHKV = state_BHKV + k_BHK[..., None] * write_BHV[..., None, :]
    return state_BHKV, jnp.sum(state_BHKV * q_BHK[..., None], axis=-2)


def kda_reference(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence token by token (Kimi K3 report Eq. 1); differentiated by autodiff.

    Returns o_BTHV in v's dtype and the final state [B, H, K, V].
    """
    x = activate(inputs, options, valid_tokens(inputs))
    if inputs.segment_BT is None:
        restart_BT = jnp.zeros(x.beta_BTH.shape[:2], bool)
    else:
        restart_BT = jnp.diff(inputs.segment_BT, axis=1, prepend=inputs.segment_BT[:, :1]) != 0

    def token(state_BHKV: jax.Array, xs: tuple[Activated, jax.Array]) -> tuple:
        x, restart_B = xs
        return token_step(jnp.where(restart_B[:, None, None, None], 0.0, state_BHKV), x)

    time_major = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (x, restart_BT))
    final_state_BHKV, o_TBHV = jax.lax.scan(token, inputs.initial_state_BHKV, time_major)
    return jnp.moveaxis(o_TBHV, 0, 1).astype(inputs.v_BTHV.dtype), final_state_BHKV
