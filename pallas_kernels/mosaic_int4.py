"""Packed 4-bit weights on Hopper's tensor cores, as inline PTX: what mma.sync and wgmma read from registers.

The weight is the A operand, W^T: words of `w4a16/layout.py` are its registers already. A warpgroup reads them from
shared memory and makes (code - zero) in 16 bits, exactly: `multiply_add` multiplies that by mma.sync m16n8k16 and
scales the float32 sum of each group; `dequantize` scales it, rounding once, for wgmma.

Each inline function carries a stand-in, the same thing in words that tests/mosaic/interpreter.py can run on a CPU
(mosaic_int4_plain.py).
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray

from pallas_kernels import mosaic_int4_plain as plain
from pallas_kernels.mosaic import Layout, swizzled
from pallas_kernels.mosaic_int4_operands import NAMES, Tokens, Weight
from pallas_kernels.mosaic_int4_step import Step
from pallas_kernels.mosaic_lanes import accumulator_places, const, f32, i32


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
        return [plain.multiply_add(step, *one, operands[-1]) for one in each(operands)], {}

    emit.interpret_refs = interpret_refs
    ref: Any = plgpu.RefType()
    sums = plgpu.ShapeDtypeStruct(accs[0].shape, jnp.float32, layout=Layout.WGMMA)
    return plgpu.inline_mgpu(
        arg_types=(
            *[Layout.WGMMA] * n,
            *[ref] * (len(refs) - 1),
            plgpu.RefType(tuple(swizzled((8, 64), x.dtype).transforms)),
        ),
        return_type=[sums] * n,
    )(emit)(*accs, *refs)


def _emit_multiply(step: Step, operands, x) -> list[Any]:
    """`operands`: (acc, words, scales, zeros or None) of each weight."""
    weights = [Weight(step, *refs) for _, *refs in operands]
    tokens = Tokens(step, weights[0], x)
    sums = {
        (n, block, rh, e): llvm.extractelement(acc.registers[index], const(e))
        for n, (acc, *_) in enumerate(operands)
        for index, block, rh in accumulator_places(acc.layout, acc.shape)
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
            partial = {tile: [[mgpu.c(0.0, f32())] * 4 for _ in range(chains)] for tile in tiles}
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
                        f32(), [value, scales[n][rh], old], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"
                    )
    done = []
    for n, (acc, *_) in enumerate(operands):
        out = np.empty_like(acc.registers)
        for index, block, rh in accumulator_places(acc.layout, acc.shape):
            out[index] = acc.registers[index]
            for e in range(2):
                out[index] = llvm.insertelement(out[index], sums[n, block, rh, e], const(e))
        done.append(type(acc)(_registers=out, _layout=acc.layout, _is_signed=None))
    return done


def _mma(step: Step, c, a, b) -> list[Any]:
    """a @ b + c of m16n8k16."""
    name = NAMES[step.dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    kind = llvm.StructType.get_literal([f32()] * 4)
    product = llvm.inline_asm(kind, [*c, *a, *b], text, "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r")
    return [llvm.extractvalue(f32(), product, [i]) for i in range(4)]


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
        return plain.dequantize(step, words, scales, zeros[0] if zeros else None), {}

    emit.interpret_refs = interpret_refs
    ref: Any = plgpu.RefType()
    return plgpu.inline_mgpu(
        arg_types=(ref,) * len(refs), return_type=plgpu.ShapeDtypeStruct((64, 64), dtype, layout=Layout.WGMMA)
    )(emit)(*refs)


def _emit_dequantize(step: Step, words, scales, zeros):
    weight = Weight(step, words, scales, zeros)
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
    for index, block, rh in accumulator_places(WGMMA_LAYOUT, (64, 64)):
        out[index] = mgpu.bitcast(registers[block, rh], pair)
    return FragmentedArray(_registers=out, _layout=WGMMA_LAYOUT, _is_signed=None)


def _scaled(weight: Weight, code, group: int, rh: int):
    """Two 16-bit numbers times their scale, rounded once."""
    step = weight.step
    if step.scale_dtype == step.dtype:
        scale = weight.scale_twice(0, group, rh)
        return llvm.inline_asm(i32(), [code, scale], f"mul.rn.{NAMES[step.dtype]}x2 $0, $1, $2;", "=r,r,r")
    assert step.dtype == "bfloat16"
    scale = weight.scale(0, group, rh)
    halves = arith.shli(code, const(16)), arith.andi(code, const(-0x10000))
    low, high = (arith.mulf(arith.bitcast(f32(), half), scale) for half in halves)
    return llvm.inline_asm(i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
