"""Packed 4-bit weights on Hopper's tensor cores, as inline PTX: what mma.sync and wgmma read from registers.

The weight is the A operand, W^T: words of `w4a16/layout.py` are its registers already. A warpgroup reads them from
shared memory and makes (code - zero) in 16 bits, exactly: `multiply_add` multiplies that by mma.sync m16n8k16 and
scales the float32 sum of each group; `dequantize` scales it, rounding once, for wgmma.

Each inline function carries a stand-in, the same thing in words that tests/mosaic/interpreter.py can run on a CPU.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray

from pallas_kernels.mosaic import Layout, swizzled

PITCH = 68  # floats between the tokens of a partial sum in shared memory: 64 and 4, so that no two lanes share a bank

# 16-bit floats whose unit in the last place is 1, so that a code is added by setting bits: 128 and 1024.
_MAGIC = {"bfloat16": 0x4300, "float16": 0x6400}
_NAMES = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one warpgroup multiplies at a time: `rows` columns of W (16, 32 or 64), `k` rows of W, `tokens` rows of x.

    Its four warps take 16 columns each and, where `rows` is less than 64, different runs of `unit` rows of W in turn:
    rows p * rows ... of an accumulator (64, tokens) are the p-th warps' share of the sum, for p < `parts`.
    `group` rows of W share a scale.
    """

    rows: int
    k: int
    tokens: int
    group: int
    dtype: str
    scale_dtype: str

    @property
    def parts(self) -> int:
        return 64 // self.rows

    @property
    def unit(self) -> int:
        """Rows of W that a warp multiplies in a row: whole tiles, and whole groups but for a group of all rows."""
        return 64 * max(1, min(self.group, 128) // 64)

    @property
    def scale_rows(self) -> int:
        """Groups that a step meets."""
        return max(1, self.k // self.group)

    def scale_row(self, k: int) -> int:
        """That of row k of the step."""
        return 0 if self.scale_rows == 1 else k // self.group


def multiply_add(step: Step, accs: Any, words: Any, scales: Any, zeros: Any | None, x: Any) -> list[Any]:
    """acc + scale * ((code - zero)^T x^T), float32 (64, tokens) in WGMMA layout, of each of a list; a warpgroup.

    Lists of refs of shared memory: words int32 (k / 64, rows / 8, 64), scales (groups, rows), zeros uint8 (groups,
    rows), in the order of `layout.pack_zeros`, or None for 8; and x (tokens, k) swizzled, whose fragments serve the
    whole list.
    """
    n, with_zeros = len(accs), zeros is not None
    refs = [*words, *scales, *(zeros or []), x]

    def each(operands):
        accs, words, scales, zeros = (operands[i * n : (i + 1) * n] for i in range(4))
        return list(zip(accs, words, scales, zeros if with_zeros else [None] * n, strict=True))

    def emit(_, *operands):
        return _emit_multiply(step, each(operands), operands[-1])

    def interpret_refs(*operands):
        return [_plain_multiply(step, *one, operands[-1]) for one in each(operands)], {}

    emit.interpret_refs = interpret_refs
    plain: Any = plgpu.RefType()
    sums = plgpu.ShapeDtypeStruct(accs[0].shape, jnp.float32, layout=Layout.WGMMA)
    return plgpu.inline_mgpu(
        arg_types=(
            *[Layout.WGMMA] * n,
            *[plain] * (len(refs) - 1),
            plgpu.RefType(tuple(swizzled((8, 64), x.dtype).transforms)),
        ),
        return_type=[sums] * n,
    )(emit)(*accs, *refs)


def _plain_multiply(step: Step, acc, words, scales, zeros, x):
    f32, codes = jnp.float32, _plain_codes(step, words)
    row = np.array([step.scale_row(k) for k in range(step.k)])
    zero = 8 if zeros is None else _plain_zeros(zeros)[row]
    w = (codes - zero).astype(f32)
    # Sums of whole groups, or of units where a group is longer, scaled and added in order.
    run = min(step.group, step.unit)
    partial = jnp.einsum("gkn,mgk->gnm", w.reshape(-1, run, step.rows), x.astype(f32).reshape(len(x), -1, run))
    scaled = partial * scales.astype(f32)[row[::run]][:, :, None]
    by_part = scaled.reshape(-1, step.parts, step.unit // run, step.rows, len(x))
    return acc + by_part.sum(axis=(0, 2)).reshape(64, len(x))


def _plain_codes(step: Step, words):
    """int32 (k, rows)."""
    shifts = np.array([16 * e + 8 * jj + 4 * rh for rh in range(2) for jj in range(2) for e in range(2)], np.int32)
    words = words.reshape(-1, step.rows // 16, 8, 4, 4, 1, 1, 1)  # tile, warp, l8, q, v
    codes = (words >> shifts.reshape(1, 1, 1, 1, 1, 2, 2, 2)) & 15  # ... rh, jj, e
    return codes.transpose(0, 1, 5, 2, 4, 6, 3, 7).reshape(-1, step.rows, 64).swapaxes(1, 2).reshape(-1, step.rows)


def _plain_zeros(zeros):
    """int32 (groups, rows), in the order of the columns."""
    return zeros.reshape(len(zeros), -1, 8, 2).swapaxes(2, 3).reshape(zeros.shape).astype(jnp.int32)


class _Weight:
    """The weight as one thread sees it: its words, and scales and zeros of the two columns of W that it holds.

    ldmatrix brings the scales of four groups, or the zeros of eight, at once: its eight rows name two groups in turn,
    and transposed it gives each thread its own column of both.
    """

    def __init__(self, step: Step, words, scales, zeros):
        self.step = step
        self.part, self.lane = _divmod(_warp(), step.rows // 16)[0], _lane()
        warp = _divmod(_warp(), step.rows // 16)[1]
        self.tile_bytes = step.rows * 32
        tiles = step.unit // 64
        first = _sum(_times(self.part, tiles * self.tile_bytes), _times(warp, 512), _times(self.lane, 16))
        self._words = _at(mgpu.memref_ptr(words), first)
        self.groups = step.unit // min(step.group, step.unit)
        # Groups that the thread meets in a step; where there are several, parts have groups of their own.
        own = max(1, step.scale_rows // step.parts)
        self._scales = self._per_group(scales, 2, own, _times(warp, 16))
        self._zeros = None if zeros is None else self._per_group(zeros, 1, own, _times(warp, 16))

    def _per_group(self, ref, size: int, own: int, column) -> list[Any]:
        """Registers that hold two values of 16 bits each, of groups 2 n and 2 n + 1: scales (size 2) of the upper and
        of the lower 8 columns in turn, or pairs of zeros (size 1)."""
        step, n, pitch = self.step, -(-own // 2) * size, size * self.step.rows
        count = 1 << (min(n, 4) - 1).bit_length()  # matrices at a time
        # From one group to the next, and from a pair of groups to the next: those of other parts lie between.
        next_group = 0 if own == 1 else pitch if self.groups == 2 else pitch * step.parts
        matrix, odd = arith.andi(arith.shrui(self.lane, _c(3)), _c(count - 1)), arith.andi(self.lane, _c(1))
        pair = arith.shrui(matrix, _c(1)) if size == 2 else matrix
        offset = _sum(_times(pair, 2 * pitch * step.parts), _times(odd, next_group), _times(column, size))
        if size == 2:
            offset = _sum(offset, _times(arith.andi(matrix, _c(1)), 16))
        if step.scale_rows > 1:
            offset = _sum(offset, _times(self.part, self.groups * pitch))
        address = _sum(llvm.ptrtoint(_i32(), mgpu.memref_ptr(ref)), offset)
        kind = _i32() if count == 1 else llvm.StructType.get_literal([_i32()] * count)
        registers = []
        for first in range(0, n, count):
            out = ", ".join(f"${i}" for i in range(count))
            at = f"[${count}+{first // size * 2 * pitch * step.parts}]"
            text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{out}}}, {at};"
            constraints = "=r," * count + "r,~{memory}"
            loaded = llvm.inline_asm(kind, [address], text, constraints, has_side_effects=True)
            registers += [loaded] if count == 1 else [llvm.extractvalue(_i32(), loaded, [i]) for i in range(count)]
        return registers

    def words(self, turn: int, tile: int):
        """Four words: a tile's steps of 16 rows of W."""
        tile += turn * self.step.parts * (self.step.unit // 64)
        vector = ir.VectorType.get((4,), _i32())
        return llvm.load(vector, _at(self._words, tile * self.tile_bytes), alignment=16)

    def _place(self, turn: int, group: int) -> tuple[int, int]:
        """(pair, which of it) of a group of a turn, of those that the thread meets."""
        return divmod(turn * self.groups + group if self.step.scale_rows > 1 else 0, 2)

    def scale(self, turn: int, group: int, rh: int):
        """float32."""
        pair, odd = self._place(turn, group)
        both = self._scales[2 * pair + rh]
        if self.step.scale_dtype == "bfloat16":
            return arith.bitcast(_f32(), arith.andi(both, _c(-0x10000)) if odd else arith.shli(both, _c(16)))
        half = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(both, _c(16)) if odd else both)
        return arith.extf(_f32(), arith.bitcast(ir.F16Type.get(), half))

    def scale_twice(self, turn: int, group: int, rh: int):
        """As stored, in both halves of a register."""
        pair, odd = self._place(turn, group)
        both = self._scales[2 * pair + rh]
        return _permute(both, both, 0x3232 if odd else 0x1010)

    def zero(self, turn: int, group: int, rh: int):
        """The magic number and the zero, twice in a register."""
        magic = _MAGIC[self.step.dtype]
        if self._zeros is None:
            return _c((magic + 8) * 0x10001)
        pair, odd = self._place(turn, group)
        return _permute(self._zeros[pair], _c(magic >> 8), 0x4040 + 0x0101 * (2 * odd + rh))

    def codes(self, words, step16: int, zeros) -> list[Any]:
        """code - zero, exactly: the four registers of A of one step of 16 rows of W."""
        word = llvm.extractelement(words, _c(step16))
        lop3 = f"lop3.b32 $0, $1, 0x000F000F, {_MAGIC[self.step.dtype] * 0x10001:#x}, 0xEA;"
        subtract = f"sub.rn.{_NAMES[self.step.dtype]}x2 $0, $1, $2;"
        registers = []
        for i in range(4):
            code = llvm.inline_asm(_i32(), [arith.shrui(word, _c(4 * i)) if i else word], lop3, "=r,r")
            registers.append(llvm.inline_asm(_i32(), [code, zeros[i % 2]], subtract, "=r,r,r"))
        return registers


class _Tokens:
    """x in swizzled shared memory, as fragments of B."""

    def __init__(self, step: Step, weight: _Weight, x):
        self.step = step
        # ldmatrix takes from lane i the address of row i % 8 of matrix i / 8; swizzled, chunk j of row r is at j ^ r.
        row, matrix = arith.andi(weight.lane, _c(7)), arith.shrui(weight.lane, _c(3))
        part = _times(weight.part, step.unit // 64 * 1024)
        rows = _sum(llvm.ptrtoint(_i32(), mgpu.memref_ptr(x)), _times(row, 128), part)
        self._halves = [_sum(rows, _times(arith.xori(_sum(matrix, _c(4 * half)), row), 16)) for half in range(2)]

    def load(self, turn: int, tile: int, half: int) -> list[list[Any]]:
        """For each block of 8 tokens four registers: two steps of 16 rows of W."""
        tile += turn * self.step.parts * (self.step.unit // 64)
        kind = llvm.StructType.get_literal([_i32()] * 4)
        blocks = []
        for block in range(self.step.tokens // 8):
            offset = block * self.step.k * 16 + tile * 1024
            text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
            loaded = llvm.inline_asm(kind, [self._halves[half]], text, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
            blocks.append([llvm.extractvalue(_i32(), loaded, [i]) for i in range(4)])
        return blocks


def _emit_multiply(step: Step, operands, x) -> list[Any]:
    """`operands`: (acc, words, scales, zeros or None) of each weight."""
    weights = [_Weight(step, *refs) for _, *refs in operands]
    tokens = _Tokens(step, weights[0], x)
    sums = {
        (n, block, rh, e): llvm.extractelement(acc.registers[index], _c(e))
        for n, (acc, *_) in enumerate(operands)
        for index, block, rh in _places(acc.layout, acc.shape)
        for e in range(2)
    }
    tiles = list(np.ndindex(len(weights), step.tokens // 8))
    run = step.unit // 16 // weights[0].groups  # products on one accumulator
    # Two chains of products hide each other's latency where there is only one block of tokens.
    chains = 2 if len(tiles) == 1 and run > 2 else 1
    for turn in range(step.k // (step.unit * step.parts)):
        for group in range(weights[0].groups):
            scales = [[weight.scale(turn, group, rh) for rh in range(2)] for weight in weights]
            zeros = [[weight.zero(turn, group, rh) for rh in range(2)] for weight in weights]
            partial = {tile: [[mgpu.c(0.0, _f32())] * 4 for _ in range(chains)] for tile in tiles}
            for step16 in range(group * run, (group + 1) * run):
                tile, inside = divmod(step16, 4)
                if inside == 0:
                    words = [weight.words(turn, tile) for weight in weights]
                if inside % 2 == 0:
                    b = tokens.load(turn, tile, inside // 2)
                a = [weight.codes(words[n], inside, zeros[n]) for n, weight in enumerate(weights)]
                for n, block in tiles:
                    chain = partial[n, block][step16 % chains]
                    chain[:] = _mma(step, chain, a[n], b[block][2 * (inside % 2) : 2 * (inside % 2) + 2])
            for n, block in tiles:
                for rh, e in np.ndindex(2, 2):
                    value = partial[n, block][0][2 * rh + e]
                    for chain in partial[n, block][1:]:
                        value = arith.addf(value, chain[2 * rh + e])
                    old = sums[n, block, rh, e]
                    sums[n, block, rh, e] = llvm.inline_asm(
                        _f32(), [value, scales[n][rh], old], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"
                    )
    done = []
    for n, (acc, *_) in enumerate(operands):
        out = np.empty_like(acc.registers)
        for index, block, rh in _places(acc.layout, acc.shape):
            out[index] = acc.registers[index]
            for e in range(2):
                out[index] = llvm.insertelement(out[index], sums[n, block, rh, e], _c(e))
        done.append(type(acc)(_registers=out, _layout=acc.layout, _is_signed=None))
    return done


def _mma(step: Step, c, a, b) -> list[Any]:
    """a @ b + c of m16n8k16."""
    name = _NAMES[step.dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    kind = llvm.StructType.get_literal([_f32()] * 4)
    product = llvm.inline_asm(kind, [*c, *a, *b], text, "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r")
    return [llvm.extractvalue(_f32(), product, [i]) for i in range(4)]


def _emit_dequantize(step: Step, words, scales, zeros):
    weight = _Weight(step, words, scales, zeros)
    four = weight.words(0, 0)
    registers = {}
    for step16 in range(4):
        group = step16 * weight.groups // 4
        codes = weight.codes(four, step16, [weight.zero(0, group, rh) for rh in range(2)])
        for i, code in enumerate(codes):
            jj, rh = divmod(i, 2)
            registers[2 * step16 + jj, rh] = _scaled(weight, code, group, rh)
    out = np.empty(WGMMA_LAYOUT.registers_shape((64, 64)), object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get() if step.dtype == "bfloat16" else ir.F16Type.get())
    for index, block, rh in _places(WGMMA_LAYOUT, (64, 64)):
        out[index] = mgpu.bitcast(registers[block, rh], pair)
    return FragmentedArray(_registers=out, _layout=WGMMA_LAYOUT, _is_signed=None)


def _scaled(weight: _Weight, code, group: int, rh: int):
    """Two 16-bit numbers times their scale, rounded once."""
    step = weight.step
    if step.scale_dtype == step.dtype:
        scale = weight.scale_twice(0, group, rh)
        return llvm.inline_asm(_i32(), [code, scale], f"mul.rn.{_NAMES[step.dtype]}x2 $0, $1, $2;", "=r,r,r")
    assert step.dtype == "bfloat16"
    scale = weight.scale(0, group, rh)
    halves = arith.shli(code, _c(16)), arith.andi(code, _c(-0x10000))
    low, high = (arith.mulf(arith.bitcast(_f32(), half), scale) for half in halves)
    return llvm.inline_asm(_i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _f32() -> Any:
    return ir.F32Type.get()


def _c(value: int):
    return mgpu.c(value, _i32())


def _sum(*terms):
    return functools.reduce(arith.addi, terms)


def _times(x, factor: int):
    return arith.muli(x, _c(factor))


def _divmod(x, by: int):
    return arith.divui(x, _c(by)), arith.remui(x, _c(by))


def _permute(low, high, selector: int):
    """The bytes of the register pair that the hex digits of the selector name, the last one lowest."""
    return llvm.inline_asm(_i32(), [low, high], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r")


def _at(pointer, byte):
    """The pointer so many bytes on."""
    return mgpu.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8))


def _thread():
    """Of its warpgroup."""
    return arith.andi(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)), _c(127))


def _lane():
    return arith.andi(_thread(), _c(31))


def _warp():
    return arith.shrui(_thread(), _c(5))


def _places(layout, shape: tuple[int, ...]) -> list[tuple[Any, int, int]]:
    """(index of a register, block of 8 columns, upper or lower 8 rows) of an array (64, columns) in WGMMA layout."""
    strides = layout.tiling.tile_strides(tuple(mgpu.get_contiguous_strides(shape)))
    found = []
    for index in np.ndindex(layout.registers_shape(shape)):
        row, column = divmod(sum(a * b for a, b in zip(index, strides, strict=True)), shape[1])
        found.append((index, column // 8, row // 8))
    return found


def put_partial(acc: Any, sums: Any) -> None:
    """acc (64, tokens) in WGMMA layout to float32 `sums` (tokens, PITCH) in shared memory; a warpgroup, in step."""

    def emit(_, acc, sums):
        row = _sum(_times(_warp(), 16), arith.shrui(_lane(), _c(2)))
        token = _times(arith.andi(_lane(), _c(3)), 2)
        start = _at(mgpu.memref_ptr(sums), _times(_sum(_times(token, PITCH), row), 4))
        mgpu.warpgroup_barrier()  # whoever reads the sums of the tile before is done
        for index, block, rh in _places(acc.layout, acc.shape):
            for e in range(2):
                where = _at(start, 4 * ((8 * block + e) * PITCH + 8 * rh))
                llvm.store(llvm.extractelement(acc.registers[index], _c(e)), where, alignment=4)
        mgpu.warpgroup_barrier()

    emit.interpret_refs = lambda acc, sums: (None, {1: jnp.pad(acc.T, ((0, 0), (0, PITCH - 64)))})
    plgpu.inline_mgpu(arg_types=(Layout.WGMMA, plgpu.RefType()))(emit)(acc, sums)


def store_sum(step: Step, sums: Any, out: Any) -> None:
    """The partial sums `sums` (n, tokens, PITCH), added in order, to `out` (M, rows) in global memory; a warpgroup."""

    def emit(_, sums, out):
        i16, i64 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(64)
        (stride, _), _ = ir.MemRefType(out.type).get_strides_and_offset()
        target = ir.BF16Type.get() if step.dtype == "bfloat16" else ir.F16Type.get()
        source, destination = mgpu.memref_ptr(sums), llvm.ptrtoint(i64, mgpu.memref_ptr(out))
        for first in range(0, M * step.rows, 128):
            index = _sum(_thread(), _c(first))
            token, row = _divmod(index, step.rows)
            start = _at(source, _times(_sum(_times(token, PITCH), row), 4))
            total = None
            for n, part in np.ndindex(count, step.parts):
                value = llvm.load(_f32(), _at(start, 4 * (n * tokens * PITCH + part * step.rows)), alignment=4)
                total = value if total is None else arith.addf(total, value)
            rounded = arith.bitcast(i16, arith.truncf(target, total))
            offset = arith.muli(arith.extui(i64, _sum(_times(token, stride), row)), mgpu.c(2, i64))
            inside = arith.cmpi(arith.CmpIPredicate.ult, index, _c(M * step.rows))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(destination, offset), rounded, arith.extui(_i32(), inside)],
                "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.b16 [$0], $1; }",
                "l,h,r,~{memory}",
                has_side_effects=True,
            )

    def interpret_refs(sums, out):
        parts = sums[:, :M, :64].reshape(count, M, step.parts, step.rows)
        return None, {1: parts.sum(axis=(0, 2)).astype(out.dtype)}

    (count, tokens, _), M = sums.shape, out.shape[0]
    emit.interpret_refs = interpret_refs
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(emit)(sums, out)


def dequantize(words: Any, scales: Any, zeros: Any | None, *, group: int, dtype: Any) -> Any:
    """(code - zero) * scale of a tile, rounded once to 16 bits: W^T (64, 64) in WGMMA layout; a warpgroup.

    Refs of shared memory: words int32 (8, 64), scales (groups, 64), zeros uint8 (groups, 64), in the order of
    `layout.pack_zeros`, or None for 8; of two or more groups in the tile each has `group` rows of W.
    """
    dtype = jnp.dtype(dtype)
    refs = [words, scales, *([] if zeros is None else [zeros])]
    step = Step(rows=64, k=64, tokens=8, group=group, dtype=dtype.name, scale_dtype=jnp.dtype(scales.dtype).name)

    def emit(_, words, scales, *zeros):
        return _emit_dequantize(step, words, scales, zeros[0] if zeros else None)

    def interpret_refs(words, scales, *zeros):
        row = np.array([step.scale_row(k) for k in range(64)])
        whole = _plain_codes(step, words) - (_plain_zeros(zeros[0])[row] if zeros else 8)
        return (whole.astype(jnp.float32) * scales.astype(jnp.float32)[row]).astype(dtype).T, {}

    emit.interpret_refs = interpret_refs
    plain: Any = plgpu.RefType()
    return plgpu.inline_mgpu(
        arg_types=(plain,) * len(refs), return_type=plgpu.ShapeDtypeStruct((64, 64), dtype, layout=Layout.WGMMA)
    )(emit)(*refs)


def announce(turns: Any, index: Any) -> None:
    """A warpgroup adds 1 to the int32 at `index` of `turns`, in global memory; what its threads wrote comes before.

    `mosaic.wait_turn` is the other side.
    """

    def emit(_, turns, index):
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(i64, index.registers.flat[0]), mgpu.c(4, i64))
        address = arith.addi(llvm.ptrtoint(i64, mgpu.memref_ptr(turns)), offset)
        mgpu.warpgroup_barrier()
        text = "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p red.release.gpu.global.add.s32 [$0], 1; }"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [address, _thread()], text, "l,r,~{memory}", has_side_effects=True)

    emit.interpret = ("turn.add",)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), Layout.WG_SPLAT))(emit)(turns, index)
