"""SiTU-GLU, Gated MLA, LatentMoE against golden arrays with gradients; dispatch; convolution."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import MLAConfig, MoEConfig
from model.dispatch import dispatch, make_plan, num_rows, undispatch
from model.ffn import glu, situ_glu
from model.layers import einsum, short_conv
from model.mla import MLALayer
from model.moe import LayerBalance, MoE
from model.sharding import Part
from tests.model.configs import small_config
from tests.model.published import mla_tree, moe_tree

GOLDEN = Path(__file__).parents[1] / "golden"


def load(name):
    return {key: np.asarray(x) for key, x in np.load(GOLDEN / f"{name}.npz").items()}


def assert_close(got, want, bound=1e-5, label=""):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= bound * np.abs(want).max(), label


def assert_trees_close(got, want, bound=1e-5):
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert_close(got[path], value, bound, jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", ["situ", "situ_no_linear_beta"])
def test_situ_glu(name):
    g = load(name)
    beta, linear_beta = float(g["beta"]), float(g["linear_beta"]) or None
    f = functools.partial(situ_glu, beta=beta, linear_beta=linear_beta)
    output, vjp = jax.vjp(f, g["gate"], g["up"])
    assert_close(output, g["output"])
    for got, want in zip(vjp(g["doutput"]), (g["dgate"], g["dup"]), strict=True):
        assert_close(got, want)


def test_situ_glu_limits_and_swiglu():
    x = jnp.linspace(-1e4, 1e4, 101)
    assert np.abs(situ_glu(x, x[::-1], 4.0, 25.0)).max() <= 100
    small = x * 1e-6
    swiglu = glu(small, x, small_config(activation="swiglu"))
    np.testing.assert_allclose(swiglu, jax.nn.silu(small) * x, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "head_block"),
    [
        ("mla_b2_t24_h4", None),
        ("mla_b2_t24_h4", 2),
        ("mla_b1_t40_h3_odd", 1),
        ("mla_b2_t16_noqlora_nogate", None),
    ],
)
def test_gated_mla(name, head_block):
    g = load(name)
    q_down = g.get("q_a_proj.weight")
    mla = MLAConfig(
        num_heads=int(g["num_heads"]),
        q_lora_rank=None if q_down is None else q_down.shape[0],
        kv_lora_rank=g["kv_a_layernorm.weight"].shape[0],
        nope_dim=int(g["qk_nope_head_dim"]),
        rope_dim=int(g["qk_rope_head_dim"]),
        value_dim=int(g["v_head_dim"]),
        output_gate="g_proj.weight" in g,
        norm_eps=float(g["norm_eps"]),
        head_block=head_block,
    )
    config = small_config(dim=64, mla=mla, dtype="float32", param_dtype="float32")
    params = mla_tree(lambda name: g[name], mla)

    @jax.jit
    def run(params, x, dy):
        layer = lambda params, x: MLALayer(config).apply({"params": params}, x, None)  # noqa: E731
        y, vjp = jax.vjp(layer, params, x)
        return y, *vjp(dy)

    y, dparams, dx = run(jax.tree.map(jnp.asarray, params), g["x"], g["dy"])
    assert_close(y, g["y"])
    assert_close(dx, g["dx"])
    assert_trees_close(dparams, mla_tree(lambda name: g["grad." + name], mla))


@pytest.mark.parametrize("name", ["moe_e8_k2", "moe_e8_k2_bigbias", "moe_e16_k4_scale2446"])
@pytest.mark.parametrize("row_block", [1, 8])
def test_latent_moe(name, row_block):
    g = load(name)
    D, F = g["x"].shape[-1], g["experts.w1"].shape[1]
    moe = MoEConfig(
        num_experts=g["gate.weight"].shape[0],
        top_k=g["topk_ids"].shape[-1],
        expert_hidden=F,
        num_shared_experts=g["shared_experts.gate_proj.weight"].shape[0] // F,
        latent_dim=g["experts.w1"].shape[2],
        latent_norm=bool(g["use_latent_norm"]),
        routed_scaling_factor=float(g["routed_scaling_factor"]),
        row_block=row_block,
    )
    config = small_config(
        dim=D, moe=moe, norm_eps=float(g["rms_norm_eps"]), dtype="float32", param_dtype="float32"
    )
    bias = jnp.asarray(g["e_score_correction_bias"])
    balance = LayerBalance(bias, jnp.stack([bias.min() - 1, bias.max() + 1]))
    x = jnp.asarray(g["x"])

    @jax.jit
    def run(params, x, dy):
        def layer(params, x):
            return MoE(config).apply({"params": params}, x, balance, jnp.ones(x.shape[:2], bool))

        y, vjp, out = jax.vjp(layer, params, x, has_aux=True)
        return y, out, *vjp(dy)

    params = jax.tree.map(jnp.asarray, moe_tree(lambda name: g[name], moe))
    y, out, dparams, dx = run(params, x, g["dy"])
    assert_close(y, g["y"])
    np.testing.assert_array_equal(out.routing.expert_ids_MJ, g["topk_ids"])
    assert_close(out.routing.weights_MJ, g["topk_weights"])
    counts = np.bincount(g["topk_ids"].reshape(-1), minlength=moe.num_experts)
    np.testing.assert_array_equal(out.stats["load"], counts)
    assert_close(dx, g["dx"])
    assert_trees_close(dparams, moe_tree(lambda name: g["grad." + name], moe))


@pytest.mark.parametrize("latent_dim,num_shared", [(None, 1), (8, 0)])
def test_moe_without_latent_or_shared_experts(x64, latent_dim, num_shared):
    """Against every expert applied to every token."""
    base = small_config()
    moe = dataclasses.replace(
        base.moe, latent_dim=latent_dim, num_shared_experts=num_shared, latent_norm=False
    )
    config = dataclasses.replace(base, moe=moe)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, config.dim)))
    balance = LayerBalance(jnp.zeros(moe.num_experts), jnp.array([-1.0, 1.0]))
    module, valid = MoE(config), jnp.ones((2, 5), bool)
    params = jax.jit(module.init)(jax.random.key(0), x, balance, valid)
    y, out = jax.jit(module.apply)(params, x, balance, valid)
    p = params["params"]
    p = jax.tree.map(lambda leaf: leaf.value, p, is_leaf=lambda leaf: hasattr(leaf, "value"))
    z = x @ p["latent_down"] if latent_dim else x
    hidden = glu(
        jnp.einsum("btr,erf->btef", z, p["expert_gate"]),
        jnp.einsum("btr,erf->btef", z, p["expert_up"]),
        config,
    )
    every = jnp.einsum("btef,efr->bter", hidden, p["expert_down"])
    combine = np.zeros((10, moe.num_experts))
    np.put_along_axis(combine, np.asarray(out.routing.expert_ids_MJ), out.routing.weights_MJ, 1)
    want = jnp.einsum("bter,bte->btr", every, combine.reshape(2, 5, -1))
    if latent_dim:
        want = want @ p["latent_up"]
    if num_shared:
        s = p["shared"]
        want += glu(x @ s["ffn_gate"], x @ s["ffn_up"], config) @ s["ffn_down"]
    np.testing.assert_allclose(y, want, atol=1e-12)


@pytest.mark.parametrize("row_block", [1, 4, 64])
@pytest.mark.parametrize("load", ["even", "one expert", "empty experts"])
def test_dispatch_drops_nothing(row_block, load):
    rng = np.random.default_rng(0)
    M, J, E = 13, 3, 5
    ids = np.stack([rng.permutation(E)[:J] for _ in range(M)])
    if load == "one expert":
        ids = np.full((M, 1), 2)
    elif load == "empty experts":
        ids = np.stack([rng.permutation([0, 2, 4]) for _ in range(M)])
    plan = jax.jit(make_plan, static_argnums=(1, 2))(jnp.asarray(ids, jnp.int32), E, row_block)
    sizes = np.asarray(plan.group_sizes_E)
    counts = np.bincount(ids.reshape(-1), minlength=E)
    np.testing.assert_array_equal(sizes, -(-counts // row_block) * row_block)
    assert int(plan.filled_R.sum()) == ids.size
    assert sizes.sum() <= num_rows(ids.size, E, row_block) == plan.filled_R.shape[0]
    # Every row lies in its expert's group, and comes back to the token that sent it.
    x = jnp.asarray(rng.standard_normal((M, 2)), jnp.float32)
    rows = dispatch(x, plan)
    expert_of_row = np.repeat(np.arange(E), sizes)
    np.testing.assert_array_equal(expert_of_row[plan.row_of_assignment_MJ], ids)
    back = undispatch(rows, plan)
    np.testing.assert_array_equal(back, np.repeat(np.asarray(x)[:, None], ids.shape[1], 1))
    np.testing.assert_array_equal(rows[~np.asarray(plan.filled_R)], 0)
    # The hand-written gradients are those of the gathers.
    weight = jnp.asarray(rng.standard_normal(rows.shape), jnp.float32)
    plain = jax.grad(
        lambda x: jnp.sum(jnp.where(plan.filled_R[:, None], x[plan.token_of_row_R], 0) * weight)
    )(x)
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(dispatch(x, plan) * weight))(x), plain, atol=1e-6
    )
    weight = jnp.asarray(rng.standard_normal(back.shape), jnp.float32)
    plain = jax.grad(lambda rows: jnp.sum(rows[plan.row_of_assignment_MJ] * weight))(rows)
    np.testing.assert_allclose(
        jax.grad(lambda rows: jnp.sum(undispatch(rows, plan) * weight))(rows), plain, atol=1e-6
    )


@pytest.mark.parametrize("layout", ["rows", "group_rows"])
def test_what_finds_no_row_is_counted_and_zero(layout):
    """Ids of other groups have no row here either, but nobody misses them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, (40, 2))  # of groups 0 to 2; 3 is elsewhere
    room = {"rows": 24} if layout == "rows" else {"group_rows": 8}
    plan = make_plan(jnp.asarray(ids, jnp.int32), 3, 4, **room)
    sizes, counts = np.asarray(plan.group_sizes_E), np.bincount(ids.reshape(-1), minlength=4)[:3]
    placed = np.asarray(plan.row_of_assignment_MJ) < 24
    assert sizes.sum() <= 24 and sizes[0] % 4 == 0
    assert placed.sum() == plan.filled_R.sum() < counts.sum()
    assert int(plan.dropped) == counts.sum() - placed.sum()
    x = jnp.asarray(rng.standard_normal((40, 2)), jnp.float32)
    back = undispatch(dispatch(x, plan), plan)
    want = np.repeat(np.asarray(x)[:, None], 2, 1) * placed[..., None]
    np.testing.assert_array_equal(back, want)
    group_of_row = np.repeat(np.arange(3), sizes)
    rows = np.asarray(plan.row_of_assignment_MJ)[placed]
    np.testing.assert_array_equal(group_of_row[rows], ids[placed])


