"""What KDA promises beyond its values: bitwise causality, chaining, invariances, memory, errors."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kda import kda
from kernels.kda.api import IMPLEMENTATIONS
from tests.kernels.kda_cases import (
    PER_TOKEN,
    as_arrays,
    assert_close,
    cotangents,
    evaluate,
    first_tokens,
    part_of,
    prefix_cotangent,
    random_inputs,
    rounded,
    truth,
    whole_and_chained,
    with_another_future,
)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def assert_same_prefix(got, want, length):
    """Outputs and prefix-loss gradients agree bit for bit; the gate parameters' do as well."""
    got, want = first_tokens(got, length), first_tokens(want, length)
    for name in want.keys() - {"final_state"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@every_implementation
@pytest.mark.parametrize("gate_kind", ["bounded", "softplus"])
def test_no_future_token_reaches_the_past(implementation, gate_kind):
    inputs = random_inputs(1, 80, 1, 2, 16, 8)
    for length in (1, 15, 16, 17, 21, 63, 64, 65):
        changed = with_another_future(inputs, length)
        cotangent = prefix_cotangent(inputs, length)
        want = evaluate(implementation, inputs, cotangent=cotangent, gate_kind=gate_kind)
        got = evaluate(implementation, changed, cotangent=cotangent, gate_kind=gate_kind)
        assert_same_prefix(got, want, length)
        assert not got["dgate"][:, length:].any()


@every_implementation
def test_more_tokens_leave_the_prefix_alone(implementation):
    inputs = random_inputs(1, 80, 1, 2, 16, 8)
    short = inputs | {name: inputs[name][:, :22] for name in PER_TOKEN}
    do, dfinal_state = prefix_cotangent(inputs, 21)
    want = evaluate(implementation, short, cotangent=(do[:, :22], dfinal_state), chunk_size=32)
    got = evaluate(implementation, inputs, cotangent=(do, dfinal_state), chunk_size=32)
    for results in (want, got):  # sums over tokens may be taken in another order
        del results["da_log"], results["ddt_bias"]
    assert_same_prefix(got, want, 21)


def assert_part(part, whole, start, end):
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        got, want = part[name][:, : end - start], whole[name][:, start:end]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12, err_msg=name)


@every_implementation
def test_documents_equal_themselves_alone(implementation):
    ends = (1, 2, 17, 40)
    inputs = random_inputs(1, 40, 1, 1, 16, 8)
    cotangent = cotangents(inputs)
    packed = inputs | {
        "segment_ids": np.searchsorted(ends, np.arange(40), side="right")[None].astype(np.int32),
        "lengths": np.array([40]),
    }
    packed = evaluate(implementation, packed, np.float64, cotangent, chunk_size=16)
    for start, end in pairwise((0, *ends)):
        is_first, is_last = start == 0, end == 40
        state, dstate = inputs["initial_state"] * is_first, cotangent[1] * is_last
        part, part_cotangent = part_of(inputs, cotangent, start, end, state, dstate)
        alone = evaluate(implementation, part, np.float64, part_cotangent, chunk_size=16)
        assert_part(alone, packed, start, end)
        for name in ["dinitial_state"] * is_first + ["final_state"] * is_last:
            np.testing.assert_allclose(alone[name], packed[name], rtol=0, atol=1e-12)


@every_implementation
def test_chained_calls_equal_one(implementation):
    inputs = random_inputs(1, 40, 1, 1, 16, 8)

    def run(part, cotangent):
        return evaluate(implementation, part, np.float64, cotangent, chunk_size=16)

    whole, chained = whole_and_chained(run, inputs, cotangents(inputs), 23)
    assert_close(chained, whole, 1e-12)


