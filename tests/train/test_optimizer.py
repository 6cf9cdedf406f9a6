"""Per-Head Muon and AdamW against NumPy, and the learning-rate schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.step.optimizer import (
    OptimizerConfig,
    decays,
    make_optimizer,
    muon_dimension_numbers,
)
from train.step.schedule import ScheduleConfig, make_schedule

# Every parameter name: shape, and for Muon's how its matrices lie in it.
D, H, K, R, F, E, W = 12, 3, 4, 6, 10, 2, 17
MATRICES = {
    "q_proj": ((D, H, K), "per head"),
    "k_proj": ((D, H, K), "per head"),
    "v_proj": ((D, H, K), "per head"),
    "q_up": ((R, H, K), "per head"),
    "k_up": ((R, H, K), "per head"),
    "v_up": ((R, H, K), "per head"),
    "out_gate": ((D, H, K), "merge output"),
    "out_gate_up": ((R, H, K), "merge output"),
    "gate_up": ((R, H, K), "merge output"),
    "o_proj": ((H, K, D), "merge input"),
    "gate_down": ((D, R), "matrix"),
    "out_gate_down": ((D, R), "matrix"),
    "q_down": ((D, R), "matrix"),
    "kv_down": ((D, R + 2), "matrix"),
    "ffn_gate": ((D, F), "matrix"),
    "ffn_up": ((D, F), "matrix"),
    "ffn_down": ((F, D), "matrix"),
    "latent_down": ((D, R), "matrix"),
    "latent_up": ((R, D), "matrix"),
    "expert_gate": ((E, R, F), "matrix"),
    "expert_up": ((E, R, F), "matrix"),
    "expert_down": ((E, F, R), "matrix"),
}
ADAM = {
    "embedding": (W, D),
    "head": (D, W),
    "attn_norm": (D,),
    "ffn_norm": (D,),
    "final_norm": (D,),
    "out_norm": (K,),
    "q_norm": (R,),
    "kv_norm": (R,),
    "latent_norm": (R,),
    "q_conv": (4, H, K),
    "k_conv": (4, H, K),
    "v_conv": (4, H, K),
    "a_log": (H,),
    "dt_bias": (H, K),
    "beta_proj": (D, H),
    "res_query": (2, D),
    "res_norm": (2, D),
    "router": (D, E),
}
DECAYED = {*MATRICES, "embedding", "head"}
BASE = OptimizerConfig(
    learning_rate=0.1, schedule="linear", warmup_fraction=0, final_lr_fraction=1, clip_norm=None
)


SHAPES = {name: shape for name, (shape, _) in MATRICES.items()} | ADAM
# One parameter of every rule.
FEW = ("q_proj", "out_gate", "o_proj", "ffn_down", "expert_up", "head", "router", "attn_norm")


def random_tree(seed, names=FEW, leading=()):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=leading + SHAPES[name]) for name in names}


@functools.cache
def jitted(config):
    optimizer = make_optimizer(config, 100)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def run(config, params, grads):
    """Parameters after one update per entry of `grads`."""
    optimizer, step = jitted(config)
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for g in grads:
        params, state = step(params, state, jax.tree.map(jnp.asarray, g))
    return params


def newton_schulz(g):
    """Five quintic steps on one matrix, written apart from optax."""
    x = g / (np.linalg.norm(g) + 1e-8)
    for _ in range(5):
        s = x.T @ x
        x = 3.4445 * x - 4.7750 * x @ s + 2.0315 * x @ s @ s
    return x


def orthogonalised(g, view):
    """Newton-Schulz per head or on the merged matrix, times 0.2 sqrt(longer side)."""
    if view == "per head":
        parts = [newton_schulz(g[:, h]) for h in range(g.shape[1])]
        return 0.2 * np.sqrt(max(g.shape[0], g.shape[2])) * np.stack(parts, axis=1)
    if view == "merge output":
        flat = g.reshape(g.shape[0], -1)
    elif view == "merge input":
        flat = g.reshape(-1, g.shape[-1])
    elif g.ndim == 3:
        return np.stack([orthogonalised(part, view) for part in g])
    else:
        flat = g
    return 0.2 * np.sqrt(max(flat.shape)) * newton_schulz(flat).reshape(g.shape)


def adam_steps(param, grads, decay):
    m = v = 0
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        param = param - 0.1 * (direction + decay * param)
    return param


# The learning rate is a float32 number also in float64 mode, hence 1e-8.
def test_muon_and_adam_against_numpy(x64):
    params, *grads = [random_tree(seed) for seed in range(4)]
    actual = run(BASE, params, grads)
    for name in MATRICES.keys() & params:
        view, p, mu = MATRICES[name][1], params[name], 0
        for t, g in enumerate([g[name] for g in grads], 1):
            mu = 0.95 * mu + 0.05 * g
            nesterov = 0.95 * mu / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            p = p - 0.1 * (orthogonalised(nesterov, view) + 0.1 * p)
        np.testing.assert_allclose(actual[name], p, atol=1e-8, err_msg=name)
    for name in ADAM.keys() & params:
        expected = adam_steps(params[name], [g[name] for g in grads], 0.1 * (name in DECAYED))
        np.testing.assert_allclose(actual[name], expected, atol=1e-8, err_msg=name)


def test_every_parameter_has_its_rule():
    """Names that share a view share the axes, which the NumPy test checks once for each."""
    params = random_tree(0, SHAPES)
    axes = muon_dimension_numbers(params)
    assert {name for name in axes if axes[name]} == MATRICES.keys()
    of_view = {MATRICES[name][1]: axes[name] for name in FEW if name in MATRICES}
    for name, (_, view) in MATRICES.items():
        assert axes[name] == of_view[view], name
    assert decays(params) == {name: name in DECAYED for name in params}


def test_adamw_for_all(x64):
    params, *grads = [random_tree(seed) for seed in range(3)]
    actual = run(dataclasses.replace(BASE, name="adamw"), params, grads)
    for name in params:
        expected = adam_steps(params[name], [g[name] for g in grads], 0.1 * (name in DECAYED))
        np.testing.assert_allclose(actual[name], expected, atol=1e-8, err_msg=name)


def test_heads_do_not_see_each_other():
    """Another head's gradient changes nothing in a per-head matrix, but does in a merged one."""
    params, grads = random_tree(0), random_tree(1)
    other = jax.tree.map(np.copy, grads)
    other["q_proj"][:, 1] *= -3
    other["out_gate"][:, 1] *= -3
    one, two = run(BASE, params, [grads]), run(BASE, params, [other])
    np.testing.assert_allclose(one["q_proj"][:, 0], two["q_proj"][:, 0], rtol=1e-5)
    assert jnp.abs(one["out_gate"][:, 0] - two["out_gate"][:, 0]).max() > 1e-3


