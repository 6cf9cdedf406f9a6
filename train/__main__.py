"""python -m train --config=configs/tiny.py --workdir=runs/tiny [--config.group.field=value]"""

import os
import sys

import jax
from absl import flags

from train.config import TrainConfig
from train.flags import refuse, run
from train.run.checkpoint import newest_step
from train.run.loop import Run
from train.run.processes import join

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run. One that holds a checkpoint is resumed."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Of a run in several processes: HOST:PORT at which process 0 listens."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this one is, from 0.")


def main(config: TrainConfig) -> None:
    """Trains the experiment of the command line."""
    workdir = _WORKDIR.value
    if not workdir:
        refuse("--workdir is missing; name a folder, for example --workdir=runs/tiny")
    hint = ""
    try:
        join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        prepared = Run(config, workdir)
        hint = " (TESSERA_TRACEBACK=1 shows where)"  # from here on it may be the code's mistake
        prepared.train()
    except (ValueError, NotImplementedError, FloatingPointError, OSError) as error:
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        refuse(f"{error}{hint}")
    except KeyboardInterrupt:
        step = newest_step(os.path.join(workdir, "checkpoints"))
        then = "starts afresh" if step is None else f"resumes from step {step}"
        sys.exit(1 if jax.process_index() else f"stopped; the same command {then}")


if __name__ == "__main__":
    run(main)
