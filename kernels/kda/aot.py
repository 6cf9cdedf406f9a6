"""Compiles KDA for a TPU that is not there: python -m kernels.kda.aot --chip v6e.

libtpu compiles on any machine. What it says of a program is static: bundles are the instruction
words that the scheduler wrote, times the trips of their loops; waits for memory are not in them, so
they compare programs and are no time. Printed for the whole operator, from raw gate and logits to o
(forward) and to all gradients as well (forward + backward), per token and head.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kernels.kda import kda
from kernels.topology import tpu_devices

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
PARTS = ("forward", "backward")
LABELS = {"forward": "forward", "backward": "forward + backward"}


class Program(NamedTuple):
    """What libtpu says of a kernel or a fusion."""

    name: str
    count: int  # how often it runs: the compiler makes equal ones once
    bundles: int  # of one run
    matmul: float  # share of the matrix units' slots that are used, in the loop's body
    vmem: int  # bytes, spilled registers included


def abstract_mesh(mesh: Mesh) -> AbstractMesh:
    """The mesh for tracing: it says what kind of device the program is for."""
    from jax.sharding import AbstractDevice

    kind = mesh.devices.flat[0].device_kind
    return AbstractMesh(
        mesh.devices.shape,
        mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(mesh.axis_names),
        abstract_device=AbstractDevice(device_kind=kind, num_cores=1, platform="tpu"),
    )


def input_shapes(
    shape: tuple[int, ...], dim: int, dtype: jnp.dtype, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of kda() and the cotangent of o, sharded by heads."""

    def x(*dims: int, heads: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * heads, "heads"))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    tokens = {name: x(*shape, dim, heads=2) for name in ("q", "k", "v", "gate", "do")}
    return tokens | {
        "beta": x(*shape, heads=2),
        "a_log": x(shape[2], heads=0, dtype=jnp.float32),
        "dt_bias": x(shape[2], dim, heads=0, dtype=jnp.float32),
    }


def compile_kda(
    devices: Sequence[jax.Device],
    shape: tuple[int, ...],
    dim: int,
    dtype: jnp.dtype,
    part: str,
    **options: str,
) -> jax.stages.Compiled:
    """kda() for these devices, in jax.shard_map over the heads; options: as kda() takes them."""
    mesh = Mesh(devices, ("heads",))
    arguments = input_shapes(shape, dim, dtype, mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    of_do = specs.pop("do")
    forward = jax.shard_map(
        lambda inputs: kda(**inputs, **options)[0],
        mesh=abstract_mesh(mesh),
        in_specs=(specs,),
        out_specs=of_do,
    )

    def run(do: jax.Array, **inputs: jax.Array) -> tuple:
        if part == "forward":
            return (forward(inputs),)
        o, vjp = jax.vjp(forward, inputs)
        return o, vjp(do)

    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh)):
        return jax.jit(run).trace(**arguments).lower(lowering_platforms=("tpu",)).compile()


def programs(dump: Path, hlo: str) -> list[Program]:
    """What was compiled, costliest first, from libtpu's dump and the compiled module's text."""
    files = {}
    for file in sorted(dump.glob("*-final_bundles.txt")):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles.txt", file.name)
        if name and not name[1].startswith(("<", "TLP")):  # the frame around the programs
            files[name[1]] = file
    counts = _counts(hlo, files)
    found = []
    for name, file in files.items():
        stem = file.name[: file.name.index(name) + len(name)]
        found.append(
            Program(
                name,
                counts[name],
                _bundles(file.read_text(errors="replace")),
                _matmul(next(dump.glob(f"{stem}-*-final_hlo-static-per-bundle-*"))),
                _vmem(next(dump.glob(f"{stem}-[0-9][0-9]-post-ra.txt"))),
            )
        )
    return sorted(found, key=lambda p: -p.count * p.bundles)


def _counts(hlo: str, names: Iterable[str]) -> dict[str, int]:
    """How many instructions of the entry computation each program serves.

    Equal ones are compiled once: an instruction without a program has that of its first likeness.
    """
    kinds = {}
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        instruction = re.search(r"%([\w.\-]+) = (.+?) ([\w\-]+)\(", line)
        if instruction:
            name, shape, operation = instruction.groups()
            kinds[name] = operation, re.sub(r"\{[^}]*\}", "", shape)
    counts = dict.fromkeys(names, 1)
    first = {kinds[name]: name for name in reversed(list(counts))}
    for name, kind in kinds.items():
        if name not in counts and kind in first:
            counts[first[kind]] += 1
    return counts


