"""Which mesh axes parameters and activations are spread over, and how parts are computed on.

The mesh is the one of jax.set_mesh; without one, or on one device, nothing here does anything. Rows
of a batch are spread over ROWS and tokens over "sequence"; parameters lie where RULES say, and are
gathered over FSDP when a layer uses them. The model runs inside `spread`, on each device alone with
its rows and tokens; what devices say to each other is written out in the layers that need it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

T = TypeVar("T")

AXES = ("data", "expert", "sequence")
ROWS = ("data", "expert")
FSDP = ("data", "sequence")
TOKENS = P(ROWS, "sequence")  # of arrays [B, T, ...]

# Of each logical axis of a parameter the mesh axes that it is spread over.
RULES: dict[str | None, tuple[str, ...]] = {
    "embed": FSDP,  # D
    # What other matrices map from: first dims, along which TPUs gather and scatter without moving
    # anything inside tiles.
    **dict.fromkeys(("rank_in", "hidden_in", "expert_in"), FSDP),
    "expert": ("expert",),
    **dict.fromkeys(("vocab", "heads", "key", "value", "conv", "rank", "hidden"), ()),
    **dict.fromkeys(("latent", "embed_out", "layers", None), ()),
}


def sizes() -> Mapping[str, int]:
    """Devices along each mesh axis, inside `spread`; elsewhere nothing."""
    here = jax.sharding.get_abstract_mesh()
    inside = set(AXES) <= set(here.axis_names) and AxisType.Manual in here.axis_types
    return here.shape if inside else {}


def num_parts(axes: Sequence[str]) -> int:
    """Into how many parts these mesh axes cut a dim that lies over them."""
    here = sizes()
    return math.prod(here.get(axis, 1) for axis in axes)


def spread(function: Callable[..., T], in_specs: Any, out_specs: Any) -> Callable[..., T]:
    """jax.shard_map of a function over the mesh of jax.set_mesh; without one, or with one device,
    the function itself.

    A gradient taken inside is that of the sum of all devices' results, by this device's parts.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty or here.size == 1:
        return function
    # Sums over devices are written out where they belong (`gather`, the train step), so JAX need
    # not follow what varies; splash could not tell it.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def total(x: T, axes: Sequence[str] = AXES) -> T:
    """Arrays summed over the devices along mesh axes; on one device as they are."""
    axes = tuple(axis for axis in axes if sizes().get(axis, 1) > 1)
    return jax.lax.psum(x, axes) if axes else x


def axes_of(over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec, which unpacks a single one, stands for."""
    return (over,) if isinstance(over, str) else over or ()


def unused_axes(spec: P) -> tuple[str, ...]:
    """The mesh axes over which nothing lies: devices along them have the same."""
    used = {axis for over in spec for axis in axes_of(over)}
    return tuple(axis for axis in AXES if axis not in used)


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


Dims = tuple[tuple[int, tuple[str, ...]], ...]  # cut dims that a layer needs whole, and by what


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("dims",))
@dataclasses.dataclass(frozen=True)
class Part:
    """What a device has of a parameter: all of it, or inside `spread` a part."""

    value: jax.Array
    dims: Dims = ()


def part(value: jax.Array, shape: Sequence[int], axes: Sequence[str | None], min_size: int) -> Part:
    """The part `value` of a parameter of this shape; of experts a device needs no others."""
    here = sizes()
    spec = param_spec(shape, axes, here, min_size) if here else ()
    named = ((dim, axes_of(over)) for dim, over in enumerate(spec))
    return Part(value, tuple((dim, over) for dim, over in named if over and over != ("expert",)))


def gather(part: Part, dtype: jnp.dtype | None = None) -> jax.Array:
    """The parameter in `dtype` (None: its own), whole but for experts of other devices; its
    gradient is summed over the devices that have parts of it, in the parameter's dtype."""
    dtype = jnp.dtype(dtype or part.value.dtype)
    return _gather(part.value, part.dims, dtype, part.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, dims: Dims, dtype: jnp.dtype, _: jnp.dtype) -> jax.Array:
    x = x.astype(dtype)
    for dim, over in dims:
        x = jax.lax.all_gather(x, over, axis=dim, tiled=True)
    return x


def _gather_vjp(dims: Dims, _: jnp.dtype, dtype: jnp.dtype, __: None, dx: jax.Array) -> tuple:
    return (scatter(dx.astype(dtype), dims),)


_gather.defvjp(lambda *args: (_gather(*args), None), _gather_vjp)


def scatter(x: jax.Array, dims: Dims) -> jax.Array:
    """Of arrays like a whole parameter, their sum's part on this device."""
    for dim, over in dims:
        x = jax.lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
    return x
