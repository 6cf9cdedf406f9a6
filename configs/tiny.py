"""A CPU: the whole architecture in a model of under 2M parameters, trained on Python source.

Command:  make train    (python -m train --config=configs/tiny.py --workdir=runs/tiny)
Expected: to be measured

--config=configs/tiny.py:balance trains the same model on 8192 tokens a step for 100 steps: the
setting of the router-balance figures in the README.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    """K K K M M, width 128, bytes as tokens. `arg`: "" or "balance"."""
    if arg not in ("", "balance"):
        raise ValueError(f"configs/tiny.py:{arg} does not exist; try configs/tiny.py:balance")
    config = base.get_config()

    model = config.model
    model.layers = "KKKMM"
    model.dtype = "float32"  # bf16 is no faster than fp32 on a CPU
    model.remat = "none"
    model.embedding_std = 0.3
    model.head_std = 0.0
    model.moe.latent_dim = 64

    config.mesh.cpu_devices = 2  # two small programs beat one with two threads
    config.run.steps = 320
    config.run.eval_every = 100
    config.run.checkpoint_every = 160
    if arg == "balance":
        config.data.batch_size = 32
        config.run.steps = 100
        config.run.log_every = 1
        config.run.eval_every = 0
        config.run.checkpoint_every = 0
        config.run.eval_rows = 64
    return config
