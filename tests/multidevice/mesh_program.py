"""A program: one train step on several meshes of eight devices, against the step on one device.

    python -m tests.multidevice.mesh_program SETTINGS [COORDINATOR NUM_PROCESSES PROCESS_ID]

SETTINGS is JSON, DEFAULTS with changes. Prints "equal" at the end.
"""

import functools
import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model.balance import init_balance
from model.config import BalanceConfig, MoEConfig
from model.transformer import param_shapes
from tests.model.configs import small_config
from tests.multidevice import emulation
from train.data.batch import Batch
from train.data.config import DataConfig
from train.run.feed import streams_here, to_devices
from train.run.mesh import MeshConfig, make_mesh, start_devices, state_shardings
from train.run.processes import join
from train.step.loss import LossConfig
from train.step.optimizer import OptimizerConfig, make_optimizer
from train.step.state import TrainState
from train.step.train_step import StepConfig, train_step

ALL = [(d, e, 8 // d // e) for d in (1, 2, 4, 8) for e in (1, 2, 4, 8) if 8 % (d * e) == 0]
DEFAULTS = {
    "dtype": "float64",
    "estimator": "histogram",
    "remat": "none",
    "chunk": 8192,
    "accumulation": 1,
    "documents": True,
    "buffer": None,
    "ragged": False,  # the exchange of GPUs and TPUs, emulated
    "sizes": ALL,
    "dispatches": ["gather"],
}
T = 32


def make_batch(rows: int, vocab_size: int, documents: bool, rng: np.random.Generator) -> Batch:
    ids = np.ones((rows, T), np.int32)
    if documents:
        ids = 1 + np.sort(rng.integers(0, 4, (rows, T)), axis=1).astype(np.int32)
        ids[1] = np.arange(T) // 8 + 1  # ends where shards end
        ids[3, 20:] = 0
    inputs, targets = (rng.integers(0, vocab_size, (rows, T)).astype(np.int32) for _ in "12")
    return Batch(inputs, targets, ids, np.zeros_like(ids), ids > 0)


def assert_close(where: str, a: np.ndarray, b: np.ndarray) -> None:
    scale = max(1e-3, np.max(np.abs(b)))  # of the array: Muon makes small entries of large ones
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * scale, err_msg=where)


def main(settings: dict) -> None:
    settings = DEFAULTS | settings
    dtype, buffer = settings["dtype"], settings["buffer"]
    moe = MoEConfig(num_experts=8, top_k=2, expert_hidden=8, latent_dim=16, row_block=4)
    balance_config = BalanceConfig(estimator=settings["estimator"], num_bins=40)
    model = small_config(
        layers="KM",
        dtype=dtype,
        param_dtype=dtype,
        shard_min_size=0,
        moe=moe,
        balance=balance_config,
        remat=settings["remat"],
    )
    loss_config = LossConfig(z_loss=1e-3, chunk_tokens=settings["chunk"])
    step_config = StepConfig(loss_config, settings["accumulation"])
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
    data = DataConfig(batch_size=8 * settings["accumulation"], context_length=T)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (0.5 + 0.3 * rng.standard_normal(x.shape)).astype(dtype), param_shapes(model)
    )
    batch = make_batch(data.batch_size, model.vocab_size, settings["documents"], rng)
    balance = init_balance(model.balance, model.num_moe_layers, moe.num_experts, dtype)
    state = TrainState(np.int32(0), params, optimizer.init(params), balance)
    state = jax.tree.map(np.asarray, state)

    def run(devices: list, dispatch: str, *sizes: int) -> tuple:
        mesh = make_mesh(MeshConfig(*sizes), devices)
        moe_here = MoEConfig(**(vars(moe) | {"dispatch": dispatch, "buffer_factor": buffer}))
        model_here = small_config(**(vars(model) | {"moe": moe_here}))
        step = functools.partial(
            train_step, model=model_here, config=step_config, optimizer=optimizer
        )
        with jax.set_mesh(mesh):
            shardings = state_shardings(mesh, model, state)
            rows = streams_here(mesh, data)  # a stream yields one row
            here = jax.tree.map(lambda x: x[rows], batch)
            everywhere = to_devices(mesh, here, rows, data.batch_size)
            start = jax.tree.map(
                lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]),
                state,
                shardings,
            )
            new = jax.jit(step, out_shardings=(shardings, None))(start, everywhere)
            whole = NamedSharding(mesh, PartitionSpec())  # what every process can read
            return jax.device_get(jax.jit(lambda x: x, out_shardings=whole)(new))

    if settings["ragged"]:
        emulation.install()
    (one, one_metrics) = run(jax.local_devices()[:1], "gather", 1, 1, 1)
    rtol = 1e-9 if dtype == "float64" else 1e-4
    for sizes in settings["sizes"]:
        for dispatch in settings["dispatches"]:
            new, metrics = run(jax.devices(), dispatch, *sizes)
            where = f"mesh {sizes}, {dispatch}"
            if buffer is not None:
                assert metrics["dropped"].sum() > 0, where
                continue
            np.testing.assert_array_equal(metrics["dropped"], 0)
            np.testing.assert_allclose(
                metrics["loss"], one_metrics["loss"], rtol=rtol, err_msg=where
            )
            if dtype == "float64":
                jax.tree.map(functools.partial(assert_close, where), new, one)
                jax.tree.map(functools.partial(assert_close, where), metrics, one_metrics)
                np.testing.assert_array_equal(metrics["max_vio"], one_metrics["max_vio"])
    print("equal")


if __name__ == "__main__":
    settings, processes = json.loads(sys.argv[1]), sys.argv[2:]
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_x64", settings.get("dtype", "float64") == "float64")
    num_processes = 1
    if processes:
        num_processes = int(processes[1])
        join(processes[0], num_processes, int(processes[2]))
    start_devices(MeshConfig(cpu_devices=8 // num_processes))
    main(settings)
