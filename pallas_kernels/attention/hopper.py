"""FlashAttention-3's forward pass for Hopper (sm_90a) in Pallas Mosaic GPU: bfloat16 and float16, float32 softmax.

One CTA of each SM walks over tiles of `64 * warpgroups` queries of one head; blocks of keys are read from the end:

    loader       | Q  K3  K2 V3  K1 V2  K0 V1  V0 | Q  K3 ...                        (TMA, a ring of `stages`)
    warpgroup 0  | S3=QK3' | S2=QK2'  O+=P3V3 | S1=QK1'  O+=P2V2 | ...  O+=P0V0 | O/l, LSE -> TMA
                 |         | softmax S3       | softmax S2       | ...          |
    warpgroup 1  |  the same for the next 64 queries, free-running or in turns

The softmax of one block runs behind the product of the block before it with V (arXiv 2407.08608, section 3.2, algorithm
2); with `turns` the warpgroups also take turns at the tensor cores (section 3.1). Masks cost only where they cut a
block: `blocks` says which blocks are dead, partial and full. Rows that see nothing keep l = 0 and give 0 and -inf.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.attention import blocks
from pallas_kernels.attention.hopper_config import (
    SMEM_LIMIT,
    Config,
    default,
    fits,
    head_dims,
    heads_side_by_side,
    smem_bytes,
)
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import H200, Device
from pallas_kernels.mosaic import COLUMNS, ROWS

# Registers of a thread that computes and of one that loads, by computing warpgroups: a CTA's 504 or 512 in all.
_REGISTERS = {2: (240, 24), 3: (160, 32)}

# Warps that look for NaN and inf among the values of partial blocks.
_CLEANERS = 2

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What the body knows at trace time."""

    spec: AttentionSpec
    config: Config
    heads: int  # per group of heads that share the L2 cache
    cores: int
    scale: float  # of the logits, in base 2
    masked: bool  # some pair of a computed block may be hidden

    @property
    def dynamic(self) -> bool:
        return self.spec.query_lengths or self.spec.kv_lengths or self.spec.shifted

    @property
    def poisonable(self) -> bool:
        """Whether a hidden value can hold NaN or inf: keys past the end are zeros."""
        return self.masked and (self.spec.bounds != (None, None) or self.dynamic or self.spec.segments)

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.spec.T, self.config.q_block)

    @property
    def tiles(self) -> int:
        return self.spec.B * self.spec.N * self.q_tiles

    @property
    def persistent(self) -> bool:
        """Not where every tile has a CTA anyway. And not for one tile: "is the next one below 1?" is a question that
        ptxas 13 leaves out of the inner loop, and the kernel waits for ever (SASS, H200, 2026-11)."""
        return self.config.persistent and self.tiles > self.cores

    @property
    def ctas(self) -> int:
        return self.cores if self.persistent else self.tiles


