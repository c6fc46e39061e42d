"""The product in plain jax.numpy: unpack the whole weight, round it to 16 bits, multiply. Exact, and everywhere.

W is unpacked as W^T with its rows in the order of their words, and x is brought into that order: x is the smaller one.
"""

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.device import Device
from pallas_kernels.w4a16 import layout, tile
from pallas_kernels.w4a16.spec import W4A16Spec


def matmul(
    spec: W4A16Spec,
    x: Float[Array, "m k"],
    words: Int32[Array, "column_tiles row_tiles 8 64"],
    scales: Float[Array, "column_tiles groups 64"],
    zeros: UInt8[Array, "column_tiles groups 64"] | None,
) -> Float[Array, "m n"]:
    """y = x W with W rounded to `spec.operand_dtype`, summed in float32 by the hardware and rounded to x's dtype.

    A float32 result is not asked for where operands have 16 bits: jax would transpose that into a product of float32
    cotangents, at half the rate or less.
    """
    w = columns(spec, words, scales, zeros)
    x = layout.in_word_order(jnp.pad(x.astype(w.dtype), ((0, 0), (0, spec.padded_K - spec.K))))
    # Float32 operands are multiplied as such; 16 bits fit whole into whatever the hardware multiplies.
    precision = Precision.HIGHEST if spec.operand_dtype == "float32" else Precision.DEFAULT
    return jnp.matmul(x, w.T, precision=precision)[:, : spec.N].astype(spec.dtype)


def columns(
    spec: W4A16Spec,
    words: Int32[Array, "column_tiles row_tiles 8 64"],
    scales: Float[Array, "column_tiles groups 64"],
    zeros: UInt8[Array, "column_tiles groups 64"] | None,
) -> Float[Array, "padded_n padded_k"]:
    """W^T in `spec.operand_dtype`, rows of W in the order of `layout.unpack_words`; 0 in its padding."""
    steps = spec.padded_K // 16  # rows of W that lie together in both orders and share a group

    zeros = None if zeros is None else layout.zeros_by_column(zeros)

    def by_step(per_group: Array) -> Array:
        per_group = per_group.swapaxes(1, 2).reshape(spec.padded_N, spec.groups)
        every = tile.repeated(per_group, spec.group // 16, steps, axis=1)
        return jnp.broadcast_to(every, (spec.padded_N, steps)).reshape(spec.padded_N, -1, 1, 4, 1)

    codes = layout.unpack_words(words).reshape(spec.padded_N, -1, 4, 4, 4)  # tile, q, v, (jj e)
    w = tile.values(codes, by_step(scales), None if zeros is None else by_step(zeros), dtype=spec.operand_dtype)
    w = w.reshape(spec.padded_N, spec.padded_K)
    if spec.K == spec.padded_K:
        return w
    row = layout.in_word_order(jnp.arange(spec.padded_K)[None, :])
    return jnp.where(row < spec.K, w, 0)


def why_not(spec: W4A16Spec, device: Device) -> str | None:
    """Nothing speaks against it."""
    return None
