"""Which rows of the global batches a process makes, and how they come to its devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from train.data.batch import Batch
from train.data.config import DataConfig
from train.run.mesh import batch_sharding


def streams_here(mesh: Mesh, data: DataConfig) -> list[int]:
    """The streams whose rows this process's devices hold, in order.

    A stream whose rows, or whose rows' tokens, lie on several processes is run by each of them.
    """
    shape = data.batch_size, data.context_length
    shards = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    rows = {row for over_rows, _ in shards for row in range(data.batch_size)[over_rows]}
    return sorted({row // data.rows_per_stream for row in rows})


def to_devices(mesh: Mesh, batch: Batch, rows: Sequence[int], num_rows: int) -> Batch:
    """The global batch [num_rows, T], spread over the mesh. All processes call it together.

    Args:
      batch: numpy arrays [len(rows), T], the rows that this process has.
      rows: their places in the global batch, rising; at least those that its devices hold.
    """
    place = {row: n for n, row in enumerate(rows)}

    def put(x: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, slice]) -> np.ndarray:
            held = range(num_rows)[index[0]]
            first = place[held[0]]
            return x[first : first + len(held), index[1]]

        shape = num_rows, x.shape[1]
        return jax.make_array_from_callback(shape, batch_sharding(mesh), shard)

    return jax.tree.map(put, batch)
