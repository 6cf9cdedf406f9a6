"""Whole runs on a very small model: outputs, resume bit for bit, refusals."""

import dataclasses
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from train.config import TrainConfig, build
from train.run.checkpoint import Checkpoints, newest_step
from train.run.loop import Run


def small_run(**changes) -> TrainConfig:
    """The tiny config with two layers, for 40 steps."""
    config = tiny.get_config()
    config.update_from_flattened_dict(
        {
            "model.layers": "KM",
            "model.dim": 32,
            "model.dense_hidden": 32,
            "model.moe.expert_hidden": 16,
            "model.moe.latent_dim": 16,
            "model.kda.num_heads": 2,
            "model.kda.key_dim": 16,
            "model.kda.value_dim": 16,
            "model.mla.num_heads": 2,
            "data.context_length": 32,
            "data.batch_size": 4,
            "mesh.cpu_devices": 1,
            "run.steps": 40,
            "run.eval_every": 0,
            "run.eval_rows": 8,
            "run.sample_tokens": 4,
            "run.checkpoint_every": 20,
        }
        | changes
    )
    return build(TrainConfig, config.to_dict())


def restored(config, workdir):
    """The newest checkpoint of a run folder."""
    run = Run(config, workdir)
    state, states = run.state, run.batches.get_state()
    batch = next(run.batches)
    run.close()
    return run.resumed_from, state, states, batch


def test_resume_equals_the_uninterrupted_run(tmp_path, capsys):
    config = small_run()
    whole = Run(config, tmp_path / "whole")
    whole.train()
    text = capsys.readouterr().out
    for words in ("parameters", "tokens per step", "fresh", "MaxVio", "MFU n/a", "ETA"):
        assert words in text
    assert text.splitlines()[-1].startswith("held-out bits per byte: ")

    # A run that died after step 20 left the first checkpoint.
    shutil.copytree(tmp_path / "whole/checkpoints/20", tmp_path / "half/checkpoints/20")
    half = Run(config, tmp_path / "half")
    assert half.resumed_from == 20
    half.train()
    assert "resumed from step 20" in capsys.readouterr().out

    step_a, state_a, data_a, batch_a = restored(config, tmp_path / "whole")
    step_b, state_b, data_b, batch_b = restored(config, tmp_path / "half")
    assert step_a == step_b == 40 and int(state_a.step) == 40
    jax.tree.map(np.testing.assert_array_equal, state_a, state_b)
    jax.tree.map(np.testing.assert_array_equal, batch_a, batch_b)
    assert data_a == data_b

    text = (tmp_path / "half/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [21, 30, 40]
    assert len(lines[0]["max_vio"]) == 1  # one MoE layer
    assert any((tmp_path / "whole/tensorboard").iterdir())
    saved = json.loads((tmp_path / "whole/config.json").read_text())
    assert saved["config"]["run"]["steps"] == 40 and saved["versions"]["jax"] == jax.__version__


def test_refusals_say_what_would_work(tmp_path):
    with pytest.raises(ValueError, match="try 257"):
        Run(small_run(**{"model.vocab_size": 100}), tmp_path)
    config = small_run()
    Checkpoints(tmp_path / "checkpoints").close()
    run = Run(config, tmp_path)
    run.checkpoints.save(3, run.state, run.batches.get_state(), dataclasses.asdict(config))
    run.close()
    with pytest.raises(ValueError, match=r"try run\.steps=3"):
        Run(small_run(**{"run.steps": 2}), tmp_path)
    resumed = Run(small_run(**{"optimizer.learning_rate": 0.5}), tmp_path)
    assert "config.optimizer.learning_rate" in " ".join(resumed.changed)
    resumed.close()
    with pytest.raises(ValueError, match=r"Resume with --config\.model\.dim=32, or use"):
        Run(small_run(**{"model.dim": 48}), tmp_path)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model.kda.implementation": "magic"}, "'magic'"),
        ({"model.mla.implementation": "magic"}, "'magic'"),
        ({"model.moe.implementation": "magic"}, "'magic'"),
        ({"model.balance.estimator": "quantile", "model.balance.max_margins": 9}, "'histogram'"),
    ],
)
def test_a_refused_run_leaves_nothing_behind(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Run(small_run(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_under_way(tmp_path, number):
    config = small_run()
    run = Run(config, tmp_path)
    step_fn = run.step_fn

    def interrupted(state, batch):
        if int(state.step) == 6:
            signal.raise_signal(number)
        return step_fn(state, batch)

    run.step_fn = interrupted
    before = signal.getsignal(number)  # a background job ignores it
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert newest_step(tmp_path / "checkpoints") == 7
    assert signal.getsignal(number) is before
    assert restored(config, tmp_path)[0] == 7


def test_skipped_steps_are_counted_across_a_resume(tmp_path, capsys):
    """Learning rate and count go on; a line that a killed run cut off stays alone."""
    config = small_run(**{"run.log_every": 1, "run.steps": 4})
    run = Run(config, tmp_path)
    run.state = run.state._replace(step=jnp.int32(2))  # two steps without an update
    run.checkpoints.save(2, run.state, run.batches.get_state(), dataclasses.asdict(config))
    run.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "lo')
    Run(config, tmp_path).train()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 2, "lo'
    last = next(x for x in map(json.loads, lines[1:]) if "learning_rate" in x)
    assert last["skipped"] == 2
    assert last["learning_rate"] == float(run.schedule(last["step"] - 1 - 2))
    capsys.readouterr()


def test_too_many_skipped_steps_stop_the_run(tmp_path):
    config = small_run(
        **{"model.layers": "MM", "optimizer.learning_rate": 1e30, "run.max_skipped": 3}
    )
    run = Run(config, tmp_path)
    with pytest.raises(FloatingPointError, match=r"optimizer\.learning_rate"):
        run.train()
