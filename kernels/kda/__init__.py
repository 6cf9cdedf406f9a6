"""Kimi Delta Attention: a gated delta rule with one decay per key channel."""

from kernels.kda.api import kda
from kernels.kda.context_parallel import kda_context_parallel
from kernels.kda.decode import kda_decode

__all__ = ["kda", "kda_context_parallel", "kda_decode"]
