"""One optimizer step: (state, batch) -> (state, metrics). Pure; the loop jits it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from model.balance import (
    STATS_SPECS,
    Balance,
    Stats,
    add_stats,
    balance_metrics,
    empty_stats,
    update_balance,
)
from model.config import ModelConfig
from model.sharding import TOKENS, sizes, spread, total, unused_axes
from model.transformer import Params, Transformer, head_part, specs_here
from train.data.batch import Batch
from train.step.loss import LossConfig, LossSums, loss_sums
from train.step.state import TrainState

Metrics = dict[str, jax.Array]
OPTIMIZER = "optimizer"  # the name scope of its operations


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
    params: Params, batch: Batch, balance: Balance, model: ModelConfig, config: LossConfig
) -> tuple[jax.Array, tuple[LossSums, jax.Array, Stats]]:
    """What is differentiated: a *sum* over this device's tokens of a microbatch."""
    hidden_BTD, aux = Transformer(model).apply(
        {"params": params}, batch.inputs, batch.segment_ids, balance
    )
    loss, sums = loss_sums(head_part(model, params), hidden_BTD, batch, config)
    # The auxiliary loss sums over real tokens, of which each document's last has no target; in
    # units of the loss's tokens it weighs as a mean should.
    num_real = jnp.maximum(total(jnp.sum(batch.segment_ids != 0)), 1)
    aux_loss = aux.aux_loss * (total(sums.num_tokens) / num_real)
    return loss + aux_loss, (sums, aux_loss, aux.stats)


def _accumulate(
    params: Params, batch: Batch, balance: Balance, *, model: ModelConfig, config: StepConfig
) -> _Totals:
    """Gradients, loss sums and router statistics of this device's tokens."""
    B, T = batch.inputs.shape
    gradient = jax.value_and_grad(_objective, has_aux=True)

    def totals_of(microbatch: Batch) -> _Totals:
        (_, aux), grads = gradient(params, microbatch, balance, model, config.loss)
        return _Totals(grads, *aux)

    if config.accumulation == 1:
        return totals_of(batch)

    # Rows a, a + A, ... form microbatch a, on any mesh.
    rows = B // config.accumulation
    microbatches = jax.tree.map(
        lambda x: x.reshape(rows, config.accumulation, *x.shape[1:]).swapaxes(0, 1), batch
    )
    first = jax.eval_shape(totals_of, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    if "margins" in first.stats:
        L, _, E = first.stats["margins"].shape
        empty = empty_stats(model.balance, L, E, B * T, first.stats["margins"].dtype)
        zeros.stats["margins"] = empty["margins"]

    def step(sums: _Totals, x: tuple[jax.Array, Batch]) -> tuple[_Totals, None]:
        index, microbatch = x
        one = totals_of(microbatch)
        stats = add_stats(sums.stats, one.stats, index * (rows * T))
        added = jax.tree.map(jnp.add, sums._replace(stats=None), one._replace(stats=None))
        return added._replace(stats=stats), None

    indices = jnp.arange(config.accumulation)
    return jax.lax.scan(step, zeros, (indices, microbatches))[0]


def _totals(state: TrainState, batch: Batch, model: ModelConfig, config: StepConfig) -> _Totals:
    """Gradients, loss sums and router statistics of the whole batch, over all devices.

    What all devices need of each other is summed here, once a step and for all layers together.
    """
    specs = specs_here(model)

    def on_device(params: Params, batch: Batch, balance: Balance) -> _Totals:
        sums = _accumulate(params, batch, balance, model=model, config=config)
        if not sizes():
            return sums
        # A part was summed already over the devices that have the other parts.
        grads = jax.tree.map(lambda x, spec: total(x, unused_axes(spec)), sums.grads, specs)
        stats = {name: total(x, unused_axes(STATS_SPECS[name])) for name, x in sums.stats.items()}
        loss, aux_loss = total((sums.loss, sums.aux_loss))
        return _Totals(grads, loss, aux_loss, stats)

    stats = {name: STATS_SPECS[name] for name in empty_stats(model.balance, 0, 0, 0)}
    run = spread(on_device, (specs, TOKENS, P()), _Totals(specs, P(), P(), stats))
    return run(state.params, batch, state.balance)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: ModelConfig,
    config: StepConfig,
    optimizer: optax.GradientTransformationExtraArgs,
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
    sums = _totals(state, batch, model, config)
    count = jnp.maximum(sums.loss.num_tokens, 1)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), sums.grads)
    loss = sums.loss.nll / count
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    with jax.named_scope(OPTIMIZER):
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, specs=specs_here(model)
        )
    params = optax.apply_updates(state.params, updates)
    num_real = jnp.sum(batch.segment_ids != 0, dtype=jnp.int32)
    balance = state.balance
    if sums.stats:
        balance = update_balance(
            model.balance, state.balance, sums.stats, num_real, model.moe.top_k
        )
    new = TrainState(state.step, params, opt_state, balance)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    metrics = {
        "loss": loss,
        "z_loss": config.loss.z_loss * sums.loss.z / count,
        "aux_loss": sums.aux_loss / count,
        "grad_norm": grad_norm,
        "num_tokens": sums.loss.num_tokens,
        "skipped": jnp.logical_not(finite).astype(jnp.int32),
    }
    if sums.stats:
        metrics |= balance_metrics(state.balance, sums.stats)
        metrics["dropped"] = sums.stats["dropped"]
    return kept._replace(step=state.step + 1), metrics
