"""Decoder layers and the groups they are scanned in, with Attention Residuals between them.

S: AttnRes pseudo-queries of a group; N: AttnRes sources.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels.attention_residuals import merge_partial, mix_sources
from model.balance import Stats
from model.config import ModelConfig
from model.ffn import FFN
from model.kda import KDALayer
from model.layers import at_least_float32, param, rms_norm
from model.layout import LayerSpec
from model.mla import MLALayer
from model.moe import LayerBalance, MoE, RouterOutput

Intermediates = dict[str, jax.Array]


class Context(NamedTuple):
    """What every layer sees unchanged: loop constants of the scan."""

    sources: tuple[jax.Array, ...]  # closed AttnRes blocks [B, T, D], the embedding first
    segment_ids_BT: jax.Array | None
    valid_BT: jax.Array  # False on padding


class GroupInput(NamedTuple):
    """What differs between the copies of a scanned group."""

    opens_block: jax.Array  # bool: no partial sum exists yet
    balance: LayerBalance  # [num_moe, ...]


class GroupOutput(NamedTuple):
    stats: tuple[Stats, ...]  # one per MoE layer
    aux_loss: jax.Array  # summed over the layers
    intermediates: tuple[Intermediates, ...]  # one per layer; empty unless captured


class DecoderLayer(nn.Module):
    """The two sublayers of a layer: pre-norm attention (KDA or MLA) and FFN (dense or MoE)."""

    config: ModelConfig
    spec: LayerSpec

    def setup(self) -> None:
        config, spec = self.config, self.spec
        ones, shape, axes = nn.initializers.ones, (config.dim,), ("embed",)
        self.attn_norm = param(self, config, "attn_norm", shape, axes, ones)
        self.ffn_norm = param(self, config, "ffn_norm", shape, axes, ones)
        if spec.attention == "kda":
            self.kda = KDALayer(config)
        else:
            self.mla = MLALayer(config)
        if spec.ffn == "dense":
            self.ffn = FFN(config, config.dense_hidden)
        else:
            self.moe = MoE(config)

    def attention(self, h_BTD: jax.Array, context: Context) -> tuple[jax.Array, Intermediates]:
        x_BTD = rms_norm(h_BTD, self.attn_norm, self.config.norm_eps)
        layer = self.kda if self.spec.attention == "kda" else self.mla
        y_BTD = layer(x_BTD, context.segment_ids_BT)
        return y_BTD, {"attn_in": x_BTD, "attn_out": y_BTD}

    def feed_forward(
        self, h_BTD: jax.Array, balance: LayerBalance | None, context: Context
    ) -> tuple[jax.Array, RouterOutput | None, Intermediates]:
        x_BTD = rms_norm(h_BTD, self.ffn_norm, self.config.norm_eps)
        if self.spec.ffn == "dense":
            y_BTD = self.ffn(x_BTD)
            return y_BTD, None, {"ffn_in": x_BTD, "ffn_out": y_BTD}
        y_BTD, out = self.moe(x_BTD, balance, context.valid_BT)
        seen = {
            "ffn_in": x_BTD,
            "ffn_out": y_BTD,
            "expert_ids": out.routing.expert_ids_MJ,
            "expert_weights": out.routing.weights_MJ,
        }
        return y_BTD, out, seen


def unstack(x: jax.Array) -> list[jax.Array]:
    """The entries of the first dim."""
    parts = jax.lax.split(x, [1] * x.shape[0])
    return [part.reshape(x.shape[1:]) for part in parts]


class ResidualMixer:
    """AttnRes inputs of a group's sublayers, two-phase (AttnRes paper, Algorithm 1).

    Phase 1 meets all pseudo-queries of the group with the closed blocks at once; phase 2 adds the
    partial sum of the open block, sublayer by sublayer.
    """

    def __init__(
        self, config: ModelConfig, query_SD: jax.Array, norm_SD: jax.Array, context: Context
    ) -> None:
        self.eps = config.norm_eps
        phase1 = mix_sources(context.sources, query_SD, norm_SD, eps=self.eps)
        # Split at once: the gradient of a split is one concatenation, that of S slices S sums.
        parts = (unstack(x) for x in phase1)
        self.sublayers = zip(*parts, query_SD, norm_SD, strict=True)

    def __call__(self, partial_BTD: jax.Array, has_partial: jax.Array | bool) -> jax.Array:
        """The input of the next sublayer."""
        *phase1, query_D, norm_D = next(self.sublayers)
        return merge_partial(
            *phase1, partial_BTD, query_D, norm_D, eps=self.eps, has_partial=has_partial
        )


class Group(nn.Module):
    """One copy of a group: its layers in order. The carry is the open block's partial sum."""

    config: ModelConfig
    specs: tuple[LayerSpec, ...]
    capture: bool

    @nn.compact
    def __call__(
        self, partial_BTD: jax.Array, inputs: GroupInput, context: Context
    ) -> tuple[jax.Array, GroupOutput]:
        config = self.config
        num_mixes = sum(spec.mixes_attention + spec.mixes_ffn for spec in self.specs)
        if num_mixes:
            # Zero pseudo-queries: every source counts the same at the start (AttnRes paper).
            shape, axes = (num_mixes, config.dim), (None, "embed")
            zeros, ones = nn.initializers.zeros, nn.initializers.ones
            query_SD = param(self, config, "res_query", shape, axes, zeros)
            norm_SD = param(self, config, "res_norm", shape, axes, ones)
            with jax.named_scope("residual_phase1"):
                mixer = ResidualMixer(config, query_SD, norm_SD, context)
        stats: list[Stats] = []
        intermediates: list[Intermediates] = []
        aux_loss = jnp.zeros((), at_least_float32(partial_BTD.dtype))
        for i, spec in enumerate(self.specs):
            layer = decoder_layer(config)(config, spec, name=f"layer_{i}")
            if spec.mixes_attention:
                has_partial = True if i else jnp.logical_not(inputs.opens_block)
                h_BTD = mixer(partial_BTD, has_partial)
            else:
                h_BTD = context.sources[-1] if context.sources else partial_BTD
            a_BTD, seen = layer.attention(h_BTD, context)
            partial_BTD = partial_BTD + a_BTD
            h_BTD = mixer(partial_BTD, True) if spec.mixes_ffn else partial_BTD
            balance = None
            if spec.ffn == "moe":
                balance = jax.tree.map(lambda x: x[len(stats)], inputs.balance)
            m_BTD, routed, ffn_seen = layer.feed_forward(h_BTD, balance, context)
            partial_BTD = partial_BTD + m_BTD
            if routed is not None:
                stats.append(routed.stats)
                aux_loss += routed.aux_loss
            if self.capture:
                intermediates.append({**seen, **ffn_seen, "layer_out": partial_BTD})
        return partial_BTD, GroupOutput(tuple(stats), aux_loss, tuple(intermediates))


def decoder_layer(config: ModelConfig) -> Any:
    """The DecoderLayer module; with remat "nested" each of its sublayers is made again by itself,
    when its group is, so that only one sublayer's intermediates exist at a time."""
    if config.remat != "nested":
        return DecoderLayer
    return nn.remat(DecoderLayer, methods=["attention", "feed_forward"])


def rematerialised(config: ModelConfig, scanned: bool) -> Any:
    """The Group module under the config's rematerialisation policy."""
    if config.remat == "none":
        return Group
    policies = jax.checkpoint_policies
    save_dots = policies.dots_with_no_batch_dims_saveable
    policy = save_dots if config.remat == "dots" else policies.nothing_saveable
    # Inside a scan XLA cannot merge the recomputation with the forward pass anyway.
    return nn.remat(Group, policy=policy, prevent_cse=not scanned)
