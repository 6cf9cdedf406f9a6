"""The device mesh, and which arrays are spread over it."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "expert", "sequence")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what is left."""

    data: int = -1
    expert: int = 1
    sequence: int = 1
    cpu_devices: int = 1  # devices that JAX makes of the CPU: small models train faster on several

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.expert, self.sequence

    def __post_init__(self) -> None:
        sizes = self.sizes
        if self.cpu_devices < 1:
            raise ValueError(f"mesh.cpu_devices={self.cpu_devices} must be at least 1; try 1")
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh sizes {dict(zip(AXES, sizes, strict=True))} must be positive, with at most "
                "one -1; try data=-1 with the others 1"
            )
        if self.expert != 1 or self.sequence != 1:
            raise ValueError(
                f"mesh.expert={self.expert}, mesh.sequence={self.sequence}: only the data axis is "
                "implemented so far; try mesh.expert=1 and mesh.sequence=1"
            )


def start_devices(config: MeshConfig) -> None:
    """Starts JAX, with several devices made of the CPU if asked; accelerators are unaffected.

    Raises:
      ValueError: JAX has no device of the kinds in JAX_PLATFORMS.
    """
    if config.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a bare assertion for JAX_PLATFORMS=cuda
        raise ValueError(
            f"JAX finds no device for JAX_PLATFORMS={jax.config.jax_platforms!r}; unset it, or "
            "set JAX_PLATFORMS=cpu"
        ) from error


def make_mesh(config: MeshConfig, batch_size: int, accumulation: int) -> Mesh:
    """The mesh over all devices, every axis AxisType.Auto (make_mesh's own default is Explicit).

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or do not divide the batch.
    """
    num_devices = jax.device_count()
    sizes = list(config.sizes)
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
        raise ValueError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} does not fit {num_devices} device(s); "
            "try mesh.data=-1"
        )
    sizes = [num_devices // fixed if size == -1 else size for size in sizes]
    step = sizes[0] * accumulation
    if batch_size % step:
        fits = -(-batch_size // step) * step
        raise ValueError(
            f"data.batch_size={batch_size} is not divisible by {sizes[0]} devices of the data axis "
            f"x step.accumulation={accumulation}; try data.batch_size={fits}"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh, tree: Any) -> Any:
    """A tree of shardings shaped like `tree`: every array whole on every device."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
