"""Kimi Delta Attention: a gated delta rule with one decay per key channel."""

from kernels.kda.api import kda

__all__ = ["kda"]
