"""KDA with its sequence on 2, 5 and 8 devices equals the whole call, documents across shards."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from functools import partial
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from kernels.kda import kda, kda_context_parallel
from tests.kernels.kda_cases import random_inputs

jax.config.update("jax_enable_x64", DTYPE == "float64")
TOKENS = {"q", "k", "v", "gate", "beta", "segment_ids"}

def grads(call, inputs, cotangent):
    def loss(arrays):
        return jnp.sum(call(arrays | integers) * cotangent)
    floats = {name: x for name, x in inputs.items() if name != "segment_ids"}
    integers = {name: x for name, x in inputs.items() if name == "segment_ids"}
    return jax.jit(jax.value_and_grad(loss))(floats)

def check(num_devices, num_tokens, segment_ids):
    T = num_tokens * num_devices
    inputs = random_inputs(2, T, 2, 4, 16, 8)
    inputs.pop("initial_state")
    inputs = {name: jnp.asarray(x, DTYPE) for name, x in inputs.items()}
    if segment_ids is not None:
        inputs["segment_ids"] = jnp.asarray(segment_ids(T), jnp.int32)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((2, T, 4, 8)), DTYPE)
    options = {"chunk_size": 32, "implementation": IMPLEMENTATION} | OPTIONS
    mesh = Mesh(jax.devices()[:num_devices], "s", axis_types=(AxisType.Auto,))
    specs = {name: P(None, "s") if name in TOKENS else P() for name in inputs}
    # Pallas' interpreter mixes arrays that vary over the mesh with constants: refused.
    whole = lambda arrays: kda(**arrays, **options)[0]
    parts = jax.shard_map(
        lambda arrays: kda_context_parallel(**arrays, axis_name="s", **options),
        mesh=mesh, in_specs=(specs,), out_specs=P(None, "s"),
        check_vma=not IMPLEMENTATION.startswith("pallas"),
    )
    got, want = grads(parts, inputs, cotangent), grads(whole, inputs, cotangent)
    bound = 1e-11 if DTYPE == "float64" else 2e-5
    np.testing.assert_allclose(parts(inputs), whole(inputs), rtol=0, atol=bound)
    for name in want[1]:
        scale = np.max(np.abs(want[1][name]))
        np.testing.assert_allclose(
            got[1][name] / scale, want[1][name] / scale, rtol=0, atol=bound, err_msg=name
        )

within = lambda T: np.stack([np.arange(T) // 7, np.arange(T) * 3 // T])
at_borders = lambda T: np.stack([np.arange(T) * 8 // T, np.arange(T) // (T // 2)])
for num_devices, num_tokens, segment_ids in CASES:
    check(num_devices, num_tokens, segment_ids and globals()[segment_ids])
"""
ALL = [(2, 37, None), (5, 3, "within"), (8, 10, "at_borders"), (8, 1, None), (8, 32, "within")]
FEW = [(4, 40, "within")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "dtype", "options", "cases"),
    [
        ("xla", "float64", {}, ALL),
        ("xla", "float64", {"gate_kind": "softplus", "lower_bound": None}, FEW),
        ("reference", "float64", {}, FEW),
        ("pallas_triton", "float32", {"residuals": "full"}, FEW),
        ("pallas_mosaic_tpu", "float32", {}, FEW),
    ],
)
def test_equals_the_whole_call(implementation, dtype, options, cases):
    settings = (
        f"IMPLEMENTATION, DTYPE, OPTIONS = {implementation!r}, {dtype!r}, {options!r}\n"
        f"CASES = {cases!r}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", settings + PROGRAM],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
