"""A CPU: the whole architecture in a model of under 2M parameters, trained on Python source.

Command:  make train    (python -m train --config=configs/tiny.py --workdir=runs/tiny)
Expected: held-out bits per byte about 2.05, MaxVio 0.3 to 0.7 at the end, in 3 to 4 minutes on two
          cores, of which about half a minute compiles. (zlib -9 has 1.83; 480 steps gave
          1.98, and 450 steps of "KKKMM" 1.92.)

--config=configs/tiny.py:balance trains the same model on 8192 tokens a step for 60 steps: the
setting of the router-balance figures in the README.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    """K K K M, width 128, bytes as tokens. `arg`: "" or "balance"."""
    if arg not in ("", "balance"):
        raise ValueError(f"configs/tiny.py:{arg} does not exist; try configs/tiny.py:balance")
    config = base.get_config()

    model = config.model
    model.layers = "KKKM"
    model.residual.block_size = 2
    model.dtype = "float32"  # bf16 is no faster than fp32 on a CPU
    model.remat = "none"
    model.embedding_std = 0.3
    model.head_std = 0.0
    model.moe.latent_dim = 64
    model.kda.chunk_size = 32

    config.optimizer.learning_rate = 1e-2
    config.optimizer.schedule = "linear"
    config.optimizer.final_lr_fraction = 0.02

    config.mesh.cpu_devices = 2  # two small programs beat one with two threads
    config.run.steps = 330
    config.run.eval_every = 110
    config.run.checkpoint_every = 110
    config.run.sample_tokens = 120
    if arg == "balance":
        config.data.batch_size = 32
        config.run.steps = 60
        config.run.sample_tokens = 0
        config.run.log_every = 1
        config.run.eval_every = 0
        config.run.checkpoint_every = 0
        config.run.eval_rows = 64
    return config
