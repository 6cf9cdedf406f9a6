"""The single step of KDA: T steps are one call of the recurrence; what is not active stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kda import kda_decode
from kernels.kda.decode import DECODE_IMPLEMENTATIONS
from tests.kernels.kda_cases import (
    assert_close,
    decode,
    finished_inputs,
    random_inputs,
    truth,
)
from tests.kernels.test_kda_triton import abstract_gpus

every_implementation = pytest.mark.parametrize("implementation", DECODE_IMPLEMENTATIONS)

CASES = {
    "bounded": (random_inputs(2, 6, 2, 2, 16, 16), {}),
    "grouped": (random_inputs(2, 6, 2, 4, 12, 40), {"scale": 0.7, "lower_bound": -20.0}),
    "softplus": (random_inputs(1, 6, 1, 2, 60, 33), {"gate_kind": "softplus"}),
    "no_params": (random_inputs(1, 6, 1, 1, 1, 3, gate_params=False), {"use_qk_l2norm": False}),
    "log_decay": (
        finished_inputs(2, 6, 1, 3, 16, 8),
        {"gate_kind": "log_decay", "beta_is_logit": False, "lower_bound": None},
    ),
}


@every_implementation
@pytest.mark.parametrize("case", CASES)
def test_chained_steps_equal_the_recurrence(implementation, case):
    inputs, options = CASES[case]
    want = truth(inputs, **options)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        got = decode(implementation, inputs, dtype, **options)
        assert_close(got, {name: want[name] for name in got}, tolerance)


@every_implementation
def test_rows_that_are_not_active_keep_their_state(implementation):
    inputs = random_inputs(3, 2, 1, 2, 12, 20)
    inputs["initial_state"][1, :, :3] = -0.0
    active = np.array([True, False, True])
    broken = {name: x.copy() for name, x in inputs.items()}
    for name in ("q", "k", "v", "gate", "beta"):
        broken[name][1] = np.nan
    broken["initial_state"][1, 0, 5] = np.nan
    got = decode(implementation, broken, active=active)
    every = decode(implementation, inputs)
    for name in got:
        np.testing.assert_array_equal(got[name][active], every[name][active], err_msg=name)
    assert not got["o"][1].any()
    before = broken["initial_state"][1].astype(np.float32)
    np.testing.assert_array_equal(got["final_state"][1].view(np.int32), before.view(np.int32))


@every_implementation
def test_outputs_have_the_dtype_of_v(implementation):
    got = decode(implementation, random_inputs(1, 1, 1, 1, 16, 16), jnp.bfloat16)
    assert got["o"].dtype == jnp.bfloat16 and got["final_state"].dtype == np.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gate_kind", ["bounded", "softplus"])
@pytest.mark.parametrize("key_dim, value_dim", [(128, 128), (60, 100), (256, 64)])
def test_lowers_for_cuda_in_place(monkeypatch, dtype, gate_kind, key_dim, value_dim):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def step(state, active, *tokens):
        return kda_decode(*tokens, state, active=active, gate_kind=gate_kind)

    def x(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct((3, *dims), dtype)

    state, active = x(4, key_dim, value_dim, dtype=jnp.float32), x(dtype=jnp.bool_)
    tokens = x(2, key_dim), x(2, key_dim), x(4, value_dim), x(4, key_dim), x(4)

    with jax.sharding.use_abstract_mesh(abstract_gpus(x=1)):
        traced = jax.jit(step, donate_argnums=0).trace(state, active, *tokens)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 1
    assert 'name = "kda_decode"' in text
    assert "output_operand_alias" in text and "tf.aliasing_output = 1" in text


ERRORS = {
    r"q has shape \(2, 1, 1, 16\); it must be \[batch, heads, dim\]": {
        "q": np.zeros((2, 1, 1, 16))
    },
    r"state has shape \(2, 1, 16, 8\); .* must be \(2, 1, 16, 16\)": {
        "state": np.zeros((2, 1, 16, 8))
    },
    "state has dtype bfloat16": {"state": jnp.zeros((2, 1, 16, 16), jnp.bfloat16)},
    r"active has shape \(3,\); .* must be \(2,\)": {"active": np.zeros(3, bool)},
    "active has dtype int32; it must be bool": {"active": np.zeros(2, np.int32)},
    "v has dtype float16": {"v": np.zeros((2, 1, 16), np.float16)},
    "leave out a_log and dt_bias": {"gate_kind": "log_decay"},
    "lower_bound is None; the bounded gate": {"lower_bound": None},
    r"implementation is 'reference'; it must be None or one of \['pallas_mosaic_tpu'": {
        "implementation": "reference"
    },
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_would_work(message):
    arguments = random_inputs(2, 1, 1, 1, 16, 16)
    arguments["state"] = arguments.pop("initial_state")
    arguments |= {name: arguments[name][:, 0] for name in ("q", "k", "v", "gate", "beta")}
    arguments |= ERRORS[message]
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments)
    with pytest.raises(ValueError, match=message):
        kda_decode(**arrays)


def test_kernel_refuses_what_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tokens = (jnp.zeros((1, 1, 512)),) * 4
    with pytest.raises(NotImplementedError, match="up to 256, not 512 and 512"):
        kda_decode(
            *tokens, jnp.zeros((1, 1)), jnp.zeros((1, 1, 512, 512)), implementation="pallas_triton"
        )
