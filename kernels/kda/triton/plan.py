"""What the Triton kernels of KDA share: products, and a chunk's inputs as they come into a program.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, R rows of
half a chunk, X chains (B x H).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.kda import chunk
from kernels.kda.gates import L2_NORM_EPS, MAX_A_LOG
from kernels.kda.operands import KdaOptions

_X6 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6

Carry = TypeVar("Carry")
Shapes = TypeVar("Shapes")  # a tree of jax.ShapeDtypeStruct
LOG2E = math.log2(math.e)
SMALLEST_BETA = 1e-25
# Key channels of which a program holds tiles at a time: more, and registers spill. Measured on an
# H200: with the scores to hold as well, and without.
SOLVE_PART, PREPARE_PART, MEASURE_PART = 32, 64, 64


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
        # and that small values lose bits, which only bfloat16 can spare.
        small = options.use_qk_l2norm and self.narrow == jnp.bfloat16
        log_tile = 5 if small and options.tile_bound >= -5.0 else 4
        return min(log_tile, self.most_log_tile, self.half.bit_length() - 1)

    def dot(
        self,
        a: jax.Array,
        b: jax.Array,
        *,
        a_columns: bool = False,
        b_rows: bool = False,
    ) -> jax.Array:
        """a b in the wide dtype, a or b transposed on request; of wide operands 16 bits count."""
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
        if self.narrow != jnp.bfloat16:
            return product(a, b, precision=_X6)
        (a, *a_rest), (b, *b_rest) = (
            [x] if x.dtype.itemsize == 2 else _bfloat16_parts(x, 2) for x in (a, b)
        )
        pairs = [(rest, b) for rest in a_rest] + [(a, rest) for rest in b_rest] + [(a, b)]
        return reduce(jnp.add, [product(*pair) for pair in pairs])

    def row_sums(self, x_RK: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """As chunk.RowSums: products of the mask with parts of x that are exact in bfloat16."""
        count = 2 if self.narrow == jnp.bfloat16 else 3
        parts = [x_RK] if self.interpret else _bfloat16_parts(x_RK, count)
        return partial(self._masked_sums, list(reversed(parts)))

    def spans(self, g_RK: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """As row_sums, for log-decays: float16's 2 ** -11 of each is enough beside bfloat16."""
        if self.narrow != jnp.bfloat16 or self.interpret:
            return self.row_sums(g_RK)
        if self.options.tile_bound is None:
            g_RK = jnp.maximum(g_RK, -3e4)  # float16 ends at 65504, a product of decays long before
        return partial(self._masked_sums, [g_RK.astype(jnp.float16)])

    def _masked_sums(self, parts: list[jax.Array], mask_RR: jax.Array) -> jax.Array:
        return reduce(jnp.add, [self.dot(mask_RR, part) for part in parts])

    def masks(self, num_rows: int) -> chunk.Masks:
        """Masks of so many rows, of the types that their products take."""
        types = chunk.Masks(*[self.wide] * 3)
        if not self.interpret:
            spans = jnp.float16 if self.narrow == jnp.bfloat16 else jnp.bfloat16
            types = chunk.Masks(spans, spans, jnp.bfloat16)
        arrays = chunk.masks(num_rows, self.log_tile)
        return chunk.Masks(*(jnp.asarray(a, t) for a, t in zip(arrays, types, strict=True)))

    def decays(self, g_RK: jax.Array, masks: chunk.Masks) -> chunk.Decays:
        bound = LOG2E * (self.options.tile_bound or 0.0)
        return chunk.Decays(g_RK, masks, bound, self.log_tile, self.spans, self.exp2)

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
        denominator = 1.0 + self.exp2(-LOG2E * x)
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


