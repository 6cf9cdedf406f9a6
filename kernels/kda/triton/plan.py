"""What the Triton kernels of KDA share: products, and how their programs are laid out.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, R rows of
half a chunk, X chains (B x H).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda import chunk
from kernels.kda.operands import KdaOptions

_X6 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6

Carry = TypeVar("Carry")
LOG2E = math.log2(math.e)
# Key channels of which a program holds tiles at a time: more, and registers spill; fewer, where
# they come from memory for the first time, and it is read in pieces too short. Measured on an H200:
# with the scores to hold as well, without, and for the norms.
SOLVE_PART, PREPARE_PART, MEASURE_PART = 16, 64, 64


@dataclass(frozen=True)
class Plan:
    """What a kernel must know when it is built."""

    options: KdaOptions
    num_rows: int  # C
    group: int  # value heads per query/key head
    narrow: jnp.dtype  # of the products' operands: bfloat16 for bfloat16 inputs, else wide
    wide: jnp.dtype  # float32; float64 only in interpret mode
    interpret: bool
    most_log_tile: int = 5

    @property
    def half(self) -> int:
        """R."""
        return self.num_rows // 2

    @property
    def log_tile(self) -> int:
        """Size of the tiles whose inner pairs take one product; chunk.Decays."""
        options = self.options
        if options.tile_bound is None:
            return 0
        # 32 rows at -5 fill float32's exponents so far that what they multiply must not exceed 1,
        # and that small values lose bits, which only bfloat16 can spare, and not if q is tiny.
        small = options.use_qk_l2norm and 1e-3 <= abs(options.scale) <= 1.0
        wide_tiles = small and self.narrow == jnp.bfloat16 and options.tile_bound >= -5.0
        log_tile = 5 if wide_tiles else 4
        return min(log_tile, self.most_log_tile, self.half.bit_length() - 1)

    def dot(
        self,
        a: jax.Array,
        b: jax.Array,
        *,
        a_columns: bool = False,
        b_rows: bool = False,
        exact: bool = False,
    ) -> jax.Array:
        """a b in the wide dtype, a or b transposed on request.

        Of wide operands 16 bits count where others are bfloat16, unless exact: then all.
        """
        contract = ((0 if a_columns else 1,), (1 if b_rows else 0,))
        product = partial(
            jax.lax.dot_general,
            dimension_numbers=(contract, ((), ())),
            preferred_element_type=self.wide,
        )
        if self.interpret:
            # Widened, because the CPU has no bfloat16 products of some layouts.
            a, b = a.astype(self.wide), b.astype(self.wide)
            return product(a, b, precision=jax.lax.Precision.HIGHEST)
        if a.dtype.itemsize == b.dtype.itemsize == 2:
            return product(a, b)
        if exact or self.narrow != jnp.bfloat16:
            return product(a, b, precision=_X6)
        (a, *a_rest), (b, *b_rest) = (
            [x] if x.dtype.itemsize == 2 else _bfloat16_parts(x, 2) for x in (a, b)
        )
        pairs = [(rest, b) for rest in a_rest] + [(a, rest) for rest in b_rest] + [(a, b)]
        return reduce(jnp.add, [product(*pair) for pair in pairs])

    def dot_both(self, x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As chunk.DotBoth."""
        return self.dot(x, z, b_rows=True), self.dot(y, z, b_rows=True)

    def row_sums(self, x_RK: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """As chunk.RowSums: products of the mask with parts of x that are exact in bfloat16."""
        count = 2 if self.narrow == jnp.bfloat16 else 3
        parts = [x_RK] if self.interpret else _bfloat16_parts(x_RK, count)
        return partial(self._masked_sums, list(reversed(parts)))

    def spans(self, g_RK: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """As row_sums, for log-decays: float16's 2 ** -11 of each is enough beside bfloat16."""
        if self.narrow != jnp.bfloat16 or self.interpret:
            return self.row_sums(g_RK)
        return partial(self._masked_sums, [g_RK.astype(jnp.float16)])

    @property
    def decay_unit(self) -> float:
        """The power of 2 that log-decays come in multiples of, and that masks of them hold.

        It takes bounded ones up to where float16 ends: the weakest, which only a long sequence
        adds up, keep their 11 bits.
        """
        if self.narrow != jnp.bfloat16 or self.interpret or not self.bound:
            return 1.0
        float16 = jnp.finfo(jnp.float16)
        largest = math.ceil(math.log2(-self.bound / float(float16.max)))
        return 2.0 ** max(largest, float16.minexp)

    def _masked_sums(self, parts: list[jax.Array], mask_RR: jax.Array) -> jax.Array:
        return reduce(jnp.add, [self.dot(mask_RR, part) for part in parts])

    def masks(self, num_rows: int) -> chunk.Masks:
        """Masks of so many rows, of the types that their products take."""
        types = chunk.Masks(*[self.wide] * 3)
        if not self.interpret:
            spans = jnp.float16 if self.narrow == jnp.bfloat16 else jnp.bfloat16
            types = chunk.Masks(spans, spans, jnp.bfloat16)
        splits, sums, vjps = chunk.masks(num_rows, self.log_tile)
        arrays = chunk.Masks(splits * self.decay_unit, sums * self.decay_unit, vjps)
        return chunk.Masks(*(jnp.asarray(a, t) for a, t in zip(arrays, types, strict=True)))

    @property
    def bound(self) -> float:
        """Of a tile's log-decays, base 2."""
        return LOG2E * (self.options.tile_bound or 0.0)

    def decays(self, g_RK: jax.Array, masks: chunk.Masks) -> chunk.Decays:
        tile = self.bound, self.log_tile
        return chunk.Decays(g_RK, masks, self.decay_unit, *tile, self.spans, self.exp2)

    def exp2(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(x) if self.interpret else _approximate("ex2", x)

    def rounded(self, x: jax.Array) -> jax.Array:
        """x in the narrow dtype, for uses as a number too: Triton's own rounding is slower then."""
        if self.interpret or self.narrow != jnp.bfloat16:
            return x.astype(self.narrow)
        return plt.elementwise_inline_asm(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            args=[x],
            constraints="=r,f,f",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
        )[0]

    def sigmoid(self, x: jax.Array) -> jax.Array:
        return self.logistic(-LOG2E * x)

    def logistic(self, x: jax.Array) -> jax.Array:
        """1 / (1 + 2 ** x)."""
        denominator = 1.0 + self.exp2(x)
        return 1.0 / denominator if self.interpret else _approximate("rcp", denominator)


def _approximate(function: str, x: jax.Array) -> jax.Array:
    """The GPU's own instruction: 2 ulp, subnormals are 0. Triton's exp2 and / check for more."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plt.elementwise_inline_asm(
        f"{function}.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[shape],
    )[0]


def _bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Parts that add up to x, 8 bits in each; cut off and not rounded, which is cheaper."""
    parts = []
    for _ in range(count):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        x -= jax.lax.bitcast_convert_type(bits & -0x10000, jnp.float32)
        parts.append(jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16))
    return parts


def head_spec(rows: int, dim: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, None, dim), lambda h, n, b: (b, n, h, 0))


def chunk_spec(num_heads: int, *dims: int) -> pl.BlockSpec:
    """A chunk's block of an array [X, N, *dims]."""
    zeros = (0,) * len(dims)
    return pl.BlockSpec((None, None, *dims), lambda h, n, b: (b * num_heads + h, n, *zeros))


def half_rows(plan: Plan, half: int) -> pl.Slice:
    return pl.ds(half * plan.half, plan.half)


def made_once(x_RK: jax.Array) -> jax.Array:
    """Keeps Triton from making x, or what it meets, in every layout, by an idle sum."""
    return jnp.sum(x_RK.reshape(*x_RK.shape, 1), axis=2)


def synchronize(plan: Plan) -> None:
    """What other threads wrote is read next."""
    if not plan.interpret:
        plt.debug_barrier()


def for_parts(dim: int, size: int, body: Callable[[pl.Slice, Carry], Carry], carry: Carry) -> Carry:
    """A loop over parts of the channels, which keeps the tiles of one alive at a time."""
    size = min(size, dim)

    def step(n: jax.Array, carry: Carry) -> Carry:
        return body(pl.ds(n * size, size), carry)

    return jax.lax.fori_loop(0, dim // size, step, carry)


def keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)
