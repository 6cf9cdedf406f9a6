"""FLOPs and parameters of a model, by formula and from shapes: the one place for both."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from model.config import ModelConfig
from model.transformer import param_shapes

# Peak dense bf16 FLOP/s per device kind, as the makers state them; MFU is "n/a" elsewhere.
PEAK_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
}


@dataclasses.dataclass(frozen=True)
class ParamCounts:
    """Numbers of parameters; router biases (the balance) are no parameters."""

    total: int
    active: int  # met by one token, input embedding left out
    embedding: int  # the input embedding
    parts: dict[str, int]  # total by part

    @property
    def active_with_embedding(self) -> int:
        return self.active + self.embedding


def count_params(config: ModelConfig) -> ParamCounts:
    """Counts from shapes alone; nothing is allocated."""
    total = active = embedding = 0
    parts: dict[str, int] = {}
    for names, size in _leaves(config):
        part = _part(names)
        parts[part] = parts.get(part, 0) + size
        total += size
        if names[-1] == "embedding":
            embedding += size
        elif part == "routed experts":
            active += size // config.moe.num_experts * config.moe.top_k
        else:
            active += size
    return ParamCounts(total, active, embedding, parts)


def forward_flops_per_token(config: ModelConfig, context_length: int) -> float:
    """2 x active matmul parameters + attention + KDA, per token.

    The head counts, the input embedding does not. A causal MLA layer adds 2 H (d_qk + d_v) T / 2,
    a KDA layer 6 H K V.
    """
    matmul = 0
    for names, size in _leaves(config):
        if _part(names) == "routed experts":
            size = size // config.moe.num_experts * config.moe.top_k
        elif not _is_matmul(names[-1]):
            size = 0
        matmul += size
    mla, kda = config.mla, config.kda
    widths = mla.nope_dim + mla.rope_dim + mla.value_dim
    attention = config.layers.count("M") * 2 * mla.num_heads * widths * context_length / 2
    state = config.layers.count("K") * 6 * kda.value_heads * kda.key_dim * kda.value_dim
    return 2 * matmul + attention + state


def train_flops_per_token(config: ModelConfig, context_length: int) -> float:
    """Forward and backward: three times the forward pass; recomputation is not counted."""
    return 3 * forward_flops_per_token(config, context_length)


def mfu(tokens_per_second: float, flops_per_token: float) -> float | None:
    """Model FLOPs utilisation over all devices; None where the peak is not known (CPUs)."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * jax.device_count())


def _leaves(config: ModelConfig) -> Iterator[tuple[list[str], int]]:
    """(path, size) of every parameter."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
        yield [key.key for key in path], int(np.prod(leaf.shape, dtype=np.int64))


def _part(names: list[str]) -> str:
    """The row of the parameter table that a parameter belongs to."""
    leaf = names[-1]
    if leaf.startswith("expert_"):
        return "routed experts"
    if leaf in ("embedding", "head"):
        return leaf
    if leaf.startswith("res_"):
        return "attention residuals"
    for module, part in {
        "kda": "KDA",
        "mla": "Gated MLA",
        "shared": "shared experts",
        "moe": "router and latent",
        "ffn": "dense FFN",
    }.items():
        if module in names:
            return part
    return "norms"


def _is_matmul(leaf: str) -> bool:
    """Whether a parameter is a matrix that every token is multiplied with."""
    return leaf not in ("embedding", "a_log", "dt_bias", "res_query") and not leaf.endswith(
        ("_norm", "_conv")
    )
