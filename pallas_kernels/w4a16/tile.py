"""The mathematics of a 4-bit weight, as pure functions of arrays."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

SYMMETRIC_ZERO = 8


def values(
    codes: UInt8[Array, "*codes"], scales: Float[Array, "*scales"], zeros: UInt8[Array, "*scales"] | None, *, dtype: str
) -> Float[Array, "*codes"]:
    """(codes - zeros) * scales, rounded once, to `dtype`; the scales broadcast to the codes.

    Whole numbers up to 15 times a scale of 8 or 11 bits are exact in float32, so that the only rounding is the last.
    """
    zero = SYMMETRIC_ZERO if zeros is None else zeros.astype(jnp.int8)
    return ((codes.astype(jnp.int8) - zero).astype(jnp.float32) * scales.astype(jnp.float32)).astype(dtype)


def dequantize(
    codes: UInt8[Array, "k n"],
    scales: Float[Array, "groups n"],
    zeros: UInt8[Array, "groups n"] | None,
    *,
    group: int,
    dtype: str,
) -> Float[Array, "k n"]:
    """W[k, n] = (codes[k, n] - zeros[k // group, n]) * scales[k // group, n], rounded once, to `dtype`."""
    rows = codes.shape[0]
    by_row = (None if a is None else repeated(a, group, rows, axis=0) for a in (scales, zeros))
    return values(codes, *by_row, dtype=dtype)  # pyright: ignore[reportArgumentType]


def repeated(per_group: Array, count: int, size: int, *, axis: int) -> Array:
    """Each group's value `count` times, as many as make `size`; one value for all is left to broadcast."""
    if per_group.shape[axis] == 1:
        return per_group
    repeats = jnp.repeat(per_group, count, axis=axis)
    return repeats[:size] if axis == 0 else repeats[:, :size]
