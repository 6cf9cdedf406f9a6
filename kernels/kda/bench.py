"""Times KDA on the GPU at hand beside the peers asked for: python -m kernels.kda.bench.

Every row of times comes from one process, its implementations interleaved, on the same inputs:
bfloat16, head dims of 128, the bounded gate at -5 (but for "ours, softplus"), from the raw gate and
the logits of beta to o, and to all gradients. Ours and jax-linear-attention (its gate and beta by
XLA in the same jit) are jitted calls, fla-core and FlashKDA replays of a CUDA graph. All are timed
by the host clock over calls that queue up for about BATCH_MS: what dispatching the first and
waiting for the last costs the host, nearly 1 ms for JAX, then hardly counts. Medians; no cache is
flushed for anyone. Where FlashKDA does not run, its recorded figures stand beside ours, and say so.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda.bench_peers import (
    DIM,
    FLASH_KDA_RECORDED,
    NAMES,
    Step,
    fla_step,
    flash_kda_step,
    flash_kda_works,
    installed,
    jax_step,
    makers,
    ours,
    wait,
    with_gradients,
)

SHAPES = list(FLASH_KDA_RECORDED)  # B, T, H
REPEATS, BATCH_MS = 5, 200.0
PARTS = {"forward": False, "backward": True}  # whether gradients are timed too
LABELS = {"forward": "forward", "backward": "forward + backward"}


def make_inputs(batch: int, num_tokens: int, num_heads: int, seed: int = 0) -> list[jax.Array]:
    """q, k, v, gate, beta in bfloat16; a_log, dt_bias in float32; the cotangent of o."""
    keys = jax.random.split(jax.random.key(seed), 8)
    tokens = (batch, num_tokens, num_heads)
    shapes = [(*tokens, DIM)] * 4 + [tokens, (num_heads,), (num_heads, DIM), (*tokens, DIM)]
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape), static_argnums=1)
    q, k, v, gate, beta, a_log, dt_bias, do = map(draw, keys, shapes)
    tensors = (x.astype(jnp.bfloat16) for x in (q, k, v, 2 * gate - 2, beta))
    return [*tensors, 0.3 * a_log, dt_bias, do.astype(jnp.bfloat16)]


def interleaved_medians(steps: dict[str, Step]) -> dict[str, float]:
    """Milliseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    calls = {}
    for name, step in steps.items():
        wait(step())  # compiles
        calls[name] = math.ceil(BATCH_MS / _milliseconds(step, 20))
    for _ in range(REPEATS):
        for name, step in steps.items():
            times[name].append(_milliseconds(step, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(step: Step, calls: int) -> float:
    """Of one of so many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        result = step()
    wait(result)
    return (time.perf_counter() - start) / calls * 1e3


def errors_against_float64(steps: dict[str, Step], arrays: list[jax.Array]) -> None:
    """Prints the relative root mean square errors of o and the gradients."""
    with jax.enable_x64(True):
        cpu = jax.devices("cpu")[0]
        exact = [jax.device_put(np.asarray(x.astype(jnp.float32), np.float64), cpu) for x in arrays]
        want = jax.tree.leaves(jax.jit(with_gradients(ours("reference")))(*exact))
    for name, step in steps.items():
        got = [as_numpy(x) for x in jax.tree.leaves(step())]
        errors = [  # FlashKDA has no gradients
            np.sqrt(np.mean((g.reshape(w.shape) - w) ** 2) / np.mean(np.square(w)))
            for g, w in zip(got, map(np.asarray, want[: len(got)]), strict=True)
        ]
        labels = ("o", *(f"d{n}" for n in NAMES))
        text = "  ".join(f"{n} {e:.2e}" for n, e in zip(labels, errors, strict=False))
        print(f"error  {name:12s} {text}", flush=True)
        if not all(e < 2e-2 for e in errors):
            raise SystemExit(f"{name} is wrong: nothing was timed")


def as_numpy(x: object) -> np.ndarray:
    if isinstance(x, jax.Array):
        return np.asarray(x.astype(jnp.float32), np.float64)
    return x.detach().double().cpu().numpy()


def leaks(make_step: Callable[[list[jax.Array]], Step], arrays: list[jax.Array]) -> bool:
    """Whether other gates at later tokens change an earlier output bit for bit."""
    prefix = 21
    changed = list(arrays)
    changed[3] = arrays[3].at[:, prefix:].set(1e4)
    before, after = (as_numpy(make_step(a)())[:, :prefix] for a in (arrays, changed))
    return not np.array_equal(before, after)


def peak_growth(name: str, shape: tuple[int, ...]) -> int:
    """Bytes by which the allocator's peak of forward and backward exceeds the inputs."""
    arrays = make_inputs(*shape)
    jax.block_until_ready(arrays)
    if name == "fla":
        import torch

        step = fla_step(arrays, backward=True, graph=False)
        step()  # its autotuner
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    step = jax_step(makers()[name], arrays, backward=True)
    before = jax.devices()[0].memory_stats()["bytes_in_use"]
    jax.block_until_ready(step())
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] - before


def shape(text: str) -> tuple[int, ...]:
    dims = text.split(",")
    if len(dims) != 3 or not all(dim.isdecimal() and int(dim) for dim in dims):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; it must be batch, tokens and heads, such as 1,8192,96"
        )
    return tuple(map(int, dims))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=("fla", "jla"),
        default=(),
        help="fla: fla-core (its autotuner takes minutes a shape); jla: jax-linear-attention",
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        default=SHAPES,
        metavar="B,T,H",
        help="such as 1,8192,96 1,8192,32; all six if left out",
    )
    parser.add_argument(
        "--what",
        nargs="+",
        choices=(*PARTS, "memory"),
        default=(*PARTS, "memory"),
        help="all three if left out; memory for the first shape only",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


class Bench:
    """The implementations that run here."""

    def __init__(self, peers: Sequence[str]) -> None:
        self.jax_makers = makers()
        if not ("jla" in peers and installed("jla.ops.mosaic_gpu.kda")):
            del self.jax_makers["jla"]
        self.has_fla = "fla" in peers and installed("fla.ops.kda")
        self.has_flash_kda = flash_kda_works(make_inputs(1, 512, 2))

    def steps(self, arrays: list[jax.Array], backward: bool, graph: bool = True) -> dict[str, Step]:
        steps = {
            name: jax_step(forward, arrays, backward)
            for name, forward in self.jax_makers.items()
            if backward or name != "ours, full"  # which differs in what it keeps
        }
        if self.has_fla:
            steps["fla"] = fla_step(arrays, backward, graph)
        if self.has_flash_kda and not backward:
            steps["flash_kda"] = flash_kda_step(arrays, graph)
        return steps

    def check(self, backward: bool) -> None:
        """Stops at an implementation that is wrong, and says which let the future leak."""
        small = make_inputs(1, 512, 8)
        checked = self.steps(small, backward=False, graph=False)
        if backward:
            checked |= self.steps(small, backward=True, graph=False)
        del checked["ours, softplus"]
        errors_against_float64(checked, small)
        for name in self.steps(small, backward=False, graph=False):
            leaky = leaks(
                lambda arrays, name=name: self.steps(arrays, False, graph=False)[name], small
            )
            print(f"a later gate changes an earlier output: {name:12s} {'YES' if leaky else 'no'}")

    def time(self, shape: tuple[int, ...], part: str) -> dict[str, object]:
        steps = self.steps(make_inputs(*shape), PARTS[part])
        result = {"shape": shape, "what": LABELS[part], "ms": interleaved_medians(steps)}
        text = "  ".join(f"{name} {ms:.3f}" for name, ms in result["ms"].items())
        recorded = FLASH_KDA_RECORDED.get(shape)
        if part == "forward" and recorded and not self.has_flash_kda:
            result["recorded_not_measured"] = {"flash_kda": recorded, "device": "NVIDIA H200"}
            text += f"  [flash_kda {recorded:.2f}: recorded on an H200, not measured]"
        print(f"B, T, H {shape}  {LABELS[part]:18s} ms: {text}", flush=True)
        return result

    def peak_memory(self, shape: tuple[int, ...]) -> list[dict[str, object]]:
        """Each in a process of its own, because an allocator's peak never falls."""
        results = []
        for name in [*self.jax_makers] + ["fla"] * self.has_fla:
            command = [sys.executable, "-m", "kernels.kda.bench", "--memory-of", name]
            command += ["--shapes", ",".join(map(str, shape))]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            growth = int(output.split()[-1])
            results.append({"shape": shape, "what": "peak memory", "bytes": {name: growth}})
            print(
                f"peak memory above the inputs, forward + backward, B, T, H {shape}: "
                f"{name} {growth / 2**30:.2f} GiB"
            )
        return results


def main() -> None:
    options = parse_options()
    try:
        backend = jax.default_backend()
    except (AssertionError, RuntimeError) as error:  # JAX_PLATFORMS asks for what is not there
        raise SystemExit(
            f"error: this benchmark needs a GPU; jax cannot start: {error!r}"
        ) from None
    if backend != "gpu":
        raise SystemExit("error: this benchmark needs a GPU; jax sees none")
    if options.memory_of:
        print(peak_growth(options.memory_of, options.shapes[0]))
        return
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    bench = Bench(options.peers)
    bench.check(backward=bool({"backward", "memory"} & set(options.what)))
    results = [
        bench.time(shape, part)
        for shape in options.shapes
        for part in PARTS
        if part in options.what
    ]
    if "memory" in options.what:
        results += bench.peak_memory(options.shapes[0])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
