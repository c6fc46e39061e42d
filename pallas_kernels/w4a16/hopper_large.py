"""Many rows times a packed 4-bit weight for Hopper (sm_90a) in Pallas Mosaic GPU: y^T = W^T x^T on wgmma.

A CTA of each SM walks over tiles of `64 * blocks` columns of W by `tokens` rows of x; each warpgroup owns blocks of 64
columns, makes their 16-bit weights in registers and multiplies them from there (wgmma's A; x is B, in shared memory):

    loader       | k0 k1 k2 k3 ...                           (TMA, a ring of `stages`; a warp for each block, one for x)
    warpgroup 0  | W0 | W1  W0'x0' | W2  W1'x1' | ...          -> 16 bits, transposed through shared memory -> y
    warpgroup 1  |  the same for its own blocks of columns, free-running

Where a weight has few columns, the rows of W are cut into `parts` for as many CTAs, all in flight at once. They put
their sums into global memory, wait for each other, and each adds up those of all, in order, for its share of x's rows.
That assumes that a grid of no more CTAs than SMs is resident at once: no parts where the number of SMs is unknown.

Where x is much to load, the two CTAs of a `cluster` take neighbouring columns and each loads half of x for both.

The weights of one step are made while the product before them runs; two sets of registers take turns. Weights are
rounded once, to x's dtype, as the plain path does; sums are float32, in one order.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import mosaic, mosaic_int4, mosaic_turns
from pallas_kernels.device import H200, Device
from pallas_kernels.w4a16.spec import W4A16Spec

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use on sm_90
_RESERVED = 8 * 1024  # barriers, and what rounding each array up to 1 KiB adds
_K = 64  # rows of W to a product
_FEWEST_STAGES = 3  # of a ring: two are read while one is loaded
_MOST_STAGES = 32  # of a ring: a thread keeps a barrier's phases in the bits of a word
_OUT = 64  # rows of y that leave through shared memory at a time

# Registers of a thread that computes and of one that loads, by computing warpgroups: what a launch gets, divided anew.
_REGISTERS = {2: (232, 32), 4: (104, 32)}
_LOADERS = 4  # warps, which take blocks of columns in turn; the last loads x as well
_X_WARP = _LOADERS - 1

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes and schedule.

    `warpgroups` that compute, `blocks` of 64 columns of W each, by `tokens` rows of x, in `parts` of the rows of W;
    CTAs to a `cluster`, which share x; a step is `depth` times 64 rows of W; `stages` steps in flight, all of shared
    memory where None.
    """

    warpgroups: int = 2
    blocks: int = 1
    tokens: int = 256
    parts: int = 1
    cluster: int = 1
    depth: int = 1
    stages: int | None = None

    def __post_init__(self):
        if self.warpgroups not in _REGISTERS:
            raise ValueError(f"Config: {self.warpgroups=} - there are registers for 2 or 4. Choose one of them.")
        if self.blocks not in (1, 2, 4):
            raise ValueError(f"Config: {self.blocks=} - a warpgroup has registers for few. Choose 1, 2 or 4.")
        if self.tokens not in (16, 32, 48, 64, 128, 192, 256):
            raise ValueError(f"Config: {self.tokens=} - wgmma takes up to 256. Choose 16, 32, 48, 64, 128, 192 or 256.")
        if self.blocks * self.tokens > (256 if self.warpgroups == 2 else 64):
            raise ValueError(f"Config: {self.blocks=} x {self.tokens=} - the sums exceed the registers. Take fewer.")
        if self.parts not in (1, 2, 4, 8) or self.tokens % (8 * self.parts):
            raise ValueError(
                f"Config: {self.parts=} of {self.tokens=} - each adds up as many rows of x, in eights. Choose 1, 2, 4 "
                "or 8, or more tokens."
            )
        if self.cluster not in (1, 2) or min(self.cluster, self.parts) > 1:
            raise ValueError(
                f"Config: {self.cluster=} of {self.parts=} - parts share no x. Choose 1, or 2 of one part."
            )
        if self.depth not in (1, 2):
            raise ValueError(f"Config: {self.depth=} - a stage of more takes too much shared memory. Choose 1 or 2.")
        if self.stages is not None and not _FEWEST_STAGES <= self.stages <= _MOST_STAGES:
            raise ValueError(
                f"Config: {self.stages=} - two are read while one is loaded. Give {_FEWEST_STAGES} to {_MOST_STAGES}."
            )

    @property
    def columns(self) -> int:
        """Blocks of 64 columns of W to a CTA's tile."""
        return self.warpgroups * self.blocks

    @property
    def wide(self) -> int:
        """Blocks of 64 columns of W to a cluster's tile."""
        return self.columns * self.cluster


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What the body knows at trace time."""

    spec: W4A16Spec
    config: Config
    cores: int

    @property
    def step_rows(self) -> int:
        """Rows of W to a step."""
        return _K * self.config.depth

    @property
    def per_pass(self) -> int:
        """Steps in a row whose products are even in number, so that both sets of registers have their turn."""
        return 2 // math.gcd(2, self.config.depth * self.config.blocks)

    @property
    def steps(self) -> int:
        """Of a tile's part, in whole passes. Past the end TMA fills up with zeros."""
        steps = pl.cdiv(self.spec.padded_K, self.step_rows * self.config.parts)
        return pl.cdiv(steps, self.per_pass) * self.per_pass

    @property
    def all_blocks(self) -> int:
        return self.spec.padded_N // 64

    @property
    def token_tiles(self) -> int:
        return max(1, pl.cdiv(self.spec.M, self.config.tokens))

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.all_blocks, self.config.wide) * self.token_tiles

    @property
    def runs(self) -> bool:
        """Whether clusters own runs of columns, of any length, rather than tiles."""
        return self.token_tiles == 1 and self.config.parts == 1

    @property
    def clusters(self) -> int:
        config = self.config
        work = pl.cdiv(self.all_blocks, config.warpgroups * config.cluster) if self.runs else self.tiles * config.parts
        return min(self.cores // config.cluster, work)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Sums in global memory: of a tile for each part that adds them up, by the part that they come from."""
        config = self.config
        return self.tiles, config.parts, config.parts, config.columns, 64, config.tokens // config.parts

    @property
    def scale_rows(self) -> int:
        """Groups that a step meets."""
        return max(1, self.step_rows // self.spec.group)

    def stage_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one stage of every ring. A box of TMA has 128 bytes or more."""
        columns = self.config.columns
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "words": ((columns, self.config.depth, 8, 64), "int32"),
            "scales": ((columns, self.scale_rows, 64), self.spec.scale_dtype),
            "x": ((self.config.tokens, self.step_rows), self.spec.dtype),
        }
        if self.spec.zeros:
            shapes["zeros"] = ((columns, max(2, self.scale_rows), 64), "uint8")
        return shapes

    @property
    def stage_bytes(self) -> int:
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in self.stage_shapes().values())

    @property
    def out_bytes(self) -> int:
        return self.config.warpgroups * _OUT * 64 * 2

    @property
    def stages(self) -> int:
        """As many as fit, if the configuration does not say; three at the least, whether they fit or not."""
        fitting = (SMEM_LIMIT - _RESERVED - self.out_bytes) // self.stage_bytes
        return self.config.stages or max(_FEWEST_STAGES, min(fitting, 16))


def smem_bytes(spec: W4A16Spec, config: Config) -> int:
    """Shared memory of the rings and of the output; barriers and rounding add less than 8 KiB."""
    kernel = _Kernel(spec=spec, config=config, cores=1)
    return kernel.stages * kernel.stage_bytes + kernel.out_bytes


def candidates(spec: W4A16Spec, device: Device) -> list[Config]:
    """Configurations worth timing."""
    narrow = [next((tokens for tokens in (16, 32, 48) if spec.M <= tokens), 64), 64] if spec.M <= 64 else [64]
    tiles = [(4, 1, tokens) for tokens in narrow if spec.M <= 64]
    tiles += [(2, blocks, tokens) for tokens in narrow for blocks in (1, 2, 4)]
    tiles += [
        (2, blocks, tokens) for blocks, tokens in ((2, 128), (1, 128), (1, 192), (1, 256)) if tokens < spec.M + 64
    ]
    every = []
    for (warpgroups, blocks, tokens), deep in itertools.product(dict.fromkeys(tiles), (True, False)):
        # Where a step has few products, more of its rows spare more of what comes once a step.
        depth = 2 if deep == (tokens <= 64) else 1
        config = Config(warpgroups=warpgroups, blocks=blocks, tokens=tokens, depth=depth)
        ways = [{"parts": parts} for parts in (1, 2, 4, 8) if tokens % (8 * parts) == 0] + [{"cluster": 2}]
        every += [dataclasses.replace(config, **way) for way in ways]
    return [config for config in every if not _crowded(config) and _fits(spec, config, device) is None]


def _crowded(config: Config) -> bool:
    """Whether the sums leave so few registers that ptxas serialises wgmma in longer steps and spills for clusters."""
    return config.blocks == 4 and config.tokens == 64 and max(config.depth, config.cluster) > 1


def _cores(device: Device) -> int:
    return device.num_cores or H200.num_cores or 1


def _fits(spec: W4A16Spec, config: Config, device: Device) -> str | None:
    """Why the call cannot run with the configuration."""
    kernel = _Kernel(spec=spec, config=config, cores=_cores(device))
    if (need := smem_bytes(spec, config)) > SMEM_LIMIT - _RESERVED:
        return f"it needs {need} bytes of shared memory, and there are {SMEM_LIMIT - _RESERVED}"
    if kernel.cores < config.cluster:
        return f"there are {kernel.cores} SMs for a cluster of {config.cluster}"
    if config.parts > 1 and device.num_cores is None:
        return f"CTAs wait for each other, and how many fit on {device} at a time is not known"
    if config.parts > 1 and (ctas := kernel.tiles * config.parts) > kernel.cores:
        return f"{ctas} CTAs wait for each other, and {kernel.cores} fit at a time"
    if config.parts > 1 and (config.parts - 1) * kernel.steps * kernel.step_rows >= spec.padded_K:
        return f"there are {spec.padded_K} rows of W for {config.parts} parts"
    return None


def default(spec: W4A16Spec, device: Device) -> Config:
    """The first of `ranked`."""
    return ranked(spec, device)[0]


def ranked(spec: W4A16Spec, device: Device) -> list[Config]:
    """The candidates by predicted clocks, fewest first; of equal ones, without clusters and with the fewest loads."""

    def cost(config: Config) -> tuple[float, int, float, int]:
        products, loads, meeting = _clocks(spec, config, device)
        return max(products, loads) + meeting, config.cluster, loads, config.columns

    return sorted(candidates(spec, device), key=cost)


_BYTES_PER_CLOCK = 26  # that an SM takes in while all do: about 6 TB/s from the L2 cache (an estimate)
_MEETING_CLOCKS = 4000  # to zero the counters, to wait for the other parts and for memory (an estimate)


def _clocks(spec: W4A16Spec, config: Config, device: Device) -> tuple[float, float, float]:
    """Predicted for the busiest SM: of its products, of its loads meanwhile, of meeting. They rank, no more."""
    kernel = _Kernel(spec=spec, config=config, cores=_cores(device))
    if config.parts > 1:
        blocks, turns = config.columns, 1
    elif kernel.runs:
        blocks = pl.cdiv(pl.cdiv(kernel.all_blocks, kernel.clusters), config.cluster)
        turns = pl.cdiv(blocks, config.columns)
    else:
        turns = pl.cdiv(kernel.tiles, kernel.clusters)
        blocks = turns * config.columns
    # A wgmma of 64 x tokens x 16 with A in registers, as fitted to kernels like this one (H200, 2026-11), or its peak.
    product = max(32 + config.tokens / 3, config.tokens / 2)
    rows = kernel.steps * kernel.step_rows
    products = blocks * rows / 16 * product
    x_bytes = turns * config.tokens * 2 / config.cluster
    loads = rows * (x_bytes + blocks * 32) / _BYTES_PER_CLOCK
    sums_bytes = 64 * blocks * config.tokens * 4 * 2
    meeting = _MEETING_CLOCKS + sums_bytes / _BYTES_PER_CLOCK if config.parts > 1 else 0.0
    return products, loads, meeting


def why_not(spec: W4A16Spec, device: Device) -> str | None:
    """The first limit of the kernel that the call exceeds."""
    if device.compute_capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16 activations, not {spec.dtype}"
    if spec.operand_dtype != spec.dtype:
        return f"rounds weights to {spec.dtype}, whose range {spec.scale_dtype} scales exceed"
    return None


def matmul(
    spec: W4A16Spec,
    x: Float[Array, "m k"],
    words: Int32[Array, "column_tiles row_tiles 8 64"],
    scales: Float[Array, "column_tiles groups 64"],
    zeros: UInt8[Array, "column_tiles groups 64"] | None,
    *,
    config: Config | None = None,
    device: Device = H200,
) -> Float[Array, "m n"]:
    """y = x W with W rounded once to x's dtype, summed in float32, rounded to x's dtype. No derivative rule.

    Raises ValueError where the configuration cannot serve the call.
    """
    config = config or default(spec, device)
    if (reason := _fits(spec, config, device)) is not None:
        raise ValueError(f"{spec.op}: {config=} for {spec!s} - {reason}. Choose one of `candidates`.")
    kernel = _Kernel(spec=spec, config=config, cores=_cores(device))
    # TMA fills up with zeros, but Mosaic wants whole tiles of 8 x 64. And of columns two, as it leaves the index of a
    # dim out that has one tile and is read by one: a step past the end would read the first one's x again.
    x = jnp.pad(x, ((0, -spec.M % 8), (0, max(spec.padded_K, 2 * _K) - spec.K)))
    side = {"scales": scales} if zeros is None else {"scales": scales, "zeros": zeros}
    return _call(kernel, {"words": words, **side, "x": x})[: spec.M, : spec.N]


def _call(kernel: _Kernel, operands: dict[str, Array]) -> Array:
    """Launches the kernel: y (M in whole tiles of 8, N')."""
    spec, config, stages = kernel.spec, kernel.config, kernel.stages
    smem: dict[str, Any] = {}
    for name, (shape, dtype) in kernel.stage_shapes().items():
        make = mosaic.swizzled if name == "x" else plgpu.SMEM
        smem[name] = make((stages, *shape), jnp.dtype(dtype))
    copies = config.columns * (len(smem) - 1) + 1
    smem |= {
        "out": mosaic.swizzled((config.warpgroups, _OUT, 64), jnp.dtype(spec.dtype)),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
    }
    if config.cluster > 1:
        smem["x_free"] = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=stages)
    names = tuple(smem)
    y = jax.ShapeDtypeStruct((operands["x"].shape[0], spec.padded_N), spec.dtype)
    inputs, outputs = [*operands], {"out": y}
    if config.parts > 1:
        inputs.append("arrived")
        outputs["sums"] = jax.ShapeDtypeStruct(kernel.sums_shape, f32)

    def body(*refs):
        gmem = dict(zip((*inputs, *outputs), refs, strict=False))
        _body(kernel, gmem, dict(zip(names, refs[len(gmem) :], strict=True)))

    launch = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=list(smem.values()),
        grid=(kernel.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("rank",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Every exchange through shared memory below is fenced or goes through a barrier.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    if config.parts == 1:
        return launch(*operands.values())[0]
    counters = kernel.tiles * config.warpgroups
    return mosaic_turns.with_zeros(
        counters, lambda arrived: launch(*operands.values(), arrived), tuple(outputs.values())
    )[0]


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    config = kernel.config
    warpgroup = lax.axis_index("warpgroup")
    compute, load = _REGISTERS[config.warpgroups]

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(compute, action="increase")
        _over_tiles(kernel, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(load, action="decrease")

        def walk(warp):
            turns = _over_tiles(kernel, functools.partial(_load, kernel, gmem, smem, warp))
            _drain(kernel, smem, turns)

        if config.cluster > 1:  # Mosaic has no barriers of clusters for warps
            walk(None)
        else:
            plgpu.warp_map(lambda warp: pl.when((warp < config.columns) | (warp == _X_WARP))(lambda: walk(warp)))


@dataclass(frozen=True)
class _Tile:
    """The turn-th tile of a CTA: its first block of columns of W and their number, its first row of x, its part."""

    turn: Any
    block: Any
    count: Any
    token: Any
    index: Any
    part: Any


def _over_tiles(kernel: _Kernel, one: Callable[[_Tile], None]) -> Any:
    """Runs `one` for the tiles of this CTA, and returns their number.

    Where x is one tile, clusters own runs of columns, as even as blocks come. Otherwise the tiles of a column follow
    each other, over neighbouring clusters: they share its weights in the L2 cache.
    """
    config = kernel.config
    cluster, clusters, wide = lax.axis_index("cluster"), i32(kernel.clusters), i32(config.wide)
    rank = lax.axis_index("rank")

    def mine(turn, block, count, *rest):
        start, stop = (lax.div(r * count + (config.cluster - 1), i32(config.cluster)) for r in (rank, rank + 1))
        one(_Tile(turn, block + start, stop - start, *rest))

    if kernel.runs:
        start, stop = (lax.div(c * i32(kernel.all_blocks), clusters) for c in (cluster, cluster + 1))
        turns = lax.div(stop - start + (wide - 1), wide)

        @pl.loop(0, turns)
        def _(turn):
            first, end = (start + lax.div(t * (stop - start), turns) for t in (turn, turn + 1))
            mine(turn, first, end - first, 0 * turn, 0 * turn, 0 * turn)

        return turns

    parts = i32(config.parts)
    turns = lax.div(kernel.tiles * parts - cluster + (clusters - 1), clusters)

    @pl.loop(0, turns)
    def _(turn):
        index, part = lax.div(cluster + turn * clusters, parts), lax.rem(cluster, parts)
        block = lax.div(index, i32(kernel.token_tiles)) * wide
        token = lax.rem(index, i32(kernel.token_tiles)) * config.tokens
        mine(turn, block, jnp.minimum(kernel.all_blocks - block, wide), token, index, part)

    return turns


def _drain(kernel: _Kernel, smem: dict[str, Any], turns: Any) -> None:
    """Waits until every stage that was loaded has been read: a barrier's last phase may not pass unseen."""

    @pl.loop(0, jnp.minimum(turns * kernel.steps, kernel.stages))
    def _(slot):
        _wait_free(kernel, smem, slot)


def _wait_free(kernel: _Kernel, smem: dict[str, Any], slot: Any) -> None:
    """Until this CTA has read the stage, and those that load x for each other all have."""
    plgpu.barrier_wait(smem["free"].at[slot])
    if kernel.config.cluster > 1:
        plgpu.barrier_arrive(smem["x_free"].at[slot])
        plgpu.barrier_wait(smem["x_free"].at[slot])


def _load(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], warp: Any | None, tile: _Tile) -> None:
    """Loads a tile: one warp its block of columns, or x, or both; the whole warpgroup (None) everything."""
    config = kernel.config

    @pl.loop(0, kernel.steps)
    def _(step):
        taken = tile.turn * kernel.steps + step
        slot = lax.rem(taken, i32(kernel.stages))
        k = tile.part * kernel.steps + step
        full = smem["full"].at[slot]

        @pl.when(taken >= kernel.stages)
        def _():
            _wait_free(kernel, smem, slot)
            mosaic_turns.fence_async()  # the stage was read by ordinary loads

        def load_block(which):
            block = tile.block + jnp.clip(which, 0, jnp.maximum(tile.count - 1, 0))

            def copy(name, source):
                # Where the tile has fewer blocks, only the barrier hears of it.
                plgpu.copy_gmem_to_smem(source, smem[name].at[slot, which], full, predicate=which < tile.count)

            copy("words", gmem["words"].at[block, pl.ds(k * config.depth, config.depth)])
            group = 0 if kernel.spec.groups == 1 else lax.div(k * kernel.step_rows, i32(kernel.spec.group))
            for name in ("scales", "zeros"):
                if name in gmem:
                    copy(name, gmem[name].at[block, pl.ds(group, smem[name].shape[2])])

        def load_x():
            source = gmem["x"].at[pl.ds(tile.token, config.tokens), pl.ds(k * kernel.step_rows, kernel.step_rows)]
            plgpu.copy_gmem_to_smem(
                source, smem["x"].at[slot], full, collective_axes="rank" if config.cluster > 1 else None
            )

        if warp is None:
            for which in range(config.columns):
                load_block(which)
            load_x()
        else:
            for offset in range(0, config.columns, _LOADERS):
                which = offset + warp
                pl.when(which < config.columns)(functools.partial(load_block, which))
            pl.when(warp == _X_WARP)(load_x)


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], tile: _Tile) -> None:
    """One warpgroup's blocks of a tile: every warpgroups-th, so that a short tile leaves none to some."""
    spec, config = kernel.spec, kernel.config
    w = lax.axis_index("warpgroup")
    mine = [w + r * config.warpgroups for r in range(config.blocks)]
    first = lax.rem(tile.turn * kernel.steps, i32(kernel.stages))

    def after(slot):  # instead of a division each step
        return jnp.where(slot + 1 == kernel.stages, 0, slot + 1)

    def weights(slot, block, k):
        """Of the k-th 64 rows of W of a step."""
        rows = pl.ds(k * kernel.scale_rows // config.depth, max(1, kernel.scale_rows // config.depth))
        zeros = smem["zeros"].at[slot, block, rows] if spec.zeros else None
        refs = smem["words"].at[slot, block, k], smem["scales"].at[slot, block, rows], zeros
        return mosaic_int4.dequantize(*refs, group=spec.group, dtype=jnp.dtype(spec.dtype))

    def free(slot, **predicate):
        plgpu.barrier_arrive(smem["free"].at[slot], **predicate)

    def products(*sums):
        def one_pass(n, carry):
            slot, before = carry
            for step in range(kernel.per_pass):
                plgpu.barrier_wait(smem["full"].at[slot])
                for k, (block, acc) in itertools.product(range(config.depth), zip(mine, sums, strict=False)):
                    x = smem["x"].at[slot, :, pl.ds(k * _K, _K)]
                    plgpu.wgmma(acc, weights(slot, block, k), x.T)
                    plgpu.wgmma_wait(1)
                    # The product before this one is done, and with the last of a step the step.
                    if k == 0 and acc is sums[0]:
                        free(before, **({} if step else {"predicate": n > 0}))
                slot, before = after(slot), slot
            return slot, before

        _, last = lax.fori_loop(0, kernel.steps // kernel.per_pass, one_pass, (first, first))
        plgpu.wgmma_wait(0)
        free(last)
        return [x[...] for x in sums]

    def multiply(count):
        """The first `count` of this warpgroup's blocks."""
        sums = pl.run_scoped(products, *[mosaic.ACC((64, config.tokens), f32)] * count)
        if config.parts > 1:
            sums = _meet(kernel, gmem, tile, mine[:count], sums)
        for block, y in zip(mine, sums, strict=False):
            _store(kernel, gmem, smem, tile, block, y)

    for count in range(1, config.blocks + 1):
        more = (mine[count] < tile.count) if count < config.blocks else False
        pl.when((mine[count - 1] < tile.count) & jnp.logical_not(more))(functools.partial(multiply, count))

    @pl.when(mine[0] >= tile.count)
    def _():
        def skip(_, slot):
            plgpu.barrier_wait(smem["full"].at[slot])
            free(slot)
            return after(slot)

        lax.fori_loop(0, kernel.steps, skip, first)


def _meet(kernel: _Kernel, gmem: dict[str, Any], tile: _Tile, mine: list[Any], sums: Any) -> list[Any]:
    """The sums of all parts of a tile, for this part's share of the rows of x."""
    config = kernel.config
    place = gmem["sums"].at[tile.index]
    for block, y in zip(mine, sums, strict=True):
        for share, part in enumerate(mosaic.columns_of(y, config.tokens // config.parts)):
            place[share, tile.part, block] = part
    arrived = tile.index * config.warpgroups + lax.axis_index("warpgroup")
    mosaic_turns.announce(gmem["arrived"], arrived)
    mosaic_turns.wait_turn(gmem["arrived"], arrived, i32(config.parts))

    def added(block):
        parts = [place.at[tile.part, n, block] for n in range(config.parts)]
        return functools.reduce(jnp.add, [plgpu.load(x, layout=mosaic.Layout.WGMMA, optimized=False) for x in parts])

    return [added(block) for block in mine]


def _store(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], tile: _Tile, block: Any, y: Any) -> None:
    """y^T (64, rows of x) of one block to memory; TMA leaves out rows past M.

    But not where y is one tile of 8 rows and so is what is stored: Mosaic leaves that index out, whatever it is.
    """
    columns = pl.ds((tile.block + block) * 64, 64)
    share = y.shape[1]
    width = min(share, _OUT)
    staging = smem["out"].at[lax.axis_index("warpgroup"), pl.ds(0, width)]
    first = tile.token + tile.part * share
    for n, rows in enumerate(mosaic.columns_of(y.astype(kernel.spec.dtype), width)):

        def store(n=n, rows=rows):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            staging.T[...] = plgpu.layout_cast(rows, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, gmem["out"].at[pl.ds(first + n * width, width), columns])

        if width == 8 and kernel.spec.M <= 8:
            pl.when(first + n * width < kernel.spec.M)(store)
        else:
            store()
