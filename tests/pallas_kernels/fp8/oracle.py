"""8-bit floats and their products in float64 NumPy, from the definition of the formats (2209.05433, table 1)."""

import numpy as np

# exponent bits, mantissa bits, bias, largest
FORMATS = {"float8_e4m3fn": (4, 3, 7, 448.0), "float8_e5m2": (5, 2, 15, 57344.0)}


def grid(dtype: str) -> np.ndarray:
    """All finite values that are not negative, in order; the index is the code's bits."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[dtype]
    bits = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = bits >> mantissa_bits, (bits & (2**mantissa_bits - 1)) / 2.0**mantissa_bits
    values = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return values[values <= largest]


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest value of the format, ties to the even code, at most the largest in size."""
    table, size = grid(dtype), np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.sign(values) * np.where(up, high, low)


def expanded(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of every element."""
    rows, columns = (np.arange(size) // part for size, part in zip(shape, block, strict=True))
    return scales.astype(np.float64)[rows[:, None], columns[None, :]]


def values(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    return codes.astype(np.float64) * expanded(scales, block, codes.shape)  # pyright: ignore[reportArgumentType]
