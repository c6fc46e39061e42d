"""FP8 weights (e4m3fn) with a scale for the tensor, for every row of the file, or for every block.

    weight        float8_e4m3fn (N, K)
    weight_scale  floating (), (1,), (1, 1), (N,), (N, 1) or (ceil(N / rows), ceil(K / columns))

    w[n, k] = weight[n, k] * scale of its row and block

compressed-tensors' `float-quantized` calls the scale `weight_scale`, DeepSeek's `quant_method: fp8`
`weight_scale_inv`, and multiplies with it all the same. Last blocks may be smaller. A value has 4 significant bits and
the product is rounded once to float32: exact for bfloat16 and float16 scales, and whatever scale has 20 bits.

Casts to e4m3fn do not saturate (464.1 becomes NaN), so values are clipped before each. Source: DeepSeek-V3,
inference/kernel.py; compressed-tensors, compressors/quantized_compressors.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
BLOCK = (128, 128)


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight (N, K) in blocks."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scale_block(
    shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """(rows, columns) that share a scale, from the shapes of weight and scales; None where they do not go together.

    block: what the configuration says of blocks; None: it has none, and scales are of the tensor or of rows.
    """
    if block is not None:
        return block if scales == scale_shape(shape, block) else None
    if scales in ((), (1,), (1, 1)):
        return shape
    return (1, shape[1]) if scales in ((shape[0],), (shape[0], 1)) else None


def dequantize(
    values: Float[np.ndarray, "n k"],
    scales: Float[np.ndarray, "..."],
    *,
    block: tuple[int, int],
    start: tuple[int, int] = (0, 0),
) -> Float32[np.ndarray, "n k"]:
    """w of a rectangle of the weight whose first element is [start]; scales: those of the whole weight."""
    rows, columns = (np.arange(n) + first for n, first in zip(values.shape, start, strict=True))
    by_block = scales.reshape(scales.size, 1) if scales.ndim < 2 else scales
    picked = by_block[rows[:, None] // block[0], columns[None, :] // block[1]]
    return values.astype(np.float32) * picked.astype(np.float32)


def amax_scales(weight: Float[np.ndarray, "n k"], block: tuple[int, int]) -> Float32[np.ndarray, "rows columns"]:
    """max|w| / 448 of every block, 1 where all of it is 0."""
    (n, k), (rows, columns) = weight.shape, scale_shape(weight.shape, block)
    padded = np.pad(np.abs(weight.astype(np.float32)), ((0, rows * block[0] - n), (0, columns * block[1] - k)))
    largest = padded.reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))
    return np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST)).astype(np.float32)


def quantize(
    weight: Float[np.ndarray, "n k"], scales: Float[np.ndarray, "..."], *, block: tuple[int, int]
) -> Float[np.ndarray, "n k"]:
    """The e4m3fn value nearest to w / scale, at most 448 in size.

    Raises ValueError for weights that are not finite: e4m3fn has no infinity.
    """
    if not np.isfinite(weight).all():
        raise ValueError("the weight has NaN or infinite entries - no value is near. Repair the checkpoint.")
    step = dequantize(np.ones(weight.shape, np.float32), scales, block=block)
    return np.clip(weight.astype(np.float32) / step, -LARGEST, LARGEST).astype(DTYPE)
