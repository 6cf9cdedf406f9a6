"""KDA under shard_map, batch rows and heads on different devices, equals the whole call."""

import os
import subprocess
import sys

import pytest

from kernels.kda.api import IMPLEMENTATIONS

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from kernels.kda import kda
from kernels.kda.triton import pieces
from tests.kernels.kda_cases import random_inputs

pieces.PIECE_UNIT = 1
T = 20 if not OPTIONS else 70  # three chunks of 32: pieces of 2 and 1
segment_ids = np.arange(2 * T).reshape(2, T) // 7
inputs = random_inputs(2, T, 2, 2, 16, 8) | {"segment_ids": segment_ids}
inputs = {name: jnp.asarray(x, jnp.float32) for name, x in inputs.items()}
segment_ids = inputs.pop("segment_ids").astype(jnp.int32)
specs = {name: P("data", None, "heads") for name in ("q", "k", "v", "gate", "beta")}
specs |= {"a_log": P("heads"), "dt_bias": P("heads"), "initial_state": P("data", "heads")}

def call(inputs, segment_ids):
    options = {"chunk_size": 16, "implementation": IMPLEMENTATION} | OPTIONS
    return kda(**inputs, segment_ids=segment_ids, **options)

mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
out_specs = (P("data", None, "heads"), P("data", "heads"))
# Pallas' interpreter mixes arrays that vary over the mesh with constants, which the check refuses.
check_vma = not IMPLEMENTATION.startswith("pallas")
in_specs = (specs, P("data"))
sharded = jax.shard_map(
    call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
)

def grads(call):
    def loss(inputs):
        o, final_state = call(inputs, segment_ids)
        return jnp.sum(o**2) + jnp.sum(final_state**2)
    return jax.jit(jax.grad(loss))(inputs)

got, want = grads(sharded), grads(call)
for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-6, err_msg=name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, options",
    [
        *((name, {}) for name in IMPLEMENTATIONS),
        ("pallas_triton", {"num_splits": 2, "residuals": "lean"}),
        ("pallas_triton", {"num_splits": 2, "residuals": "full"}),
    ],
)
def test_shard_map_over_rows_and_heads(implementation, options):
    settings = f"IMPLEMENTATION, OPTIONS = {implementation!r}, {options!r}\n"
    subprocess.run(
        [sys.executable, "-c", settings + PROGRAM],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        check=True,
    )
