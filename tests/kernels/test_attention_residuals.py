"""The Attention Residuals mix against golden arrays; two phases against the direct form."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels.attention_residuals import SourceMix, merge_partial, mix, mix_sources

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("attnres_*.npz"))
EPS = 1e-5


@functools.partial(jax.jit, static_argnums=3)
def two_phase(sources_NBTD, query_D, norm_D, eps):
    """The mix with the last source as the partial sum; of a single source by phase 1 alone."""
    alone = sources_NBTD.shape[0] == 1
    blocks_NBTD = sources_NBTD if alone else sources_NBTD[:-1]
    first = mix_sources(blocks_NBTD, query_D[None], norm_D[None], eps=eps)
    first = jax.tree.map(lambda x: x[0], first)
    return merge_partial(*first, sources_NBTD[-1], query_D, norm_D, eps=eps, has_partial=not alone)


@functools.partial(jax.jit, static_argnums=3)
def direct(sources_NBTD, query_D, norm_D, eps):
    return mix(sources_NBTD, query_D, norm_D, eps=eps)


def with_gradients(function, inputs, cotangent):
    """(output, gradients of sum(output * cotangent) for each input), compiled as one."""

    @jax.jit
    def run(inputs, cotangent):
        output, pull = jax.vjp(function, *inputs)
        return (output, *pull(cotangent))

    return run(inputs, cotangent)


def random_inputs(num_sources, num_queries, dtype, batch=2, time=5, width=16, seed=0):
    rng = np.random.default_rng(seed)
    sources_NBTD = rng.normal(size=(num_sources, batch, time, width)) * 3
    queries_SD = rng.normal(size=(num_queries, width))
    norms_SD = 1 + 0.3 * rng.normal(size=(num_queries, width))
    return tuple(jnp.asarray(a, dtype) for a in (sources_NBTD, queries_SD, norms_SD))


@pytest.mark.parametrize("form", [direct, two_phase])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path, form):
    golden = np.load(path)
    inputs = [jnp.asarray(golden[n]) for n in ("sources", "proj_weight", "norm_weight")]
    results = with_gradients(
        lambda *a: form(*a, float(golden["eps"])), inputs, jnp.asarray(golden["doutput"])
    )
    names = ("output", "dsources", "dproj_weight", "dnorm_weight")
    for name, actual in zip(names, results, strict=True):
        expected = golden[name]
        # With one source or a zero query some gradients are zero in exact arithmetic.
        bound = 1e-5 * np.max(np.abs(expected)) or 1e-5
        assert np.max(np.abs(actual - expected)) <= bound, name


@pytest.mark.parametrize("num_sources", [1, 2, 5])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_two_phases_equal_the_direct_form(x64, num_sources, num_queries):
    sources_NBTD, queries_SD, norms_SD = random_inputs(num_sources, num_queries, jnp.float64)
    partials_SBTD = random_inputs(num_queries, 1, jnp.float64, seed=1)[0]
    weights_SBTD = random_inputs(num_queries, 1, jnp.float64, seed=2)[0]

    def in_two_phases(sources_NBTD, partials_SBTD, queries_SD, norms_SD):
        first = mix_sources(sources_NBTD, queries_SD, norms_SD, eps=EPS)
        return jnp.stack(
            [
                merge_partial(
                    first.o_SBTD[s],
                    first.m_SBT[s],
                    first.l_SBT[s],
                    partials_SBTD[s],
                    queries_SD[s],
                    norms_SD[s],
                    eps=EPS,
                )
                for s in range(num_queries)
            ]
        )

    def at_once(sources_NBTD, partials_SBTD, queries_SD, norms_SD):
        return jnp.stack(
            [
                mix(
                    jnp.concatenate([sources_NBTD, partials_SBTD[s][None]]),
                    queries_SD[s],
                    norms_SD[s],
                    eps=EPS,
                )
                for s in range(num_queries)
            ]
        )

    arrays = (sources_NBTD, partials_SBTD, queries_SD, norms_SD)
    results = with_gradients(in_two_phases, arrays, weights_SBTD)
    expected = with_gradients(at_once, arrays, weights_SBTD)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * float(jnp.max(jnp.abs(b))))


def test_gradients_equal_finite_differences(x64):
    sources_NBTD, queries_SD, norms_SD = random_inputs(3, 1, jnp.float64)
    check_grads(
        jax.jit(lambda *a: two_phase(*a, EPS)),
        (sources_NBTD, queries_SD[0], norms_SD[0]),
        1,
        ["rev"],
    )


@pytest.mark.parametrize("garbage", [7.0, np.nan])
def test_absent_partial_is_ignored(x64, garbage):
    sources_NBTD, queries_SD, norms_SD = random_inputs(3, 1, jnp.float64)
    query_D, norm_D = queries_SD[0], norms_SD[0]

    def loss(sources_NBTD, partial_BTD, query_D, norm_D, has_partial):
        first = mix_sources(sources_NBTD, query_D[None], norm_D[None], eps=EPS)
        first = jax.tree.map(lambda x: x[0], first)
        h_BTD = merge_partial(
            *first, partial_BTD, query_D, norm_D, eps=EPS, has_partial=has_partial
        )
        return jnp.sum(jnp.sin(h_BTD))

    def direct_loss(sources_NBTD, query_D, norm_D):
        return jnp.sum(jnp.sin(mix(sources_NBTD, query_D, norm_D, eps=EPS)))

    partial_BTD = jnp.full(sources_NBTD.shape[1:], garbage)
    value, (dsources, dpartial, dquery, dnorm) = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(
        sources_NBTD, partial_BTD, query_D, norm_D, jnp.array(False)
    )
    assert not np.any(dpartial)
    expected, grads = jax.jit(jax.value_and_grad(direct_loss, (0, 1, 2)))(
        sources_NBTD, query_D, norm_D
    )
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for a, b in zip((dsources, dquery, dnorm), grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_traced_true_equals_static_true():
    sources_NBTD, queries_SD, norms_SD = random_inputs(3, 1, jnp.float32)
    first = jax.tree.map(lambda x: x[0], mix_sources(sources_NBTD, queries_SD, norms_SD, eps=EPS))
    args = (*first, sources_NBTD[0] * 2, queries_SD[0], norms_SD[0])
    static = merge_partial(*args, eps=EPS)
    traced = merge_partial(*args, eps=EPS, has_partial=jnp.array(True))
    np.testing.assert_array_equal(static, traced)


@pytest.mark.parametrize("form", [direct, two_phase])
def test_zero_query_gives_the_mean(form):
    sources_NBTD, _, norms_SD = random_inputs(4, 1, jnp.float32)
    h_BTD = form(sources_NBTD, jnp.zeros(16), norms_SD[0], EPS)
    np.testing.assert_allclose(h_BTD, sources_NBTD.mean(axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [direct, two_phase])
def test_large_scores_do_not_overflow(form):
    sources_NBTD, queries_SD, norms_SD = random_inputs(3, 1, jnp.float32)
    h_BTD = form(sources_NBTD, 1e4 * queries_SD[0], norms_SD[0], EPS)
    gap = jnp.min(jnp.abs(h_BTD[None] - sources_NBTD).max(axis=-1), axis=0)
    assert np.max(gap) < 1e-4  # one source takes all the weight


@pytest.mark.parametrize("form", [direct, two_phase])
def test_bfloat16_is_rounded_once(form):
    sources_NBTD, queries_SD, norms_SD = random_inputs(4, 1, jnp.bfloat16)
    h_BTD = form(sources_NBTD, queries_SD[0], norms_SD[0], EPS)
    wide = [a.astype(jnp.float32) for a in (sources_NBTD, queries_SD[0], norms_SD[0])]
    expected = form(*wide, EPS).astype(jnp.bfloat16)
    assert h_BTD.dtype == jnp.bfloat16
    np.testing.assert_array_equal(h_BTD, expected)


def test_nothing_wide_is_kept_or_spread_out():
    """No float32 copy of bfloat16 sources waits for the backward, and no [S,N,B,T,D] exists."""
    num_sources, num_queries, batch, time, width = 4, 8, 2, 64, 128
    inputs = random_inputs(num_sources, num_queries, jnp.bfloat16, batch, time, width)

    def first(*inputs):
        return mix_sources(*inputs, eps=EPS)

    saved = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(first, *a)[1], *inputs))
    one_source = batch * time * width
    assert all(a.size < one_source for a in saved if a.dtype == jnp.float32)

    def loss(*inputs):
        mixed = first(*inputs)
        return jnp.sum(mixed.o_SBTD) + jnp.sum(mixed.l_SBT)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs).compile()
    spread_out = 4 * num_queries * num_sources * one_source
    assert compiled.memory_analysis().temp_size_in_bytes < spread_out


@pytest.mark.parametrize(
    ("sources", "query", "norm", "message"),
    [
        ((2, 3, 16), (16,), (16,), "stack at least one source"),
        ((0, 2, 3, 16), (16,), (16,), "stack at least one source"),
        ((2, 2, 3, 16), (8,), (8,), "width of the sources, 16"),
        ((2, 2, 3, 16), (16,), (1, 16), "must have the same shape"),
    ],
)
def test_errors_name_the_rule(sources, query, norm, message):
    with pytest.raises(ValueError, match=message):
        mix(jnp.zeros(sources), jnp.zeros(query), jnp.zeros(norm), eps=EPS)


def test_merge_takes_one_sublayer():
    first = SourceMix(jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4)), jnp.ones((3, 2, 4)))
    with pytest.raises(ValueError, match="index the S dimension"):
        merge_partial(*first, jnp.zeros((2, 4, 8)), jnp.zeros(8), jnp.zeros(8), eps=EPS)
