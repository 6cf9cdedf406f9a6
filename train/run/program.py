"""The program of a run: the train step with the shapes and the places of what it works on."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.config import TrainConfig
from train.data.batch import Batch
from train.run.mesh import batch_sharding, state_shardings
from train.step.state import TrainState, init_state
from train.step.train_step import train_step


def abstract_state(
    config: TrainConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state's shapes and shardings."""
    init = functools.partial(init_state, config.model, optimizer)
    shapes = jax.eval_shape(init, jax.random.key(config.run.seed))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        state_shardings(mesh, config.model, shapes),
    )


def abstract_batch(config: TrainConfig, mesh: Mesh) -> Batch:
    """The shapes and shardings of a global batch."""
    size = config.data.batch_size, config.data.context_length
    dtypes = (*(np.int32,) * 4, np.bool_)
    return Batch(*(jax.ShapeDtypeStruct(size, d, sharding=batch_sharding(mesh)) for d in dtypes))


def make_step(
    config: TrainConfig, optimizer: optax.GradientTransformation, state: TrainState
) -> Callable:
    """The jitted train step (state, batch) -> (state, metrics); it takes the state's memory and
    leaves the next one where `state`, an abstract one, says, and the metrics on every device."""
    step = functools.partial(
        train_step, model=config.model, config=config.step, optimizer=optimizer
    )
    places = jax.tree.map(lambda x: x.sharding, state)
    everywhere = NamedSharding(state.step.sharding.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere))


def make_state(
    config: TrainConfig, optimizer: optax.GradientTransformation, state: TrainState
) -> TrainState:
    """A fresh state, made where `state`, an abstract one, says; never whole on one device."""
    init = functools.partial(init_state, config.model, optimizer)
    places = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(init, out_shardings=places)(jax.random.key(config.run.seed))
