"""Causal softmax attention over packed documents."""

from kernels.attention.api import attention

__all__ = ["attention"]
