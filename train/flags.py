"""The command line of every program: --config=FILE[:arg] and --config.group.field=value."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from train.config import TrainConfig, build

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Experiment: a file of configs/, for example configs/tiny.py; "
    "--config.optimizer.learning_rate=1e-3 overrides a field.",
    lock_config=True,
)


def load_config() -> TrainConfig:
    """The experiment of the command line; where it is wrong the program ends with one line."""
    try:
        return build(TrainConfig, _CONFIG.value.to_dict())
    except (OSError, ValueError) as error:
        refuse(error)


def run(main: Callable[[], None]) -> None:
    """Runs a program whose command line holds --config."""
    flags.mark_flag_as_required("config")
    logging.set_verbosity(logging.WARNING)  # below that, orbax alone tells fifty lines a save
    app.run(lambda argv: main() if not argv[1:] else _refuse_stray(argv[1]), flags_parser=_parse)


def refuse(error: Exception | str) -> NoReturn:
    """Ends the program with one line: for mistakes of the person who started it."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def _refuse_stray(argument: str) -> NoReturn:
    refuse(f"{argument!r} is no flag; write --config.group.field=value")


def _parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line; a mistyped key or value would otherwise end in a traceback."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # ml_collections' answer to an unknown field
        text = str(error).replace("\\n", ". ").replace("\\", "").replace("'", "").strip('" ')
        refuse(f"no such config field: {text}")
    except (flags.Error, TypeError, ValueError) as error:
        refuse(str(error).rsplit("Error: ", 1)[-1])  # without the traceback of a config file
