"""Settings for every test, and for `pytest -m device`: acceptance on the accelerator at hand.

Elsewhere: CPU, no silent rank promotion, a float64 fixture. `-m device` collects the files
test_*_device.py and nothing else (so it needs no more than what those import), any other run
leaves them out; it takes the accelerator that JAX finds, beside the CPU for its oracles.
"""

import os

import numpy as np
import pytest


def wants_device(config):
    return config.getoption("markexpr") == "device"


def pytest_configure(config):
    # All of this must be in place before anything imports jax.
    if not wants_device(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Tests compile much and run little: LLVM without optimisation compiles three times faster.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    elif "cpu" not in (os.environ.get("JAX_PLATFORMS") or "cpu"):
        os.environ["JAX_PLATFORMS"] += ",cpu"
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return collection_path.stem.endswith("_device") != wants_device(config) or None


def pytest_terminal_summary(terminalreporter):
    """Per family and dtype the worst error of each output, from the property "errors" of a test."""
    rows = {}
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        properties = dict(getattr(report, "user_properties", ()))
        if getattr(report, "when", None) != "call" or "errors" not in properties:
            continue
        family, dtype, errors = properties["errors"]
        row = rows.setdefault((family, dtype), {"s": 0.0, "failed": 0, "worst": {}})
        row["s"] += report.duration
        row["failed"] += report.failed
        for name, error in errors.items():
            row["worst"][name] = np.maximum(row["worst"].get(name, 0.0), error)  # NaN stays
    if not rows:
        return
    import jax

    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    terminalreporter.section(f"worst relative RMS errors on {device}")
    names = list(dict.fromkeys(name for row in rows.values() for name in row["worst"]))
    labels = "".join(f"{name.removesuffix('_state'):>9s}" for name in names)
    terminalreporter.line(f"{'':27s}{labels}  seconds")
    for (family, dtype), row in sorted(rows.items()):
        cells = (f"{row['worst'][n]:9.1e}" if n in row["worst"] else f"{'':9s}" for n in names)
        verdict = f"  {row['failed']} FAILED" if row["failed"] else ""
        terminalreporter.line(f"{family:17s} {dtype:9s}{''.join(cells)} {row['s']:8.1f}{verdict}")


@pytest.fixture
def x64():
    """The test runs with 64-bit types on."""
    import jax

    with jax.enable_x64(True):
        yield
