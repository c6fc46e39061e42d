"""Backward of attention on Hopper: one fused kernel, five products, every mask, bitwise reproducible.

A CTA owns 128 keys of one kv head and walks over the blocks of queries, last block first, and in each over the query
heads of the group. Two compute warpgroups own 64 keys each; a third one holds a warp that loads and two that write dQ:

    warp "load"   K V | Q dO rows | Q dO rows | ...                          TMA, two slots
    compute 0, 1  S'  = K Q' - lse/scale        dQ of the step before = dS K      (one half each, behind S')
    (one step)    P'  = exp2(c S')              -> shared memory, to the writer
                  dP' = V dO' - delta           dV += P' dO
                  dS' = P' * dP'                -> shared memory, for dQ of the next step
                  dK += dS' Q                   (' = transposed: rows are keys, so that P' and dS' are A operands)
    warp "write"  waits for its turn at the q block, adds the half of dQ to float32 in global memory, passes the turn

dK and dV stay in float32 registers. The CTAs of one head add to a block of dQ in the order of their keys: the first one
stores, which saves a fill with zeros, and counters in global memory pass the turn on. A CTA waits only for CTAs that
the grid numbers lower, and the hardware starts those first, so no wait is in vain however few CTAs fit. Keys ascending
is also longest first under a causal mask. A CTA comes to a block after at least as many steps as the CTAs before it,
and waits little; were heads the outer loop, short CTAs would wait at every head for the long ones.

Which steps a CTA does, and which of them need a mask, is a plan made outside of the kernel (`blocks`). The turn of kv
block j at a q block is j - (first visitor), so that a CTA also visits what it does not need between what it does.

What is masked may hold NaN and inf, which a product with 0 lets through. S' is masked before the exponential, dS' by
P' = 0; non-finite rows of K, which dQ would read, are zeroed in shared memory, and their rows of V made NaN, so that
pairs that do see them are NaN; non-finite rows of Q and dO are zeroed in steps with a mask, and their LSE is NaN.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic, mosaic_turns
from pallas_kernels.attention.hopper_bwd_plan import Call, Place, Tiles, differentiate, place, row_count
from pallas_kernels.attention.hopper_config import BackwardConfig, backward_tiles, padded_head_dims
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.mosaic import ACC, COLUMNS, ROWS, Layout

KV_BLOCK = 128
_COMPUTE = 2  # warpgroups
_KEYS = KV_BLOCK // _COMPUTE  # keys of one warpgroup
_SLOTS = 2  # of Q and dO in shared memory
_REGISTERS = (240, 24)  # of a compute thread, of a thread that loads or writes
# Named barriers: a half of dQ may be overwritten; it is written; both warpgroups have zeroed what is not finite.
_EMPTY, _WRITTEN, _SCRUBBED = 4, 6, 8
_HALF_THREADS = 128 + 32  # a compute warpgroup and its writer warp
_I32, _F32 = jnp.int32, jnp.float32


def _half(c: Call) -> tuple[int, int]:
    """The part of a block of dQ that one warpgroup computes: 64 of 128 queries, or half of the head dim."""
    return (64, c.D) if c.q_block == 128 else (c.q_block, c.D // 2)


def _load(c: Call, at: Place, refs: SimpleNamespace) -> None:
    """One warp: brings K and V once, and Q, dO and what belongs to rows step by step."""
    keys = pl.ds(at.j * KV_BLOCK, KV_BLOCK)
    plgpu.copy_gmem_to_smem(refs.k.at[at.b, keys, at.head], refs.k_s, refs.kv_ready)
    plgpu.copy_gmem_to_smem(refs.v.at[at.b, keys, at.head], refs.v_s, refs.kv_ready)
    if c.segments:
        plgpu.copy_gmem_to_smem(refs.kv_ids.at[at.b, keys], refs.kv_ids_s, refs.kv_ready)

    @pl.loop(0, at.steps)
    def _(step):
        qi, head = at.step(step)
        slot = lax.rem(step, _I32(_SLOTS))

        @pl.when(step >= _SLOTS)
        def _():
            plgpu.barrier_wait(refs.free.at[slot])

        rows = pl.ds(qi * c.q_block, c.q_block)
        plgpu.copy_gmem_to_smem(refs.q.at[at.b, rows, head], refs.q_s.at[slot], refs.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(refs.rows.at[at.b, head, qi], refs.rows_s.at[slot], refs.q_ready.at[slot])
        if c.segments:
            plgpu.copy_gmem_to_smem(refs.q_ids.at[at.b, rows], refs.q_ids_s.at[slot], refs.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(refs.do.at[at.b, rows, head], refs.do_s.at[slot], refs.do_ready.at[slot])

    @pl.loop(jnp.maximum(at.steps - _SLOTS, 0), at.steps)
    def _(step):
        plgpu.barrier_wait(refs.free.at[lax.rem(step, _I32(_SLOTS))])


def _write(c: Call, at: Place, refs: SimpleNamespace, half: Any) -> None:
    """One warp: adds a half of every dQ to global memory when it is its turn."""

    def take() -> None:
        mosaic_turns.named_barrier_sync(_WRITTEN + half, _HALF_THREADS)

    def give() -> None:
        mosaic_turns.named_barrier_arrive(_EMPTY + half, _HALF_THREADS)

    give()
    take()  # dQ "before the first step"
    give()

    @pl.loop(0, at.steps)
    def _(step):
        qi, head = at.step(step)
        turn = at.j - refs.first[at.entry, qi]
        counter = ((at.b * c.N + head) * c.nq + qi) * _COMPUTE + half
        mosaic_turns.wait_turn(refs.turns, counter, turn)
        take()
        if c.q_block == 128:
            target = refs.dq.at[at.b, pl.ds(qi * c.q_block + half * 64, 64), head]
        else:
            columns = pl.ds(half * (c.D // 2), c.D // 2)
            target = refs.dq.at[at.b, pl.ds(qi * c.q_block, c.q_block), head, columns]

        @pl.when(turn == 0)
        def _():
            plgpu.copy_smem_to_gmem(refs.dq_s.at[half], target)

        @pl.when(turn > 0)
        def _():
            plgpu.copy_smem_to_gmem(refs.dq_s.at[half], target, reduction_op="add")

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        give()
        plgpu.wait_smem_to_gmem(0)
        mosaic_turns.pass_turn(refs.turns, counter)


def _compute(c: Call, at: Place, refs: SimpleNamespace, w: Any) -> None:
    """One warpgroup: all steps for its 64 keys."""
    mine = pl.ds(w * _KEYS, _KEYS)
    k_w, v_w = refs.k_s.at[mine], refs.v_s.at[mine]
    # dS of the step before the first one is 0, so that every step runs the same code.
    refs.ds_s[1, mine] = plgpu.layout_cast(jnp.zeros((_KEYS, c.q_block), c.dtype), Layout.WGMMA)
    plgpu.barrier_wait(refs.kv_ready)
    if c.masked:
        _scrub_keys(k_w, v_w)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.ds_ready.at[1])

    def with_accumulators(dk_acc: Any, dv_acc: Any) -> tuple[Any, Any]:
        def walk(side: Any) -> None:
            """The steps of a side: those without a mask, and those with one that follow."""
            first, middle, last = _I32(0), at.steps_from(at.full_start), at.steps
            if c.sides == 2:
                high = at.steps_from(at.full_stop)
                first, middle, last = (jnp.where(side == 0, *x) for x in ((0, high), (0, middle), (high, last)))

            @pl.loop(first, middle)
            def _(i):
                _step(c, at, refs, w, dk_acc, dv_acc, i, False)

            if c.masked:

                @pl.loop(middle, last)
                def _(i):
                    _step(c, at, refs, w, dk_acc, dv_acc, i, True)

        if c.sides == 1:
            walk(None)
        else:
            pl.loop(0, 2)(walk)

        def last(dq_acc: Any) -> Any:
            _issue_dq(c, refs, w, lax.rem(at.steps + 1, _I32(2)), dq_acc)
            return dq_acc[...]

        _put_dq(refs, w, pl.run_scoped(last, ACC(_half(c), _F32)))
        return dk_acc[...], dv_acc[...]

    shape = (_KEYS, c.D)
    dk, dv = pl.run_scoped(with_accumulators, ACC(shape, _F32), ACC(shape, _F32))
    keys = pl.ds(at.j * KV_BLOCK + w * _KEYS, _KEYS)
    plgpu.barrier_arrive(refs.done)  # the other warpgroup's last dQ still reads K
    v_w[...] = dv.astype(c.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(v_w, refs.dv.at[at.b, keys, at.head])
    plgpu.barrier_wait(refs.done)
    k_w[...] = (dk * c.scale).astype(c.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_w, refs.dk.at[at.b, keys, at.head])
    plgpu.wait_smem_to_gmem(0)
    mosaic_turns.named_barrier_sync(_EMPTY + w, _HALF_THREADS)


def _step(c: Call, at: Place, refs: SimpleNamespace, w: Any, dk_acc: Any, dv_acc: Any, step: Any, masked: bool) -> None:
    """One block of queries of one head; and dQ of the step before.

    A warpgroup writes its dS only after it has waited for that of the step before from both, and the other one wrote
    that after its dQ of two steps before was complete: of two buffers, one is always free.
    """
    slot, buffer = lax.rem(step, _I32(_SLOTS)), lax.rem(step, _I32(2))
    # Addresses are made anew from w in every step: LLVM would make them before the loop, and spill them (236 bytes at
    # D = 128, with 18 loads and as many moves to uniform registers a step; 0 so).
    w = mosaic.opaque(w)
    mine = pl.ds(w * _KEYS, _KEYS)
    q, do = refs.q_s.at[slot], refs.do_s.at[slot]
    tile = (_KEYS, c.q_block)

    def along_columns(x_ref: Any) -> Any:
        return lax.broadcast_in_dim(plgpu.load(x_ref, layout=COLUMNS), tile, [1])

    def weights(s_acc: Any, dq_acc: Any) -> tuple[Any, Any]:
        plgpu.barrier_wait(refs.q_ready.at[slot])
        if masked:
            plgpu.barrier_wait(refs.do_ready.at[slot])
            _scrub_queries(refs, w, slot)
        s_acc[...] = along_columns(refs.rows_s.at[slot, 0])
        plgpu.wgmma(s_acc, refs.k_s.at[mine], q.transpose((1, 0)))
        _issue_dq(c, refs, w, 1 - buffer, dq_acc)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if masked:
            s = _mask(c, at, refs, w, slot, at.step(step)[0], s)
        p = jnp.exp2(s * (c.scale * math.log2(math.e)))
        rounded = p.astype(c.dtype)
        _put_dq(refs, w, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0))
        return p, rounded

    p, p_rounded = pl.run_scoped(weights, ACC(tile, _F32), ACC(_half(c), _F32))

    def gradients(dp_acc: Any) -> Any:
        if not masked:
            plgpu.barrier_wait(refs.do_ready.at[slot])
        dp_acc[...] = along_columns(refs.rows_s.at[slot, 1])
        plgpu.wgmma(dp_acc, refs.v_s.at[mine], do.transpose((1, 0)))
        plgpu.wgmma(dv_acc, p_rounded, do)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        ds = p * dp
        if masked:
            ds = jnp.where(p == 0, 0.0, ds)  # dP of a masked pair may be anything
        ds = ds.astype(c.dtype)
        refs.ds_s[buffer, mine] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.ds_ready.at[buffer])
        return ds

    ds = pl.run_scoped(gradients, ACC(tile, _F32))
    plgpu.wgmma(dk_acc, ds, q)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.free.at[slot])


def _issue_dq(c: Call, refs: SimpleNamespace, w: Any, buffer: Any, dq_acc: Any) -> None:
    """Starts this warpgroup's half of dQ = dS K over all 128 keys."""
    plgpu.barrier_wait(refs.ds_ready.at[buffer])
    if c.q_block == 128:
        plgpu.wgmma(dq_acc, refs.ds_s.at[buffer, :, pl.ds(w * 64, 64)].transpose((1, 0)), refs.k_s)
    else:
        columns = pl.ds(w * (c.D // 2), c.D // 2)
        plgpu.wgmma(dq_acc, refs.ds_s.at[buffer].transpose((1, 0)), refs.k_s.at[:, columns])


def _put_dq(refs: SimpleNamespace, w: Any, dq: Any) -> None:
    """Hands a half of dQ to the writer warp."""
    mosaic_turns.named_barrier_sync(_EMPTY + w, _HALF_THREADS)
    refs.dq_s[w] = dq
    mosaic_turns.fence_async()
    mosaic_turns.named_barrier_arrive(_WRITTEN + w, _HALF_THREADS)


def _mask(c: Call, at: Place, refs: SimpleNamespace, w: Any, slot: Any, qi: Any, s: Any) -> Any:
    """S' with `hidden` where a key (row) is not seen by a query (column). Rows that see no key have an LSE of -inf."""
    if c.bounds != (None, None) or c.limited:
        s = mosaic.keep_columns(s, *_seen_columns(c, at, refs, w, qi), c.hidden)
    if c.segments:
        queries = plgpu.load(refs.q_ids_s.at[slot], layout=COLUMNS)
        keys = plgpu.load(refs.kv_ids_s.at[pl.ds(w * _KEYS, _KEYS)], layout=ROWS)
        same = lax.broadcast_in_dim(queries, s.shape, [1]) == lax.broadcast_in_dim(keys, s.shape, [0])
        s = jnp.where(same, s, c.hidden)
    return s


def _seen_columns(c: Call, at: Place, refs: SimpleNamespace, w: Any, qi: Any) -> tuple[Any | None, Any | None]:
    """(first, stop) of the queries of a block that see each key of this warpgroup; None is no bound.

    Query q sees key kv where kv - shift - above <= q <= kv - shift + below.
    """
    below, above = c.bounds
    first_kv = at.j * KV_BLOCK + w * _KEYS
    shift = refs.plan[at.entry, at.j, 4] if c.shift is None else c.shift
    # Mosaic's search for layouts does not end if this is not used.
    row = plgpu.broadcasted_iota(_I32, (_KEYS,), 0, layout=ROWS)
    level = first_kv - shift - qi * c.q_block
    low = None if above is None else row + (level - above)
    high = None if below is None else row + (level + below + 1)
    if c.limited:
        keys = refs.plan[at.entry, at.j, 5] if c.kv_lengths else c.keys
        low = jnp.where(row < keys - first_kv, 0 if low is None else low, c.q_block)
    return low, high


def _scrub_keys(k: Any, v: Any) -> None:
    """Rows of K that are not finite become 0, and the same rows of V NaN."""
    tile = plgpu.load(k, layout=Layout.WGMMA)

    @pl.when(mosaic.any_not_finite(tile) > 0)
    def _():
        wrong = jnp.where(jnp.abs(tile.astype(_F32)) < jnp.inf, 0.0, 1.0)
        wrong = lax.broadcast_in_dim(jnp.max(wrong, axis=1), tile.shape, [0])
        k[...] = jnp.where(wrong > 0, 0.0, tile.astype(_F32)).astype(tile.dtype)
        values = plgpu.load(v, layout=Layout.WGMMA).astype(_F32)
        v[...] = jnp.where(wrong > 0, jnp.nan, values).astype(tile.dtype)


def _scrub_queries(refs: SimpleNamespace, w: Any, slot: Any) -> None:
    """Where the block has rows whose LSE or delta is not finite: one warpgroup zeroes them in Q, the other in dO."""

    def scrub(tile_ref: Any) -> None:
        finite = jnp.abs(plgpu.load(refs.rows_s.at[slot, 0], layout=ROWS)) < jnp.inf
        tile = plgpu.load(tile_ref, layout=Layout.WGMMA)
        finite = lax.broadcast_in_dim(jnp.where(finite, 1.0, 0.0), tile.shape, [0])
        tile_ref[...] = jnp.where(finite > 0, tile.astype(_F32), 0.0).astype(tile.dtype)

    @pl.when(refs.rows_s[slot, 2, 0] > 0)
    def _():
        @pl.when(w == 0)
        def _():
            scrub(refs.q_s.at[slot])

        @pl.when(w == 1)
        def _():
            scrub(refs.do_s.at[slot])

        mosaic_turns.fence_async()
        mosaic_turns.named_barrier_sync(_I32(_SCRUBBED), _COMPUTE * 128)


def _body(c: Call, operands: tuple[str, ...], *global_refs: Any, **scratch: Any) -> None:
    refs = SimpleNamespace(**dict(zip((*operands, "dq", "dk", "dv"), global_refs, strict=True)), **scratch)
    w = lax.axis_index("warpgroup")
    at = place(c, refs)

    @pl.when(w < _COMPUTE)
    def _():
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        _compute(c, at, refs, w)

    @pl.when(w == _COMPUTE)
    def _():
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                _load(c, at, refs)

            @pl.when((warp == 1) | (warp == 2))
            def _():
                _write(c, at, refs, warp - 1)


def _scratch(c: Call) -> dict[str, Any]:
    swizzled, smem, barrier = mosaic.swizzled, plgpu.SMEM, plgpu.Barrier
    ids = {"kv_ids_s": smem((KV_BLOCK,), _I32), "q_ids_s": smem((_SLOTS, c.q_block), _I32)} if c.segments else {}
    return ids | {
        "k_s": swizzled((KV_BLOCK, c.D), c.dtype),
        "v_s": swizzled((KV_BLOCK, c.D), c.dtype),
        "q_s": swizzled((_SLOTS, c.q_block, c.D), c.dtype),
        "do_s": swizzled((_SLOTS, c.q_block, c.D), c.dtype),
        "rows_s": smem((_SLOTS, row_count(c), c.q_block), _F32),
        "ds_s": swizzled((2, KV_BLOCK, c.q_block), c.dtype),
        "dq_s": swizzled((_COMPUTE, *_half(c)), _F32),
        "kv_ready": barrier(num_arrivals=2 + c.segments),
        "q_ready": barrier(num_arrivals=2 + c.segments, num_barriers=_SLOTS),
        "do_ready": barrier(num_arrivals=1, num_barriers=_SLOTS),
        "free": barrier(num_arrivals=_COMPUTE, num_barriers=_SLOTS),
        "ds_ready": barrier(num_arrivals=_COMPUTE, num_barriers=2),
        "done": barrier(num_arrivals=_COMPUTE),
    }


def _launch(c: Call, operands: dict[str, Any]) -> tuple[Array, Array, Array]:
    """(dq in float32 and not scaled, padded to whole blocks; dk; dv)."""
    out_type = (
        jax.ShapeDtypeStruct((c.B, c.nq * c.q_block, c.N, c.D), _F32),
        jax.ShapeDtypeStruct((c.B, c.S, c.K, c.D), c.dtype),
        jax.ShapeDtypeStruct((c.B, c.S, c.K, c.D), c.dtype),
    )
    kernel = plgpu.kernel(
        lambda *refs, **scratch: _body(c, (*operands, "turns"), *refs, **scratch),
        out_type=out_type,
        grid=(c.B * c.K * c.nkv,),
        grid_names=("cta",),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name="attention_bwd",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        scratch_types=_scratch(c),
    )
    counters = c.B * c.N * c.nq * _COMPUTE
    dq, dk, dv = mosaic_turns.with_zeros(counters, lambda turns: kernel(*operands.values(), turns), out_type)
    return dq, dk, dv


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
    """(dq, dk, dv) in the input dtypes, of head dims up to 128: `hopper_bwd_plan.differentiate` with this kernel."""
    D = max(padded_head_dims(spec))
    tiles = Tiles(D, D, *backward_tiles(spec))
    arrays = (query, key, value, out, lse, dout, dlse)
    return differentiate(spec, tiles, _launch, *arrays, scale=scale, config=config, **optional)
