"""The operands of mma.sync as one thread holds them: 4-bit codes made 16-bit numbers, scales and zeros, and tokens."""

from typing import Any

from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils as mgpu

from pallas_kernels.mosaic_int4_step import Step
from pallas_kernels.mosaic_lanes import add, advance, const, div_rem, f32, i32, lane_id, prmt, times, warp_id

# 16-bit floats whose unit in the last place is 1, so that a code is added by setting bits: 128 and 1024.
_MAGIC = {"bfloat16": 0x4300, "float16": 0x6400}
NAMES = {"bfloat16": "bf16", "float16": "f16"}  # as PTX has them


class Weight:
    """The weight as one thread sees it: its words, and scales and zeros of the two columns of W that it holds.

    ldmatrix brings the scales of four groups, or the zeros of eight, at once: its eight rows name two groups in turn,
    and transposed it gives each thread its own column of both.
    """

    def __init__(self, step: Step, words, scales, zeros):
        self.step = step
        self.part, self.lane = div_rem(warp_id(), step.rows // 16)[0], lane_id()
        warp = div_rem(warp_id(), step.rows // 16)[1]
        self.tile_bytes = step.rows * 32
        tiles = step.unit // 64
        first = add(times(self.part, tiles * self.tile_bytes), times(warp, 512), times(self.lane, 16))
        self._words = advance(mgpu.memref_ptr(words), first)
        self.groups = step.unit // min(step.group, step.unit)
        # Groups that the thread meets in a step; where there are several, parts have groups of their own.
        own = max(1, step.scale_rows // step.parts)
        self._scales = self._per_group(scales, 2, own, times(warp, 16))
        self._zeros = None if zeros is None else self._per_group(zeros, 1, own, times(warp, 16))

    def _per_group(self, ref, size: int, own: int, column) -> list[Any]:
        """Registers that hold two values of 16 bits each, of groups 2 n and 2 n + 1: scales (size 2) of the upper and
        of the lower 8 columns in turn, or pairs of zeros (size 1)."""
        step, n, pitch = self.step, -(-own // 2) * size, size * self.step.rows
        count = 1 << (min(n, 4) - 1).bit_length()  # matrices at a time
        # From one group to the next, and from a pair of groups to the next: those of other parts lie between.
        next_group = 0 if own == 1 else pitch if self.groups == 2 else pitch * step.parts
        matrix, odd = arith.andi(arith.shrui(self.lane, const(3)), const(count - 1)), arith.andi(self.lane, const(1))
        pair = arith.shrui(matrix, const(1)) if size == 2 else matrix
        offset = add(times(pair, 2 * pitch * step.parts), times(odd, next_group), times(column, size))
        if size == 2:
            offset = add(offset, times(arith.andi(matrix, const(1)), 16))
        if step.scale_rows > 1:
            offset = add(offset, times(self.part, self.groups * pitch))
        address = add(llvm.ptrtoint(i32(), mgpu.memref_ptr(ref)), offset)
        kind = i32() if count == 1 else llvm.StructType.get_literal([i32()] * count)
        registers = []
        for first in range(0, n, count):
            out = ", ".join(f"${i}" for i in range(count))
            at = f"[${count}+{first // size * 2 * pitch * step.parts}]"
            text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{out}}}, {at};"
            constraints = "=r," * count + "r,~{memory}"
            loaded = llvm.inline_asm(kind, [address], text, constraints, has_side_effects=True)
            registers += [loaded] if count == 1 else [llvm.extractvalue(i32(), loaded, [i]) for i in range(count)]
        return registers

    def words(self, turn: int, tile: int):
        """Four words: a tile's steps of 16 rows of W."""
        tile += turn * self.step.parts * (self.step.unit // 64)
        vector = ir.VectorType.get((4,), i32())
        return llvm.load(vector, advance(self._words, tile * self.tile_bytes), alignment=16)

    def _place(self, turn: int, group: int) -> tuple[int, int]:
        """(pair, which of it) of a group of a turn, of those that the thread meets."""
        return divmod(turn * self.groups + group if self.step.scale_rows > 1 else 0, 2)

    def scale(self, turn: int, group: int, rh: int):
        """float32."""
        pair, odd = self._place(turn, group)
        both = self._scales[2 * pair + rh]
        if self.step.scale_dtype == "bfloat16":
            return arith.bitcast(f32(), arith.andi(both, const(-0x10000)) if odd else arith.shli(both, const(16)))
        half = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(both, const(16)) if odd else both)
        return arith.extf(f32(), arith.bitcast(ir.F16Type.get(), half))

    def scale_twice(self, turn: int, group: int, rh: int):
        """As stored, in both halves of a register."""
        pair, odd = self._place(turn, group)
        both = self._scales[2 * pair + rh]
        return prmt(both, both, 0x3232 if odd else 0x1010)

    def zero(self, turn: int, group: int, rh: int):
        """The magic number and the zero, twice in a register."""
        magic = _MAGIC[self.step.dtype]
        if self._zeros is None:
            return const((magic + 8) * 0x10001)
        pair, odd = self._place(turn, group)
        return prmt(self._zeros[pair], const(magic >> 8), 0x4040 + 0x0101 * (2 * odd + rh))

    def codes(self, words, step16: int, zeros) -> list[Any]:
        """code - zero, exactly: the four registers of A of one step of 16 rows of W."""
        word = llvm.extractelement(words, const(step16))
        lop3 = f"lop3.b32 $0, $1, 0x000F000F, {_MAGIC[self.step.dtype] * 0x10001:#x}, 0xEA;"
        subtract = f"sub.rn.{NAMES[self.step.dtype]}x2 $0, $1, $2;"
        registers = []
        for i in range(4):
            code = llvm.inline_asm(i32(), [arith.shrui(word, const(4 * i)) if i else word], lop3, "=r,r")
            registers.append(llvm.inline_asm(i32(), [code, zeros[i % 2]], subtract, "=r,r,r"))
        return registers


class Tokens:
    """x in swizzled shared memory, as fragments of B."""

    def __init__(self, step: Step, weight: Weight, x):
        self.step = step
        # ldmatrix takes from lane i the address of row i % 8 of matrix i / 8; swizzled, chunk j of row r is at j ^ r.
        row, matrix = arith.andi(weight.lane, const(7)), arith.shrui(weight.lane, const(3))
        part = times(weight.part, step.unit // 64 * 1024)
        rows = add(llvm.ptrtoint(i32(), mgpu.memref_ptr(x)), times(row, 128), part)
        self._halves = [add(rows, times(arith.xori(add(matrix, const(4 * half)), row), 16)) for half in range(2)]

    def load(self, turn: int, tile: int, half: int) -> list[list[Any]]:
        """For each block of 8 tokens four registers: two steps of 16 rows of W."""
        tile += turn * self.step.parts * (self.step.unit // 64)
        kind = llvm.StructType.get_literal([i32()] * 4)
        blocks = []
        for block in range(self.step.tokens // 8):
            offset = block * self.step.k * 16 + tile * 1024
            text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
            loaded = llvm.inline_asm(kind, [self._halves[half]], text, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
            blocks.append([llvm.extractvalue(i32(), loaded, [i]) for i in range(4)])
        return blocks
