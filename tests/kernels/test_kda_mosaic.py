"""What only the TPU kernels promise: that their programs keep order, and that TPUs take them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kernels.kda import aot, api, kda, kda_decode, pallas_mosaic_tpu
from kernels.kda.mosaic import plan
from tests.kernels.kda_cases import (
    assert_close,
    evaluate,
    first_tokens,
    golden,
    packed_inputs,
    prefix_cotangent,
    random_inputs,
    relative_rms,
    truth,
    with_another_future,
)

NAME = "pallas_mosaic_tpu"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def two_heads(monkeypatch):
    """Few heads in a program, so that there are several programs to a chunk."""
    monkeypatch.setattr(plan, "MOST_HEADS", 2)


@pytest.mark.parametrize("order", ["on_wait", "eager"])
def test_uninitialised_memory_and_races(monkeypatch, two_heads, order):
    """In the interpreter that simulates a TPU's memories and copies."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    inputs, options = packed_inputs(70, 2, 4, 16, 16), {"scale": 0.25}
    want = evaluate(NAME, inputs, np.float32, **options)
    strict = pltpu.InterpretParams(detect_races=True, dma_execution_mode=order)
    monkeypatch.setattr(pallas_mosaic_tpu, "interpret", lambda: strict)
    # JAX differentiates no program with effects, as the simulator's are, behind optimize_remat.
    plain = jax.custom_vjp(lambda *x: pallas_mosaic_tpu._forward(*x)[0], nondiff_argnums=(0,))
    plain.defvjp(pallas_mosaic_tpu._forward, pallas_mosaic_tpu._backward)
    monkeypatch.setattr(pallas_mosaic_tpu, "_kda", plain)
    got = evaluate(NAME, inputs, np.float32, **options, chunk_size=80)  # a program of its own
    assert not simulator.races.races_found
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("num_qk_heads", [1, 2, 4])
def test_heads_in_several_programs(two_heads, num_qk_heads):
    inputs = random_inputs(2, 70, num_qk_heads, 4, 16, 16)
    got = evaluate(NAME, inputs, np.float64, scale=0.2)
    assert_close(got, truth(inputs, scale=0.2), 1e-12)


@pytest.mark.parametrize(
    "num_heads, group, heads",
    [(32, 1, 8), (96, 1, 8), (12, 3, 6), (7, 1, 7), (64, 16, 8), (22, 11, 1)],
)
def test_heads_of_a_program_share_query_heads(num_heads, group, heads):
    got = plan.heads_of_a_program(num_heads, group, 128 * 128)
    assert got == heads
    assert num_heads % got == 0 and (got % group == 0 or group % got == 0)


def test_lean_residuals_equal_the_recurrence():
    inputs = packed_inputs(70, 1, 2, 16, 16)
    assert_close(evaluate(NAME, inputs, np.float64, residuals="lean"), truth(inputs), 1e-12)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_equals_the_other_implementations_on_a_stored_input(dtype):
    """The golden base case, whose answer other people computed."""
    inputs, cotangent, options, _, _ = golden("base_b1_t64_h2_k32_v32")
    got, *others = (
        evaluate(name, inputs, dtype, cotangent, **options)
        for name in (NAME, "pallas_triton", "xla")
    )
    for other in others:
        for name in got:
            error = relative_rms(got[name], other[name].astype(np.float64))
            assert error < (1.5e-2 if dtype == jnp.bfloat16 else 2e-6), (name, error)


