"""Held-out bits per byte, and a sample from the model."""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from model.balance import Balance
from model.config import ModelConfig
from model.transformer import Params, Transformer, unembed
from train.data.batch import Batch
from train.step.loss import LossConfig, loss_sums


@functools.partial(jax.jit, static_argnames=("model", "config"))
def _nll(
    params: Params, balance: Balance, batch: Batch, model: ModelConfig, config: LossConfig
) -> tuple[jax.Array, jax.Array]:
    """(summed nats, scored tokens) of a batch; the balance is frozen."""
    hidden_BTD, _ = Transformer(model).apply(
        {"params": params}, batch.inputs, batch.segment_ids, balance
    )
    sums = loss_sums(params, hidden_BTD, batch, config)
    return sums.nll, sums.num_tokens


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
    key: jax.Array,
    temperature: jax.Array,
    model: ModelConfig,
) -> jax.Array:
    """Samples the token after position `last`; later positions are never looked at."""
    hidden_BTD, _ = Transformer(model).apply({"params": params}, tokens_T[None], None, balance)
    logits_W = unembed(params, hidden_BTD[:, last][:, None])[0, 0]
    greedy = jnp.argmax(logits_W)
    scaled_W = logits_W / jnp.maximum(temperature, 1e-6)
    return jnp.where(temperature > 0, jax.random.categorical(key, scaled_W), greedy)


def sample(
    params: Params,
    balance: Balance,
    prompt_T: np.ndarray,
    num_tokens: int,
    model: ModelConfig,
    *,
    context_length: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """Continues a prompt by running the whole window again for every token: no cache, so for short
    samples only. Returns the new tokens; the window slides when the context is full."""
    tokens_T = np.asarray(prompt_T[-context_length:], np.int32)
    new: list[int] = []
    key = jax.random.key(seed)
    for i in range(num_tokens):
        window = tokens_T[-context_length:]
        padded = np.zeros(context_length, np.int32)
        padded[: len(window)] = window
        token = _next_token(
            params,
            balance,
            padded,
            np.int32(len(window) - 1),
            jax.random.fold_in(key, i),
            np.float32(temperature),
            model,
        )
        new.append(int(token))
        tokens_T = np.append(tokens_T, np.int32(new[-1]))
    return np.array(new, np.int32)
