"""Bytes as tokens: needs no file, loses nothing."""

from collections.abc import Iterable

import numpy as np


class ByteTokenizer:
    """Token ids 0..255 are bytes, 256 begins a document. A document is BOS and its bytes."""

    bos_id = 256
    vocab_size = 257  # the model's vocabulary may be larger

    def encode(self, text: str | bytes, *, add_bos: bool = True) -> np.ndarray:
        """Tokens [T] int32 of a text (strings as UTF-8), T one more than its bytes with BOS."""
        data = text.encode() if isinstance(text, str) else text
        tokens_T = np.empty(len(data) + add_bos, np.int32)
        tokens_T[:add_bos] = self.bos_id
        tokens_T[add_bos:] = np.frombuffer(data, np.uint8)
        return tokens_T

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; ids that are no byte vanish, bytes that are no UTF-8 show as U+FFFD."""
        return bytes(t for t in map(int, tokens) if 0 <= t < 256).decode(errors="replace")
