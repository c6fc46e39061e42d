"""The transformer's parts: Linear, RMSNorm and the rotary embedding. Every parameter names its logical axes."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxflash.config import RopeScaling
from quant.matmul import Precision, matmul


class Linear(nnx.Module):
    """`y = x W + b` with W of shape (in, out), computed in `dtype`, accumulated in float32 by the hardware.

    W is whatever `quant.matmul` multiplies with: made as an array, and packed once the model is quantised.
    axes: logical names of W's two dims; the bias carries the second. precision: as of `matmul`; "fp8" rounds
    x, a dense W and the cotangent of y to 8 bits before they are multiplied.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        axes: tuple[str, str],
        std: float,
        use_bias: bool = False,
        dtype: str,
        precision: Precision = "compute_dtype",
        param_dtype: str,
        rngs: nnx.Rngs,
    ):
        self.dtype = jnp.dtype(dtype)
        self.precision: Precision = precision
        weight = std * jax.random.normal(rngs.params(), (in_size, out_size), jnp.float32)
        self.weight = nnx.Param(weight.astype(param_dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_size, param_dtype), axes=axes[1:]) if use_bias else None

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        bias = None if self.bias is None else self.bias[...]
        return matmul(x.astype(self.dtype), self.weight.get_value(), bias, precision=self.precision)


@jax.custom_vjp
def matmul_float32(x: Float[Array, "*batch i"], w: Float[Array, "i o"]) -> Float[Array, "*batch o"]:
    """`x @ w` as the tensor cores accumulate it: float32, not rounded to the operands' dtype. For logits.

    The cotangent is rounded to the operands' dtype, as every other matmul's is. jax's own rule would multiply the
    float32 cotangent with 16-bit operands, which runs at half the rate or less.
    """
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _matmul_float32_forward(x, w):
    return matmul_float32(x, w), (x, w)


def _matmul_float32_backward(operands, cotangent):
    x, w = operands
    _, pull = jax.vjp(jnp.matmul, x, w)
    return pull(cotangent.astype(jnp.result_type(x, w)))


matmul_float32.defvjp(_matmul_float32_forward, _matmul_float32_backward)


class RMSNorm(nnx.Module):
    """`y = x / sqrt(mean(x^2) + eps) * scale` over the last dim, in float32, returned in x's dtype (1910.07467)."""

    def __init__(self, size: int, *, eps: float, axes: tuple[str], param_dtype: str):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, param_dtype), axes=axes)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (y * jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)).astype(x.dtype)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, " half"]:
    """Angular frequency of each rotated pair, radians a token: `theta^(-2i/H)`, slowed down for long contexts.

    With Llama-3 scaling, a wave longer than `original_context / low_freq_factor` turns `factor` times slower, one
    shorter than `original_context / high_freq_factor` is kept, and those between are interpolated.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * math.pi)  # turns over the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def rotary_table(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Cosine and sine of every token's angles, float32, ready to broadcast over heads."""
    frequency = rotary_frequencies(head_dim, theta, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b t n h"], cos: Float[Array, "b t 1 half"], sin: Float[Array, "b t 1 half"]
) -> Float[Array, "b t n h"]:
    """Rotates the pairs (i, i + H/2) of every head, in float32 (RoFormer, 2104.09864, in Llama's halves)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
