"""The text model: embedding, AttnRes blocks of decoder layers, final mix and norm, head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from kernels.attention_residuals import mix
from model import sharding
from model.balance import Balance, Stats, init_balance
from model.config import ModelConfig
from model.decoder import Context, GroupInput, Intermediates, rematerialised
from model.layers import at_least_float32, einsum, embed, matrix, param, rms_norm
from model.layout import Group as GroupLayout
from model.layout import blocks
from model.moe import LayerBalance

Params = Any
HEAD_AXES = ("embed", "vocab")


class Aux(NamedTuple):
    """What the forward pass says besides the hidden states."""

    stats: Stats  # router statistics of the MoE layers, stacked [L, ...]
    aux_loss: jax.Array  # Switch loss summed over layers and tokens; 0 for other estimators
    intermediates: list[Intermediates]  # per layer, then the final ones; empty unless captured


class Transformer(nn.Module):
    """Tokens to hidden states; `unembed` takes hidden states to logits."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        inputs_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        balance: Balance,
        capture: bool = False,
    ) -> tuple[jax.Array, Aux]:
        """Runs the model.

        Args:
          inputs_BT: int32 token ids.
          segment_ids_BT: int32 documents of a packed row, 0 on padding; None: one document a row.
          balance: the router biases and bin ranges of all MoE layers (model.balance).
          capture: also return every layer's intermediates (static).

        Returns:
          hidden_BTD after the final norm, in config.dtype, and Aux.
        """
        config = self.config
        D, W = config.dim, config.vocab_size
        embed_init = nn.initializers.normal(config.embedding_std)
        embedding = matrix(self, config, "embedding", (W, D), ("vocab", "embed"), embed_init)
        # Declared here for one parameter tree; used by `unembed` and the loss.
        matrix(self, config, "head", (D, W), HEAD_AXES, nn.initializers.normal(config.head_std))
        embedded_BTD = embed(embedding, inputs_BT, config.dtype)
        valid_BT = jnp.ones_like(inputs_BT, bool) if segment_ids_BT is None else segment_ids_BT != 0

        mixes = config.residual.mode != "none"
        partial_BTD = jnp.zeros_like(embedded_BTD) if mixes else embedded_BTD
        sources = [embedded_BTD] if mixes else []
        stats: list[Stats] = []
        intermediates: list[Intermediates] = []
        aux_loss = jnp.zeros((), at_least_float32(embedded_BTD.dtype))
        next_moe = 0
        for b, groups in enumerate(blocks(config)):
            context = Context(tuple(sources), segment_ids_BT, valid_BT)
            block = Block(config, tuple(groups), capture, name=f"block_{b}")
            count = sum(group.repeats * group.num_moe for group in groups)
            layer_balance = LayerBalance(
                balance["bias"][next_moe : next_moe + count],
                balance["bin_range"][next_moe : next_moe + count],
            )
            next_moe += count
            partial_BTD, block_stats, block_loss, seen = block(partial_BTD, layer_balance, context)
            stats += block_stats
            aux_loss += block_loss
            intermediates += seen
            if config.residual.mode == "full":
                sources += [seen[0]["attn_out"], seen[0]["ffn_out"]]
            elif mixes:
                sources.append(partial_BTD)
            if mixes:
                partial_BTD = jnp.zeros_like(embedded_BTD)

        mixed_BTD = self._final_mix(sources) if mixes else partial_BTD
        ones = nn.initializers.ones
        final_norm = param(self, config, "final_norm", (D,), ("embed",), ones)
        hidden_BTD = rms_norm(mixed_BTD, final_norm, config.norm_eps)
        if capture:
            intermediates.append({"final_mixed": mixed_BTD, "final_normed": hidden_BTD})
        joined = jax.tree.map(lambda *xs: jnp.concatenate(xs), *stats) if stats else {}
        return hidden_BTD, Aux(joined, aux_loss, intermediates if capture else [])

    def _final_mix(self, sources: list[jax.Array]) -> jax.Array:
        """One more AttnRes over all sources, before the final norm."""
        config = self.config
        shape, axes = (1, config.dim), (None, "embed")
        query_SD = param(self, config, "res_query", shape, axes, nn.initializers.zeros)
        norm_SD = param(self, config, "res_norm", shape, axes, nn.initializers.ones)
        return mix(sources, query_SD[0], norm_SD[0], eps=config.norm_eps)