@every_implementation
def test_rows_do_not_depend_on_their_batch(implementation):
    inputs = random_inputs(3, 40, 1, 2, 16, 8)
    do, dfinal_state = cotangents(inputs)
    shared = ("a_log", "dt_bias")
    batch = evaluate(implementation, inputs, cotangent=(do, dfinal_state), chunk_size=32)
    again = evaluate(implementation, inputs, cotangent=(do, dfinal_state), chunk_size=32)
    row = {name: x if name in shared else x[1:2] for name, x in inputs.items()}
    cotangent = do[1:2], dfinal_state[1:2]
    row = evaluate(implementation, row, cotangent=cotangent, chunk_size=32)
    for name, x in batch.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)
        if name.removeprefix("d") not in shared:
            np.testing.assert_array_equal(x[1:2], row[name], err_msg=name)


@every_implementation
def test_grouped_values_equal_repeated_keys(implementation):
    inputs = random_inputs(1, 20, 2, 4, 16, 8)
    repeated = inputs | {name: np.repeat(inputs[name], 2, axis=2) for name in ("q", "k")}
    got = evaluate(implementation, inputs, np.float64, chunk_size=16)
    want = evaluate(implementation, repeated, np.float64, chunk_size=16)
    for name in ("dq", "dk"):
        want[name] = want[name].reshape(1, 20, 2, 2, 16).sum(axis=3)
    assert_close(got, want, 1e-12)


@every_implementation
def test_bfloat16_inputs(implementation):
    inputs = rounded(random_inputs(2, 70, 1, 2, 32, 16), jnp.bfloat16)
    do, dfinal_state = cotangents(inputs)
    cotangent = rounded({"do": do}, jnp.bfloat16)["do"], dfinal_state
    got = evaluate(implementation, inputs, jnp.bfloat16, cotangent)
    assert got.pop("final_state").dtype == got.pop("dinitial_state").dtype == np.float32
    assert all(x.dtype == jnp.bfloat16 for x in got.values())
    want = truth(inputs, cotangent)
    # The kernels' operands are bfloat16 throughout, those of "xla" only beside the state.
    tolerance = 2.0**-6 if implementation.startswith("pallas") else 2.0**-8
    assert_close(got, {name: want[name] for name in got}, tolerance)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@every_implementation
def test_scan_over_rematerialised_layers(implementation, times):
    layers = [
        as_arrays(random_inputs(1, 20, 1, 1, 16, 16, seed=seed), jnp.float32) for seed in (1, 2)
    ]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    v = layers[0].pop("v")

    def layer(v, layer_inputs):
        o, _ = kda(**layer_inputs | {"v": v}, chunk_size=16, implementation=implementation)
        return v + o, None

    rematerialised = layer
    for _ in range(times):
        rematerialised = jax.checkpoint(rematerialised)

    def scanned(v, layers):
        return jnp.sum(jax.lax.scan(rematerialised, v, layers)[0] ** 2)

    def unrolled(v, layers):
        first, second = (jax.tree.map(lambda x, n=n: x[n], layers) for n in range(2))
        return jnp.sum(layer(layer(v, first)[0], second)[0] ** 2)

    got = jax.jit(jax.grad(scanned, argnums=(0, 1)))(v, stacked)
    want = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(v, stacked)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@every_implementation
