"""What custom gradients of kernels need of JAX: a clear refusal, and a way round a failure."""

from collections.abc import Callable

import jax


def differentiable_once(
    implementation: str, nondiff_argnums: tuple[int, ...]
) -> Callable[[Callable], Callable]:
    """A decorator for what a custom_vjp runs: differentiating that again is refused by name.

    nondiff_argnums: the arguments that are no arrays, as for jax.custom_jvp.
    """

    def refuse(*_: object) -> tuple:
        raise NotImplementedError(
            f"kda in implementation {implementation!r} can be differentiated once, and by reverse "
            "mode: use implementation='xla' for more"
        )

    def decorate(function: Callable) -> Callable:
        refusing = jax.custom_jvp(function, nondiff_argnums=nondiff_argnums)
        refusing.defjvp(refuse)
        return refusing

    return decorate


def used_together(*results: jax.Array) -> tuple[jax.Array, ...]:
    """The results of a custom_vjp with optimize_remat, for which JAX (0.10 to 0.12) fails in a
    jax.remat within a jax.remat if some of them are used and others not."""
    return tuple(jax.lax.optimization_barrier(results))
