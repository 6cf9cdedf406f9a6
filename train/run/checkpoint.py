"""Checkpoints: the only file that knows orbax."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

PyTree = Any
MAX_DIFFERENCES_SHOWN = 3
SHAPING = ("config.model.", "config.optimizer.")  # the groups on which the arrays depend


class Restored(NamedTuple):
    """What a checkpoint held."""

    state: PyTree
    data_states: list[dict[str, Any]]  # of all streams, whatever process saved them
    config: dict[str, Any]
    step: int


def newest_step(directory: str | os.PathLike[str]) -> int | None:
    """Step of the newest complete checkpoint below a directory, or None."""
    folders = Path(directory).expanduser().glob("*")
    return max((int(path.name) for path in folders if path.name.isdigit()), default=None)


def differences(old: Any, new: Any, path: str = "config") -> list[tuple[str, Any, Any]]:
    """Leaves in which two nested dicts differ: path, old and new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in sorted(old.keys() | new.keys())
            for found in differences(old.get(key), new.get(key), f"{path}.{key}")
        ]
    return [] if old == new else [(path, old, new)]


class Checkpoints:
    """The newest `keep` checkpoints below a directory; a half-written one is never visible.

    A checkpoint is a folder named by its step with the state (arrays named by their path in the
    tree, so that containers may change), one JSON state per data stream, and the config as JSON.

    Args:
      directory: made if missing; relative paths are taken from the current folder.
      keep: how many checkpoints stay. An old one goes only when a newer one is complete.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} checkpoints leaves nothing to resume; use 1 or more")
        self._directory = os.path.abspath(os.path.expanduser(directory))
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        arrays, plain = ocp.StandardCheckpointHandler(), ocp.JsonCheckpointHandler()
        registry.add("state", ocp.args.StandardSave, arrays)
        registry.add("state", ocp.args.StandardRestore, arrays)
        for item in ("data", "config"):
            registry.add(item, ocp.args.JsonSave, plain)
            registry.add(item, ocp.args.JsonRestore, plain)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            handler_registry=registry,
        )

    def save(
        self,
        step: int,
        state: PyTree,
        data_states: Sequence[dict[str, Any]],
        config: dict[str, Any],
    ) -> None:
        """Save in the background; returns once the arrays are safe from donation.

        All processes call it together. A step that is not beyond the newest checkpoint's is not
        saved again. An error of the previous save surfaces here or in `wait`.

        Args:
          step: optimizer steps done.
          state: pytree of jax arrays.
          data_states: one JSON-able state for each data stream of this process, with its number
            as "stream"; one that several processes run is saved once.
          config: the resolved config, JSON-able.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_by_name(state)),
                data=ocp.args.JsonSave(_of_all_processes(data_states)),
                config=ocp.args.JsonSave(config),
            ),
        )

    def restore_latest(self, abstract_state: PyTree, config: dict[str, Any]) -> Restored | None:
        """The newest checkpoint, or None when there is none.

        Args:
          abstract_state: pytree of arrays or jax.ShapeDtypeStruct with shardings. The result has
            its structure and its shardings, which need not be those of the run that saved.
          config: this run's, as in `save`.

        Raises:
          ValueError: the checkpoint holds other arrays, and fields of the config that explain it;
            or it cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            _by_name(abstract_state),
        )
        with self._readable(step):
            saved = dict(self._manager.item_metadata(step)["state"])
            plain = self._restore(step, data=ocp.args.JsonRestore(), config=ocp.args.JsonRestore())
        self._refuse_other_arrays(step, saved, abstract, differences(plain.config, config))
        with self._readable(step):
            items = self._restore(step, state=ocp.args.StandardRestore(abstract))
        leaves = [items.state[name] for name in _by_name(abstract_state)]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(state, plain.data, plain.config, step)

    def wait(self) -> None:
        """Return when every save is complete on disk; raises the error of one that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, then free the background threads."""
        self._manager.close()

    def _restore(self, step: int, **items: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Turns whatever orbax raises for a damaged checkpoint into a line for a person."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"the checkpoint {self._directory}/{step} cannot be read ({error}); move that "
                "folder away to resume from the one before it, or use a new workdir"
            ) from error

    def _refuse_other_arrays(
        self,
        step: int,
        saved: dict[str, Any],
        abstract: dict[str, jax.ShapeDtypeStruct],
        changed: list[tuple[str, Any, Any]],
    ) -> None:
        def describe(arrays: dict[str, Any], name: str) -> str:
            if name not in arrays:
                return "absent"
            return f"{np.dtype(arrays[name].dtype).name}{list(arrays[name].shape)}"

        lines = [
            f"{name} is {describe(saved, name)} there and {describe(abstract, name)} here"
            for name in sorted(saved.keys() | abstract.keys(), key=_params_first)
            if describe(saved, name) != describe(abstract, name)
        ]
        if lines:
            more = len(lines) - MAX_DIFFERENCES_SHOWN
            flags = [f"--{path}={old}" for path, old, _ in changed if path.startswith(SHAPING)]
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} is of another model or "
                f"optimizer: {'; '.join(lines[:MAX_DIFFERENCES_SHOWN])}"
                + (f"; and {more} more" if more > 0 else "")
                + (f". Resume with {' '.join(flags)}" if flags else ". The code has changed since")
                + ", or use a new workdir"
            )


def _params_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params"), name


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by their path, for example "params.layer_0.q_proj", in tree order."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _of_all_processes(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of all streams in order, known to every process."""
    if jax.process_count() == 1:
        return list(states)
    text = np.frombuffer(json.dumps(list(states)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    by_stream = {
        state["stream"]: state
        for row, length in zip(texts, lengths, strict=True)
        for state in json.loads(row[:length].tobytes())
    }
    return [by_stream[stream] for stream in sorted(by_stream)]
