"""The full-size train step: program size grows with AttnRes blocks, not with layers."""

import functools
import time

import jax
import jax.numpy as jnp
import pytest

from configs import k3_2p8t
from model.layout import blocks
from train.config import TrainConfig, build
from train.data.batch import Batch
from train.step.optimizer import make_optimizer
from train.step.state import init_state
from train.step.train_step import train_step


def lower(layers: str, block_size: int) -> tuple[int, int, float]:
    """(blocks, characters of StableHLO, seconds) of the whole train step on one 8K row."""
    config = k3_2p8t.get_config()
    config.model.layers, config.model.residual.block_size = layers, block_size
    config = build(TrainConfig, config.to_dict())
    start = time.perf_counter()
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    state = jax.eval_shape(
        functools.partial(init_state, config.model, optimizer), jax.random.key(0)
    )
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    batch = Batch(tokens, tokens, tokens, tokens, jax.ShapeDtypeStruct((1, 8192), jnp.bool_))
    step = functools.partial(
        train_step, model=config.model, config=config.step, optimizer=optimizer
    )
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    seconds = time.perf_counter() - start
    return len(blocks(config.model)), len(lowered.as_text()), seconds


@pytest.mark.slow
def test_k3_lowers_quickly_and_in_constant_size():
    num_blocks, size, seconds = lower("KKKM" * 23 + "M", 12)
    assert num_blocks == 8
    assert seconds < 300  # 75 to 120 on a core of its own, which the slow run does not give
    deep_blocks, deep_size, _ = lower("KKKM" * 45 + "M", 24)
    assert deep_blocks == 8
    assert abs(deep_size / size - 1) < 0.05
    print(f"93 layers: {seconds:.0f} s, {size / 1e6:.1f} MB; 181 layers: {deep_size / size:.3f} x")
