"""Who runs before whom, beyond what Pallas offers: fences, hardware barriers, turns and counters in global memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray

from pallas_kernels.mosaic import void_asm
from pallas_kernels.mosaic_lanes import thread_id

Layout = plgpu.Layout


def fence_async() -> None:
    """Orders this thread's own accesses of shared memory before those of TMA and wgmma that a barrier then lets go."""
    _asm("fence.proxy.async.shared::cta;", ("fence",))


def named_barrier_sync(barrier: Any, threads: int) -> None:
    """Arrives at a hardware barrier of the CTA and waits until `threads` threads have. Mosaic itself uses 0 to 3."""
    _asm(f"bar.sync $0, {threads};", ("bar.sync", threads), barrier)


def named_barrier_arrive(barrier: Any, threads: int) -> None:
    """Arrives without waiting."""
    _asm(f"bar.arrive $0, {threads};", ("bar.arrive", threads), barrier)


def wait_turn(turns: Any, index: Any, turn: Any) -> None:
    """One warp waits until the int32 at `index` of `turns`, in global memory, has reached `turn`.

    TMA operations that the warp issues afterwards come after all that was done before the turn was passed on.
    """
    _turn_asm(
        "{ .reg .pred p; .reg .b32 t; WAIT: ld.acquire.gpu.global.b32 t, [$0]; setp.lt.s32 p, t, $1; @p bra WAIT; "
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; }",
        ("turn.wait",), turns, index, turn,
    )  # fmt: skip


def pass_turn(turns: Any, index: Any) -> None:
    """One warp adds 1 to the int32 at `index` of `turns`; its finished TMA operations come before."""
    _turn_asm(
        "{ .reg .pred p; .reg .b32 l; bar.warp.sync 0xffffffff; mov.u32 l, %laneid; setp.eq.s32 p, l, 0; "
        "@p red.release.gpu.global.add.s32 [$0], 1; }",
        ("turn.add",), turns, index,
    )  # fmt: skip


def announce(turns: Any, index: Any) -> None:
    """A warpgroup adds 1 to the int32 at `index` of `turns`, in global memory; what its threads wrote comes before.

    `wait_turn` is the other side.
    """

    def emit(_, turns, index):
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(i64, index.registers.flat[0]), mgpu.c(4, i64))
        address = arith.addi(llvm.ptrtoint(i64, mgpu.memref_ptr(turns)), offset)
        mgpu.warpgroup_barrier()
        text = "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p red.release.gpu.global.add.s32 [$0], 1; }"
        void_asm(text, [address, thread_id()], "l,r,~{memory}")

    emit.interpret = ("turn.add",)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), Layout.WG_SPLAT))(emit)(turns, index)


def with_zeros(
    size: int, launch: Callable[[Any], Sequence[Any]], out_type: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """launch(ref): the results of a kernel that counts in int32 (size,) of global memory, zeros when it starts.

    The ref lives for this call only. One made by `jax.new_ref` is an effect of the program, which neither
    custom_partitioning nor jit around a custom derivative lowers (jax 0.11).
    """

    def run(refs: Any) -> None:
        zeros, outs = refs
        for ref, x in zip(outs, launch(zeros), strict=True):
            ref[...] = x

    outs = [jnp.zeros(x.shape, x.dtype) for x in out_type]
    return pl.run_state(run)((jnp.zeros(size, jnp.int32), outs))[1]


def take(counter: Any) -> Any:
    """One warp adds 1 to `counter`, int32 (1,) in global memory, and gets what it was."""

    def emit(_, counter):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        address = llvm.ptrtoint(i64, mgpu.memref_ptr(counter))
        text = (
            "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.s32 p, l, 0; mov.b32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.s32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
        )
        taken = llvm.inline_asm(i32, [address], text, "=&r,l,~{memory}", has_side_effects=True)
        return FragmentedArray.splat(taken, (), is_signed=True)

    emit.interpret_refs = lambda counter: (counter[0], {0: counter + 1})
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT),
    )(emit)(counter)


def read_shared(x: Any) -> Any:
    """The int32 in `x` (1,), in shared memory; the indexing of a warp's code does not lower."""

    def emit(_, x):
        i32 = ir.IntegerType.get_signless(32)
        address = llvm.ptrtoint(i32, mgpu.memref_ptr(x))
        value = llvm.inline_asm(i32, [address], "ld.shared.b32 $0, [$1];", "=r,r,~{memory}", has_side_effects=True)
        return FragmentedArray.splat(value, (), is_signed=True)

    emit.interpret_refs = lambda x: (x[0], {})
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT),
    )(emit)(x)


def _asm(text: str, interpret: tuple[Any, ...], *scalars: Any) -> None:
    def emit(_, *scalars):
        operands = [x.registers.flat[0] for x in scalars]
        constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
        void_asm(text, operands, constraints)

    emit.interpret = interpret
    plgpu.inline_mgpu(arg_types=(Layout.WG_SPLAT,) * len(scalars))(emit)(*scalars)


def _turn_asm(text: str, interpret: tuple[Any, ...], turns: Any, index: Any, *scalars: Any) -> None:
    def emit(_, turns, index, *scalars):
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(i64, index.registers.flat[0]), mgpu.c(4, i64))
        address = arith.addi(llvm.ptrtoint(i64, mgpu.memref_ptr(turns)), offset)
        operands = [address, *(x.registers.flat[0] for x in scalars)]
        constraints = ",".join(["l"] + ["r"] * len(scalars) + ["~{memory}"])
        void_asm(text, operands, constraints)

    emit.interpret = interpret
    arguments = (plgpu.RefType(), *(Layout.WG_SPLAT,) * (1 + len(scalars)))
    plgpu.inline_mgpu(arg_types=arguments)(emit)(turns, index, *scalars)
