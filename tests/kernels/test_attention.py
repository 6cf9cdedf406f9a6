"""Attention against a loop over tokens in NumPy float64; its memory, its errors, its blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kernels.attention import attention
from kernels.attention.reference import attention_reference
from kernels.attention.xla import attention_xla, default_block_size


def inputs(num_tokens, dtype=jnp.float32, batch=2, heads=3, width=12, value_width=8, seed=0):
    """q, k, v and a cotangent for the output."""
    rng = np.random.default_rng(seed)
    shape = (batch, num_tokens, heads)
    widths = (width, width, value_width)
    q, k, v = (jnp.asarray(rng.normal(size=(*shape, w)), dtype) for w in widths)
    wide = jnp.promote_types(dtype, jnp.float32)
    return q, k, v, jnp.asarray(rng.normal(size=(*shape, value_width)), wide)


def documents(num_tokens, kind, batch=2):
    """Segment ids: None, runs of documents, or ids that come back after others."""
    rng = np.random.default_rng(num_tokens)
    if kind == "none":
        return None
    ids = rng.integers(0, 4, size=(batch, num_tokens))
    if kind == "single_tokens":
        ids = np.broadcast_to(np.arange(num_tokens), ids.shape)
    return jnp.asarray(np.sort(ids, axis=1) if kind == "packed" else ids, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, segment_ids, q, k, v, do):
    """(o, dq, dk, dv) of function(q, k, v, segment_ids)."""
    o, pull = jax.vjp(lambda *qkv: function(*qkv, segment_ids), q, k, v)
    return (o, *pull(do))


# Cached, so that cases of one shape share a compilation.
@functools.cache
def in_blocks(block_size, scale=0.4):
    return lambda q, k, v, segment_ids: attention_xla(q, k, v, segment_ids, None, scale, block_size)


@functools.cache
def dense(scale=0.4):
    return lambda q, k, v, segment_ids: attention_reference(q, k, v, segment_ids, None, scale)


@functools.cache
def front(implementation):
    return lambda q, k, v, segment_ids: attention(
        q, k, v, segment_ids=segment_ids, implementation=implementation
    )


def assert_close(actual, expected, bound):
    for name, a, b in zip(("o", "dq", "dk", "dv"), actual, expected, strict=True):
        error = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
        assert error <= bound * max(np.max(np.abs(b)), 1e-2), (name, error)


@pytest.mark.parametrize("kind", ["none", "packed", "returning_ids"])
def test_reference_equals_loop_over_tokens(x64, kind):
    q, k, v, _ = inputs(11, jnp.float64)
    segment_ids = documents(11, kind)
    ids = np.zeros((2, 11)) if segment_ids is None else np.asarray(segment_ids)
    expected = np.zeros(v.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        weights = np.exp([0.4 * np.dot(q[b, t, h], k[b, s, h]) for s in seen])
        expected[b, t, h] = weights @ np.asarray(v)[b, seen, h] / weights.sum()
    actual = attention(q, k, v, segment_ids=segment_ids, scale=0.4, implementation="reference")
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["none", "packed", "returning_ids", "single_tokens"])
@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 1), (16, 16), (37, 8)])
def test_blocks_equal_dense_in_float64(x64, num_tokens, block_size, kind):
    arrays = inputs(num_tokens, jnp.float64)
    segment_ids = documents(num_tokens, kind)
    actual = with_gradients(in_blocks(block_size), segment_ids, *arrays)
    assert actual[0].dtype == jnp.float64
    assert_close(actual, with_gradients(dense(), segment_ids, *arrays), 1e-12)


@pytest.mark.parametrize("kind", ["none", "packed"])
def test_default_call_in_float32(kind):
    """Eight blocks of the size chosen by the front, the default scale, K larger than V."""
    arrays = inputs(1000, batch=1, heads=1, width=24)
    segment_ids = documents(1000, kind, batch=1)
    actual = with_gradients(front(None), segment_ids, *arrays)
    assert_close(actual, with_gradients(dense(24**-0.5), segment_ids, *arrays), 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "splash", "reference"])
def test_bfloat16_gives_a_float32_output(implementation):
    q, k, v, do = inputs(150, jnp.bfloat16)
    segment_ids = documents(150, "packed")
    actual = with_gradients(front(implementation), segment_ids, q, k, v, do)
    assert [a.dtype for a in actual] == [jnp.float32] + 3 * [jnp.bfloat16]
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = with_gradients(dense(12**-0.5), segment_ids, *wide, do)
    assert_close(actual, expected, 2e-2)
    # Not a bfloat16 output widened afterwards: that would have zeros in its last 16 bits.
    low_bits = np.asarray(actual[0]).view(np.uint32) & 0xFFFF
    assert np.mean(low_bits != 0) > 0.9


@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "none"), (600, "packed")])
def test_splash_interpreted(num_tokens, kind):
    """The TPU kernel behind the same front: width 192 with 128, padding, one and two blocks."""
    shape = dict(batch=1, heads=2, width=192, value_width=128)
    q, k, v, do = inputs(num_tokens, jnp.bfloat16, **shape)
    segment_ids = documents(num_tokens, kind, batch=1)
    actual = with_gradients(front("splash"), segment_ids, q, k, v, do)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = with_gradients(dense(192**-0.5), segment_ids, *wide, do)
    assert_close(actual, expected, 1e-2)


def test_splash_lowers_for_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    shapes = [jax.ShapeDtypeStruct((1, 600, 2, w), jnp.bfloat16) for w in (192, 192, 128)]
    loss = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v) ** 2), (0, 1, 2))  # None is splash
    lowered = jax.jit(loss).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 3  # o, dq, and dk with dv


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("kind", ["none", "packed", "returning_ids"])
def test_parts_of_the_queries_equal_the_whole(x64, kind, implementation):
    """Parts that blocks do not divide, their place traced: what a shard of a sequence computes."""
    q, k, v, do = inputs(600, jnp.float64, batch=1, heads=1)
    segment_ids = documents(600, kind, batch=1)
    if segment_ids is not None:
        segment_ids += 1  # no id is that of padding
    expected = with_gradients(dense(), segment_ids, q, k, v, do)

    @jax.jit
    def part(first, q, k, v, do):
        def call(q, k, v):
            options = {"segment_ids": segment_ids, "first_query": first, "scale": 0.4}
            return attention(q, k, v, implementation=implementation, **options)

        o, pull = jax.vjp(call, q, k, v)
        return (o, *pull(do))

    parts = [part(t, q[:, t : t + 200], k, v, do[:, t : t + 200]) for t in range(0, 600, 200)]
    o, dq, dk, dv = zip(*parts, strict=True)
    actual = jnp.concatenate(o, 1), jnp.concatenate(dq, 1), sum(dk), sum(dv)
    assert all(np.isfinite(x).all() for x in actual)
    assert_close(actual, expected, 1e-12)


def test_large_scores_do_not_overflow():
    q, k, v, do = inputs(40)
    actual = with_gradients(in_blocks(8, 100.0), None, q, k, v, do)
    assert_close(actual, with_gradients(dense(100.0), None, q, k, v, do), 1e-4)


def test_later_tokens_and_other_documents_change_nothing():
    q, k, v, _ = inputs(40)
    segment_ids = jnp.asarray(np.repeat([[0, 1], [0, 1]], 20, axis=1), jnp.int32)
    run = jax.jit(in_blocks(8))
    before = run(q, k, v, segment_ids)
    later = run(*(x.at[:, 30:].add(1) for x in (q, k, v)), segment_ids)
    np.testing.assert_array_equal(before[:, :30], later[:, :30])
    other = run(*(x.at[:, :20].add(1) for x in (q, k, v)), segment_ids)
    np.testing.assert_array_equal(before[:, 20:], other[:, 20:])


def gradient_of_length(num_tokens):
    shapes = [jax.ShapeDtypeStruct((1, num_tokens, 1, w), jnp.float32) for w in (8, 8, 4)]

    def loss(q, k, v):
        return jnp.sum(attention_xla(q, k, v, None, None, 1.0, 64) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*shapes)


def test_memory_is_linear_and_the_program_constant_in_the_length():
    lowered = [gradient_of_length(t).lower() for t in (1024, 4096)]
    short, long = (x.compile().memory_analysis().temp_size_in_bytes for x in lowered)
    assert long < 4.5 * short
    assert long < 4 * 4096 * 4096 / 8  # an eighth of one [T,T]
    lines = [len(x.as_text().splitlines()) for x in lowered]
    assert lines[0] == lines[1]


def test_work_is_the_causal_half():
    """Forward and backward are one loop each over N (N + 1) / 2 pairs of blocks."""
    for num_blocks in (1, 16):
        loops = re.findall(r"length=(\d+)", str(gradient_of_length(64 * num_blocks).jaxpr))
        assert [int(n) for n in loops] == 2 * [num_blocks * (num_blocks + 1) // 2]


def test_block_size_covers_the_sequence_with_little_padding():
    for num_tokens in (1, 255, 256, 257, 300, 1000, 2049, 8193, 100_000, 2**20):
        block_size = default_block_size(num_tokens)
        num_blocks = -(-num_tokens // block_size)
        assert block_size <= 1024
        assert num_blocks * block_size - num_tokens < max(16 * num_blocks, 1)


def test_inside_shard_map():
    """Rows split over devices, keys and values shared: the types that shard_map checks fit."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    q, k, v, do = inputs(40)
    segment_ids = documents(40, "packed")

    def loss(q, k, v, do, segment_ids):
        o = attention(q, k, v, segment_ids=segment_ids, scale=0.4)
        return jax.lax.psum(jnp.sum(o * do), "data")

    split, shared = PartitionSpec("data"), PartitionSpec()
    specs = (split, shared, shared, split, split)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=shared)
    grads = jax.jit(jax.grad(mapped, (0, 1, 2)))(q, k, v, do, segment_ids)
    expected = with_gradients(dense(), segment_ids, q, k, v, do)
    assert_close((expected[0], *grads), expected, 1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(k=jnp.zeros((1, 4, 1, 4))), ValueError, "same B and H"),
        (dict(v=jnp.zeros((1, 4, 1, 3))), ValueError, "same B and H"),
        (dict(v=jnp.zeros((1, 4, 2, 3), jnp.bfloat16)), ValueError, "one floating dtype"),
        (dict(segment_ids=jnp.zeros((4,), jnp.int32)), ValueError, "segment_ids are integers"),
        (dict(segment_ids=jnp.zeros((1, 4))), ValueError, "segment_ids are integers"),
        (dict(q=jnp.zeros((1, 5, 2, 4))), ValueError, "a first_query such as 0"),
        (dict(first_query=1), ValueError, "queries from 1 on .* such as 0"),
        (dict(implementation="flash"), ValueError, "use None or one of reference, xla, splash"),
        (dict(implementation="splash"), NotImplementedError, "takes bfloat16 inputs, not float32"),
    ],
)
def test_errors_name_the_rule(change, error, message):
    call = dict(q=jnp.zeros((1, 4, 2, 4)), k=jnp.zeros((1, 4, 2, 4)), v=jnp.zeros((1, 4, 2, 3)))
    call |= change
    with pytest.raises(error, match=message):
        attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
