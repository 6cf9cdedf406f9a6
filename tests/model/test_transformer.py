"""The assembled model: golden k3_tiny, gradients, packing, AttnRes, scan."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from kernels.attention_residuals import mix
from model.balance import init_balance
from model.config import ResidualConfig
from model.decoder import Context, DecoderLayer
from model.layers import rms_norm
from model.layout import blocks, layer_specs
from model.moe import LayerBalance
from model.transformer import Transformer, logical_axes, param_shapes, unembed
from tests.model.configs import small_config
from tests.model.published import read_config, read_params, to_tree

K3_TINY = Path(__file__).parents[1] / "golden" / "k3_tiny"


def relative_error(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


@functools.partial(jax.jit, static_argnames=("config", "capture"))
def forward(config, params, balance, inputs, segment_ids=None, capture=False):
    hidden, aux = Transformer(config).apply(
        {"params": params}, inputs, segment_ids, balance, capture=capture
    )
    return unembed(params, hidden), aux


def combine_matrix(seen, num_experts):
    """Order-free [M, E] form of the chosen experts' weights."""
    ids, weights = np.asarray(seen["expert_ids"]), np.asarray(seen["expert_weights"])
    out = np.zeros((len(ids), num_experts))
    np.put_along_axis(out, ids, weights, axis=1)
    return out


# --- golden: the published architecture, computed by others ---


@pytest.mark.parametrize("io", ["io_0", "io_1"])
def test_k3_tiny_states_and_logits(io):
    config = read_config(K3_TINY)
    params, balance = read_params(K3_TINY, config)
    golden = np.load(K3_TINY / f"{io}.npz")
    logits, aux = forward(config, params, balance, jnp.asarray(golden["input_ids"]), capture=True)
    layers, final = aux.intermediates[:-1], aux.intermediates[-1]
    names = {"attn_in": "attn_in", "attn_out": "attn_out", "ffn_in": "mlp_in", "ffn_out": "mlp_out"}
    for ours, theirs in (names | {"layer_out": "layer_out"}).items():
        if theirs in golden:
            for i, seen in enumerate(layers):
                assert relative_error(seen[ours], golden[theirs][i]) < 3e-4, (ours, i)
    for name in ("final_mixed", "final_normed"):
        assert relative_error(final[name], golden[name]) < 3e-4
    routers = [combine_matrix(seen, 8) for seen in layers if "expert_ids" in seen]
    assert relative_error(np.stack(routers), golden["router_combine"]) < 3e-4
    assert relative_error(logits, golden["logits"]) < 3e-4


def test_k3_tiny_packed_documents():
    config = read_config(K3_TINY)
    params, balance = read_params(K3_TINY, config)
    golden = np.load(K3_TINY / "io_packed_0.npz")
    T = golden["input_ids"].shape[1]
    ids = np.searchsorted(golden["cu_seqlens"][1:], np.arange(T), side="right") + 1
    logits, aux = forward(
        config,
        params,
        balance,
        jnp.asarray(golden["input_ids"]),
        jnp.asarray(ids[None], jnp.int32),
        capture=True,
    )
    for i, seen in enumerate(aux.intermediates[:-1]):
        assert relative_error(seen["layer_out"], golden["layer_out"][i]) < 3e-4, i
    assert relative_error(logits, golden["logits"]) < 3e-4


def test_k3_tiny_gradients(x64):
    config = read_config(K3_TINY, dtype="float64", param_dtype="float64")
    params, balance = read_params(K3_TINY, config, jnp.float64)
    golden = np.load(K3_TINY / "grads.npz")
    inputs = jnp.asarray(np.load(K3_TINY / "io_0.npz")["input_ids"])

    def loss(params):
        logits, _ = forward(config, params, balance, inputs)
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, inputs[:, 1:, None], -1).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert relative_error(value, golden["loss"]) < 1e-6
    # Where the file has no full gradient: NaN, and that leaf (or slice of it) is left out.
    shapes = load_file(K3_TINY / "model.safetensors")
    tensors = {
        name: golden[f"grad/{name}"] if f"grad/{name}" in golden else np.full(x.shape, np.nan)
        for name, x in shapes.items()
    }
    expected = jax.tree.map(np.asarray, to_tree(config, tensors))
    compared = 0
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(grads), strict=True
    ):
        known = ~np.isnan(want)
        compared += known.sum()
        if known.any():
            scale = max(np.abs(want[known]).max(), 1e-3)
            error = np.abs(np.asarray(got)[known] - want[known]).max() / scale
            assert error < 1e-5, jax.tree_util.keystr(path)
    assert compared > 40_000


