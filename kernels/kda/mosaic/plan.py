"""What the TPU kernels of KDA share: products, and how their programs are laid out.

Letters: B batch, T time, H value heads, K key dim, V value dim, C chunk rows, M heads of a program.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda import chunk
from kernels.kda.operands import KdaOptions
from kernels.numerics import varying_like

Interpret = bool | pltpu.InterpretParams
LOG2E = math.log2(math.e)
# Heads of a program. It takes them step by step together (jax.vmap), because each alone would wait
# for every one of its products; more would not fit registers. By static bundle counts.
MOST_HEADS = 8
LARGE_STATE = 128 * 256  # numbers in a state beyond which only half as many fit VMEM
VMEM_LIMIT = 48 * 2**20  # of the 64 MiB and more that the chips have


class Masks(NamedTuple):
    """chunk.masks as the factors of one product each, repeated for the parts of what they sum."""

    spans: jax.Array  # [S C, parts C]: splits, then sums
    vjps: jax.Array  # [C, 2 parts C]


@dataclass(frozen=True)
class Plan:
    """What a kernel must know when it is built."""

    options: KdaOptions
    num_rows: int  # C
    group: int  # value heads per query/key head
    num_heads: int  # M
    narrow: jnp.dtype  # of the products' operands: bfloat16 for bfloat16 inputs, else wide
    wide: jnp.dtype  # float32; float64 only where the kernels are interpreted

    @property
    def log_tile(self) -> int:
        """Size of the tiles whose inner pairs take one product; chunk.Decays."""
        return 4 if self.options.tile_bound is not None else 0

    def dot(
        self, a: jax.Array, b: jax.Array, *, a_columns: bool = False, b_rows: bool = False
    ) -> jax.Array:
        """a b in the wide dtype, a or b transposed on request."""
        contract = ((0 if a_columns else 1,), (1 if b_rows else 0,))
        wide = max(a.dtype.itemsize, b.dtype.itemsize) > 2
        return jax.lax.dot_general(
            a,
            b,
            (contract, ((), ())),
            precision=jax.lax.Precision.HIGHEST if wide else None,
            preferred_element_type=self.wide,
        )

    def dot_both(self, x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As chunk.DotBoth: one below the other, because to load the second factor costs most."""
        products = self.dot(jnp.concatenate([x, y]), z, b_rows=True)
        return products[: x.shape[0]], products[x.shape[0] :]

    def dot_of_parts(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a b of wide operands: 16 bits of each beside bfloat16 inputs, else all."""
        if self.narrow != jnp.bfloat16:
            return self.dot(a, b)
        (a_high, a_low), (b_high, b_low) = (bfloat16_parts(x, 2) for x in (a, b))
        by_high = self.dot(jnp.concatenate([a_low, a_high]), b_high)
        small = by_high[: a.shape[0]] + self.dot(a_high, b_low)
        return small + by_high[a.shape[0] :]

    @property
    def num_parts(self) -> int:
        """Of what is summed, parts that products with a mask take exactly."""
        if self.wide == jnp.float64:
            return 1
        return 2 if self.narrow == jnp.bfloat16 else 3

    def parts(self, x_CK: jax.Array) -> list[jax.Array]:
        return [x_CK] if self.num_parts == 1 else bfloat16_parts(x_CK, self.num_parts)[::-1]

    def masks(self) -> Masks:
        splits, sums, vjps = chunk.masks(self.num_rows, self.log_tile)
        dtype = self.wide if self.num_parts == 1 else jnp.bfloat16
        spans = np.tile(np.concatenate([*splits, *sums]), self.num_parts)
        return Masks(
            jnp.asarray(spans, dtype),
            jnp.asarray(np.concatenate([np.tile(v, self.num_parts) for v in vjps], axis=1), dtype),
        )

    def decays(self, g_CK: jax.Array, masks: Masks) -> chunk.Decays:
        size = self.num_rows
        sums = self.dot(masks.spans, jnp.concatenate(self.parts(g_CK)))
        num_splits = sums.shape[0] // size - 2
        numbers = chunk.Masks(range(num_splits), range(num_splits, num_splits + 2), None)

        def spans(_: jax.Array) -> Callable[[int], jax.Array]:
            return lambda n: sums[n * size : (n + 1) * size]

        bound = LOG2E * (self.options.tile_bound or 0.0)
        return chunk.Decays(g_CK, numbers, 1.0, bound, self.log_tile, spans, jnp.exp2, unroll=True)

    def sums_vjp(self, x_CK: jax.Array, y_CK: jax.Array, masks: Masks) -> jax.Array:
        """Sums of x from the row on, and of y before the row."""
        return self.dot(masks.vjps, jnp.concatenate([*self.parts(x_CK), *self.parts(y_CK)]))

    def inverse(self, lower_CC: jax.Array) -> jax.Array:
        """(I + L)^-1 of a strictly lower triangular L, by doubling: never a power of L."""
        size = lower_CC.shape[0]
        last = size.bit_length() - 2  # the number of the split into single rows

        def below(number: int) -> jax.Array:
            return jnp.where(chunk.pairs(size, 0, number), lower_CC, 0.0)

        inverse_CC = eye(size, self.wide) - below(last)
        for number in reversed(range(last)):
            product_CC = self.dot_of_parts(inverse_CC, below(number))
            inverse_CC -= self.dot_of_parts(product_CC, inverse_CC)
        return inverse_CC


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Parts that add up to x, 8 bits in each."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(x.dtype)
    return parts


def eye(size: int, dtype: jnp.dtype) -> jax.Array:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (size, size), n) for n in range(2))
    return (rows == columns).astype(dtype)


def heads_of_a_program(num_heads: int, group: int, state_size: int) -> int:
    """So many that every program's query/key heads lie side by side; state_size: K V."""
    most = MOST_HEADS if state_size <= LARGE_STATE else MOST_HEADS // 2
    fit = [
        heads
        for heads in range(1, min(most, num_heads) + 1)
        if num_heads % heads == 0 and (heads % group == 0 or group % heads == 0)
    ]
    return max(fit)


def state_spec(plan: Plan, x_BHVK: jax.Array) -> pl.BlockSpec:
    """A program's heads, the same block for all chunks: it stays where it is."""
    return pl.BlockSpec((None, plan.num_heads, *x_BHVK.shape[2:]), lambda b, p, n: (b, p, 0, 0))


def chunk_spec(
    plan: Plan, chunk_of: Callable[[jax.Array], jax.Array], x_BHN: jax.ShapeDtypeStruct
) -> pl.BlockSpec:
    """A program's heads of a chunk of an array [B, H, N, ...]."""
    block = None, plan.num_heads, None, *x_BHN.shape[3:]
    return pl.BlockSpec(block, lambda b, p, n: (b, p, chunk_of(n), 0, 0))


def call(
    kernel: Callable[..., None],
    grid: tuple[int, int, int],
    inputs: tuple,
    interpret: Interpret,
    out_shape: tuple,
    **specs: object,
) -> tuple:
    """A program for every batch row, for some of its heads and for a chunk, in this order."""
    order = ("parallel", "parallel", "arbitrary")
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order, vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        out_shape=varying_like(inputs[0].q, out_shape),
        **specs,
    )(*inputs)
