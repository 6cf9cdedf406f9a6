"""Quantile Balancing against golden trajectories (golden/qb_*), NumPy oracles and the toy."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.balance import (
    add_stats,
    aux_loss_sum,
    balance_metrics,
    empty_stats,
    init_balance,
    kth_largest,
    layer_stats,
    update_balance,
)
from model.config import BalanceConfig, MoEConfig
from model.router import route

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
QB_FILES = ["qb_m512_n16_k4", "qb_m500_n12_k5_nondiv", "qb_m1024_n32_k2_micro4", "qb_m128_n8_k1"]
QUANTILES = ["histogram", "quantile"]


update = jax.jit(update_balance, static_argnums=(0, 4))


@functools.partial(jax.jit, static_argnums=(0, 3))
def stats_of(config, balance, scores, top_k, valid=None):
    """Statistics of one layer with its leading layer dimension."""
    valid = jnp.ones(scores.shape[0], bool) if valid is None else jnp.asarray(valid)
    moe = MoEConfig(num_experts=scores.shape[-1], top_k=top_k, expert_hidden=1)
    routing = route(moe, jnp.asarray(scores), balance["bias"][0])
    stats = layer_stats(config, routing, balance["bin_range"][0], valid)
    return jax.tree.map(lambda x: x[None], stats)


def balance_with(config, bias, dtype=jnp.float32):
    balance = init_balance(config, 1, len(bias), dtype)
    balance["bias"] = jnp.asarray(bias, dtype)[None]
    balance["bin_range"] = jnp.asarray([[min(bias) - 1, max(bias) + 1]], dtype)
    return balance


def kinds(tree):
    """Shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def random_scores(num_tokens=200, num_experts=8, seed=0):
    """Float32 scores with experts of unlike popularity."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, num_experts)) + rng.normal(size=num_experts)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


@pytest.mark.parametrize("name", QB_FILES)
def test_golden_exact_trajectory(x64, name):
    data = np.load(GOLDEN / f"{name}.npz")
    config, k = BalanceConfig("quantile"), int(data["k"])
    num_steps, m, n = data["scores"].shape
    balance = init_balance(config, 1, n, jnp.float64)
    for step in range(num_steps):
        np.testing.assert_allclose(balance["bias"][0], data["bias_in"][step], atol=1e-7)
        scores = data["scores"][step].astype(np.float64)
        stats = stats_of(config, balance, scores, k)
        np.testing.assert_array_equal(stats["load"][0], data["load_before"][step])
        balance = update(config, balance, stats, m, k)
        np.testing.assert_allclose(balance["bias"][0], data["bias_exact"][step], atol=1e-7)


@pytest.mark.parametrize("name", QB_FILES)
def test_golden_histogram(name):
    """The stored histogram gives the stored bias; the own one moves few counts, one bin at most."""
    data = np.load(GOLDEN / f"{name}.npz")
    k, num_bins = int(data["k"]), int(data["num_bins"])
    config = BalanceConfig("histogram", num_bins=num_bins)
    num_steps, m, _ = data["scores"].shape
    for step in range(num_steps):
        balance = balance_with(config, data["bias_hist_in"][step])
        stored = {"histogram": jnp.asarray(data["histogram"][step][None], jnp.int32)}
        new = update(config, balance, stored, m, k)
        np.testing.assert_allclose(new["bias"][0], data["bias_hist"][step], atol=2e-7)

        own = stats_of(config, balance, data["scores"][step], k)
        np.testing.assert_array_equal(own["load"][0], data["load_hist_in"][step])
        moved = np.asarray(own["histogram"][0], int) - data["histogram"][step]
        assert (moved != 0).sum() <= 4 and np.abs(moved.cumsum(-1)).max() <= 1
        low, high = balance["bin_range"][0]
        new = update(config, balance, own, m, k)
        np.testing.assert_allclose(
            new["bias"][0], data["bias_hist"][step], atol=float(high - low) / num_bins
        )


@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 4), (101, 4), (102, 1)])
def test_order_statistics(x64, m, k):
    """Which order statistic each estimator means, whole and fractional q (n = 6)."""
    rng = np.random.default_rng(m * 10 + k)
    bias, scores = rng.normal(size=6) * 0.3, rng.uniform(0.02, 0.98, size=(m, 6))
    alpha = np.sort(scores + bias)[:, -k - 1]
    falling = -np.sort(-(scores - alpha[:, None]), axis=0)

    exact = BalanceConfig("quantile")
    balance = balance_with(exact, bias, jnp.float64)
    new = update(exact, balance, stats_of(exact, balance, scores, k), m, k)
    expected = -falling[m * k // 6]
    np.testing.assert_allclose(new["bias"][0], expected - expected.mean(), atol=1e-14)
    np.testing.assert_allclose(
        new["bin_range"][0], [new["bias"].min() - 1, new["bias"].max() + 1], atol=1e-15
    )

    binned = BalanceConfig("histogram", num_bins=4000)
    balance = balance_with(binned, bias, jnp.float64)
    new = update(binned, balance, stats_of(binned, balance, scores, k), m, k)
    expected = -falling[-(-m * k // 6) - 1]
    width = (bias.max() - bias.min() + 2) / 4000
    np.testing.assert_allclose(new["bias"][0], expected - expected.mean(), atol=2 * width)


def test_large_q_is_exact():
    """q beyond float32's integers: one count more or less decides the bin."""
    config, n, k = BalanceConfig("histogram", num_bins=4), 3, 2
    m = 3 * 2**26 + 2  # q = 2**27 + 4/3, so ceil(q) = 2**27 + 2
    histogram = jnp.asarray([[[0, 2**27 + 1, m - 2**27 - 1, 0]] * 2 + [[0, 2**27 + 2, 0, 0]]])
    balance = init_balance(config, 1, n)
    new = update(config, balance, {"histogram": histogram}, m, k)
    # [-1, 1] in bins of 0.5: two experts just past the edge at 0, the third just before it.
    np.testing.assert_allclose(new["bias"], [[0, 0, 0]], atol=1e-6)
    fewer = histogram.at[0, 2].set(jnp.asarray([0, 2**27 - 2**26, 0, 2**27]))
    new = update(config, balance, {"histogram": fewer}, m, k)
    assert new["bias"][0, 2] - new["bias"][0, 0] > 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kth_largest_equals_sorting(x64, dtype):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 37, 3)).astype(dtype)
    values[0, :9] = values[0, 9]  # ties
    values[1, 5:20] = -np.inf
    values[1, 20, 0] = np.inf
    values[0, 30], values[0, 31] = 0.0, -0.0
    falling = -np.sort(-values, axis=1)
    select = jax.jit(kth_largest)
    for k in range(1, 38):
        np.testing.assert_array_equal(select(jnp.asarray(values), k), falling[:, k - 1])


