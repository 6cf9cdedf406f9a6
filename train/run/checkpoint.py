"""Checkpoints: the only file that knows orbax."""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

PyTree = Any
MAX_DIFFERENCES_SHOWN = 5


class Restored(NamedTuple):
    """What a checkpoint held."""

    state: PyTree
    data_states: list[dict[str, Any]]  # of all streams, whatever process saved them
    config: dict[str, Any]
    step: int


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
          data_states: one JSON-able state for each data stream of this process.
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

    def restore_latest(self, abstract_state: PyTree) -> Restored | None:
        """The newest checkpoint, or None when there is none.

        Args:
          abstract_state: pytree of arrays or jax.ShapeDtypeStruct with shardings. The result has
            its structure and its shardings, which need not be those of the run that saved.

        Raises:
          ValueError: the checkpoint holds other arrays; names them.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            _by_name(abstract_state),
        )
        self._refuse_other_arrays(step, abstract)
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                data=ocp.args.JsonRestore(),
                config=ocp.args.JsonRestore(),
            ),
        )
        leaves = [items.state[name] for name in _by_name(abstract_state)]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(state, items.data, items.config, step)

    def wait(self) -> None:
        """Return when every save is complete on disk; raises the error of one that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, then free the background threads."""
        self._manager.close()

    def _refuse_other_arrays(self, step: int, abstract: dict[str, jax.ShapeDtypeStruct]) -> None:
        def describe(arrays: dict[str, Any], name: str) -> str:
            if name not in arrays:
                return "absent"
            return f"{np.dtype(arrays[name].dtype).name}{list(arrays[name].shape)}"

        saved = dict(self._manager.item_metadata(step)["state"])
        differences = [
            f"{name} is {describe(saved, name)} there and {describe(abstract, name)} here"
            for name in sorted(saved.keys() | abstract.keys(), key=_params_first)
            if describe(saved, name) != describe(abstract, name)
        ]
        if differences:
            more = len(differences) - MAX_DIFFERENCES_SHOWN
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} is of another model or "
                "optimizer: "
                + "; ".join(differences[:MAX_DIFFERENCES_SHOWN])
                + (f"; and {more} more" if more > 0 else "")
                + f". Resume with its config, {self._directory}/{step}/config/metadata, "
                "or use a new workdir"
            )


def _params_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params"), name


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by their path, for example "params.layer_0.q_proj", in tree order."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _of_all_processes(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stream states of all processes in process order, known to each of them."""
    if jax.process_count() == 1:
        return list(states)
    text = np.frombuffer(json.dumps(list(states)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [
        state
        for row, length in zip(texts, lengths, strict=True)
        for state in json.loads(row[:length].tobytes())
    ]