def test_short_conv_stays_inside_segments(x64):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 9, 2, 3)), rng.standard_normal((4, 2, 3))
    ids = np.array([[1, 1, 1, 2, 3, 3, 3, 3, 3], [1] * 7 + [0] * 2])
    want = np.zeros_like(x)
    for b in range(2):
        for t in range(9):
            for lag in range(4):
                if t >= lag and ids[b, t] == ids[b, t - lag]:
                    want[b, t] += x[b, t - lag] * w[3 - lag]
    got = short_conv(jnp.asarray(x), jnp.asarray(w), jnp.asarray(ids))
    np.testing.assert_allclose(got, want / (1 + np.exp(-want)), atol=1e-12)
    short = short_conv(jnp.asarray(x[:, :2]), jnp.asarray(w), None)
    np.testing.assert_allclose(short, got[:, :2], atol=1e-12)


@pytest.mark.parametrize("spec,shape", [("btd,dhk->bthk", (4, 2, 3)), ("bthv,hvd->btd", (2, 3, 5))])
def test_einsum_gradients(x64, spec, shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 6, 4) if shape[0] == 4 else (2, 6, 2, 3)))
    w = jnp.asarray(rng.standard_normal(shape))
    y, vjp = jax.vjp(lambda x, w: einsum(spec, x, Part(w)), x, w)
    _, plain = jax.vjp(functools.partial(jnp.einsum, spec), x, w)
    dy = jnp.asarray(rng.standard_normal(y.shape))
    for got, want in zip(vjp(dy), plain(dy), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)
    half = jax.vjp(lambda x, w: einsum(spec, x, Part(w)), x.astype(jnp.bfloat16), w)[1]
    dx, dw = half(dy.astype(jnp.bfloat16))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float64)
