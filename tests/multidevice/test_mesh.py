"""A train step on any mesh is that of one device: eight devices, every way to share them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multidevice.mesh_program import ALL

SPREAD = [s for s in ALL if s[1] > 1]
TWO = [(2, 2, 2), (1, 4, 2)]
THREE = [*TWO, (4, 2, 1)]


CASES = {
    "gather": {},
    "one_document": {"documents": False, "sizes": [s for s in ALL if s[2] > 1]},
    "all_to_all": {"dispatches": ["all_to_all"], "sizes": SPREAD},
    "ragged": {"dispatches": ["all_to_all"], "sizes": THREE, "remat": "full", "ragged": True},
    "float32": {"dtype": "float32", "dispatches": ["gather", "all_to_all"], "sizes": TWO},
    "quantile": {"estimator": "quantile", "accumulation": 2, "sizes": TWO},
    "aux_loss": {"estimator": "aux_loss", "remat": "full", "chunk": 8, "sizes": TWO},
    "too_little_room": {"buffer": 0.3, "dispatches": ["gather", "all_to_all"], "sizes": TWO[:1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_eight_devices_equal_one(settings):
    done = subprocess.run(
        [sys.executable, "-m", "tests.multidevice.mesh_program", json.dumps(settings)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=1200,
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
