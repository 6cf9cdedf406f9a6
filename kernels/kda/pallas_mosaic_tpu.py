"""The "pallas_mosaic_tpu" implementation: KDA on TPUs by Pallas kernels on the Mosaic backend.

One kernel forward and one backward. A program works on a chunk of some heads, and the chunks of a
sequence follow each other, so the state stays on the chip; mosaic/forward.py and backward.py. Kept
for the backward: the inputs, and of every chunk the scores P, the inverse (I + L)^-1 and the
entering state; "lean", the inputs alone, and then the forward kernel runs once more.

Off the TPU the kernels run in interpret mode, which also takes float64.

Letters: B batch, T time, H value heads, K key dim, V value dim, N chunks, C chunk rows, M heads of
a program.
"""

from functools import partial

import jax
import jax.numpy as jnp

from kernels.kda.chunked import pad_tokens
from kernels.kda.mosaic.backward import Kept, backward
from kernels.kda.mosaic.forward import Out, forward
from kernels.kda.mosaic.plan import Interpret, Masks, Plan, heads_of_a_program
from kernels.kda.mosaic.tokens import Tokens
from kernels.kda.once import differentiable_once, used_together
from kernels.kda.operands import KdaInputs, KdaOptions, unsupported_by_kernels
from kernels.numerics import platform, vary_together

LANES = 128


def interpret() -> Interpret:
    """How the kernels run here: False on a TPU."""
    return platform() != "tpu"


def kda_pallas_mosaic_tpu(inputs: KdaInputs, options: KdaOptions) -> tuple[jax.Array, jax.Array]:
    """Returns o [B, T, H, V] in v's dtype and the final state [B, H, K, V].

    The chunk has 64 rows, or 32 if chunk_size is below 64. Source: Kimi Linear (arXiv 2510.26692),
    Eq. 3-9.
    Raises NotImplementedError for what the compiled kernels do not serve.
    """
    limits = unsupported_by_kernels(inputs)
    if limits and not interpret():
        raise NotImplementedError(
            f"implementation 'pallas_mosaic_tpu' takes {limits}: use implementation='xla'"
        )
    wide = jnp.dtype(inputs.compute_dtype)
    all_narrow = all(x.dtype == jnp.bfloat16 for x in inputs[:3])
    num_rows = 64 if options.chunk_size >= 64 else 32
    leaves, structure = jax.tree.flatten(_pad(inputs, num_rows))
    padded = jax.tree.unflatten(structure, vary_together(*leaves))
    num_tokens, num_heads, value_dim = inputs.v_BTHV.shape[1:]
    num_groups, key_dim = inputs.q_BTQK.shape[2:]
    group, state_size = num_heads // num_groups, padded.initial_state_BHKV[0, 0].size
    plan = Plan(
        options=options,
        num_rows=num_rows,
        group=group,
        num_heads=heads_of_a_program(num_heads, group, state_size),
        narrow=jnp.dtype(jnp.bfloat16) if all_narrow else wide,
        wide=wide,
    )
    o_BTHV, state_BHKV = used_together(*_kda(plan, padded))
    return o_BTHV[:, :num_tokens, :, :value_dim], state_BHKV[:, :, :key_dim, :value_dim]


def _pad(inputs: KdaInputs, rows: int) -> KdaInputs:
    """Whole chunks of inert tokens, and heads that fill lanes."""
    inputs = pad_tokens(inputs, -inputs.v_BTHV.shape[1] % rows)
    more_K, more_V = (-x.shape[-1] % LANES for x in (inputs.q_BTQK, inputs.v_BTHV))

    def pad(x: jax.Array | None, *widths: int) -> jax.Array | None:
        last = ((0, w) for w in widths)
        return None if x is None else jnp.pad(x, [(0, 0)] * (x.ndim - len(widths)) + [*last])

    return inputs._replace(
        q_BTQK=pad(inputs.q_BTQK, more_K),
        k_BTQK=pad(inputs.k_BTQK, more_K),
        v_BTHV=pad(inputs.v_BTHV, more_V),
        gate_BTHK=pad(inputs.gate_BTHK, more_K),
        dt_bias_HK=pad(inputs.dt_bias_HK, more_K),
        initial_state_BHKV=pad(inputs.initial_state_BHKV, more_K, more_V),
    )


def _flat(x_BTHK: jax.Array) -> jax.Array:
    return x_BTHK.reshape(*x_BTHK.shape[:2], -1)