class Tokens(NamedTuple):
    """The raw inputs of a chunk: arrays outside, references inside a kernel."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    segment: jax.Array | None
    before: jax.Array | None  # [B, N] segment of the token before the chunk
    lengths: jax.Array | None
    masks: chunk.Masks


def token_specs(plan: Plan, tokens: Tokens) -> Tokens:
    """Blocks of one chunk of one head, for the grid (H, N, B)."""
    rows, key_dim, value_dim = plan.num_rows, tokens.q.shape[-1], tokens.v.shape[-1]
    of_group = pl.BlockSpec((None, rows, None, key_dim), lambda h, n, b: (b, n, h // plan.group, 0))
    has_segments = tokens.segment is not None
    return Tokens(
        q=of_group,
        k=of_group,
        v=head_spec(rows, value_dim),
        gate=head_spec(rows, key_dim),
        beta=pl.BlockSpec((None, rows, None), lambda h, n, b: (b, n, h)),
        a_log=pl.BlockSpec((1,), lambda h, n, b: (h,)),
        dt_bias=pl.BlockSpec((None, key_dim), lambda h, n, b: (h, 0)),
        segment=pl.BlockSpec((None, rows), lambda h, n, b: (b, n)) if has_segments else None,
        before=pl.BlockSpec((None, 1), lambda h, n, b: (b, n)) if has_segments else None,
        lengths=None if tokens.lengths is None else pl.BlockSpec((1,), lambda h, n, b: (b,)),
        masks=jax.tree.map(
            lambda mask: pl.BlockSpec(mask.shape, lambda h, n, b: (0, 0, 0)), tokens.masks
        ),
    )


def varying_like(x: jax.Array, shapes: Shapes) -> Shapes:
    """The same shapes for outputs that vary over the mesh axes of jax.shard_map as x does."""
    manual = jax.typeof(x).manual_axis_type
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=manual), shapes
    )


def head_spec(rows: int, dim: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, None, dim), lambda h, n, b: (b, n, h, 0))


def chunk_spec(num_heads: int, *dims: int) -> pl.BlockSpec:
    """A chunk's block of an array [X, N, *dims]."""
    zeros = (0,) * len(dims)
    return pl.BlockSpec((None, None, *dims), lambda h, n, b: (b * num_heads + h, n, *zeros))


class RowFactors(NamedTuple):
    """What is known of every row once it has been prepared, all [X, N, ...], wide."""

    beta: jax.Array  # [C]
    rstd: jax.Array | None  # [2, C]: 1 / norm of the rows of q and of k


class Rows(NamedTuple):
    """What belongs to rows of a chunk, all or half of them, and not to their channels."""

    rows: pl.Slice
    q_rstd_R1: jax.Array | None
    k_rstd_R1: jax.Array | None
    valid_R1: jax.Array | None


class Channels(NamedTuple):
    """Operands of the recurrence in some rows and a part of the key channels."""

    q_RK: jax.Array  # normalised and scaled
    k_RK: jax.Array
    g_RK: jax.Array  # log-decay, base 2


def half_rows(plan: Plan, half: int) -> pl.Slice:
    return pl.ds(half * plan.half, plan.half)


def valid_rows(plan: Plan, x: Tokens, rows: pl.Slice) -> jax.Array | None:
    """[R, 1]: which rows lie before the sequence's length."""
    if x.lengths is None:
        return None
    row_R1 = jax.lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0)
    first = pl.program_id(1) * plan.num_rows + rows.start
    return first + row_R1 < x.lengths[...].reshape(1, 1)


def activate_beta(plan: Plan, x: Tokens, rows: Rows) -> jax.Array:
    """[R, 1], never 0, because gradients divide by it: a rounding of what beta multiplies, no more.

    The write strength of an invalid row does not matter: its k and v are 0.
    """
    beta_R1 = keep(rows.valid_R1, x.beta[rows.rows].reshape(-1, 1).astype(plan.wide))
    if plan.options.beta_is_logit:
        beta_R1 = plan.sigmoid(beta_R1)
    return jnp.where(jnp.abs(beta_R1) < SMALLEST_BETA, SMALLEST_BETA, beta_R1)


def measure_rows(plan: Plan, x: Tokens, factors: RowFactors) -> jax.Array:
    """Writes what is to be known of a chunk's rows; returns <q, k> [C] of the operands."""
    whole = pl.ds(0, plan.num_rows)
    rows = Rows(whole, None, None, valid_rows(plan, x, whole))

    def products(part: pl.Slice, sums: tuple) -> tuple:
        q_CK, k_CK = (keep(rows.valid_R1, r[:, part].astype(plan.wide)) for r in (x.q, x.k))
        pairs = (q_CK, q_CK), (k_CK, k_CK), (q_CK, k_CK)
        return tuple(
            total_C + jnp.sum(a_CK * b_CK, axis=1)
            for total_C, (a_CK, b_CK) in zip(sums, pairs, strict=True)
        )

    zeros_C = jnp.zeros((plan.num_rows,), plan.wide)
    qq_C, kk_C, qk_C = for_parts(x.q.shape[-1], MEASURE_PART, products, (zeros_C,) * 3)
    own_C = plan.options.scale * qk_C
    if factors.rstd is not None:
        q_rstd_C, k_rstd_C = (jax.lax.rsqrt(xx_C + L2_NORM_EPS) for xx_C in (qq_C, kk_C))
        factors.rstd[0, :], factors.rstd[1, :] = q_rstd_C, k_rstd_C
        own_C *= q_rstd_C * k_rstd_C
    factors.beta[...] = activate_beta(plan, x, rows).reshape(-1)
    return own_C


