"""A 4-bit weight, its product and its rounding in NumPy, written from the formulas, row by row. No jax.

With `precision` the weight is rounded to that dtype and sums run in float32 from left to right: the same-precision
reference against which tests/tolerance.py measures.
"""

import numpy as np


def weight(codes, scales, zeros, group) -> np.ndarray:
    """W[k, n] = (codes[k, n] - zeros[r, n]) * scales[r, n] with r = k // group, in float64."""
    w = np.empty(codes.shape)
    for k in range(len(codes)):
        r = k // group
        zero = 8.0 if zeros is None else np.float64(zeros[r])
        w[k] = (codes[k].astype(np.float64) - zero) * scales[r].astype(np.float64)
    return w


def product(x, w, precision=None) -> np.ndarray:
    """x W of a float64 W."""
    if precision is None:
        return np.asarray(x).astype(np.float64) @ w
    x, w = np.asarray(x).astype(np.float32), w.astype(precision).astype(np.float32)
    y = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(len(w)):
        y += x[:, k : k + 1] * w[k]
    return y.astype(precision)


def rounded(w, group, *, symmetric, scale_dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, zeros) of the code nearest to every weight, one group of one column at a time."""
    w = np.asarray(w, np.float64)
    K, N = w.shape
    group = K if group is None else group
    groups = -(-K // group)
    codes = np.zeros((K, N), np.uint8)
    scales, zeros = np.zeros((groups, N), scale_dtype), np.zeros((groups, N), np.uint8)
    for r in range(groups):
        rows = slice(r * group, (r + 1) * group)
        for n in range(N):
            part = w[rows, n]
            low, high = min(part.min(), 0.0), max(part.max(), 0.0)
            scale = 2 * max(high, -low) / 15 if symmetric else (high - low) / 15
            scales[r, n] = scale if scale > 0 else 1.0
            step = float(scales[r, n])
            zeros[r, n] = 8 if symmetric else np.clip(np.rint(-low / step), 0, 15)
            codes[rows, n] = np.clip(np.rint(part / step) + zeros[r, n], 0, 15)
    return codes, scales, zeros
