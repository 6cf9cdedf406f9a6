"""python -m train.dryrun --config=configs/k3_2p8t.py --topology=v5p:16x16x32: what a train step
would take on machines that are not there.

Compiles the whole step ahead of time, for TPUs by libtpu (`make libtpu`, PYTHONPATH=.libtpu), for
"cpu:8" by XLA's CPU backend, and prints per chip the memory by kind, what travels between chips,
and an estimate of the time.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from kernels.topology import tpu_devices
from train.config import TrainConfig
from train.flags import refuse, run
from train.run import hlo
from train.run.flops import PEAK_FLOPS, train_flops_per_token
from train.run.mesh import AXES, MeshConfig, check_divides, make_mesh, mesh_sizes
from train.run.metrics import count
from train.run.program import abstract_batch, abstract_state, make_step
from train.step.optimizer import make_optimizer
from train.step.train_step import OPTIMIZER

_TOPOLOGY = flags.DEFINE_string(
    "topology", "cpu:8", "Chips: cpu:8, v5e:16x16, v5p:16x16x32, v6e:16x16, tpu7x:4x4x4."
)
_MESH = flags.DEFINE_string("mesh", None, "Such as data=64,expert=64,sequence=2.")
_CONTEXT = flags.DEFINE_integer(
    "context", None, "Tokens of a row; the rows become fewer, so that a step has as many tokens."
)
_LEVEL = flags.DEFINE_enum(
    "optimization_level",
    "O0",
    ["O0", "O1", "O2", "O3"],
    "What XLA does for speed: O0 compiles about ten times faster than O2, which is a real run's.",
)
_JSON = flags.DEFINE_string("json", None, "A file for the figures.")


class Chip(NamedTuple):
    """What a chip has, as its maker states it."""

    hbm: float  # bytes
    link: float  # bytes a second that it sends to its neighbours, all links together


CHIPS = {
    "v5e": Chip(16 * 2**30, 200e9),
    "v5p": Chip(95 * 2**30, 600e9),
    "v6e": Chip(32 * 2**30, 448e9),
    "tpu7x": Chip(96 * 2**30, 600e9),  # a device is one of a chip's two halves
}


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology; none of them need be there.

    Raises:
      ValueError: no such topology, or libtpu is not installed.
    """
    chip, _, shape = topology.partition(":")
    if chip == "cpu" and shape.isdigit() and int(shape):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(shape))
        return jax.devices()
    if chip not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ValueError(
            f"--topology={topology} is no topology; try cpu:8, v5e:16x16, v5p:16x16x32, v6e:16x16 "
            "or tpu7x:4x4x4"
        )
    jax.config.update("jax_platforms", "cpu")  # a TPU that is there is not asked for
    return tpu_devices(topology)


def with_flags(config: TrainConfig, mesh: str | None, context: int | None) -> TrainConfig:
    """The experiment with what --mesh and --context say.

    Raises:
      ValueError: --mesh or --context mean nothing.
    """
    if mesh is not None:
        if not re.fullmatch(r"\w+=-?\d+(,\w+=-?\d+)*", mesh):
            raise ValueError(f"--mesh={mesh} must be such as data=-1,expert=2,sequence=2")
        sizes = {name: int(size) for name, size in (x.split("=") for x in mesh.split(","))}
        if unknown := sizes.keys() - set(AXES):
            raise ValueError(f"--mesh={mesh}: {min(unknown)!r} is none of {', '.join(AXES)}")
        config = dataclasses.replace(config, mesh=MeshConfig(**sizes))
    if context is not None:
        tokens = config.data.batch_size * config.data.context_length
        if context < 1 or tokens % context:
            raise ValueError(
                f"--context={context} does not divide the step's {tokens} tokens; try "
                f"--context={config.data.context_length * 2}"
            )
        data = dataclasses.replace(
            config.data, context_length=context, batch_size=tokens // context
        )
        config = dataclasses.replace(config, data=data)
    return config


def compile_step(config: TrainConfig, devices: list[jax.Device]) -> tuple[Any, dict[str, float]]:
    """The compiled step, and bytes per device of what it is given, by kind.

    Raises:
      ValueError: the mesh does not fit, or the program does not fit the chip's memory.
    """
    mesh = make_mesh(config.mesh, devices)
    check_divides(mesh, config.model, config.data, config.step.accumulation, 0)
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    state, batch = abstract_state(config, optimizer, mesh), abstract_batch(config, mesh)
    given = {
        "parameters": _bytes_per_device(state.params),
        "optimizer": _bytes_per_device(state.opt_state),
        "balance": _bytes_per_device(state.balance),
        "batch": _bytes_per_device(batch),
    }
    step = make_step(config, optimizer, state)
    with jax.set_mesh(mesh):
        lowered = step.trace(state, batch).lower(lowering_platforms=(devices[0].platform,))
        _free_traces()
        try:
            return lowered.compile(), given
        except jax.errors.JaxRuntimeError as error:
            if "Ragged all-to-all is currently not supported" in str(error):
                raise ValueError(
                    "libtpu has no ragged exchange for this slice (model.moe.dispatch="
                    f"{config.model.moe.dispatch}); try model.moe.dispatch=even_all_to_all"
                ) from error
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sizes = re.findall(r"\(?([\d.]+)G\)?", str(error))
            needs = f"needs {sizes[0]} GiB of temporaries and has {sizes[1]} GiB" if sizes else ""
            fixed = sum(given.values()) / 2**30
            raise ValueError(
                f"the step does not fit: a chip {needs}, of which parameters, optimizer and batch "
                f"take {fixed:.1f} GiB; try more chips, a larger step.accumulation (now "
                f"{config.step.accumulation}), model.remat=nested (now {config.model.remat}), a "
                f"larger mesh.sequence (now {mesh.shape['sequence']}) or "
                "optimizer.mu_dtype=bfloat16"
            ) from error


