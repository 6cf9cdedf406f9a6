"""grouped_matmul against a loop over groups in NumPy float64; its work, its memory, its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

import kernels.grouped_matmul.xla as xla
from kernels.grouped_matmul import grouped_matmul

IMPLEMENTATIONS = ["reference", "xla", "ragged_dot"]
# name: (rows, sizes, group_multiple)
CASES = {
    "ragged": (41, [5, 0, 13, 1, 22], 1),
    "trailing_rows": (60, [0, 7, 0, 30, 0], 1),
    "one_group_has_all": (37, [0, 37, 0], 1),
    "no_rows_used": (9, [0, 0], 1),
    "one_row": (1, [0, 1, 0], 1),
    "one_group": (50, [50], 1),
    "more_groups_than_rows": (6, [0, 1] * 6, 1),
    "blocks_of_16": (128, [32, 0, 16, 64, 16], 16),
    "blocks_of_16_trailing": (150, [32, 0, 16, 48], 16),
    "blocks_of_48_one_group": (200, [0, 0, 192], 48),
    "fewer_rows_than_a_block": (10, [0, 0], 16),
    "short_blocks": (40, [8, 0, 24], 4),
    "many_blocks": (400, [16] * 3 + [0] * 9 + [128, 0, 160], 16),
}


def inputs(rows, sizes, dtype, width_in=12, width_out=20):
    rng = np.random.default_rng(rows + len(sizes))
    x_MK = rng.normal(size=(rows, width_in))
    w_EKN = rng.normal(size=(len(sizes), width_in, width_out))
    dy_MN = rng.normal(size=(rows, width_out))
    arrays = [jnp.asarray(a, dtype) for a in (x_MK, w_EKN, dy_MN)]
    return (*arrays, jnp.asarray(sizes, jnp.int32))


def oracle(x_MK, w_EKN, dy_MN, group_sizes_E):
    x, w, dy = (np.asarray(a, np.float64) for a in (x_MK, w_EKN, dy_MN))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for e, size in enumerate(np.asarray(group_sizes_E)):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def run(x_MK, w_EKN, dy_MN, group_sizes_E, **options):
    """(y, dx, dw), jitted as the model does it."""

    @jax.jit
    def all_three(x_MK, w_EKN, dy_MN, group_sizes_E):
        y_MN, pull = jax.vjp(
            lambda x, w: grouped_matmul(x, w, group_sizes_E, **options), x_MK, w_EKN
        )
        return (y_MN, *pull(dy_MN))

    return all_three(x_MK, w_EKN, dy_MN, group_sizes_E)


def assert_close(actual, expected, bound):
    for name, a, b in zip(("y", "dx", "dw"), actual, expected, strict=True):
        error = np.max(np.abs(np.asarray(a, np.float64) - b), initial=0)
        assert error <= bound * max(1.0, np.max(np.abs(b), initial=0)), (name, error)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_loop_over_groups(x64, implementation, case):
    rows, sizes, multiple = CASES[case]
    arrays = inputs(rows, sizes, jnp.float64)
    actual = run(*arrays, group_multiple=multiple, implementation=implementation)
    assert_close(actual, oracle(*arrays), 1e-12)


@pytest.mark.parametrize("multiple", [1, 32])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 8e-3)])
def test_narrow_types(implementation, multiple, dtype, bound):
    # 1024 products a sum: summed in bfloat16 they would be far outside the bound.
    arrays = inputs(160, [64, 0, 32, 32], dtype, width_in=1024)
    actual = run(*arrays, group_multiple=multiple, implementation=implementation)
    assert all(a.dtype == dtype for a in actual)
    assert_close(actual, oracle(*arrays), bound)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_no_group_are_never_used(implementation, multiple):
    x_MK, w_EKN, dy_MN, sizes = inputs(80, [16, 0, 32], jnp.float32)
    clean = run(x_MK, w_EKN, dy_MN, sizes, group_multiple=multiple, implementation=implementation)
    x_MK, dy_MN = x_MK.at[48:].set(jnp.nan), dy_MN.at[48:].set(jnp.nan)
    dirty = run(x_MK, w_EKN, dy_MN, sizes, group_multiple=multiple, implementation=implementation)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(dirty[0][48:]) and not np.any(dirty[1][48:]) and not np.any(dirty[2][1])


def test_none_is_xla_off_the_tpu():
    arrays = inputs(64, [32, 32], jnp.float32)
    default, named = run(*arrays), run(*arrays, implementation="xla")
    for a, b in zip(default, named, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gathered_matrices_stay_within_their_budget(monkeypatch):
    arrays = inputs(400, [160, 0, 80, 160], jnp.float32, width_in=32, width_out=64)
    matrix_bytes = 32 * 64 * 4
    monkeypatch.setattr(xla, "GATHER_BYTES", 3 * matrix_bytes)
    assert_close(run(*arrays, group_multiple=16), oracle(*arrays), 2e-6)

    def loss(x_MK, w_EKN, sizes):
        return jnp.sum(grouped_matmul(x_MK, w_EKN, sizes, group_multiple=16) ** 2)

    x_MK, w_EKN, _, sizes = arrays
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x_MK, w_EKN, sizes)
    matrices = [s[0] for s, _ in all_values(jaxpr.jaxpr) if len(s) == 3 and s[1:] == (32, 64)]
    # At most E + 1 + 3 rows of the accumulator; all 25 blocks' matrices at once would be 25.
    assert max(matrices) <= 4 + 1 + 3


@pytest.mark.parametrize("multiple", [1, 64])
def test_work_follows_the_rows_not_the_number_of_groups(multiple):
    rows, width_in, width_out = 4096, 32, 48

    def flops(num_groups, implementation):
        def loss(x_MK, w_EKN, sizes):
            y_MN = grouped_matmul(
                x_MK, w_EKN, sizes, group_multiple=multiple, implementation=implementation
            )
            return jnp.sum(y_MN**2)

        shapes = [
            jax.ShapeDtypeStruct((rows, width_in), jnp.float32),
            jax.ShapeDtypeStruct((num_groups, width_in, width_out), jnp.float32),
            jax.ShapeDtypeStruct((num_groups,), jnp.int32),
        ]
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*shapes)
        return sum(work for _, work in all_values(jaxpr.jaxpr))

    ideal = 3 * 2 * rows * width_in * width_out
    assert ideal <= flops(4, "xla") <= 1.25 * ideal
    # Without the promise every group may leave one block half empty; nothing else may grow.
    assert flops(64, "xla") <= (2.25 if multiple == 1 else 1.25) * ideal
    assert flops(64, "reference") >= 64 * ideal  # the count does see work where there is some


def all_values(jaxpr, times=1):
    """(shape, matmul FLOPs) of every value computed anywhere in a jaxpr, loops counted in full."""
    for eqn in jaxpr.eqns:
        work = 0
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            depth = np.prod([eqn.invars[0].aval.shape[d] for d in contracted])
            work = 2 * times * depth * eqn.outvars[0].aval.size
        yield from ((out.aval.shape, work) for out in eqn.outvars[:1])
        inner_times = times * eqn.params.get("length", 1)
        for inner in jaxprs_in_params(eqn.params):
            yield from all_values(inner, inner_times)


def test_inside_shard_map():
    """Shared matrices, rows split over devices: the types that shard_map checks fit."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x_MK, w_EKN, _, sizes = inputs(96, [32, 0, 64], jnp.float32)

    def loss(x_MK, w_EKN, sizes):
        y_MN = grouped_matmul(x_MK, w_EKN, sizes, group_multiple=32, implementation="xla")
        return jax.lax.psum(jnp.sum(y_MN**2), "data")

    split, shared = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(split, shared, split), out_specs=shared)
    grads = jax.jit(jax.grad(mapped, (0, 1)))(x_MK, w_EKN, sizes)
    y_MN = run(x_MK, w_EKN, x_MK @ w_EKN[0], sizes)[0]
    assert_close((y_MN, *grads), oracle(x_MK, w_EKN, 2 * y_MN, sizes), 2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x_MK=jnp.zeros((8, 3, 4))), "takes x"),
        (dict(x_MK=jnp.zeros((8, 5))), "rows of width 5"),
        (dict(x_MK=jnp.zeros((8, 4), jnp.bfloat16)), "one floating dtype"),
        (dict(group_sizes_E=jnp.zeros(3, jnp.int32)), "3 entries for the 2 matrices"),
        (dict(group_sizes_E=jnp.zeros(2)), "use int32"),
        (dict(group_multiple=0), "at least 1"),
        (dict(implementation="cuda"), "use None or one of reference, xla, ragged_dot"),
    ],
)
def test_errors_name_the_rule(change, message):
    call = dict(
        x_MK=jnp.zeros((8, 4)),
        w_EKN=jnp.zeros((2, 4, 6)),
        group_sizes_E=jnp.array([4, 4], jnp.int32),
        group_multiple=1,
        implementation=None,
    )
    call |= change
    with pytest.raises(ValueError, match=message):
        grouped_matmul(call.pop("x_MK"), call.pop("w_EKN"), call.pop("group_sizes_E"), **call)
