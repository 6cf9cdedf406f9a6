"""The device mesh, and which arrays of a run are spread over it."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, tree_leaves_with_path

from model.config import ModelConfig
from model.sharding import AXES, ROWS, TOKENS
from model.transformer import param_specs
from train.data.config import DataConfig
from train.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what is left."""

    data: int = -1
    expert: int = 1
    sequence: int = 1
    # Devices that JAX makes of the CPU in each process: small models train faster on several.
    cpu_devices: int = 1

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


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Devices along each axis.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = dict(zip(AXES, config.sizes, strict=True))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % fixed or (-1 not in sizes.values() and fixed != num_devices):
        free = next((axis for axis, size in sizes.items() if size == -1), "data")
        others = {axis: math.gcd(size, num_devices) for axis, size in sizes.items() if axis != free}
        if num_devices % math.prod(others.values()):
            others = dict.fromkeys(others, 1)
        works = ", ".join(f"mesh.{axis}={size}" for axis, size in ({free: -1} | others).items())
        raise ValueError(f"mesh {sizes} does not fit {num_devices} device(s); try {works}")
    return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over these devices, or all.

    Every axis is AxisType.Auto. Neighbours along an axis are neighbours in the network: JAX knows
    the torus of a TPU, and elsewhere the last axes, sequence and expert, stay inside a host first.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = tuple(mesh_sizes(config, len(devices)).values())
    # Not jax.make_mesh, which refuses axes that need only a part of one of the torus.
    layout = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(layout, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_divides(
    mesh: Mesh, model: ModelConfig, data: DataConfig, accumulation: int, eval_context: int
) -> None:
    """Raises ValueError if the mesh does not divide the experts, or a batch's rows or tokens."""
    sizes = mesh.shape
    experts, rows = model.moe.num_experts, data.batch_size
    if experts % sizes["expert"]:
        raise ValueError(
            f"mesh.expert={sizes['expert']} does not divide model.moe.num_experts={experts}; "
            f"try mesh.expert={math.gcd(experts, sizes['expert'])}"
        )
    step = math.prod(sizes[axis] for axis in ROWS) * accumulation
    if rows % step:
        raise ValueError(
            f"data.batch_size={rows} is not divisible by mesh data={sizes['data']} x expert="
            f"{sizes['expert']} x step.accumulation={accumulation}; try data.batch_size="
            f"{-(-rows // step) * step}"
        )
    back = model.kda.conv_size - 1  # what a convolution must find on the device before
    parts = sizes["sequence"]
    contexts = {"data.context_length": data.context_length, "run.eval_context": eval_context}
    for name, tokens in contexts.items():
        if tokens % parts or (parts > 1 and 0 < tokens < back * parts):
            raise ValueError(
                f"{name}={tokens} cannot be cut into mesh.sequence={parts} equal parts of at least "
                f"{back} tokens; try {name}={max(-(-tokens // parts), back) * parts}"
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows and tokens of a batch over the mesh."""
    return NamedSharding(mesh, TOKENS)


def state_shardings(mesh: Mesh, model: ModelConfig, state: TrainState) -> TrainState:
    """Where every array of a state lies: parameters by model.sharding, what the optimizer keeps of
    a parameter where that lies, all else whole on every device.

    Args:
      state: arrays, or their shapes.
    """
    specs = {
        _keys(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            param_specs(model, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    }
    shapes = {_keys(path): x.shape for path, x in tree_leaves_with_path(state.params)}

    def sharding(path: tuple, x: jax.Array) -> NamedSharding:
        keys = _keys(path)  # of the optimizer's own containers first
        for suffix in (keys[n:] for n in range(len(keys))):
            if shapes.get(suffix) == x.shape:
                return NamedSharding(mesh, specs[suffix])
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def _keys(path: tuple) -> tuple[str, ...]:
    """The names of the dicts on the way to an array."""
    return tuple(key.key for key in path if isinstance(key, DictKey))
