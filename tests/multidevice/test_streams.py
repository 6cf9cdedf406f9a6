"""Two processes save, one resumes: neither rows nor states depend on the process count."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.multidevice.launch import free_port
from train.data.config import DataConfig
from train.data.pipeline import TrainBatches
from train.data.sources import load_source
from train.data.tokenizer import ByteTokenizer
from train.run.checkpoint import Checkpoints

PROCESS = """
import sys
rank, address, directory, num_streams = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
from train.run.processes import join
join(address, 2, rank)
from train.data.config import DataConfig
from train.data.pipeline import TrainBatches
from train.data.sources import load_source
from train.data.tokenizer import ByteTokenizer
from train.run.checkpoint import Checkpoints
from train.run.feed import streams_here, to_devices
from train.run.mesh import MeshConfig, make_mesh
config = DataConfig(batch_size=4, num_streams=num_streams)
source, _ = load_source(config)
mesh = make_mesh(MeshConfig())
streams = streams_here(mesh, config)
assert streams == ([0] if num_streams == 1 else [2 * rank, 2 * rank + 1])
batches = TrainBatches(config, source, ByteTokenizer(), streams=streams)
for _ in range(5):
    batch = next(batches)
batch = to_devices(mesh, batch, batches.rows, 4)
checkpoints = Checkpoints(directory)
checkpoints.save(5, batch._asdict(), batches.get_state(), {})
checkpoints.close()
batches.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [0, 1])  # one a row, or one whose rows lie on both
def test_two_processes_save_and_one_resumes(tmp_path, num_streams):
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), address, str(tmp_path), str(num_streams)],
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    config = DataConfig(batch_size=4, num_streams=num_streams)
    source, _ = load_source(config)
    uninterrupted = TrainBatches(config, source, ByteTokenizer())
    for _ in range(5):
        batch = next(uninterrupted)
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore_latest(jax.tree.map(jnp.asarray, batch._asdict()), {})
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored.state, batch._asdict())
    assert [state["stream"] for state in restored.data_states] == list(range(config.streams))
    resumed = TrainBatches(config, source, ByteTokenizer())
    resumed.set_state(restored.data_states)
    jax.tree.map(np.testing.assert_array_equal, next(resumed), next(uninterrupted))
    resumed.close()
    uninterrupted.close()
