"""python -m train --config=configs/tiny.py --workdir=runs/tiny [--config.group.field=value]"""

import os
import sys

from absl import flags

from train.config import TrainConfig
from train.flags import refuse, run
from train.run.checkpoint import newest_step
from train.run.loop import Run

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run. One that holds a checkpoint is resumed."
)


def main(config: TrainConfig) -> None:
    """Trains the experiment of the command line."""
    workdir = _WORKDIR.value
    if not workdir:
        refuse("--workdir is missing; name a folder, for example --workdir=runs/tiny")
    hint = ""
    try:
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
        sys.exit(f"stopped; the same command {then}")


if __name__ == "__main__":
    run(main)
