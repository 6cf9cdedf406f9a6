"""Routing against golden arrays (golden/moe_*) and a NumPy oracle."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import router
from model.config import MoEConfig

route = jax.jit(router.route, static_argnums=0)
router_scores = jax.jit(router.router_scores, static_argnums=0)
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def config(**overrides):
    fields = {"num_experts": 8, "top_k": 2, "expert_hidden": 4} | overrides
    return MoEConfig(**fields)


@pytest.mark.parametrize("name", ["moe_e8_k2", "moe_e8_k2_bigbias", "moe_e16_k4_scale2446"])
def test_golden_routing(name):
    data = np.load(GOLDEN / f"{name}.npz")
    E, k = data["scores"].shape[-1], data["topk_ids"].shape[-1]
    moe = config(num_experts=E, top_k=k, routed_scaling_factor=float(data["routed_scaling_factor"]))
    x_MD = jnp.asarray(data["x"].reshape(-1, data["x"].shape[-1]))
    bias_E = jnp.asarray(data["e_score_correction_bias"])

    scores_ME = router_scores(moe, x_MD, jnp.asarray(data["gate.weight"].T))
    routing = route(moe, scores_ME, bias_E)

    np.testing.assert_allclose(routing.scores_ME, data["scores"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(routing.expert_ids_MJ, data["topk_ids"])
    np.testing.assert_allclose(routing.weights_MJ, data["topk_weights"], rtol=1e-5)
    biased_ME = data["scores"] + data["e_score_correction_bias"]
    np.testing.assert_allclose(routing.alpha_M, np.sort(biased_ME)[:, -k - 1], atol=1e-6)


@pytest.mark.parametrize(
    ("router", "combine_scores"), [("sigmoid", "unbiased"), ("softmax", "biased")]
)
def test_against_numpy_in_float64(x64, router, combine_scores):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(50, 8)), rng.normal(size=8) * 0.1
    moe = config(top_k=3, router=router, combine_scores=combine_scores, routed_scaling_factor=2.446)
    scores_ME = router_scores(moe, jnp.asarray(logits), jnp.eye(8))
    routing = route(moe, scores_ME, jnp.asarray(bias, jnp.float32))

    scores = 1 / (1 + np.exp(-logits))
    if router == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    biased = scores + bias.astype(np.float32)
    ids = np.argsort(-biased, axis=-1)[:, :3]
    chosen = np.take_along_axis(biased if combine_scores == "biased" else scores, ids, -1)
    assert routing.scores_ME.dtype == routing.weights_MJ.dtype == jnp.float64
    np.testing.assert_array_equal(routing.expert_ids_MJ, ids)
    np.testing.assert_allclose(
        routing.weights_MJ, 2.446 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-14
    )
    np.testing.assert_allclose(routing.alpha_M, np.sort(biased)[:, -4], rtol=1e-14)


def test_equal_scores_go_to_the_lower_id():
    routing = route(config(top_k=3), jnp.zeros((5, 8)), jnp.zeros(8))
    np.testing.assert_array_equal(routing.expert_ids_MJ, np.tile([0, 1, 2], (5, 1)))


def test_scores_are_fp32_for_bf16_inputs():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(16, 256)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(256, 8)), jnp.float32)
    scores = router_scores(config(), x, w)
    assert scores.dtype == jnp.float32
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_only_weights_carry_gradient(x64):
    """The bias and the cutoff are constants; weights match finite differences in the scores."""
    rng = np.random.default_rng(2)
    scores, bias = jnp.asarray(rng.uniform(size=(6, 8))), jnp.asarray(rng.normal(size=8) * 0.1)
    moe = config(top_k=3, combine_scores="biased")

    def loss(scores, bias, alpha_weight=0.0):
        routing = route(moe, scores, bias)
        return jnp.sum(jnp.sin(3 * routing.weights_MJ)) + alpha_weight * routing.alpha_M.sum()

    dscores, dbias = jax.jit(jax.grad(loss, argnums=(0, 1)))(scores, bias, 1.0)
    assert not dbias.any()
    step = 1e-6 * jnp.asarray(rng.normal(size=scores.shape))
    numeric = loss(scores + step, bias) - loss(scores - step, bias)
    np.testing.assert_allclose(jnp.sum(dscores * step) * 2, numeric, rtol=1e-6)


def test_all_scores_zero_stay_finite():
    scores = router_scores(config(), jnp.full((3, 8), -200.0), jnp.eye(8))
    routing = route(config(), scores, jnp.zeros(8))
    assert np.isfinite(routing.weights_MJ).all()
