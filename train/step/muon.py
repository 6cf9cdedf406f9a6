"""Per-Head Muon on matrices that may lie over many devices (Kimi K3 report; arXiv 2502.16982)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from model.sharding import axes_of, num_parts, spread

Params = Any

# One whole update of optax's Muon without momentum: the Newton-Schulz iteration alone.
_NEWTON_SCHULZ = optax.contrib.scale_by_muon(
    beta=0.0, nesterov=False, weight_dimension_numbers=MuonDimensionNumbers(-2, -1)
)


class MuonState(NamedTuple):
    count: jax.Array  # int32: updates made
    mu: Params  # the momentum


def scale_by_muon(
    momentum: float,
    consistent_rms: float,
    mu_dtype: str | None,
    axes: Callable[[Params], Params],
) -> optax.GradientTransformationExtraArgs:
    """Nesterov's momentum, orthogonalised matrix by matrix, times consistent_rms * sqrt(max(m, n))
    for m x n matrices: a root mean square of about consistent_rms (arXiv 2502.16982 Eq. 4).

    Args:
      mu_dtype: of the momentum; None: the parameters'.
      axes: per parameter the reduction and output axes of its matrices.

    `update` takes `specs`, where the parameters lie on the mesh of jax.set_mesh: a tree like all
    parameters, or None on one device.
    """

    def init(params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(
        updates: Params,
        state: MuonState,
        params: Params | None = None,
        *,
        specs: Params | None = None,
        **_: Any,
    ) -> tuple[Params, MuonState]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        # The momentum of the next update, were its gradient zero, and this gradient.
        ahead = optax.tree.bias_correction(mu, momentum, count + 1)
        now = optax.tree.bias_correction(updates, momentum, count)
        mixed = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, now)
        lies = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P)))

        def direction(path: tuple, x: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
            matrix = _axes(axes, x.ndim)
            widest = max(math.prod(x.shape[axis] for axis in group) for group in matrix)
            size = consistent_rms * math.sqrt(widest)
            return size * orthogonalised(x, *matrix, lies.get(path, P()))

        out = jax.tree_util.tree_map_with_path(direction, mixed, axes(updates))
        return out, MuonState(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformationExtraArgs(init, update)


def _axes(axes: MuonDimensionNumbers, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reduction and output axes, counted from the front."""
    groups = ((axis,) if isinstance(axis, int) else axis for axis in axes)
    return tuple(tuple(axis % ndim for axis in group) for group in groups)


def orthogonalised(
    x: jax.Array, reduction: tuple[int, ...], output: tuple[int, ...], spec: P
) -> jax.Array:
    """Newton-Schulz on every matrix of an array, all axes but the matrices' being batch axes.

    Where the matrices are cut over devices, these deal them out, so that each has some of them
    whole, and hand the results back: two exchanges of as much as a device has. What is batched over
    other mesh axes stays where it is.

    Args:
      reduction, output: axes of m and n; one of them at most is cut, and alone in its group.
      spec: where x lies.
    """
    batch = tuple(axis for axis in range(x.ndim) if axis not in reduction + output)
    order = batch + reduction + output
    cuts = (
        (dim, axes_of(spec[axis]))
        for dim, group in enumerate((reduction, output), 1)
        for axis in group
        if axis < len(spec) and spec[axis]
    )
    cut = next(cuts, None)

    def on_device(x: jax.Array) -> jax.Array:
        m, n = (math.prod(x.shape[axis] for axis in group) for group in (reduction, output))
        matrices = x.transpose(order).reshape(-1, m, n)
        matrices = _dealt(matrices, *cut) if cut else _newton_schulz(matrices)
        shape = tuple(x.shape[axis] for axis in order)
        return matrices.reshape(shape).transpose([order.index(axis) for axis in range(x.ndim)])

    return spread(on_device, spec, spec)(x)


def _dealt(matrices_NXY: jax.Array, dim: int, over: tuple[str, ...]) -> jax.Array:
    """Newton-Schulz on matrices of which a dim lies over mesh axes."""
    number = matrices_NXY.shape[0]
    padded = jnp.pad(matrices_NXY, ((0, -number % num_parts(over)), (0, 0), (0, 0)))
    whole = jax.lax.all_to_all(padded, over, 0, dim, tiled=True)
    return jax.lax.all_to_all(_newton_schulz(whole), over, dim, 0, tiled=True)[:number]


def _newton_schulz(matrices_NMN: jax.Array) -> jax.Array:
    return _NEWTON_SCHULZ.update(matrices_NMN, _NEWTON_SCHULZ.init(matrices_NMN))[0]
