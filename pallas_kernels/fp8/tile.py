"""The mathematics of 8-bit floating-point operands, as pure functions of arrays.

e4m3fn has no infinity and e5m2 a small one, and neither cast saturates: 464.1 becomes NaN in e4m3fn. Hence every cast
here comes after a clip. Source: Micikevicius et al., FP8 formats for deep learning, 2209.05433.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.fp8.spec import LARGEST, scale_shape


def scales_of(largest: Float[Array, "*blocks"], dtype: str) -> Float[Array, "*blocks"]:
    """The float32 scale of blocks whose largest magnitude is known: it maps to the largest of `dtype`; 1 where it is 0.

    Never so small that its inverse overflows: blocks below 5e-36 do not use all of the range.
    """
    scales = jnp.maximum(largest.astype(jnp.float32) / LARGEST[dtype], np.finfo(np.float32).tiny)
    return jnp.where(largest == 0, 1.0, scales)


def cast(values: Float[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """The nearest of `dtype`, at most its largest in size. NaN stays NaN, and no other value becomes it."""
    return jnp.clip(values, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)


def quantize(
    values: Float[Array, "rows columns"], block: tuple[int, int], dtype: str, *, power_of_two: bool = False
) -> tuple[Float[Array, "rows columns"], Float[Array, "row_blocks column_blocks"]]:
    """(codes, scales): codes = cast(values * (1 / scale)), with one scale for every block.

    codes * scale differs from a value by at most 2^-4 of its size in e4m3fn, 2^-3 in e5m2, or half of the smallest code
    (2^-10 and 2^-17) times the scale. A block of zeros gives zeros, exactly.
    power_of_two: scales are rounded up to one, so that bfloat16 holds a code times its scale.
    """
    scales = block_scales(values, block, dtype, power_of_two=power_of_two)
    return encode(values, scales, block, dtype), scales


def block_scales(
    values: Float[Array, "rows columns"], block: tuple[int, int], dtype: str, *, power_of_two: bool = False
) -> Float[Array, "row_blocks column_blocks"]:
    """The scales of `quantize`."""
    # In two steps that XLA must not make one: it takes the first into what computes a row, as a norm does, and would
    # write and read all of `values` for a maximum over the whole (H200 program of 8B width: 1 GB a layer and pass).
    of_rows = jax.lax.optimization_barrier(jnp.abs(by_block(values, block)).max(axis=3))
    scales = scales_of(of_rows.max(axis=1), dtype)
    return _rounded_up(scales) if power_of_two else scales


def encode(
    values: Float[Array, "rows columns"],
    scales: Float[Array, "row_blocks column_blocks"],
    block: tuple[int, int],
    dtype: str,
) -> Float[Array, "rows columns"]:
    """The codes of `quantize`, of scales that are known."""
    blocks = by_block(values, block)
    codes = cast(blocks.astype(jnp.float32) * (1.0 / scales)[:, None, :, None], dtype)
    return _whole(codes, values.shape)


def _rounded_up(scales: Float[Array, "*blocks"]) -> Float[Array, "*blocks"]:
    """To powers of two, by the bits of a normal float32: a mantissa that is not 0 carries into the exponent."""
    mantissa = 0x007FFFFF
    bits = jax.lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


def dequantize(
    codes: Float[Array, "rows columns"],
    scales: Float[Array, "row_blocks column_blocks"],
    block: tuple[int, int],
    dtype: str = "float32",
) -> Float[Array, "rows columns"]:
    """codes * scale of their block, multiplied in float32 and rounded to `dtype`."""
    values = by_block(codes, block).astype(jnp.float32) * scales[:, None, :, None]
    return _whole(values.astype(dtype), codes.shape)


def by_block(values: Array, block: tuple[int, int]) -> Array:
    """(rows, columns) as (row blocks, rows of a block, column blocks, columns of a block), filled up with zeros."""
    rows, columns = scale_shape((values.shape[0], values.shape[1]), block)
    height, width = (max(size, 1) for size in block)
    padding = ((0, rows * height - values.shape[0]), (0, columns * width - values.shape[1]))
    values = jnp.pad(values, padding) if any(map(any, padding)) else values
    return values.reshape(rows, height, columns, width)


def _whole(blocks: Array, shape: tuple[int, ...]) -> Array:
    rows, height, columns, width = blocks.shape
    return blocks.reshape(rows * height, columns * width)[: shape[0], : shape[1]]
