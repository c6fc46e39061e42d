"""FlashAttention-3's forward pass for Hopper (sm_90a) in Pallas Mosaic GPU: bfloat16 and float16, float32 softmax.

One CTA of each SM walks over tiles of `64 * warpgroups` queries of one head; blocks of keys are read from the end:

    loader       | Q  K3  K2 V3  K1 V2  K0 V1  V0 | Q  K3 ...                        (TMA, a ring of `stages`)
    warpgroup 0  | S3=QK3' | S2=QK2'  O+=P3V3 | S1=QK1'  O+=P2V2 | ...  O+=P0V0 | O/l, LSE -> TMA
                 |         | softmax S3       | softmax S2       | ...          |
    warpgroup 1  |  the same for the next 64 queries, free-running or in turns

The softmax of one block runs behind the product of the block before it with V (arXiv 2407.08608, section 3.2, algorithm
2); with `turns` the warpgroups also take turns at the tensor cores (section 3.1). Masks cost only where they cut a
block: `blocks` says which blocks are dead, partial and full. Rows that see nothing keep l = 0 and give 0 and -inf.

A row's weights need not be relative to its largest logit, only to one that keeps them in range. `lazy` takes the first
block's, plus some bits, and in every other block asks no more than whether a weight would exceed 1; only then are
maxima looked for, and sums scaled. (In bfloat16. The LSE is then as exact as float32 is near 8.)
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic, mosaic_turns
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
from pallas_kernels.attention.hopper_reader import Reader
from pallas_kernels.attention.hopper_walk import (
    REGISTERS,
    Seen,
    Walk,
    broadcast,
    follow,
    launch,
    lead,
    load_tile,
    locate,
    positive_scale,
    rings,
    sides,
    with_scores,
)
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import H200, Device
from pallas_kernels.mosaic import COLUMNS, ROWS

# Warps that look for NaN and inf among the values of partial blocks.
_CLEANERS = 2

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class _Kernel(Walk):
    """What the body knows at trace time."""

    config: Config
    scale: float  # of the logits, in base 2

    @property
    def poisonable(self) -> bool:
        """Whether a hidden value can hold NaN or inf: keys past the end are zeros."""
        return self.masked and (self.spec.bounds != (None, None) or self.dynamic or self.spec.segments)


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
    query, scale = positive_scale(query, scale)
    masked, side = sides(
        spec, config, query_lengths=query_lengths, kv_lengths=kv_lengths, shifts=shifts,
        query_segments=query_segments, kv_segments=kv_segments,
    )  # fmt: skip
    kernel = _Kernel(
        spec=spec,
        config=config,
        heads=heads_side_by_side(spec, config),
        cores=device.num_cores or H200.num_cores or 1,
        scale=scale * math.log2(math.e),
        masked=masked,
    )
    H, H_v = head_dims(spec)
    arrays = {"query": (query, H), "key": (key, H), "value": (value, H_v)}
    out, lse = _call(kernel, {name: blocks.aligned(*x) for name, x in arrays.items()} | side)
    return out[:, : spec.T, :, : spec.H_v], lse.swapaxes(1, 2)[:, : spec.T]


def _call(kernel: _Kernel, operands: dict[str, Array]) -> tuple[Array, ...]:
    """Launches the kernel: (out (B, T8, N, H_v64), lse (B, N, tiles * q_block))."""
    spec, config = kernel.spec, kernel.config
    B, T, N, H = operands["query"].shape
    H_v, dtype = operands["value"].shape[-1], operands["query"].dtype
    wgs, stages, kv_block = config.warpgroups, config.stages, config.kv_block
    smem = {
        "q": mosaic.swizzled((config.q_block, H), dtype),
        "k": mosaic.swizzled((stages, kv_block, H), dtype),
        "v": mosaic.swizzled((stages, kv_block, H_v), dtype),
        "lse": plgpu.SMEM((wgs, 64), f32),
        **rings(kernel),
    }
    if config.own_output:
        smem["o"] = mosaic.swizzled((config.q_block, H_v), dtype)
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
    out_type = {
        "out": jax.ShapeDtypeStruct((B, T, N, H_v), dtype),
        "lse": jax.ShapeDtypeStruct((B, N, kernel.q_tiles * config.q_block), f32),
    }
    listeners = wgs + _CLEANERS * kernel.poisonable
    return launch(kernel, functools.partial(_body, kernel), operands, out_type, smem, listeners=listeners)


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    config = kernel.config
    warpgroup = lax.axis_index("warpgroup")

    def values(batch, kv_head, tokens):
        return gmem["value"].at[batch, tokens, kv_head]

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][0], action="increase")
        follow(kernel, smem, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(
                lambda: lead(kernel, gmem, smem, functools.partial(load_tile, kernel, gmem, smem, values))
            )
            if kernel.poisonable:

                @pl.when((warp > 0) & (warp <= _CLEANERS))
                def _():
                    follow(kernel, smem, functools.partial(_clean, kernel, gmem, smem, warp - 1))


def _clean(
    kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], part: Any, index: Any, turn: Any, count: Any
) -> Any:
    """Zeroes NaN and inf in this warp's part of the values of partial blocks, where 0 * NaN would reach every query.

    The consumers are only told that there was one; which queries see it they find out in `_Seen.poison`.
    """
    config = kernel.config
    tile = locate(kernel, gmem, index)
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
            mosaic_turns.fence_async()

        plgpu.barrier_arrive(smem["v_clean"].at[slot])

    return count + tile.stop - tile.start


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], index: Any, turn: Any, count: Any) -> Any:
    """Computes one warpgroup's 64 queries of one tile."""
    config = kernel.config
    w = lax.axis_index("warpgroup")
    tile = locate(kernel, gmem, index)
    steps = tile.stop - tile.start
    first_row = tile.q_tile * config.q_block + w * 64
    rows = pl.ds(w * 64, 64)
    q = smem["q"].at[rows]
    o_smem = smem["o"].at[rows] if config.own_output else q
    H_v = smem["v"].shape[-1]
    dtype = smem["q"].dtype
    seen = _Seen(kernel, gmem, smem, tile, first_row)
    values = "v_clean" if kernel.poisonable else "v_ready"
    reader = Reader(kernel, smem, seen, w, count, values)

    # By how many bits a row's largest weight may lie below 1, so that later ones, which are 1 at most, need no new
    # maximum. float16 has no exponents to spare: what many keys weigh behind one large one would be rounded away.
    lazy = config.lazy and dtype == jnp.bfloat16
    spare = 8.0 if lazy else 0.0

    def finite(maximum):
        """A row that has seen nothing, or -inf alone, has that maximum, and must not subtract it from itself."""
        return jnp.where(maximum == -jnp.inf, 0.0, maximum)

    def weigh(s, maximum):
        """(weights, maximum, decay, moved); looks for a new maximum in every row."""
        new = jnp.maximum(maximum, s.max(axis=1) * kernel.scale + spare)
        weights = jnp.exp2(s * kernel.scale - broadcast(finite(new), s.shape))
        return weights, new, jnp.exp2(maximum - finite(new)), None

    def weigh_lazily(s, maximum):
        """The same; `moved`, int32 and not the same in every warp, is 0 if no row of a warp needs a new one.

        Each row gets what it would alone: one that needs none keeps its own.
        """
        reference = finite(maximum)
        logits = s * kernel.scale - broadcast(reference, s.shape)
        moved = mosaic.any_not_negative(logits, jnp.where(maximum == -jnp.inf, 1.0, -1.0))

        def move(logits):
            largest = logits.max(axis=1)
            stays = (largest <= 0.0) & (maximum != -jnp.inf)  # NaN is not less than anything
            new = jnp.where(stays, maximum, jnp.maximum(maximum, largest + (reference + spare)))
            return logits - broadcast(finite(new) - reference, s.shape), new, jnp.exp2(maximum - finite(new))

        def stay(logits):
            return logits, maximum, jnp.ones_like(maximum)

        logits, new, decay = lax.cond(moved > 0, move, stay, logits)
        return jnp.exp2(logits), new, decay, moved

    def softmax(s, maximum, total, n):
        """(weights in 16 bits, maximum, total, decay, moved); maxima are of logits in base 2, and more if lazy.

        `total` (64, 8) has the sums of every eighth column, each in one thread: they meet at the end. None: no block
        came before.
        """
        s = reader.visible(s, n)
        how = weigh_lazily if lazy and total is not None else weigh
        weights, new, decay, moved = how(s, maximum)
        sums = mosaic.columns_of(weights, 8)
        total = functools.reduce(jnp.add, sums if total is None else [total * broadcast(decay, (64, 8)), *sums])
        return weights.astype(dtype), new, total, decay, moved

    plgpu.barrier_wait(smem["q_ready"])

    def with_output(o_acc):
        maximum = plgpu.layout_cast(jnp.full((64,), -jnp.inf, f32), ROWS)

        skipped = seen.skipped_blocks(steps)
        reader.leave_keys(skipped)
        first: Any = i32(0) if skipped is None else skipped

        s = with_scores(kernel, smem, q, reader.slot(first), lambda scores: scores(0))
        weights, maximum, total = softmax(s, maximum, None, first)[:3]
        reader.begin_turns()
        reader.leave_values(skipped)

        def step(n, carry):
            """Scores of block n + 1, product of block n with its values."""
            weights, maximum, total = carry
            here = reader.slot(n)

            def beside_them(scores):
                plgpu.barrier_wait(smem[values].at[here])
                plgpu.wgmma(o_acc, weights, smem["v"].at[here])
                reader.pass_turn()
                s = scores(1)
                new_weights, new_maximum, new_total, decay, moved = softmax(s, maximum, total, n + 1)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["v_free"].at[here])

                def scaled(o):
                    return o * broadcast(decay, o.shape)

                o = o_acc[...]
                o_acc[...] = scaled(o) if moved is None else lax.cond(moved > 0, scaled, lambda o: o, o)
                return new_weights, new_maximum, new_total

            return with_scores(kernel, smem, q, reader.slot(n + 1), beside_them, reader.wait_turn)

        weights, maximum, total = lax.fori_loop(first, steps - 1, step, (weights, maximum, total))
        reader.end_turns()
        if config.own_output:
            plgpu.barrier_arrive(smem["q_free"])
        last = reader.slot(steps - 1)
        plgpu.barrier_wait(smem[values].at[last])
        plgpu.wgmma(o_acc, weights, smem["v"].at[last])
        plgpu.wgmma_wait(0)
        if config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        total = total.sum(axis=1)
        if kernel.poisonable:
            total = seen.poison(total, turn, o_smem)
        plgpu.barrier_arrive(smem["v_free"].at[last])  # after the question whether the tile was dirty
        nothing = total == 0.0
        inverse = jnp.where(nothing, 0.0, 1.0 / jnp.where(nothing, 1.0, total))
        # Both terms by what the maximum exceeds the largest logit, or nearly cancels: they would cancel.
        lse = jnp.where(nothing, -jnp.inf, (maximum - spare) * math.log(2) + jnp.log(total * 2.0**spare))
        o = o_acc[...]
        return o * broadcast(inverse, o.shape), lse

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


class _Seen(Seen):
    """And what to do about values that they do not see."""

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
        kv_head = lax.div(tile.head, i32(self.walk.spec.G))

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
                if self.walk.spec.segments:
                    ids = gmem["kv_ids"].at[tile.batch, self.tile.stop - 1 - n, pl.ds(r, 64)]
                bad = self.keep(lax.broadcast_in_dim(columns, (64, 64), [1]), first, ids, 0.0)
                return total + bad.sum(axis=1)

            return lax.cond(tile.partial(n), look, lambda total: total, total)

        steps = (tile.stop - tile.start) * (kv_block // 64)
        return lax.cond(dirty != 0, lambda total: lax.fori_loop(0, steps, piece, total), lambda total: total, total)
