"""Cross entropy over chunks of tokens, as sums: a step's mean is taken once."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model import sharding
from model.layers import at_least_float32
from model.transformer import Params, unembed
from train.data.batch import Batch


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is summed over tokens."""

    z_loss: float = 0.0  # weight of logsumexp(logits)^2
    chunk_tokens: int = 8192  # a device has logits of at most about this many tokens at a time

    def __post_init__(self) -> None:
        if not self.z_loss >= 0:
            raise ValueError(f"step.loss.z_loss={self.z_loss} must not be negative; try 0 or 1e-4")
        if self.chunk_tokens < 1:
            raise ValueError(
                f"step.loss.chunk_tokens={self.chunk_tokens} must be positive; try 8192"
            )


class LossSums(NamedTuple):
    """Sums over the tokens with loss_mask; add them over microbatches before dividing."""

    nll: jax.Array  # -log p(target), nats
    z: jax.Array  # logsumexp(logits)^2
    num_tokens: jax.Array  # int32


def token_nll(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), logsumexp) of logits [..., W], in fp32."""
    logits = logits.astype(at_least_float32(logits.dtype))
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return lse - chosen, lse


def loss_sums(params: Params, hidden_BTD: jax.Array, batch: Batch, config: LossConfig) -> LossSums:
    """Loss sums of a microbatch; a device makes logits for one slice of its tokens at a time, and
    again in the backward pass, so that no [B, T, W] array exists."""
    B, T, _ = hidden_BTD.shape
    rows, shards = sharding.num_parts(sharding.ROWS), sharding.num_parts(("sequence",))
    own = T // shards  # tokens of a row on a device; slices are of these
    chunk = min(own, max(1, config.chunk_tokens // (B // rows)))
    num_chunks = -(-own // chunk)

    def sums(hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        nll, lse = token_nll(unembed(params, hidden), targets)
        return jnp.sum(jnp.where(mask, nll, 0)), jnp.sum(jnp.where(mask, lse**2, 0))

    num_tokens = jnp.sum(batch.loss_mask, dtype=jnp.int32)
    if num_chunks == 1:
        return LossSums(*sums(hidden_BTD, batch.targets, batch.loss_mask), num_tokens)

    def in_chunks(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [num_chunks, B, shards * chunk, ...], zero-padded."""
        x = x.reshape(B, shards, own, *x.shape[2:])
        pad = [(0, 0), (0, 0), (0, num_chunks * chunk - own)] + [(0, 0)] * (x.ndim - 3)
        x = jnp.pad(x, pad).reshape(B, shards, num_chunks, chunk, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0).reshape(num_chunks, B, shards * chunk, *x.shape[4:])

    @jax.checkpoint
    def step(carry: tuple[jax.Array, jax.Array], x: tuple[jax.Array, ...]) -> tuple:
        x = tuple(map(sharding.by_tokens, x))
        return jax.tree.map(jnp.add, carry, sums(*x)), None

    zero = jnp.zeros((), at_least_float32(hidden_BTD.dtype))
    chunks = tuple(in_chunks(x) for x in (hidden_BTD, batch.targets, batch.loss_mask))
    (nll, z), _ = jax.lax.scan(step, (zero, zero), chunks)
    return LossSums(nll, z, num_tokens)
