"""Two processes save, one resumes: neither rows nor states depend on the process count."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data.config import DataConfig
from train.data.pipeline import TrainBatches
from train.data.sources import load_source
from train.data.tokenizer import ByteTokenizer
from train.run.checkpoint import Checkpoints

PROCESS = """
import sys
import jax
rank, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank)
from train.data.config import DataConfig
from train.data.pipeline import TrainBatches
from train.data.sources import load_source
from train.data.tokenizer import ByteTokenizer
from train.run.checkpoint import Checkpoints
source, _ = load_source(DataConfig())
streams = range(2 * rank, 2 * rank + 2)
batches = TrainBatches(DataConfig(batch_size=4), source, ByteTokenizer(), streams=streams)
for _ in range(5):
    batch = next(batches)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
inputs = jax.make_array_from_process_local_data(sharding, batch.inputs)
checkpoints = Checkpoints(directory)
checkpoints.save(5, {"inputs": inputs}, batches.get_state(), {})
checkpoints.close()
batches.close()
"""


@pytest.mark.slow
def test_two_processes_save_and_one_resumes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), address, str(tmp_path)],
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    config = DataConfig(batch_size=4)
    source, _ = load_source(config)
    uninterrupted = TrainBatches(config, source, ByteTokenizer())
    for _ in range(5):
        batch = next(uninterrupted)
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore_latest({"inputs": jnp.zeros((4, 256), jnp.int32)}, {})
    checkpoints.close()
    np.testing.assert_array_equal(restored.state["inputs"], batch.inputs)
    resumed = TrainBatches(config, source, ByteTokenizer())
    resumed.set_state(restored.data_states)
    jax.tree.map(np.testing.assert_array_equal, next(resumed), next(uninterrupted))
    resumed.close()
    uninterrupted.close()
