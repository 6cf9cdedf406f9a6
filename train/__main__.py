"""python -m train --config=configs/tiny.py --workdir=runs/tiny [--config.group.field=value]"""

from absl import flags

from train.flags import load_config, refuse, run
from train.run.loop import Run

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run. One that holds a checkpoint is resumed."
)


def main() -> None:
    """Trains the experiment of the command line."""
    config = load_config()
    try:
        prepared = Run(config, _WORKDIR.value)
    except ValueError as error:
        refuse(error)
    try:
        prepared.train()
    except FloatingPointError as error:
        refuse(error)


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    run(main)
