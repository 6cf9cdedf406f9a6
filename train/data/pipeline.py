"""Training batches: independent streams side by side, with an exact and small state each."""

from collections.abc import Iterator, Sequence
from typing import Any

import grain

from train.data.batch import Batch
from train.data.config import DataConfig
from train.data.packing import Pieces, pack, rows_to_batch
from train.data.sources import TextSource
from train.data.tokenizer import ByteTokenizer

PREFETCHED_BATCHES = 4  # made ahead by one background thread; enough to hide a burst of packing


class TrainBatches(Iterator[Batch]):
    """Endless iterator over this process's rows of the global batches, as numpy arrays.

    All pieces of the corpus, shuffled anew in every epoch, are dealt to the streams in turn: stream
    s gets the pieces s, s + num_streams, ... and packs them by itself. Its rows therefore depend
    on neither the process count nor the mesh, and no piece is lost or repeated in an epoch.

    `rows` are the places of its rows in the global batch.

    Args:
      config: corpus and batch geometry.
      source: the training side of the corpus.
      tokenizer: turns bytes into tokens.
      streams: the streams of this process, in the order of its rows; None means all of them.
    """

    def __init__(
        self,
        config: DataConfig,
        source: TextSource,
        tokenizer: ByteTokenizer,
        *,
        streams: Sequence[int] | None = None,
    ) -> None:
        self._streams = tuple(range(config.streams) if streams is None else streams)
        if not self._streams or not set(self._streams) <= set(range(config.streams)):
            raise ValueError(
                f"streams={self._streams} must be some of the {config.streams} streams that the "
                f"config has, for example range({config.streams})"
            )
        size = config.rows_per_stream
        self.rows = tuple(s * size + n for s in self._streams for n in range(size))
        self._source = source
        # What fixes the rows of a stream. A state means nothing under another recipe.
        self._recipe = {
            "corpus": source.fingerprint,
            "context_length": config.context_length,
            "num_streams": config.streams,
            "seed": config.seed,
            "shuffle": config.shuffle,
        }
        pieces = grain.MapDataset.source(Pieces(source, tokenizer, config.context_length))
        if config.shuffle:
            pieces = pieces.shuffle(seed=config.seed)
        pieces = pieces.repeat()
        # Reading is a system call on a small file: threads of its own would only cost.
        in_place = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        rows = [
            pack(pieces[s :: config.streams].to_iter_dataset(in_place), config.context_length)
            for s in self._streams
        ]
        batches = grain.experimental.ZipIterDataset(
            [stream.batch(config.rows_per_stream) for stream in rows]
        ).map(rows_to_batch)
        self._iterator = iter(
            grain.experimental.ThreadPrefetchIterDataset(
                batches, prefetch_buffer_size=PREFETCHED_BATCHES
            )
        )

    def __next__(self) -> Batch:
        return next(self._iterator)

    def start_prefetch(self) -> None:
        """Begin to make batches in the background, for example while the step compiles."""
        self._iterator.start_prefetch()

    def get_state(self) -> list[dict[str, Any]]:
        """One JSON-able state per stream: the position after the last batch handed out."""
        positions = self._iterator.get_state()["parents"]
        return [
            {"stream": stream, **self._recipe, "position": position}
            for stream, position in zip(self._streams, positions, strict=True)
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on after the batch at which `get_state` was called.

        Args:
          states: the states of at least this process's streams, in any order.

        Raises:
          ValueError: a state is missing or belongs to other data; says what differs.
        """
        by_stream = {state["stream"]: state for state in states}
        for state in states:
            for name, value in self._recipe.items():
                if state[name] != value:
                    raise ValueError(self._changed(name, state[name]))
        if missing := set(self._streams) - set(by_stream):
            raise ValueError(
                f"no data state for streams {sorted(missing)}; the checkpoint holds "
                f"{sorted(by_stream)}, and a process may only run streams that it holds"
            )
        self._iterator.set_state({"parents": [by_stream[s]["position"] for s in self._streams]})

    def _changed(self, name: str, saved: Any) -> str:
        if name == "corpus":
            return (
                "the files of the corpus have changed since the checkpoint, for example because "
                f"another Python has another standard library (now {len(self._source)} training "
                f"files below {self._source.root}); bring the files back, or use a new workdir"
            )
        field = {"num_streams": "batch_size (or num_streams)"}.get(name, name)
        return (
            f"the checkpoint was made with data.{field} = {saved}, this run has "
            f"{self._recipe[name]}; set it back, or use a new workdir"
        )

    def close(self) -> None:
        """Stop the background thread; the iterator is of no use afterwards."""
        self._iterator.close()
        del self._iterator  # Grain's destructor complains when it runs as late as Python's exit
