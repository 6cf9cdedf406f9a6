"""Reads the golden k3_tiny folder (published tensor names) into this project's parameter tree."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

from model.config import BalanceConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, ResidualConfig
from model.layout import blocks, layer_specs

Read = Callable[[str], np.ndarray]


def read_config(folder: Path, **overrides) -> ModelConfig:
    """ModelConfig of a published config.json."""
    c = json.loads((folder / "config.json").read_text())["text_config"]
    linear = c["linear_attn_config"]
    layers = "".join(
        "M" if i + 1 in linear["full_attn_layers"] else "K" for i in range(c["num_hidden_layers"])
    )
    fields = dict(
        vocab_size=c["vocab_size"],
        dim=c["hidden_size"],
        layers=layers,
        dense_hidden=c["intermediate_size"],
        num_dense_layers=c["first_k_dense_replace"],
        situ_beta=c["activation_situ_beta"],
        situ_linear_beta=c["activation_situ_linear_beta"],
        norm_eps=c["rms_norm_eps"],
        kda=KDAConfig(
            num_heads=linear["num_heads"],
            key_dim=linear["head_dim"],
            value_dim=linear["head_dim"],
            lower_bound=linear["gate_lower_bound"],
        ),
        mla=MLAConfig(
            num_heads=c["num_attention_heads"],
            q_lora_rank=c["q_lora_rank"],
            kv_lora_rank=c["kv_lora_rank"],
            nope_dim=c["qk_nope_head_dim"],
            rope_dim=c["qk_rope_head_dim"],
            value_dim=c["v_head_dim"],
        ),
        moe=MoEConfig(
            num_experts=c["num_experts"],
            top_k=c["num_experts_per_token"],
            expert_hidden=c["moe_intermediate_size"],
            num_shared_experts=c["num_shared_experts"],
            latent_dim=c["routed_expert_hidden_size"],
            row_block=8,
        ),
        balance=BalanceConfig(num_bins=50),
        residual=ResidualConfig(block_size=c["attn_res_block_size"]),
        dtype="float32",
        remat="none",
    )
    return ModelConfig(**(fields | overrides))


def kda_tree(read: Read, c: KDAConfig) -> dict:
    H, K, V = c.num_heads, c.key_dim, c.value_dim

    def heads(name: str, width: int) -> np.ndarray:
        weight = read(name + ".weight").T
        return weight.reshape(weight.shape[0], H, width)

    def conv(name: str, width: int) -> np.ndarray:
        return read(name + ".weight")[:, 0].T.reshape(c.conv_size, H, width)

    return {
        "q_proj": heads("q_proj", K),
        "k_proj": heads("k_proj", K),
        "v_proj": heads("v_proj", V),
        "q_conv": conv("q_conv1d", K),
        "k_conv": conv("k_conv1d", K),
        "v_conv": conv("v_conv1d", V),
        "gate_down": read("f_a_proj.weight").T,
        "gate_up": heads("f_b_proj", K),
        "a_log": read("A_log").reshape(-1)[:H],
        "dt_bias": read("dt_bias").reshape(H, K),
        "beta_proj": read("b_proj.weight").T,
        "out_gate": heads("g_proj", V),
        "out_norm": read("o_norm.weight"),
        "o_proj": read("o_proj.weight").T.reshape(H, V, -1),
    }


def mla_tree(read: Read, c: MLAConfig) -> dict:
    H, N, V = c.num_heads, c.nope_dim, c.value_dim

    def heads(name: str) -> np.ndarray:
        weight = read(name + ".weight").T
        return weight.reshape(weight.shape[0], H, -1)

    kv_up = heads("kv_b_proj")
    out = {
        "kv_down": read("kv_a_proj_with_mqa.weight").T,
        "kv_norm": read("kv_a_layernorm.weight"),
        "k_up": kv_up[..., :N],
        "v_up": kv_up[..., N:],
        "o_proj": read("o_proj.weight").T.reshape(H, V, -1),
    }
    if c.output_gate:
        out["out_gate"] = heads("g_proj")
    if c.q_lora_rank is None:
        return out | {"q_proj": heads("q_proj")}
    return out | {
        "q_down": read("q_a_proj.weight").T,
        "q_norm": read("q_a_layernorm.weight"),
        "q_up": heads("q_b_proj"),
    }


def ffn_tree(read: Read) -> dict:
    names = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    return {ours: read(name + ".weight").T for ours, name in names.items()}


def moe_tree(read: Read, c: MoEConfig) -> dict:
    """`read` gives each expert matrix stacked, [E, out, in]."""
    norm = {"latent_norm": read("routed_expert_norm.weight")} if c.latent_norm else {}
    return norm | {
        "router": read("gate.weight").T,
        "latent_down": read("routed_expert_down_proj.weight").T,
        "latent_up": read("routed_expert_up_proj.weight").T,
        "expert_gate": read("experts.w1").swapaxes(1, 2),
        "expert_up": read("experts.w3").swapaxes(1, 2),
        "expert_down": read("experts.w2").swapaxes(1, 2),
        "shared": ffn_tree(lambda name: read("shared_experts." + name)),
    }


def to_tree(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict:
    """Published tensors (or their gradients) as this project's parameter tree."""
    prefix = "language_model.model."

    def layer(i: int, spec) -> dict:
        def read(name: str) -> np.ndarray:
            return tensors[f"{prefix}layers.{i}.{name}"]

        attention = lambda name: read("self_attn." + name)  # noqa: E731

        def moe(name: str) -> np.ndarray:
            if not name.startswith("experts."):
                return read("block_sparse_moe." + name)
            expert, matrix = name.split(".")
            return np.stack(
                [
                    read(f"block_sparse_moe.{expert}.{e}.{matrix}.weight")
                    for e in range(config.moe.num_experts)
                ]
            )

        out = {
            "attn_norm": read("input_layernorm.weight"),
            "ffn_norm": read("post_attention_layernorm.weight"),
        }
        if spec.attention == "kda":
            out["kda"] = kda_tree(attention, config.kda)
        else:
            out["mla"] = mla_tree(attention, config.mla)
        if spec.ffn == "dense":
            out["ffn"] = ffn_tree(lambda name: read("mlp." + name))
        else:
            out["moe"] = moe_tree(moe, config.moe)
        return out

    def mixes(i: int, spec, kind: str) -> list[np.ndarray]:
        names = ["self_attention"] * spec.mixes_attention + ["mlp"] * spec.mixes_ffn
        return [
            tensors[f"{prefix}layers.{i}.{name}_res_{kind}.weight"].reshape(-1) for name in names
        ]

    def copy(group, repeat: int) -> dict:
        first = group.first_layer + repeat * len(group.specs)
        out = {f"layer_{j}": layer(first + j, spec) for j, spec in enumerate(group.specs)}
        for ours, kind in (("res_query", "proj"), ("res_norm", "norm")):
            rows = [
                row for j, spec in enumerate(group.specs) for row in mixes(first + j, spec, kind)
            ]
            if rows:
                out[ours] = np.stack(rows)
        return out

    tree = {}
    for b, groups in enumerate(blocks(config)):
        block = tree[f"block_{b}"] = {}
        for g, group in enumerate(groups):
            copies = [copy(group, repeat) for repeat in range(group.repeats)]
            stack = np.stack if group.repeats > 1 else lambda xs: xs[0]
            block[f"group_{g}"] = jax.tree.map(lambda *xs, stack=stack: stack(xs), *copies)
    return tree | {
        "embedding": tensors[prefix + "embed_tokens.weight"],
        "head": tensors["language_model.lm_head.weight"].T,
        "final_norm": tensors[prefix + "norm.weight"],
        "res_query": tensors[prefix + "output_attn_res_proj.weight"].reshape(1, -1),
        "res_norm": tensors[prefix + "output_attn_res_norm.weight"].reshape(1, -1),
    }


def read_params(folder: Path, config: ModelConfig, dtype=jnp.float32) -> tuple[dict, dict]:
    """(params, balance) of a published folder, upcast to `dtype`."""
    stored = load_file(str(folder / "model.safetensors"))
    tensors = {name: np.asarray(x.astype(jnp.float32)) for name, x in stored.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), to_tree(config, tensors))
    bias = [
        tensors[f"language_model.model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias"]
        for i, spec in enumerate(layer_specs(config))
        if spec.ffn == "moe"
    ]
    bias_LE = jnp.asarray(np.stack(bias), dtype)
    span = jnp.stack([bias_LE.min(1) - 1, bias_LE.max(1) + 1], 1)
    return params, {"bias": bias_LE, "bin_range": span}
