"""One GPU: K3's architecture at width 1024 and 17 layers.

Command:  python -m train --config=configs/small.py --workdir=runs/small
Expected: seen on one H200 with --config.data.batch_size=2 for 30 steps only: 3 minutes of
          compilation, loss 3.8 to 1.9 on bytes, MFU 5.5% in pure JAX.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """17 layers = 4 x (3 KDA + 1 MLA) + a final MLA."""
    config = base.get_config()

    model = config.model
    model.vocab_size = 163840
    model.dim = 1024
    model.layers = "KKKM" * 4 + "M"
    model.dense_hidden = 4096

    model.kda.num_heads = 8
    model.kda.key_dim = 128
    model.kda.value_dim = 128

    model.mla.num_heads = 8
    model.mla.q_lora_rank = 512
    model.mla.kv_lora_rank = 256
    model.mla.nope_dim = 128
    model.mla.rope_dim = 64
    model.mla.value_dim = 128

    model.moe.num_experts = 64
    model.moe.top_k = 4
    model.moe.expert_hidden = 512
    model.moe.latent_dim = 512
    model.moe.row_block = 128

    config.data.context_length = 8192
    config.data.batch_size = 8
    config.optimizer.learning_rate = 3e-3
    config.run.steps = 10_000
    config.run.eval_every = 1000
    config.run.checkpoint_every = 1000
    return config