def test_scanned_layers_equal_single_ones():
    params, grads = (random_tree(seed, leading=(2, 3)) for seed in (0, 1))
    stacked = run(BASE, params, [grads])
    for index in np.ndindex(2, 3):
        one, g = ({name: x[index] for name, x in tree.items()} for tree in (params, grads))
        for name, expected in run(BASE, one, [g]).items():
            np.testing.assert_allclose(
                stacked[name][index], expected, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_update_size_is_that_of_adam():
    """Whatever the shape and the gradient's scale, a Muon update's RMS is about 0.2 rates."""
    rng = np.random.default_rng(0)
    shapes = {"ffn_gate": (64, 256), "o_proj": (4, 16, 64), "q_proj": (64, 4, 16)}
    params = {name: np.zeros(shape) for name, shape in shapes.items()}
    for scale in (1e-4, 1e4):
        grads = {name: scale * rng.normal(size=shape) for name, shape in shapes.items()}
        for name, update in run(BASE, params, [grads]).items():
            rms = float(jnp.sqrt(jnp.mean(update**2)))
            assert 0.8 < rms / (0.2 * 0.1) < 1.1, name


def test_weight_decay_alone():
    """Without gradients only matrices, embedding and head shrink."""
    params = random_tree(0)
    zeros = jax.tree.map(np.zeros_like, params)
    for name, value in run(BASE, params, [zeros]).items():
        factor = 0.99 if name in DECAYED else 1
        np.testing.assert_allclose(value, factor * params[name], rtol=1e-6, err_msg=name)


def test_clipping_is_by_global_norm():
    """Only the second gradient is longer than the limit."""
    params, *grads = [random_tree(seed) for seed in range(3)]
    norms = [np.sqrt(sum((x**2).sum() for x in g.values())) for g in grads]
    limit = 1.1 * norms[0]
    grads[1] = jax.tree.map(lambda x: x * 5, grads[1])
    by_hand = [grads[0], jax.tree.map(lambda x: x * limit / (5 * norms[1]), grads[1])]
    clipped = run(dataclasses.replace(BASE, clip_norm=limit), params, grads)
    expected = run(BASE, params, by_hand)
    unclipped = run(BASE, params, grads)
    for name in params:
        np.testing.assert_allclose(clipped[name], expected[name], rtol=1e-4, atol=1e-5)
        assert jnp.abs(clipped[name] - unclipped[name]).max() > 1e-3


def test_moments_take_their_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), random_tree(0))
    state = make_optimizer(dataclasses.replace(BASE, mu_dtype="bfloat16"), 100).init(params)
    size = sum(x.size for x in params.values())
    halves = sum(x.size for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16)
    assert halves == size