def _bundles(text: str) -> int:
    """Of every loop as often as it runs; the software pipeline's two rounds of filling not."""
    total, loops = 0, []
    for line in text.splitlines():
        bundle = re.match(r"\s*(?:0x)?[0-9a-f]+\s+([A-Z ]*):\s*((?:>\s*)*)\{", line)
        if bundle and ">" not in bundle[2]:
            total += 1
        elif bundle:
            if "LB" in bundle[1] or not loops:
                loops.append([0, 1])
            loops[-1][0] += 1
        trips = re.search(r"totalorder %s\w+, (\d+) /\* loop exit test", line)
        if trips and loops:
            loops[-1][1] = max(1, int(trips[1]) - 2)
    return total + sum(bundles * trips for bundles, trips in loops)


def _matmul(file: Path) -> float:
    header, rows = file.read_text().split("== UTILIZATION:\n")
    capacity = int(header.splitlines()[2].split()[0])  # MATMUL comes first
    used = [int(row.split()[0]) for row in rows.splitlines()]
    return sum(used) / len(used) / capacity


def _vmem(file: Path) -> int:
    allocations = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", file.read_text(errors="replace"))
    return sum(int(size, 16) for size in allocations)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument(
        "--chips", type=int, choices=(1, 2, 4), default=1, help="to share the heads"
    )
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(1, 8192, 32), metavar=("B", "T", "H")
    )
    parser.add_argument("--dim", type=int, default=128, help="of keys and values; 128 if left out")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--gate_kind", choices=("bounded", "softplus"), default="bounded")
    parser.add_argument("--what", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    num_heads = options.shape[2]
    if min(options.shape) < 1:
        parser.error(f"--shape is {options.shape}; all must be positive, such as 1 8192 32")
    if not 1 <= options.dim <= 256:
        parser.error(f"--dim is {options.dim}; the kernels take 1 to 256, such as 128")
    if num_heads % options.chips:
        parser.error(f"{num_heads} heads do not divide by --chips {options.chips}; 1 always works")
    return options


def report(
    options: argparse.Namespace, devices: Sequence[jax.Device], part: str, dump: Path
) -> None:
    batch, num_tokens, num_heads = options.shape
    tokens_heads = batch * num_tokens * num_heads // options.chips
    try:
        compiled = compile_kda(
            devices,
            tuple(options.shape),
            options.dim,
            jnp.dtype(options.dtype),
            part,
            gate_kind=options.gate_kind,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise SystemExit(
            f"error: {part} does not fit {options.chip}: {str(error).splitlines()[0]}\n"
            "Fewer heads in a program need less: heads_of_a_program in kernels/kda/mosaic/plan.py"
        ) from None
    all_programs = programs(dump, compiled.as_text())
    print(f"{LABELS[part]}, static, bundles per token and head:")
    for p in all_programs:
        per = p.count * p.bundles / tokens_heads
        if per >= 0.005:
            name = p.name if p.count == 1 else f"{p.count} x {p.name}"
            print(
                f"  {name:34s} {per:6.2f}  matmul {p.matmul:4.0%}  VMEM {p.vmem / 2**20:5.1f} MiB"
            )
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**30
    total = sum(p.count * p.bundles for p in all_programs) / tokens_heads
    print(f"  {'in all':34s} {total:6.2f}  temporary HBM {temporary:.2f} GiB", flush=True)


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        # libtpu reads this once, when it starts: so each part runs in a process of its own.
        if len(options.what) > 1:
            for part in options.what:
                command = [sys.executable, "-m", "kernels.kda.aot", *sys.argv[1:], "--what", part]
                if os.spawnv(os.P_WAIT, sys.executable, command):
                    raise SystemExit(1)
            return
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        try:
            devices = tpu_devices(CHIPS[options.chip])[: options.chips]
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        if options.what[0] == PARTS[0]:
            chips = f"{options.chips} x {devices[0].device_kind}, jax {jax.__version__}"
            print(f"{chips}, B, T, H {tuple(options.shape)}")
        report(options, devices, options.what[0], Path(folder))


if __name__ == "__main__":
    main()
