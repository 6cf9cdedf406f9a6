"""The unit that the train step consumes."""

from typing import NamedTuple

import jax
import numpy as np

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """Rows of packed documents, all fields [B, T].

    A segment is a document, or the part of one that fits a row. Targets are the next tokens of
    the same document, also where the document goes on outside the row.
    """

    inputs: Array  # int32 tokens
    targets: Array  # int32 tokens, 0 where loss_mask is false
    segment_ids: Array  # int32: 1, 2, ... within a row; 0 is padding, always at the end
    positions: Array  # int32: 0, 1, ... within a segment
    loss_mask: Array  # bool: false on padding and on a document's last token
