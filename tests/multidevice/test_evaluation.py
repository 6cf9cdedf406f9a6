"""The sample at the end of a run on several devices: that of one, also where experts have little
room."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from model.balance import init_balance
from model.config import MoEConfig
from model.transformer import init_params
from tests.model.configs import small_config
from train.run.evaluation import sample
from train.run.mesh import MeshConfig, make_mesh

FACTOR = 2 * 14 / 64  # of 64, an even share of the assignments of rows that are full

def sampled(sizes):
    # Room for the 14 tokens of the sample, however they choose, and not for what may follow them.
    moe = MoEConfig(8, 2, 8, latent_dim=8, row_block=1, buffer_factor=FACTOR)
    model = small_config(
        layers="KM", moe=moe, dtype="float32", param_dtype="float32", shard_min_size=0
    )
    params = init_params(model, jax.random.key(0))
    balance = init_balance(model.balance, model.num_moe_layers, moe.num_experts)
    prompt = np.array([3, 5, 7, 2, 9, 1], np.int32)
    with jax.set_mesh(make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])):
        return sample(params, balance, prompt, 8, model, context_length=32)

one = sampled((1, 1, 1))
assert len(set(one.tolist())) > 2, one
for sizes in ((1, 4, 1), (2, 4, 1)):
    np.testing.assert_array_equal(sampled(sizes), one, err_msg=str(sizes))
print("equal")
"""


def test_samples_do_not_depend_on_the_mesh():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
