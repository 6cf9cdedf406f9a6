"""From a person's ml_collections config to frozen, validated dataclasses."""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from model.config import ModelConfig
from train.data.config import DataConfig
from train.run.mesh import MeshConfig
from train.step.optimizer import OptimizerConfig
from train.step.train_step import StepConfig

T = TypeVar("T")


class Typed(str):
    """A value as a person typed it on the command line; `build` reads it as the field's type."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long a run is and what it reports and keeps."""

    steps: int  # optimizer steps
    seed: int = 0  # of the parameters
    log_every: int = 10  # steps between log lines
    eval_every: int = 0  # steps between held-out evaluations; 0: only at the end
    eval_context: int = 0  # tokens of a held-out row; 0: data.context_length
    eval_rows: int = 256  # rows scored at the end, evenly spread over the held-out files; 0: all
    eval_rows_during: int = 32  # rows scored at each evaluation during training; 0: all
    checkpoint_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # the newest so many are kept
    max_skipped: int = 10  # consecutive non-finite steps that stop the run
    sample_tokens: int = 200  # length of the sample at the end; 0: none

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "keep_checkpoints", "max_skipped"):
            if getattr(self, name) < 1:
                raise ValueError(f"run.{name}={getattr(self, name)} must be at least 1; try 10")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"run.seed={self.seed} must be in [0, 2**32); try 0")
        not_negative = ("eval_every", "eval_context", "eval_rows", "eval_rows_during")
        for name in (*not_negative, "checkpoint_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"run.{name}={getattr(self, name)} must not be negative; try 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A whole experiment."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    step: StepConfig
    mesh: MeshConfig
    run: RunConfig
    layouts: dict = dataclasses.field(default_factory=dict)  # fields to change, by name

    def __post_init__(self) -> None:
        rows, parts = self.data.batch_size, self.step.accumulation
        if rows % parts:
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            raise ValueError(
                f"step.accumulation={parts} does not divide data.batch_size={rows}; "
                f"try one of {divisors}"
            )


def build(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Makes dataclass `cls` of a (nested) mapping.

    Raises:
      ValueError: an unknown key (naming the nearest valid one), a missing key, a value of the
        wrong type, or a combination that a dataclass refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            near = [f"{path}.{near[0]}"] if near else paths_to(key, TrainConfig)
            hint = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(fields)}"
            raise ValueError(f"{path}.{key} does not exist; {hint}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, field in fields.items():
        if name in values:
            works = None if field.default is dataclasses.MISSING else field.default
            arguments[name] = _convert(hints[name], values[name], f"{path}.{name}", works)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{path}.{name} is missing; set it in the config file")
    return cls(**arguments)


def paths_to(key: str, cls: type, path: str = "config") -> list[str]:
    """Where a field of this name lies below a dataclass."""
    hints = typing.get_type_hints(cls)
    here = [f"{path}.{key}"] if key in hints else []
    groups = [(name, hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    return here + [p for name, hint in groups for p in paths_to(key, hint, f"{path}.{name}")]


def _convert(hint: Any, value: Any, path: str, works: Any) -> Any:
    """`value` as the type that a field's hint names; `works` is a value to suggest, if not None."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            valid = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(hint))
            raise ValueError(f"{path}={value!r} must be a group of fields: {valid}")
        return build(hint, value, path)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Typed):
        value = _from_text(value, options)
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is float and type(value) in (int, float):
            if not math.isfinite(value):
                raise ValueError(f"{path}={value} must be a finite number; try 0.1")
            return float(value)
        if type(value) is option:
            return value
    names = " or ".join(_NAMES[option] for option in options)
    works = _EXAMPLES[options[0]] if works is None else works
    raise ValueError(f"{path}={value!r} must be {names}; try {works}")


def _from_text(text: str, options: tuple[type, ...]) -> Any:
    """What a typed text means for a field of these types; the text itself if nothing."""
    if type(None) in options and text == "None":
        return None
    if bool in options:
        return {"true": True, "false": False}.get(text.lower(), str(text))
    for number in (int, float):
        if number in options:
            with contextlib.suppress(ValueError):
                return number(text)
    return str(text)


_NAMES = {
    bool: "a bool (true or false)",
    int: "an int",
    float: "a float",
    str: "a str",
    type(None): "None",
    dict: "a group of fields",
}
_EXAMPLES = {bool: True, int: 16, float: 0.1, str: "a name", dict: {}}
