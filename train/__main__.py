"""python -m train --config=configs/tiny.py --workdir=runs/tiny [--config.group.field=value]"""

import os

from absl import flags

from train.flags import load_config, refuse, run
from train.run.loop import Run

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run. One that holds a checkpoint is resumed."
)


def main() -> None:
    """Trains the experiment of the command line."""
    config = load_config()
    if not _WORKDIR.value:
        refuse("--workdir is empty; name a folder, for example --workdir=runs/tiny")
    try:
        Run(config, _WORKDIR.value).train()
    except (ValueError, NotImplementedError, FloatingPointError, OSError) as error:
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        refuse(f"{error} (TESSERA_TRACEBACK=1 shows where)")
    except KeyboardInterrupt:
        refuse(f"stopped; the same command resumes from the newest checkpoint of {_WORKDIR.value}")


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    run(main)
