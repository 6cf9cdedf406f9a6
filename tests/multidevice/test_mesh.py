"""A train step on any mesh is that of one device: eight devices, every way to share them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import functools
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", DTYPE == "float64")
jax.config.update("jax_numpy_rank_promotion", "raise")
from model.balance import init_balance
from model.config import BalanceConfig, MoEConfig
from model.transformer import param_shapes
from tests.model.configs import small_config
from tests.multidevice import emulation
from train.data.batch import Batch
from train.run.mesh import MeshConfig, batch_sharding, make_mesh, state_shardings
from train.step.loss import LossConfig
from train.step.optimizer import OptimizerConfig, make_optimizer
from train.step.state import TrainState
from train.step.train_step import StepConfig, train_step

moe = MoEConfig(num_experts=8, top_k=2, expert_hidden=8, latent_dim=16, row_block=4)
model = small_config(
    layers="KM", dtype=DTYPE, param_dtype=DTYPE, shard_min_size=0, moe=moe,
    balance=BalanceConfig(estimator=ESTIMATOR, num_bins=40), remat=REMAT,
)
step_config = StepConfig(LossConfig(z_loss=1e-3, chunk_tokens=CHUNK), ACCUMULATION)
optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
B, T = 8 * ACCUMULATION, 32
rng = np.random.default_rng(0)
params = jax.tree.map(
    lambda x: (0.5 + 0.3 * rng.standard_normal(x.shape)).astype(DTYPE), param_shapes(model)
)
ids = np.ones((B, T), np.int32)
if DOCUMENTS:
    ids = 1 + np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
    ids[1] = np.arange(T) // 8 + 1  # ends where shards end
    ids[3, 20:] = 0
inputs, targets = (rng.integers(0, model.vocab_size, (B, T)).astype(np.int32) for _ in "12")
batch = Batch(inputs, targets, ids, np.zeros_like(ids), ids > 0)
balance = init_balance(model.balance, model.num_moe_layers, moe.num_experts, DTYPE)
state = TrainState(np.int32(0), params, optimizer.init(params), balance)

def run(devices, dispatch, *sizes):
    mesh = make_mesh(MeshConfig(*sizes), devices)
    moe_here = MoEConfig(**(vars(moe) | {"dispatch": dispatch, "buffer_factor": BUFFER}))
    model_here = small_config(**(vars(model) | {"moe": moe_here}))
    step = functools.partial(train_step, model=model_here, config=step_config, optimizer=optimizer)
    with jax.set_mesh(mesh):
        shardings = state_shardings(mesh, model, state)
        rows = jax.device_put(batch, batch_sharding(mesh))
        start = jax.device_put(state, shardings)
        return jax.device_get(jax.jit(step, out_shardings=(shardings, None))(start, rows))

if RAGGED:
    emulation.install()

def assert_close(where, a, b):
    scale = max(1e-3, np.max(np.abs(b)))  # of the array: Muon makes small entries of large ones
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * scale, err_msg=where)

(one, one_metrics) = run(jax.devices()[:1], "gather", 1, 1, 1)
rtol = 1e-9 if DTYPE == "float64" else 1e-4
for sizes in SIZES:
    for dispatch in DISPATCHES:
        new, metrics = run(jax.devices(), dispatch, *sizes)
        where = f"mesh {sizes}, {dispatch}"
        if BUFFER is not None:
            assert metrics["dropped"].sum() > 0, where
            continue
        np.testing.assert_array_equal(metrics["dropped"], 0)
        np.testing.assert_allclose(metrics["loss"], one_metrics["loss"], rtol=rtol, err_msg=where)
        if DTYPE == "float64":
            jax.tree.map(functools.partial(assert_close, where), new, one)
            jax.tree.map(functools.partial(assert_close, where), metrics, one_metrics)
            np.testing.assert_array_equal(metrics["max_vio"], one_metrics["max_vio"])
print("equal")
"""

ALL = [(d, e, 8 // d // e) for d in (1, 2, 4, 8) for e in (1, 2, 4, 8) if 8 % (d * e) == 0]
DEFAULTS = {
    "DTYPE": "float64",
    "ESTIMATOR": "histogram",
    "REMAT": "none",
    "CHUNK": 8192,
    "ACCUMULATION": 1,
    "DOCUMENTS": True,
    "BUFFER": None,
    "RAGGED": False,
    "SIZES": ALL,
    "DISPATCHES": ["gather"],
}
SPREAD = [s for s in ALL if s[1] > 1]
TWO = [(2, 2, 2), (1, 4, 2)]


CASES = {
    "gather": {},
    "one_document": {"DOCUMENTS": False, "SIZES": [s for s in ALL if s[2] > 1]},
    "all_to_all": {"DISPATCHES": ["all_to_all"], "SIZES": SPREAD},
    "ragged": {"DISPATCHES": ["all_to_all"], "SIZES": SPREAD, "REMAT": "full", "RAGGED": True},
    "float32": {"DTYPE": "float32", "DISPATCHES": ["gather", "all_to_all"], "SIZES": TWO},
    "quantile": {"ESTIMATOR": "quantile", "ACCUMULATION": 2, "SIZES": TWO},
    "aux_loss": {"ESTIMATOR": "aux_loss", "REMAT": "full", "CHUNK": 8, "SIZES": TWO},
    "too_little_room": {"BUFFER": 0.3, "DISPATCHES": ["gather", "all_to_all"], "SIZES": TWO[:1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_eight_devices_equal_one(settings):
    lines = "".join(f"{name} = {value!r}\n" for name, value in (DEFAULTS | settings).items())
    done = subprocess.run(
        [sys.executable, "-c", lines + PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
        timeout=1200,
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
