"""Starts `python -m train` on a very small model, in one process or in several."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--config.model.layers=KM", "--config.model.dim=32", "--config.model.dense_hidden=32"),
    *("--config.model.moe.num_experts=4", "--config.model.moe.latent_dim=16"),
    *("--config.model.shard_min_size=0", "--config.data.context_length=64"),
    *("--config.run.eval_rows=8", "--config.run.eval_every=0", "--config.run.sample_tokens=2"),
    *("--config.run.checkpoint_every=2", "--config.run.log_every=1"),
    # The schedule ends with a run, and here the first legs are shorter.
    *("--config.optimizer.final_lr_fraction=1.0", "--config.optimizer.warmup_fraction=0.0"),
]


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def process_flags(num_processes: int) -> list[list[str]]:
    """Of each process the flags that make it one of several on this machine."""
    shared = [f"--coordinator=localhost:{free_port()}", f"--num_processes={num_processes}"]
    return [[*shared, f"--process_id={n}"] for n in range(num_processes)]


def start(workdir: Path, cpu_devices: int, *flags: str, **env: str) -> subprocess.Popen:
    """A run under way, with pipes."""
    command = [sys.executable, "-m", "train", "--config=configs/tiny.py", f"--workdir={workdir}"]
    return subprocess.Popen(
        [*command, *SMALL, f"--config.mesh.cpu_devices={cpu_devices}", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
    )


def finish(*processes: subprocess.Popen) -> list[str]:
    """What each process, which must succeed, printed."""
    results = [process.communicate(timeout=600) for process in processes]
    for process, (_, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [out for out, _ in results]


def losses(workdir: Path) -> dict[int, float]:
    """The loss of every step of a run."""
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["loss"] for x in lines if "loss" in x}
