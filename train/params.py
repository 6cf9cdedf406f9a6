"""python -m train.params --config=configs/k3_2p8t.py: parameters, from shapes alone."""

import jax

from train.config import TrainConfig
from train.flags import run
from train.run.flops import count_params, forward_flops_per_token


def main(config: TrainConfig) -> None:
    """Prints total and active parameters, by part, and FLOPs per token."""
    jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator
    counts = count_params(config.model)
    print(f"{'part':<22}{'parameters':>22}")
    for part, size in sorted(counts.parts.items(), key=lambda item: -item[1]):
        print(f"{part:<22}{size:>22,}")
    print(f"{'total':<22}{counts.total:>22,}")
    print(f"{'active':<22}{counts.active:>22,}   without the input embedding")
    print(f"{'':<22}{counts.active_with_embedding:>22,}   with it")
    if config.model.residual.mode != "none":
        # The published checkpoint holds an attention mix for layer 0, which has nothing to mix.
        unused = 2 * config.model.dim
        print(f"with the unused layer-0 mix of the published checkpoint (+{unused:,}):")
        print(f"{'  total':<22}{counts.total + unused:>22,}")
        print(f"{'  active':<22}{counts.active + unused:>22,}   without the input embedding")
        print(f"{'':<22}{counts.active_with_embedding + unused:>22,}   with it")
    T = config.data.context_length
    flops = forward_flops_per_token(config.model, T)
    print(f"forward FLOPs per token at context {T}: {flops:.4g}; training: {3 * flops:.4g}")


if __name__ == "__main__":
    run(main)
