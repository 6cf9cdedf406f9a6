"""Experts on several devices give what one device gives, and drop what the bound says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
from jax.sharding import AxisType, PartitionSpec as P
from kernels.grouped_matmul import grouped_matmul
from model.config import MoEConfig
from model.dispatch import num_rows
from model.expert_parallel import Chosen, mix_experts
from model.sharding import AXES, total
from tests.multidevice import emulation

DATA, SIZE, M, J, E, R, BLOCK = 2, 4, 12, 3, 8, 5, 4  # M tokens of a device; E experts in all
mesh = jax.make_mesh((DATA, SIZE, 1), AXES, axis_types=(AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
num_tokens = DATA * SIZE * M

def distinct(*experts):
    return np.stack([rng.permutation(experts)[:J] for _ in range(num_tokens)])

def padded(share):
    return np.where(rng.random((num_tokens, 1)) < share, E, distinct(*range(E)))

none = np.full((num_tokens, J - 1), E)
LOADS = {
    "even": distinct(*range(E)),
    "uneven": np.where(rng.random((num_tokens, J)) < 0.6, [[0, 5, E]], distinct(1, 2, 3, 4, 6, 7)),
    "one expert": np.concatenate([np.full((num_tokens, 1), 3), none], axis=1),
    "one device": np.concatenate([distinct(6, 7, E)[:, :2], none[:, :1]], axis=1),
    "padding": padded(0.5),
    "padding alone": padded(1.0),
}

def run(config, chosen, w_ERR):
    def experts(rows, group_sizes):
        return jnp.tanh(grouped_matmul(rows, w_ERR, group_sizes, group_multiple=BLOCK))
    u, dropped = mix_experts(config, experts, chosen)
    return u, dropped[None]

@functools.cache
def gradients(dispatch, factor):
    bounds = {"dispatch": dispatch or "gather", "buffer_factor": factor}
    config = MoEConfig(E, J, 1, row_block=BLOCK, **bounds)
    def local(floats, ids, kept, cotangent):
        def loss(floats):
            z, weights, w = floats
            u, dropped = run(config, Chosen(z, ids, weights * kept), w)
            return jnp.sum(u * cotangent), (u, dropped)
        (dz, dweights, dw), out = jax.grad(loss, has_aux=True)(floats)
        return (dz, dweights, total(dw, ("data", "sequence"))), out
    if dispatch is None:
        f = local
    else:
        tokens = P(("data", "expert"))
        floats = tokens, tokens, P("expert")
        f = jax.shard_map(
            local, mesh=mesh, in_specs=(floats, tokens, tokens, tokens),
            out_specs=(floats, (tokens, tokens)), check_vma=False,
        )
    def summed(*args):
        grads, (u, dropped) = f(*args)
        return grads, (u, jnp.sum(dropped))
    return jax.jit(summed)

def keep(ids, factor):
    # Which assignments find room: a device is filled expert by expert, and token by token.
    kept = ids < E
    if factor is None:
        return kept
    held = E // SIZE
    rows = num_rows(min(int(np.ceil(factor * M * J)), SIZE * M * held), held, BLOCK)
    for tokens in np.split(np.arange(num_tokens), DATA):
        for device in range(SIZE):
            row = 0
            for expert in range(device * held, device * held + held):
                for token, choice in zip(*np.nonzero(ids[tokens] == expert)):
                    kept[tokens[token], choice] = row < rows
                    row += 1
                row = -(-row // BLOCK) * BLOCK
    return kept

if RAGGED:
    emulation.install()
floats = tuple(rng.standard_normal(s) for s in ((num_tokens, R), (num_tokens, J), (E, R, R)))
cotangent = rng.standard_normal((num_tokens, R))
most = 0
for load, ids in LOADS.items():
    for dispatch, factor in CASES:
        kept = keep(ids, factor)
        everything = np.ones_like(kept)
        new = gradients(dispatch, factor)(floats, ids, everything, cotangent)
        grads, (u, dropped) = gradients(None, None)(floats, ids, kept, cotangent)
        assert dropped == 0
        want = grads, (u, np.sum((ids < E) & ~kept))
        most = max(most, int(want[1][1]))
        check = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)
        where = f"{load}, {dispatch}, {factor}"
        jax.tree.map(functools.partial(check, err_msg=where), new, want)
print("equal,", "some" if most else "none", "dropped")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ragged, cases, dropped",
    [
        (False, [("gather", None), ("all_to_all", None)], "none"),
        (False, [("gather", 0.3), ("gather", 1.25)], "some"),
        (True, [("all_to_all", None)], "none"),
        (True, [("all_to_all", 0.3), ("all_to_all", 1.25)], "some"),
    ],
)
def test_eight_devices_mix_what_one_mixes(ragged, cases, dropped):
    done = subprocess.run(
        [sys.executable, "-c", f"RAGGED, CASES = {ragged}, {cases}\n{PROGRAM}"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"equal, {dropped} dropped"
