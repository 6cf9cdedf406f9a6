"""A run that changes its mesh on the way goes on as if it had not."""

from pathlib import Path

import numpy as np
import pytest

from tests.multidevice.launch import finish, losses, start


def train(workdir: Path, cpu_devices: int, *flags: str) -> dict[int, float]:
    """The loss of every step of a run."""
    finish(start(workdir, cpu_devices, *flags))
    return losses(workdir)


@pytest.mark.slow
def test_a_run_goes_on_over_other_meshes(tmp_path):
    legs = tmp_path / "legs"
    train(legs, 8, "--config.run.steps=2", "--config.mesh.expert=4", "--config.mesh.sequence=2")
    train(legs, 4, "--config.run.steps=4", "--config.mesh.expert=2")
    cut = train(legs, 1, "--config.run.steps=6")
    whole = train(tmp_path / "whole", 1, "--config.run.steps=6")
    assert sorted(cut) == sorted(whole) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(cut.values()), list(whole.values()), rtol=1e-4)
