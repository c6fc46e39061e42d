"""GPTQ checkpoints, version 1 and 2 (AutoGPTQ, GPTQModel, transformers' `quant_method: gptq`).

    qweight  int32 (K / 8, N)     bits 4 j of [r, n] = code[8 r + j, n]
    qzeros   int32 (G, N / 8)     bits 4 j of [g, c] = zero[g, 8 c + j], less 1 in version 1
    scales   float16, bfloat16 (G, N)
    g_idx    int32 (K,)           the group of every row

In version 1 a zero point of 0 is stored as 15: some readers make 0 of it, others 16. Read here it is 0, since zero
points have 4 bits; it is a fault for writing. Source: qlinear of AutoGPTQ and GPTQModel ("checkpoint_format").
"""

import functools

import numpy as np
from jaxtyping import Int32, UInt8

from quant.formats import nibbles
from quant.formats.grid import Format, Grid, LinearSpec, TensorLayout, Tensors, grid_of, where, whole_words

# All zero points 8, as each version stores them.
SYMMETRIC_WORDS = {"gptq": 0x77777777, "gptq_v2": 0x88888888 - (1 << 32)}


def _layout(spec: LinearSpec) -> dict[str, TensorLayout]:
    return {
        "qweight": TensorLayout((-(-spec.K // 8), spec.N), ("int32",)),
        "qzeros": TensorLayout((spec.groups, -(-spec.N // 8)), ("int32",)),
        "scales": TensorLayout((spec.groups, spec.N), ("float16", "bfloat16")),
        "g_idx": TensorLayout((spec.K,), ("int32",)),
    }


def _read_codes(words: Int32[np.ndarray, "a b"], spec: LinearSpec) -> UInt8[np.ndarray, "k n"]:
    return nibbles.unpack(words.T, spec.K).T


def _read_grid(tensors: Tensors, spec: LinearSpec, *, less: int) -> Grid:
    zeros = nibbles.unpack(tensors["qzeros"], spec.N) + np.uint8(less) & 15
    return grid_of(spec, tensors["scales"], zeros, tensors["g_idx"])


def _write(codes: UInt8[np.ndarray, "k n"], grid: Grid, spec: LinearSpec, *, less: int) -> dict[str, np.ndarray]:
    return {
        "qweight": np.ascontiguousarray(nibbles.pack(codes.T).T),
        "qzeros": nibbles.pack(grid.all_zeros() - np.uint8(less) & 15),
        "scales": grid.scales,
        "g_idx": grid.all_groups(),
    }


def _faults(grid: Grid, *, less: int) -> list[str]:
    zero = where(grid.all_zeros() < less, "a zero point of 0, which version 1 has no word for,")
    return whole_words(grid, rows=True) + zero


def _version(name: str, less: int) -> Format:
    return Format(
        name=name,
        codes="qweight",
        columns=(1, 1),
        layout=_layout,
        read_codes=_read_codes,
        read_grid=functools.partial(_read_grid, less=less),
        write=functools.partial(_write, less=less),
        faults=functools.partial(_faults, less=less),
    )


V1 = _version("gptq", 1)
V2 = _version("gptq_v2", 0)


def version_of_zeros(qzeros: Int32[np.ndarray, "groups words"]) -> str | None:
    """Which version these zero points are of, where all are 8; None where they are 8 in neither."""
    return next((name for name, word in SYMMETRIC_WORDS.items() if (qzeros == word).all()), None)
