"""Cross entropy over chunks of tokens, as sums: a step's mean is taken once."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.layers import at_least_float32
from model.sharding import Part, gather, scatter
from train.data.batch import Batch


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is summed over tokens."""

    z_loss: float = 0.0  # weight of logsumexp(logits)^2
    chunk_tokens: int = 8192  # a device has logits of at most this many tokens at a time

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


def loss_sums(
    head: Part, hidden_BTD: jax.Array, batch: Batch, config: LossConfig
) -> tuple[jax.Array, LossSums]:
    """(nll + z_loss * z, which has a gradient; the sums, which have none) of these tokens.

    Logits exist for a chunk of tokens at a time. Where a gradient is taken it is made along with
    the loss, from the same logits, and so that of the head is summed over devices once.

    Args:
      head: model.transformer.head_part.
    """
    D = hidden_BTD.shape[-1]
    tokens = hidden_BTD.reshape(-1, D), batch.targets.reshape(-1), batch.loss_mask.reshape(-1)
    M = tokens[1].size
    chunk = min(M, config.chunk_tokens)

    def in_chunks(x: jax.Array) -> jax.Array:
        """[M, ...] -> [chunks, tokens of a chunk, ...], zero-padded."""
        x = jnp.pad(x, [(0, -M % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    hidden, targets, mask = map(in_chunks, tokens)
    objective, nll, z = _summed(head, hidden, targets, mask, config.z_loss)
    return objective, LossSums(nll, z, jnp.sum(batch.loss_mask, dtype=jnp.int32))


Sums = tuple[jax.Array, jax.Array, jax.Array]  # nll + z_loss * z, nll, z


def _of_logits(
    logits_CW: jax.Array, targets_C: jax.Array, mask_C: jax.Array, z_loss: float
) -> tuple[jax.Array, Sums]:
    nll_C, lse_C = token_nll(logits_CW, targets_C)
    nll, z = jnp.sum(jnp.where(mask_C, nll_C, 0)), jnp.sum(jnp.where(mask_C, lse_C**2, 0))
    objective = nll + z_loss * z
    return objective, (objective, nll, z)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(
    head: Part, hidden_NCD: jax.Array, targets_NC: jax.Array, mask_NC: jax.Array, z_loss: float
) -> Sums:
    """Sums over N chunks of C tokens."""
    head_DW = gather(head, hidden_NCD.dtype)
    dtype = at_least_float32(hidden_NCD.dtype)

    def step(sums: Sums, x: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        logits_CW = jnp.matmul(x[0], head_DW, preferred_element_type=dtype)
        return jax.tree.map(jnp.add, sums, _of_logits(logits_CW, *x[1:], z_loss)[1]), None

    zeros = (jnp.zeros((), dtype),) * 3
    return jax.lax.scan(step, zeros, (hidden_NCD, targets_NC, mask_NC))[0]


def _summed_fwd(
    head: Part, hidden_NCD: jax.Array, targets_NC: jax.Array, mask_NC: jax.Array, z_loss: float
) -> tuple[Sums, tuple[Part, jax.Array]]:
    head_DW = gather(head, hidden_NCD.dtype)
    dtype = at_least_float32(hidden_NCD.dtype)

    def step(carry: tuple[Sums, jax.Array], x: tuple[jax.Array, ...]) -> tuple:
        sums, dhead_DW = carry
        hidden_CD, *labels = x
        logits_CW = jnp.matmul(hidden_CD, head_DW, preferred_element_type=dtype)
        gradient = jax.grad(_of_logits, has_aux=True)
        dlogits_CW, new = gradient(logits_CW, *labels, z_loss)
        dlogits_CW = dlogits_CW.astype(hidden_CD.dtype)
        dhidden_CD = jnp.einsum("cw,dw->cd", dlogits_CW, head_DW)
        dhead_DW += jnp.einsum(
            "cd,cw->dw", hidden_CD, dlogits_CW, preferred_element_type=dhead_DW.dtype
        )
        return (jax.tree.map(jnp.add, sums, new), dhead_DW), dhidden_CD

    zeros = (jnp.zeros((), dtype),) * 3, jnp.zeros(head_DW.shape, head.value.dtype)
    (sums, dhead_DW), dhidden_NCD = jax.lax.scan(step, zeros, (hidden_NCD, targets_NC, mask_NC))
    dhead = dataclasses.replace(head, value=scatter(dhead_DW, head.dims))
    return sums, (dhead, dhidden_NCD)


def _summed_bwd(_: float, gradients: tuple[Part, jax.Array], scale: Sums) -> tuple:
    return *jax.tree.map(lambda x: x * scale[0].astype(x.dtype), gradients), None, None


_summed.defvjp(_summed_fwd, _summed_bwd)
