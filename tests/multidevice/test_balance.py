"""Given the same margins, histograms and biases do not depend on the mesh, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import PartitionSpec as P
from model.balance import STATS_SPECS, init_balance, update_balance
from model.config import BalanceConfig, MoEConfig
from model.moe import LayerBalance, MoE
from model.sharding import TOKENS, spread, total, unused_axes
from tests.model.configs import small_config
from train.run.mesh import MeshConfig, make_mesh

moe = MoEConfig(num_experts=8, top_k=2, expert_hidden=4, num_shared_experts=0, row_block=4)
config = small_config(
    dim=4, moe=moe, balance=BalanceConfig(num_bins=50), dtype="float32", param_dtype="float32"
)
rng = np.random.default_rng(0)
# Products and sums of small quarters are exact, so that scores are the same on any mesh.
x = rng.integers(-4, 5, (8, 16, 4)).astype(np.float32) / 4
valid = rng.random((8, 16)) < 0.9
shapes = {"expert_gate": (8, 4, 4), "expert_up": (8, 4, 4), "expert_down": (8, 4, 4)}
params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
params["router"] = rng.integers(-4, 5, (4, 8)).astype(np.float32) / 4
if config.moe.latent_norm:
    params["latent_norm"] = np.ones(4, np.float32)
balance = init_balance(config.balance, 1, 8)
of_layer = LayerBalance(balance["bias"][0], balance["bin_range"][0])

def stats_on(*sizes):
    def local(params, x, valid):
        _, out = MoE(config).apply({"params": params}, x, of_layer, valid)
        stats = jax.tree.map(lambda x: x[None], out.stats)
        return {name: total(x, unused_axes(STATS_SPECS[name])) for name, x in stats.items()}
    specs = {name: P("expert") if name in shapes else P() for name in params}
    out = {name: STATS_SPECS[name] for name in ("load", "dropped", "histogram")}
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])
    with jax.set_mesh(mesh):
        stats = jax.jit(spread(local, (specs, TOKENS, TOKENS), out))(params, x, valid)
        new = jax.jit(update_balance, static_argnums=(0, 4))(
            config.balance, balance, stats, np.int32(valid.sum()), 2
        )
    return jax.device_get((stats, new))

one = stats_on(1, 1, 1)
assert one[0]["histogram"].sum() == valid.sum() * 8 and np.ptp(one[1]["bias"]) > 0
for sizes in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)):
    jax.tree.map(np.testing.assert_array_equal, stats_on(*sizes), one)
print("equal")
"""


def test_histograms_and_biases_are_equal_to_the_bit():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
