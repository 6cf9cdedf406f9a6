"""Small models for tests."""

import dataclasses

from model.config import (
    BalanceConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ResidualConfig,
)


def small_config(**overrides) -> ModelConfig:
    """A five-layer float64 model with every mechanism, a few thousand parameters."""
    config = ModelConfig(
        vocab_size=23,
        dim=16,
        layers="KKKMM",
        dense_hidden=24,
        kda=KDAConfig(num_heads=2, key_dim=8, value_dim=8, gate_rank=4, chunk_size=16),
        mla=MLAConfig(
            num_heads=2, q_lora_rank=12, kv_lora_rank=8, nope_dim=6, rope_dim=4, value_dim=8
        ),
        moe=MoEConfig(num_experts=6, top_k=2, expert_hidden=8, latent_dim=8, row_block=8),
        balance=BalanceConfig(num_bins=40),
        residual=ResidualConfig(block_size=2),
        init_std=0.2,
        embedding_std=0.5,
        head_std=0.3,
        dtype="float64",
        param_dtype="float64",
        remat="none",
    )
    return dataclasses.replace(config, **overrides)
