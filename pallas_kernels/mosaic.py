"""What every Hopper kernel needs and Pallas Mosaic GPU does not offer: masks, operands, products, votes.

Each inline function carries `interpret`, the same thing in words that tests/mosaic/interpreter.py can run on a CPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm, vector
from jax.experimental.mosaic.gpu import WGMMAAccumulator, wgmma
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray

Layout = plgpu.Layout
ROWS = Layout.WGMMA.reduce(1)  # one value per row of an accumulator
COLUMNS = Layout.WGMMA.reduce(0)  # one value per column
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def _swizzle(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of a row of a tile of `swizzled` memory."""
    return next(n for n in (128, 64, 32) if shape[-1] * jnp.dtype(dtype).itemsize % n == 0)


def _transforms(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    itemsize, width = jnp.dtype(dtype).itemsize, _swizzle(shape, dtype)
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, width // itemsize)), swizzle(width)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that both TMA and wgmma address: 8 rows of 128 swizzled bytes to a tile, or of 64 or 32."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape, dtype))


def keep_columns(x: Any, low: Any | None, high: Any | None, fill: float) -> Any:
    """x (64, c) float32 in WGMMA layout where low[r] <= column < high[r], else `fill`.

    low and high are int32 (64,) in ROWS layout; None is no bound.

    Written out because LLVM hoists `column - row` of the plain jnp.where out of the kernel's loop, at the price of 32
    to 64 registers; here a thread compares its two rows' bounds with constants.
    """

    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds:
        return x

    def emit(_, x, *bounds):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), mgpu.c(4, i32))
        first = arith.muli(lane, mgpu.c(2, i32))
        relative = [[arith.subi(_scalar(r), first) for r in bound.registers.flat] for bound in bounds]
        strides = x.layout.tiling.tile_strides(tuple(mgpu.get_contiguous_strides(x.shape)))
        out = np.empty_like(x.registers)
        value = mgpu.c(fill, ir.F32Type.get())
        for index in np.ndindex(x.registers.shape):
            row, column = divmod(sum(a * b for a, b in zip(index, strides, strict=True)), x.shape[1])
            register = x.registers[index]
            for k in range(2):
                at = mgpu.c(column + k, i32)
                seen = None
                for bound, name in zip(relative, names, strict=True):
                    predicate = arith.CmpIPredicate.sle if name == "low" else arith.CmpIPredicate.sgt
                    inside = arith.cmpi(predicate, bound[row // 8], at)
                    seen = inside if seen is None else arith.andi(seen, inside)
                kept = arith.select(seen, llvm.extractelement(register, mgpu.c(k, i32)), value)
                register = llvm.insertelement(register, kept, mgpu.c(k, i32))
            out[index] = register
        return type(x)(_registers=out, _layout=x.layout, _is_signed=None)

    def interpret(x, *bounds):
        column = jnp.arange(x.shape[1])[None]
        for bound, name in zip(bounds, names, strict=True):
            x = jnp.where(column >= bound[:, None] if name == "low" else column < bound[:, None], x, fill)
        return x

    names = [name for name, bound in (("low", low), ("high", high)) if bound is not None]
    emit.interpret = interpret
    return plgpu.inline_mgpu(
        arg_types=(Layout.WGMMA, *[ROWS] * len(bounds)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=Layout.WGMMA),
    )(emit)(x, *bounds)


def as_operand(x: Any, dtype: Any) -> Any:
    """x (64, c), float32 in an accumulator's layout, in e4m3 or e5m2 as an operand of the next product; no shuffle.

    Of every 16 columns those of the operand are x's 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a thread holds 2 adjacent
    ones of every 8 in an accumulator, and 4 adjacent ones of every 16 in an operand.
    """
    kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[jnp.dtype(dtype).name]
    text = (
        f"{{ .reg .b16 l, h; cvt.rn.satfinite.{kind}x2.f32 l, $2, $1; cvt.rn.satfinite.{kind}x2.f32 h, $4, $3; "
        "mov.b32 $0, {l, h}; }"
    )

    def emit(_, x):
        i32 = ir.IntegerType.get_signless(32)
        element: Any = mgpu.dtype_to_ir_type(jnp.dtype(dtype))
        layout: Any = Layout.WGMMA_8BIT.to_mgpu()
        out = np.empty(layout.registers_shape(tuple(x.shape)), dtype=object)
        for i, j, *rest in np.ndindex(out.shape):
            pairs = [x.registers[(i, 2 * j + half, *rest)] for half in range(2)]
            four = [llvm.extractelement(pair, mgpu.c(k, i32)) for pair in pairs for k in range(2)]
            word = llvm.inline_asm(i32, four, text, "=r,f,f,f,f")
            out[(i, j, *rest)] = mgpu.bitcast(word, ir.VectorType.get((4,), element))
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    def interpret(x):
        most = float(jnp.finfo(dtype).max)
        blocks = x.reshape(64, -1, 2, 4, 2).transpose(0, 1, 3, 2, 4)  # of 16 columns: half, thread of a quad, pair
        return jnp.clip(blocks.reshape(x.shape), -most, most).astype(dtype)

    emit.interpret = interpret
    operand = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=Layout.WGMMA_8BIT)
    return plgpu.inline_mgpu(arg_types=(Layout.WGMMA,), return_type=operand)(emit)(x)


def product(a: Any, b: Any) -> Any:
    """a b' of a (64, k) and b (n, k) in `swizzled` shared memory, of 8 or 16 bits, in WGMMA layout; see `finished`.

    As `plgpu.wgmma` into a new accumulator, which Mosaic fills with zeros first: two clocks for every two registers,
    between the arrival of b and the product. Here the first instruction does not read them.
    """
    shape = a.shape[0], b.shape[0]
    b_type = b.shape, b.dtype

    def emit(_: Any, a: Any, b: Any) -> FragmentedArray:
        layout: Any = Layout.WGMMA.to_mgpu()
        zeros = FragmentedArray.splat(mgpu.c(0.0, ir.F32Type.get()), shape, layout)
        block: Any = ir.InsertionPoint.current.block
        void_asm("wgmma.fence.sync.aligned;")
        before = len(block.operations)
        start = WGMMAAccumulator.from_registers(zeros, sync=False)
        running = wgmma(start, a, mgpu.memref_transpose(b, (1, 0, 3, 2)), swizzle=_swizzle(*b_type))
        first = next(op for op in list(block.operations)[before:] if op.name == "llvm.inline_asm")
        text = ir.StringAttr(first.attributes["asm_string"]).value
        adds = "setp.ne.b32 p, "  # the predicate of whether it adds to what is there: 1, a constant, is not 0
        assert "wgmma.mma_async" in text and adds in text
        first.attributes["asm_string"] = ir.StringAttr.get(text.replace(adds, "setp.eq.b32 p, "))
        void_asm("wgmma.commit_group.sync.aligned;")
        return running.value

    emit.interpret = ("product",)
    types = [plgpu.RefType(_transforms(x.shape, x.dtype)) for x in (a, b)]
    return plgpu.inline_mgpu(
        arg_types=tuple(types), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=Layout.WGMMA)
    )(emit)(a, b)


