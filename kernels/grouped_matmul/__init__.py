"""Products of row groups with their own matrix each (the experts of a mixture)."""

from kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
