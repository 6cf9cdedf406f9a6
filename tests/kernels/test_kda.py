"""Every KDA implementation runs every test here.

The truth is the golden arrays, which independent implementations produced, and the token recurrence
in float64.
"""

from itertools import pairwise

import numpy as np
import pytest

from kernels.kda.api import IMPLEMENTATIONS
from tests.kernels.kda_cases import (
    PER_TOKEN,
    assert_close,
    evaluate,
    finished_inputs,
    first_tokens,
    golden,
    packed_inputs,
    pad_tokens,
    random_inputs,
    rounded,
    truth,
)

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

FINISHED = {"gate_kind": "log_decay", "beta_is_logit": False}

GOLDEN_SATURATED = ("gate_floor_b1_t130", "gate_near0_b1_t128", "gate_pm50_b1_t96")
GOLDEN_SAME_SHAPE = (*GOLDEN_SATURATED, "base_b1_t64", "collinear_b1_t128", "nostate_nodht_b1_t64")
# Every other file, and the chunk size its quick test takes.
GOLDEN_OTHERS = {
    "gva_b1_t70_h2_hv4_k32_v32": 16,
    "k128_b1_t70_h1_k128_v128": 32,
    "l2norm_b1_t80_h2_k32_v32": 48,
    "long_b1_t200_h4_k64_v64": 64,
    "ragged_b2_t75_h2_k32_v48": 32,
    "softplus_b1_t96_h3_k32_v32": 32,
    "t1_b2_h2_k32_v32": 16,
}


def check_golden(got, want, name):
    got = {key: got[key] for key in want}
    tolerance = 1e-4 if "collinear" in name else 1e-5
    # Where the gate is saturated its gradients are below 1e-15: an absolute bound of 1e-6.
    gate_grads = ("dgate", "da_log", "ddt_bias") if name in GOLDEN_SATURATED else ()
    for key in gate_grads:
        np.testing.assert_allclose(got.pop(key), want[key], rtol=1e-5, atol=1e-6)
    # A sum over all tokens, of terms that mostly cancel.
    summed = {key: got.pop(key) for key in ("ddt_bias",) if key in got}
    assert_close(summed, {key: want[key] for key in summed}, 2 * tolerance)
    assert_close(got, {key: want[key] for key in got}, tolerance)


