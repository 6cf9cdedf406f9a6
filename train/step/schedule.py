"""The learning rate over a run."""

import dataclasses
import math

import jax
import optax


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """A linear warm-up to the peak, then a decay that ends with the run."""

    learning_rate: float  # the peak
    schedule: str = "cosine"  # shape of the decay: "cosine" or "linear"
    warmup_fraction: float = 0.01  # of the run's steps
    final_lr_fraction: float = 0.1  # of the peak, at the last step

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"optimizer.learning_rate={self.learning_rate} must be positive; try 1e-3"
            )
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(
                f"optimizer.schedule={self.schedule!r} is not one of cosine, linear; try 'cosine'"
            )
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(
                f"optimizer.warmup_fraction={self.warmup_fraction} must lie in [0, 1); try 0.01"
            )
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(
                f"optimizer.final_lr_fraction={self.final_lr_fraction} must lie in [0, 1]; try 0.1"
            )


def make_schedule(config: ScheduleConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of the update that follows `count` updates, for 0 <= count < num_steps.

    The ramps are read one step ahead, so no update has rate zero: with w warm-up steps the first
    has peak / w, the w-th the peak and the last of the run peak * final_lr_fraction, which stays.
    """
    peak, final = config.learning_rate, config.final_lr_fraction
    warmup_steps = min(math.ceil(config.warmup_fraction * num_steps), num_steps - 1)
    decay_steps = num_steps - warmup_steps
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, decay_steps, alpha=final)
    else:
        decay = optax.linear_schedule(peak, peak * final, decay_steps)
    if warmup_steps:
        warmup = optax.linear_schedule(0.0, peak, warmup_steps)
        ramps = optax.join_schedules([warmup, decay], [warmup_steps])
    else:
        ramps = decay

    def schedule(count: int | jax.Array) -> jax.Array:
        return ramps(count + 1)

    return schedule
