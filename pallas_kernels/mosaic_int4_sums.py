"""Float32 sums of several warpgroups, added in order through shared memory; each with a stand-in for interpretation."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils as mgpu

from pallas_kernels.mosaic import Layout
from pallas_kernels.mosaic_int4_step import Step
from pallas_kernels.mosaic_lanes import (
    accumulator_places,
    add,
    advance,
    const,
    div_rem,
    f32,
    i32,
    lane_id,
    thread_id,
    times,
    warp_id,
)

PITCH = 68  # floats between the tokens of a partial sum in shared memory: 64 and 4, so that no two lanes share a bank


def put_partial(acc: Any, sums: Any) -> None:
    """acc (64, tokens) in WGMMA layout to float32 `sums` (tokens, PITCH) in shared memory; a warpgroup, in step."""

    def emit(_, acc, sums):
        row = add(times(warp_id(), 16), arith.shrui(lane_id(), const(2)))
        token = times(arith.andi(lane_id(), const(3)), 2)
        start = advance(mgpu.memref_ptr(sums), times(add(times(token, PITCH), row), 4))
        mgpu.warpgroup_barrier()  # whoever reads the sums of the tile before is done
        for index, block, rh in accumulator_places(acc.layout, acc.shape):
            for e in range(2):
                where = advance(start, 4 * ((8 * block + e) * PITCH + 8 * rh))
                llvm.store(llvm.extractelement(acc.registers[index], const(e)), where, alignment=4)
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
            index = add(thread_id(), const(first))
            token, row = div_rem(index, step.rows)
            start = advance(source, times(add(times(token, PITCH), row), 4))
            total = None
            for n, part in np.ndindex(count, step.parts):
                value = llvm.load(f32(), advance(start, 4 * (n * tokens * PITCH + part * step.rows)), alignment=4)
                total = value if total is None else arith.addf(total, value)
            rounded = arith.bitcast(i16, arith.truncf(target, total))
            offset = arith.muli(arith.extui(i64, add(times(token, stride), row)), mgpu.c(2, i64))
            inside = arith.cmpi(arith.CmpIPredicate.ult, index, const(M * step.rows))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(destination, offset), rounded, arith.extui(i32(), inside)],
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