# --- float64 exactness ---


def setup(**overrides):
    """A small model with every parameter random: zero pseudo-queries would hide mistakes. Made by
    NumPy, since compiling an initialiser takes longer than a whole test."""
    config = small_config(**overrides)
    rng = np.random.default_rng(0)

    def random(path, x):
        name = path[-1].key
        center, scale = (1.0, 0.1) if name.endswith("norm") else (0.0, 0.3)
        return jnp.asarray(center + scale * rng.standard_normal(x.shape))

    params = jax.tree_util.tree_map_with_path(random, param_shapes(config))
    balance = init_balance(config.balance, config.num_moe_layers, config.moe.num_experts, "float64")
    balance["bias"] += 0.1 * rng.standard_normal(balance["bias"].shape)
    return config, params, balance


def tokens(config, *shape):
    return jnp.asarray(np.random.default_rng(2).integers(0, config.vocab_size, shape), jnp.int32)


def mean_loss(config, params, balance, inputs, segment_ids=None):
    logits, aux = forward(config, params, balance, inputs, segment_ids)
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logp, inputs[:, 1:, None], -1).mean(), aux.stats["load"]


def test_gradients_match_finite_differences(x64):
    config, params, balance = setup()
    inputs = tokens(config, 2, 21)
    loss = jax.jit(lambda p: mean_loss(config, p, balance, inputs))
    (_, load), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    leaves, treedef = jax.tree.flatten(params)
    step = 1e-6
    # One random direction a leaf: every parameter takes part, and a wrong leaf is named.
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        direction = np.random.default_rng(i).standard_normal(leaves[i].shape)
        ends = []
        for sign in (1, -1):
            moved = [*leaves]
            moved[i] = leaves[i] + sign * step * direction
            value, moved_load = loss(jax.tree.unflatten(treedef, moved))
            np.testing.assert_array_equal(moved_load, load)  # the routing held still
            ends.append(float(value))
        slope = float(np.vdot(np.asarray(jax.tree.leaves(grads)[i]), direction))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=2e-5, abs=2e-9), (
            jax.tree_util.keystr(path)
        )


def test_packed_documents_equal_documents_alone(x64):
    config, params, balance = setup()
    lengths = [1, 5, 17, 2, 12]
    inputs = tokens(config, 1, 42)
    ids = np.zeros((1, 42), np.int32)
    ids[0, : sum(lengths)] = np.repeat(np.arange(1, 6), lengths)
    packed, aux = forward(config, params, balance, inputs, jnp.asarray(ids))
    # Each document in a row of its own; what follows it there cannot reach back.
    starts = np.cumsum([0, *lengths[:-1]])
    rows = jnp.stack([inputs[0, start : start + 17] for start in starts])
    alone, _ = forward(config, params, balance, rows)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        np.testing.assert_allclose(
            packed[0, start : start + length], alone[row, :length], atol=1e-9, rtol=1e-9
        )
    # Padding does not count: top_k assignments for each of the 37 real tokens.
    np.testing.assert_array_equal(aux.stats["load"].sum(-1), 37 * config.moe.top_k)