@pytest.mark.parametrize("length", [1, 17, 33, 64])
def test_no_future_token_reaches_the_past_in_bfloat16(length):
    inputs = random_inputs(1, 80, 1, 1, 16, 16)
    cotangent = prefix_cotangent(inputs, length)
    want, got = (
        first_tokens(evaluate(NAME, x, jnp.bfloat16, cotangent), length)
        for x in (inputs, with_another_future(inputs, length))
    )
    for name in want.keys() - {"final_state"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_second_derivatives_are_refused_by_name():
    inputs = {k: jnp.asarray(x, jnp.float32) for k, x in random_inputs(1, 16, 1, 1, 16, 16).items()}

    def loss(v):
        return jnp.sum(kda(**inputs | {"v": v}, implementation=NAME)[0] ** 2)

    with pytest.raises(NotImplementedError, match=r"differentiated once.*implementation='xla'"):
        jax.jacfwd(jax.grad(loss))(inputs["v"])


def test_what_the_kernels_do_not_serve_falls_back(monkeypatch):
    monkeypatch.setattr(api, "platform", lambda: "tpu")
    monkeypatch.setattr(pallas_mosaic_tpu, "platform", lambda: "tpu")
    wide = [jnp.zeros((1, 16, 1, 512))] * 4 + [jnp.zeros((1, 16, 1))]
    assert kda(*wide)[0].shape == (1, 16, 1, 512)
    token = [x[:, 0] for x in wide]
    assert kda_decode(*token, state=jnp.zeros((1, 1, 512, 512)))[0].shape == (1, 1, 512)
    with pytest.raises(NotImplementedError, match=r"up to 256, not 512 and 512: use .*'xla'"):
        kda(*wide, implementation=NAME)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="not float64"):
        kda(*(x[..., :16].astype(jnp.float64) for x in wide), implementation=NAME)


def lowered_for_tpu(function, **shapes):
    """The text of a program for a v6e, with neither chip nor compiler at hand."""
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(**shapes).lower(lowering_platforms=("tpu",)).as_text()


def test_none_takes_the_kernels_on_a_tpu():
    def x(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    tokens = {name: x(2, 96, 4, 128) for name in ("q", "k", "v", "gate")} | {"beta": x(2, 96, 4)}
    gradient = jax.grad(lambda tokens: jnp.sum(kda(**tokens)[0].astype(jnp.float32)))
    text = lowered_for_tpu(lambda **tokens: gradient(tokens), **tokens)
    assert "kda_forward" in text and "kda_backward" in text
    token = {name: x(2, *shape.shape[2:]) for name, shape in tokens.items()}
    token["state"] = x(2, 4, 128, 128, dtype=jnp.float32)
    text = lowered_for_tpu(kda_decode, **token)
    assert text.count("tpu_custom_call") == 1 and "kda_decode" in text


# Ahead of time, for chips that are not there: `make libtpu` brings their compiler.


def ahead_of_time(*arguments):
    """What `python -m kernels.kda.aot` says; libtpu is read once in a process."""
    path = f"{REPOSITORY / '.libtpu'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "kernels.kda.aot", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


needs_libtpu = pytest.mark.skipif(
    not (REPOSITORY / ".libtpu" / "libtpu").exists() and not importlib.util.find_spec("libtpu"),
    reason="libtpu is not installed: make libtpu",
)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip, arguments",
    [
        ("v5e", ("--shape", 1, 8192, 32)),
        ("v5e", ("--shape", 1, 8192, 96, "--dtype", "float32")),
        ("v6e", ("--shape", 1, 8192, 32, "--gate_kind", "softplus")),
        ("v6e", ("--shape", 1, 8192, 96, "--chips", 4)),
        ("v5p", ("--shape", 1, 8192, 32, "--dim", 256, "--dtype", "float32")),
        ("tpu7x", ("--shape", 1, 8192, 32, "--dim", 64)),
    ],
)
def test_compiles_ahead_of_time(chip, arguments):
    said = ahead_of_time("--chip", chip, *arguments)
    kernels = re.findall(r"(kda_\w+?)\.\d+ +([\d.]+)  matmul +(\d+)%  VMEM +([\d.]+) MiB", said)
    assert [k for k, *_ in kernels].count("kda_forward") == 2  # alone, and before the backward
    assert [k for k, *_ in kernels].count("kda_backward") == 1
    assert all(float(x) > 0 for _, *numbers in kernels for x in numbers), said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--shape", 1, 0, 8), "all must be positive, such as 1 8192 32"),
        (("--dim", 300), "the kernels take 1 to 256, such as 128"),
        (("--shape", 1, 512, 3, "--chips", 2), "3 heads do not divide by --chips 2"),
    ],
)
def test_errors_say_what_would_work(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["aot", *map(str, arguments)])
    with pytest.raises(SystemExit):
        aot.main()
    assert message in capsys.readouterr().err


@needs_libtpu
@pytest.mark.slow
def test_says_what_does_not_fit():
    with pytest.raises(AssertionError, match="does not fit v5e: RESOURCE_EXHAUSTED"):
        ahead_of_time("--shape", 64, 65536, 96, "--what", "forward", "--chip", "v5e")
