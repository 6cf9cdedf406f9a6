"""When a process joins others: flags, the environment, and what is said of mistakes."""

import jax
import pytest

from train.run.processes import join

NAMES = (
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES"),
    *("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"),
)


@pytest.fixture
def joined(monkeypatch):
    """The arguments of the calls of jax.distributed.initialize, which does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_flags_are_enough(joined):
    join("localhost:1234", 2, 1)
    [arguments] = joined
    assert arguments["coordinator_address"] == "localhost:1234"
    assert (arguments["num_processes"], arguments["process_id"]) == (2, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("localhost:1234", None, None),
            "^--coordinator without --num_processes and --process_id: .*=0",
        ),
        ((None, 2, 0), "^--num_processes and --process_id without --coordinator: .*:1234"),
        (("localhost", 2, 0), "^--coordinator=localhost must be HOST:PORT .*=localhost:1234"),
        (("localhost:1234", 2, 2), "^--process_id=2 must be one of 0 to --num_processes=2 - 1"),
        (("localhost:1234", 0, 0), "^--process_id=0 must be one of 0 to --num_processes=0 - 1"),
    ],
)
def test_wrong_flags_are_refused(joined, arguments, message):
    with pytest.raises(ValueError, match=message):
        join(*arguments)
    assert not joined


@pytest.mark.parametrize(
    "platforms, env, among",
    [
        ("cpu", {}, False),
        ("cpu", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, True),
        ("cpu", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}, False),  # a shell of salloc
        ("cpu", {"SLURM_NTASKS": "2"}, False),  # the batch script itself
        ("cpu", {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ("cpu", {"TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
        ("tpu,cpu", {"TPU_SKIP_MDS_QUERY": "1"}, False),
        ("tpu,cpu", {}, True),  # JAX asks Google's metadata
    ],
)
def test_the_environment_decides(joined, monkeypatch, platforms, env, among):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        join(None, None, None)
    finally:
        jax.config.update("jax_platforms", before)
    assert bool(joined) == among


def test_an_environment_that_says_too_little_is_named(joined, monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"coordinator_address should .*--process_id=0"):
        join(None, None, None)