def test_vmap(implementation):
    arrays = as_arrays(random_inputs(2, 20, 1, 1, 16, 8, gate_params=False), jnp.float32)

    def loss(x):
        return jnp.sum(kda(**x, chunk_size=16, implementation=implementation)[0] ** 2)

    grads = jax.grad(loss)

    rows = jax.tree.map(lambda x: x[:, None], arrays)
    got = jax.tree.map(lambda x: x[:, 0], jax.jit(jax.vmap(grads))(rows))
    want = jax.jit(grads)(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_memory_is_linear_in_time():
    def temporaries(num_tokens):
        def x(*dims):
            return jax.ShapeDtypeStruct((1, num_tokens, 8, *dims), jnp.float32)

        def loss(*args):
            return jnp.sum(kda(*args)[0])

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
        compiled = grad.lower(x(64), x(64), x(64), x(64), x()).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes, memory.argument_size_in_bytes

    (short, _), (long, arguments) = temporaries(16384), temporaries(32768)
    assert long <= 2.05 * short
    assert long <= 4 * arguments


def test_several_slabs_equal_one(monkeypatch):
    inputs = random_inputs(2, 70, 1, 1, 16, 8)
    inputs["segment_ids"] = np.cumsum(np.arange(140).reshape(2, 70) % 17 == 0, axis=1)
    inputs["lengths"] = np.array([70, 41])
    monkeypatch.setattr("kernels.kda.chunked._SLAB_SIZE", 2 * 32 * 2 * 16)
    # T = 70 in chunks of 16 is 5 chunks, in slabs of 2; no other test uses this shape.
    assert_close(
        evaluate("xla", inputs, np.float64, chunk_size=16), truth(inputs, chunk_size=16), 1e-10
    )


ERRORS = {
    "gate_kind is 'sigmoid'": {"gate_kind": "sigmoid"},
    "lower_bound is 0.0; it must be negative": {"lower_bound": 0.0},
    "lower_bound is None; the bounded gate": {"lower_bound": None},
    "leave out a_log and dt_bias": {"gate_kind": "log_decay"},
    "chunk_size is 24; it must be a positive multiple of 16": {"chunk_size": 24},
    "num_splits is 2.5; it must be None or a positive integer": {"num_splits": 2.5},
    "residuals is 'none'; it must be one of": {"residuals": "none"},
    "states_every is 100; it must be None or a positive multiple": {"states_every": 100},
    "scale is 0; it must be another number": {"scale": 0.0},
    r"implementation is 'cuda'; it must be None or one of \['pallas_mosaic_tpu'": {
        "implementation": "cuda"
    },
    r"k has shape \(1, 8, 1, 4\); .* must be \(1, 8, 1, 16\)": {"k": np.zeros((1, 8, 1, 4))},
    "v has 3 heads and q has 2": {"q": np.zeros((1, 8, 2, 16)), "v": np.zeros((1, 8, 3, 16))},
    r"q has shape \(1, 0, 1, 16\)": {"q": np.zeros((1, 0, 1, 16))},
    "v has dtype float16": {"v": np.zeros((1, 8, 1, 16), np.float16)},
    "initial_state has dtype bfloat16": {"initial_state": jnp.zeros((1, 1, 16, 16), jnp.bfloat16)},
    "segment_ids has dtype float32": {"segment_ids": np.zeros((1, 8), np.float32)},
    r"lengths has shape \(2,\)": {"lengths": np.zeros(2, np.int32)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_would_work(message):
    arguments = random_inputs(1, 8, 1, 1, 16, 16) | ERRORS[message]
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments)
    with pytest.raises(ValueError, match=message):
        kda(**arrays)


@every_implementation
@pytest.mark.parametrize("num_tokens", [pytest.param(64, marks=pytest.mark.slow), 150])
def test_states_every_64_tokens(implementation, num_tokens):
    """Against the final states of the prefixes; documents start on the border, and before it."""
    starts = np.zeros((2, num_tokens), np.int32)
    starts[0, [20, 63]] = 1
    if num_tokens > 128:
        starts[0, 128] = starts[1, 70] = 1
    inputs = random_inputs(2, num_tokens, 1, 2, 16, 16) | {
        "segment_ids": np.cumsum(starts, axis=1),
        "lengths": np.array([num_tokens, num_tokens - 10], np.int32),
    }
    arrays = {
        name: jnp.asarray(x, jnp.int32 if name in ("segment_ids", "lengths") else jnp.float32)
        for name, x in inputs.items()
    }
    options = {"implementation": implementation}
    o, final_state, states = kda(**arrays, **options, states_every=64)
    want_o, want_state = kda(**arrays, **options)
    np.testing.assert_allclose(o, want_o, atol=1e-5)
    np.testing.assert_allclose(final_state, want_state, atol=1e-5)
    assert states.shape == (2, -(-num_tokens // 64), *final_state.shape[1:])
    for n in range(states.shape[1]):
        lengths = jnp.minimum(arrays["lengths"], 64 * n)
        prefix = kda(**arrays | {"lengths": lengths}, implementation="reference")[1]
        np.testing.assert_allclose(states[:, n], prefix, atol=1e-5)
