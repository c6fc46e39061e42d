"""Makes a differentiable function of any implementation of the product; the exact path computes its derivatives.

    tangent of y = dx W + x dW,    dW only where scales move

Reverse mode transposes that (dx = dy W^T) and never evaluates it. It unpacks W again (`jax.checkpoint`), so that what
is kept from the forward pass are the packed arrays, which live anyway, and never 16-bit weights.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.w4a16.spec import W4A16Spec


def differentiable(forward: Callable[..., Any], *, exact: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(spec, x, words, scales, zeros)` with the derivatives of `exact` by x and scales, of any order and mode.

    Both are module-level functions of the same arguments; `exact` is one that jax differentiates by itself.
    """

    # Also for calls outside of jit: compiled once a spec, and W is never held in pieces.
    forward, exact = (jax.jit(function, static_argnums=0) for function in (forward, exact))

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def product(
        spec: W4A16Spec,
        x: Float[Array, "m k"],
        words: Int32[Array, "column_tiles row_tiles 8 64"],
        scales: Float[Array, "column_tiles groups 64"],
        zeros: UInt8[Array, "column_tiles groups 64"] | None,
    ) -> Float[Array, "m n"]:
        return forward(spec, x, words, scales, zeros)

    def tangent(spec: W4A16Spec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        x, words, scales, zeros = primals
        floating, moved = (x, scales), (tangents[0], tangents[2])
        where = [i for i, t in enumerate(moved) if not isinstance(t, SymbolicZero)]

        @jax.checkpoint
        def of_moved(words: Array, zeros: Array | None, fixed: Sequence[Array], *moving: Array) -> Array:
            full = list(fixed)
            for i, value in zip(where, moving, strict=True):
                full[i] = value
            return exact(spec, full[0], words, full[1], zeros)

        at = functools.partial(of_moved, words, zeros, floating)
        _, moves = jax.jvp(at, [floating[i] for i in where], [moved[i] for i in where])
        return product(spec, *primals), moves

    product.defjvp(tangent, symbolic_zeros=True)
    return product
