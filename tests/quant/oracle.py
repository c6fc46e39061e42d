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


def grid(part, *, symmetric, scale_dtype, bits=4):
    """(scale as it is stored, zero) of one group of one column."""
    last, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = min(part.min(), 0.0), max(part.max(), 0.0)
    scale = 2 * max(high, -low) / last if symmetric else (high - low) / last
    stored = np.array(scale if scale > 0 else 1.0).astype(scale_dtype)[()]
    return stored, middle if symmetric else np.clip(np.rint(-low / float(stored)), 0, last)


def code(values, scale, zero, bits=4) -> np.ndarray:
    """The nearest code of a grid, whole numbers in float64."""
    return np.clip(np.rint(values / np.asarray(scale, np.float64)) + zero, 0, 2**bits - 1)


def rounded(w, group, *, symmetric, scale_dtype, bits=4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
            scales[r, n], zeros[r, n] = grid(w[rows, n], symmetric=symmetric, scale_dtype=scale_dtype, bits=bits)
            codes[rows, n] = code(w[rows, n], scales[r, n], zeros[r, n], bits)
    return codes, scales, zeros


def shrunk(part, importance, *, symmetric, scale_dtype, bits=4):
    """`grid` of the share of the range, of 1, .99, ... .21, with the least sum of importance times squared error."""
    ends, tried = np.array([min(part.min(), 0.0), max(part.max(), 0.0)]), []
    for i in range(80):
        scale, zero = grid(ends * (1 - i / 100), symmetric=symmetric, scale_dtype=scale_dtype, bits=bits)
        value = (code(part, scale, zero, bits) - zero) * float(scale)
        tried.append(((importance * (value - part) ** 2).sum(), scale, zero))
    return min(tried, key=lambda t: t[0])[1:]


def pivots(hessian, sequence):
    """What a unit of error in each row costs when it is rounded in this order, the rows after it making up for it."""
    inverse, out = np.linalg.inv(hessian), np.empty(len(hessian))
    for j in sequence:
        out[j] = 1 / inverse[j, j]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return out


def gptq(w, gram, group, *, symmetric, scale_dtype, damping, order, bits=4, mse=False):
    """(codes, scales, zeros, group of every row, Q, sum e^2, damped H) by Optimal Brain Quantization in a fixed order.

    Row j is rounded to q; the others move by -(w_j - q) / P_jj * P[:, j], and the row is eliminated from the inverse
    P of H by one step of Gauss (2208.11580, equations 1 to 3). No factorisation, no blocks.
    """
    w, gram = np.array(w, np.float64), np.asarray(gram, np.float64)
    K, N = w.shape
    group = K if group is None else group
    diagonal = np.diag(gram)
    dead = diagonal == 0
    hessian = gram + np.diag(dead * diagonal[~dead].mean()) + damping * diagonal[~dead].mean() * np.eye(K)
    sequence = np.arange(K) if order == "none" else np.argsort(-diagonal, kind="stable")
    refit = order != "static" and group < K
    kind = {"symmetric": symmetric, "scale_dtype": scale_dtype, "bits": bits}
    costs = pivots(hessian, sequence) if mse else None

    def fitted(rows, n):
        return grid(w[rows, n], **kind) if costs is None else shrunk(w[rows, n], costs[rows], **kind)

    _, scales, zeros = rounded(w, group, **kind)
    if mse:
        for r, n in np.ndindex(scales.shape):
            scales[r, n], zeros[r, n] = fitted(np.arange(K)[r * group : (r + 1) * group], n)
    g_idx = np.arange(K) // group
    if order == "activation" and refit:
        g_idx[sequence] = np.arange(K) // group
    codes, q, squares = np.zeros((K, N), np.uint8), np.zeros((K, N)), 0.0
    inverse = np.linalg.inv(hessian)
    for step, j in enumerate(sequence):
        r = g_idx[j]
        if refit and step % group == 0:
            for n in range(N):
                scales[r, n], zeros[r, n] = fitted(sequence[step : step + group], n)
        codes[j] = code(w[j], scales[r], zeros[r].astype(float), bits)
        q[j] = (codes[j] - zeros[r].astype(float)) * scales[r].astype(float)
        lost = (w[j] - q[j]) / inverse[j, j]
        squares += (lost**2 * inverse[j, j]).sum()
        after = sequence[step + 1 :]
        w[after] -= inverse[after, j][:, None] * lost
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, scales, zeros, g_idx, q, squares, hessian


def propagated(w, x, reference, share, damping) -> np.ndarray:
    """argmin over V of |(x + share (reference - x)) w - x V|^2 + c |w - V|^2, c = damping times x's mean square (of
    inputs that are not always 0), by least squares on the rows themselves: no second moments. In x's precision."""
    squares = (x**2).sum(axis=0)
    ridge = np.sqrt(damping * squares[squares > 0].mean()).astype(x.dtype)
    rows = np.concatenate([x, ridge * np.eye(x.shape[1], dtype=x.dtype)])
    targets = np.concatenate([(x + share * (reference - x)) @ w, ridge * w])
    return np.linalg.lstsq(rows, targets, rcond=None)[0]


def objective(w, q, gram) -> np.ndarray:
    """d^T H d of every column of d = w - q, float64."""
    delta = np.asarray(w, np.float64) - np.asarray(q, np.float64)
    return np.einsum("kn,kl,ln->n", delta, np.asarray(gram, np.float64), delta, optimize=True)
