"""Chunked cross entropy against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from model.sharding import Part
from train.data.batch import Batch
from train.step.loss import LossConfig, loss_sums

B, T, D, W = 2, 7, 4, 11


def case():
    rng = np.random.default_rng(0)
    params = {"head": jnp.asarray(rng.standard_normal((D, W)))}
    hidden = jnp.asarray(rng.standard_normal((B, T, D)))
    targets = jnp.asarray(rng.integers(0, W, (B, T)), jnp.int32)
    mask = jnp.asarray(rng.random((B, T)) < 0.7)
    ones = jnp.ones((B, T), jnp.int32)
    return params, hidden, Batch(targets, targets, ones, ones, mask)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 6, 14, 1000])
def test_sums_and_gradients(x64, chunk_tokens):
    params, hidden, batch = case()
    config = LossConfig(z_loss=0.1, chunk_tokens=chunk_tokens)

    def chunked(params, hidden):
        return loss_sums(Part(params["head"]), hidden, batch, config)

    def plain(params, hidden):
        logits = hidden @ params["head"]
        logp = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
        nll = -jnp.take_along_axis(logp, batch.targets[..., None], -1)[..., 0]
        z = jnp.log(jnp.exp(logits).sum(-1)) ** 2
        return jnp.sum((nll + 0.1 * z) * batch.loss_mask)

    (value, sums), grads = jax.value_and_grad(chunked, (0, 1), has_aux=True)(params, hidden)
    want, want_grads = jax.value_and_grad(plain, (0, 1))(params, hidden)
    assert int(sums.num_tokens) == int(batch.loss_mask.sum())
    np.testing.assert_allclose(value, want, rtol=1e-13)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), grads, want_grads)


def test_logits_exist_for_one_chunk_only():
    """No array of [B, T, W] elements, forward or backward."""
    params, hidden, batch = case()
    jaxpr = jax.make_jaxpr(
        jax.grad(lambda p: loss_sums(Part(p), hidden, batch, LossConfig(chunk_tokens=2))[0])
    )(params["head"])

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars if v.aval.shape[-1:] == (W,))
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    assert 0 < max(sizes(jaxpr.jaxpr)) < B * T * W