@pytest.mark.parametrize("name", GOLDEN_OTHERS)
def test_golden(implementation, name):
    inputs, cotangent, options, want, _ = golden(name)
    options["chunk_size"] = GOLDEN_OTHERS[name]
    check_golden(evaluate(implementation, inputs, cotangent=cotangent, **options), want, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{n}_h2_k32_v32" for n in GOLDEN_SAME_SHAPE] + [*GOLDEN_OTHERS])
def test_golden_as_stored(implementation, name):
    """Every file as one call with the default chunk size and without padding."""
    inputs, cotangent, options, want, _ = golden(name)
    got = evaluate(implementation, inputs, cotangent=cotangent, **options)
    check_golden(got, want, name.removesuffix("_h2_k32_v32"))


@pytest.mark.parametrize("name", GOLDEN_SAME_SHAPE)
def test_golden_behind_lengths(implementation, name):
    inputs, cotangent, options, want, _ = golden(f"{name}_h2_k32_v32")
    inputs.setdefault("initial_state", np.zeros_like(want["final_state"]))
    padded, padded_cotangent = pad_tokens(inputs, cotangent, 150)
    got = evaluate(implementation, padded, cotangent=padded_cotangent, chunk_size=32, **options)
    for key in ("o", *(f"d{key}" for key in PER_TOKEN)):
        assert not got[key][:, inputs["q"].shape[1] :].any(), key
    check_golden(first_tokens(got, inputs["q"].shape[1]), want, name)


def test_golden_documents(implementation):
    """One call per document of the packed file, each with its own state."""
    inputs, (do, dfinal_state), options, want, starts = golden("varlen_t150_n4_h2_k32_v32")
    documents = []
    for n, (start, end) in enumerate(pairwise(starts)):
        document = inputs | {key: inputs[key][:, start:end] for key in PER_TOKEN}
        document["initial_state"] = inputs["initial_state"][n : n + 1]
        padded, cotangent = pad_tokens(document, (do[:, start:end], dfinal_state[n : n + 1]), 150)
        got = evaluate(implementation, padded, cotangent=cotangent, chunk_size=32, **options)
        documents.append(first_tokens(got, end - start))
    for key in want:
        parts = [document[key] for document in documents]
        if key in ("da_log", "ddt_bias"):
            joined = sum(parts)
        else:
            joined = np.concatenate(parts, axis=0 if "state" in key else 1)
        assert_close({key: joined}, {key: want[key]}, 1e-5)


EQUAL_CASES = {
    "packed": (packed_inputs(70, 2, 4, 12, 20), {"chunk_size": 32}),
    "softplus": (random_inputs(2, 37, 2, 2, 16, 16), {"gate_kind": "softplus", "chunk_size": 32}),
    "odd_lengths": (
        random_inputs(7, 65, 1, 1, 24, 8, gate_params=False)
        | {"lengths": np.array([1, 15, 16, 17, 63, 64, 65])},
        {"lower_bound": -3.0, "scale": 0.7, "chunk_size": 48},
    ),
    "steep_bound": (random_inputs(1, 33, 1, 2, 8, 8), {"lower_bound": -5.5, "chunk_size": 16}),
    "below_tiles": (random_inputs(1, 33, 1, 2, 8, 8), {"lower_bound": -20.0, "chunk_size": 16}),
}


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", EQUAL_CASES)
def test_equals_reference(implementation, case, dtype):
    inputs, options = EQUAL_CASES[case]
    got = evaluate(implementation, inputs, dtype, **options)
    assert_close(got, truth(inputs, **options), 1e-10 if dtype == np.float64 else 1e-5)
    for b, length in enumerate(inputs.get("lengths", ())):
        assert not got["o"][b, length:].any()
        assert not any(got[f"d{key}"][b, length:].any() for key in PER_TOKEN)


def family(name):
    """Finished log-decays and write strengths that stress one thing each."""
    inputs = finished_inputs(2, 40, 1, 2, 16, 8)
    gate, rng = inputs["gate"], np.random.default_rng(5)
    tokens = np.arange(gate.shape[1])[None, :, None, None]
    one_key = np.broadcast_to(rng.normal(size=16), inputs["k"].shape)
    slow = -rng.uniform(0.012, 0.034, size=gate.shape)
    changes = {
        "random": {},
        "gate_zero": {"gate": 0 * gate},
        "gate_floor": {"gate": 0 * gate - 5},
        "gate_tiny": {"gate": 0 * gate - 1e-7},
        "gate_alternating": {"gate": np.where(tokens % 2 == 0, -5.0, -1e-3) + 0 * gate},
        "gate_half_strong": {"gate": np.where(tokens < 20, -5.0, -1e-3) + 0 * gate},
        "beta_zero": {"beta": 0 * inputs["beta"]},
        "beta_one": {"beta": 0 * inputs["beta"] + 1},
        "v_zero": {"v": 0 * inputs["v"]},
        "keys_zero": {"k": 0 * inputs["k"]},
        "keys_equal": {"k": one_key, "gate": slow, "beta": 0 * inputs["beta"] + 1},
        "keys_equal_undecayed": {"k": one_key, "gate": 0 * gate, "beta": 0 * inputs["beta"] + 1},
        "keys_collinear_reflected": {
            "k": one_key + 0.05 * rng.normal(size=one_key.shape),
            "gate": slow,
            "beta": 0 * inputs["beta"] + 1.9,
        },
    }
    return inputs | changes[name] if name else list(changes)


FAMILIES = family(None)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(implementation, name, lower_bound):
    inputs, options = family(name), FINISHED | {"lower_bound": lower_bound, "chunk_size": 32}
    want = truth(inputs, **options)
    got = evaluate(implementation, inputs, np.float64, **options)
    assert_close(got, want, 1e-9 if "keys_" in name else 1e-10)
    got = evaluate(implementation, inputs, np.float32, **options)
    assert_close(got, want, 1e-4 if "keys_" in name else 1e-5)


@pytest.mark.parametrize("strong", [-30.0, -1000.0])
def test_any_log_decay_without_a_promise(implementation, strong):
    inputs = family("random")
    rng = np.random.default_rng(11)
    inputs["gate"] = np.where(rng.uniform(size=inputs["gate"].shape) < 0.3, strong, inputs["gate"])
    options = FINISHED | {"lower_bound": None, "chunk_size": 32}
    got = evaluate(implementation, inputs, np.float32, **options)
    assert_close(got, truth(inputs, **options), 1e-5)


@pytest.mark.parametrize("largest", [1e5, 1e30])
def test_softplus_gates_that_leave_nothing(implementation, largest):
    """A decay of 0 has no gradient; what rounding leaves of it would meet these logits."""
    inputs = random_inputs(1, 70, 1, 1, 16, 16)
    forgets = np.random.default_rng(5).random(inputs["gate"].shape) < 0.2
    inputs["gate"] = np.where(forgets, largest, inputs["gate"])
    inputs, options = rounded(inputs, np.float32), {"gate_kind": "softplus"}
    got = evaluate(implementation, inputs, np.float32, **options)
    assert_close(got, truth(inputs, **options), 1e-5)


def test_saturated_gate_logits(implementation):
    inputs, options = EQUAL_CASES["steep_bound"]
    signs = np.random.default_rng(2).choice([-1.0, 1.0], size=inputs["gate"].shape)
    for gate in (1e4 * signs, 0 * signs + 1e4, 0 * signs - 1e4):
        for a_log in (inputs["a_log"], inputs["a_log"] + 200):
            saturated = inputs | {"gate": gate, "a_log": a_log}
            got = evaluate(implementation, saturated, np.float32, **options)
            assert_close(got, truth(saturated, **options), 1e-5)
            assert not got["dgate"].any()


@pytest.mark.slow
@pytest.mark.parametrize("gate_kind", ["bounded", "softplus"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65])
def test_odd_lengths(implementation, num_tokens, gate_kind):
    inputs = random_inputs(1, num_tokens, 1, 2, 12, 20)
    got = evaluate(implementation, inputs, gate_kind=gate_kind)
    assert_close(got, truth(inputs, gate_kind=gate_kind), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 1.9])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_collinear_keys_over_a_long_sequence(implementation, noise, beta):
    inputs = finished_inputs(1, 8192, 1, 1, 32, 16)
    rng = np.random.default_rng(5)
    inputs["k"] = rng.normal(size=32) + noise * rng.normal(size=inputs["k"].shape)
    inputs["gate"] = -rng.uniform(0.012, 0.034, size=inputs["gate"].shape)
    inputs["beta"] = np.full(inputs["beta"].shape, beta)
    assert_close(evaluate(implementation, inputs, **FINISHED), truth(inputs, **FINISHED), 1e-4)


@pytest.mark.slow
def test_errors_do_not_grow_with_time(implementation):
    def root_mean_square_errors(num_tokens):
        inputs = finished_inputs(1, num_tokens, 1, 1, 32, 32, steepest=1.0)
        got, want = evaluate(implementation, inputs, **FINISHED), truth(inputs, **FINISHED)
        return {
            name: np.sqrt(np.mean((got[name] - want[name]) ** 2) / np.mean(want[name] ** 2))
            for name in ("o", *(f"d{name}" for name in PER_TOKEN))
        }

    short, long = root_mean_square_errors(1024), root_mean_square_errors(16384)
    assert all(long[name] <= 1.5 * short[name] and long[name] < 2e-6 for name in short), long
