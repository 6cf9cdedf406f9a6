"""Acceptance of KDA on the accelerator at hand: `pytest -m device`.

What kda() and kda_decode() pick on the default backend, against the token recurrence in float64 on
the CPU, from the same rounded inputs; relative root mean square errors, of which the run prints the
worst. Cases share programs (shape, options, dtype) where they can, since on a GPU each compiles
for long. Without an accelerator it all runs on the CPU, over fewer tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kda import kda
from tests.kernels.kda_cases import (
    PER_TOKEN,
    as_arrays,
    cotangents,
    decode,
    evaluate,
    finished_inputs,
    first_tokens,
    packed_inputs,
    prefix_cotangent,
    random_inputs,
    relative_rms,
    rounded,
    truth,
    whole_and_chained,
    with_another_future,
)

pytestmark = [
    pytest.mark.device,
    pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"]),
]

BOUNDS = {
    "bfloat16": {"o": 5e-3, "final_state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3}
    | {"dgate": 2e-2, "dbeta": 2e-2, "da_log": 1e-2, "ddt_bias": 1e-2, "dinitial_state": 8e-3},
    "float32": {"o": 1e-5, "final_state": 1e-5},  # gradients below
}
FLOAT32_GRADIENTS = 2e-5
OUTPUTS = tuple(BOUNDS["bfloat16"])
BFLOAT16_BOUNDS = {
    "steepest": {"dgate": 2.0**-8},
    # Rounded operands, of which most of the information cancels. jax-linear-attention errs as much.
    "collinear": dict.fromkeys(OUTPUTS, 8e-2),
    # One head, so one number, a sum over all tokens that mostly cancels.
    "shapes": {"da_log": 2e-2},
}

PREFIXES = (1, 15, 16, 17, 21, 63, 64, 65)
FINISHED = {"gate_kind": "log_decay", "beta_is_logit": False}
UNBOUNDED = FINISHED | {"lower_bound": None}


def tokens(count, on_cpu):
    return on_cpu if jax.default_backend() == "cpu" else count


# The program that most families share: batch, tokens, query/key heads, heads, K, V.
SHARED = (2, tokens(500, 130), 2, 2, 128, 128)
SHORTER = (2, tokens(200, 90), 2, 2, 128, 128)
STRESS = (1, tokens(512, 128), 1, 2, 128, 128)
COLLINEAR = (1, tokens(2048, 256), 1, 2, 128, 128)
PACKED = (tokens(512, 128), 1, 2, 64, 64)
LONG = tokens(65536, 4096)
PIECES = (1, tokens(4200, 200), 1, 2, 64, 64)  # 66 chunks: pieces of 32, 32 and 2 at most


def saturated(pattern):
    inputs = random_inputs(*SHARED)
    rows = np.arange(SHARED[1])[:, None, None]
    signs = {"open": 1.0, "shut": -1.0, "alternating": np.where(rows % 2 == 0, 1.0, -1.0)}
    signs["any"] = np.sign(np.random.default_rng(2).normal(size=inputs["gate"].shape))
    return inputs | {"gate": np.broadcast_to(1e4 * signs[pattern], inputs["gate"].shape)}


def stressed(**constants):
    """Finished log-decays and strengths, some inputs the same everywhere."""
    inputs = finished_inputs(*STRESS)
    return inputs | {name: np.full(inputs[name].shape, c) for name, c in constants.items()}


def collinear(noise, beta, decay):
    inputs = finished_inputs(*COLLINEAR)
    rng = np.random.default_rng(5)
    keys = rng.normal(size=inputs["k"].shape[-1]) + noise * rng.normal(size=inputs["k"].shape)
    gate = -decay * rng.uniform(0.012, 0.034, size=inputs["gate"].shape)
    return inputs | {"k": keys, "gate": gate, "beta": np.full(inputs["beta"].shape, beta)}


def masked():
    inputs = finished_inputs(1, STRESS[1], 1, 2, 128, 64)
    hidden = np.random.default_rng(11).uniform(size=inputs["gate"].shape) < 0.5
    return inputs | {"gate": np.where(hidden, -1000.0, inputs["gate"])}


def odd_lengths():
    lengths = np.array([15, 16, 17, 64, 65], np.int32)
    return random_inputs(5, 65, 1, 2, 64, 32) | {"lengths": lengths}


CASES = {  # family, case: how to make its inputs, options
    ("shapes", "1_token"): (lambda: random_inputs(2, 1, 2, 2, 64, 64), {}),
    ("shapes", "15_to_65_tokens"): (odd_lengths, {}),
    ("shapes", "63_tokens"): (lambda: random_inputs(1, 63, 1, 1, 64, 64), {"scale": 1.0}),
    ("shapes", "200_tokens"): (lambda: random_inputs(*SHORTER), {}),
    ("shapes", "32x128_grouped"): (lambda: random_inputs(1, 200, 2, 4, 32, 128), {}),
    ("shapes", "100x60_grouped"): (lambda: random_inputs(1, 200, 1, 2, 100, 60), {}),
    ("shapes", "256x256"): (lambda: random_inputs(1, 200, 1, 2, 256, 256), {}),
    ("shapes", "60x60"): (lambda: random_inputs(2, 500, 3, 3, 60, 60), {"scale": 1.0}),
    ("shapes", "1000_tokens"): (lambda: random_inputs(1, 1000, 2, 4, 128, 64), {}),
    ("documents", "packed"): (lambda: packed_inputs(*PACKED), {}),
    ("collinear", "equal"): (lambda: collinear(0.0, 1.0, 1.0), FINISHED),
    ("collinear", "near"): (lambda: collinear(0.02, 1.0, 1.0), FINISHED),
    ("collinear", "undecayed"): (lambda: collinear(0.05, 1.0, 0.0), FINISHED),
    ("collinear", "reflected"): (lambda: collinear(0.05, 1.9, 1.0), FINISHED),
    ("saturated", "open"): (lambda: saturated("open"), {}),
    ("saturated", "shut"): (lambda: saturated("shut"), {}),
    ("saturated", "alternating"): (lambda: saturated("alternating"), {}),
    ("saturated", "any"): (lambda: saturated("any"), {}),
    ("delta_rule", "g_0"): (lambda: stressed(gate=0.0), FINISHED),
    ("delta_rule", "beta_0"): (lambda: stressed(beta=0.0), FINISHED),
    ("delta_rule", "beta_1"): (lambda: stressed(beta=1.0), FINISHED),
    ("delta_rule", "v_0"): (lambda: stressed(v=0.0), FINISHED),
    ("delta_rule", "k_0"): (lambda: stressed(k=0.0), FINISHED),
    ("softplus", "random"): (lambda: random_inputs(*STRESS), {"gate_kind": "softplus"}),
    ("masked", "g_-1000"): (masked, UNBOUNDED),
    ("steepest", "g_-5"): (lambda: stressed(gate=-5.0), FINISHED),
    ("chunk_32", "random"): (lambda: random_inputs(*SHARED), {"chunk_size": 32}),
}


def on_grid(inputs, dtype, cotangent=None):
    """Inputs and cotangents that the dtype can hold, so that the oracle sees the same values."""
    do, dfinal_state = cotangents(inputs) if cotangent is None else cotangent
    return rounded(inputs, dtype), (rounded({"do": do}, dtype)["do"], dfinal_state)


@pytest.fixture
def check(record_property, dtype):
    """Records the errors of a family, and compares them with the bounds."""

    def compare(family, got, want, bounds=()):
        dtype_name = jnp.dtype(dtype).name
        assert got.keys() == want.keys()
        errors = {n: relative_rms(got[n], want[n]) for n in OUTPUTS if n in want}
        record_property("errors", (family, dtype_name, errors))
        known = BOUNDS[dtype_name] | dict(bounds)
        beyond = {
            name: (error, known.get(name, FLOAT32_GRADIENTS))
            for name, error in errors.items()
            if not error <= known.get(name, FLOAT32_GRADIENTS)  # NaN is beyond
        }
        assert not beyond, f"{family}: error, bound: {beyond}"

    return compare


@pytest.mark.parametrize("family, case", CASES)
def test_equals_the_recurrence(check, dtype, family, case):
    make, options = CASES[family, case]
    inputs, cotangent = on_grid(make(), dtype)
    got = evaluate(None, inputs, dtype, cotangent, **options)
    bounds = {}
    if dtype == jnp.bfloat16:
        bounds = BFLOAT16_BOUNDS.get(family, {})
    check(family, got, truth(inputs, cotangent, **options), bounds)


def test_two_chunk_sizes_agree(check, dtype):
    inputs, cotangent = on_grid(random_inputs(*SHARED), dtype)
    by_32 = evaluate(None, inputs, dtype, cotangent, chunk_size=32)
    by_64 = evaluate(None, inputs, dtype, cotangent)
    # Each may be as wrong as its bound.
    both = {name: 2 * bound for name, bound in BOUNDS[jnp.dtype(dtype).name].items()}
    check("32_against_64", by_32, by_64, both if dtype == jnp.bfloat16 else {})


def remembering(shape):
    """Decays so slow that states cross from piece to piece."""
    inputs = random_inputs(*shape)
    return inputs | {"gate": inputs["gate"] - 6}


def test_pieces_equal_the_recurrence(check, dtype):
    inputs, cotangent = on_grid(remembering(PIECES), dtype)
    got = evaluate(None, inputs, dtype, cotangent, num_splits=4)
    check("pieces", got, truth(inputs, cotangent))


def test_pieces_agree_with_one(check, dtype):
    inputs, cotangent = on_grid(remembering(PIECES), dtype)
    one, pieces = (evaluate(None, inputs, dtype, cotangent, num_splits=n) for n in (1, 4))
    bounds = dict.fromkeys(OUTPUTS, 4e-3 if dtype == jnp.bfloat16 else 1e-5)
    check("pieces_against_1", pieces, one, bounds)


def test_chained_calls_equal_one(check, dtype):
    heads = PACKED[1:]
    inputs, cotangent = on_grid(random_inputs(4, PACKED[0], *heads), dtype)
    whole, chained = whole_and_chained(
        lambda part, part_cotangent: evaluate(None, part, dtype, part_cotangent),
        inputs,
        cotangent,
        PACKED[0] // 2 - 7,
    )
    check("chained", chained, whole if dtype == jnp.float32 else truth(inputs, cotangent))


def test_errors_do_not_grow_with_time(check, dtype):
    inputs, cotangent = on_grid(random_inputs(1, LONG, 1, 1, 64, 64), dtype)
    got = evaluate(None, inputs, dtype, cotangent)
    want = truth(inputs, cotangent, implementation="xla")  # the recurrence would keep every state
    check("long", got, want)
    quarters = {
        name: [
            relative_rms(g, w)
            for g, w in zip(*(np.split(x[name], 4, axis=1) for x in (got, want)), strict=True)
        ]
        for name in ("dq", "dk", "dgate")
    }
    assert all(errors[-1] <= 1.5 * errors[0] for errors in quarters.values()), quarters


def test_the_weakest_decays_add_up(check, dtype):
    """Over a long sequence in which nothing is written: the state that is left."""
    inputs = finished_inputs(1, LONG, 1, 1, 64, 64)
    inputs["beta"] = np.zeros_like(inputs["beta"])
    run = jax.jit(partial(kda, **FINISHED))
    for g in (0.0, -1e-6, -1e-5):
        inputs["gate"] = np.full_like(inputs["gate"], g)
        arrays = as_arrays(rounded(inputs, dtype), dtype)
        left = np.exp(LONG * np.float64(arrays["gate"][0, 0, 0, 0])) * inputs["initial_state"]
        got = {"final_state": np.asarray(run(**arrays)[1])}
        check("weakest", got, {"final_state": left}, {"final_state": 5e-4})


@pytest.fixture
def check_equal(record_property, dtype):
    """Records the errors of a family that promises none, and asks for equal bits."""

    def compare(family, pairs):
        errors = {}
        different = []
        for label, got, want in pairs:
            for name in (n for n in OUTPUTS if n in want):
                error = relative_rms(got[name], want[name].astype(np.float64))
                errors[name] = float(np.maximum(errors.get(name, 0.0), error))
                if not np.array_equal(got[name], want[name]):
                    different.append((label, name, error))
        record_property("errors", (family, jnp.dtype(dtype).name, errors))
        assert not different, f"{family}: case, output, error: {different}"

    return compare


def prefix(results, length, *without):
    """What a loss of the first tokens may depend on."""
    without = ("final_state", *without)
    return {n: x for n, x in first_tokens(results, length).items() if n not in without}


def test_no_future_token_reaches_the_past(check_equal, dtype):
    inputs = random_inputs(*SHARED)

    def pairs():
        for length in PREFIXES:
            cotangent = prefix_cotangent(inputs, length)
            want = evaluate(None, inputs, dtype, cotangent)
            got = evaluate(None, with_another_future(inputs, length), dtype, cotangent)
            yield length, prefix(got, length), prefix(want, length)

    check_equal("causality", pairs())


def test_no_future_token_reaches_the_past_through_pieces(check_equal, dtype):
    inputs, length = remembering(PIECES), PIECES[1] // 2 + 1

    def pairs():
        cotangent = prefix_cotangent(inputs, length)
        another = with_another_future(inputs, length)
        for num_splits in (2, 4):
            want = evaluate(None, inputs, dtype, cotangent, num_splits=num_splits)
            got = evaluate(None, another, dtype, cotangent, num_splits=num_splits)
            yield length, prefix(got, length), prefix(want, length)

    check_equal("causality_pieces", pairs())


def test_more_tokens_leave_the_prefix_alone(check_equal, dtype):
    inputs = random_inputs(*SHARED)
    short = inputs | {name: inputs[name][:, : SHORTER[1]] for name in PER_TOKEN}
    sums = ("da_log", "ddt_bias")  # over tokens, in whatever order

    def pairs():
        for length in (21, 64, 65):
            do, dfinal_state = prefix_cotangent(inputs, length)
            got = evaluate(None, inputs, dtype, (do, dfinal_state))
            want = evaluate(None, short, dtype, (do[:, : SHORTER[1]], dfinal_state))
            yield length, prefix(got, length, *sums), prefix(want, length, *sums)

    check_equal("longer", pairs())


def test_two_runs_agree(check_equal, dtype):
    inputs = random_inputs(*SHARED)
    check_equal("determinism", [("again", *(evaluate(None, inputs, dtype) for _ in range(2)))])


def test_rows_do_not_depend_on_their_batch(check_equal, dtype):
    inputs, cotangent = random_inputs(*SHARED), cotangents(random_inputs(*SHARED))
    params = ("a_log", "dt_bias")
    row = {name: x if name in params else x[1:] for name, x in inputs.items()}
    alone = evaluate(None, row, dtype, tuple(x[1:] for x in cotangent))
    batch = evaluate(None, inputs, dtype, cotangent)
    batch = {name: x[1:] for name, x in batch.items() if name.removeprefix("d") not in params}
    check_equal("row_alone", [("row 1", alone, batch)])


@pytest.mark.parametrize("dims", [(1, 2, 128, 128), (2, 4, 60, 100)], ids=["128x128", "60x100"])
def test_decode_equals_the_recurrence(check, dtype, dims):
    inputs = rounded(random_inputs(3, 16, *dims), dtype)
    got, want = decode(None, inputs, dtype), truth(inputs)
    check("decode", got, {name: want[name] for name in got})


def test_decode_leaves_what_is_not_active(check_equal, dtype):
    inputs = rounded(random_inputs(3, 16, 1, 2, 128, 128), dtype)
    active = np.array([True, False, True])
    every, some = decode(None, inputs, dtype), decode(None, inputs, dtype, active)
    still = {"o": 0 * every["o"][1], "final_state": inputs["initial_state"][1].astype(np.float32)}
    kept = {name: x[1] for name, x in some.items()}
    others = [{name: x[active] for name, x in results.items()} for results in (some, every)]
    check_equal("decode_active", [("row 1", kept, still), ("others", *others)])


def test_what_is_kept_changes_rounding_only(check, dtype):
    inputs, cotangent = on_grid(random_inputs(*SHARED), dtype)
    want = evaluate(None, inputs, dtype, cotangent)
    bounds = dict.fromkeys(OUTPUTS, 4e-3 if dtype == jnp.bfloat16 else 1e-5)
    for residuals in ("full", "lean"):
        got = evaluate(None, inputs, dtype, cotangent, residuals=residuals)
        check("residuals", got, want, bounds)


def test_states_between_blocks_are_those_of_the_prefixes(check_equal, dtype):
    inputs = as_arrays(rounded(random_inputs(*SHARED), dtype), dtype)
    every = 64
    _, _, states_BNHKV = jax.jit(partial(kda, states_every=every))(**inputs)

    def pairs():
        for n in (1, tokens(7, 2)):
            prefix = {k: x[:, : n * every] if k in PER_TOKEN else x for k, x in inputs.items()}
            want = jax.jit(kda)(**prefix)[1]
            got, want = ({"final_state": np.asarray(x)} for x in (states_BNHKV[:, n], want))
            yield n, got, want

    check_equal("states", pairs())


def test_layers_in_a_scan_and_under_remat(check, dtype):
    """Two layers on each other's output, their inputs shared."""
    inputs = as_arrays(rounded(random_inputs(*STRESS), dtype), dtype)
    of_layer = {name: inputs.pop(name) for name in ("q", "k", "v", "gate")}
    do = jnp.asarray(cotangents(random_inputs(*STRESS))[0], dtype)

    def gradients(wrap, run):
        def loss(x):
            layer = wrap(lambda v: kda(**inputs, **x | {"v": v})[0])
            return jnp.sum((do * run(layer, x["v"])).astype(jnp.float32))

        return {f"d{n}": np.asarray(g) for n, g in jax.jit(jax.grad(loss))(of_layer).items()}

    def scanned(layer, v):
        return jax.lax.scan(lambda v, _: (layer(v), None), v, length=2)[0]

    want = gradients(lambda layer: layer, lambda layer, v: layer(layer(v)))
    bounds = dict.fromkeys(OUTPUTS, 4e-3 if dtype == jnp.bfloat16 else 1e-5)
    check("remat", gradients(jax.checkpoint, scanned), want, bounds)
