"""Kimi-Linear-48B-A3B (arXiv 2510.26692): the ancestor, in the same code.

Softplus decay, low-rank output gate, plain residuals, SwiGLU experts at full width, MLA without
query compression and output gate, and combine weights from biased scores as in the released code.

Command:  python -m train.params --config=configs/kimi_linear_48b.py
Result:   49.1B parameters in all; 3.11B active without the input embedding, which is 2.73B without
          the output head (0.38B) as well.
Time:     seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """The released model at its pretraining context of 4096."""
    config = base.get_config()

    model = config.model
    model.vocab_size = 163840
    model.dim = 2304
    model.layers = "KKKM" * 6 + "KKM"  # MLA at 4, 8, ..., 24 and 27
    model.dense_hidden = 9216
    model.activation = "swiglu"

    model.kda.num_heads = 32
    model.kda.key_dim = 128
    model.kda.value_dim = 128
    model.kda.gate_kind = "softplus"
    model.kda.output_gate = "low_rank"

    model.mla.num_heads = 32
    model.mla.kv_lora_rank = 512
    model.mla.nope_dim = 128
    model.mla.rope_dim = 64
    model.mla.value_dim = 128
    model.mla.output_gate = False

    model.moe.num_experts = 256
    model.moe.top_k = 8
    model.moe.num_shared_experts = 1
    model.moe.expert_hidden = 1024
    model.moe.latent_norm = False
    model.moe.combine_scores = "biased"
    model.moe.routed_scaling_factor = 2.446
    model.moe.row_block = 128

    model.residual.mode = "none"

    config.data.context_length = 4096
    config.data.batch_size = 8192  # 32M tokens a step
    config.optimizer.learning_rate = 1.1e-3
    config.layouts = {
        "v5e:16x16": {
            "data": {"batch_size": 1024},  # 4M tokens a step
            "mesh": {"data": 16, "expert": 16},
            # libtpu has no ragged exchange for this slice.
            "model": {
                "remat": "nested",
                "moe": {"dispatch": "even_all_to_all", "buffer_factor": 1.5},
            },
            "step": {"accumulation": 4, "loss": {"chunk_tokens": 512}},
            "optimizer": {"mu_dtype": "bfloat16"},
        },
    }
    config.run.steps = 180_000
    config.run.checkpoint_every = 1000
    return config
