"""A CPU: the whole architecture in a model of under 2M parameters, trained on Python source.

Command:  make train    (python -m train --config=configs/tiny.py --workdir=runs/tiny)
Expected: to be measured
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """K K K M M, width 128, bytes as tokens."""
    config = base.get_config()

    model = config.model
    model.layers = "KKKMM"
    model.dtype = "float32"  # bf16 is no faster than fp32 on a CPU
    model.remat = "none"
    model.embedding_std = 0.3
    model.head_std = 0.0
    model.moe.latent_dim = 64

    config.mesh.cpu_devices = 2
    config.run.steps = 320
    config.run.eval_every = 100
    config.run.checkpoint_every = 160
    return config
