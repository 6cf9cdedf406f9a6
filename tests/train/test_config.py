"""Configs: every file builds; a person's mistakes end in one line that says what would work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import k3_2p8t, kimi_linear_48b, small, tiny
from train.config import TrainConfig, build
from train.flags import load_config
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
        ({"mesh.expert": -1}, "at most one -1; try data=-1"),
        ({"mesh.sequence": 0}, "must be positive"),
        ({"run.steps": 0}, "run.steps=0"),
        ({"step.accumulation": 3}, r"\[1, 2, 4, 8\]"),
        ({"model.balance.ema": 1.0}, "try 0.9"),
        ({"step.loss.z_loss": -1.0}, "1e-4"),
        ({"run.seed": 2**32}, "run.seed=4294967296"),
        ({"optimizer.weight_decay": float("inf")}, "config.optimizer.weight_decay=inf"),
        ({"model.norm_eps": float("nan")}, "config.model.norm_eps=nan"),
        ({"model.mla.norm_eps": 0.0}, r"model\.mla\.norm_eps=0.0 must be positive; try 1e-06"),
        ({"model.init_std": -1.0}, "must not be negative; try 0.02"),
        ({"data.pattern": "*.md"}, "data.source='folder' as well"),
    ],
)
def test_impossible_values_say_what_would_work(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(tiny, **changes)


def test_unknown_and_mistyped_fields():
    values = tiny.get_config().to_dict()
    with pytest.raises(ValueError, match=r"did you mean config\.data\.batch_size"):
        build(TrainConfig, values | {"data": values["data"] | {"batchsize": 3}})
    with pytest.raises(ValueError, match=r"config\.run\.steps='ten' must be an int"):
        build(TrainConfig, values | {"run": values["run"] | {"steps": "ten"}})
    missing = {k: v for k, v in values.items() if k != "data"}
    with pytest.raises(ValueError, match=r"config\.data is missing"):
        build(TrainConfig, missing)


@pytest.mark.parametrize(
    "override,expected",
    [
        ("--config.optimizer.learing_rate=1", r"did you mean config\.optimizer\.learning_rate\?"),
        ("--config.dim=3", r"config\.dim does not exist; did you mean config\.model\.dim\?"),
        ("--config.run.steps=1.5", r"config\.run\.steps='1\.5' must be an int"),
        ("--config.optimizer.learning_rate=fast", "must be a float"),
        ("--config.data.shuffle=maybe", r"must be a bool \(true or false\)"),
        ("--config.model.dim=None", "must be an int"),
        ("--config.run=3", r"group of fields: config\.run\.steps"),
        ("--config.run.steps", r"did you mean --config\.run\.steps=VALUE"),
        ("--model.dim=4", r"did you mean --config\.model\.dim=4"),
        ("config.run.steps=3", "is no flag"),
        ("--steps=3", r"did you mean --config\.run\.steps=3"),
        ("--stepz=3", r"configs/base\.py lists the fields"),
    ],
)
def test_mistyped_overrides_say_what_would_work(override, expected):
    with pytest.raises(ValueError, match=expected):
        load_config("configs/tiny.py", [override])


def test_overrides_have_the_types_of_their_fields():
    config = load_config(
        "configs/tiny.py",
        [
            "--config.model.moe.latent_dim=None",
            "--config.model.kda.gate_rank=8",
            "--config.optimizer.clip_norm=2",
            "--config.data.shuffle=false",
            "--config.model.remat=none",
        ],
    )
    assert config.model.moe.latent_dim is None and config.model.kda.gate_rank == 8
    assert type(config.optimizer.clip_norm) is float
    assert config.data.shuffle is False and config.model.remat == "none"


@pytest.mark.parametrize(
    "text,expected",
    [
        ("def get_config(:", "line 1: .*SyntaxError"),
        ("import nothing_there", "line 1: No module named 'nothing_there'"),
        ("\0", "SyntaxError|null bytes"),
        ("x = 1", "'get_config'.*configs/tiny.py shows"),
        ("def get_config():\n    return 3", "configs/tiny.py shows"),
        ("def get_config():\n    raise ValueError('try 4')", "line 2: try 4$"),
    ],
)
def test_broken_config_files_are_named(tmp_path, text, expected):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.py.*({expected})"):
        load_config(str(tmp_path / "broken.py"))


@pytest.mark.parametrize(
    "argument,expected",
    [
        (None, r"--config is missing; try --config=configs/tiny\.py"),
        ("configs/smol.py", r"try --config=configs/small\.py"),
        ("tiny", r"no config file; .*configs/small\.py"),
        ("configs", "no config file"),
        ("configs/missing.py", "no config file"),
        ("configs/small.py:foo", r"takes no :foo; try --config=configs/small\.py"),
        ("configs/tiny.py:foo", r"try configs/tiny\.py:balance"),
    ],
)
def test_other_files_are_refused(argument, expected):
    with pytest.raises(ValueError, match=expected):
        load_config(argument)


@pytest.mark.parametrize(
    "program,arguments,expected",
    [
        ("train.params", ["--config=configs/tiny.py", "--config.model.moe.top_k=99"], "try 4"),
        ("train.params", ["--config"], "--config"),
        ("train.params", ["configs/tiny.py"], "did you mean --config=configs/tiny.py?"),
        ("train", ["--config=configs/tiny.py"], "--workdir=runs/tiny"),
        ("train", ["--config=configs/tiny.py", "--workdir=README.md"], "is a file"),
    ],
)
def test_command_line_mistakes_are_one_line(program, arguments, expected):
    done = python(program, *arguments)
    assert done.returncode == 2
    assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_missing_platform_is_one_line(tmp_path):
    arguments = "--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"
    done = python("train", *arguments, JAX_PLATFORMS="cuda_of_nobody")
    assert "set JAX_PLATFORMS=cpu" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_help_shows_config():
    done = python("train.params", "--help")
    assert "--config" in done.stdout


def python(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )


def test_layouts_change_what_they_name():
    file, long = "configs/k3_2p8t.py", "v5p:16x16x32/1048576"
    changed = load_config(file, ["--config.mesh.sequence=4"], layout=long)
    assert (changed.data.batch_size, changed.data.context_length) == (32, 2**20)
    assert (changed.mesh.expert, changed.mesh.sequence) == (32, 4)  # the command line has the word
    assert changed.model.kda == load_config(file).model.kda
    assert load_config(file, likely=["v5p:2x2x1", long]) == load_config(file, layout=long)
    assert load_config(file, likely=["v5p:2x2x1"]) == load_config(file)
    for file in ("k3_2p8t", "kimi_linear_48b"):
        for name in load_config(f"configs/{file}.py").layouts:
            load_config(f"configs/{file}.py", layout=name)
    with pytest.raises(ValueError, match="none of the config's layouts; there are v5p"):
        load_config("configs/k3_2p8t.py", layout="v5p")


def test_layouts_are_groups_of_fields(tmp_path):
    values = tiny.get_config().to_dict()
    del values["layouts"]
    assert build(TrainConfig, values).layouts == {}
    with pytest.raises(ValueError, match=r"config\.layouts='foo' must be a group of fields"):
        load_config("configs/tiny.py", ["--config.layouts=foo"])
    file = tmp_path / "x.py"
    file.write_text("def get_config():\n    return {'layouts': {'a': 'remat'}}\n")
    with pytest.raises(ValueError, match="must be groups of fields by name"):
        load_config(str(file), layout="a")
