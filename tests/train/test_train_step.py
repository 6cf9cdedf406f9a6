"""The train step: accumulation, skipped updates, balance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.balance import init_balance
from model.config import BalanceConfig
from model.transformer import Transformer, param_shapes
from tests.model.configs import small_config
from train.data.batch import Batch
from train.step.loss import LossConfig
from train.step.optimizer import OptimizerConfig, make_optimizer
from train.step.state import TrainState
from train.step.train_step import StepConfig, train_step

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, name="adamw")


def make(estimator="histogram", accumulation=1):
    """(state, batch, jitted step, model) of two layers; without KDA and with parameters by NumPy,
    because compilation is what these tests cost."""
    model = small_config(layers="MM", balance=BalanceConfig(estimator=estimator, num_bins=40))
    optimizer = make_optimizer(OPTIMIZER, 10)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.5 + 0.3 * rng.standard_normal(x.shape)), param_shapes(model)
    )
    balance = init_balance(model.balance, model.num_moe_layers, model.moe.num_experts, "float64")
    state = TrainState(jnp.int32(3), params, optimizer.init(params), balance)
    shape = (4, 12)
    ids = np.repeat([[1] * 5 + [2] * 7, [1] * 12, [1] * 3 + [0] * 9, [1] * 11 + [0]], 1, axis=0)
    mask = (ids > 0) & (np.diff(ids, axis=1, append=0) == 0)
    inputs, targets = (rng.integers(0, model.vocab_size, shape).astype(np.int32) for _ in "12")
    batch = Batch(inputs, targets, ids.astype(np.int32), np.zeros(shape, np.int32), mask)
    step = functools.partial(
        train_step,
        model=model,
        config=StepConfig(LossConfig(z_loss=1e-3), accumulation),
        optimizer=optimizer,
    )
    return state, batch, jax.jit(step), model


def assert_trees_close(got, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


@pytest.mark.parametrize("estimator", ["histogram", "quantile"])
def test_accumulation_changes_nothing(x64, estimator):
    """Rows have very different numbers of tokens, so a mean of microbatch means would differ."""
    state, batch, step, _ = make(estimator)
    whole, metrics = step(state, batch)
    _, _, in_parts, _ = make(estimator, accumulation=2)
    parts, parts_metrics = in_parts(state, batch)
    assert_trees_close(parts.params, whole.params, rtol=1e-9, atol=1e-12)
    assert_trees_close(parts.balance, whole.balance, rtol=0, atol=1e-12)
    assert_trees_close(parts_metrics, metrics, rtol=1e-9, atol=1e-12)


def test_loss_is_the_mean_over_masked_in_tokens(x64):
    state, batch, step, model = make()
    _, metrics = step(state, batch)
    hidden, aux = Transformer(model).apply(
        {"params": state.params}, batch.inputs, batch.segment_ids, state.balance
    )
    logp = jax.nn.log_softmax(hidden @ state.params["head"])
    nll = -np.take_along_axis(np.asarray(logp), batch.targets[..., None], -1)[..., 0]
    assert float(metrics["loss"]) == pytest.approx(nll[batch.loss_mask].mean(), rel=1e-12)
    assert int(metrics["num_tokens"]) == batch.loss_mask.sum()
    load = np.asarray(aux.stats["load"])
    assert load.sum() == (batch.segment_ids > 0).sum() * model.moe.top_k * model.num_moe_layers
    np.testing.assert_allclose(metrics["max_vio"], load.max(1) / load.mean(1) - 1, rtol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing_but_the_count(x64):
    state, batch, step, _ = make()
    good, metrics = step(state, batch)
    assert not metrics["skipped"]
    broken = state._replace(
        params=state.params | {"head": state.params["head"].at[0, 0].set(jnp.nan)}
    )
    after, metrics = step(broken, batch)
    assert metrics["skipped"] and after.step == state.step + 1
    for name in ("params", "opt_state", "balance"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(broken, name))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), good.params, state.params)
    assert any(jax.tree.leaves(changed))


def test_bias_moves_once_and_has_no_gradient(x64):
    state, batch, step, model = make()
    after, _ = step(state, batch)
    assert np.abs(after.balance["bias"]).max() > 0
    np.testing.assert_allclose(after.balance["bias"].mean(-1), 0, atol=1e-12)

    def hidden_sum(bias):
        hidden, _ = Transformer(model).apply(
            {"params": state.params}, batch.inputs, None, state.balance | {"bias": bias}
        )
        return hidden.sum()

    np.testing.assert_array_equal(jax.grad(hidden_sum)(state.balance["bias"]), 0)


def test_aux_loss_reaches_the_router(x64):
    state, batch, step, _ = make("aux_loss")
    _, metrics = step(state, batch)
    # Perfect balance gives weight * 1 per layer; there is one MoE layer.
    assert float(metrics["aux_loss"]) == pytest.approx(1e-2, rel=0.5)
    none_state, _, none_step, _ = make("none")
    with_loss, _ = step(state, batch)
    without, _ = none_step(none_state, batch)
    routers = [
        s.params["block_0"]["group_0"]["layer_1"]["moe"]["router"] for s in (with_loss, without)
    ]
    assert np.abs(np.asarray(routers[0] - routers[1])).max() > 0
    np.testing.assert_array_equal(with_loss.balance["bias"], 0)
