"""Readers of quantised checkpoints by the statements of their formats alone, with nothing of quant/formats.

Each takes the tensors of one linear by their suffix, and gives its dense weight W (in, out) in float64, one element at
a time, so that there is no clever reshaping to get wrong twice.
"""

import numpy as np

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def nibble(word, i):
    return (int(word) >> (4 * i)) & 15


def gptq(t, *, version):
    rows, columns = t["qweight"].shape[0] * 8, t["qweight"].shape[1]
    w = np.empty((rows, columns))
    for n in range(columns):
        for k in range(rows):
            g = t["g_idx"][k]
            q = nibble(t["qweight"][k // 8, n], k % 8)
            stored = nibble(t["qzeros"][g, n // 8], n % 8)
            zero = (stored + 1) % 16 if version == 1 else stored
            w[k, n] = float(t["scales"][g, n]) * (q - zero)
    return w


def awq(t, *, group):
    rows, columns = t["qweight"].shape[0], t["qweight"].shape[1] * 8
    place = [AWQ_ORDER.index(j) for j in range(8)]
    assert place == [0, 4, 1, 5, 2, 6, 3, 7]
    w = np.empty((rows, columns))
    for n in range(columns):
        for k in range(rows):
            g = k // group
            q, z = (nibble(t[name][i, n // 8], place[n % 8]) for name, i in (("qweight", k), ("qzeros", g)))
            w[k, n] = (q - z) * float(t["scales"][g, n])
    return w


def pack_quantized(t, *, group):
    columns, rows = (int(size) for size in t["weight_shape"])
    w = np.empty((rows, columns))
    for n in range(columns):
        for k in range(rows):
            g = int(t["weight_g_idx"][k]) if "weight_g_idx" in t else k // group
            q = nibble(t["weight_packed"][n, k // 8], k % 8) - 8
            z = nibble(t["weight_zero_point"][n // 8, g], n % 8) - 8 if "weight_zero_point" in t else 0
            w[k, n] = float(t["weight_scale"][n, g]) * (q - z)
    return w


def gemv_tensors(codes, scales, zeros, group):
    """The tensors of AWQ's GEMV version, which is not written by the product."""
    (rows, columns), groups = codes.shape, len(scales)
    m = 1 if group >= 128 else 2 if group == 64 else 4
    words = (groups + 7) // 8
    words = (words + m - 1) // m * m
    t = {
        "qweight": np.zeros((columns, rows // 8), np.int64),
        "qzeros": np.zeros((columns, words), np.int64),
        "scales": np.zeros((columns, 8 * words), np.float16),
    }
    for n in range(columns):
        for k in range(rows):
            t["qweight"][n, k // 8] |= int(codes[k, n]) << 4 * (k % 8)
        for g in range(groups):
            t["qzeros"][n, g // 8] |= int(zeros[g, n]) << 4 * (g % 8)
            t["scales"][n, g] = scales[g, n]
    return {name: (a.astype(np.uint32).view(np.int32) if a.dtype == np.int64 else a) for name, a in t.items()}


def fp8(values, scales, block):
    """W^T as the file has it, (out, in): value times the scale of its block, one element at a time."""
    w = np.empty(values.shape)
    for n in range(values.shape[0]):
        for k in range(values.shape[1]):
            w[n, k] = float(values[n, k]) * float(scales[n // block[0], k // block[1]])
    return w
