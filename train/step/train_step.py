"""One optimizer step: (state, batch) -> (state, metrics). Pure; the loop jits it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.balance import Stats, add_stats, balance_metrics, empty_stats, update_balance
from model.config import ModelConfig
from model.transformer import Params, Transformer
from train.data.batch import Batch
from train.step.loss import LossConfig, LossSums, loss_sums
from train.step.state import TrainState

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a batch becomes an update."""

    loss: LossConfig
    accumulation: int = 1  # microbatches per optimizer step; they divide the batch's rows

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise ValueError(f"step.accumulation={self.accumulation} must be positive; try 1")


class _Totals(NamedTuple):
    """Sums over the microbatches of a step."""

    grads: Params
    loss: LossSums
    aux_loss: jax.Array
    stats: Stats


def _objective(
    params: Params, batch: Batch, state: TrainState, model: ModelConfig, config: LossConfig
) -> tuple[jax.Array, tuple[LossSums, jax.Array, Stats]]:
    """What is differentiated: a *sum* over the microbatch's tokens."""
    hidden_BTD, aux = Transformer(model).apply(
        {"params": params}, batch.inputs, batch.segment_ids, state.balance
    )
    sums = loss_sums(params, hidden_BTD, batch, config)
    # The auxiliary loss sums over real tokens, of which each document's last has no target; in
    # units of the loss's tokens it weighs as a mean should.
    num_real = jnp.maximum(jnp.sum(batch.segment_ids != 0), 1)
    aux_loss = aux.aux_loss * (sums.num_tokens / num_real)
    return sums.nll + config.z_loss * sums.z + aux_loss, (sums, aux_loss, aux.stats)


def _accumulate(state: TrainState, batch: Batch, model: ModelConfig, config: StepConfig) -> _Totals:
    """Gradients, loss sums and router statistics of the whole batch."""
    B, T = batch.inputs.shape
    gradient = jax.value_and_grad(_objective, has_aux=True)

    def totals_of(microbatch: Batch) -> _Totals:
        (_, aux), grads = gradient(state.params, microbatch, state, model, config.loss)
        return _Totals(grads, *aux)

    if config.accumulation == 1:
        return totals_of(batch)

    # Rows a, a + A, ... form microbatch a, so that rows sharded over devices stay where they are.
    rows = B // config.accumulation
    microbatches = jax.tree.map(
        lambda x: x.reshape(rows, config.accumulation, *x.shape[1:]).swapaxes(0, 1), batch
    )
    first = jax.eval_shape(totals_of, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    dtype = first.stats["margins"].dtype if "margins" in first.stats else jnp.float32
    L, E = first.stats["load"].shape
    zeros = zeros._replace(stats=empty_stats(model.balance, L, E, B * T, dtype))

    def step(total: _Totals, x: tuple[jax.Array, Batch]) -> tuple[_Totals, None]:
        index, microbatch = x
        one = totals_of(microbatch)
        stats = add_stats(total.stats, one.stats, index * (rows * T))
        added = jax.tree.map(jnp.add, total._replace(stats=None), one._replace(stats=None))
        return added._replace(stats=stats), None

    indices = jnp.arange(config.accumulation)
    return jax.lax.scan(step, zeros, (indices, microbatches))[0]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: ModelConfig,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One update of parameters, optimizer and balance.

    The loss is the sum of masked token losses over the number of masked-in tokens of the whole
    step, microbatches included. The balance is updated once, from the statistics of all real
    tokens, and takes effect in the next step (Kimi K3 report, section on Quantile Balancing). A
    loss or gradient that is not finite leaves everything but `step` as it was and reports
    `skipped` = 1.

    Returns:
      The next state, and metrics: loss (nats per token), z_loss, aux_loss, grad_norm, num_tokens,
      skipped, and per MoE layer [L] max_vio, min_load, max_load, bias_spread, and dropped, the
      assignments that found no room (model.expert_parallel).
    """
    total = _accumulate(state, batch, model, config)
    count = jnp.maximum(total.loss.num_tokens, 1)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), total.grads)
    loss = total.loss.nll / count
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    num_real = jnp.sum(batch.segment_ids != 0, dtype=jnp.int32)
    balance = state.balance
    if total.stats:
        balance = update_balance(
            model.balance, state.balance, total.stats, num_real, model.moe.top_k
        )
    new = TrainState(state.step, params, opt_state, balance)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    metrics = {
        "loss": loss,
        "z_loss": config.loss.z_loss * total.loss.z / count,
        "aux_loss": total.aux_loss / count,
        "grad_norm": grad_norm,
        "num_tokens": total.loss.num_tokens,
        "skipped": jnp.logical_not(finite).astype(jnp.int32),
    }
    if total.stats:
        metrics |= balance_metrics(state.balance, total.stats)
        metrics["dropped"] = total.stats["dropped"]
    return kept._replace(step=state.step + 1), metrics
