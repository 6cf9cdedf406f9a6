"""The scripts of train/launch/, with stand-ins for srun and gcloud that print their arguments."""

import os
import shlex
import subprocess
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "train/launch"
ARGUMENTS = [
    "--config=configs/tiny.py",
    "--workdir=/shared/two words",
    "--config.data.pattern=*.md",
]


def launch(script: str, stand_in: str, folder: Path, **env: str) -> subprocess.CompletedProcess:
    (folder / stand_in).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / stand_in).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    command = ["bash", str(LAUNCH / script), *ARGUMENTS]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PATH": path} | env
    )


def test_slurm_starts_the_program_with_its_arguments(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "8"}
    done = launch("slurm.sh", "srun", tmp_path, **env)
    words = done.stdout.splitlines()
    assert words[words.index("python") :] == ["python", "-u", "-m", "train", *ARGUMENTS]
    assert "--cpus-per-task=8" in words


def test_every_tpu_host_starts_the_program_with_its_arguments(tmp_path):
    done = launch("tpu_pod.sh", "gcloud", tmp_path, TPU="slice", ZONE="zone", PROJECT="project")
    *words, last = done.stdout.splitlines()
    assert words[-4:] == ["slice", "--zone=zone", "--project=project", "--worker=all"]
    there = shlex.split(last.removeprefix("--command="))  # as the shell of the host will
    assert there[:3] == ["cd", "tessera", "&&"] and there[-len(ARGUMENTS) :] == ARGUMENTS
    missing = launch("tpu_pod.sh", "gcloud", tmp_path, TPU="", ZONE="zone")
    assert missing.returncode != 0 and "TPU=my-slice" in missing.stderr
