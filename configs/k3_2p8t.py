"""Kimi K3: 2.78T parameters, 104B active; every published number.

Command:  python -m train.params --config=configs/k3_2p8t.py
Result:   total 2,779,484,379,232; active 104,189,515,872 (105,363,920,992 with the
          input embedding).
          With the layer-0 attention mix that only the published checkpoint has, and nothing uses:
          total 2,779,484,393,568; active 104,189,530,208 (105,363,935,328).
Time:     seconds on a CPU. Training it is for pods; token count, batch size and peak learning rate
          were not published, and what stands here for them is a guess.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """The published text model at 8K context."""
    config = base.get_config()

    model = config.model
    model.vocab_size = 163840
    model.dim = 7168
    model.layers = "KKKM" * 23 + "M"  # 69 KDA, 24 MLA
    model.num_dense_layers = 1
    model.dense_hidden = 33792
    model.remat = "full"

    model.kda.num_heads = 96
    model.kda.key_dim = 128
    model.kda.value_dim = 128

    model.mla.num_heads = 96
    model.mla.q_lora_rank = 1536
    model.mla.kv_lora_rank = 512
    model.mla.nope_dim = 128
    model.mla.rope_dim = 64
    model.mla.value_dim = 128

    model.moe.num_experts = 896
    model.moe.top_k = 16
    model.moe.num_shared_experts = 2
    model.moe.expert_hidden = 3072
    model.moe.latent_dim = 3584
    model.moe.row_block = 128

    model.residual.block_size = 12

    config.data.context_length = 8192
    config.data.batch_size = 4096  # 32M tokens a step
    config.optimizer.learning_rate = 2e-4
    config.optimizer.mu_dtype = "bfloat16"
    config.layouts = {
        "v5p:16x16x32": {
            "mesh": {"data": 64, "expert": 64, "sequence": 2},
            "model": {"remat": "nested", "moe": {"dispatch": "all_to_all", "buffer_factor": 1.5}},
            "step": {"loss": {"chunk_tokens": 1024}},
        },
        "v5p:16x16x32/1048576": {
            "data": {"context_length": 2**20, "batch_size": 32},
            "mesh": {"data": 1, "expert": 32, "sequence": 256},
            "model": {
                "remat": "nested",
                "mla": {"head_block": 8},
                "moe": {"dispatch": "all_to_all", "buffer_factor": 1.5},
            },
            "step": {"loss": {"chunk_tokens": 1024}},
        },
    }
    config.run.steps = 500_000
    config.run.checkpoint_every = 1000
    return config
