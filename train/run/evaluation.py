"""Held-out bits per byte, and a sample from the model."""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from model.balance import Balance
from model.config import ModelConfig
from model.sharding import ROWS, TOKENS, spread, total
from model.transformer import Params, Transformer, head_part, specs_here, unembed
from train.data.batch import Batch
from train.step.loss import LossConfig, loss_sums


@functools.partial(jax.jit, static_argnames=("model", "config"))
def _nll(
    params: Params, balance: Balance, batch: Batch, model: ModelConfig, config: LossConfig
) -> tuple[jax.Array, jax.Array]:
    """(summed nats, scored tokens) of a batch; the balance is frozen."""

    def on_device(params: Params, batch: Batch, balance: Balance) -> tuple[jax.Array, jax.Array]:
        hidden_BTD, _ = Transformer(model).apply(
            {"params": params}, batch.inputs, batch.segment_ids, balance
        )
        _, sums = loss_sums(head_part(model, params), hidden_BTD, batch, config)
        return total((sums.nll, sums.num_tokens))

    return spread(on_device, (specs_here(model), TOKENS, P()), P())(params, batch, balance)


def bits_per_byte(
    params: Params,
    balance: Balance,
    batches: Iterable[Batch],
    model: ModelConfig,
    config: LossConfig,
) -> tuple[float, int]:
    """(mean code length, number) of the targets, which are bytes with the byte tokenizer."""
    results = [_nll(params, balance, batch, model, config) for batch in batches]
    nats = sum(float(nll) for nll, _ in results)
    num_bytes = sum(int(tokens) for _, tokens in results)
    return nats / math.log(2) / max(1, num_bytes), num_bytes


@functools.partial(jax.jit, static_argnames=("model",))
def _next_token(
    params: Params,
    balance: Balance,
    tokens_T: jax.Array,
    last: jax.Array,
    model: ModelConfig,
) -> jax.Array:
    """The likeliest token after position `last`; later positions are never looked at."""
    # A mesh spreads rows, so there is one for every device along ROWS. Only the first holds
    # anything but padding, which would take room from others where experts have little.
    mesh = jax.sharding.get_abstract_mesh()
    rows = math.prod(mesh.shape.get(axis, 1) for axis in ROWS)
    tokens_BT = jnp.tile(tokens_T[None], (rows, 1))
    ids_BT = jnp.zeros_like(tokens_BT).at[0].set(jnp.arange(tokens_T.size) <= last)

    def on_device(
        params: Params, tokens_BT: jax.Array, ids_BT: jax.Array, balance: Balance
    ) -> jax.Array:
        return Transformer(model).apply({"params": params}, tokens_BT, ids_BT, balance)[0]

    run = spread(on_device, (specs_here(model), TOKENS, TOKENS, P()), TOKENS)
    hidden_BTD = run(params, tokens_BT, ids_BT, balance)
    return jnp.argmax(unembed(params, hidden_BTD[:1, last][:, None])[0, 0])


def sample(
    params: Params,
    balance: Balance,
    prompt_T: np.ndarray,
    num_tokens: int,
    model: ModelConfig,
    *,
    context_length: int,
) -> np.ndarray:
    """Continues a prompt greedily; returns the new tokens.

    Runs the whole window again for every token, without a cache, so for short samples only. The
    window slides when the context is full.
    """
    tokens_T = np.asarray(prompt_T[-context_length:], np.int32)
    new: list[int] = []
    for _ in range(num_tokens):
        window = tokens_T[-context_length:]
        padded = np.zeros(context_length, np.int32)
        padded[: len(window)] = window
        token = _next_token(
            params,
            balance,
            padded,
            np.int32(len(window) - 1),
            model,
        )
        new.append(int(token))
        tokens_T = np.append(tokens_T, np.int32(new[-1]))
    return np.array(new, np.int32)