def finished(x: Any, wait_n: int) -> Any:
    """x, a `product`, when at most `wait_n` products that were begun after it still run."""
    plgpu.wgmma_wait(wait_n)
    return jax.lax.optimization_barrier(x)


def columns_of(x: Any, width: int) -> list[Any]:
    """x (64, n * width) in WGMMA layout as n arrays of `width` columns, which are registers of it."""
    count = x.shape[1] // width

    def cut(x):
        return [x[:, i * width : (i + 1) * width] for i in range(count)]

    def emit(_, x):
        return cut(x)

    emit.interpret = cut
    part = plgpu.ShapeDtypeStruct((64, width), x.dtype, layout=Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(Layout.WGMMA,), return_type=[part] * count)(emit)(x)


def any_not_finite(tile: Any) -> Any:
    """Whether any element of a 16-bit tile in WGMMA layout is NaN or inf; int32, one value for the warpgroup."""
    kind = jnp.finfo(tile.dtype)
    # An exponent of all ones carries into the cleared sign bit when its lowest bit is added.
    exponent, lowest = (x * 0x10001 for x in (((1 << kind.nexp) - 1) << kind.nmant, 1 << kind.nmant))

    def emit(_: Any, tile: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        seen = mgpu.c(0, i32)
        for register in tile.registers.flat:
            word = mgpu.bitcast(register, i32)
            seen = arith.ori(seen, arith.addi(arith.andi(word, mgpu.c(exponent, i32)), mgpu.c(lowest, i32)))
        return _any_of_warpgroup(arith.andi(seen, mgpu.c(0x80008000, i32)))

    emit.interpret = lambda tile: (~jnp.isfinite(tile.astype(jnp.float32)).all()).astype(jnp.int32)
    shape = plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(Layout.WGMMA,), return_type=shape)(emit)(tile)


