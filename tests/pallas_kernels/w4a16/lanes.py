"""The 128 threads of a warpgroup in NumPy: runs what inline functions of pallas_kernels/mosaic_int4*.py emit.

The interpreter runs their stand-ins; here every emitted operation is carried out for each lane, by the PTX manual's
description of the fragments of ldmatrix and mma.sync and of 128-byte swizzled shared memory. One flat memory of bytes;
a pointer is an address of each lane.
"""

import re
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu

from pallas_kernels import mosaic_int4, mosaic_int4_operands, mosaic_int4_sums, mosaic_lanes

LANES = np.arange(128)
_EMITTING = (mosaic_int4, mosaic_int4_operands, mosaic_int4_sums, mosaic_lanes)
_DTYPES: dict[Any, Any] = {"i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "f32": np.float32}
_FLOATS = {"bf16": jnp.bfloat16, "f16": np.float16}


class Memory:
    """Refs are placed one after another, each at a multiple of 1 KiB, as TMA wants swizzled ones."""

    def __init__(self):
        self.bytes = np.zeros(1 << 20, np.uint8)
        self.end = 1024

    def place(self, array: np.ndarray, *, swizzle: bool = False, row: int | None = None) -> types.SimpleNamespace:
        """A ref of `array`; `row`: elements from one row of it to the next, if not those of a row."""
        start, (shape, dtype) = self.end, (array.shape, array.dtype)
        if swizzle:
            array = swizzled(array)
        elif row is not None:
            array = np.pad(array, ((0, 0), (0, row - array.shape[1])))
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[start : start + raw.size] = raw
        self.end += -(-raw.size // 1024) * 1024
        return types.SimpleNamespace(
            address=start, shape=shape, dtype=dtype, size=raw.size, stored=array.shape, type=row
        )

    def read(self, ref: types.SimpleNamespace) -> np.ndarray:
        raw = self.bytes[ref.address : ref.address + ref.size]
        return raw.view(ref.dtype).reshape(ref.stored)[..., : ref.shape[-1]]

    def gather(self, address: np.ndarray, dtype: Any, alignment: int) -> np.ndarray:
        assert (address % alignment == 0).all() and (address >= 1024).all() and (address < self.end).all()
        size = np.dtype(dtype).itemsize
        return self.bytes[address[:, None] + np.arange(size)].view(dtype)[:, 0]

    def scatter(self, address: np.ndarray, value: np.ndarray, alignment: int) -> None:
        assert (address % alignment == 0).all() and len(np.unique(address)) == len(address)
        size = value.dtype.itemsize
        self.bytes[address[:, None] + np.arange(size)] = value[:, None].view(np.uint8)


def swizzled(x: np.ndarray) -> np.ndarray:
    """(rows, columns) of 16 bits as tiles of 8 x 64, in which 16-byte chunk c of row r lies at c ^ r."""
    rows, columns = x.shape
    tiles = x.reshape(rows // 8, 8, columns // 64, 8, 8).transpose(0, 2, 1, 3, 4)
    chunk = np.arange(8)[None, :] ^ np.arange(8)[:, None]
    return np.take_along_axis(tiles, chunk[None, None, :, :, None], axis=3)


class Fragment:
    """A FragmentedArray in WGMMA layout, whose registers are lists of a value for each lane."""

    def __init__(self, _registers: Any, _layout: Any, _is_signed: Any):
        self.registers, self.layout = _registers, _layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape_from_registers_shape(self.registers.shape)


def _registers(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """(index of a register, row of each lane, columns of each lane), from the layout's tiling by itself."""
    layout = fragmented_array.WGMMA_LAYOUT
    size = shape[0] * shape[1]
    by_register: dict[tuple[int, ...], list[Any]] = {}
    for index in np.ndindex(layout.registers_shape(shape)):
        by_register[index] = []
    tiled = np.arange(size).reshape(shape)
    # (64, 8) tiles of (16, 8) for a warp, (8, 8) for its lanes and 2 for a lane.
    tiled = tiled.reshape(shape[0] // 64, 4, 2, 8, shape[1] // 8, 4, 2)  # tile, warp, rh, l8, block, q, e
    for index in by_register:
        where = dict(zip(("tile", "block", "warp", "one", "rh"), index, strict=False))
        flat = tiled[where["tile"], :, where["rh"], :, where["block"]].reshape(128, 2)
        yield index, flat[:, 0] // shape[1], flat % shape[1]


def fragment(x: np.ndarray) -> Fragment:
    out = np.empty(fragmented_array.WGMMA_LAYOUT.registers_shape(x.shape), object)
    for index, row, columns in _registers(x.shape):
        out[index] = [x[row, columns[:, e]] for e in range(2)]
    return Fragment(out, fragmented_array.WGMMA_LAYOUT, None)


def array(f: Fragment, dtype: Any) -> np.ndarray:
    out = np.zeros(f.shape, dtype)
    for index, row, columns in _registers(f.shape):
        for e in range(2):
            out[row, columns[:, e]] = f.registers[index][e]
    return out


def _u32(x: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(x), (128,)).astype(np.uint32)


def _halves(x: np.ndarray, bits: str) -> np.ndarray:
    """(128, 2) 16-bit floats of a register."""
    return _u32(x)[:, None].view(_FLOATS[bits])


def _mma(bits: str, c: list[Any], a: list[Any], b: list[Any]) -> list[np.ndarray]:
    """m16n8k16 of each of four warps."""
    group, q = LANES % 32 // 4, LANES % 4
    result = [np.zeros(128, np.float32) for _ in range(4)]
    for warp in range(4):
        lanes = slice(32 * warp, 32 * warp + 32)
        A, B = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for i in range(4):
            for e in range(2):
                A[group[lanes] + 8 * (i % 2), 2 * q[lanes] + e + 8 * (i // 2)] = _halves(a[i], bits)[lanes, e]
        for i in range(2):
            for e in range(2):
                B[2 * q[lanes] + e + 8 * i, group[lanes]] = _halves(b[i], bits)[lanes, e]
        D = A @ B
        for i in range(4):
            value = D[group[lanes] + 8 * (i // 2), 2 * q[lanes] + i % 2]
            result[i][lanes] = value + np.broadcast_to(c[i], (128,))[lanes]
    return result


def _asm(memory: Memory, text: str, operands: list[Any]) -> Any:
    if match := re.match(r"lop3\.b32 \$0, \$1, (\S+), (\S+), 0xEA;", text):
        mask, bits = (np.uint32(int(x, 16)) for x in match.groups())
        return (_u32(operands[0]) & mask) | bits
    if match := re.match(r"(sub|mul)\.rn\.(bf16|f16)x2", text):
        left, right = (_halves(x, match[2]).astype(np.float32) for x in operands)
        done = left - right if match[1] == "sub" else left * right
        return done.astype(_FLOATS[match[2]]).view(np.uint32)[:, 0]
    if text.startswith("cvt.rn.bf16x2.f32"):
        high, low = operands
        return np.stack([low, high], axis=1).astype(jnp.bfloat16).view(np.uint32)[:, 0]
    if text.startswith("fma.rn.f32"):
        a, b, c = (np.broadcast_to(x, (128,)).astype(np.float32) for x in operands)
        return a * b + c
    if match := re.match(r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16 .*\[\$\1\+(\d+)\];", text):
        count, transposed, offset = int(match[1]), match[2], int(match[3])
        rows = _u32(operands[0]).astype(np.int64) + offset
        assert (rows % 16 == 0).all()
        first_lane, out = LANES // 32 * 32, []
        for i in range(count):
            # Row r of matrix i comes from the address that lane 8 i + r of the warp holds.
            row, column = LANES % 32 // 4, LANES % 4
            if transposed:  # lane l gets what lies in column l / 4 of rows 2 (l % 4) and 1 more
                low, high = (
                    memory.gather(rows[first_lane + 8 * i + 2 * column + e] + 2 * row, np.uint16, 2) for e in (0, 1)
                )
                out.append(low.astype(np.uint32) | high.astype(np.uint32) << 16)
            else:  # row l / 4, columns 2 (l % 4) and 1 more
                out.append(memory.gather(rows[first_lane + 8 * i + row] + 4 * column, np.uint32, 4))
        return out[0] if count == 1 else out
    if match := re.match(r"prmt\.b32 \$0, \$1, \$2, (\S+);", text):
        pair = np.concatenate([np.broadcast_to(_u32(x), 128)[:, None] for x in operands], axis=1).view(np.uint8)
        digits = [int(match[1], 16) >> 4 * i & 15 for i in range(4)]
        return np.ascontiguousarray(pair[:, digits]).view(np.uint32)[:, 0]
    if match := re.match(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", text):
        return _mma(match[1], operands[:4], operands[4:8], operands[8:])
    if "@p st.global.b16" in text:
        address, value, inside = operands
        keep = np.broadcast_to(inside, (128,)) != 0
        memory.scatter(address[keep], value[keep].astype(np.uint16), 2)
        return None
    raise AssertionError(f"lanes: unknown instruction {text!r}")


@contextmanager
def warpgroup(memory: Memory) -> Iterator[None]:
    """Calls of these modules' functions run here, on Fragments and on refs of `memory`."""

    def constant(value: Any, kind: Any) -> Any:
        return np.float32(value) if kind == "f32" else np.int64(value)

    def operation(function: Any) -> Any:
        return lambda *args, **_: function(*args)

    def bitcast(kind: str, x: np.ndarray) -> np.ndarray:
        if kind == "f32":
            return _u32(x).view(np.float32)
        if kind == "f16":
            return np.asarray(x).astype(np.uint16).view(np.float16)
        if kind == "i16":
            return x.view(np.uint16)
        raise AssertionError(kind)

    def load(kind: Any, pointer: np.ndarray, alignment: int) -> Any:
        if isinstance(kind, tuple):
            size, element = kind
            step = np.dtype(_DTYPES[element]).itemsize
            assert (pointer % alignment == 0).all()
            return [memory.gather(pointer + step * i, _DTYPES[element], step) for i in range(size)]
        return memory.gather(pointer, _DTYPES[kind], alignment)

    def gep(pointer: Any, indices: Any, kind: str) -> np.ndarray:
        assert kind == "i8" and len(indices) == 1
        return pointer + np.asarray(indices[0]).astype(np.int64)

    def insert(vector: list[Any], value: Any, index: Any) -> list[Any]:
        return [value if i == index else old for i, old in enumerate(vector)]

    def inline_mgpu(**_: Any) -> Any:
        return lambda emit: lambda *args: emit(None, *args)

    unsigned = operation(lambda a, b: np.asarray(a).astype(np.int64) // np.asarray(b).astype(np.int64))
    fakes = {
        "ir": types.SimpleNamespace(
            IntegerType=types.SimpleNamespace(get_signless=lambda n: f"i{n}"),
            F32Type=types.SimpleNamespace(get=lambda: "f32"),
            F16Type=types.SimpleNamespace(get=lambda: "f16"),
            BF16Type=types.SimpleNamespace(get=lambda: "bf16"),
            VectorType=types.SimpleNamespace(get=lambda shape, kind: (shape[0], kind)),
            Type=types.SimpleNamespace(parse=lambda text: None),
            MemRefType=lambda row: types.SimpleNamespace(get_strides_and_offset=lambda: ((row, 1), 0)),
        ),
        "arith": types.SimpleNamespace(
            addi=operation(lambda a, b: a + b),
            muli=operation(lambda a, b: a * b),
            andi=operation(lambda a, b: np.asarray(a).astype(np.int64) & b),
            ori=operation(lambda a, b: _u32(a) | _u32(b)),
            xori=operation(lambda a, b: a ^ b),
            shrui=operation(lambda a, b: _u32(a).astype(np.int64) >> b),
            shli=operation(lambda a, b: (_u32(a).astype(np.int64) << b).astype(np.uint32)),
            divui=unsigned,
            remui=operation(lambda a, b: a % b),
            mulf=operation(lambda a, b: (a * b).astype(np.float32)),
            addf=operation(lambda a, b: (a + b).astype(np.float32)),
            extui=lambda kind, x: np.asarray(x).astype(np.int64),
            extf=lambda kind, x: x.astype(np.float32),
            trunci=lambda kind, x: (_u32(x) & 0xFFFF).astype(np.uint16),
            truncf=lambda kind, x: x.astype(_FLOATS[kind]),
            bitcast=bitcast,
            index_cast=lambda kind, x: x,
            cmpi=lambda predicate, a, b: a < b,
            CmpIPredicate=types.SimpleNamespace(ult="ult"),
        ),
        "gpu": types.SimpleNamespace(thread_id=lambda _: LANES + 256, Dimension=types.SimpleNamespace(x=0)),
        "llvm": types.SimpleNamespace(
            StructType=types.SimpleNamespace(get_literal=lambda kinds: None),
            load=load,
            store=lambda value, pointer, alignment: memory.scatter(pointer, value.astype(np.float32), alignment),
            ptrtoint=lambda kind, x: x,
            extractvalue=lambda kind, values, index: values[index[0]],
            extractelement=lambda values, index: values[int(index)],
            insertelement=insert,
            inline_asm=lambda kind, operands, text, constraints, **_: _asm(memory, text, operands),
        ),
        "mgpu": types.SimpleNamespace(
            c=constant,
            memref_ptr=lambda ref: np.full(128, ref.address),
            getelementptr=gep,
            get_contiguous_strides=mgpu.get_contiguous_strides,
            warpgroup_barrier=lambda: None,
            bitcast=lambda x, kind: list(_halves(x, kind[1]).T),
        ),
        "FragmentedArray": Fragment,
        "plgpu": types.SimpleNamespace(
            inline_mgpu=inline_mgpu, RefType=lambda *_: None, ShapeDtypeStruct=lambda *_, **__: None
        ),
    }
    with ExitStack() as patched:
        for module in _EMITTING:
            used = {name: fake for name, fake in fakes.items() if hasattr(module, name)}
            patched.enter_context(mock.patch.multiple(module, **used))
        yield
