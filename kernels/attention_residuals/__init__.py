"""Attention Residuals: each sublayer reads a learned softmax mix over the depth of the network."""

from kernels.attention_residuals.reference import mix
from kernels.attention_residuals.two_phase import SourceMix, merge_partial, mix_sources

__all__ = ["SourceMix", "merge_partial", "mix", "mix_sources"]
