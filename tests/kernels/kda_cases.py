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


def truth(inputs, cotangent=None, **options):
    """The token recurrence in float64."""
    options = options | {"chunk_size": 64}
    return evaluate("reference", inputs, np.float64, cotangent, **options)


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
    per_token = ("o", *(f"d{name}" for name in PER_TOKEN))
    return {n: x[:, :num_tokens] if n in per_token else x for n, x in results.items()}