def plain_loop(config, params, balance, inputs):
    """model.md 3.1 and 3.2 as they stand: Python lists, no phases, no scan."""
    block_of, per_layer = {}, []
    for b, groups in enumerate(blocks(config)):
        for g, group in enumerate(groups):
            (spec,) = group.specs  # scan=False
            block_of[group.first_layer] = b
            per_layer.append((spec, params[f"block_{b}"][f"group_{g}"]))
    valid = jnp.ones_like(inputs, bool)
    context = Context((), None, valid)
    embedded = params["embedding"][inputs]
    mode, moe = config.residual.mode, 0
    closed, partial = [embedded], None

    def mixed(group, s):
        sources = closed if partial is None else [*closed, partial]
        return mix(sources, group["res_query"][s], group["res_norm"][s], eps=config.norm_eps)

    for i, (spec, group) in enumerate(per_layer):
        layer = DecoderLayer(config, spec)
        if mode == "block" and i and block_of[i] != block_of[i - 1]:
            closed, partial = [*closed, partial], None
        variables = {"params": group["layer_0"]}
        h = mixed(group, 0) if i else embedded
        a, _ = layer.apply(variables, h, context, method="attention")
        if mode == "full":
            closed = [*closed, a]
        else:
            partial = a if partial is None else partial + a
        h = mixed(group, 1 if i else 0)
        layer_balance = None
        if spec.ffn == "moe":
            layer_balance = LayerBalance(balance["bias"][moe], balance["bin_range"][moe])
            moe += 1
        m, _, _ = layer.apply(variables, h, layer_balance, context, method="feed_forward")
        if mode == "full":
            closed = [*closed, m]
        else:
            partial = partial + m
    sources = closed if partial is None else [*closed, partial]
    out = mix(sources, params["res_query"][0], params["res_norm"][0], eps=config.norm_eps)
    return unembed(params, rms_norm(out, params["final_norm"], config.norm_eps))


@pytest.mark.parametrize("mode,block_size", [("block", 1), ("block", 3), ("full", 1)])
def test_attention_residuals_equal_a_plain_loop(x64, mode, block_size):
    config, params, balance = setup(residual=ResidualConfig(mode, block_size), scan=False)
    inputs = tokens(config, 2, 9)
    logits, _ = forward(config, params, balance, inputs)
    expected = jax.jit(functools.partial(plain_loop, config))(params, balance, inputs)
    np.testing.assert_allclose(logits, expected, atol=1e-12, rtol=1e-11)


def unrolled(config, params):
    """Parameters of a scanned model in the layout of scan=False."""
    out = {k: v for k, v in params.items() if not k.startswith("block_")}
    for b, groups in enumerate(blocks(config)):
        block = out[f"block_{b}"] = {}
        for g, group in enumerate(groups):
            stacked = params[f"block_{b}"][f"group_{g}"]
            for r in range(group.repeats):
                copy = stacked
                if group.repeats > 1:
                    copy = jax.tree.map(lambda x, r=r: x[r], stacked)
                s = 0
                for i, spec in enumerate(group.specs):
                    num = spec.mixes_attention + spec.mixes_ffn
                    one = {"layer_0": copy[f"layer_{i}"]}
                    if num:
                        one |= {k: copy[k][s : s + num] for k in ("res_query", "res_norm")}
                    s += num
                    block[f"group_{len(block)}"] = one
    return out


@pytest.mark.parametrize(
    "mode,remat",
    [pytest.param("block", "nested", marks=pytest.mark.slow), ("none", "full"), ("none", "none")],
)
def test_scanned_equals_unrolled(x64, mode, remat):
    layers, residual = "KMKMKM", ResidualConfig(mode, 5)
    config, params, balance = setup(layers=layers, residual=residual, remat=remat)
    assert any(group.repeats > 1 for groups in blocks(config) for group in groups)
    flat = small_config(layers=layers, residual=residual, scan=False)
    inputs = tokens(config, 1, 12)

    def loss_and_grads(config, params):
        f = jax.value_and_grad(lambda p: mean_loss(config, p, balance, inputs), has_aux=True)
        return jax.jit(f)(params)

    (value, load), grads = loss_and_grads(config, params)
    (flat_value, flat_load), flat_grads = loss_and_grads(flat, unrolled(config, params))
    np.testing.assert_allclose(value, flat_value, rtol=1e-12)
    np.testing.assert_array_equal(load, flat_load)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11, rtol=1e-8),
        unrolled(config, grads),
        flat_grads,
    )


def test_every_parameter_names_its_logical_axes():
    config = small_config(dtype="float32", param_dtype="float32")
    shapes, axes = param_shapes(config), logical_axes(config)
    for (path, shape), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(axes), strict=True
    ):
        assert len(spec) == len(shape.shape), jax.tree_util.keystr(path)


def test_layout_of_k3():
    config = small_config(layers="KKKM" * 23 + "M", residual=ResidualConfig("block", 12))
    layout = blocks(config)
    assert len(layout) == 8
    specs = [s for groups in layout for g in groups for _ in range(g.repeats) for s in g.specs]
    assert specs == layer_specs(config)
    bodies = sum(len(group.specs) for groups in layout for group in groups)
    assert bodies <= 8 * 7
