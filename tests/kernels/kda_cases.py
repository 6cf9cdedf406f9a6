"""Inputs, programs and comparisons that the KDA tests share.

Inputs are float64 NumPy arrays under the argument names of kda(); `evaluate` casts them and runs
outputs and all gradients as one program, compiled once per set of options and shapes.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda import kda, kda_decode

GOLDEN = Path(__file__).parents[1] / "golden"
PER_TOKEN = ("q", "k", "v", "gate", "beta")
PER_TOKEN_RESULTS = ("o", *(f"d{name}" for name in PER_TOKEN))
INTEGERS = ("segment_ids", "lengths")


def random_inputs(
    batch, num_tokens, num_qk_heads, num_heads, key_dim, value_dim, *, seed=0, gate_params=True
):
    """Arguments of kda() with a bounded or softplus gate and logits for beta."""
    rng = np.random.default_rng(seed)
    shape = (batch, num_tokens)
    inputs = {
        "q": rng.normal(size=(*shape, num_qk_heads, key_dim)),
        "k": rng.normal(size=(*shape, num_qk_heads, key_dim)),
        "v": rng.normal(size=(*shape, num_heads, value_dim)),
        "gate": 2 * rng.normal(size=(*shape, num_heads, key_dim)) - 2,
        "beta": rng.normal(size=(*shape, num_heads)),
        "initial_state": rng.normal(size=(batch, num_heads, key_dim, value_dim)),
    }
    if gate_params:
        inputs["a_log"] = 0.3 * rng.normal(size=num_heads)
        inputs["dt_bias"] = rng.normal(size=(num_heads, key_dim))
    return inputs


def finished_inputs(*shape, seed=0, steepest=5.0):
    """As random_inputs, but the gate is a log-decay in [-steepest, 0] and beta is in (0, 1)."""
    inputs = random_inputs(*shape, seed=seed, gate_params=False)
    rng = np.random.default_rng(seed + 1)
    inputs["gate"] = -steepest * rng.uniform(size=inputs["gate"].shape) ** 3
    inputs["beta"] = rng.uniform(size=inputs["beta"].shape)
    return inputs


def packed_inputs(num_tokens, *heads_and_dims):
    """Four rows that differ in their documents and lengths; num_tokens is at least 67."""
    inputs = random_inputs(4, num_tokens, *heads_and_dims)
    rng = np.random.default_rng(3)
    starts = np.zeros((4, num_tokens), np.int32)
    starts[0] = 1  # one-token documents
    starts[1, rng.choice(64, 32, replace=False)] = 1  # many starts within a chunk
    starts[2, [1, 15, 16, 17, 48, 63, 64, 65]] = 1
    starts[3, [20, 40, 60, 66]] = 1
    starts[2, 66:] = rng.uniform(size=num_tokens - 66) < 0.05
    segment_ids = np.cumsum(starts, axis=1)
    segment_ids[3, 55:] = 0  # padding's id may be any, and lengths may end before it or in it
    return inputs | {
        "segment_ids": segment_ids.astype(np.int32),
        "lengths": np.array([num_tokens, num_tokens, num_tokens - 1, 52], np.int32),
    }


def rounded(inputs, dtype):
    """The values that evaluate() makes of them, as float64."""
    with jax.default_device(_cpu()):
        floats = as_arrays({n: x for n, x in inputs.items() if n not in INTEGERS}, dtype)
        return inputs | {name: np.asarray(x, np.float64) for name, x in floats.items()}


def cotangents(inputs, seed=7):
    """Random cotangents (do, dfinal_state)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=inputs["v"].shape), rng.normal(size=state_shape(inputs))


def state_shape(inputs):
    batch, _, num_heads, value_dim = inputs["v"].shape
    return batch, num_heads, inputs["q"].shape[-1], value_dim


@cache
def _program(implementation, options):
    def loss(floats, integers, do, dfinal_state):
        o, final_state = kda(**floats, **integers, **dict(options), implementation=implementation)
        value = jnp.sum(o * do) + jnp.sum(final_state * dfinal_state)
        return value, {"o": o, "final_state": final_state}

    return jax.jit(jax.grad(loss, has_aux=True))


