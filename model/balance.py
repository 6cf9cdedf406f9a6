"""Quantile Balancing: router biases from what the router did, once per optimizer step.

The balance is a plain pytree outside the parameters, every entry stacked over the L MoE layers:
bias [L, E], bin_range [L, 2] (lower and upper edge of the next step's histogram) and, with an EMA,
the number of updates so far. A layer's forward pass reports sufficient statistics of its real
tokens; they add over microbatches and devices, and `update_balance` turns their sum into the
balance of the next step.

q = m k / n below: m real tokens of the step, k = top_k, n = E experts; the load each expert should
have. The bias of an expert is such that q tokens would choose it against their cutoffs alpha.
Which order statistic that is differs by estimator when q is whole, and both forms are published:
  "quantile"   minus the (floor(q) + 1)-th largest of s - alpha: the first token to be turned away;
  "histogram"  the ceil(q)-th smallest of alpha - s, up to one bin: the last token to be taken.

M rows (flattened tokens), E experts, J choices of a token, L layers.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from model.config import BalanceConfig
from model.router import Routing
from model.sharding import AXES

Balance = dict[str, jax.Array]
Stats = dict[str, jax.Array]

# Where the statistics of all layers lie: a device's histograms are of its experts.
STATS_SPECS = {
    "load": P(),
    "dropped": P(),
    "histogram": P(None, "expert"),
    "margins": P(None, AXES),
}


def init_balance(
    config: BalanceConfig, num_layers: int, num_experts: int, dtype: jnp.dtype = jnp.float32
) -> Balance:
    """Zero biases. With them alpha - s lies in [-1, 1], the first step's bin range."""
    balance = {
        "bias": jnp.zeros((num_layers, num_experts), dtype),
        "bin_range": jnp.tile(jnp.array([[-1, 1]], dtype), (num_layers, 1)),
    }
    if config.ema:
        balance["num_updates"] = jnp.zeros((), jnp.int32)
    return balance


def layer_stats(
    config: BalanceConfig,
    routing: Routing,
    bin_range: jax.Array,
    valid_M: jax.Array,
    dropped: jax.Array | int = 0,
) -> Stats:
    """What one MoE layer's balancing needs to know about these tokens; no gradient.

    Args:
      routing: of M tokens.
      bin_range: [2], this layer's entry of balance["bin_range"].
      valid_M: bool, False on padding, which is not counted.
      dropped: assignments that found no room in model.expert_parallel.

    Returns:
      load [E] int32, tokens per expert; dropped int32; with "histogram" also histogram
      [E, num_bins] int32 of r = alpha - s (Kimi K3 report, appendix D); with "quantile" margins
      [M, E] s - alpha, -inf on padding, where they are below every real one.
    """
    E = routing.scores_ME.shape[-1]
    stats = {
        "load": _count(routing.expert_ids_MJ, valid_M, E),
        "dropped": jnp.asarray(dropped, jnp.int32),
    }
    margins_ME = jax.lax.stop_gradient(routing.scores_ME - routing.alpha_M[:, None])
    if config.estimator == "histogram":
        low, high = bin_range.astype(margins_ME.dtype)
        bins_ME = jnp.floor((-margins_ME - low) / ((high - low) / config.num_bins))
        bins_ME = jnp.clip(bins_ME, 0, config.num_bins - 1).astype(jnp.int32)
        cells_ME = bins_ME + config.num_bins * jnp.arange(E, dtype=jnp.int32)[None, :]
        counts = _count(cells_ME, valid_M, E * config.num_bins)
        stats["histogram"] = counts.reshape(E, config.num_bins)
    elif config.estimator == "quantile":
        stats["margins"] = jnp.where(valid_M[:, None], margins_ME, -jnp.inf)
    return stats


def _count(cells: jax.Array, valid_M: jax.Array, num_cells: int) -> jax.Array:
    """How often each of 0..num_cells-1 occurs in the valid rows of `cells` [M, X]: int32."""
    weights = jnp.broadcast_to(valid_M[:, None], cells.shape).astype(jnp.int32)
    return jnp.bincount(cells.reshape(-1), weights=weights.reshape(-1), length=num_cells)


