"""Corpora: ordered documents with random access, split into a training and a held-out side."""

import dataclasses
import functools
import hashlib
import os
import sysconfig
from collections import Counter
from pathlib import Path

from train.data.config import DataConfig

# Folders of the standard library that hold other people's packages, tests or generated grammar.
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
)
HELDOUT_BELOW = 13  # of 256 values of a path's first hash byte: one file in twenty


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Files below `root`, named by their relative path, none of them empty.

    Only names and sizes are held; `read` fetches a span, so a corpus may exceed memory.
    """

    root: Path
    names: tuple[str, ...]
    num_bytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of document `index`; ValueError when the file has shrunk."""
        stop = self.num_bytes[index] if stop is None else min(stop, self.num_bytes[index])
        with open(self.root / self.names[index], "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise ValueError(
                f"{self.root / self.names[index]} had {self.num_bytes[index]} bytes when the run "
                "began and is shorter now; restore the file, or start anew in another workdir"
            )
        return data

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of names and sizes: equal corpora have equal fingerprints."""
        listing = repr((self.names, self.num_bytes)).encode()
        return hashlib.sha256(listing).hexdigest()[:16]


def is_held_out(name: str) -> bool:
    """Whether the file of this relative path is kept from training. Depends on nothing else."""
    return hashlib.sha256(os.fsencode(name)).digest()[0] < HELDOUT_BELOW


def load_source(config: DataConfig) -> tuple[TextSource, TextSource]:
    """The (training, held-out) sides of the corpus that the config names.

    Raises:
      ValueError: the folder is missing, no file matches, or one side is empty.
    """
    if config.source == "stdlib":
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
        paths = _walk(root, pattern, STDLIB_SKIPPED)
    else:
        root, pattern = Path(config.path).expanduser().absolute(), config.pattern
        if not root.is_dir():
            raise ValueError(
                f"data.path={config.path!r} is no folder (looked at {root}); "
                "give an existing folder of text files"
            )
        paths = _walk(root, pattern)
    if not paths:
        raise ValueError(_no_match(root, pattern))
    sides = tuple(
        TextSource(root, tuple(names), tuple(paths[name] for name in names))
        for names in (
            [name for name in sorted(paths) if not is_held_out(name)],
            [name for name in sorted(paths) if is_held_out(name)],
        )
    )
    for side, label in zip(sides, ("training", "held-out"), strict=True):
        if not side:
            raise ValueError(
                f"the {label} side is empty: {len(paths)} file(s) match {pattern!r} below {root}, "
                "and a hash of the name holds out about one in twenty; use a hundred files or "
                "more (split large ones), or rename a file"
            )
    return sides


def _walk(root: Path, pattern: str, skipped: frozenset[str] = frozenset()) -> dict[str, int]:
    """Relative path -> bytes of every file that matches and is not empty."""
    sizes = {}
    for folder, subfolders, files in os.walk(root):
        # Pruned here and not filtered later: site-packages may be large.
        subfolders[:] = [name for name in subfolders if name not in skipped]
        for file in files:
            path = Path(folder, file)
            if path.match(pattern) and path.is_file() and (size := path.stat().st_size):
                sizes[path.relative_to(root).as_posix()] = size
    return sizes


def _no_match(root: Path, pattern: str) -> str:
    endings = Counter(Path(name).suffix for name in _walk(root, "*")).most_common(3)
    if not endings:
        return f"no file below {root} has text in it; give another folder as data.path"
    found = ", ".join(f"{count} x *{suffix}" for suffix, count in endings)
    return (
        f"data.pattern={pattern!r} matches no file with text below {root}, which holds {found}; "
        f"try data.pattern='*{endings[0][0]}'"
    )
