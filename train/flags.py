"""The command line of every program: --config=FILE[:arg] and --config.group.field=value."""

import difflib
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from train.config import TrainConfig, Typed, build, paths_to

CONFIGS = Path(__file__).parents[1] / "configs"

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Experiment: a file of configs/, for example configs/tiny.py; "
    "--config.optimizer.learning_rate=1e-3 overrides a field.",
)
_LAYOUT = flags.DEFINE_string(
    "layout", None, "What the config changes on one of the machines that it names in layouts."
)


def run(main: Callable[[TrainConfig], None], layouts: Callable[[], Sequence[str]] = tuple) -> None:
    """Runs a program on the experiment of the command line, or ends it with one line that says
    what is wrong there.

    layouts: names of layouts, of which the first that the config has is taken without --layout.
    """
    for name in ("config", "layout"):  # for --help
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    logging.set_verbosity(logging.WARNING)  # below that, orbax alone tells fifty lines a save

    def start(argv: Sequence[str]) -> None:
        try:
            config = load_config(_CONFIG.value, argv[1:], _LAYOUT.value, layouts())
        except ValueError as error:
            refuse(error)
        main(config)

    app.run(start, flags_parser=_parse)


def refuse(error: Exception | str) -> NoReturn:
    """Ends the program with one line: for mistakes of the person who started it."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def load_config(
    argument: str | None,
    overrides: Sequence[str] = (),
    layout: str | None = None,
    likely: Sequence[str] = (),
) -> TrainConfig:
    """The experiment of FILE[:arg] with the fields that --config.group.field=value sets.

    Args:
      layout: the entry of the config's `layouts` whose fields replace the config's.
      likely: without `layout` the first of these that the config has.

    Raises:
      ValueError: says what would work.
    """
    stray = [word for word in overrides if not word.startswith("-")]
    if argument is None and stray:
        raise ValueError(f"{stray[0]!r} is no flag; {_meant(stray[0], '')}")
    values = _read(argument)
    values = _merge(values, _layout(values.get("layouts"), layout, likely))
    for override in overrides:
        name, equals, text = override.lstrip("-").partition("=")
        if not equals or not override.startswith(("-config.", "--config.")):
            raise ValueError(f"{override!r} is no flag; {_meant(name, text or 'VALUE')}")
        nested: Any = Typed(text)
        for key in reversed(name.split(".")[1:]):
            nested = {key: nested}
        values = _merge(values, nested)
    return build(TrainConfig, values)


def _layout(layouts: Any, layout: str | None, likely: Sequence[str]) -> dict[str, Any]:
    """The fields of the layout that is asked for, or of the first likely one."""
    layouts = layouts or {}
    if not isinstance(layouts, dict) or not all(isinstance(x, dict) for x in layouts.values()):
        raise ValueError(f"config.layouts={layouts!r} must be groups of fields by name; try {{}}")
    if layout is None:
        return next((layouts[name] for name in likely if name in layouts), {})
    if layout not in layouts:
        known = ", ".join(layouts) or "none"
        raise ValueError(f"--layout={layout} is none of the config's layouts; there are {known}")
    return layouts[layout]


def _meant(name: str, text: str) -> str:
    """What somebody may have meant by a flag that does not exist."""
    path = name.removeprefix("config.")
    fields = [f"config.{path}"] if "." in path else paths_to(path, TrainConfig)
    others = difflib.get_close_matches(path, list(flags.FLAGS), n=1)
    near = " or ".join(f"--{flag}={text}" for flag in fields or others)
    if os.path.isfile(name):
        near = f"--config={name}"
    return f"did you mean {near}?" if near else "configs/base.py lists the fields of a config"


def _parse(argv: Sequence[str]) -> list[str]:
    """Parses all flags but the fields of the config, which stay in the result."""
    flags.FLAGS.set_gnu_getopt(True)  # a stray word does not hide the flags behind it
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        refuse(error)


def _read(argument: str | None) -> dict[str, Any]:
    """What get_config() returns in the file of --config=FILE, or get_config(arg) of FILE:arg."""
    file, colon, arg = (argument or "").partition(":")
    if not file.endswith(".py") or not os.path.isfile(file):
        there = {path.stem: os.path.relpath(path) for path in CONFIGS.glob("*.py")}
        there.pop("base")  # what the others start from
        near = difflib.get_close_matches(Path(file).stem, there, n=1) or ["tiny"]
        given = f"--config={argument} is no config file" if argument else "--config is missing"
        files = ", ".join(sorted(there.values()))
        raise ValueError(f"{given}; try --config={there[near[0]]} (there are {files})")
    try:
        get_config = runpy.run_path(file)["get_config"]
        if colon and not inspect.signature(get_config).parameters:
            raise ValueError(f"get_config() takes no :{arg}; try --config={file}")
        return ConfigDict(get_config(arg) if colon else get_config()).to_dict()
    except Exception as error:  # whatever a person's file may raise
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        text = f"{file}{f', line {where}' if where else ''}: {error}"
        if not isinstance(error, ValueError):  # which a config file may raise on purpose
            text += (
                f" ({type(error).__name__}); configs/tiny.py shows what a config file looks like"
            )
        raise ValueError(text) from error


def _merge(old: Any, new: Any) -> Any:
    """Nested dicts with the leaves of `new` in place of those of `old`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merge(old.get(key), value) for key, value in new.items()}
