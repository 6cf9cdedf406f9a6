"""KDA against the golden arrays; every implementation runs the same tests."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kda import kda
from kernels.kda.api import IMPLEMENTATIONS

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_base(implementation):
    arrays = np.load(GOLDEN / "kda_ragged_b2_t75_h2_k32_v48.npz")
    o, final_state = jax.jit(
        lambda a: kda(
            a["q"],
            a["k"],
            a["v"],
            a["raw_g"],
            a["beta_logits"],
            a_log=a["A_log"],
            dt_bias=a["dt_bias"].reshape(2, 32),
            use_qk_l2norm=False,
            initial_state=a["initial_state"],
            implementation=implementation,
        )
    )(dict(arrays))
    for got, name in ((o, "o"), (final_state, "final_state")):
        assert jnp.max(jnp.abs(got - arrays[name])) < 1e-5 * np.max(np.abs(arrays[name]))
