"""Backward of attention on Hopper for head dims above 128: warpgroups with roles, every mask, bitwise reproducible.

At these head dims dK and dV of 64 keys fill the registers of two warpgroups, so each of the five products has its
place. A CTA owns 64 keys of one kv head and walks over blocks of 64 queries, last block first, and in each over the
query heads of the group. Tiles of P and dS are transposed (rows are keys), and travel through shared memory:

    warp "load"    K V | Q dO rows | Q dO rows | ...                          TMA, a ring of `slots`
    warpgroup A    S'  = K Q' - lse/scale    P' = exp2(c S')  -> buffer       dV += P' dO
    warpgroup B    dP' = V dO' - delta       dS' = P' * dP'   -> same buffer  dK += dS' Q
    warpgroup C    dQ  = dS K, 64 columns at a time, added to float32 in global memory when it is the CTA's turn
    warps          "turn" waits for the turn at a q block, "pass" hands it on once the sums are in global memory

A CTA's own sums dK and dV stay in float32 registers. The CTAs of one head add to a block of dQ in the order of their
keys, and the first one stores; who waits for whom, the plan, and what NaN may reach are as in `hopper_bwd`. dQ is kept
in the order in which the threads of C hold it, 16 bytes to a thread, and is put in order afterwards. Adding from
registers saves shared memory, both room and bandwidth: staged in it, dQ would cost 128 KiB of traffic a step beside
the 340 KiB of the products. Two warps keep the latency of the turns out of C, which only meets them at named barriers.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic, mosaic_turns
from pallas_kernels.attention.hopper_bwd_plan import Call, Tiles, differentiate, place, row_count
from pallas_kernels.attention.hopper_config import BackwardConfig, backward_tiles, padded_head_dims
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.mosaic import ACC, COLUMNS, ROWS, Layout

BLOCK = 64  # queries of a step, keys of a CTA, columns of dQ at a time
_SLOTS = 2  # of Q and dO in shared memory
_BUFFERS = 3  # tiles of P or dS in shared memory
_REGISTERS = (216, 208, 64, 24)  # of a thread of A, B, C and of the warps that load and pass turns
# Named barriers, beyond those of Mosaic (0 to 4): C may add; C has added; A and B have zeroed what is not finite.
_TURN, _ADDED, _SCRUBBED = 5, 6, 7
_C_AND_WARP = 128 + 32  # threads
_I32, _F32 = jnp.int32, jnp.float32


def _rem(x: Any, n: int) -> Any:
    return lax.rem(x, _I32(n))


def _load(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """One warp: brings K and V once, and Q, dO and what belongs to rows step by step."""
    keys = pl.ds(at.j * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(refs.k.at[at.b, keys, at.head], refs.k_s, refs.k_ready)
    plgpu.copy_gmem_to_smem(refs.v.at[at.b, keys, at.head], refs.v_s, refs.v_ready)
    if c.segments:
        plgpu.copy_gmem_to_smem(refs.kv_ids.at[at.b, keys], refs.kv_ids_s, refs.k_ready)

    @pl.loop(0, at.steps)
    def _(step):
        qi, head = at.step(step)
        slot = _rem(step, _SLOTS)

        @pl.when(step >= _SLOTS)
        def _():
            plgpu.barrier_wait(refs.free.at[slot])

        rows = pl.ds(qi * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(refs.q.at[at.b, rows, head], refs.q_s.at[slot], refs.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(refs.rows.at[at.b, head, qi], refs.rows_s.at[slot], refs.q_ready.at[slot])
        if c.segments:
            plgpu.copy_gmem_to_smem(refs.q_ids.at[at.b, rows], refs.q_ids_s.at[slot], refs.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(refs.do.at[at.b, rows, head], refs.do_s.at[slot], refs.do_ready.at[slot])

    _drain(refs.free, _SLOTS, at.steps)


def _drain(barrier: Any, count: int, steps: Any) -> None:
    """Waits for what nobody waits for otherwise: the last completions of a ring."""

    @pl.loop(jnp.maximum(steps - count, 0), steps)
    def _(step):
        plgpu.barrier_wait(barrier.at[_rem(step, count)])


def _turn(c: Call, at: Any, refs: SimpleNamespace, step: Any) -> tuple[Any, Any]:
    """(turn at the step's block of dQ, place of its counter)."""
    qi, head = at.step(step)
    return at.j - refs.first[at.entry, qi], (at.b * c.N + head) * c.nq + qi


def _wait_turns(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """One warp: lets C add, as soon as the CTAs before have."""

    @pl.loop(0, at.steps)
    def _(step):
        turn, counter = _turn(c, at, refs, step)
        mosaic_turns.wait_turn(refs.turns, counter, turn)
        mosaic_turns.named_barrier_sync(_I32(_TURN), _C_AND_WARP)


def _pass_turns(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """One warp: when C has added, waits until global memory has it, and passes the turn on."""

    @pl.loop(0, at.steps)
    def _(step):
        mosaic_turns.named_barrier_sync(_I32(_ADDED), _C_AND_WARP)
        mosaic_turns.pass_turn(refs.turns, _turn(c, at, refs, step)[1])


def _walk(c: Call, at: Any, step: Any) -> None:
    """Calls step(i, masked) for all steps: those without a mask, and those with one that follow; on each side."""

    def walk(side: Any) -> None:
        first, middle, last = _I32(0), at.steps_from(at.full_start), at.steps
        if c.sides == 2:
            high = at.steps_from(at.full_stop)
            first, middle, last = (jnp.where(side == 0, *x) for x in ((0, high), (0, middle), (high, last)))
        pl.loop(first, middle)(lambda i: step(i, False))
        if c.masked:
            pl.loop(middle, last)(lambda i: step(i, True))

    if c.sides == 1:
        walk(None)
    else:
        pl.loop(0, 2)(walk)


def _along_columns(x_ref: Any) -> Any:
    """A number of each query, for all keys."""
    return lax.broadcast_in_dim(plgpu.load(x_ref, layout=COLUMNS), (BLOCK, BLOCK), [1])


def _parts(head_dim: int) -> list[Any]:
    """The columns of each accumulator of a sum: wgmma of more than 128 does not compile for 512 threads (C7602)."""
    return [pl.ds(start, min(128, head_dim - start)) for start in range(0, head_dim, 128)]


def _accumulators(head_dim: int) -> list[Any]:
    return [ACC((BLOCK, part.size), _F32) for part in _parts(head_dim)]


def _weights(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """Warpgroup A: P', and dV."""
    plgpu.barrier_wait(refs.k_ready)
    if c.masked:
        plgpu.barrier_wait(refs.v_ready)
        _scrub_keys(refs)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.clean)

    def sums(*dv_accs: Any) -> list[Any]:
        def step(i: Any, masked: bool) -> None:
            slot, buffer = _rem(i, _SLOTS), _rem(i, _BUFFERS)

            def weights(s_acc: Any) -> Any:
                plgpu.barrier_wait(refs.q_ready.at[slot])
                if masked:
                    plgpu.barrier_wait(refs.do_ready.at[slot])
                    _scrub_queries(refs.q_s.at[slot], refs.rows_s.at[slot])
                s_acc[...] = _along_columns(refs.rows_s.at[slot, 0])
                plgpu.wgmma(s_acc, refs.k_s, refs.q_s.at[slot].transpose((1, 0)))
                s = s_acc[...]
                if masked:
                    s = _mask(c, at, refs, slot, at.step(i)[0], s)
                return jnp.exp2(s * (c.scale * math.log2(math.e))).astype(c.dtype)

            p = pl.run_scoped(weights, ACC((BLOCK, BLOCK), _F32))
            if not masked:
                plgpu.barrier_wait(refs.do_ready.at[slot])
            for acc, part in zip(dv_accs, _parts(c.H_v), strict=True):
                plgpu.wgmma(acc, p, refs.do_s.at[slot, :, part])

            @pl.when(i >= _BUFFERS)
            def _():
                plgpu.barrier_wait(refs.buffer_free.at[buffer])

            refs.pds_s[buffer] = p
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.p_ready.at[buffer])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.free.at[slot])

        _walk(c, at, step)
        return [acc[...] for acc in dv_accs]

    dv = pl.run_scoped(sums, *_accumulators(c.H_v))
    _drain(refs.buffer_free, _BUFFERS, at.steps)
    plgpu.barrier_wait(refs.done)  # the last dP read V
    for x, part in zip(dv, _parts(c.H_v), strict=True):
        refs.v_s[:, part] = x.astype(c.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.v_s, refs.dv.at[at.b, pl.ds(at.j * BLOCK, BLOCK), at.head])
    plgpu.wait_smem_to_gmem(0)


def _gradients(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """Warpgroup B: dS', and dK."""
    plgpu.barrier_wait(refs.clean if c.masked else refs.v_ready)

    def sums(*dk_accs: Any) -> list[Any]:
        def step(i: Any, masked: bool) -> None:
            slot, buffer = _rem(i, _SLOTS), _rem(i, _BUFFERS)

            def gradients(dp_acc: Any) -> Any:
                plgpu.barrier_wait(refs.q_ready.at[slot])
                plgpu.barrier_wait(refs.do_ready.at[slot])
                if masked:
                    _scrub_queries(refs.do_s.at[slot], refs.rows_s.at[slot])
                dp_acc[...] = _along_columns(refs.rows_s.at[slot, 1])
                plgpu.wgmma(dp_acc, refs.v_s, refs.do_s.at[slot].transpose((1, 0)))
                plgpu.barrier_wait(refs.p_ready.at[buffer])
                p = plgpu.load(refs.pds_s.at[buffer], layout=Layout.WGMMA).astype(_F32)
                ds = p * dp_acc[...]
                if masked:
                    ds = jnp.where(p == 0, 0.0, ds)  # dP of a masked pair may be anything
                return ds.astype(c.dtype)

            ds = pl.run_scoped(gradients, ACC((BLOCK, BLOCK), _F32))
            for acc, part in zip(dk_accs, _parts(c.D), strict=True):
                plgpu.wgmma(acc, ds, refs.q_s.at[slot, :, part])
            # In the place of P: each warp writes the rows that it has read.
            refs.pds_s[buffer] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.ds_ready.at[buffer])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.free.at[slot])

        _walk(c, at, step)
        return [acc[...] for acc in dk_accs]

    dk = pl.run_scoped(sums, *_accumulators(c.D))
    plgpu.barrier_arrive(refs.done)
    plgpu.barrier_wait(refs.done)  # the last dQ read K
    for x, part in zip(dk, _parts(c.D), strict=True):
        refs.k_s[:, part] = (x * c.scale).astype(c.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.k_s, refs.dk.at[at.b, pl.ds(at.j * BLOCK, BLOCK), at.head])
    plgpu.wait_smem_to_gmem(0)


