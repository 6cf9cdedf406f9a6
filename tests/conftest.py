"""Settings for every test: CPU, no silent rank promotion, a float64 fixture."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little: LLVM without optimisation compiles three times faster.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """The test runs with 64-bit types on."""
    with jax.enable_x64(True):
        yield