def store_by_thread(x: Any, ref: Any) -> None:
    """x (64, c), float32 in WGMMA layout, into `ref` of that shape in plain shared memory, for `load_by_thread` alone.

    Each thread reads just what it wrote: by 16 bytes, thread beside thread, without the conflicts and selects of rows.
    """

    def emit(_: Any, x: Any, ref: Any) -> None:
        address, pairs = _by_thread(ref), list(x.registers.flat)
        for i in range(0, len(pairs), 2):
            four = [llvm.extractelement(pair, mgpu.c(k, address.type)) for pair in pairs[i : i + 2] for k in range(2)]
            text = f"st.shared.v4.f32 [$0+{i // 2 * _BY_THREAD}], {{$1, $2, $3, $4}};"
            void_asm(text, [address, *four], "r,f,f,f,f,~{memory}")

    emit.interpret_refs = lambda x, ref: (None, {1: x})
    plgpu.inline_mgpu(arg_types=(Layout.WGMMA, plgpu.RefType()))(emit)(x, ref)


def load_by_thread(ref: Any) -> Any:
    """What `store_by_thread` put there."""

    def emit(_: Any, ref: Any) -> FragmentedArray:
        address, f32 = _by_thread(ref), ir.F32Type.get()
        layout: Any = Layout.WGMMA.to_mgpu()
        out = np.empty(layout.registers_shape(tuple(ref.type.shape)), dtype=object)
        pairs = []
        for i in range(out.size // 2):
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{i * _BY_THREAD}];"
            kind = llvm.StructType.get_literal([f32] * 4)
            four = llvm.inline_asm(kind, [address], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True)
            four = [llvm.extractvalue(f32, four, [k]) for k in range(4)]
            pairs += [vector.from_elements(ir.VectorType.get((2,), f32), four[k : k + 2]) for k in (0, 2)]
        out.flat = pairs
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    emit.interpret_refs = lambda ref: (ref, {})
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=Layout.WGMMA)
    )(emit)(ref)


_BY_THREAD = 16 * 128  # bytes of a warpgroup's threads side by side


