"""What the entries of KDA refuse, and in which words.

Letters: B batch, T time, H value heads, Q query/key heads, K key dim, V value dim.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

GATE_KINDS = ("bounded", "softplus", "log_decay")

# The arguments of the entries, by the dtypes that they take.
_STATES = ("initial_state", "state")
_INTEGERS = ("segment_ids", "lengths")
_MASKS = ("active",)


def check_arrays(arrays: Mapping[str, jax.Array | None], *, has_time: bool) -> None:
    """Raises ValueError for a wrong shape or dtype; arrays are under their argument's names."""
    _check_shapes(arrays, has_time)
    for name, x in arrays.items():
        if x is not None:
            _check_dtype(name, x.dtype)


def _check_shapes(arrays: Mapping[str, jax.Array | None], has_time: bool) -> None:
    layout, example = "[batch, heads, dim]", (8, 4, 32)
    if has_time:
        layout, example = "[batch, time, heads, dim]", (1, 64, 4, 32)
    q, v = arrays["q"], arrays["v"]
    for name, x in (("q", q), ("v", v)):
        if x.ndim != len(example) or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be {layout} with no empty dim, such as "
                f"{example}"
            )
    *tokens, num_qk_heads, key_dim = q.shape
    num_heads, value_dim = v.shape[-2:]
    if num_heads % num_qk_heads:
        raise ValueError(
            f"v has {num_heads} heads and q has {num_qk_heads}; v's must be a multiple of q's, "
            f"such as {num_qk_heads} or {2 * num_qk_heads}"
        )
    state = (tokens[0], num_heads, key_dim, value_dim)
    expected = {
        "q": q.shape,
        "k": q.shape,
        "v": (*tokens, num_heads, value_dim),
        "gate": (*tokens, num_heads, key_dim),
        "beta": (*tokens, num_heads),
        "a_log": (num_heads,),
        "dt_bias": (num_heads, key_dim),
        "initial_state": state,
        "state": state,
        "segment_ids": tuple(tokens),
        "lengths": (tokens[0],),
        "active": (tokens[0],),
    }
    for name, x in arrays.items():
        if x is not None and x.shape != expected[name]:
            raise ValueError(
                f"{name} has shape {x.shape}; with q {q.shape} and v {v.shape} it must be "
                f"{expected[name]}"
            )


def _check_dtype(name: str, dtype: jnp.dtype) -> None:
    if name in _STATES:
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(f"{name} has dtype {dtype}; states are kept in float32: cast it")
    elif name in _INTEGERS:
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {dtype}; it must hold integers, such as int32")
    elif name in _MASKS:
        if dtype != jnp.bool_:
            raise ValueError(f"{name} has dtype {dtype}; it must be bool: compare it with 0")
    elif dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"{name} has dtype {dtype}; KDA takes float32, bfloat16 or float64 (the decay "
            "factors overflow float16): cast it to bfloat16"
        )


def check_gate(
    gate_kind: str,
    lower_bound: float | None,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
) -> None:
    """Raises ValueError for a gate that is unknown or contradicts itself."""
    if gate_kind not in GATE_KINDS:
        raise ValueError(f"gate_kind is {gate_kind!r}; it must be one of {list(GATE_KINDS)}")
    if lower_bound is None and gate_kind == "bounded":
        raise ValueError(
            "lower_bound is None; the bounded gate needs a negative number, such as -5.0"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}; it must be negative, such as -5.0")
    if gate_kind == "log_decay" and not (a_log is None and dt_bias is None):
        raise ValueError(
            "gate_kind 'log_decay' takes the gate as the finished log-decay: leave out a_log and "
            "dt_bias, or use gate_kind 'bounded' or 'softplus'"
        )


def check_implementation(name: str | None, known: Iterable[str]) -> None:
    """Raises ValueError for an implementation that is not there."""
    if name is not None and name not in known:
        raise ValueError(f"implementation is {name!r}; it must be None or one of {sorted(known)}")