class Block(nn.Module):
    """One AttnRes block: its groups in order, each scanned over its copies."""

    config: ModelConfig
    groups: tuple[GroupLayout, ...]
    capture: bool

    @nn.compact
    def __call__(
        self, partial_BTD: jax.Array, balance: LayerBalance, context: Context
    ) -> tuple[jax.Array, list[Stats], jax.Array, list[Intermediates]]:
        """Returns the block's sum, statistics stacked over each group's MoE layers, the auxiliary
        loss, intermediates per layer."""
        # "full" needs each sublayer's output: they are its sources.
        capture = self.capture or self.config.residual.mode == "full"
        stats: list[Stats] = []
        intermediates: list[Intermediates] = []
        aux_loss = jnp.zeros((), at_least_float32(partial_BTD.dtype))
        next_moe = 0
        for g, group in enumerate(self.groups):
            count, repeats = group.repeats * group.num_moe, group.repeats
            shape = (repeats, group.num_moe)
            first = jnp.arange(repeats) == 0
            inputs = GroupInput(
                opens_block=first if g == 0 else jnp.zeros_like(first),
                balance=jax.tree.map(
                    lambda x, n=next_moe, c=count, s=shape: x[n : n + c].reshape(*s, *x.shape[1:]),
                    balance,
                ),
            )
            next_moe += count
            module = rematerialised(self.config, scanned=repeats > 1)
            args = (self.config, group.specs, capture)
            if repeats > 1:
                module = nn.scan(
                    module,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=(0, nn.broadcast),
                    length=repeats,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                )
                partial_BTD, out = module(*args, name=f"group_{g}")(partial_BTD, inputs, context)
            else:
                inputs = jax.tree.map(lambda x: x[0], inputs)
                partial_BTD, out = module(*args, name=f"group_{g}")(partial_BTD, inputs, context)
                out = jax.tree.map(lambda x: x[None], out)
            aux_loss += out.aux_loss.sum()
            if out.stats:  # [repeats, ...] for each MoE layer of a copy -> [repeats * num_moe, ...]
                stats.append(
                    jax.tree.map(
                        lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *out.stats
                    )
                )
            for repeat in range(repeats):
                intermediates += [
                    jax.tree.map(lambda x, r=repeat: x[r], layer) for layer in out.intermediates
                ]
        return partial_BTD, stats, aux_loss, intermediates


def unembed(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, W] of hidden states [B, T, D], in fp32."""
    head = sharding.Part(params["head"])
    return einsum("btd,dw->btw", hidden_BTD, head, at_least_float32(hidden_BTD.dtype))


def head_part(config: ModelConfig, params: Params) -> sharding.Part:
    """This device's part of the head [D, W], inside model.sharding.spread."""
    shape = config.dim, config.vocab_size
    return sharding.part(params["head"], shape, HEAD_AXES, config.shard_min_size)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh parameters as a plain nested dict. jit it: eager initialisation is slow."""
    return nn.unbox(_boxed_params(config, key))


def logical_axes(config: ModelConfig) -> Params:
    """The logical axes of every parameter, as a tree of PartitionSpecs shaped like the
    parameters."""
    boxed = jax.eval_shape(lambda key: _boxed_params(config, key), jax.random.key(0))
    return nn.get_partition_spec(boxed)


def param_shapes(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without making them."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))


def _boxed_params(config: ModelConfig, key: jax.Array) -> Params:
    tokens = jnp.zeros((1, 8), jnp.int32)
    balance = init_balance(config.balance, config.num_moe_layers, config.moe.num_experts)
    return Transformer(config).init(key, tokens, None, balance)["params"]


def specs_here(config: ModelConfig) -> Params:
    """`param_specs` on the mesh of jax.set_mesh, for model.sharding.spread."""
    mesh = jax.sharding.get_abstract_mesh()
    return P() if mesh.empty or mesh.size == 1 else param_specs(config, mesh)


def param_specs(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Params:
    """Where every parameter lies on a mesh, as a tree of PartitionSpecs."""
    return jax.tree.map(
        lambda x, axes: sharding.param_spec(x.shape, axes, mesh.shape, config.shard_min_size),
        param_shapes(config),
        logical_axes(config),
    )
