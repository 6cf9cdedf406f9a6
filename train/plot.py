"""python -m train.plot --metric=max_vio --out=picture.png histogram=runs/a sign=runs/b: curves of
one metric over steps, from the metrics.jsonl of one or more runs."""

import contextlib
import json
from pathlib import Path

import matplotlib
import numpy as np
from absl import app, flags

from train.flags import refuse

_METRIC = flags.DEFINE_string("metric", "max_vio", "A name in metrics.jsonl.")
_OUT = flags.DEFINE_string("out", "metrics.png", "The picture to write.")
_TITLE = flags.DEFINE_string("title", "", "A line above the picture.")

LAST = 20  # values whose mean is printed


def read_metric(workdir: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a run; per-layer metrics become their mean over layers, and of steps that
    were run twice the later one counts.

    Raises:
      ValueError: no run is there, or it has no such metric (naming those it has).
    """
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the --workdir of a run")
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a run that was killed in mid-line
            records.append(json.loads(line))
    values = {
        r["step"]: float(np.mean(r[metric]))
        for r in records
        if metric in r and None not in np.atleast_1d(r[metric])
    }
    if not values:
        names = sorted({name for record in records for name in record} - {"step"})
        raise ValueError(f"{path} has no metric {metric!r}; it has {', '.join(names) or 'none'}")
    steps = sorted(values)
    return np.array(steps), np.array([values[step] for step in steps])


def main(arguments: list[str]) -> None:
    """Draws the runs named on the command line as name=workdir or workdir."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    try:
        if not arguments[1:]:
            raise ValueError("name at least one run, for example histogram=runs/tiny")
        for argument in arguments[1:]:
            name, _, folder = argument.rpartition("=")
            steps, values = read_metric(Path(folder), _METRIC.value)
            axes.plot(steps, values, label=name or folder)
            last = values[-LAST:]
            print(f"{name or folder}: mean of the last {len(last)} values {np.mean(last):.3g}")
        axes.set(xlabel="step", ylabel=_METRIC.value, title=_TITLE.value)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(_OUT.value, dpi=110)
    except (OSError, ValueError) as error:
        refuse(error)
    print(f"wrote {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
