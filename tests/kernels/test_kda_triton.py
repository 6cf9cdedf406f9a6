"""What only the Triton kernels promise: that they lower for a GPU, and what they are made of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from kernels.kda import chunk, kda, pallas_triton
from kernels.kda.operands import KdaInputs, KdaOptions
from kernels.kda.triton import pieces
from kernels.kda.triton.inverse import unit_lower_inverse
from kernels.kda.triton.plan import Plan
from tests.kernels.kda_cases import (
    as_arrays,
    assert_close,
    cotangents,
    evaluate,
    finished_inputs,
    first_tokens,
    prefix_cotangent,
    random_inputs,
    relative_rms,
    rounded,
    truth,
    with_another_future,
)

KERNELS = ("prepare", "scan", "prepare_again", "reverse", "solve_vjp", "grads")

CASES = {
    "bfloat16": {},
    "float32": {"dtype": jnp.float32},
    "softplus": {"gate_kind": "softplus"},
    "no_promise": {"gate_kind": "log_decay", "lower_bound": None},
    "documents": {"segments": True, "lengths": True, "group": 2},
    "wide_heads": {"key_dim": 256, "value_dim": 256, "use_qk_l2norm": False},
}


def lower_for_cuda(
    dtype=jnp.bfloat16,
    key_dim=128,
    value_dim=128,
    group=1,
    segments=False,
    lengths=False,
    gate_kind="bounded",
    lower_bound=-5.0,
    use_qk_l2norm=True,
):
    """The lowered text of outputs and gradients, with no GPU at hand."""
    options = KdaOptions(gate_kind, lower_bound, True, use_qk_l2norm, 0.1, 64)
    plan = Plan(options, 64, group, jnp.dtype(dtype), jnp.dtype(jnp.float32), interpret=False)
    batch, num_tokens, num_heads = 2, 128, 2 * group

    def x(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct((batch, *dims), dtype)

    inputs = KdaInputs(
        x(num_tokens, 2, key_dim),
        x(num_tokens, 2, key_dim),
        x(num_tokens, num_heads, value_dim),
        x(num_tokens, num_heads, key_dim),
        x(num_tokens, num_heads),
        None,
        None,
        x(num_heads, key_dim, value_dim, dtype=jnp.float32),
        x(num_tokens, dtype=jnp.int32) if segments else None,
        x(dtype=jnp.int32) if lengths else None,
    )

    def run(inputs, do, d_state):
        outputs, vjp = jax.vjp(lambda inputs: pallas_triton._kda(plan, inputs), inputs)
        return outputs, vjp((do, d_state))

    traced = jax.jit(run).trace(inputs, inputs.v_BTHV, inputs.initial_state_BHKV)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_UNIT", 1)


def abstract_gpus(**axes):
    """A mesh with nothing behind it. From jax 0.11 on, Triton lowering asks it for the device."""
    options = {}
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
        options = {"abstract_device": device}
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, **options)


def assert_kernels(text, kernels=KERNELS):
    for kernel in kernels:
        assert f'name = "kda_{kernel}"' in text, kernel


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_lowers_for_cuda(case):
    with jax.sharding.use_abstract_mesh(abstract_gpus(x=1)):
        assert_kernels(lower_for_cuda(**CASES[case]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("residuals", ["default", "lean", "full"])
def test_every_kernel_lowers_for_cuda_inside_shard_map(monkeypatch, short_pieces, residuals):
    """The types that shard_map checks fit, those of pieces included."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = abstract_gpus(data=2, heads=2)
    inputs = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.ndim > 2 else jnp.float32)
        for name, x in random_inputs(2, 320, 2, 2, 64, 64).items()
    }
    inputs["initial_state"] = inputs["initial_state"].update(dtype=jnp.float32)
    specs = {name: P("data", None, "heads") for name in ("q", "k", "v", "gate", "beta")}
    specs |= {"a_log": P("heads"), "dt_bias": P("heads"), "initial_state": P("data", "heads")}
    call = partial(kda, implementation="pallas_triton", num_splits=3, residuals=residuals)
    out_specs = P("data", None, "heads"), P("data", "heads")
    sharded = jax.shard_map(
        lambda inputs: call(**inputs), mesh=mesh, in_specs=(specs,), out_specs=out_specs
    )

    def loss(inputs):
        return sum(jnp.sum(jnp.square(x)) for x in sharded(inputs))

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    absent = {"prepare_again"} if residuals != "default" else set()
    assert_kernels(text, {*KERNELS, "link"} - absent)


