"""What one thread of a warpgroup computes with 32-bit registers, as MLIR: the words of inline PTX functions."""

import functools
from typing import Any

import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental.mosaic.gpu import utils as mgpu


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    return ir.F32Type.get()


def const(value: int):
    return mgpu.c(value, i32())


def add(*terms):
    return functools.reduce(arith.addi, terms)


def times(x, factor: int):
    return arith.muli(x, const(factor))


def div_rem(x, by: int):
    return arith.divui(x, const(by)), arith.remui(x, const(by))


def prmt(low, high, selector: int):
    """The bytes of the register pair that the hex digits of the selector name, the last one lowest."""
    return llvm.inline_asm(i32(), [low, high], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r")


def advance(pointer, byte):
    """The pointer so many bytes on."""
    return mgpu.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8))


def thread_id():
    """Of its warpgroup."""
    return arith.andi(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)), const(127))


def lane_id():
    return arith.andi(thread_id(), const(31))


def warp_id():
    return arith.shrui(thread_id(), const(5))


def accumulator_places(layout, shape: tuple[int, ...]) -> list[tuple[Any, int, int]]:
    """(index of a register, block of 8 columns, upper or lower 8 rows) of an array (64, columns) in WGMMA layout."""
    strides = layout.tiling.tile_strides(tuple(mgpu.get_contiguous_strides(shape)))
    found = []
    for index in np.ndindex(layout.registers_shape(shape)):
        row, column = divmod(sum(a * b for a, b in zip(index, strides, strict=True)), shape[1])
        found.append((index, column // 8, row // 8))
    return found
