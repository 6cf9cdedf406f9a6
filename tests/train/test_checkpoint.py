"""Checkpoints come back bit for bit, or are refused with the leaf that differs."""

import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.run.checkpoint import Checkpoints, newest_step

STREAMS = [{"stream": s, "position": {"parent": {"next_index": 7 + s}}} for s in range(3)]
CONFIG = {"optimizer": {"learning_rate": 1e-3}, "name": "tiny"}


class State(NamedTuple):
    step: jax.Array
    params: Any
    opt_state: Any
    balance: Any


def make_state(seed=0, dtype=jnp.float32):
    key = jax.random.key(seed)
    params = {
        "layer": {"w": jax.random.normal(key, (3, 4, 5), dtype), "scale": jnp.ones((), dtype)},
        "embedding": jax.random.normal(key, (7, 5)).astype(jnp.bfloat16),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adam(1e-3), {"layer": {"w": True, "scale": False}, "embedding": False}),
    )
    balance = {"bias": jnp.full((2, 4), jnp.nan), "counts": jnp.arange(3, dtype=jnp.int8)}
    return State(jnp.int32(seed), params, optimizer.init(params), balance)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert a.sharding == b.sharding


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Checkpoints("runs/checkpoints")  # relative on purpose
    yield found
    found.close()


def test_nothing_to_restore(checkpoints):
    assert checkpoints.restore_latest(make_state(), CONFIG) is None


def test_round_trip(checkpoints, tmp_path):
    state = make_state()
    checkpoints.save(20, state, STREAMS, CONFIG)
    checkpoints.wait()
    with_arrays = checkpoints.restore_latest(make_state(seed=1), CONFIG)
    assert_identical(with_arrays.state, state)
    assert (with_arrays.step, with_arrays.data_states, with_arrays.config) == (20, STREAMS, CONFIG)

    other_process = Checkpoints(tmp_path / "runs/checkpoints")
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    assert_identical(other_process.restore_latest(abstract, CONFIG).state, state)
    other_process.close()


def test_float64_round_trip(checkpoints, x64):
    state = make_state(dtype=jnp.float64)
    assert state.params["layer"]["w"].dtype == jnp.float64
    checkpoints.save(1, state, STREAMS, CONFIG)
    checkpoints.wait()
    assert_identical(checkpoints.restore_latest(state, CONFIG).state, state)


def test_shardings_are_those_asked_for(checkpoints):
    state = make_state()
    checkpoints.save(1, state, STREAMS, CONFIG)
    checkpoints.wait()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )
    restored = checkpoints.restore_latest(abstract, CONFIG).state
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(restored))


def test_saved_before_the_next_step_overwrites(checkpoints):
    """The save goes on in the background while donated buffers are written again."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((256, 1024))
    for i in range(1, 4):
        checkpoints.save(i, {"x": x}, STREAMS, CONFIG)
        for _ in range(3):
            x = step(x)
        checkpoints.wait()
        saved = checkpoints.restore_latest({"x": x}, CONFIG).state["x"]
        assert float(saved.min()) == float(saved.max()) == 3.0 * (i - 1)


def test_the_last_are_kept(checkpoints, tmp_path):
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": jnp.float32(step)}, STREAMS, CONFIG)
    checkpoints.save(3, {"x": jnp.float32(-1)}, STREAMS, CONFIG)  # already there: left alone
    checkpoints.wait()
    assert sorted(p.name for p in (tmp_path / "runs/checkpoints").iterdir()) == ["2", "3"]
    restored = checkpoints.restore_latest({"x": jnp.float32(0)}, CONFIG)
    assert (restored.step, float(restored.state["x"])) == (3, 3.0)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_a_half_written_checkpoint_is_not_seen(checkpoints, tmp_path):
    checkpoints.save(1, {"x": jnp.float32(1)}, STREAMS, CONFIG)
    checkpoints.wait()
    (tmp_path / "runs/checkpoints/2.orbax-checkpoint-tmp/state").mkdir(parents=True)
    again = Checkpoints(tmp_path / "runs/checkpoints")
    assert again.restore_latest({"x": jnp.float32(0)}, CONFIG).step == 1
    again.close()


def test_other_shapes_are_refused_by_name(checkpoints):
    state = make_state()
    checkpoints.save(1, state, STREAMS, CONFIG)
    checkpoints.wait()
    wider = {**state.params, "layer": {**state.params["layer"], "w": jnp.zeros((3, 4, 6))}}
    with pytest.raises(
        ValueError,
        match=r"params\.layer\.w is float32\[3, 4, 5\] there and float32\[3, 4, 6\] here",
    ):
        checkpoints.restore_latest(state._replace(params=wider), CONFIG)
    with pytest.raises(ValueError, match=r"balance\.ema is absent there and float32\[2\] here"):
        balance = {**state.balance, "ema": jnp.zeros(2)}
        checkpoints.restore_latest(state._replace(balance=balance), CONFIG)
    with pytest.raises(ValueError, match=r"opt_state\.1\.inner_state\.0\.count .* absent here"):
        checkpoints.restore_latest(state._replace(opt_state=()), CONFIG)
    with pytest.raises(ValueError, match=r"params\.embedding is bfloat16.* and float32"):
        params = {**state.params, "embedding": jnp.zeros((7, 5))}
        checkpoints.restore_latest(state._replace(params=params), CONFIG)


def test_config_fields_that_explain_other_arrays_are_named(checkpoints):
    saved = {"model": {"dim": 128, "layers": "KM"}, "run": {"steps": 3}}
    checkpoints.save(1, {"x": jnp.zeros(3)}, STREAMS, saved)
    checkpoints.wait()
    here = {"model": {"dim": 64, "layers": "KM"}, "run": {"steps": 4}}
    with pytest.raises(ValueError, match=r"Resume with --config\.model\.dim=128, or use a new"):
        checkpoints.restore_latest({"x": jnp.zeros(4)}, here)


@pytest.mark.parametrize("item", ["data", "config", "state"])
def test_a_damaged_checkpoint_is_named(checkpoints, tmp_path, item):
    checkpoints.save(7, {"x": jnp.zeros(3)}, STREAMS, CONFIG)
    checkpoints.wait()
    shutil.rmtree(tmp_path / "runs/checkpoints/7" / item)
    again = Checkpoints(tmp_path / "runs/checkpoints")
    with pytest.raises(ValueError, match=r"checkpoints/7 cannot be read .*move that folder away"):
        again.restore_latest({"x": jnp.zeros(3)}, CONFIG)
    again.close()
    assert newest_step(tmp_path / "runs/checkpoints") == 7
    assert newest_step(tmp_path / "nowhere") is None
