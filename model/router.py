"""Which experts a token goes to, and with what weight.

M tokens (flattened rows), D model, E experts, J choices of a token (top_k), in falling order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import MoEConfig

_SUM_EPS = 1e-20  # keeps the renormalisation finite when every chosen score underflows


class Routing(NamedTuple):
    """The router's decision for a batch of tokens."""

    expert_ids_MJ: jax.Array  # int32, by falling biased score; equal scores: the lower id first
    weights_MJ: jax.Array  # of the chosen experts, fp32, differentiable
    scores_ME: jax.Array  # raw scores, fp32, without the bias
    alpha_M: jax.Array  # cutoff: the best biased score that was not chosen, fp32, a constant


def router_scores(config: MoEConfig, x_MD: jax.Array, weight_DE: jax.Array) -> jax.Array:
    """Scores [M, E] in fp32 from the full-width input (Kimi K3 report Eq. 13; or a softmax).

    Near-tied experts flip on rounding, so this one small matmul is never done in less than fp32,
    whatever the compute dtype.
    """
    dtype = jnp.promote_types(jnp.promote_types(x_MD.dtype, weight_DE.dtype), jnp.float32)
    logits_ME = jnp.matmul(
        x_MD.astype(dtype), weight_DE.astype(dtype), precision=jax.lax.Precision.HIGHEST
    )
    return jax.nn.sigmoid(logits_ME) if config.router == "sigmoid" else jax.nn.softmax(logits_ME)


def route(config: MoEConfig, scores_ME: jax.Array, bias_E: jax.Array) -> Routing:
    """Chooses top_k experts a token by biased score (Kimi K3 report Eq. 13).

    The bias only selects and has no gradient; combine weights come from the raw scores. With
    `combine_scores="biased"` they contain the bias too, as in the code released with
    Kimi-Linear-48B. Weights are divided by their sum and times `routed_scaling_factor`.

    Args:
      config: top_k (below E, which MoEConfig checks), combine_scores, routed_scaling_factor.
      scores_ME: from `router_scores`.
      bias_E: the layer's router bias.
    """
    bias_E = jax.lax.stop_gradient(bias_E).astype(scores_ME.dtype)
    biased_ME = scores_ME + bias_E[None, :]

    # One more than needed: the runner-up is the token's cutoff (Eq. 14). The barrier keeps XLA from
    # merging the slices below into the top-k, which it then runs as a full sort (5x on a CPU). One
    # barrier for each: outside model.sharding.spread XLA's partitioner aborts on one for the pair.
    top = jax.lax.top_k(jax.lax.stop_gradient(biased_ME), config.top_k + 1)
    top_values, top_ids = map(jax.lax.optimization_barrier, top)
    expert_ids_MJ = top_ids[:, :-1]

    combine_ME = biased_ME if config.combine_scores == "biased" else scores_ME
    chosen_MJ = jnp.take_along_axis(combine_ME, expert_ids_MJ, axis=-1)
    total_M1 = chosen_MJ.sum(axis=-1, keepdims=True) + _SUM_EPS
    return Routing(
        expert_ids_MJ=expert_ids_MJ,
        weights_MJ=chosen_MJ / total_M1 * config.routed_scaling_factor,
        scores_ME=scores_ME,
        alpha_M=top_values[:, -1],
    )