def _query_gradients(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """Warpgroup C: dQ. The loop over columns stays a loop: unrolled, as LLVM would one of two trips, it spills."""
    parts = _I32(c.D // BLOCK)
    parts = mosaic.opaque(parts) if c.D <= 128 else parts
    plgpu.barrier_wait(refs.clean if c.masked else refs.k_ready)

    @pl.loop(0, at.steps)
    def _(i):
        qi, head = at.step(i)
        buffer = _rem(i, _BUFFERS)
        plgpu.barrier_wait(refs.ds_ready.at[buffer])
        stores = (_turn(c, at, refs, i)[0] == 0).astype(_I32)
        mosaic_turns.named_barrier_sync(_I32(_TURN), _C_AND_WARP)

        @pl.loop(0, parts)
        def _(part):
            def product(acc: Any) -> Any:
                columns = pl.ds(part * BLOCK, BLOCK)
                plgpu.wgmma(acc, refs.pds_s.at[buffer].transpose((1, 0)), refs.k_s.at[:, columns])
                return acc[...]

            dq = pl.run_scoped(product, ACC((BLOCK, BLOCK), _F32))
            _add(refs.dq.at[at.b, head, qi, part], dq, stores)

        mosaic_turns.named_barrier_sync(_I32(_ADDED), _C_AND_WARP)
        plgpu.barrier_arrive(refs.buffer_free.at[buffer])

    plgpu.barrier_arrive(refs.done)
    plgpu.barrier_wait(refs.done)


def _add(target: Any, x: Any, stores: Any) -> None:
    """Adds x (64, 64) in WGMMA layout to float32 (8, 128, 4) in global memory, or stores it where `stores` is 1.

    A warpgroup's thread t adds to [:, t]: 16 bytes of two neighbours in each of two 8-column tiles. `_in_order` undoes
    it. With rows of dQ as they are, a thread would add 8 bytes at a time: 472 TFLOP/s for 575 (H200, head dim 128).
    """

    def emit(_: Any, target: Any, x: Any, stores: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), mgpu.c(128, i32))
        offset = arith.extui(i64, arith.muli(thread, mgpu.c(16, i32)))
        address = arith.addi(llvm.ptrtoint(i64, mgpu.memref_ptr(target)), offset)
        strides = x.layout.tiling.tile_strides(tuple(mgpu.get_contiguous_strides(x.shape)))
        pairs = {}
        for index in np.ndindex(x.registers.shape):
            place = divmod(sum(a * b for a, b in zip(index, strides, strict=True)), x.shape[1])
            pairs[place] = [llvm.extractelement(x.registers[index], mgpu.c(k, i32)) for k in range(2)]
        places = [(row, column) for column in range(0, x.shape[1], 16) for row in (0, 8)]
        for n, (row, column) in enumerate(places):
            text = (
                f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.f32 [$0+{n * 2048}], {{$1, $2, $3, $4}}; "
                f"@!p red.relaxed.gpu.global.add.v4.f32 [$0+{n * 2048}], {{$1, $2, $3, $4}}; }}"
            )
            operands = [address, *pairs[row, column], *pairs[row, column + 8], stores.registers.flat[0]]
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, operands, text, "l,f,f,f,f,r,~{memory}", has_side_effects=True)

    def interpret_refs(target: Any, x: Any, stores: Any) -> Any:
        x = _by_threads(x).reshape(target.shape)
        return None, {0: jnp.where(stores > 0, x, target + x)}

    vars(emit)["interpret_refs"] = interpret_refs
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), Layout.WGMMA, Layout.WG_SPLAT))(emit)(target, x, stores)