def as_arrays(floats, dtype):
    """JAX arrays of a dtype, the state's at least float32."""
    state_dtype = jnp.promote_types(dtype, jnp.float32)
    return {
        name: jnp.asarray(x, state_dtype if name == "initial_state" else dtype)
        for name, x in floats.items()
    }


def evaluate(implementation, inputs, dtype=np.float32, cotangent=None, **options):
    """{"o", "final_state", "dq", ...} in NumPy; float64 if that is the dtype asked for."""
    do, dfinal_state = cotangents(inputs) if cotangent is None else cotangent
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        state_dtype = jnp.promote_types(dtype, jnp.float32)
        floats = {name: x for name, x in inputs.items() if name not in INTEGERS}
        floats = as_arrays(floats, dtype)
        integers = {name: jnp.asarray(inputs[name]) for name in INTEGERS if name in inputs}
        grads, outputs = _program(implementation, tuple(sorted(options.items())))(
            floats, integers, jnp.asarray(do, state_dtype), jnp.asarray(dfinal_state, state_dtype)
        )
        results = outputs | {f"d{name}": grad for name, grad in grads.items()}
        return {name: np.asarray(x) for name, x in results.items()}


@cache
def _decode_program(implementation, options):
    def chain(per_token, params, state, active):
        def step(state, token):
            o, state = kda_decode(
                **token,
                **params,
                state=state,
                active=active,
                implementation=implementation,
                **dict(options),
            )
            return state, o

        time_major = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), per_token)
        state, o = jax.lax.scan(step, state, time_major)
        return {"o": jnp.moveaxis(o, 0, 1), "final_state": state}

    return jax.jit(chain)


def decode(implementation, inputs, dtype=np.float32, active=None, **options):
    """Token after token by kda_decode: {"o", "final_state"} in NumPy."""
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        params = as_arrays(inputs, dtype)
        per_token = {name: params.pop(name) for name in PER_TOKEN}
        state = params.pop("initial_state")
        program = _decode_program(implementation, tuple(sorted(options.items())))
        results = program(per_token, params, state, active)
        return {name: np.asarray(x) for name, x in results.items()}


def truth(inputs, cotangent=None, implementation="reference", **options):
    """The token recurrence in float64, on the CPU."""
    options = options | {"chunk_size": 64}
    with jax.default_device(_cpu()):
        return evaluate(implementation, inputs, np.float64, cotangent, **options)


def _cpu():
    return jax.local_devices(backend="cpu")[0]


def relative_rms(got, want):
    """RMS(got - want) / RMS(want); what should be 0 must be."""

    def rms(x):
        return np.sqrt(np.mean(np.square(x, dtype=np.float64)))

    return float(rms(got.astype(np.float64) - want) / max(rms(want), 1e-12))


def assert_close(got, want, tolerance, floor=1e-3):
    """Per array: max |got - want| <= tolerance * max(max |want|, floor)."""
    assert got.keys() == want.keys()
    errors = {}
    for name in want:
        difference = np.abs(got[name].astype(np.float64) - want[name])
        errors[name] = difference.max() / max(np.abs(want[name]).max(), floor)
    assert all(error <= tolerance for error in errors.values()), errors