@pytest.mark.parametrize("num_rows, log_tile", [(64, 0), (64, 4), (32, 0), (32, 4), (32, 5)])
def test_splits_cover_every_pair_once_and_look_back_only(num_rows, log_tile):
    masks = chunk.masks(num_rows, log_tile)
    pairs = [chunk.pairs(num_rows, log_tile, n) for n in range(len(masks.splits))]
    np.testing.assert_array_equal(np.sum(pairs, axis=0), np.tri(num_rows, k=-1))
    through, behind = masks.sums
    np.testing.assert_array_equal(through, np.tri(num_rows))
    np.testing.assert_array_equal(behind, ~np.tri(num_rows, dtype=bool))
    for span, split in zip(masks.splits, pairs, strict=True):
        rows, columns = np.nonzero(split)
        # What the row sums lies behind the column and not behind the row, and likewise for the
        # column: together, exactly the rows in between (halvings), or their difference (tiles).
        for i, j in zip(rows, columns, strict=True):
            between = (np.arange(num_rows) > j) & (np.arange(num_rows) <= i)
            joined = span[i] ^ span[j]
            np.testing.assert_array_equal(joined, between)
            assert not span[i, i + 1 :].any()


def decays_of(g_RK, log_tile, lower_bound=-5.0):
    """Of log-decays in float64 that come in float32, in multiples of something."""
    unit = 2.0**-13
    masks = chunk.masks(len(g_RK), log_tile)
    masks = chunk.Masks(*(jnp.asarray(m, jnp.float32) for m in masks))
    return chunk.Decays(
        jnp.asarray(g_RK / unit, jnp.float32),
        masks._replace(splits=masks.splits * unit, sums=masks.sums * unit),
        unit,
        lower_bound * np.log2(np.e),
        log_tile,
        lambda x_RK: lambda mask_RR: jnp.matmul(mask_RR, x_RK, precision="highest"),
        jnp.exp2,
    )


TILES = pytest.mark.parametrize("num_rows, log_tile", [(32, 5), (32, 4), (16, 4), (64, 4), (32, 0)])


@TILES
@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, pytest.param(-5.5, id="for 16 rows at most")])
@pytest.mark.parametrize("weakest", [0.0, 0.999])
def test_decay_factors_are_exact(num_rows, log_tile, lower_bound, weakest):
    """Up to the strongest decay that the tile is for."""
    if log_tile == 5:
        lower_bound = max(lower_bound, -5.0)
    g_RK = 1 - weakest * np.random.default_rng(0).random((num_rows, 16))
    g_RK *= lower_bound * np.log2(np.e)
    decays = decays_of(g_RK, log_tile, lower_bound)
    through_RK, total_1K = np.cumsum(g_RK, axis=0), g_RK.sum(axis=0, keepdims=True)
    shifted_RK = decays.from_start_shifted()
    assert np.all(np.isfinite(shifted_RK))
    want = {
        "from_start": (decays.from_start(), through_RK),
        "shifted": (np.float64(shifted_RK) * decays.start_factor, through_RK),
        "to_end": (decays.to_end(), total_1K - through_RK),
        "total": (decays.total(), total_1K),
    }
    for name, (got, exponent) in want.items():
        # float32 ends at 2 ** -126, and keeps 2 ** -24 of an exponent.
        np.testing.assert_allclose(got, np.exp2(exponent), 1e-4, 2.0**-126, err_msg=name)
    np.testing.assert_allclose(decays.to_end()[-1], 1.0, 1e-6)


@TILES
@pytest.mark.parametrize("g", [0.0, -1e-8, -1e-6, -1e-4])
def test_the_weakest_decays_add_up(num_rows, log_tile, g):
    """What a chunk does to the state, a million tokens do 16384 times: float32's last bits only."""
    decays = decays_of(np.full((num_rows, 16), g), log_tile)
    np.testing.assert_allclose(decays.total(), np.exp2(np.float64(num_rows * g)), 1.5e-7)


@pytest.mark.parametrize("bound", [-1e-3, -0.5, -5.0, -7.0])
def test_bounded_log_decays_fit_float16(bound):
    options = KdaOptions("bounded", bound, True, True, 0.1, 64)
    plan = Plan(options, 64, 1, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), interpret=False)
    unit = plan.decay_unit
    assert np.float16(unit) == unit
    g = plan.bound * np.logspace(0, -5)
    np.testing.assert_allclose(np.float16(g / unit) * np.float64(unit), g, 2.0**-11)


