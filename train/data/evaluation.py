"""Held-out rows, the same in every run."""

from collections.abc import Iterator

import numpy as np

from train.data.batch import Batch
from train.data.packing import Pieces
from train.data.sources import TextSource
from train.data.tokenizer import ByteTokenizer


def heldout_batches(
    source: TextSource,
    tokenizer: ByteTokenizer,
    *,
    context_length: int,
    batch_size: int,
    max_rows: int | None = None,
) -> Iterator[Batch]:
    """Batches [batch_size, context_length] of the documents in order, one piece per row.

    Every byte is the target of exactly one row, so with all rows the masked token losses sum to the
    bits of the files. The last batch is filled up with rows of padding.

    Args:
      source: the held-out side of the corpus.
      tokenizer: turns bytes into tokens.
      context_length: tokens per row; may differ from training.
      batch_size: rows per batch.
      max_rows: at most so many rows, evenly spaced over all documents; None for all.
    """
    pieces = Pieces(source, tokenizer, context_length)
    num_rows = len(pieces) if max_rows is None else min(max_rows, len(pieces))
    chosen = (2 * np.arange(num_rows) + 1) * len(pieces) // (2 * max(num_rows, 1))
    for first in range(0, num_rows, batch_size):
        shape = (batch_size, context_length)
        batch = Batch(*(np.zeros(shape, np.int32) for _ in range(4)), np.zeros(shape, bool))
        for row, index in enumerate(chosen[first : first + batch_size]):
            piece = pieces[index]
            length = len(piece["inputs"])
            batch.inputs[row, :length] = piece["inputs"]
            batch.targets[row, :length] = piece["targets"]
            batch.segment_ids[row, :length] = 1
            batch.positions[row, :length] = np.arange(length)
            batch.loss_mask[row, :length] = piece["loss_mask"]
        yield batch
