"""compressed-tensors' `pack-quantized` checkpoints (llm-compressor; `quant_method: compressed-tensors`), of 4 bits.

    weight_packed      int32 (N, ceil(K / 8))     bits 4 j of [n, c] = signed code[8 c + j, n] + 8
    weight_scale       float16, bfloat16 or float32 (N, G)
    weight_shape       int64 or int32 (2,) = N, K
    weight_zero_point  int32 (ceil(N / 8), G)     bits 4 j of [r, g] = signed zero[g, 8 r + j] + 8; asymmetric only
    weight_g_idx       int32 (K,)                 activation order by groups only

The + 8 makes of signed codes and zero points the unsigned ones used here. Source: compressed-tensors,
compressors/pack_quantized.
"""

import numpy as np
from jaxtyping import UInt8

from quant.formats import nibbles
from quant.formats.grid import Format, Grid, LinearSpec, TensorLayout, Tensors, grid_of, whole_groups


def _layout(spec: LinearSpec) -> dict[str, TensorLayout]:
    tensors = {
        "weight_packed": TensorLayout((spec.N, -(-spec.K // 8)), ("int32",)),
        "weight_scale": TensorLayout((spec.N, spec.groups), ("float16", "bfloat16", "float32")),
        "weight_shape": TensorLayout((2,), ("int64", "int32")),
    }
    if spec.zeros:
        tensors["weight_zero_point"] = TensorLayout((-(-spec.N // 8), spec.groups), ("int32",))
    if spec.ordered:
        tensors["weight_g_idx"] = TensorLayout((spec.K,), ("int32",))
    return tensors


def _read_grid(tensors: Tensors, spec: LinearSpec) -> Grid:
    if tensors["weight_shape"].tolist() != [spec.N, spec.K]:
        raise ValueError(
            f"weight_shape holds {tensors['weight_shape'].tolist()}, the configuration makes it {[spec.N, spec.K]} - "
            "one of the two is of another model. Fetch both again."
        )
    zeros = nibbles.unpack(tensors["weight_zero_point"].T, spec.N) if spec.zeros else None
    return grid_of(spec, tensors["weight_scale"].T, zeros, tensors["weight_g_idx"] if spec.ordered else None)


def _write(codes: UInt8[np.ndarray, "k n"], grid: Grid, spec: LinearSpec) -> dict[str, np.ndarray]:
    tensors = {
        "weight_packed": nibbles.pack(codes.T),
        "weight_scale": np.ascontiguousarray(grid.scales.T),
        "weight_shape": np.array([spec.N, spec.K], np.int64),
    }
    if spec.zeros:
        tensors["weight_zero_point"] = np.ascontiguousarray(nibbles.pack(grid.all_zeros()).T)
    if spec.ordered:
        tensors["weight_g_idx"] = grid.all_groups()
    return tensors


FORMAT = Format(
    name="compressed-tensors",
    codes="weight_packed",
    columns=(0, 1),
    layout=_layout,
    read_codes=nibbles.unpack_columns,
    read_grid=_read_grid,
    write=_write,
    faults=whole_groups,
)