FIGURE_5 = np.array(  # 8 tokens, 4 experts, top 1: loads (4, 3, 1, 0)
    [
        [0.5, 0.9, 0.2, 0.1],
        [0.9, 0.4, 0.8, 0.3],
        [0.9, 0.6, 0.4, 0.1],
        [0.9, 0.7, 0.2, 0.1],
        [0.7, 0.9, 0.6, 0.5],
        [0.4, 0.9, 0.5, 0.2],
        [0.7, 0.3, 0.1, 0.4],
        [0.5, 0.3, 0.9, 0.2],
    ],
    np.float32,
)


def test_one_update_balances_the_small_example():
    """An example like Figure 5 of the Kimi K3 report: (4, 3, 1, 0) -> (2, 2, 2, 2)."""
    config = BalanceConfig("quantile")
    balance = init_balance(config, 1, 4)
    before = stats_of(config, balance, FIGURE_5, 1)
    np.testing.assert_array_equal(before["load"][0], [4, 3, 1, 0])
    balance = update(config, balance, before, 8, 1)
    np.testing.assert_allclose(balance["bias"][0], [-0.175, -0.175, 0.025, 0.325], atol=1e-6)
    after = stats_of(config, balance, FIGURE_5, 1)
    np.testing.assert_array_equal(after["load"][0], [2, 2, 2, 2])