def empty_stats(
    config: BalanceConfig,
    num_layers: int,
    num_experts: int,
    num_rows: int,
    dtype: jnp.dtype = jnp.float32,
) -> Stats:
    """Statistics of a step of `num_rows` rows before its first microbatch; see `add_stats`.

    Raises:
      ValueError: the "quantile" estimator would keep more than config.max_margins numbers.
    """
    stats = {
        "load": jnp.zeros((num_layers, num_experts), jnp.int32),
        "dropped": jnp.zeros((num_layers,), jnp.int32),
    }
    if config.estimator == "histogram":
        stats["histogram"] = jnp.zeros((num_layers, num_experts, config.num_bins), jnp.int32)
    elif config.estimator == "quantile":
        _check_margins(config, (num_layers, num_rows, num_experts))
        stats["margins"] = jnp.full((num_layers, num_rows, num_experts), -jnp.inf, dtype)
    return stats


def add_stats(total: Stats, stats: Stats, first_row: int | jax.Array) -> Stats:
    """Adds a microbatch, whose rows start at `first_row` of the step, to the step's statistics.

    Counts add; margins are kept side by side, since a quantile of parts is not one of the whole.
    """
    out = {name: total[name] + stats[name] for name in total if name != "margins"}
    if "margins" in total:
        out["margins"] = jax.lax.dynamic_update_slice_in_dim(
            total["margins"], stats["margins"], first_row, axis=1
        )
    return out


def update_balance(
    config: BalanceConfig,
    balance: Balance,
    stats: Stats,
    num_tokens: int | jax.Array,
    top_k: int,
) -> Balance:
    """The balance of the next step.

    "histogram" and "quantile": Kimi K3 report Eq. 14 and appendix D; `ema` averages the quantiles
    over steps (weight of the past; corrected for the start, so the first update counts in full).
    "sign": bias + sign_step * sign(mean load - load) (DeepSeek-V3 report, section 2.1.2).
    "aux_loss" and "none" leave it, and so does a step without real tokens.

    Args:
      stats: of the whole optimizer step, stacked over layers: load [L, E] int32, and histogram
        [L, E, num_bins] int32 or margins [L, m, E].
      num_tokens: m, the step's real tokens.

    Raises:
      ValueError: more margins than config.max_margins.
    """
    if config.estimator in ("aux_loss", "none"):
        return balance
    bias_LE = balance["bias"]
    new = dict(balance)
    if config.estimator == "sign":
        load_LE = stats["load"]
        mean_L1 = load_LE.sum(axis=-1, keepdims=True) / load_LE.shape[-1]
        new["bias"] = bias_LE + config.sign_step * jnp.sign(mean_L1 - load_LE)
    else:
        q_floor, q_rest = _mean_load(num_tokens, top_k, bias_LE.shape[-1])
        if config.estimator == "histogram":
            quantile_LE = _histogram_quantile(
                stats["histogram"], balance["bin_range"], q_floor, q_rest
            )
        else:
            _check_margins(config, stats["margins"].shape)
            quantile_LE = -kth_largest(stats["margins"], q_floor + 1)
        new["bias"] = quantile_LE - quantile_LE.mean(axis=-1, keepdims=True)
        if config.ema:
            # Averaging and centring are both linear: the average of centred quantiles, which is
            # what the old bias is, equals the centred average.
            new["num_updates"] = balance["num_updates"] + 1
            weight = (1 - config.ema) / (1 - config.ema ** new["num_updates"])
            new["bias"] = bias_LE + weight * (new["bias"] - bias_LE)
    new["bin_range"] = jnp.stack(
        [new["bias"].min(axis=-1) - 1, new["bias"].max(axis=-1) + 1], axis=-1
    )
    return jax.tree.map(
        lambda new, old: jnp.where(num_tokens > 0, new.astype(old.dtype), old), new, balance
    )


def _mean_load(
    num_tokens: int | jax.Array, top_k: int, num_experts: int
) -> tuple[jax.Array, jax.Array]:
    """q = m k / n as its whole part (int32) and the rest in [0, 1).

    In integers, because float32 cannot hold a large q; m = a n + b keeps m k from overflowing.
    """
    a, b = jnp.divmod(jnp.asarray(num_tokens, jnp.int32), num_experts)
    whole, rest = jnp.divmod(b * top_k, num_experts)
    return a * top_k + whole, rest / num_experts


def _histogram_quantile(
    histogram_LEX: jax.Array, bin_range_L2: jax.Array, q_floor: jax.Array, q_rest: jax.Array
) -> jax.Array:
    """[L, E]: where the cumulative count reaches q, linear inside the first bin with >= ceil(q)."""
    num_bins = histogram_LEX.shape[-1]
    low_L1, high_L1 = jnp.split(bin_range_L2, 2, axis=-1)
    cumulative_LEX = jnp.cumsum(histogram_LEX, axis=-1)
    q_ceil = q_floor + (q_rest > 0)
    bin_LE1 = jnp.argmax(cumulative_LEX >= q_ceil, axis=-1, keepdims=True)
    count_LE = jnp.take_along_axis(histogram_LEX, bin_LE1, axis=-1)[..., 0]
    before_LE = jnp.take_along_axis(cumulative_LEX, bin_LE1, axis=-1)[..., 0] - count_LE
    inside_LE = jnp.clip(((q_floor - before_LE) + q_rest) / jnp.maximum(count_LE, 1), 0, 1)
    return low_L1 + (bin_LE1[..., 0] + inside_LE) * ((high_L1 - low_L1) / num_bins)


