"""Two processes of four devices each are one machine of eight: numbers, data, checkpoints, ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.multidevice.launch import (
    ROOT,
    finish,
    free_port,
    losses,
    process_flags,
    start,
)
from train.run.checkpoint import newest_step

# Of eight devices in a row, over data, expert and sequence, a process has the first or last four.
ACROSS_DATA, ACROSS_EXPERT, ACROSS_SEQUENCE = (2, 2, 2), (1, 4, 2), (1, 1, 8)
CASES = {
    "gather": {"sizes": [ACROSS_DATA, ACROSS_EXPERT, ACROSS_SEQUENCE, (8, 1, 1)]},
    "all_to_all": {"sizes": [ACROSS_DATA, ACROSS_EXPERT, (1, 8, 1)], "dispatches": ["all_to_all"]},
    "accumulation": {"sizes": [ACROSS_DATA], "accumulation": 2, "estimator": "quantile"},
}
# In float64 a row that is lost, repeated or in another place shows in every later loss.
FLOAT64 = ["--config.model.dtype=float64", "--config.model.param_dtype=float64"]
X64 = {"JAX_ENABLE_X64": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_step_equals_one_device(settings):
    address = f"localhost:{free_port()}"
    program = [sys.executable, "-m", "tests.multidevice.mesh_program", json.dumps(settings)]
    processes = [
        subprocess.Popen(
            [*program, address, "2", str(n)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for n in range(2)
    ]
    for out in finish(*processes):
        assert out.endswith("equal\n")


def two(workdir: Path, *flags: str) -> list[subprocess.Popen]:
    """A run in two processes, under way."""
    return [start(workdir, 4, *FLOAT64, *mine, *flags, **X64) for mine in process_flags(2)]


def one(workdir: Path, cpu_devices: int, *flags: str) -> None:
    finish(start(workdir, cpu_devices, *FLOAT64, *flags, **X64))


def wait_for_checkpoint(workdir: Path, processes: list[subprocess.Popen]) -> None:
    while newest_step(workdir / "checkpoints") is None:
        assert [process.poll() for process in processes] == [None, None]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run in one process on one device, with its data states at the end."""
    workdir = tmp_path_factory.mktemp("whole")
    one(workdir, 1, "--config.run.steps=12")
    return workdir


def assert_same_run(workdir: Path, whole: Path) -> None:
    """The same losses, and in the end every stream at the same place."""
    got, want = losses(workdir), losses(whole)
    assert sorted(got) == sorted(want) == list(range(1, 13))
    np.testing.assert_allclose([got[n] for n in want], list(want.values()), rtol=1e-9)
    ends = [(x / "checkpoints/12/data/metadata").read_text() for x in (workdir, whole)]
    assert json.loads(ends[0]) == json.loads(ends[1]) and len(json.loads(ends[0])) == 8


@pytest.mark.slow
def test_a_killed_run_goes_on_in_one_process(tmp_path, whole):
    processes = two(tmp_path, "--config.run.steps=12", "--config.mesh.expert=4")
    wait_for_checkpoint(tmp_path, processes)
    for process in processes:
        process.kill()
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2
    assert newest_step(tmp_path / "checkpoints") < 12
    one(tmp_path, 8, "--config.run.steps=12", "--config.mesh.expert=2", "--config.mesh.sequence=2")
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes(tmp_path, whole):
    """The tokens of every row lie on both, which run the same streams."""
    one(tmp_path, 8, "--config.run.steps=6")
    first, second = finish(*two(tmp_path, "--config.run.steps=12", "--config.mesh.sequence=8"))
    assert_same_run(tmp_path, whole)
    assert "8 x cpu (cpu) in 2 processes" in first and "resumed from step 6" in first
    for words in ("devices", "step", "loss", "sample", "held-out"):
        assert words in first and words not in second


@pytest.mark.slow
def test_ctrl_c_in_one_process_of_a_slurm_step_stops_and_saves_all(tmp_path):
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "JAX_COORDINATOR_PORT": str(free_port())}
    processes = [
        start(tmp_path, 4, "--config.run.steps=9999", **step, SLURM_PROCID=n, SLURM_LOCALID=n)
        for n in "01"
    ]
    wait_for_checkpoint(tmp_path, processes)
    processes[1].send_signal(signal.SIGINT)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    stopped = newest_step(tmp_path / "checkpoints")
    assert f"stopped; the same command resumes from step {stopped}" in errors[0]
    assert "stopped" not in errors[1]
    assert stopped == max(losses(tmp_path))


@pytest.mark.slow
def test_folders_of_their_own_are_refused(tmp_path):
    flags = process_flags(2)
    processes = [start(tmp_path / str(n), 4, *mine) for n, mine in enumerate(flags)]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 2
        assert "as --workdir one folder that all of them see" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_lost_process_ends_the_others(tmp_path):
    processes = two(tmp_path, "--config.run.steps=9999")
    wait_for_checkpoint(tmp_path, processes)
    processes[1].kill()
    processes[0].communicate(timeout=200)
    assert processes[0].returncode not in (None, 0)
