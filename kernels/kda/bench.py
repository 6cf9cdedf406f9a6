"""Times KDA on the GPU at hand beside the peers that are installed: python -m kernels.kda.bench.

Every row runs in one process, its implementations interleaved, on the same inputs: bfloat16, head
dims of 128, the bounded gate at -5, from the raw gate and the logits of beta to o, and to all
gradients. Ours and jax-linear-attention (its gate and beta by XLA in the same jit) are timed by the
host clock over back-to-back calls, fla-core by replays of a CUDA graph, so that Python's dispatch
counts against nobody. Medians; no cache is flushed for anyone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda import gates, kda

SHAPES = [
    (1, 8192, 96),
    (1, 8192, 32),
    (4, 8192, 32),
    (1, 65536, 32),
    (1, 131072, 16),
    (8, 2048, 32),
]  # B, T, H
DIM, LOWER_BOUND, REPEATS, CALLS = 128, -5.0, 5, 10
NAMES = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias")
Step = Callable[[], object]


def make_inputs(batch: int, num_tokens: int, num_heads: int, seed: int = 0) -> list[jax.Array]:
    """q, k, v, gate, beta in bfloat16; a_log, dt_bias in float32; the cotangent of o."""
    keys = jax.random.split(jax.random.key(seed), 8)
    tokens = (batch, num_tokens, num_heads)
    shapes = [(*tokens, DIM)] * 4 + [tokens, (num_heads,), (num_heads, DIM), (*tokens, DIM)]
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape), static_argnums=1)
    q, k, v, gate, beta, a_log, dt_bias, do = map(draw, keys, shapes)
    tensors = (x.astype(jnp.bfloat16) for x in (q, k, v, 2 * gate - 2, beta))
    return [*tensors, 0.3 * a_log, dt_bias, do.astype(jnp.bfloat16)]


def with_gradients(forward: Callable[..., jax.Array]) -> Callable[..., tuple]:
    def run(*arrays: jax.Array) -> tuple:
        o, vjp = jax.vjp(forward, *arrays[:-1])
        return o, vjp(arrays[-1])

    return run


def ours(implementation: str, gate_kind: str = "bounded") -> Callable[..., jax.Array]:
    def forward(*arrays: jax.Array) -> jax.Array:
        options = {"gate_kind": gate_kind, "implementation": implementation}
        return kda(**dict(zip(NAMES, arrays, strict=True)), **options)[0]

    return forward


def jla_forward(*arrays: jax.Array) -> jax.Array:
    """jax-linear-attention, which takes the finished log-decay and strength."""
    from jla.ops.mosaic_gpu.kda import kda as jla_kda

    q, k, v, gate, beta, a_log, dt_bias = arrays
    g = gates.bounded_log_decay(gate, a_log, dt_bias, LOWER_BOUND)
    beta = gates.write_strength(beta, is_logit=True)
    return jla_kda(q, k, v, g, beta, use_qk_l2norm=True)[0]


def jax_step(forward: Callable[..., jax.Array], arrays: list[jax.Array], backward: bool) -> Step:
    run = jax.jit(with_gradients(forward) if backward else lambda *a: forward(*a[:-1]))
    return lambda: run(*arrays)


def fla_step(arrays: list[jax.Array], backward: bool, graph: bool = True) -> Step:
    """fla-core's chunk_kda with everything in its kernels; a replay if graph, else a call."""
    import torch
    from fla.ops.kda import chunk_kda

    q, k, v, gate, beta, a_log, dt_bias, do = (torch.from_dlpack(x).clone() for x in arrays)
    inputs = [q, k, v, gate, beta, a_log, dt_bias.reshape(-1)]
    inputs = [x.detach().requires_grad_(backward) for x in inputs]

    def run() -> object:
        q, k, v, gate, beta, a_log, dt_bias = inputs
        o, _ = chunk_kda(
            q, k, v, gate, beta, A_log=a_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND,
            safe_gate=True, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return (o, torch.autograd.grad(o, inputs, do)) if backward else o

    if not graph:
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # its autotuner runs here
            run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


def wait(result: object) -> None:
    if result is None:  # a graph's replay
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


def interleaved_medians(steps: dict[str, Step]) -> dict[str, float]:
    """Milliseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(2):
            wait(step())
    for _ in range(REPEATS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                result = step()
            wait(result)
            times[name].append((time.perf_counter() - start) / CALLS * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def errors_against_float64(steps: dict[str, Step], arrays: list[jax.Array]) -> None:
    """Prints the relative root mean square errors of o and the gradients."""
    with jax.enable_x64(True):
        cpu = jax.devices("cpu")[0]
        exact = [jax.device_put(np.asarray(x.astype(jnp.float32), np.float64), cpu) for x in arrays]
        want = jax.tree.leaves(jax.jit(with_gradients(ours("reference")))(*exact))
    for name, step in steps.items():
        got = [as_numpy(x) for x in jax.tree.leaves(step())]
        errors = [
            np.sqrt(np.mean((g.reshape(w.shape) - w) ** 2) / np.mean(np.square(w)))
            for g, w in zip(got, map(np.asarray, want), strict=True)
        ]
        labels = ("o", *(f"d{n}" for n in NAMES))
        text = "  ".join(f"{n} {e:.2e}" for n, e in zip(labels, errors, strict=True))
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


def peak_growth(name: str, shape: tuple[int, int, int]) -> int:
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


def makers() -> dict[str, Callable[..., jax.Array]]:
    softplus = ours("pallas_triton", "softplus")
    return {"ours": ours("pallas_triton"), "ours, softplus": softplus, "jla": jla_forward}


def installed(module: str) -> bool:
    try:
        __import__(module)
    except ImportError as error:
        print(f"{module} is not measured: {error}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=("fla", "jla"),
        default=(),
        help="beside fla-core (its autotuner takes minutes a shape) or jax-linear-attention",
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("error: this benchmark needs a GPU; jax sees none")
    if options.memory_of:
        print(peak_growth(options.memory_of, SHAPES[0]))
        return
    jax_makers = makers()
    if not ("jla" in options.peers and installed("jla.ops.mosaic_gpu.kda")):
        del jax_makers["jla"]
    has_fla = "fla" in options.peers and installed("fla.ops.kda")

    def steps(arrays: list[jax.Array], backward: bool, graph: bool = True) -> dict[str, Step]:
        made = {n: jax_step(f, arrays, backward) for n, f in jax_makers.items()}
        return made | ({"fla": fla_step(arrays, backward, graph)} if has_fla else {})

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    small = make_inputs(1, 512, 2)
    checked = steps(small, backward=True, graph=False)
    del checked["ours, softplus"]
    errors_against_float64(checked, small)
    for name in checked:
        leaky = leaks(lambda arrays, name=name: steps(arrays, False, graph=False)[name], small)
        print(f"a later gate changes an earlier output: {name:12s} {'YES' if leaky else 'no'}")

    results = []
    for shape in SHAPES[: options.shapes]:
        arrays = make_inputs(*shape)
        for label, backward in (("forward", False), ("forward + backward", True)):
            medians = interleaved_medians(steps(arrays, backward))
            results.append({"shape": shape, "what": label, "ms": medians})
            text = "  ".join(f"{name} {ms:.3f}" for name, ms in medians.items())
            print(f"B, T, H {shape}  {label:18s} ms: {text}", flush=True)
    for name in [*jax_makers] + ["fla"] * has_fla:
        command = [sys.executable, "-m", "kernels.kda.bench", "--memory-of", name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        growth = int(output.split()[-1])
        results.append({"shape": SHAPES[0], "what": "peak memory", "bytes": {name: growth}})
        print(
            f"peak memory above the inputs, forward + backward, B, T, H {SHAPES[0]}: "
            f"{name} {growth / 2**30:.2f} GiB"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
