"""The state a run carries from step to step; all of it is saved in checkpoints."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.balance import Balance, init_balance
from model.config import ModelConfig
from model.transformer import Params, init_params


class TrainState(NamedTuple):
    """`balance` (the quantile buffers) lives outside `params`: no gradient, decay or averaging
    touches it."""

    step: jax.Array  # int32: optimizer steps tried, skipped ones included
    params: Params
    opt_state: optax.OptState
    balance: Balance


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """A fresh state; a pure function, to be jitted with the state's shardings."""
    params = init_params(config, key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        balance=init_balance(config.balance, config.num_moe_layers, config.moe.num_experts),
    )
