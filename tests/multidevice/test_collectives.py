"""What a compiled step sends between devices, and what it does not."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from model.config import MoEConfig, ResidualConfig
from tests.model.configs import small_config
from train.config import RunConfig, TrainConfig
from train.data.config import DataConfig
from train.run import hlo
from train.run.mesh import MeshConfig
from train.dryrun import compile_step
from train.step.loss import LossConfig
from train.step.optimizer import OptimizerConfig
from train.step.train_step import StepConfig

moe = MoEConfig(num_experts=8, top_k=2, expert_hidden=12, latent_dim=24, row_block=4)
config = TrainConfig(
    model=small_config(
        layers="KM", dim=40, dtype="float32", param_dtype="float32", shard_min_size=0, moe=moe,
        residual=ResidualConfig(sys.argv[4], 1),
    ),
    data=DataConfig(context_length=576, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, name="adamw"),
    step=StepConfig(LossConfig(chunk_tokens=64), 1),
    mesh=MeshConfig(*map(int, sys.argv[1:4])),
    run=RunConfig(steps=10),
)
compiled, _ = compile_step(config, jax.devices())
for one in hlo.collectives(compiled.as_text()):
    print(one.kind, one.group, one.count, one.shape)
"""
ROWS, TOKENS, DIM, LATENT, SHARED, EXPERTS, HIDDEN, WIDTH = 8, 576, 40, 8, 4, 8, 12, 24


def collectives_of(*mesh: int, residual: str = "block") -> list[tuple[str, int, list[list[int]]]]:
    """(kind, devices that take part, the dims of each result) of a step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, mesh), residual],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for line in done.stdout.splitlines():
        kind, group, _, shape = line.split(maxsplit=3)
        dims = re.findall(r"\w+\[([\d,]*)\]", shape)
        found.append((kind, int(group), [[int(n) for n in d.split(",") if n] for d in dims]))
    assert found
    return found


@pytest.mark.slow
def test_over_sequence_only_the_latent_of_all_tokens_is_gathered():
    widths = set()
    for kind, group, shapes in collectives_of(1, 1, 8):
        for dims in shapes:
            if kind == "all-gather" and TOKENS in dims:
                widths.add(dims[-1])
            elif kind == "all-to-all" and group > 1:  # no more than a device has
                assert math.prod(dims) <= ROWS * TOKENS * DIM / 8
    # The ids of documents end in the tokens themselves.
    assert widths == {TOKENS, LATENT, SHARED}


@pytest.mark.slow
def test_over_expert_no_weight_of_an_expert_is_gathered():
    gathered = set()
    for kind, group, shapes in collectives_of(1, 8, 1):
        if kind == "all-gather" and group > 1:
            gathered |= {tuple(dims) for dims in shapes}
    assert gathered  # the tokens
    assert not [dims for dims in gathered if {HIDDEN, WIDTH} <= set(dims) or EXPERTS in dims[:1]]


@pytest.mark.slow
def test_attention_residuals_send_nothing_of_a_token():
    sent = {}
    for residual in ("block", "none"):
        found = collectives_of(2, 2, 2, residual=residual)
        sent[residual] = Counter(
            (kind, tuple(dims)) for kind, _, shapes in found for dims in shapes if len(dims) > 1
        )
    more = {dims for (kind, dims), _ in (sent["block"] - sent["none"]).items()}
    # Pseudo-queries and norms, and their quarters: of a group's sublayers, and of the final mix.
    assert more and all(dims[-1] in (DIM, DIM // 4) and dims[0] <= 4 for dims in more), more
