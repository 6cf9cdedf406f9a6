"""Rows spread over devices give what one device gives. Runs in a process of its own, since the
number of devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import functools
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
from jax.sharding import AxisType
from model.balance import init_balance
from model.config import BalanceConfig
from model.transformer import param_shapes
from tests.model.configs import small_config
from train.data.batch import Batch
from train.run.mesh import AXES, batch_sharding, replicated
from train.step.loss import LossConfig
from train.step.optimizer import OptimizerConfig, make_optimizer
from train.step.state import TrainState
from train.step.train_step import StepConfig, train_step

model = small_config(layers="KM", balance=BalanceConfig(estimator="{estimator}", num_bins=40))
optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
rng = np.random.default_rng(0)
params = jax.tree.map(lambda x: 0.5 + 0.3 * rng.standard_normal(x.shape), param_shapes(model))
ids = np.ones((4, 12), np.int32)
ids[1, 5:] = 2
ids[3, 8:] = 0
inputs, targets = (rng.integers(0, model.vocab_size, (4, 12)).astype(np.int32) for _ in "12")
batch = Batch(inputs, targets, ids, np.zeros_like(ids), ids > 0)
balance = init_balance(model.balance, 1, model.moe.num_experts, "float64")
state = TrainState(np.int32(0), params, optimizer.init(params), balance)
step = functools.partial(
    train_step, model=model, config=StepConfig(LossConfig(), {accumulation}), optimizer=optimizer
)

def run(num_devices):
    devices = jax.devices()[:num_devices]
    shape, types = (num_devices, 1, 1), (AxisType.Auto,) * 3
    mesh = jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    with jax.set_mesh(mesh):
        rows = jax.device_put(batch, batch_sharding(mesh))
        start = jax.device_put(state, replicated(mesh, state))
        return jax.device_get(jax.jit(step)(start, rows))

(one, one_metrics), (two, two_metrics) = run(1), run(2)
close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
jax.tree.map(close, two, one)
jax.tree.map(close, two_metrics, one_metrics)
np.testing.assert_array_equal(two_metrics["max_vio"], one_metrics["max_vio"])
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator,accumulation", [("histogram", 1), ("quantile", 2), ("aux_loss", 1)]
)
def test_two_devices_equal_one(estimator, accumulation):
    program = PROGRAM.replace("{estimator}", estimator).replace("{accumulation}", str(accumulation))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
