"""What the benchmark of KDA times: ours and the peers, as steps that take no arguments.

All take make_inputs' arrays: head dims of 128, the bounded gate at -5, the raw gate and logits.
"""

from collections.abc import Callable

import jax

from kernels.kda import gates, kda

DIM, LOWER_BOUND = 128, -5.0
NAMES = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias")
Step = Callable[[], object]

# Forward milliseconds of FlashKDA on an H200 by (B, T, H), which were recorded with the same head
# dims and gate: for machines without it. Not measured here.
FLASH_KDA_RECORDED = {
    (1, 8192, 96): 1.45,
    (1, 8192, 32): 1.04,
    (4, 8192, 32): 1.65,
    (1, 65536, 32): 8.07,
    (1, 131072, 16): 14.55,
    (8, 2048, 32): 0.78,
}


def with_gradients(forward: Callable[..., jax.Array]) -> Callable[..., tuple]:
    def run(*arrays: jax.Array) -> tuple:
        o, vjp = jax.vjp(forward, *arrays[:-1])
        return o, vjp(arrays[-1])

    return run


def ours(implementation: str, **options: str) -> Callable[..., jax.Array]:
    def forward(*arrays: jax.Array) -> jax.Array:
        inputs = dict(zip(NAMES, arrays, strict=True))
        return kda(**inputs, **options, implementation=implementation)[0]

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


def makers() -> dict[str, Callable[..., jax.Array]]:
    return {
        "ours": ours("pallas_triton"),
        "ours, full": ours("pallas_triton", residuals="full"),
        "ours, softplus": ours("pallas_triton", gate_kind="softplus"),
        "jla": jla_forward,
    }


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

    return _captured(run) if graph else run


def flash_kda_step(arrays: list[jax.Array], graph: bool = True) -> Step:
    """FlashKDA, which has a forward only and takes raw gates and logits; a replay if graph."""
    import flash_kda
    import torch

    q, k, v, gate, beta, a_log, dt_bias, _ = (torch.from_dlpack(x).clone() for x in arrays)
    out = torch.empty_like(v)

    def run() -> object:
        flash_kda.fwd(
            q, k, v, gate, beta, DIM**-0.5, out,
            A_log=a_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND,
        )  # fmt: skip
        return out

    return _captured(run) if graph else run


def _captured(run: Step) -> Step:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # autotuners run here
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def wait(result: object) -> None:
    if result is None:  # a graph's replay
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


def installed(module: str) -> bool:
    try:
        __import__(module)
    except ImportError as error:
        print(f"{module} is not measured: {error}")
        return False
    return True


def flash_kda_works(arrays: list[jax.Array]) -> bool:
    """Whether FlashKDA is installed and computes; what it says otherwise is printed."""
    try:
        wait(flash_kda_step(arrays)())
    except Exception as error:  # a foreign kernel's refusal has no type of its own
        print(f"flash_kda is not measured: {type(error).__name__}: {error}")
        return False
    return True