def test_unknown_parameter_is_named():
    params = {"block_0": {"mystery": jnp.zeros((3, 3))}}
    for call in (muon_dimension_numbers, decays, make_optimizer(BASE, 10).init):
        with pytest.raises(ValueError, match=r"'block_0/mystery' has no optimizer rule"):
            call(params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "sgd"),
        ("schedule", "wsd"),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup_fraction", 1.0),
        ("final_lr_fraction", 1.5),
        ("b1", 1.0),
        ("b2", -0.1),
        ("muon_momentum", 1.0),
        ("eps", 0.0),
        ("consistent_rms", 0.0),
        ("clip_norm", -1.0),
        ("weight_decay", -0.1),
        ("mu_dtype", "int8"),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}=.*; try"):
        dataclasses.replace(BASE, **{field: value})


def test_schedule_shape():
    config = ScheduleConfig(learning_rate=2.0, warmup_fraction=0.01, final_lr_fraction=0.1)
    rate = jax.jit(make_schedule(config, 1000))
    np.testing.assert_allclose([rate(0), rate(4), rate(9)], [0.2, 1.0, 2.0], rtol=1e-6)
    t = np.arange(10, 1000)
    cosine = 0.2 + 1.8 * 0.5 * (1 + np.cos(np.pi * (t - 9) / 990))
    np.testing.assert_allclose(jax.vmap(rate)(t), cosine, rtol=1e-4)
    np.testing.assert_allclose([rate(999), rate(5000)], 0.2, rtol=1e-5)

    linear = make_schedule(dataclasses.replace(config, schedule="linear"), 1000)
    np.testing.assert_allclose(linear(9 + 495), 1.1, rtol=1e-6)
    np.testing.assert_allclose(linear(999), 0.2, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 50])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.01, 0.99])
def test_short_runs_have_a_schedule(num_steps, warmup_fraction):
    config = ScheduleConfig(1.0, warmup_fraction=warmup_fraction, final_lr_fraction=0.5)
    rates = np.array([make_schedule(config, num_steps)(i) for i in range(num_steps)])
    assert (rates > 0).all() and (rates <= 1).all()
    np.testing.assert_allclose(rates[-1], 0.5, rtol=1e-6)


def test_both_parts_follow_the_schedule():
    """The second update's rate is half the first's, for Muon, Adam and the decay alike."""
    optimizer = make_optimizer(dataclasses.replace(BASE, final_lr_fraction=0.0), 3)
    params = {"ffn_up": jnp.ones((4, 4)), "router": jnp.ones((4, 4)), "head": jnp.ones((4, 4))}
    grads = jax.tree.map(lambda x: jnp.eye(4), params)
    state = optimizer.init(params)
    first, state = optimizer.update(grads, state, params)
    second, _ = optimizer.update(grads, state, params)
    for name in params:
        np.testing.assert_allclose(second[name], first[name] / 2, rtol=1e-5, atol=1e-7)