# Row and column of an accumulator as (warp, half, row) and (pair of tiles, tile, quad, element).
_ROW_AND_COLUMN = (4, 2, 8, BLOCK // 16, 2, 4, 2)


def _by_threads(x: Any) -> Any:
    """A (64, 64) accumulator in the order of `_add`: (pair of tiles, half, [warp, row, quad], [tile, element])."""
    return x.reshape(_ROW_AND_COLUMN).transpose(3, 1, 0, 2, 5, 4, 6)


def _in_order(dq: Float[Array, "B N nq parts 8 128 4"]) -> Float[Array, "B T N H"]:
    B, N, nq, parts = dq.shape[:4]
    dq = dq.reshape(B, N, nq, parts, BLOCK // 16, 2, 4, 8, 4, 2, 2)
    dq = dq.transpose(0, 2, 6, 5, 7, 1, 3, 4, 9, 8, 10)
    return dq.reshape(B, nq * BLOCK, N, parts * BLOCK)


def _mask(c: Call, at: Any, refs: SimpleNamespace, slot: Any, qi: Any, s: Any) -> Any:
    """S' with `hidden` where a key (row) is not seen by a query (column). Rows that see no key have an LSE of -inf."""
    if c.bounds != (None, None) or c.limited:
        s = mosaic.keep_columns(s, *_seen_columns(c, at, refs, qi), c.hidden)
    if c.segments:
        queries = plgpu.load(refs.q_ids_s.at[slot], layout=COLUMNS)
        keys = plgpu.load(refs.kv_ids_s, layout=ROWS)
        same = lax.broadcast_in_dim(queries, s.shape, [1]) == lax.broadcast_in_dim(keys, s.shape, [0])
        s = jnp.where(same, s, c.hidden)
    return s


def _seen_columns(c: Call, at: Any, refs: SimpleNamespace, qi: Any) -> tuple[Any | None, Any | None]:
    """(first, stop) of the queries of a block that see each key of this CTA; None is no bound.

    Query q sees key kv where kv - shift - above <= q <= kv - shift + below.
    """
    below, above = c.bounds
    # Of a number that LLVM knows it would make all that follows from it before the loop, and spill that.
    first_kv = mosaic.opaque(at.j * BLOCK)
    shift = refs.plan[at.entry, at.j, 4] if c.shift is None else c.shift
    # Mosaic's search for layouts does not end if this is not used.
    row = plgpu.broadcasted_iota(_I32, (BLOCK,), 0, layout=ROWS)
    level = first_kv - shift - qi * BLOCK
    low = None if above is None else row + (level - above)
    high = None if below is None else row + (level + below + 1)
    if c.limited:
        keys = refs.plan[at.entry, at.j, 5] if c.kv_lengths else c.keys
        low = jnp.where(row < keys - first_kv, 0 if low is None else low, BLOCK)
    return low, high


def _scrub_keys(refs: SimpleNamespace) -> None:
    """Rows of K that are not finite become 0, and the same rows of V NaN."""

    def wrong_rows(columns: int) -> Any:
        tile = plgpu.load(refs.k_s.at[:, pl.ds(columns, BLOCK)], layout=Layout.WGMMA)
        return jnp.max(jnp.where(jnp.abs(tile.astype(_F32)) < jnp.inf, 0.0, 1.0), axis=1)

    wrong = wrong_rows(0)
    for columns in range(BLOCK, refs.k_s.shape[1], BLOCK):
        wrong = jnp.maximum(wrong, wrong_rows(columns))
    wrong = lax.broadcast_in_dim(wrong, (BLOCK, BLOCK), [0])
    for tile_ref, fill in ((refs.k_s, 0.0), (refs.v_s, jnp.nan)):

        @pl.loop(0, tile_ref.shape[1] // BLOCK)
        def _(part, tile_ref=tile_ref, fill=fill):
            columns = tile_ref.at[:, pl.ds(part * BLOCK, BLOCK)]
            tile = plgpu.load(columns, layout=Layout.WGMMA)
            columns[...] = jnp.where(wrong > 0, fill, tile.astype(_F32)).astype(tile.dtype)


def _scrub_queries(tile_ref: Any, rows_ref: Any) -> None:
    """Where the block has rows whose LSE or delta is not finite: A zeroes them in Q and B in dO, and both wait."""

    @pl.when(rows_ref[2, 0] > 0)
    def _():
        finite = jnp.abs(plgpu.load(rows_ref.at[0], layout=ROWS)) < jnp.inf
        finite = lax.broadcast_in_dim(jnp.where(finite, 1.0, 0.0), (BLOCK, BLOCK), [0])

        @pl.loop(0, tile_ref.shape[1] // BLOCK)
        def _(part):
            columns = tile_ref.at[:, pl.ds(part * BLOCK, BLOCK)]
            tile = plgpu.load(columns, layout=Layout.WGMMA)
            columns[...] = jnp.where(finite > 0, tile.astype(_F32), 0.0).astype(tile.dtype)

        mosaic_turns.fence_async()
        mosaic_turns.named_barrier_sync(_I32(_SCRUBBED), 2 * 128)


def _warps(c: Call, at: Any, refs: SimpleNamespace) -> None:
    """The last warpgroup: warps that load and take turns."""

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(lambda: _load(c, at, refs))
        pl.when(warp == 1)(lambda: _wait_turns(c, at, refs))
        pl.when(warp == 2)(lambda: _pass_turns(c, at, refs))


def _body(c: Call, operands: tuple[str, ...], *global_refs: Any, **scratch: Any) -> None:
    refs = SimpleNamespace(**dict(zip(operands, global_refs, strict=True)), **scratch)

    def begin(registers: int, work: Any) -> None:
        plgpu.set_max_registers(registers, action="increase" if registers > 128 else "decrease")
        # Each role finds its place by itself: found before, it would spill where there are few registers.
        work(c, place(c, refs), refs)

    # One after another under conditions, the roles would hand on the phases of all barriers, and spill them.
    roles = zip(_REGISTERS, (_weights, _gradients, _query_gradients, _warps), strict=True)
    lax.switch(lax.axis_index("warpgroup"), [functools.partial(begin, *role) for role in roles])


def _scratch(c: Call) -> dict[str, Any]:
    swizzled, smem, barrier = mosaic.swizzled, plgpu.SMEM, plgpu.Barrier
    ids = {"kv_ids_s": smem((BLOCK,), _I32), "q_ids_s": smem((_SLOTS, BLOCK), _I32)} if c.segments else {}
    clean = {"clean": barrier(num_arrivals=1)} if c.masked else {}
    return (
        ids
        | clean
        | {
            "k_s": swizzled((BLOCK, c.D), c.dtype),
            "v_s": swizzled((BLOCK, c.H_v), c.dtype),
            "q_s": swizzled((_SLOTS, BLOCK, c.D), c.dtype),
            "do_s": swizzled((_SLOTS, BLOCK, c.H_v), c.dtype),
            "rows_s": smem((_SLOTS, row_count(c), BLOCK), _F32),
            "pds_s": swizzled((_BUFFERS, BLOCK, BLOCK), c.dtype),
            "k_ready": barrier(num_arrivals=1 + c.segments),
            "v_ready": barrier(num_arrivals=1),
            "q_ready": barrier(num_arrivals=2 + c.segments, num_barriers=_SLOTS),
            "do_ready": barrier(num_arrivals=1, num_barriers=_SLOTS),
            "free": barrier(num_arrivals=2, num_barriers=_SLOTS),  # by A and B
            "p_ready": barrier(num_arrivals=1, num_barriers=_BUFFERS),
            "ds_ready": barrier(num_arrivals=1, num_barriers=_BUFFERS),
            "buffer_free": barrier(num_arrivals=1, num_barriers=_BUFFERS),
            "done": barrier(num_arrivals=2),  # by B and C
        }
    )


def _launch(c: Call, operands: dict[str, Any]) -> tuple[Array, Array, Array]:
    """(dq in float32 and not scaled, padded to whole blocks; dk; dv)."""
    outputs = {
        "dk": jax.ShapeDtypeStruct((c.B, c.S, c.K, c.D), c.dtype),
        "dv": jax.ShapeDtypeStruct((c.B, c.S, c.K, c.H_v), c.dtype),
        "dq": jax.ShapeDtypeStruct((c.B, c.N, c.nq, c.D // BLOCK, 8, 128, 4), _F32),
    }
    kernel = plgpu.kernel(
        lambda *refs, **scratch: _body(c, (*operands, "turns", *outputs), *refs, **scratch),
        out_type=tuple(outputs.values()),
        grid=(c.B * c.K * c.nkv,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="attention_bwd_wide",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        scratch_types=_scratch(c),
    )
    out_type = tuple(outputs.values())
    dk, dv, dq = mosaic_turns.with_zeros(c.B * c.N * c.nq, lambda turns: kernel(*operands.values(), turns), out_type)
    return _in_order(dq), dk, dv


def backward(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    out: Float[Array, "B T N H_v"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H_v"],
    dlse: Float[Array, "B T N"] | None = None,
    *,
    scale: float,
    config: BackwardConfig | None = None,
    **optional: Int[Array, "..."] | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H_v"]]:
    """(dq, dk, dv) in the input dtypes, of head dims up to 256: `hopper_bwd_plan.differentiate` with this kernel."""
    tiles = Tiles(*padded_head_dims(spec), *backward_tiles(spec))
    arrays = (query, key, value, out, lse, dout, dlse)
    return differentiate(spec, tiles, _launch, *arrays, scale=scale, config=config, **optional)