def toy_max_vio(estimator, num_steps=12):
    """model.md 5.5: m 16384, n 64, k 4, new tokens each step, N(0, 1) offsets per expert."""
    config, m, n, k = BalanceConfig(estimator), 16384, 64, 4
    rng = np.random.default_rng(0)
    offset = rng.normal(size=n)
    moe = MoEConfig(num_experts=n, top_k=k, expert_hidden=1)

    @jax.jit
    def step(balance, scores):
        routing = route(moe, scores, balance["bias"][0])
        stats = layer_stats(config, routing, balance["bin_range"][0], jnp.ones(m, bool))
        stats = jax.tree.map(lambda x: x[None], stats)
        max_vio = balance_metrics(balance, stats)["max_vio"][0]
        return update(config, balance, stats, m, k), max_vio

    balance, out = init_balance(config, 1, n), []
    for _ in range(num_steps):
        scores = 1 / (1 + np.exp(-rng.normal(size=(m, n)) - offset))
        balance, max_vio = step(balance, scores.astype(np.float32))
        out.append(float(max_vio))
    return out


@pytest.mark.parametrize("estimator", QUANTILES)
def test_toy_is_balanced_at_once(estimator):
    max_vio = toy_max_vio(estimator)
    assert max_vio[0] > 4
    assert max_vio[1] <= 0.4
    assert np.mean(max_vio[5:]) <= 0.15


@pytest.mark.parametrize("estimator", ["sign", "none"])
def test_toy_stays_unbalanced(estimator):
    assert toy_max_vio(estimator)[-1] > 4


@pytest.mark.parametrize("estimator", QUANTILES)
def test_microbatches_padding_and_order_do_not_matter(estimator):
    """Four shuffled microbatches with padding rows give the bias of the real tokens alone."""
    config, k = BalanceConfig(estimator), 2
    scores = random_scores(200)
    balance = balance_with(config, np.linspace(-0.2, 0.2, 8))
    whole = stats_of(config, balance, scores, k)
    expected = update(config, balance, whole, 200, k)

    rng = np.random.default_rng(1)
    padded = np.concatenate([scores, random_scores(56, seed=2)])
    order = rng.permutation(256)
    valid = (np.arange(256) < 200)[order]
    total = empty_stats(config, 1, 8, 256)
    for start in range(0, 256, 64):
        rows = slice(start, start + 64)
        part = stats_of(config, balance, padded[order][rows], k, valid[rows])
        assert part["load"].sum() == valid[rows].sum() * k
        total = jax.jit(add_stats)(total, part, start)
    np.testing.assert_array_equal(total["load"], whole["load"])
    if estimator == "histogram":
        np.testing.assert_array_equal(total["histogram"], whole["histogram"])
        assert (total["histogram"].sum(-1) == 200).all()
        assert total["histogram"].dtype == total["load"].dtype == jnp.int32
    actual = update(config, balance, total, jnp.int32(200), k)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("estimator", QUANTILES)
def test_layers_are_independent(estimator):
    config = BalanceConfig(estimator)
    scores = [random_scores(90, seed=seed) for seed in (3, 4)]
    one = init_balance(config, 1, 8)
    parts = [stats_of(config, one, s, 2) for s in scores]
    both = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    stacked = update(config, init_balance(config, 2, 8), both, 90, 2)
    for layer, part in enumerate(parts):
        alone = update(config, one, part, 90, 2)
        np.testing.assert_array_equal(stacked["bias"][layer], alone["bias"][0])
        np.testing.assert_array_equal(stacked["bin_range"][layer], alone["bin_range"][0])


@pytest.mark.parametrize("estimator", ["histogram", "quantile", "sign", "aux_loss", "none"])
def test_a_step_without_tokens_keeps_the_balance(estimator):
    config = BalanceConfig(estimator, ema=0.5)
    balance = balance_with(config, np.linspace(-0.3, 0.1, 8))
    stats = stats_of(config, balance, random_scores(20), 2, np.zeros(20, bool))
    assert not stats["load"].any()
    new = update(config, balance, stats, 0, 2)
    jax.tree.map(np.testing.assert_array_equal, new, balance)


