"""A word to whoever asks kernels for more derivatives than they have."""

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
