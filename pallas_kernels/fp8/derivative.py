"""Derivatives of products that round their operands to 8 bits.

`straight_through`, for weights that are in 8 bits already: those of the same product of unrounded activations,

    tangent of y = dx W^T,    W in x's dtype, made anew

`trained`, for weights that are being trained: every product of both passes has 8-bit operands with one scale a tensor,
of the values at hand, a power of two (Micikevicius et al., FP8 formats for deep learning, 2209.05433; current scaling),

    y  = x8 w8        e4m3 x e4m3
    dx = dy8 w8^T     e5m2 x e4m3      dw = x8^T dy8     e4m3 x e5m2

so that x, w and dy are rounded once each. y and dx are summed by the tensor core alone (`fast_accumulation`), dw is
not: such sums stop growing where they exceed a product some 10,000 times, and dw sums over tokens, of which there is no
end. Operands lie along the dim that is summed over, hence twice each in memory. A pass over x or w finds its scale;
where the backward pass computes codes again (`jax.checkpoint`), a policy that saves the name `SCALE` spares it a second
one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from pallas_kernels.fp8 import tile
from pallas_kernels.fp8.spec import E4M3, E5M2, OP, Fp8Spec, w_block

SCALE = "fp8_scale"


def straight_through(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(spec, x, w, w_scales)`, differentiable by x in any order and mode."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def product(
        spec: Fp8Spec,
        x: Float[Array, "m k"],
        w: Float[Array, "n k"],
        w_scales: Float[Array, "n_blocks k_blocks"],
    ) -> Float[Array, "m n"]:
        return forward(spec, x, w, w_scales)

    def tangent(spec: Fp8Spec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        if not all(isinstance(moved, SymbolicZero) for moved in tangents[1:]):
            raise ValueError(
                f"{OP}: differentiated by the codes or scales of a weight - rounded numbers have no slope. Train a "
                "dense weight, or hold this one fixed (jax.lax.stop_gradient)."
            )
        x, w, w_scales = primals

        @jax.checkpoint  # what is kept for the reverse pass are the codes, never W
        def moves(w: Array, w_scales: Array, dx: Array) -> Array:
            values = tile.dequantize(w, w_scales, w_block(spec.scaling, (spec.N, spec.K)), dx.dtype.name)
            return (dx @ values.T).astype(spec.dtype)

        return product(spec, x, w, w_scales), moves(w, w_scales, tangents[0])

    product.defjvp(tangent, symbolic_zeros=True)
    return product


def trained(product: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """y (M, N) of x (M, K) and w (K, N) for training; `product(a, a_scale, b, b_scale, dtype, fast_accumulation=)` of
    codes along K."""

    @jax.custom_vjp
    def train(x: Float[Array, "m k"], w: Float[Array, "k n"]) -> Float[Array, "m n"]:
        return forward(x, w)[0]

    def forward(x: Array, w: Array) -> tuple[Array, Any]:
        (x8, x_scale), (w8, w_scale) = (_rounded(value, E4M3) for value in (x, w))
        y = product(x8, x_scale, w8.T, w_scale, x.dtype, fast_accumulation=True)
        # A value without bytes: w's own dtype, which its gradient takes.
        return y, (x8.T, x_scale, w8, w_scale, jnp.zeros(0, w.dtype))

    def backward(kept: Any, dy: Array) -> tuple[Array, Array]:
        x_across, x_scale, w_across, w_scale, like = kept
        dy8, dy_scale = _rounded(dy, E5M2)
        dx = product(dy8, dy_scale, w_across, w_scale, dy.dtype, fast_accumulation=True)
        dw = product(x_across, x_scale, dy8.T, dy_scale, dy.dtype, fast_accumulation=False)
        return dx, dw.astype(like.dtype)

    train.defvjp(forward, backward)
    return train


def _rounded(values: Array, dtype: str) -> tuple[Array, Array]:
    block = values.shape[0], values.shape[1]
    scale = checkpoint_name(tile.block_scales(values, block, dtype, power_of_two=True), SCALE)
    return tile.encode(values, scale, block, dtype), scale
