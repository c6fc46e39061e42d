"""What the forward kernels share: which CTA walks over which tiles, and which keys the queries of a warpgroup see."""

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
from jaxtyping import Array, Int

from pallas_kernels import mosaic, mosaic_turns
from pallas_kernels.attention import blocks
from pallas_kernels.attention.hopper_config import Schedule
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.mosaic import COLUMNS, ROWS

# Registers of a thread that computes and of one that loads, by computing warpgroups: a CTA's 504 or 512 in all.
REGISTERS = {2: (240, 24), 3: (160, 32)}

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What the bodies know at trace time."""

    spec: AttentionSpec
    config: Schedule
    heads: int  # per group of heads that share the L2 cache
    cores: int
    masked: bool  # some pair of a computed block may be hidden

    @property
    def dynamic(self) -> bool:
        return self.spec.query_lengths or self.spec.kv_lengths or self.spec.shifted

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


def positive_scale(query: Array, scale: float) -> tuple[Array, float]:
    """The same logits from a scale above 0, so that it may be multiplied into the maxima."""
    if scale == 0:
        return jnp.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def sides(
    spec: AttentionSpec,
    config: Schedule,
    *,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    shifts: Int[Array, " B"] | None = None,
) -> tuple[bool, dict[str, Array]]:
    """(whether anything is masked, the operands that say what: the plan of blocks, lengths and shifts, segment ids)."""
    facts = {"query_lengths": query_lengths, "kv_lengths": kv_lengths, "shifts": shifts}
    live, full = blocks.overlaps(
        spec, config.q_block, config.kv_block, hide_tail=True,
        query_segments=query_segments, kv_segments=kv_segments, **facts,
    )  # fmt: skip
    operands = {"plan": jnp.stack([jnp.asarray(x) for x in blocks.ranges(live, full)], axis=-1)}
    if spec.query_lengths or spec.kv_lengths or spec.shifted:
        operands["facts"] = blocks.facts(spec, **facts)
    if query_segments is not None and kv_segments is not None:
        operands["query_ids"] = blocks.segment_blocks(query_segments, config.q_block, -1)
        operands["kv_ids"] = blocks.segment_blocks(kv_segments, config.kv_block, -2)
    return not isinstance(full, np.ndarray) or not bool(full.all()), operands


def rings(walk: Walk) -> dict[str, Any]:
    """The barriers between the loader, of a tile's queries and of rings of keys and values, and those who read them."""
    wgs, stages = walk.config.warpgroups, walk.config.stages
    return {
        "q_ready": plgpu.Barrier(num_arrivals=1),
        "q_free": plgpu.Barrier(num_arrivals=wgs),
        "k_ready": plgpu.Barrier(num_arrivals=1 + walk.spec.segments, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
    }


def launch(
    walk: Walk,
    body: Callable[[dict[str, Any], dict[str, Any]], None],
    operands: dict[str, Array],
    out_type: dict[str, jax.ShapeDtypeStruct],
    smem: dict[str, Any],
    *,
    listeners: int,
) -> tuple[Array, ...]:
    """body(gmem, smem), refs by name, on the grid of the walk. `listeners` follow where the loader leads."""
    if walk.persistent:
        # The tile in work and the next.
        smem = smem | {
            "tile": plgpu.SMEM((2,), i32),
            "tile_ready": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "tile_free": plgpu.Barrier(num_arrivals=listeners, num_barriers=2),
        }
    names = (*operands, *["taken"] * walk.persistent, *out_type)

    def run(*refs):
        body(dict(zip(names, refs, strict=False)), dict(zip(smem, refs[len(names) :], strict=True)))

    kernel = plgpu.kernel(
        run,
        out_type=tuple(out_type.values()),
        scratch_types=list(smem.values()),
        grid=(walk.ctas,),
        grid_names=("cta",),
        num_threads=walk.config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Every exchange through shared memory in the bodies is fenced or goes through an mbarrier.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    if not walk.persistent:
        return tuple(kernel(*operands.values()))
    return tuple(mosaic_turns.with_zeros(1, lambda taken: kernel(*operands.values(), taken), tuple(out_type.values())))


def lead(walk: Walk, gmem: dict[str, Any], smem: dict[str, Any], load: Callable[[Any, Any, Any], Any]) -> None:
    """The loader's walk: it takes the next tile, tells the others and loads it, until none is left.

    `load(tile, turn, blocks so far) -> blocks so far`, into the rings "k" and "v".
    """
    stages = walk.config.stages

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
        count = load(index, turn, count)
        # In the order of the list, whoever is free first: the longest tiles start first and the shortest fill the gaps.
        return walk.ctas + mosaic_turns.take(gmem["taken"]), turn + 1, count

    start = (lax.axis_index("cta"), i32(0), i32(0))
    if walk.persistent:
        index, turn, count = while_tiles_last(walk, one, start)
        tell(index, turn)

        @pl.loop(jnp.maximum(turn - 1, 0), turn + 1)
        def _(turn):
            plgpu.barrier_wait(smem["tile_free"].at[lax.rem(turn, i32(2))])
    else:
        count = load(*start)

    # A barrier may not be left with a completion that nobody has observed.
    plgpu.barrier_wait(smem["q_free"])

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(n):
        slot = lax.rem(n, i32(stages))
        plgpu.barrier_wait(smem["k_free"].at[slot])
        plgpu.barrier_wait(smem["v_free"].at[slot])


def load_tile(
    walk: Walk,
    gmem: dict[str, Any],
    smem: dict[str, Any],
    values_of: Callable[[Any, Any, Any], Any],
    index: Any,
    turn: Any,
    count: Any,
) -> Any:
    """Loads one tile; `count` blocks of keys were loaded before it. `values_of(batch, key head, tokens)` is a ref."""
    config = walk.config
    tile = locate(walk, gmem, index)
    kv_head = lax.div(tile.head, i32(walk.spec.G))
    steps = tile.stop - tile.start

    def load(name: str, n):
        slot = lax.rem(count + n, i32(config.stages))

        @pl.when(count + n >= config.stages)
        def _():
            plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

        block = tile.stop - 1 - n
        rows = pl.ds(block * config.kv_block, config.kv_block)
        source = gmem["key"].at[tile.batch, rows, kv_head] if name == "k" else values_of(tile.batch, kv_head, rows)
        plgpu.copy_gmem_to_smem(source, smem[name].at[slot], smem[f"{name}_ready"].at[slot])
        if name == "k" and walk.spec.segments:
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


def follow(walk: Walk, smem: dict[str, Any], one: Callable[[Any, Any, Any], Any]) -> None:
    """Everybody else's walk: `one(tile, turn, blocks so far) -> blocks so far` for each tile that the loader names."""
    if not walk.persistent:
        one(lax.axis_index("cta"), i32(0), i32(0))
        return

    def hear(turn):
        at = lax.rem(turn, i32(2))
        plgpu.barrier_wait(smem["tile_ready"].at[at])
        index = mosaic_turns.read_shared(smem["tile"].at[pl.ds(at, 1)])
        plgpu.barrier_arrive(smem["tile_free"].at[at])
        return index

    def step(carry):
        index, turn, count = carry
        count = one(index, turn, count)
        return hear(turn + 1), turn + 1, count

    while_tiles_last(walk, step, (hear(i32(0)), i32(0), i32(0)))


def while_tiles_last(walk: Walk, step: Callable[..., Any], start: Any) -> Any:
    """`lax.while_loop(carry[0] < tiles)`, which Mosaic does not lower for warps: by rounds of about sqrt(tiles) steps.

    After the last tile only the rest of one round, and the other rounds, pass empty: some hundred clocks.
    """
    size = math.isqrt(walk.tiles) + 1

    def left(carry):
        return carry[0] < walk.tiles

    def maybe(_, carry):
        return lax.cond(left(carry), step, lambda carry: carry, carry)

    def one_round(_, carry):
        return lax.fori_loop(0, jnp.where(left(carry), i32(size), i32(0)), maybe, carry)

    return lax.fori_loop(0, i32(size), one_round, start)


def with_scores(
    walk: Walk,
    smem: dict[str, Any],
    q: Any,
    slot: Any,
    function: Callable[[Callable[[int], Any]], Any],
    before: Callable[[], None] = lambda: None,
) -> Any:
    """function(scores), where `scores(m)` are those of q and a slot's keys, when at most m later products still run."""
    keys = smem["k"].at[slot]

    def begin():
        plgpu.barrier_wait(smem["k_ready"].at[slot])
        before()

    def cleared(s_acc):
        begin()
        plgpu.wgmma(s_acc, q, keys.T)
        return function(lambda m: plgpu.wgmma_accumulator_load(s_acc, wait_n=m))

    if not walk.config.uncleared:
        return pl.run_scoped(cleared, mosaic.ACC((64, walk.config.kv_block), f32))
    begin()
    return function(functools.partial(mosaic.finished, mosaic.product(q, keys)))


@dataclass(frozen=True)
class Tile:
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


def locate(walk: Walk, gmem: dict[str, Any], index: Any) -> Tile:
    """Group of heads, then tile from the last (under causality the longest) down, then head."""
    spec = walk.spec
    group, rest = lax.div(index, i32(walk.heads * walk.q_tiles)), lax.rem(index, i32(walk.heads * walk.q_tiles))
    flat = group * walk.heads + lax.rem(rest, i32(walk.heads))
    q_tile = walk.q_tiles - 1 - lax.div(rest, i32(walk.heads))
    batch = lax.div(flat, i32(spec.N))
    if walk.masked:
        row = batch if gmem["plan"].shape[0] > 1 else 0
        limits = [gmem["plan"][row, q_tile, n] for n in range(4)]
    else:
        limits = [i32(0), i32(0), *[i32(pl.cdiv(spec.S, walk.config.kv_block))] * 2]
    return Tile(batch, lax.rem(flat, i32(spec.N)), q_tile, *limits)


def broadcast(rows: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(rows, shape, [0])


class Seen:
    """Which keys the 64 queries of a warpgroup see."""

    def __init__(self, walk: Walk, gmem: dict[str, Any], smem: dict[str, Any], tile: Tile, first_row: Any):
        self.walk, self.gmem, self.smem, self.tile = walk, gmem, smem, tile
        spec = walk.spec
        if not walk.masked:
            return
        q_length: Any = spec.T
        kv_length: Any = spec.S
        shift: Any = spec.shift
        if walk.dynamic:
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
        if self.walk.spec.segments:
            ids = plgpu.load(ids, layout=COLUMNS, optimized=False)
            same = broadcast(self.ids, x.shape) == lax.broadcast_in_dim(ids, x.shape, [1])
            x = jnp.where(same, x, fill)
        return x

    def hide(self, s, n, slot):
        """The scores of the n-th block with -inf for what is not seen."""
        ids = self.smem["ids"].at[slot] if self.walk.spec.segments else None
        s = self.keep(s, self.first_key(n), ids, -jnp.inf)
        if self.walk.spec.segments:
            mosaic_turns.fence_async()  # ordinary reads, before TMA writes there again
        return s

    def skipped_blocks(self, steps) -> Any:
        """How many blocks from the end lie past the last key of these queries, though other warpgroups see them.

        None where there can be none. No more than stages, for the next block comes without this warpgroup's turn.
        """
        above, config = self.walk.spec.bounds[1], self.walk.config
        if not self.walk.masked or above is None or config.kv_block >= config.q_block:
            return None
        needed = lax.div(jnp.maximum(self.end, 0) + (config.kv_block - 1), i32(config.kv_block))
        return jnp.clip(self.tile.stop - needed, 0, jnp.minimum(steps - 1, config.stages))

    def first_key(self, n):
        return (self.tile.stop - 1 - n) * self.walk.config.kv_block