def kth_largest(values_LME: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest (from 1) over M, exactly: [L, M, E] float32 or float64 -> [L, E].

    A radix select: floats, taken as integers with the sign made to count upwards, keep their
    order, and the answer is the largest integer that at least k of them reach, found bit by bit.
    On a CPU it takes a tenth of the time of a sort.
    """
    bits = jnp.finfo(values_LME.dtype).bits
    uint = jnp.dtype(f"uint{bits}")
    sign = uint.type(1 << (bits - 1))
    raw_LME = jax.lax.bitcast_convert_type(values_LME, uint)
    keys_LME = jnp.where(raw_LME >= sign, ~raw_LME, raw_LME | sign)

    def set_bit(i: jax.Array, found_LE: jax.Array) -> jax.Array:
        candidate_LE = found_LE | (sign >> i.astype(uint))
        reached_LE = jnp.sum(keys_LME >= candidate_LE[:, None, :], axis=1, dtype=jnp.int32)
        return jnp.where(reached_LE >= k, candidate_LE, found_LE)

    L, _, E = values_LME.shape
    found_LE = jax.lax.fori_loop(0, bits, set_bit, jnp.zeros((L, E), uint))
    raw_LE = jnp.where(found_LE >= sign, found_LE ^ sign, ~found_LE)
    return jax.lax.bitcast_convert_type(raw_LE, values_LME.dtype)


def _check_margins(config: BalanceConfig, shape: tuple[int, int, int]) -> None:
    num_layers, num_rows, num_experts = shape
    size = num_layers * num_rows * num_experts
    if size > config.max_margins:
        raise ValueError(
            f"model.balance.estimator='quantile' would keep {num_layers} layers x {num_rows} "
            f"tokens x {num_experts} experts = {size} margins, more than model.balance.max_margins="
            f"{config.max_margins}; try model.balance.estimator='histogram'"
        )


def aux_loss_sum(
    config: BalanceConfig, routing: Routing, load_E: jax.Array, valid_M: jax.Array
) -> jax.Array:
    """One layer's Switch auxiliary loss as a sum over real tokens (arXiv 2101.03961 Eq. 4-6).

    The published loss is weight * E * sum_e f_e P_e: f_e the fraction of assignments that went to
    expert e, P_e the mean over tokens of its share of the token's scores. P is a mean over tokens,
    so the loss is a mean over tokens of weight * E * sum_e f_e p_e(token), whose *sum* this
    returns: the train step adds it over layers and microbatches and divides by the step's real
    tokens once. f is that of these tokens (a constant for the gradient), so with several
    microbatches the result is their losses' mean weighted by tokens.

    Args:
      load_E: the layer's stats["load"] of the same tokens.
    """
    E = load_E.shape[0]
    share_ME = routing.scores_ME / routing.scores_ME.sum(axis=-1, keepdims=True)
    fraction_E = load_E / jnp.maximum(load_E.sum(), 1)
    loss_M = E * jnp.sum(share_ME * fraction_E[None, :], axis=-1)
    return config.aux_loss_weight * jnp.sum(jnp.where(valid_M, loss_M, 0))


def balance_metrics(balance: Balance, stats: Stats) -> dict[str, jax.Array]:
    """Per layer [L]: max_vio = max load / mean load - 1, min_load and max_load in units of the
    mean, and bias_spread = max bias - min bias.

    Args:
      balance: that the step was routed with.
      stats: of the whole step; all zero loads give max_vio -1.
    """
    load_LE = stats["load"]
    mean_L = load_LE.sum(axis=-1) / load_LE.shape[-1]
    relative_LE = load_LE / jnp.maximum(mean_L, jnp.finfo(mean_L.dtype).tiny)[:, None]
    return {
        "max_vio": relative_LE.max(axis=-1) - 1,
        "min_load": relative_LE.min(axis=-1),
        "max_load": relative_LE.max(axis=-1),
        "bias_spread": balance["bias"].max(axis=-1) - balance["bias"].min(axis=-1),
    }