def _by_thread(ref: ir.Value) -> ir.Value:
    """The address of this thread's first 16 bytes of a warpgroup's piece of shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), mgpu.c(128, i32))
    return arith.addi(llvm.ptrtoint(i32, mgpu.memref_ptr(ref)), arith.muli(thread, mgpu.c(16, i32)))


def any_of_warp(rows: Any) -> Any:
    """Whether any of a warp's int32 `rows`, in ROWS layout, is not 0; int32, and not the same in every warp.

    For branches without a product or a barrier, which all of a warpgroup would have to take.
    """

    def emit(_: Any, rows: Any) -> Any:
        seen = functools.reduce(arith.ori, map(_scalar, rows.registers.flat))
        text = "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.s32 $0, 1, 0, q; }"
        return FragmentedArray.splat(llvm.inline_asm(seen.type, [seen], text, "=r,r"), (), is_signed=True)

    emit.interpret = lambda rows: (rows != 0).any().astype(jnp.int32)
    shape = plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=shape)(emit)(rows)


def any_not_negative(x: Any, rows: Any) -> Any:
    """Whether any of a warp's float32 `x`, in WGMMA layout, or `rows`, in ROWS layout, lacks the sign bit.

    As `any_of_warp`. Half an instruction an element, where a maximum takes one that is no faster, and shuffles.
    """

    def emit(_: Any, x: Any, rows: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pairs = [mgpu.bitcast(register, ir.VectorType.get((2,), i32)) for register in x.registers.flat]
        values = [llvm.extractelement(pair, mgpu.c(k, i32)) for pair in pairs for k in range(2)]
        values += [mgpu.bitcast(_scalar(register), i32) for register in rows.registers.flat]
        # Four chains, none of which waits for another; ptxas makes two steps of a chain one LOP3.
        signs = functools.reduce(arith.andi, (functools.reduce(arith.andi, values[n::4]) for n in range(4)))
        text = "{ .reg .pred p, q; setp.ge.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.s32 $0, 1, 0, q; }"
        return FragmentedArray.splat(llvm.inline_asm(i32, [signs], text, "=r,r"), (), is_signed=True)

    def interpret(x, rows):
        return jnp.logical_not(jnp.signbit(x).all() & jnp.signbit(rows).all()).astype(jnp.int32)

    emit.interpret = interpret
    shape = plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(Layout.WGMMA, ROWS), return_type=shape)(emit)(x, rows)


def any_nonzero(rows: Any) -> Any:
    """Whether any of int32 `rows`, in ROWS layout, is not 0; int32, one value for the warpgroup."""

    def emit(_: Any, rows: Any) -> Any:
        return _any_of_warpgroup(functools.reduce(arith.ori, map(_scalar, rows.registers.flat)))

    emit.interpret = lambda rows: (rows != 0).any().astype(jnp.int32)
    shape = plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=shape)(emit)(rows)


def _any_of_warpgroup(seen: ir.Value) -> FragmentedArray:
    i32 = ir.IntegerType.get_signless(32)
    # Mosaic's own barrier of the warpgroup, which these 128 threads use in program order.
    barrier = arith.addi(mgpu.warpgroup_idx(sync=False), mgpu.c(1, i32))
    text = "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; barrier.cta.red.or.pred q, $2, 128, p; selp.s32 $0, 1, 0, q; }"
    seen = llvm.inline_asm(i32, [seen, barrier], text, "=r,r,r", has_side_effects=True)
    return FragmentedArray.splat(seen, (), is_signed=True)


def store_largest(rows: Any, cells: Any) -> None:
    """The largest of each warp's 16 float32 `rows`, in ROWS layout and not below 0, into `cells` (4,), shared memory.

    Mosaic's own maximum over rows goes through scratch memory that all warpgroups share, with a barrier of one.
    """

    def emit(_: Any, rows: Any, cells: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        # Such numbers are ordered as their bits are.
        first, second = (mgpu.bitcast(_scalar(register), i32) for register in rows.registers.flat)
        text = (
            "{ .reg .b32 m, a; max.s32 m, $0, $1; redux.sync.max.s32 m, m, 0xffffffff; mov.u32 a, %tid.x; "
            "and.b32 a, a, 127; shr.b32 a, a, 5; mad.lo.s32 a, a, 4, $2; st.shared.b32 [a], m; }"
        )
        operands = [first, second, llvm.ptrtoint(i32, mgpu.memref_ptr(cells))]
        void_asm(text, operands, "r,r,r,~{memory}")

    emit.interpret_refs = lambda rows, cells: (None, {1: rows.reshape(4, 16).max(1)})
    plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType()))(emit)(rows, cells)


def zero_not_finite(tile: Any, flag: Any) -> None:
    """One warp zeroes what is NaN or inf in a 16-bit `tile` of `swizzled` shared memory, and then sets `flag`.

    By vectors of 8 elements: finite neighbours of a NaN go with it. `flag` is int32 (1,) in shared memory, set to 1 or
    left alone. `tile` must be contiguous (whole rows, multiples of 64). What follows sees it after `fence_async`.
    """
    kind = jnp.finfo(tile.dtype)
    # An exponent of all ones carries into the cleared sign bit when its lowest bit is added.
    exponent, lowest = ((1 << kind.nexp) - 1) << kind.nmant, 1 << kind.nmant
    words = "0123"
    at_once, vector, warp = 4, 16, 512
    size = 2 * int(np.prod(tile.shape))
    assert size % (at_once * warp) == 0
    loads = " ".join(
        f"ld.shared.v4.b32 {{{', '.join(f'w{i}{k}' for k in words)}}}, [a+{i * warp}];" for i in range(at_once)
    )
    tests = " ".join(
        " ".join(
            f"and.b32 w{i}{k}, w{i}{k}, {exponent * 0x10001:#x}; add.s32 w{i}{k}, w{i}{k}, {lowest * 0x10001:#x};"
            for k in words
        )
        + f" or.b32 w{i}0, w{i}0, w{i}1; or.b32 w{i}2, w{i}2, w{i}3; or.b32 w{i}0, w{i}0, w{i}2;"
        + f" and.b32 w{i}0, w{i}0, 0x80008000; setp.ne.b32 p, w{i}0, 0;"
        + f" @p st.shared.v4.b32 [a+{i * warp}], {{0, 0, 0, 0}}; @p st.shared.b32 [$1], 1;"
        for i in range(at_once)
    )
    names = ", ".join(f"w{i}{k}" for i in range(at_once) for k in words)
    text = (
        f"{{ .reg .pred p; .reg .b32 a, e, {names}; mov.u32 a, %laneid; mad.lo.s32 a, a, {vector}, $0; "
        f"add.s32 e, $0, {size}; NEXT: {loads} {tests} add.s32 a, a, {at_once * warp}; "
        "setp.lt.u32 p, a, e; @p bra NEXT; bar.warp.sync 0xffffffff; }"
    )

    def emit(_, tile, flag):
        i32 = ir.IntegerType.get_signless(32)
        operands = [llvm.ptrtoint(i32, mgpu.memref_ptr(x)) for x in (tile, flag)]
        void_asm(text, operands, "r,r,~{memory}")

    def interpret_refs(tile, flag):
        good = jnp.isfinite(tile.astype(jnp.float32))
        return None, {0: jnp.where(good, tile, 0), 1: jnp.where(good.all(), flag, 1)}

    emit.interpret_refs = interpret_refs
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(tile.shape, tile.dtype)), plgpu.RefType()))(emit)(tile, flag)


def void_asm(text: str, operands: Sequence[ir.Value] = (), constraints: str = "~{memory}") -> None:
    """PTX that gives no value and is not left out."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


def _scalar(register: ir.Value) -> ir.Value:
    """The one element of a register that may be a vector of length 1."""
    if isinstance(register.type, ir.VectorType):
        return llvm.extractelement(register, mgpu.c(0, ir.IntegerType.get_signless(32)))
    return register


def opaque(x: Any) -> Any:
    """x, an int32 scalar, of which LLVM knows nothing: what is computed from it stays where it is used, in the loop."""

    def emit(_, x):
        i32 = ir.IntegerType.get_signless(32)
        x = llvm.inline_asm(i32, [x.registers.flat[0]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return FragmentedArray.splat(x, (), is_signed=True)

    emit.interpret = lambda x: x
    return plgpu.inline_mgpu(
        arg_types=(Layout.WG_SPLAT,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=Layout.WG_SPLAT)
    )(emit)(x)
