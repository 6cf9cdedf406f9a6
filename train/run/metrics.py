"""What a run says: console lines, a progress bar on a terminal, metrics.jsonl, TensorBoard."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm


def duration(seconds: float) -> str:
    """Seconds as 4s, 1m05s or 2h03m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def count(number: float) -> str:
    """1234567 as 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= 0.9995 * limit:  # where three digits round up to the next unit
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


class MetricsWriter:
    """Writes scalars of a step to metrics.jsonl and TensorBoard, and lines to the console.

    metrics.jsonl holds a JSON object a line; arrays (one value per MoE layer) stay lists there and
    become one TensorBoard curve per layer. A resumed run appends; lines of steps that are run
    again appear twice, the later one counts.
    """

    def __init__(self, workdir: Path, first_step: int, num_steps: int) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "metrics.jsonl"
        cut_off = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # a killed run
        self._jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._jsonl.write("\n" if cut_off else "")
        self._tensorboard = SummaryWriter(str(workdir / "tensorboard"))
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=num_steps, initial=first_step, unit="step", leave=False, dynamic_ncols=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._jsonl.close()
        self._tensorboard.close()

    def advance(self) -> None:
        """One step more on the progress bar."""
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        """A line on the console, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records values of a step: numbers, or arrays of one number per MoE layer."""
        plain = {name: _plain(np.asarray(value).tolist()) for name, value in values.items()}
        self._jsonl.write(json.dumps({"step": step, **plain}) + "\n")
        self._jsonl.flush()
        for name, value in plain.items():
            if not isinstance(value, list):
                self._scalar(name, value, step)
                continue
            for layer, number in enumerate(value):
                self._scalar(f"{name}/moe_layer_{layer}", number, step)
        self._tensorboard.flush()

    def _scalar(self, name: str, number: float | None, step: int) -> None:
        if number is not None:
            self._tensorboard.add_scalar(name, number, step)


class NoWriter(MetricsWriter):
    """Of a process that leaves writing to another."""

    def __init__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def advance(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        pass


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: null in their place."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return value if math.isfinite(value) else None