def read_rows(plan: Plan, x: Tokens, rows: pl.Slice, factors: RowFactors) -> Rows:
    rstds = (None, None)
    if factors.rstd is not None:
        rstds = (factors.rstd[n, rows].reshape(-1, 1) for n in range(2))
    return Rows(rows, *rstds, valid_rows(plan, x, rows))


class Raw(NamedTuple):
    """Inputs of some rows and a part of the key channels, as they come."""

    q_RK: jax.Array
    k_RK: jax.Array
    gate_RK: jax.Array


def read_raw(x: Tokens, rows: pl.Slice, part: pl.Slice) -> Raw:
    return Raw(x.q[rows, part], x.k[rows, part], x.gate[rows, part])


def read_channels(plan: Plan, x: Tokens, rows: Rows, part: pl.Slice) -> Channels:
    return activate(plan, x, rows, part, read_raw(x, rows.rows, part))


def activate(plan: Plan, x: Tokens, rows: Rows, part: pl.Slice, raw: Raw) -> Channels:
    q_RK, k_RK = (keep(rows.valid_R1, x_RK.astype(plan.wide)) for x_RK in raw[:2])
    if rows.q_rstd_R1 is None:
        q_RK *= plan.options.scale
    else:
        q_RK, k_RK = q_RK * (plan.options.scale * rows.q_rstd_R1), k_RK * rows.k_rstd_R1
    g_RK = made_once(log_decay(plan, x, rows, part, raw.gate_RK))
    return Channels(q_RK, k_RK, keep(rows.valid_R1, g_RK))


def _gate(
    plan: Plan, x: Tokens, rows: Rows, part: pl.Slice, gate_RK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """z = gate + dt_bias, and exp(a_log)."""
    z_RK = keep(rows.valid_R1, gate_RK.astype(plan.wide)) + x.dt_bias[part].reshape(1, -1)
    return z_RK, jnp.exp(jnp.minimum(x.a_log[0], MAX_A_LOG))


def log_decay(plan: Plan, x: Tokens, rows: Rows, part: pl.Slice, gate_RK: jax.Array) -> jax.Array:
    """Base 2."""
    z_RK, rate = _gate(plan, x, rows, part, gate_RK)
    if plan.options.gate_kind == "bounded":
        return (plan.options.lower_bound * LOG2E) * plan.sigmoid(rate * z_RK)
    if plan.options.gate_kind == "softplus":
        return (-LOG2E * rate) * jax.nn.softplus(z_RK)
    return LOG2E * z_RK


def log_decay_vjp(
    plan: Plan, x: Tokens, rows: Rows, part: pl.Slice, gate_RK: jax.Array, dg_RK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradient of z, and every entry's part of that of a_log; dg: of the natural log-decay."""
    z_RK, rate = _gate(plan, x, rows, part, gate_RK)
    if plan.options.gate_kind == "bounded":
        open_RK = plan.sigmoid(rate * z_RK)
        dz_RK = dg_RK * ((plan.options.lower_bound * rate) * (open_RK * (1.0 - open_RK)))
        return dz_RK, dz_RK * z_RK
    if plan.options.gate_kind == "softplus":
        dz_RK = dg_RK * (-rate * plan.sigmoid(z_RK))
        return dz_RK, dg_RK * (-rate * jax.nn.softplus(z_RK))
    return dg_RK, jnp.zeros_like(dg_RK)


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


class Cuts(NamedTuple):
    """Where documents start."""

    enters_R1: jax.Array  # the row continues the document of the token before the chunk
    leaves_R1: jax.Array  # the row is of the document of the chunk's last row
    passes_11: jax.Array  # one document spans the chunk and the token before it


def read_cuts(x: Tokens, rows: pl.Slice) -> Cuts | None:
    if x.segment is None:
        return None
    before_11 = x.before[...].reshape(1, 1)
    last_11 = jnp.max(x.segment[...], axis=0, keepdims=True).reshape(1, 1)  # they never decrease
    segment_R1 = x.segment[rows].reshape(-1, 1)
    return Cuts(segment_R1 == before_11, segment_R1 == last_11, before_11 == last_11)


def together(x: Tokens, rows: pl.Slice, columns: pl.Slice) -> jax.Array | None:
    """[R, R]: the two rows are of one document."""
    if x.segment is None:
        return None
    return x.segment[rows].reshape(-1, 1) == x.segment[columns].reshape(1, -1)


def keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)