def _tokens(plan: Plan, inputs: KdaInputs) -> Tokens:
    batch, num_tokens, num_heads, _ = inputs.v_BTHV.shape
    of_params = num_heads, inputs.q_BTQK.shape[-1]

    def param(x: jax.Array | None) -> jax.Array:
        """[1, H * K] of a parameter [H, K], or [H]."""
        if x is None:
            return jnp.zeros((1, num_heads * of_params[1]), plan.wide)
        return jnp.broadcast_to(x.reshape(num_heads, -1), of_params).reshape(1, -1)

    segment_BN1C = before_BN11 = None
    if inputs.segment_BT is not None:
        segment_BN1C = inputs.segment_BT.reshape(batch, -1, 1, plan.num_rows)
        # Before the first token lies the first segment, which the initial state belongs to.
        before_BN11 = jnp.pad(segment_BN1C[:, :-1, :, -1:], ((0, 0), (1, 0), (0, 0), (0, 0)))
    _, *masks = vary_together(inputs.q_BTQK, *plan.masks())
    return Tokens(
        *map(_flat, inputs[:4]),
        beta=inputs.beta_BTH.reshape(batch, num_tokens, -1, plan.num_heads).swapaxes(1, 2),
        a_log=param(inputs.a_log_H),
        dt_bias=param(inputs.dt_bias_HK),
        segment=segment_BN1C,
        before=before_BN11,
        lengths=None if inputs.lengths_B is None else inputs.lengths_B[:, None, None],
        masks=Masks(*masks),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plan: Plan, inputs: KdaInputs) -> tuple[jax.Array, jax.Array]:
    return _outputs(inputs, _run(plan, inputs, False))


@differentiable_once("pallas_mosaic_tpu", (0, 2))
def _run(plan: Plan, inputs: KdaInputs, keep_all: bool) -> Out:
    """keep_all: also what the backward reads."""
    state_BHVK = inputs.initial_state_BHKV.swapaxes(2, 3)
    return forward(
        plan, _tokens(plan, inputs), state_BHVK, keep_all=keep_all, interpret=interpret()
    )


def _outputs(inputs: KdaInputs, out: Out) -> tuple[jax.Array, jax.Array]:
    return out.o.reshape(inputs.v_BTHV.shape), out.state.swapaxes(2, 3)


def _forward(plan: Plan, inputs: KdaInputs) -> tuple:
    lean = plan.options.residuals == "lean"
    out = _run(plan, inputs, not lean)
    return _outputs(inputs, out), (inputs, out.states, out.solved)


def _backward(plan: Plan, kept: tuple, cotangents: tuple) -> tuple:
    inputs, states_BHNVK, solved_BHNCC = kept
    if states_BHNVK is None:
        # Behind the cotangents, or XLA would find the forward pass's results and keep them.
        inputs, cotangents = jax.lax.optimization_barrier((inputs, cotangents))
        out = _run(plan, inputs, True)
        states_BHNVK, solved_BHNCC = out.states, out.solved
    do_BTHV, d_state_BHKV = cotangents
    d = backward(
        plan,
        _tokens(plan, inputs),
        Kept(states_BHNVK, solved_BHNCC, _flat(do_BTHV), d_state_BHKV.swapaxes(2, 3)),
        interpret(),
    )
    num_heads = do_BTHV.shape[2]
    a_log_HK, dt_bias_HK = (jnp.sum(x, axis=0).reshape(num_heads, -1) for x in (d.a_log, d.dt_bias))

    def of_group(dx: jax.Array, x_BTQK: jax.Array) -> jax.Array:
        batch, num_tokens, num_groups, dim = x_BTQK.shape
        dx_BTQGK = dx.reshape(batch, num_tokens, num_groups, -1, dim)
        return jnp.sum(dx_BTQGK, axis=3).astype(x_BTQK.dtype)

    beta_BTH = d.beta.swapaxes(1, 2).reshape(inputs.beta_BTH.shape)
    d_inputs = KdaInputs(
        q_BTQK=of_group(d.q, inputs.q_BTQK),
        k_BTQK=of_group(d.k, inputs.k_BTQK),
        v_BTHV=d.v.reshape(inputs.v_BTHV.shape),
        gate_BTHK=d.gate.reshape(inputs.gate_BTHK.shape),
        beta_BTH=beta_BTH.astype(inputs.beta_BTH.dtype),
        a_log_H=None if inputs.a_log_H is None else jnp.sum(a_log_HK, axis=1),
        dt_bias_HK=None if inputs.dt_bias_HK is None else dt_bias_HK,
        initial_state_BHKV=d.state.swapaxes(2, 3),
        segment_BT=None,
        lengths_B=None,
    )
    return (d_inputs,)


_kda.defvjp(_forward, _backward, optimize_remat=True)
