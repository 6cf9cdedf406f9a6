"""The model's configuration: frozen dataclasses, validated where they are made.

A person's ml_collections config becomes these in train/config.py; model code sees nothing else.
"""

import dataclasses
import math
from collections.abc import Iterable

import kernels.attention.api as attention
import kernels.grouped_matmul.api as grouped_matmul
import kernels.kda.api as kda

GATE_KINDS = ("bounded", "softplus")
OUTPUT_GATES = ("full", "low_rank")
ROUTERS = ("sigmoid", "softmax")
COMBINE_SCORES = ("unbiased", "biased")
DISPATCHES = ("gather", "all_to_all", "even_all_to_all")
ESTIMATORS = ("histogram", "quantile", "sign", "aux_loss", "none")
RESIDUAL_MODES = ("block", "full", "none")
ACTIVATIONS = ("situ", "swiglu")
REMAT_POLICIES = ("none", "dots", "full", "nested")
DTYPES = ("bfloat16", "float32", "float64")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}; try {choices[0]!r}")


def check_implementation(owner: str, value: str | None, known: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of the operator's implementations, or None."""
    if value is not None and value not in known:
        raise ValueError(
            f"{owner}.implementation={value!r} is not one of {', '.join(known)}; try None, which "
            "picks the best for the platform"
        )


def check_positive(owner: str, config: object, *names: str, or_zero: bool = False) -> None:
    """Raises ValueError unless these fields of a dataclass are above zero (or zero), or None."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name) if field.name in names else None
        if value is not None and not (value >= 0 if or_zero else value > 0):
            rule = "not be negative" if or_zero else "be positive"
            works = 1 if field.default in (None, dataclasses.MISSING) else field.default
            raise ValueError(f"{owner}.{field.name}={value} must {rule}; try {works}")


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention layer (Kimi K3 report Eq. 1-6)."""

    num_heads: int  # H, query/key heads
    key_dim: int  # K
    value_dim: int  # V
    num_value_heads: int | None = None  # HV; None: as many as num_heads
    conv_size: int = 4  # taps of the causal depthwise convolutions
    gate_kind: str = "bounded"  # K3's bounded log-decay, or Kimi Linear's softplus
    lower_bound: float = -5.0  # smallest log-decay of the bounded gate, in nats
    gate_rank: int | None = None  # rank of the decay gate; None: key_dim
    output_gate: str = "full"  # K3's full-rank W_g, or Kimi Linear's low-rank one
    chunk_size: int = 64  # rows of a chunk of the WY form
    num_splits: int | None = None  # pieces of a sequence side by side on a GPU; None: by its shape
    implementation: str | None = None  # of kernels.kda; None: the best for the platform

    def __post_init__(self) -> None:
        check_choice("model.kda.gate_kind", self.gate_kind, GATE_KINDS)
        check_choice("model.kda.output_gate", self.output_gate, OUTPUT_GATES)
        check_implementation("model.kda", self.implementation, kda.IMPLEMENTATIONS)
        check_positive(
            "model.kda",
            self,
            "num_heads",
            "key_dim",
            "value_dim",
            "conv_size",
            "num_value_heads",
            "gate_rank",
            "num_splits",
        )
        if self.chunk_size < 16 or self.chunk_size % 16:
            raise ValueError(
                f"model.kda.chunk_size={self.chunk_size} must be a multiple of 16; try 64"
            )
        if not self.lower_bound < 0:
            raise ValueError(f"model.kda.lower_bound={self.lower_bound} must be negative; try -5.0")
        if self.value_heads % self.num_heads:
            raise ValueError(
                f"model.kda.num_value_heads={self.value_heads} is not a multiple of "
                f"model.kda.num_heads={self.num_heads}; try {2 * self.num_heads}"
            )

    @property
    def value_heads(self) -> int:
        return self.num_value_heads or self.num_heads

    @property
    def rank(self) -> int:
        return self.gate_rank or self.key_dim


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention without positions (Kimi K3 report Eq. 7)."""

    num_heads: int
    q_lora_rank: int | None  # None: one full-rank query projection
    kv_lora_rank: int
    nope_dim: int  # key width that comes from the latent
    rope_dim: int  # extra key width shared by all heads; never rotated (NoPE)
    value_dim: int
    output_gate: bool = True
    norm_eps: float = 1e-6  # of the two inner norms
    head_block: int | None = None  # heads whose keys and values exist at a time; None: all
    implementation: str | None = None  # of kernels.attention

    def __post_init__(self) -> None:
        check_implementation("model.mla", self.implementation, attention.IMPLEMENTATIONS)
        check_positive(
            "model.mla",
            self,
            "num_heads",
            "kv_lora_rank",
            "nope_dim",
            "value_dim",
            "q_lora_rank",
            "norm_eps",
            "head_block",
        )
        check_positive("model.mla", self, "rope_dim", or_zero=True)
        if self.head_block and self.num_heads % self.head_block:
            raise ValueError(
                f"model.mla.head_block={self.head_block} does not divide model.mla.num_heads="
                f"{self.num_heads}; try {math.gcd(self.head_block, self.num_heads)}"
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE (Kimi K3 report Eq. 11, 13)."""

    num_experts: int
    top_k: int
    expert_hidden: int  # F of one expert
    num_shared_experts: int = 1  # one MLP of num_shared_experts * expert_hidden at full width
    latent_dim: int | None = None  # None: experts work at full width, without W_down and W_up
    latent_norm: bool = True  # RMSNorm after the weighted sum, before W_up
    router: str = "sigmoid"
    combine_scores: str = "unbiased"  # "biased": the released Kimi-Linear-48B code
    routed_scaling_factor: float = 1.0
    row_block: int = 64  # rows of a block of the grouped matmul; each expert is padded to it
    dispatch: str = "gather"  # how tokens meet experts on other devices: model.expert_parallel
    buffer_factor: float | None = (
        None  # room of a device among several, in even loads; None: for any
    )
    implementation: str | None = None  # of kernels.grouped_matmul

    def __post_init__(self) -> None:
        check_choice("model.moe.router", self.router, ROUTERS)
        check_implementation("model.moe", self.implementation, grouped_matmul.IMPLEMENTATIONS)
        check_choice("model.moe.combine_scores", self.combine_scores, COMBINE_SCORES)
        check_choice("model.moe.dispatch", self.dispatch, DISPATCHES)
        check_positive(
            "model.moe",
            self,
            "num_experts",
            "top_k",
            "expert_hidden",
            "row_block",
            "latent_dim",
            "routed_scaling_factor",
            "buffer_factor",
        )
        check_positive("model.moe", self, "num_shared_experts", or_zero=True)
        if self.num_experts < 2:
            raise ValueError(f"model.moe.num_experts={self.num_experts} must be at least 2; try 16")
        if self.top_k >= self.num_experts:
            raise ValueError(
                f"model.moe.top_k={self.top_k} must be below model.moe.num_experts="
                f"{self.num_experts}: routing takes one score more than it uses; "
                f"try {max(1, self.num_experts // 4)}"
            )


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """How router biases are found (Kimi K3 report Eq. 14 and appendix D)."""

    estimator: str = "histogram"
    num_bins: int = 1000  # "histogram": uniform bins over [min bias - 1, max bias + 1]
    ema: float = 0.0  # weight of the previous quantile; 0: off
    sign_step: float = 1e-3  # "sign": DeepSeek's bias step
    aux_loss_weight: float = 1e-2  # "aux_loss": Switch
    max_margins: int = 2**26  # "quantile": refuse steps that would keep more margins

    def __post_init__(self) -> None:
        check_choice("model.balance.estimator", self.estimator, ESTIMATORS)
        check_positive("model.balance", self, "num_bins", "max_margins", "sign_step")
        check_positive("model.balance", self, "aux_loss_weight", or_zero=True)
        if not 0 <= self.ema < 1:
            raise ValueError(f"model.balance.ema={self.ema} must lie in [0, 1); try 0.9")


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """Attention Residuals (arXiv 2603.15031); "none" is the plain residual stream."""

    mode: str = "block"
    block_size: int = 12  # decoder layers per block, as in K3's config

    def __post_init__(self) -> None:
        check_choice("model.residual.mode", self.mode, RESIDUAL_MODES)
        check_positive("model.residual", self, "block_size")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The whole text model. `layers` has one letter a decoder layer: K for KDA, M for Gated MLA."""

    vocab_size: int
    dim: int
    layers: str
    dense_hidden: int  # F of the dense FFN layers
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    balance: BalanceConfig = BalanceConfig()
    residual: ResidualConfig = ResidualConfig()
    num_dense_layers: int = 1  # the first layers have a dense FFN
    activation: str = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0  # None: the up branch passes unchanged
    norm_eps: float = 1e-5
    init_std: float = 0.02
    embedding_std: float = 0.02
    head_std: float = 0.02
    dtype: str = "bfloat16"  # of activations
    param_dtype: str = "float32"
    remat: str = "full"  # what the backward recomputes: nothing, all but matmuls, all, all twice
    scan: bool = True  # False: every layer unrolled, for debugging
    shard_min_size: int = 2**20  # numbers from which on a parameter is spread over data, sequence

    def __post_init__(self) -> None:
        check_choice("model.activation", self.activation, ACTIVATIONS)
        check_choice("model.dtype", self.dtype, DTYPES)
        check_choice("model.param_dtype", self.param_dtype, DTYPES)
        check_choice("model.remat", self.remat, REMAT_POLICIES)
        check_positive(
            "model",
            self,
            "vocab_size",
            "dim",
            "dense_hidden",
            "situ_beta",
            "situ_linear_beta",
            "norm_eps",
        )
        not_negative = ("init_std", "embedding_std", "head_std", "shard_min_size")
        check_positive("model", self, *not_negative, or_zero=True)
        if not self.layers or set(self.layers) - {"K", "M"}:
            raise ValueError(
                f"model.layers={self.layers!r} must be letters K (KDA) and M (MLA); try 'KKKM'"
            )
        if not 0 <= self.num_dense_layers < len(self.layers):
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} must leave at least one of the "
                f"{len(self.layers)} layers a MoE layer; try {min(1, len(self.layers) - 1)}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers
