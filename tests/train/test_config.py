"""Configs: every file builds; a person's mistakes end in one line that says what would work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import k3_2p8t, kimi_linear_48b, small, tiny
from train.config import TrainConfig, build
from train.run.flops import count_params, forward_flops_per_token

ROOT = Path(__file__).parents[2]


def resolved(module, **changes) -> TrainConfig:
    config = module.get_config()
    config.update_from_flattened_dict(changes)
    return build(TrainConfig, config.to_dict())


def test_k3_has_every_published_parameter():
    config = resolved(k3_2p8t).model
    counts = count_params(config)
    unused = 2 * config.dim  # layer 0's attention mix, which only the checkpoint has
    assert counts.total == 2_779_484_379_232
    assert counts.total + unused == 2_779_484_393_568
    assert counts.active + unused == 104_189_530_208
    assert counts.active_with_embedding + unused == 105_363_935_328
    assert (config.layers.count("K"), config.layers.count("M")) == (69, 24)


def test_kimi_linear_counts():
    counts = count_params(resolved(kimi_linear_48b).model)
    assert counts.total == pytest.approx(49.1e9, rel=1e-3)
    assert counts.active - counts.parts["head"] == pytest.approx(2.73e9, rel=2e-3)


@pytest.mark.parametrize("module", [tiny, small])
def test_other_configs_build(module):
    assert count_params(resolved(module).model).total > 1e6


def test_flops_against_a_hand_count():
    """A one-layer-each model, counted by hand from the formulas of model.md."""
    config = resolved(
        tiny, **{"model.layers": "KM", "model.num_dense_layers": 1, "model.vocab_size": 300}
    ).model
    D, W, T = 128, 300, 256
    kda = 3 * D * 128 + D * 32 + 32 * 128 + D * 4 + D * 128 + 128 * D
    mla = D * 4 * 48 + D * (64 + 16) + 64 * 4 * (32 + 32) + 2 * D * 128
    moe = 16 * D + 2 * D * 64 + 2 * 3 * 64 * 64 + 3 * D * 64
    matmul = kda + mla + moe + 3 * D * 512 + D * W
    extra = 2 * 4 * (48 + 32) * T / 2 + 6 * 4 * 32 * 32
    assert forward_flops_per_token(config, T) == 2 * matmul + extra


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model.kda.gate_kind": "clamped"}, "bounded, softplus"),
        ({"model.layers": "KKX"}, "KKKM"),
        ({"model.moe.top_k": 16}, "try 4"),
        ({"model.num_dense_layers": 4}, "MoE layer; try 1"),
        ({"model.kda.chunk_size": 20}, "try 64"),
        ({"run.sample_tokens": -1}, "run.sample_tokens=-1"),
        ({"model.kda.num_value_heads": 6}, "try 8"),
        ({"mesh.expert": 2}, "mesh.expert=1"),
        ({"run.steps": 0}, "run.steps=0"),
        ({"step.accumulation": 3}, r"\[1, 2, 4, 8\]"),
        ({"model.balance.ema": 1.0}, "try 0.9"),
        ({"step.loss.z_loss": -1.0}, "1e-4"),
    ],
)
def test_impossible_values_say_what_would_work(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(tiny, **changes)


def test_unknown_and_mistyped_fields():
    values = tiny.get_config().to_dict()
    with pytest.raises(ValueError, match=r"did you mean config\.data\.batch_size"):
        build(TrainConfig, values | {"data": values["data"] | {"batchsize": 3}})
    with pytest.raises(ValueError, match=r"config\.run\.steps='ten' is of type str"):
        build(TrainConfig, values | {"run": values["run"] | {"steps": "ten"}})
    missing = {k: v for k, v in values.items() if k != "data"}
    with pytest.raises(ValueError, match=r"config\.data is missing"):
        build(TrainConfig, missing)


@pytest.mark.parametrize(
    "argument,expected",
    [
        ("--config.optimizer.learing_rate=1", 'Did you mean "learning_rate"'),
        ("--config.run.steps=many", "run.steps=many"),
        ("--config.model.moe.top_k=99", "try 4"),
        ("--config=configs/missing.py", "missing.py"),
        ("--config=configs/tiny.py:foo", "try configs/tiny.py:balance"),
        ("config.run.steps=3", "is no flag"),
    ],
)
def test_command_line_mistakes_are_one_line(argument, expected):
    command = [sys.executable, "-m", "train.params", "--config=configs/tiny.py", argument]
    if argument.startswith("--config="):
        command.pop(-2)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 2
    assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