def attend(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    *,
    scale: float,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    shifts: Int[Array, " B"] | None = None,
    config: Config | None = None,
    device: Device = H200,
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """(out in the input dtype, lse float32); there is no derivative rule here. `device` sizes a persistent grid."""
    config = config or default(spec)
    if not fits(spec, config, spare=0):
        raise ValueError(
            f"hopper: {config} does not fit head dims {spec.H} and {spec.H_v} - tiles take "
            f"{smem_bytes(spec, config)} of {SMEM_LIMIT} bytes of shared memory, and head dims that differ need "
            "own_output. Take one of hopper_config.candidates(spec)."
        )
    if scale < 0:
        query, scale = -query, -scale
    elif scale == 0:
        query, scale = jnp.zeros_like(query), 1.0
    facts = {"query_lengths": query_lengths, "kv_lengths": kv_lengths, "shifts": shifts}
    live, full = blocks.overlaps(
        spec, config.q_block, config.kv_block, hide_tail=True,
        query_segments=query_segments, kv_segments=kv_segments, **facts,
    )  # fmt: skip
    plan = jnp.stack([jnp.asarray(x) for x in blocks.ranges(live, full)], axis=-1)
    masked = not isinstance(full, np.ndarray) or not full.all()
    kernel = _Kernel(
        spec=spec,
        config=config,
        heads=heads_side_by_side(spec, config),
        cores=device.num_cores or H200.num_cores or 1,
        scale=scale * math.log2(math.e),
        masked=masked,
    )
    H, H_v = head_dims(spec)
    operands = [blocks.aligned(x, dim) for x, dim in ((query, H), (key, H), (value, H_v))]
    side = [plan]
    if kernel.dynamic:
        side.append(blocks.facts(spec, **facts))
    if query_segments is not None and kv_segments is not None:
        side.append(blocks.segment_blocks(query_segments, config.q_block, -1))
        side.append(blocks.segment_blocks(kv_segments, config.kv_block, -2))
    out, lse = _call(kernel, *operands, *side)
    return out[:, : spec.T, :, : spec.H_v], lse.swapaxes(1, 2)[:, : spec.T]


def _call(kernel: _Kernel, query: Array, key: Array, value: Array, *side: Array) -> tuple[Array, Array]:
    """Launches the kernel: (out (B, T8, N, H_v64), lse (B, N, tiles * q_block))."""
    spec, config = kernel.spec, kernel.config
    B, T, N, H = query.shape
    H_v, dtype = value.shape[-1], query.dtype
    wgs, stages, kv_block = config.warpgroups, config.stages, config.kv_block
    smem = {
        "q": mosaic.swizzled((config.q_block, H), dtype),
        "k": mosaic.swizzled((stages, kv_block, H), dtype),
        "v": mosaic.swizzled((stages, kv_block, H_v), dtype),
        "lse": plgpu.SMEM((wgs, 64), f32),
        "q_ready": plgpu.Barrier(num_arrivals=1),
        "q_free": plgpu.Barrier(num_arrivals=wgs),
        "k_ready": plgpu.Barrier(num_arrivals=1 + spec.segments, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
    }
    if config.own_output:
        smem["o"] = mosaic.swizzled((config.q_block, H_v), dtype)
    if kernel.persistent:
        # The tile in work and the next.
        listeners = wgs + _CLEANERS * kernel.poisonable
        smem["tile"] = plgpu.SMEM((2,), i32)
        smem["tile_ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
        smem["tile_free"] = plgpu.Barrier(num_arrivals=listeners, num_barriers=2)
    if config.turns:
        smem["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=wgs)
    if spec.segments:
        smem["ids"] = plgpu.SMEM((stages, kv_block), i32)
    if kernel.poisonable:
        smem["v_clean"] = plgpu.Barrier(num_arrivals=_CLEANERS, num_barriers=stages)
        # One of each cleaning warp for tiles of even and of odd turns.
        smem["dirty"] = plgpu.SMEM((2 * _CLEANERS,), i32)
        smem["poison"] = plgpu.SMEM((wgs, 64), f32)
        smem["reloaded"] = plgpu.Barrier(num_barriers=wgs)
    names = tuple(smem)
    inputs = ("query", "key", "value", "plan")
    inputs += ("facts",) * kernel.dynamic + ("query_ids", "kv_ids") * spec.segments
    inputs += ("taken",) * kernel.persistent

    def body(*refs):
        gmem = dict(zip((*inputs, "out", "lse"), refs, strict=False))
        _body(kernel, gmem, dict(zip(names, refs[len(gmem) :], strict=True)))

    out_type = (
        jax.ShapeDtypeStruct((B, T, N, H_v), dtype),
        jax.ShapeDtypeStruct((B, N, kernel.q_tiles * config.q_block), f32),
    )
    launch = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(smem.values()),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Every exchange through shared memory below is fenced or goes through an mbarrier.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    operands = (query, key, value, *side)
    if not kernel.persistent:
        return launch(*operands)
    out, lse = mosaic.with_zeros(1, lambda taken: launch(*operands, taken), out_type)
    return out, lse


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    config = kernel.config
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(_REGISTERS[config.warpgroups][0], action="increase")
        _follow(kernel, smem, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(_REGISTERS[config.warpgroups][1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: _lead(kernel, gmem, smem))
            if kernel.poisonable:

                @pl.when((warp > 0) & (warp <= _CLEANERS))
                def _():
                    _follow(kernel, smem, functools.partial(_clean, kernel, gmem, smem, warp - 1))


def _lead(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    """The loader's walk: it takes the next tile, tells the others and loads it, until none is left."""
    stages = kernel.config.stages

    def tell(index, turn):
        at = lax.rem(turn, i32(2))

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(smem["tile_free"].at[at])

        smem["tile"][at] = index
        plgpu.barrier_arrive(smem["tile_ready"].at[at])

    def one(carry):
        index, turn, count = carry
        tell(index, turn)
        count = _load(kernel, gmem, smem, index, turn, count)
        # In the order of the list, whoever is free first: the longest tiles start first and the shortest fill the gaps.
        return kernel.ctas + mosaic.take(gmem["taken"]), turn + 1, count

    start = (lax.axis_index("cta"), i32(0), i32(0))
    if kernel.persistent:
        index, turn, count = _while_tiles_last(kernel, one, start)
        tell(index, turn)

        @pl.loop(jnp.maximum(turn - 1, 0), turn + 1)
        def _(turn):
            plgpu.barrier_wait(smem["tile_free"].at[lax.rem(turn, i32(2))])
    else:
        count = _load(kernel, gmem, smem, *start)

    # A barrier may not be left with a completion that nobody has observed.
    plgpu.barrier_wait(smem["q_free"])

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(n):
        slot = lax.rem(n, i32(stages))
        plgpu.barrier_wait(smem["k_free"].at[slot])
        plgpu.barrier_wait(smem["v_free"].at[slot])


def _follow(kernel: _Kernel, smem: dict[str, Any], one: Callable[[Any, Any, Any], Any]) -> None:
    """Everybody else's walk: `one(tile, turn, blocks so far) -> blocks so far` for each tile that the loader names."""
    if not kernel.persistent:
        one(lax.axis_index("cta"), i32(0), i32(0))
        return

    def hear(turn):
        at = lax.rem(turn, i32(2))
        plgpu.barrier_wait(smem["tile_ready"].at[at])
        index = mosaic.read_shared(smem["tile"].at[pl.ds(at, 1)])
        plgpu.barrier_arrive(smem["tile_free"].at[at])
        return index

    def step(carry):
        index, turn, count = carry
        count = one(index, turn, count)
        return hear(turn + 1), turn + 1, count

    _while_tiles_last(kernel, step, (hear(i32(0)), i32(0), i32(0)))


def _while_tiles_last(kernel: _Kernel, step: Callable[..., Any], start: Any) -> Any:
    """`lax.while_loop(carry[0] < tiles)`, which Mosaic does not lower for warps: by rounds of about sqrt(tiles) steps.

    After the last tile only the rest of one round, and the other rounds, pass empty: some hundred clocks.
    """
    size = math.isqrt(kernel.tiles) + 1

    def left(carry):
        return carry[0] < kernel.tiles

    def maybe(_, carry):
        return lax.cond(left(carry), step, lambda carry: carry, carry)

    def one_round(_, carry):
        return lax.fori_loop(0, jnp.where(left(carry), i32(size), i32(0)), maybe, carry)

    return lax.fori_loop(0, i32(size), one_round, start)


@dataclass(frozen=True)
class _Tile:
    """Where a tile lies: batch entry, query head, first query; and its range of key blocks, from the plan."""

    batch: Any
    head: Any
    q_tile: Any
    start: Any
    full_start: Any
    full_stop: Any
    stop: Any

    def partial(self, n: Any) -> Any:
        """Whether the n-th block, from the end, is partial."""
        block = self.stop - 1 - n
        return (block >= self.full_stop) | (block < self.full_start)


def _locate(kernel: _Kernel, gmem: dict[str, Any], index: Any) -> _Tile:
    """Group of heads, then tile from the last (under causality the longest) down, then head."""
    spec = kernel.spec
    group, rest = lax.div(index, i32(kernel.heads * kernel.q_tiles)), lax.rem(index, i32(kernel.heads * kernel.q_tiles))
    flat = group * kernel.heads + lax.rem(rest, i32(kernel.heads))
    q_tile = kernel.q_tiles - 1 - lax.div(rest, i32(kernel.heads))
    batch = lax.div(flat, i32(spec.N))
    if kernel.masked:
        row = batch if gmem["plan"].shape[0] > 1 else 0
        limits = [gmem["plan"][row, q_tile, n] for n in range(4)]
    else:
        limits = [i32(0), i32(0), *[i32(pl.cdiv(spec.S, kernel.config.kv_block))] * 2]
    return _Tile(batch, lax.rem(flat, i32(spec.N)), q_tile, *limits)


def _load(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], index: Any, turn: Any, count: Any) -> Any:
    """Loads one tile; `count` blocks of keys were loaded before it."""
    config = kernel.config
    tile = _locate(kernel, gmem, index)
    kv_head = lax.div(tile.head, i32(kernel.spec.G))
    steps = tile.stop - tile.start

    def load(name: str, n):
        slot = lax.rem(count + n, i32(config.stages))

        @pl.when(count + n >= config.stages)
        def _():
            plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

        block = tile.stop - 1 - n
        rows = pl.ds(block * config.kv_block, config.kv_block)
        source = gmem["key" if name == "k" else "value"]
        plgpu.copy_gmem_to_smem(
            source.at[tile.batch, rows, kv_head], smem[name].at[slot], smem[f"{name}_ready"].at[slot]
        )
        if name == "k" and kernel.spec.segments:
            plgpu.copy_gmem_to_smem(
                gmem["kv_ids"].at[tile.batch, block], smem["ids"].at[slot], smem["k_ready"].at[slot]
            )

    @pl.when(turn > 0)
    def _():
        plgpu.barrier_wait(smem["q_free"])

    rows = pl.ds(tile.q_tile * config.q_block, config.q_block)
    plgpu.copy_gmem_to_smem(gmem["query"].at[tile.batch, rows, tile.head], smem["q"], smem["q_ready"])
    load("k", i32(0))

    @pl.loop(0, steps - 1)
    def _(n):
        load("k", n + 1)
        load("v", n)

    load("v", steps - 1)
    return count + steps


def _clean(
    kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], part: Any, index: Any, turn: Any, count: Any
) -> Any:
    """Zeroes NaN and inf in this warp's part of the values of partial blocks, where 0 * NaN would reach every query.

    The consumers are only told that there was one; which queries see it they find out in `_Seen.poison`.
    """
    config = kernel.config
    tile = _locate(kernel, gmem, index)
    share = config.kv_block // _CLEANERS
    at = lax.rem(turn, i32(2)) * _CLEANERS + part

    @pl.loop(0, tile.stop - tile.start)
    def _(n):
        slot = lax.rem(count + n, i32(config.stages))
        plgpu.barrier_wait(smem["v_ready"].at[slot])

        @pl.when(n == 0)
        def _():
            # Only now is it certain that nobody still asks about the tile before the last.
            smem["dirty"][at] = i32(0)

        @pl.when(tile.partial(n))
        def _():
            mosaic.zero_not_finite(smem["v"].at[slot, pl.ds(part * share, share)], smem["dirty"].at[pl.ds(at, 1)])
            mosaic.fence_async()

        plgpu.barrier_arrive(smem["v_clean"].at[slot])

    return count + tile.stop - tile.start


def _broadcast(rows: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(rows, shape, [0])


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], index: Any, turn: Any, count: Any) -> Any:
    """Computes one warpgroup's 64 queries of one tile."""
    spec, config = kernel.spec, kernel.config
    w = lax.axis_index("warpgroup")
    tile = _locate(kernel, gmem, index)
    steps = tile.stop - tile.start
    first_row = tile.q_tile * config.q_block + w * 64
    rows = pl.ds(w * 64, 64)
    q = smem["q"].at[rows]
    o_smem = smem["o"].at[rows] if config.own_output else q
    H_v = smem["v"].shape[-1]
    dtype = smem["q"].dtype
    seen = _Seen(kernel, gmem, smem, tile, first_row)

    def slot(n):
        return lax.rem(count + n, i32(config.stages))

    def softmax(s, maximum, total, n):
        """(weights in 16 bits, maximum, total, decay); the maximum is of logits in base 2."""
        if not spec.segments:  # whose ids lie beside the keys
            plgpu.barrier_arrive(smem["k_free"].at[slot(n)])
        if kernel.masked:
            s = lax.cond(tile.partial(n), lambda s: seen.hide(s, n, slot(n)), lambda s: s, s)
        if spec.segments:
            plgpu.barrier_arrive(smem["k_free"].at[slot(n)])
        new = jnp.maximum(maximum, s.max(axis=1) * kernel.scale)
        # A row that has seen nothing keeps the maximum -inf, and must not subtract it from itself.
        reference = jnp.where(new == -jnp.inf, 0.0, new) if kernel.masked else new
        weights = jnp.exp2(s * kernel.scale - _broadcast(reference, s.shape))
        decay = jnp.exp2(maximum - reference)
        return weights.astype(dtype), new, total * decay + weights.sum(axis=1), decay

    def wait_turn():
        if config.turns:
            plgpu.barrier_wait(smem["turn"].at[w])

    def pass_turn():
        if config.turns:
            plgpu.barrier_arrive(smem["turn"].at[lax.rem(w + 1, i32(config.warpgroups))])

    v_ready = smem["v_clean" if kernel.poisonable else "v_ready"]

    plgpu.barrier_wait(smem["q_ready"])

    def with_output(o_acc):
        maximum = plgpu.layout_cast(jnp.full((64,), -jnp.inf, f32), ROWS)
        total = plgpu.layout_cast(jnp.zeros((64,), f32), ROWS)

        skipped = seen.skipped_blocks(steps)
        if skipped is not None:

            @pl.loop(0, skipped)
            def _(n):
                plgpu.barrier_wait(smem["k_ready"].at[slot(n)])
                plgpu.barrier_arrive(smem["k_free"].at[slot(n)])

        first: Any = i32(0) if skipped is None else skipped

        def first_scores(s_acc):
            at = slot(first)
            plgpu.barrier_wait(smem["k_ready"].at[at])
            plgpu.wgmma(s_acc, q, smem["k"].at[at].T)
            return s_acc[...]

        s = pl.run_scoped(first_scores, mosaic.ACC((64, config.kv_block), f32))
        weights, maximum, total = softmax(s, maximum, total, first)[:3]
        if config.turns:
            pl.when(w == config.warpgroups - 1)(lambda: plgpu.barrier_arrive(smem["turn"].at[0]))
        if skipped is not None:

            @pl.loop(0, skipped)
            def _(n):
                plgpu.barrier_wait(v_ready.at[slot(n)])
                plgpu.barrier_arrive(smem["v_free"].at[slot(n)])
                wait_turn()
                pass_turn()

        def step(n, carry):
            """Scores of block n + 1, product of block n with its values."""
            weights, maximum, total = carry
            here, there = slot(n), slot(n + 1)

            def with_scores(s_acc):
                plgpu.barrier_wait(smem["k_ready"].at[there])
                wait_turn()
                plgpu.wgmma(s_acc, q, smem["k"].at[there].T)
                plgpu.barrier_wait(v_ready.at[here])
                plgpu.wgmma(o_acc, weights, smem["v"].at[here])
                pass_turn()
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                new_weights, new_maximum, new_total, decay = softmax(s, maximum, total, n + 1)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["v_free"].at[here])
                o = o_acc[...]
                o_acc[...] = o * _broadcast(decay, o.shape)
                return new_weights, new_maximum, new_total

            return pl.run_scoped(with_scores, mosaic.ACC((64, config.kv_block), f32))

        weights, maximum, total = lax.fori_loop(first, steps - 1, step, (weights, maximum, total))
        if config.turns:
            pl.when(w == 0)(lambda: plgpu.barrier_wait(smem["turn"].at[0]))
        if config.own_output:
            plgpu.barrier_arrive(smem["q_free"])
        last = slot(steps - 1)
        plgpu.barrier_wait(v_ready.at[last])
        plgpu.wgmma(o_acc, weights, smem["v"].at[last])
        plgpu.wgmma_wait(0)
        if config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if kernel.poisonable:
            total = seen.poison(total, turn, o_smem)
        plgpu.barrier_arrive(smem["v_free"].at[last])  # after the question whether the tile was dirty
        nothing = total == 0.0
        inverse = jnp.where(nothing, 0.0, 1.0 / jnp.where(nothing, 1.0, total))
        lse = jnp.where(nothing, -jnp.inf, maximum * math.log(2) + jnp.log(total))
        o = o_acc[...]
        return o * _broadcast(inverse, o.shape), lse

    o, lse = pl.run_scoped(with_output, mosaic.ACC((64, H_v), f32))
    o_smem[...] = o.astype(dtype)
    smem["lse"][w] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, gmem["out"].at[tile.batch, pl.ds(first_row, 64), tile.head])
    plgpu.copy_smem_to_gmem(smem["lse"].at[w], gmem["lse"].at[tile.batch, tile.head, pl.ds(first_row, 64)])
    if not config.own_output:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem["q_free"])
    return count + steps


class _Seen:
    """Which keys the 64 queries of a warpgroup see, and what to do about values that they do not."""

    def __init__(self, kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], tile: _Tile, first_row: Any):
        self.kernel, self.gmem, self.smem, self.tile = kernel, gmem, smem, tile
        spec = kernel.spec
        if not kernel.masked:
            return
        q_length: Any = spec.T
        kv_length: Any = spec.S
        shift: Any = spec.shift
        if kernel.dynamic:
            q_length, kv_length, shift = (gmem["facts"][tile.batch, n] for n in range(3))
        row: Any = None
        below, above = spec.bounds
        if spec.bounds != (None, None) or spec.query_lengths:  # Mosaic cannot lay out what nothing uses
            row = plgpu.broadcasted_iota(i32, (64,), 0, layout=ROWS) + first_row
        high = kv_length if above is None else jnp.minimum(row + (shift + above + 1), kv_length)
        self.high = jnp.where(row < q_length, high, 0) if spec.query_lengths else high
        self.end: Any = None if above is None else first_row + (63 + shift + above + 1)  # of the last query's keys
        self.low = None if below is None else row + (shift - below)
        if spec.segments:
            at = gmem["query_ids"].at[tile.batch, tile.q_tile, pl.ds(lax.axis_index("warpgroup") * 64, 64)]
            self.ids = plgpu.load(at, layout=ROWS, optimized=False)

    def keep(self, x, first, ids, fill: float):
        """x where the query sees the key, else `fill`; the keys begin at `first` and have the segment `ids`."""
        low, high = (
            None if bound is None else plgpu.layout_cast(jnp.broadcast_to(bound - first, (64,)), ROWS)
            for bound in (self.low, self.high)
        )
        x = mosaic.keep_columns(x, low, high, fill)
        if self.kernel.spec.segments:
            ids = plgpu.load(ids, layout=COLUMNS, optimized=False)
            same = _broadcast(self.ids, x.shape) == lax.broadcast_in_dim(ids, x.shape, [1])
            x = jnp.where(same, x, fill)
        return x

    def hide(self, s, n, slot):
        """The scores of the n-th block with -inf for what is not seen."""
        ids = self.smem["ids"].at[slot] if self.kernel.spec.segments else None
        s = self.keep(s, self.first_key(n), ids, -jnp.inf)
        if self.kernel.spec.segments:
            mosaic.fence_async()  # ordinary reads, before TMA writes there again
        return s

    def skipped_blocks(self, steps) -> Any:
        """How many blocks from the end lie past the last key of these queries, though other warpgroups see them.

        None where there can be none. No more than stages, for the next block comes without this warpgroup's turn.
        """
        above, config = self.kernel.spec.bounds[1], self.kernel.config
        if not self.kernel.masked or above is None or config.kv_block >= config.q_block:
            return None
        needed = lax.div(jnp.maximum(self.end, 0) + (config.kv_block - 1), i32(config.kv_block))
        return jnp.clip(self.tile.stop - needed, 0, jnp.minimum(steps - 1, config.stages))

    def first_key(self, n):
        return (self.tile.stop - 1 - n) * self.kernel.config.kv_block

    def poison(self, total, turn, staging):
        """`total`, but NaN for queries that see a value of a partial block with NaN or inf in it.

        Rare, and so slow: the values are read again, 64 keys at a time, by each warpgroup for itself.
        """
        smem, gmem, tile, w = self.smem, self.gmem, self.tile, lax.axis_index("warpgroup")
        kv_block, H_v = smem["v"].shape[1:]
        first_flag = lax.rem(turn, i32(2)) * _CLEANERS
        dirty = smem["dirty"][first_flag]
        for cleaner in range(1, _CLEANERS):
            dirty |= smem["dirty"][first_flag + cleaner]
        kv_head = lax.div(tile.head, i32(self.kernel.spec.G))

        def piece(m, total):
            n, r = lax.div(m, i32(kv_block // 64)), lax.rem(m, i32(kv_block // 64)) * 64
            first = self.first_key(n) + r

            def look(total):
                plgpu.copy_gmem_to_smem(
                    gmem["value"].at[tile.batch, pl.ds(first, 64), kv_head], staging, smem["reloaded"].at[w]
                )
                plgpu.barrier_wait(smem["reloaded"].at[w])
                bad = plgpu.layout_cast(jnp.zeros((64,), f32), ROWS)
                for c in range(0, H_v, 64):
                    x = plgpu.load(staging.at[:, pl.ds(c, 64)], layout=plgpu.Layout.WGMMA).astype(f32)
                    bad += (x - x).sum(axis=1)
                smem["poison"][w] = bad
                plgpu.commit_smem()
                columns = plgpu.load(smem["poison"].at[w], layout=COLUMNS, optimized=False)
                plgpu.commit_smem()
                ids = None
                if self.kernel.spec.segments:
                    ids = gmem["kv_ids"].at[tile.batch, self.tile.stop - 1 - n, pl.ds(r, 64)]
                bad = self.keep(lax.broadcast_in_dim(columns, (64, 64), [1]), first, ids, 0.0)
                return total + bad.sum(axis=1)

            return lax.cond(tile.partial(n), look, lambda total: total, total)

        steps = (tile.stop - tile.start) * (kv_block // 64)
        return lax.cond(dirty != 0, lambda total: lax.fori_loop(0, steps, piece, total), lambda total: total, total)