def golden(name):
    """(inputs, cotangent, options, results) of a golden file (tests/golden/kda_*.npz)."""
    arrays = dict(np.load(GOLDEN / f"kda_{name}.npz"))
    inputs = {key: arrays[key] for key in ("q", "k", "v", "initial_state") if key in arrays}
    inputs |= {"gate": arrays["raw_g"], "beta": arrays["beta_logits"], "a_log": arrays["A_log"]}
    inputs["dt_bias"] = arrays["dt_bias"].reshape(arrays["raw_g"].shape[2:])
    results = {
        {"raw_g": "dgate", "beta_logits": "dbeta", "A_log": "da_log"}.get(key, f"d{key}"): grad
        for key in ("q", "k", "v", "raw_g", "beta_logits", "A_log", "initial_state")
        if (grad := arrays.get(f"d{key}")) is not None
    }
    results |= {key: arrays[key] for key in ("o", "final_state")}
    results["ddt_bias"] = arrays["ddt_bias"].reshape(inputs["dt_bias"].shape)
    options = {
        "gate_kind": "bounded" if arrays["gate_is_lower_bounded"] else "softplus",
        "use_qk_l2norm": bool(arrays["qk_l2norm_inside"]),
        "scale": float(arrays["scale"]),
    }
    if arrays["gate_is_lower_bounded"]:
        options["lower_bound"] = float(arrays["lower_bound"])
    dfinal_state = arrays.get("dfinal_state", np.zeros_like(arrays["final_state"]))
    return inputs, (arrays["do"], dfinal_state), options, results, arrays.get("cu_seqlens")


def pad_tokens(inputs, cotangent, num_tokens):
    """The same call with NaN tokens behind `lengths`: calls of many lengths share a program."""
    batch, length = inputs["q"].shape[:2]

    def pad(x, value):
        widths = [(0, 0), (0, num_tokens - length)] + [(0, 0)] * (x.ndim - 2)
        return np.pad(x, widths, constant_values=value)

    per_token = {name: pad(inputs[name], np.nan) for name in PER_TOKEN}
    padded = inputs | per_token | {"lengths": np.full(batch, length, np.int32)}
    return padded, (pad(cotangent[0], 1.0), cotangent[1])


def first_tokens(results, num_tokens):
    """Cuts the per-token arrays of `evaluate` down to the first tokens."""
    return {n: x[:, :num_tokens] if n in PER_TOKEN_RESULTS else x for n, x in results.items()}


def with_another_future(inputs, length):
    """Every input changed from token `length` on, the gate to saturation."""
    batch, num_tokens, num_qk_heads, key_dim = inputs["q"].shape
    num_heads, value_dim = inputs["v"].shape[2:]
    dims = num_qk_heads, num_heads, key_dim, value_dim
    other = random_inputs(batch, num_tokens, *dims, seed=1)
    other["gate"] = 1e4 * np.sign(other["gate"])
    return inputs | {
        name: np.concatenate([inputs[name][:, :length], other[name][:, length:]], axis=1)
        for name in PER_TOKEN
    }


def prefix_cotangent(inputs, length):
    """A loss of the first tokens alone."""
    do, dfinal_state = cotangents(inputs)
    do[:, length:] = 0
    return do, 0 * dfinal_state


def part_of(inputs, cotangent, start, end, state, dstate):
    """Tokens start to end as a call of their own; all parts share one program through lengths."""
    part = inputs | {name: np.roll(inputs[name], -start, axis=1) for name in PER_TOKEN}
    part["segment_ids"] = np.zeros(inputs["q"].shape[:2], np.int32)
    part["lengths"] = np.full(len(inputs["q"]), end - start)
    return part | {"initial_state": state}, (np.roll(cotangent[0], -start, axis=1), dstate)


def whole_and_chained(run, inputs, cotangent, cut):
    """Results of one call, and of two that the state and its gradient join; run: evaluate's."""
    num_tokens, state, dstate = inputs["q"].shape[1], inputs["initial_state"], cotangent[1]

    def part(start, end, state, dstate):
        results = run(*part_of(inputs, cotangent, start, end, state, dstate))
        return first_tokens(results, end - start)

    whole = part(0, num_tokens, state, dstate)
    middle = part(0, cut, state, dstate)["final_state"]
    tail = part(cut, num_tokens, middle, dstate)
    head = part(0, cut, state, tail["dinitial_state"])
    chained = {name: np.concatenate([head[name], tail[name]], axis=1) for name in PER_TOKEN_RESULTS}
    chained |= {name: head[name] + tail[name] for name in ("da_log", "ddt_bias")}
    chained |= {"final_state": tail["final_state"], "dinitial_state": head["dinitial_state"]}
    return whole, chained