@pytest.mark.parametrize("estimator", ["histogram", "quantile", "sign", "aux_loss", "none"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_structure_is_stable(x64, estimator, dtype):
    """The train step carries the balance: same tree, shapes and dtypes, in float64 mode too."""
    config = BalanceConfig(estimator, ema=0.9)
    balance = init_balance(config, 1, 8, dtype)
    stats = stats_of(config, balance, jnp.asarray(random_scores(20), dtype), 2)
    new = jax.eval_shape(lambda *args: update_balance(config, *args, 20, 2), balance, stats)
    assert kinds(new) == kinds(balance)
    assert kinds(stats) == kinds(empty_stats(config, 1, 8, 20, dtype))


@pytest.mark.parametrize("estimator", QUANTILES)
def test_ema_is_the_debiased_average_of_the_quantiles(estimator):
    plain, ema = BalanceConfig(estimator), BalanceConfig(estimator, ema=0.9)
    balance, seen = init_balance(ema, 1, 8), []
    for step in range(4):
        stats = stats_of(ema, balance, random_scores(100, seed=step), 2)
        without = {name: balance[name] for name in ("bias", "bin_range")}
        seen.append(update(plain, without, stats, 100, 2)["bias"][0])
        balance = update(ema, balance, stats, 100, 2)
        weights = 0.9 ** np.arange(step, -1, -1)
        expected = (weights[:, None] * np.array(seen)).sum(0) / weights.sum()
        np.testing.assert_allclose(balance["bias"][0], expected, atol=1e-6)
    assert balance["num_updates"] == 4


def test_sign_rule():
    config = BalanceConfig("sign", sign_step=0.01)
    balance = balance_with(config, [0.1, 0.2, 0.3, 0.4])
    stats = {"load": jnp.asarray([[5, 1, 3, 3]])}
    new = update(config, balance, stats, 6, 2)
    np.testing.assert_allclose(new["bias"], [[0.09, 0.21, 0.3, 0.4]], atol=1e-7)


def test_aux_loss_is_the_switch_loss():
    config = BalanceConfig("aux_loss", aux_loss_weight=0.5)
    scores, valid = random_scores(40), jnp.arange(40) < 30
    moe = MoEConfig(num_experts=8, top_k=2, expert_hidden=1)

    def loss(scores):
        routing = route(moe, scores, jnp.zeros(8))
        stats = layer_stats(config, routing, jnp.asarray([-1.0, 1.0]), valid)
        return aux_loss_sum(config, routing, stats["load"], valid)

    value, dscores = jax.value_and_grad(loss)(jnp.asarray(scores))
    share = (scores / scores.sum(-1, keepdims=True))[:30]
    ids = np.argsort(-scores[:30], axis=-1)[:, :2]
    fraction = np.bincount(ids.reshape(-1), minlength=8) / 60
    np.testing.assert_allclose(value / 30, 0.5 * 8 * np.sum(fraction * share.mean(0)), rtol=1e-5)
    assert not dscores[30:].any()
    assert dscores[:30, fraction.argmax()].sum() > 0  # descent empties the busiest expert


def test_statistics_carry_no_gradient():
    config = BalanceConfig("quantile")

    def total_margin(scores):
        return stats_of(config, init_balance(config, 1, 8), scores, 2)["margins"].sum()

    assert not jax.grad(total_margin)(jnp.asarray(random_scores(20))).any()


def test_metrics():
    balance = balance_with(BalanceConfig(), [-0.1, 0.0, 0.3, -0.2])
    metrics = balance_metrics(balance, {"load": jnp.asarray([[1, 2, 5, 0]])})
    expected = {"max_vio": 1.5, "min_load": 0, "max_load": 2.5, "bias_spread": 0.5}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], [value], rtol=1e-6)
    idle = balance_metrics(balance, {"load": jnp.zeros((1, 4), jnp.int32)})
    np.testing.assert_array_equal(idle["max_vio"], [-1])


def test_too_many_margins_are_refused():
    config = BalanceConfig("quantile", max_margins=1000)
    balance = init_balance(config, 1, 8)
    fits = stats_of(config, balance, random_scores(125), 2)
    update(config, balance, fits, 125, 2)
    stats = stats_of(config, balance, random_scores(126), 2)
    for call in (
        functools.partial(update, config, balance, stats, 126, 2),
        functools.partial(empty_stats, config, 1, 8, 126),
    ):
        with pytest.raises(ValueError, match=r"= 1008 .*max_margins=1000; try .*'histogram'"):
            call()
    larger = dataclasses.replace(config, max_margins=1008)
    update(larger, balance, stats, 126, 2)
