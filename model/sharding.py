"""Which mesh axes parameters and activations are spread over, and how parts are computed on.

The mesh is the one of jax.set_mesh; without one, or on one device, nothing here does anything. Rows
of a batch are spread over ROWS and tokens over "sequence"; parameters lie where RULES say, and are
gathered over FSDP when a layer uses them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

AXES = ("data", "expert", "sequence")
ROWS = ("data", "expert")
FSDP = ("data", "sequence")
TOKENS = P(ROWS, "sequence")  # of arrays [B, T, ...]

# Of each logical axis of a parameter the mesh axes that it is spread over.
RULES: dict[str | None, tuple[str, ...]] = {
    "embed": FSDP,  # D
    "rank_in": FSDP,  # a low rank that a matrix maps from
    "expert_in": FSDP,  # what an expert maps from or to
    "expert": ("expert",),
    **dict.fromkeys(("vocab", "heads", "key", "value", "conv", "rank", "hidden", "latent"), ()),
    **dict.fromkeys(("layers", None), ()),
}


def mesh() -> AbstractMesh | None:
    """The mesh that the code being traced may be spread over; None on one device, and inside
    jax.shard_map, where every device runs alone."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types
    return None if alone else mesh


def num_parts(axes: Sequence[str]) -> int:
    """Into how many parts these mesh axes cut a dim."""
    here = mesh()
    return 1 if here is None else math.prod(here.shape[axis] for axis in axes)


def param_spec(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh_shape: Mapping[str, int],
    min_size: int,
) -> P:
    """Where a parameter lies.

    One of fewer than min_size numbers (a layer, if stacked over "layers") is not spread over FSDP,
    and nor is a dim that FSDP does not divide; then "data" alone is tried.

    Raises:
      ValueError: an unknown logical axis, or two of one parameter on the same mesh axis, or experts
        that their mesh axis does not divide.
    """
    layers = math.prod(n for n, name in zip(shape, axes, strict=True) if name == "layers")
    is_small = math.prod(shape) < min_size * layers
    spec: list[tuple[str, ...] | None] = []
    used: dict[str, str | None] = {}
    for size, name in zip(shape, axes, strict=True):
        if name not in RULES:
            raise ValueError(f"logical axis {name!r} is not in model.sharding.RULES; add it there")
        over = RULES[name]
        for axis in over:
            if axis in used:
                raise ValueError(
                    f"logical axes {used[axis]!r} and {name!r} of one parameter lie both on mesh "
                    f"axis {axis!r}; give one of them another name in model.sharding.RULES"
                )
            used[axis] = name
        if name == "expert" and size % mesh_shape["expert"]:
            raise ValueError(
                f"model.moe.num_experts={size} cannot be spread over mesh.expert="
                f"{mesh_shape['expert']}; try mesh.expert={math.gcd(size, mesh_shape['expert'])}"
            )
        if is_small and over == FSDP:
            over = ()
        while over and size % math.prod(mesh_shape[axis] for axis in over):
            over = over[:-1]
        spec.append(over or None)
    return P(*spec)


def spec_here(shape: Sequence[int], axes: Sequence[str | None], min_size: int) -> P:
    """`param_spec` on the present mesh."""
    here = mesh()
    return P() if here is None else param_spec(shape, axes, here.shape, min_size)


def lay_out(x: jax.Array, axes: Sequence[str | None], min_size: int) -> jax.Array:
    """A parameter, and so its gradient, where `param_spec` puts it."""
    if mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec_here(x.shape, axes, min_size))


def whole(x: jax.Array) -> jax.Array:
    """A parameter gathered on every device, for the layer that uses it."""
    return x if mesh() is None else jax.lax.with_sharding_constraint(x, P())


def by_tokens(x_BT: jax.Array) -> jax.Array:
    """An array [B, T, ...] spread over rows and tokens.

    Raises:
      ValueError: the mesh does not divide B or T.
    """
    if mesh() is None:
        return x_BT
    for size, what, over in ((x_BT.shape[0], "rows", ROWS), (x_BT.shape[1], "tokens", AXES[2:])):
        if size % (parts := num_parts(over)):
            raise ValueError(
                f"{size} {what} cannot be spread over the {parts} devices of mesh axis "
                f"{' and '.join(over)}; try {-(-size // parts) * parts}"
            )
    return jax.lax.with_sharding_constraint(x_BT, TOKENS)


def on_each_device(
    function: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable:
    """jax.shard_map of function(is_spread, *args) over the mesh; without one the function itself.

    is_spread: whether the arguments are parts, to be combined over AXES.
    check_vma: as for jax.shard_map; off, all results must differ from device to device.
    """
    if mesh() is None:
        return lambda *args: function(False, *args)
    run = partial(function, True)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def varying(x: jax.Array) -> jax.Array:
    """Inside jax.shard_map, a parameter to be used in any dtype: its gradient is summed over
    devices in its own."""
    already = jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axis for axis in AXES if axis not in already), to="varying")


def gather(x: jax.Array, spec: P, dtype: jnp.dtype) -> jax.Array:
    """Inside jax.shard_map, this device's experts of a parameter that lies over FSDP, gathered in
    `dtype`; its gradient is summed over devices in the parameter's dtype."""
    x = varying(x)
    # One axis in a tuple and the axis alone are the same to a PartitionSpec.
    dims = tuple((dim, over) for dim, over in enumerate(spec) if over and "expert" not in over)
    return _gather(x, dims, jnp.dtype(dtype), x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(
    x: jax.Array, dims: tuple[tuple[int, tuple[str, ...]], ...], dtype: jnp.dtype, _: jnp.dtype
) -> jax.Array:
    x = x.astype(dtype)
    for dim, over in dims:
        x = jax.lax.all_gather(x, over, axis=dim, tiled=True)
    return x


def _gather_vjp(dims: tuple, _: jnp.dtype, dtype: jnp.dtype, __: None, dx: jax.Array) -> tuple:
    dx = dx.astype(dtype)
    for dim, over in dims:
        dx = jax.lax.psum_scatter(dx, over, scatter_dimension=dim, tiled=True)
    return (dx,)


_gather.defvjp(lambda *args: (_gather(*args), None), _gather_vjp)
