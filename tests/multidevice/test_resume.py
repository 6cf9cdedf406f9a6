"""A run that changes its mesh on the way goes on as if it had not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SMALL = [
    *("--config.model.layers=KM", "--config.model.dim=32", "--config.model.dense_hidden=32"),
    *("--config.model.moe.num_experts=4", "--config.model.moe.latent_dim=16"),
    *("--config.model.shard_min_size=0", "--config.data.context_length=64"),
    *("--config.run.eval_rows=8", "--config.run.eval_every=0", "--config.run.sample_tokens=2"),
    *("--config.run.checkpoint_every=2", "--config.run.log_every=1"),
    # The schedule ends with a run, and here the first legs are shorter.
    *("--config.optimizer.final_lr_fraction=1.0", "--config.optimizer.warmup_fraction=0.0"),
]


def train(workdir: Path, cpu_devices: int, *flags: str) -> dict[int, float]:
    """The loss of every step of a run."""
    command = [sys.executable, "-m", "train", "--config=configs/tiny.py", f"--workdir={workdir}"]
    done = subprocess.run(
        [*command, *SMALL, f"--config.mesh.cpu_devices={cpu_devices}", *flags],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return {x["step"]: x["loss"] for x in map(json.loads, lines) if "loss" in x}


@pytest.mark.slow
def test_a_run_goes_on_over_other_meshes(tmp_path):
    legs = tmp_path / "legs"
    train(legs, 8, "--config.run.steps=2", "--config.mesh.expert=4", "--config.mesh.sequence=2")
    train(legs, 4, "--config.run.steps=4", "--config.mesh.expert=2")
    cut = train(legs, 1, "--config.run.steps=6")
    whole = train(tmp_path / "whole", 1, "--config.run.steps=6")
    assert sorted(cut) == sorted(whole) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(cut.values()), list(whole.values()), rtol=1e-4)