def _free_traces() -> None:
    """Gives the traces of a large model, several gigabytes, back to the system."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _bytes_per_device(tree: Any) -> float:
    return float(
        sum(
            np.prod(x.sharding.shard_shape(x.shape), dtype=float) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def figures(
    config: TrainConfig, topology: str, devices: list[jax.Device], compiled: Any, given: dict
) -> dict[str, Any]:
    """All that is printed, in bytes, FLOPs and seconds, per chip unless it says otherwise."""
    memory = compiled.memory_analysis()
    found = hlo.collectives(compiled.as_text())
    tokens = config.data.batch_size * config.data.context_length
    flops = train_flops_per_token(config.model, config.data.context_length) * tokens
    gradients = given["parameters"]  # in the parameters' dtype, and where these lie
    out = {
        "topology": topology,
        "chips": len(devices),
        "mesh": mesh_sizes(config.mesh, len(devices)),
        "tokens_per_step": tokens,
        "context": config.data.context_length,
        "accumulation": config.step.accumulation,
        "remat": config.model.remat,
        "memory": given
        | {
            "gradients": gradients,
            "activations and other temporaries": memory.temp_size_in_bytes - gradients,
            "program": memory.generated_code_size_in_bytes,
        },
        "flops_per_step": flops,
        "sent_per_step": hlo.sent_by_kind(found),
        "sent_by_optimizer": sum(one.sent for one in found if f"/{OPTIMIZER}/" in one.operation),
    }
    out["total"] = sum(out["memory"].values())
    chip, peak = CHIPS.get(topology.partition(":")[0]), PEAK_FLOPS.get(devices[0].device_kind)
    if chip and peak:
        compute = flops / (len(devices) * peak)
        network = sum(out["sent_per_step"].values()) / chip.link
        seconds = max(compute, network)
        out |= {"hbm": chip.hbm, "compute_seconds": compute, "network_seconds": network}
        out |= {"estimated_seconds": seconds, "estimated_mfu": compute / seconds}
    return out


def report(out: dict[str, Any]) -> None:
    """Prints the figures."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in out["mesh"].items())
    print(f"{out['topology']}: {out['chips']} chips, mesh {mesh}")
    print(
        f"{count(out['tokens_per_step'])} tokens a step in rows of {out['context']:,}, "
        f"{out['accumulation']} microbatch(es), remat {out['remat']!r}"
    )
    print("memory of a chip, GiB:")
    for name, size in out["memory"].items():
        print(f"  {name:<36}{size / 2**30:>10.3f}")
    print(f"  {'in all':<36}{out['total'] / 2**30:>10.3f}", end="")
    if "hbm" in out:
        free = 1 - out["total"] / out["hbm"]
        print(f"   of {out['hbm'] / 2**30:.0f}: {free:.0%} free", end="")
    print(f"\nmodel FLOPs of a step, all chips: {out['flops_per_step']:.3g}")
    print("sent by a chip in a step, GB, from the compiled text:")
    for name, size in sorted(out["sent_per_step"].items(), key=lambda item: -item[1]):
        print(f"  {name:<36}{size / 1e9:>10.3f}")
    print(f"  {'of which by the optimizer':<36}{out['sent_by_optimizer'] / 1e9:>10.3f}")
    if "estimated_seconds" in out:
        print(
            f"estimate (roofline, nothing was run): compute at peak {out['compute_seconds']:.2f} s,"
            f" network at its peak {out['network_seconds']:.2f} s; a step no less than "
            f"{out['estimated_seconds']:.2f} s, MFU no more than {out['estimated_mfu']:.0%}"
        )


def main(config: TrainConfig) -> None:
    """Compiles the experiment of the command line and prints what it would take."""
    try:
        if _JSON.value and not Path(_JSON.value).absolute().parent.is_dir():
            raise ValueError(f"--json={_JSON.value} lies in no folder; try --json=dryrun.json")
        config = with_flags(config, _MESH.value, _CONTEXT.value)
        devices = devices_of(_TOPOLOGY.value)
        jax.config.update("jax_optimization_level", _LEVEL.value)
        compiled, given = compile_step(config, devices)
    except (ValueError, NotImplementedError) as error:
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        refuse(error)
    out = figures(config, _TOPOLOGY.value, devices, compiled, given)
    report(out)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(out, indent=2) + "\n")


def _likely_layouts() -> list[str]:
    """Of the topology and the context, unless the mesh is given."""
    if _MESH.value:
        return []
    return [f"{_TOPOLOGY.value}/{_CONTEXT.value}", _TOPOLOGY.value]


if __name__ == "__main__":
    run(main, _likely_layouts)
