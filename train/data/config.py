"""What decides the data: corpus, context, batch, order."""

import dataclasses

SOURCES = ("stdlib", "folder")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpus and batch geometry. Invalid values raise ValueError.

    A global batch holds `batch_size` rows of `context_length` tokens. It is the output of
    `num_streams` independent streams (0: one per row), each yielding an equal run of rows.
    """

    source: str = "stdlib"  # "stdlib": the running Python's library; "folder": files below `path`
    path: str = ""  # the folder, for source="folder"
    pattern: str = "*.py"  # which files below the folder, for source="folder"
    context_length: int = 256  # tokens per row
    batch_size: int = 8  # rows per global batch
    num_streams: int = 0  # 0: batch_size; otherwise a divisor of batch_size
    seed: int = 0  # order of the pieces
    shuffle: bool = True  # False: pieces in the order of the sorted file names

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source!r} is unknown; use one of {SOURCES}")
        if self.source == "folder" and not (self.path and self.pattern):
            raise ValueError(
                f"data.source='folder' needs data.path and data.pattern, got {self.path!r} and "
                f"{self.pattern!r}; for example data.path=~/texts and data.pattern='*.txt'"
            )
        if self.source == "stdlib" and (self.path or self.pattern != DataConfig.pattern):
            raise ValueError(
                f"data.path={self.path!r} and data.pattern={self.pattern!r} are not read by "
                "data.source='stdlib'; set data.source='folder' as well, or leave both out"
            )
        if self.context_length < 2:
            raise ValueError(
                f"data.context_length={self.context_length} leaves nothing to predict; "
                "use at least 2, for example 256"
            )
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size={self.batch_size} must be at least 1, for example 8")
        if self.num_streams < 0 or self.batch_size % (self.num_streams or 1):
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ValueError(
                f"data.num_streams={self.num_streams} must divide data.batch_size="
                f"{self.batch_size}: use one of {divisors}, or 0 for one stream per row"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"data.seed={self.seed} must be in [0, 2**32), for example 0")

    @property
    def streams(self) -> int:
        """The number of streams in effect."""
        return self.num_streams or self.batch_size

    @property
    def rows_per_stream(self) -> int:
        """Consecutive rows of the global batch that one stream yields."""
        return self.batch_size // self.streams