def test_steep_gates_keep_their_accuracy():
    """The bias cancels most of the raw gate before a large rate multiplies the rest."""
    inputs, rate = random_inputs(1, 70, 1, 1, 16, 16), np.exp(10.0)
    inputs["a_log"] = np.log(rate) * np.ones_like(inputs["a_log"])
    inputs["dt_bias"] = -3.0 * np.ones_like(inputs["dt_bias"])
    inputs["gate"] = 3.0 + inputs["gate"] / rate
    inputs = rounded(inputs, jnp.float32)
    assert_close(evaluate("pallas_triton", inputs, jnp.float32), truth(inputs), 5e-5)


def test_the_smallest_log_decay_masks():
    """What people fill masks with forgets as -1000 does."""
    inputs = finished_inputs(1, 70, 1, 1, 16, 16)
    hidden = np.random.default_rng(3).random(inputs["gate"].shape) < 0.5
    options = {"gate_kind": "log_decay", "beta_is_logit": False, "lower_bound": None}
    want, got = (
        evaluate("pallas_triton", inputs | {"gate": gate}, jnp.float32, **options)
        for gate in (
            np.where(hidden, mask, inputs["gate"]) for mask in (-1000.0, np.finfo(np.float32).min)
        )
    )
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("length", [1, 17, 31, 32, 33, 64])
def test_no_future_token_reaches_the_past_in_bfloat16(length):
    """Tiles of 32 rows, which only bfloat16 takes: bit for bit, saturated gates included."""
    inputs = random_inputs(1, 80, 1, 1, 16, 16)
    cotangent = prefix_cotangent(inputs, length)
    want, got = (
        first_tokens(evaluate("pallas_triton", x, jnp.bfloat16, cotangent), length)
        for x in (inputs, with_another_future(inputs, length))
    )
    for name in want.keys() - {"final_state"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def remembering(num_tokens):
    """Decays so slow that states cross from piece to piece."""
    inputs = random_inputs(1, num_tokens, 1, 2, 16, 16)
    return inputs | {"gate": inputs["gate"] - 6}


@pytest.mark.parametrize(
    "num_splits",
    [5, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_pieces_equal_the_recurrence(short_pieces, num_splits):
    """Five chunks: pieces of 3 and 2, of 2, 2 and 1, and of 1."""
    inputs = remembering(300)
    got = evaluate("pallas_triton", inputs, np.float64, num_splits=num_splits)
    assert_close(got, truth(inputs), 1e-13)


def test_pieces_of_documents(short_pieces):
    starts = np.zeros((1, 300), np.int32)
    starts[0, [20, 64, 150, 151, 200]] = 1
    inputs = remembering(300) | {
        "segment_ids": np.cumsum(starts, axis=1),
        "lengths": np.array([290], np.int32),
    }
    got = evaluate("pallas_triton", inputs, np.float64, num_splits=5)
    assert_close(got, truth(inputs), 1e-13)


@pytest.mark.parametrize("num_splits", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_no_future_token_reaches_the_past_through_pieces(short_pieces, num_splits):
    inputs, length = remembering(300), 150
    options = {"cotangent": prefix_cotangent(inputs, length), "num_splits": num_splits}
    want, got = (
        first_tokens(evaluate("pallas_triton", x, jnp.bfloat16, **options), length)
        for x in (inputs, with_another_future(inputs, length))
    )
    for name in want.keys() - {"final_state"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("residuals", ["full", pytest.param("lean", marks=pytest.mark.slow)])
def test_residuals_of_either_kind_equal_the_recurrence(short_pieces, residuals):
    inputs = remembering(150)
    got = evaluate("pallas_triton", inputs, np.float64, residuals=residuals, num_splits=2)
    assert_close(got, truth(inputs), 1e-13)


@pytest.mark.slow
def test_residuals_agree_in_bfloat16():
    inputs = random_inputs(1, 70, 1, 2, 16, 16)
    default, full, lean = (
        evaluate("pallas_triton", inputs, jnp.bfloat16, residuals=residuals)
        for residuals in ("default", "full", "lean")
    )
    for name in default:
        np.testing.assert_array_equal(lean[name], full[name], err_msg=name)
    assert_close(default, full, 4e-3)


def test_gradients_of_large_cotangents_under_saturated_gates():
    """The factors reach far into the exponent range; products with cotangents stay inside."""
    inputs = random_inputs(1, 64, 1, 1, 16, 16) | {"gate": np.full((1, 64, 1, 16), 1e4)}
    do, d_state = cotangents(inputs)
    small = evaluate("pallas_triton", inputs, jnp.bfloat16, (do, d_state))
    large = evaluate("pallas_triton", inputs, jnp.bfloat16, (do * 2.0**30, d_state * 2.0**30))
    for name in ("dq", "dk", "dv", "dbeta"):
        np.testing.assert_array_equal(
            large[name].astype(np.float32), small[name].astype(np.float32) * 2.0**30, err_msg=name
        )


@pytest.mark.parametrize("num_rows", [32, 64])
@pytest.mark.parametrize("noise, beta", [(0.05, 0.98), (0.0, 1.0), (0.02, 1.9)])
def test_inverse_of_collinear_keys(noise, beta, num_rows):
    rng = np.random.default_rng(0)
    keys = 1 + noise * rng.normal(size=(num_rows, 32))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    lower = np.tril(beta * keys @ keys.T, k=-1)
    options = KdaOptions("bounded", -5.0, True, True, 1.0, num_rows)
    float32 = jnp.dtype(jnp.float32)
    plan = Plan(options, num_rows, 1, float32, float32, interpret=True)
    half = num_rows // 2

    def kernel(lower, out, scratch):
        blocks = lower[:half, :half], lower[half:, :half], lower[half:, half:]
        first, across, second = unit_lower_inverse(plan, blocks, scratch)
        out[:half, :half], out[half:, :half], out[half:, half:] = first, across, second
        out[:half, half:] = jnp.zeros((half, half))

    shapes = [jax.ShapeDtypeStruct((num_rows, n), jnp.float32) for n in (num_rows, half)]
    got, _ = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(lower.astype(np.float32))
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(num_rows) + lower), atol=1e-4)


def test_second_derivatives_are_refused_by_name():
    inputs = as_arrays(random_inputs(1, 8, 1, 1, 16, 16), np.float32)

    def loss(v):
        return jnp.sum(kda(**inputs | {"v": v}, implementation="pallas_triton")[0] ** 2)

    with pytest.raises(NotImplementedError, match="differentiated once"):
        jax.grad(lambda v: jnp.sum(jax.grad(loss)(v) ** 2))(inputs["v"])


@pytest.mark.parametrize("scale", [1e-21, pytest.param(1e20, marks=pytest.mark.slow)])
def test_any_scale_leaves_the_gradients_exact(scale):
    inputs = random_inputs(1, 40, 1, 1, 16, 16)
    got, want = evaluate("pallas_triton", inputs, scale=scale), truth(inputs, scale=scale)
    errors = {name: relative_rms(got[name], want[name]) for name in want}
    assert all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize("scale", [4096.0, pytest.param(1e-6, marks=pytest.mark.slow)])
def test_any_scale_leaves_bfloat16_exact_under_saturated_gates(scale):
    """31 tokens of the strongest decay, then one that looks back."""
    inputs = random_inputs(1, 32, 1, 1, 16, 16) | {"gate": np.full((1, 32, 1, 16), 1e4)}
    inputs["gate"][:, -1] = -1e4
    inputs = rounded(inputs, jnp.bfloat16)
    got = evaluate("pallas_triton", inputs, jnp.bfloat16, scale=scale)
    want = truth(inputs, scale=scale)
    assert relative_rms(got["o"][:, -1], want["o"][:, -1]) < 1e-2
    assert all(np.isfinite(x).all() for x in got.values())


@pytest.mark.slow
def test_gradients_of_float32_queries_do_not_see_narrow_values():
    inputs = as_arrays(random_inputs(1, 40, 1, 1, 16, 16), np.float32)
    inputs["v"] = inputs["v"].astype(jnp.bfloat16)

    def gradient(implementation):
        def loss(q):
            o_BTHV, _ = kda(**inputs | {"q": q}, implementation=implementation)
            return jnp.sum(o_BTHV.astype(jnp.float32))

        return np.asarray(jax.jit(jax.grad(loss))(inputs["q"]))

    assert relative_rms(gradient("pallas_triton"), gradient("reference")) < 1e-5
