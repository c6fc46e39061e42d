"""AWQ checkpoints (AutoAWQ; transformers' `quant_method: awq`).

GEMM, where bits 4 i of a word hold column 8 c + ORDER[i]:

    qweight  int32 (K, N / 8)    codes
    qzeros   int32 (G, N / 8)    zero points
    scales   float16 (G, N)

GEMV, which is read only: words along K in the natural order, and rows of zero points of a padded length,
Z = ceil(ceil(G / 8) / m) m words with m = 1, 2, 4 for groups of at least 128, 64 and less:

    qweight  int32 (N, K / 8)
    qzeros   int32 (N, Z)
    scales   float16 (N, 8 Z)

Zero points are always stored, and no group of rows but k // group. Source: AutoAWQ, awq/utils/packing_utils.py and
awq/modules/linear.
"""

import numpy as np
from jaxtyping import Float16, Int32, UInt8

from quant.formats import nibbles
from quant.formats.grid import (
    Format,
    Grid,
    LinearSpec,
    TensorLayout,
    Tensors,
    grid_of,
    where,
    whole_groups,
    whole_words,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("float16", "bfloat16")  # AutoAWQ writes float16; GPTQModel's copies of bfloat16 models do not


def _gemm_layout(spec: LinearSpec) -> dict[str, TensorLayout]:
    words = -(-spec.N // 8)
    return {
        "qweight": TensorLayout((spec.K, words), ("int32",)),
        "qzeros": TensorLayout((spec.groups, words), ("int32",)),
        "scales": TensorLayout((spec.groups, spec.N), _SCALES),
    }


def _read_gemm_codes(words: Int32[np.ndarray, "a b"], spec: LinearSpec) -> UInt8[np.ndarray, "k n"]:
    return nibbles.unpack(words, spec.N, ORDER)


def _read_gemm_grid(tensors: Tensors, spec: LinearSpec) -> Grid:
    return grid_of(spec, tensors["scales"], nibbles.unpack(tensors["qzeros"], spec.N, ORDER), None)


def _write_gemm(codes: UInt8[np.ndarray, "k n"], grid: Grid, spec: LinearSpec) -> dict[str, np.ndarray]:
    return {
        "qweight": nibbles.pack(codes, ORDER),
        "qzeros": nibbles.pack(grid.all_zeros(), ORDER),
        "scales": _halves(grid),
    }


def _halves(grid: Grid) -> Float16[np.ndarray, "groups n"]:
    with np.errstate(over="ignore"):  # `faults` tells
        return grid.scales.astype(np.float16)


def _faults(grid: Grid) -> list[str]:
    inexact = _halves(grid).astype(np.float32) != grid.scales.astype(np.float32)
    order = [] if grid.g_idx is None else ["rows in activation order (g_idx)"]
    inside = whole_words(grid, rows=False) + whole_groups(grid)
    return order + inside + where(inexact, f"a {grid.scales.dtype} scale that float16 does not hold")


GEMM = Format(
    name="awq",
    codes="qweight",
    columns=(1, 8),
    layout=_gemm_layout,
    read_codes=_read_gemm_codes,
    read_grid=_read_gemm_grid,
    write=_write_gemm,
    faults=_faults,
    scales_written_as="float16",
)


def _gemv_layout(spec: LinearSpec) -> dict[str, TensorLayout]:
    multiple = 1 if spec.group >= 128 else 2 if spec.group >= 64 else 4
    words = -(-spec.groups // 8)
    words = -(-words // multiple) * multiple
    return {
        "qweight": TensorLayout((spec.N, -(-spec.K // 8)), ("int32",)),
        "qzeros": TensorLayout((spec.N, words), ("int32",)),
        "scales": TensorLayout((spec.N, 8 * words), _SCALES),
    }


def _read_gemv_grid(tensors: Tensors, spec: LinearSpec) -> Grid:
    zeros = nibbles.unpack(tensors["qzeros"], spec.groups)
    return grid_of(spec, tensors["scales"][:, : spec.groups].T, zeros.T, None)


GEMV = Format(
    name="awq_gemv",
    codes="qweight",
    columns=(0, 1),
    layout=_gemv_layout,
    read_codes=nibbles.unpack_columns,
    read_grid=_read_gemv_grid,
)
