"""Kimi Delta Attention: a gated delta rule with one decay per key channel."""

from kernels.kda.api import kda
from kernels.kda.decode import kda_decode

__all__ = ["kda", "kda_decode"]
