"""Per-Head Muon for matrices, AdamW for everything else; what a parameter gets depends on its name.

D model, H heads, K head width, R latent or low rank, F hidden, E experts, W vocabulary. Leading
dims that a scan over layers adds are batch dims everywhere, hence the negative axes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from train.step.muon import scale_by_muon
from train.step.schedule import ScheduleConfig, make_schedule

Params = Any

# Reduction and output axes of every matrix that Muon orthogonalises; other axes are batch.
_PER_HEAD = MuonDimensionNumbers(-3, -1)  # [D or R, H, K]: a matrix a head
_MERGED_OUTPUT = MuonDimensionNumbers(-3, (-2, -1))  # [D or R, H, K]: one matrix to H * K
_MERGED_INPUT = MuonDimensionNumbers((-3, -2), -1)  # [H, K, D]: one matrix from H * K
_PLAIN = MuonDimensionNumbers(-2, -1)  # [input, output]; stacked experts [E, input, output]

_MUON = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_up", "k_up", "v_up"), _PER_HEAD),
    **dict.fromkeys(("out_gate", "out_gate_up", "gate_up"), _MERGED_OUTPUT),
    "o_proj": _MERGED_INPUT,
    **dict.fromkeys(("gate_down", "out_gate_down", "q_down", "kv_down"), _PLAIN),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down", "latent_down", "latent_up"), _PLAIN),
    **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), _PLAIN),
}
_ADAM_WITH_DECAY = {"embedding", "head"}
_ADAM_WITHOUT_DECAY = {
    *("attn_norm", "ffn_norm", "final_norm", "out_norm", "q_norm", "kv_norm", "latent_norm"),
    *("q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "beta_proj"),
    *("res_query", "res_norm", "router"),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(ScheduleConfig):
    """The optimizer and its learning rate, one for both parts."""

    name: str = "muon"  # "muon": Per-Head Muon and AdamW; "adamw": AdamW for all
    b1: float = 0.9  # Adam
    b2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    consistent_rms: float = 0.2  # root mean square of a Muon update, in learning rates
    weight_decay: float = 0.1  # times the learning rate; see `decays`
    clip_norm: float | None = 1.0  # global norm of the gradient; None: no clipping
    mu_dtype: str | None = None  # of the first moments; None: the parameters'

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in ("muon", "adamw"):
            raise ValueError(f"optimizer.name={self.name!r} is not one of muon, adamw; try 'muon'")
        for name, default in (("b1", 0.9), ("b2", 0.95), ("muon_momentum", 0.95)):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.{name}={value} must lie in [0, 1); try {default}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay} must not be negative; try 0.1"
            )
        for name, default in (("eps", 1e-8), ("consistent_rms", 0.2), ("clip_norm", 1.0)):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optimizer.{name}={value} must be positive; try {default}")
        if self.mu_dtype not in (None, "bfloat16", "float32", "float64"):
            raise ValueError(
                f"optimizer.mu_dtype={self.mu_dtype!r} is not one of bfloat16, float32, float64; "
                "try 'float32'"
            )


def make_optimizer(
    config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, Muon or Adam, weight decay, learning rate.

    Muon has Newton-Schulz on each head's block of the query, key and value matrices (Kimi K3
    report, Per-Head Muon) and on every other matrix whole. Its updates are scaled to a root mean
    square of about `consistent_rms`, Adam's usual size, so one learning rate serves both. Decay and
    learning rate are applied once, after both.

    `update` takes `specs` as train.step.muon.scale_by_muon does. It and `init` raise ValueError for
    a parameter whose name has no rule here.
    """
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.mu_dtype)
    if config.name == "adamw":
        direction = adam
    else:
        muon = scale_by_muon(
            config.muon_momentum, config.consistent_rms, config.mu_dtype, muon_dimension_numbers
        )
        direction = optax.partition({"muon": muon, "adam": adam}, _labels)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(make_schedule(config, num_steps)),
    )


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """Updates made so far; skipped steps make none."""
    return opt_state[-1].count  # of the learning rate, the last link of the chain


def muon_dimension_numbers(params: Params) -> Params:
    """Per parameter the axes of its matrix, or None where Adam is used."""
    return _by_name(params, _MUON.get)


def decays(params: Params) -> Params:
    """Per parameter whether weight decay applies: Muon's matrices, embedding and head."""
    return _by_name(params, lambda name: name in _MUON or name in _ADAM_WITH_DECAY)


def _labels(params: Params) -> Params:
    return _by_name(params, lambda name: "muon" if name in _MUON else "adam")


def _by_name(params: Params, rule: Callable[[str], Any]) -> Params:
    """The tree of rule(name of the parameter)."""

    def apply(path: tuple[Any, ...], _: Any) -> Any:
        name = path[-1].key
        if not (name in _MUON or name in _ADAM_WITH_DECAY or name in _ADAM_WITHOUT_DECAY):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"parameter {where!r} has no optimizer rule: its name {name!r} must be in a table "
                "of train/step/optimizer.py; for a vector add it to _ADAM_WITHOUT_DECAY"
            )
        return rule(name)

    return jax.tree_util.tree_map_with_path(apply, params)
