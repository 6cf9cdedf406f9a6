"""What counting and zlib reach on the held-out files: the marks a model has to beat."""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from train.data.sources import TextSource
from train.data.tokenizer import ByteTokenizer

PSEUDO_COUNT = 0.1  # added to every count; the best of 1, 0.1, 0.01 for the standard library


class Baselines(NamedTuple):
    """Bits per byte over all held-out bytes."""

    unigram: float  # smoothed byte counts of the training side
    bigram: float  # the same given the previous byte (or the document's beginning)
    zlib: float  # zlib -9, each file by itself


def baselines(train: TextSource, heldout: TextSource) -> Baselines:
    """Bits per byte of three simple models; reads both sides once."""
    train_counts = sum(map(_pair_counts, _documents(train)))
    heldout_counts = sum(map(_pair_counts, _documents(heldout)))
    compressed = sum(len(zlib.compress(document, 9)) for document in _documents(heldout))
    num_bytes = sum(heldout.num_bytes)
    return Baselines(
        unigram=_bits(train_counts.sum(0), heldout_counts.sum(0)) / num_bytes,
        bigram=_bits(train_counts, heldout_counts) / num_bytes,
        zlib=8 * compressed / num_bytes,
    )


def _documents(source: TextSource) -> Iterator[bytes]:
    return (source.read(index) for index in range(len(source)))


def _pair_counts(document: bytes) -> np.ndarray:
    """Counts [257, 256] of (previous token, byte)."""
    tokens_T = ByteTokenizer().encode(document)
    pairs = tokens_T[:-1] * 256 + tokens_T[1:]
    return np.bincount(pairs, minlength=257 * 256).reshape(257, 256)


def _bits(train_counts: np.ndarray, heldout_counts: np.ndarray) -> float:
    """Code length of the held-out counts [..., 256] under smoothed training counts."""
    smoothed = train_counts + PSEUDO_COUNT
    probabilities = smoothed / smoothed.sum(-1, keepdims=True)
    return float(-(heldout_counts * np.log2(probabilities)).sum())
