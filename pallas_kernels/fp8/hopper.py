"""The product of 8-bit operands for Hopper (sm_90a) in Pallas Mosaic GPU: wgmma, promoted to float32 every 128 of K.

A CTA of each SM walks over tiles of y; two warpgroups own half of the rows of a tile each, `blocks` times 64 of them:

    loader       | k0 k1 k2 k3 ...                              (TMA, a ring of `stages` steps of 128 of K)
    warpgroup 0  | x0 w0 | + | x1 w1 | + | ...                  products of one step, from zero, in the tensor core;
    warpgroup 1  |    x0 w0 | + | x1 w1 | + | ...               then, in float32 registers, sums += products * scales

The tensor core adds 8-bit products in fewer bits than float32 has: sums of 128 are as long as it is trusted with. While
one warpgroup adds, the other one multiplies. Where x has few rows the operands change places (`swapped`): the tile is
then y^T, of which W gives the rows, because a wgmma has 64 of these and as few columns as there are rows of x.

Whole tiles go to CTAs in turn; or (`even`) all steps of all tiles are one line, cut into equal runs, one for each CTA.
Whoever has the first step of a tile adds up the sums that the following CTAs left in global memory, in order; they have
begun with that tile, and finished long ago. That assumes that a grid of no more CTAs than SMs is resident at once.

Or the CTAs of a cluster (`split`) have a tile together, each a run of its steps. They exchange their sums through shared
memory, and each adds up and stores those of its share of the tile's columns, in the order of ranks: no counters in
global memory, which an XLA program would have to clear before every call.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic, mosaic_int4
from pallas_kernels.device import H200, Device
from pallas_kernels.fp8.spec import BLOCK, Fp8Spec

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use on sm_90
_RESERVED = 8 * 1024  # barriers, and what rounding each array up to 1 KiB adds
_WARPGROUPS = 2  # that compute
_REGISTERS = (232, 40)  # of a thread that computes and of one that loads; ptxas counts neither (a loader needs 29)
_OUT = 64  # columns of y, or rows of y^T, that leave through shared memory at a time
_FEWEST_STAGES = 2
_MOST_STAGES = 16
_LEAST_BOX = 32  # float32 values: TMA moves 128 bytes or more
_ALIGNED = 4  # float32 values: 16 bytes


i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes and schedule.

    A tile has 128 `blocks` rows by `columns`: of y, or, `swapped`, of y^T. `even` cuts the steps of all tiles into runs
    of one length; `split` CTAs, a cluster, cut the steps of each; otherwise whole tiles go to CTAs. `stages` steps are
    in flight, all of shared memory where None.
    """

    swapped: bool = False
    blocks: int = 2
    columns: int = 128
    even: bool = False
    split: int = 1
    stages: int | None = None

    def __post_init__(self):
        if self.blocks not in (1, 2):
            raise ValueError(f"Config: {self.blocks=} - the sums exceed the registers. Choose 1 or 2.")
        if self.columns not in ((16, 32, 64, 128) if self.swapped else (128,)):
            raise ValueError(
                f"Config: {self.columns=} with {self.swapped=} - a tile of W is {BLOCK} columns wide, which share a "
                "scale. Choose 128, or 16, 32, 64 or 128 swapped."
            )
        if self.split not in (1, 2, 4, 8) or (self.split > 1 and (self.even or not self.swapped)):
            raise ValueError(
                f"Config: {self.split=} with {self.swapped=} and {self.even=} - a cluster has up to 8 CTAs, and tiles of "
                "few rows of x are split, one way. Choose 1, or 2, 4 or 8 swapped and not even."
            )
        if self.split > 1 and self.columns < 8 * self.split:
            raise ValueError(
                f"Config: {self.columns=} with {self.split=} - each CTA stores eight rows of y or more. Split less."
            )
        if self.stages is not None and not _FEWEST_STAGES <= self.stages <= _MOST_STAGES:
            raise ValueError(
                f"Config: {self.stages=} - one is read while one is loaded. Give {_FEWEST_STAGES} to {_MOST_STAGES}."
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.blocks * _WARPGROUPS

    @property
    def share(self) -> int:
        """Columns of a tile that a CTA stores."""
        return self.columns // self.split


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What the body knows at trace time. "Rows" and "columns" are those of a tile: of y, or of y^T where swapped."""

    spec: Fp8Spec
    config: Config
    cores: int

    @property
    def by_block(self) -> bool:
        return self.spec.scaling == "block"

    @property
    def tokens(self) -> int:
        """Rows of x to a tile."""
        return self.config.columns if self.config.swapped else self.config.rows

    @property
    def features(self) -> int:
        """Rows of W to a tile."""
        return self.config.rows if self.config.swapped else self.config.columns

    @property
    def token_tiles(self) -> int:
        return max(1, pl.cdiv(self.spec.M, self.tokens))

    @property
    def feature_tiles(self) -> int:
        return pl.cdiv(self.spec.N, self.features)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.spec.k_blocks

    @property
    def tiles(self) -> int:
        """Tiles of all."""
        return self.token_tiles * self.feature_tiles

    @property
    def all_steps(self) -> int:
        """Where runs of steps go to CTAs."""
        return self.tiles * self.steps

    @property
    def ctas(self) -> int:
        if self.config.split > 1:
            return self.tiles * self.config.split
        return min(self.cores, self.all_steps if self.config.even else self.tiles)

    @property
    def scale_box(self) -> int:
        """Scales of x to a step."""
        return max(_LEAST_BOX, self.tokens)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Sums that a CTA leaves for the one before it."""
        return self.ctas, _WARPGROUPS, self.config.blocks, 64, self.config.columns

    def stage_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one stage of every ring."""
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "x": ((self.tokens, BLOCK), self.spec.x_dtype),
            "w": ((self.features, BLOCK), self.spec.w_dtype),
        }
        if self.by_block:
            shapes["x_scales"] = ((self.scale_box,), "float32")
            shapes["w_scales"] = ((self.features // BLOCK, _LEAST_BOX), "float32")  # of which a step uses one
        return shapes

    def parts(self, name: str) -> int:
        """Parts of 128 rows that an operand's stage comes in."""
        return pl.cdiv(self.stage_shapes()[name][0][0], BLOCK)

    @property
    def stage_bytes(self) -> int:
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in self.stage_shapes().values())

    @property
    def out_rows(self) -> int:
        """Rows of y that leave through shared memory at a time."""
        return min(_OUT, self.config.share) if self.config.swapped else 64

    @property
    def out_bytes(self) -> int:
        return _WARPGROUPS * self.out_rows * _OUT * 2

    @property
    def exchanged_shape(self) -> tuple[int, ...]:
        """Sums that the CTAs of a cluster send each other, by the rank that they come from."""
        return self.config.split, _WARPGROUPS, self.config.blocks, 64, self.config.share

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the rings'."""
        return self.out_bytes + (4 * math.prod(self.exchanged_shape) if self.config.split > 1 else 0)

    @property
    def stages(self) -> int:
        """As many as fit, if the configuration does not say."""
        fitting = (SMEM_LIMIT - _RESERVED - self.fixed_bytes) // self.stage_bytes
        return self.config.stages or max(_FEWEST_STAGES, min(fitting, _MOST_STAGES))


def smem_bytes(spec: Fp8Spec, config: Config) -> int:
    """Shared memory of the rings, of exchanged sums and of the output; barriers and rounding add less than 8 KiB."""
    kernel = _Kernel(spec=spec, config=config, cores=1)
    return kernel.stages * kernel.stage_bytes + kernel.fixed_bytes


def candidates(spec: Fp8Spec, device: Device) -> list[Config]:
    """Configurations worth timing, the default first."""
    every = [default(spec, device)]
    if spec.M <= 512:
        narrow = next((columns for columns in (16, 32, 64) if spec.M <= columns), 128)
        swapped = Config(swapped=True, columns=narrow, blocks=1)
        every += [dataclasses.replace(swapped, even=even, blocks=b) for b in (1, 2) for even in (True, False)]
        for b in (1, 2):
            tiles = pl.cdiv(spec.M, narrow) * pl.cdiv(spec.N, 128 * b)
            splits = [n for n in (2, 4, 8) if 8 * n <= narrow and n <= spec.k_blocks and tiles * n <= _cores(device)]
            # Those that use the most SMs; of large clusters fewer may be resident at once, so also the next smaller.
            every += [dataclasses.replace(swapped, blocks=b, split=n) for n in splits[-2:]]
    if spec.M > 64:
        every += [Config(blocks=b, even=even) for even in (False, True) for b in (2, 1)]
    return [config for config in dict.fromkeys(every) if _fits(spec, config, device) is None]


def default(spec: Fp8Spec, device: Device) -> Config:
    """Few rows: swapped, and even runs; many: whole tiles."""
    known = device.num_cores is not None  # CTAs that wait for each other must all be resident
    columns = next((columns for columns in (16, 32, 64) if spec.M <= columns), 128)
    if spec.M <= 256:
        return Config(swapped=True, columns=columns, blocks=1, even=known)
    tiles = pl.cdiv(spec.M, 256) * pl.cdiv(spec.N, 128)
    return Config(blocks=2) if tiles >= _cores(device) or not known else Config(blocks=1, even=True)


def _cores(device: Device) -> int:
    return device.num_cores or H200.num_cores or 1


def _fits(spec: Fp8Spec, config: Config, device: Device) -> str | None:
    """Why the call cannot run with the configuration."""
    kernel = _Kernel(spec=spec, config=config, cores=_cores(device))
    if (need := smem_bytes(spec, config)) > SMEM_LIMIT - _RESERVED:
        return f"it needs {need} bytes of shared memory, and there are {SMEM_LIMIT - _RESERVED}"
    if config.even and device.num_cores is None:
        return f"CTAs wait for each other, and how many fit on {device} at a time is not known"
    if config.even and kernel.all_steps * kernel.ctas >= 2**31:
        return f"{kernel.all_steps} steps over {kernel.ctas} CTAs exceed the integers that they are counted in"
    return None


def why_not(spec: Fp8Spec, device: Device) -> str | None:
    """The first limit of the kernel that the call exceeds."""
    if device.compute_capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if spec.dtype != "bfloat16":
        return f"writes bfloat16 results, not {spec.dtype}"
    return None


def matmul(
    spec: Fp8Spec,
    x: Float[Array, "m k"],
    x_scales: Float[Array, "..."],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "..."],
    *,
    config: Config | None = None,
    device: Device = H200,
) -> Float[Array, "m n"]:
    """y = x W^T, rounded once. Sums of 128 of K by the tensor core, of these in float32. No derivative rule.

    Raises ValueError where the configuration cannot serve the call.
    """
    config = config or default(spec, device)
    if (reason := _fits(spec, config, device)) is not None:
        raise ValueError(f"{spec.op}: {config=} for {spec!s} - {reason}. Choose one of `candidates`.")
    kernel = _Kernel(spec=spec, config=config, cores=_cores(device))
    # TMA fills up with zeros, but Mosaic wants whole tiles of 8 rows, and W's columns of y in whole blocks.
    x, w = (_padded(a, (multiple, BLOCK)) for a, multiple in ((x, 8), (w, BLOCK)))
    operands = {"x": x, "w": w}
    if kernel.by_block:
        operands["x_scales"] = _padded(x_scales.T, (1, kernel.scale_box))
        operands["w_scales"] = _padded(w_scales, (1, _ALIGNED))
    else:
        scales = (jnp.broadcast_to(s, (n, 1))[:, 0] for s, n in ((x_scales, spec.M), (w_scales, spec.N)))
        whole = (kernel.token_tiles * kernel.tokens, kernel.feature_tiles * kernel.features)
        operands["x_scales"], operands["w_scales"] = (
            jnp.pad(s, (0, size - s.shape[0])) for s, size in zip(scales, whole, strict=True)
        )
    return _call(kernel, operands)[: spec.M, : spec.N]


def _padded(x: Array, multiples: tuple[int, int]) -> Array:
    pads = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, pads) if any(map(any, pads)) else x


def _call(kernel: _Kernel, operands: dict[str, Array]) -> Array:
    """Launches the kernel: y (M in whole tiles of 8, N')."""
    config, stages, shapes = kernel.config, kernel.stages, kernel.stage_shapes()
    smem: dict[str, Any] = {}
    for name, (shape, dtype) in shapes.items():
        make = plgpu.SMEM if name.endswith("scales") else mosaic.swizzled
        smem[name] = make((stages, *shape), jnp.dtype(dtype))
    smem |= {
        "out": mosaic.swizzled((_WARPGROUPS, kernel.out_rows, _OUT), jnp.bfloat16),
        "full": plgpu.Barrier(num_arrivals=len(shapes), num_barriers=stages),
        "rest": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
    }
    if config.split > 1:
        smem["sums"] = mosaic.swizzled(kernel.exchanged_shape, f32)
        smem["came"] = plgpu.Barrier(num_arrivals=config.split * config.blocks, num_barriers=_WARPGROUPS)
    names = tuple(smem)
    y = jax.ShapeDtypeStruct((operands["x"].shape[0], operands["w"].shape[0]), jnp.bfloat16)
    inputs, outputs = [*operands], {"out": y}
    if config.even:
        inputs.append("left")
        outputs["sums"] = jax.ShapeDtypeStruct(kernel.sums_shape, f32)

    def body(*refs):
        gmem = dict(zip((*inputs, *outputs), refs, strict=False))
        _body(kernel, gmem, dict(zip(names, refs[len(gmem) :], strict=True)))

    launch = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=list(smem.values()),
        grid=(kernel.ctas // config.split,),
        grid_names=("cta",),
        **({"cluster": (config.split,), "cluster_names": ("rank",)} if config.split > 1 else {}),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Every exchange through shared memory below is fenced or goes through a barrier.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    if not config.even:
        return launch(*operands.values())[0]
    counters = kernel.ctas * _WARPGROUPS
    return mosaic.with_zeros(counters, lambda left: launch(*operands.values(), left), tuple(outputs.values()))[0]


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    warpgroup = lax.axis_index("warpgroup")
    compute, load = _REGISTERS

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(compute, action="increase")
        _over_runs(kernel, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(load, action="decrease")

        def walk():
            taken = _over_runs(kernel, functools.partial(_load, kernel, gmem, smem))
            _drain(kernel, smem, taken)

        plgpu.warp_map(lambda warp: pl.when(warp == 0)(walk))


@dataclass(frozen=True)
class _Run:
    """Steps [start, stop) of a tile; `taken` steps of this CTA come before. token, feature: first rows of x and W."""

    token: Any
    feature: Any
    start: Any
    stop: Any
    taken: Any
    tile: Any


def _over_runs(kernel: _Kernel, one: Callable[[_Run], None]) -> Any:
    """Runs `one` for the runs of this CTA, and returns the number of its steps.

    Tiles of a column of W follow each other: those that run at a time share its rows in the L2 cache, and x's.
    """
    steps, cta, ctas = i32(kernel.steps), lax.axis_index("cta"), i32(kernel.ctas)

    def tile_of(index):
        return lax.rem(index, i32(kernel.token_tiles)), lax.div(index, i32(kernel.token_tiles))

    if kernel.config.split > 1:
        rank, split = lax.axis_index("rank"), i32(kernel.config.split)
        token, feature = tile_of(cta)
        start, stop = (lax.div(r * steps, split) for r in (rank, rank + 1))
        one(_Run(token * kernel.tokens, feature * kernel.features, start, stop, 0 * start, cta))
        return stop - start

    if kernel.config.even:
        first, end = (_first_step(kernel, c) for c in (cta, cta + 1))

        @pl.loop(lax.div(first, steps), lax.div(end - 1, steps) + 1)
        def _(tile):
            start, stop = jnp.maximum(first - tile * steps, 0), jnp.minimum(end - tile * steps, steps)
            token, feature = tile_of(tile)
            taken = jnp.maximum(tile * steps - first, 0)
            one(_Run(token * kernel.tokens, feature * kernel.features, start, stop, taken, tile))

        return end - first

    turns = lax.div(kernel.tiles - cta + (ctas - 1), ctas)

    @pl.loop(0, turns)
    def _(turn):
        token, feature = tile_of(cta + turn * ctas)
        run = _Run(token * kernel.tokens, feature * kernel.features, 0 * turn, 0 * turn + steps, turn * steps, turn)
        one(run)

    return turns * steps


def _first_step(kernel: _Kernel, cta: Any) -> Any:
    """Of the run of a CTA."""
    return lax.div(cta * i32(kernel.all_steps), i32(kernel.ctas))


def _drain(kernel: _Kernel, smem: dict[str, Any], taken: Any) -> None:
    """Waits until every stage that was loaded has been read: a barrier's last phase may not pass unseen."""

    @pl.loop(0, jnp.minimum(taken, kernel.stages))
    def _(n):
        slot = lax.rem(jnp.maximum(taken - kernel.stages, 0) + n, i32(kernel.stages))
        plgpu.barrier_wait(smem["free"].at[slot])


def _load(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run) -> None:
    stages = i32(kernel.stages)

    @pl.loop(run.start, run.stop)
    def _(step):
        taken = run.taken + step - run.start
        slot = lax.rem(taken, stages)
        full = smem["full"].at[slot]

        @pl.when(taken >= stages)
        def _():
            plgpu.barrier_wait(smem["free"].at[slot])
            mosaic.fence_async()  # scales were read by ordinary loads

        for name, first in (("w", run.feature), ("x", run.token)):
            # 128 rows at a time, the second of which have a barrier of their own.
            height = min(BLOCK, kernel.stage_shapes()[name][0][0])
            for part in range(kernel.parts(name)):
                source = gmem[name].at[pl.ds(first + part * height, height), pl.ds(step * BLOCK, BLOCK)]
                target = smem[name].at[slot, pl.ds(part * height, height)]
                loaded = smem["rest"].at[slot] if part else full
                plgpu.copy_gmem_to_smem(source, target, loaded)
        if kernel.by_block:
            tokens = pl.ds(run.token, kernel.scale_box)
            plgpu.copy_gmem_to_smem(gmem["x_scales"].at[step, tokens], smem["x_scales"].at[slot], full)
            features = pl.ds(lax.div(run.feature, i32(BLOCK)), kernel.features // BLOCK)
            # From a multiple of 16 bytes on: TMA takes no other address (an illegal instruction, on the GPU alone).
            first = lax.div(step, i32(_ALIGNED)) * _ALIGNED
            scales = gmem["w_scales"].at[features, pl.ds(first, _LEAST_BOX)]
            plgpu.copy_gmem_to_smem(scales, smem["w_scales"].at[slot], full)


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run) -> None:
    """One warpgroup's blocks of a run."""
    config, shape = kernel.config, (64, kernel.config.columns)
    of_rows, of_columns = ("w", "x") if config.swapped else ("x", "w")

    def factor(slot, step, block):
        """What the products of a step are multiplied by."""
        tokens = pl.ds(0, config.columns) if config.swapped else pl.ds(_row(block), 64)
        layout, dim = (mosaic.COLUMNS, 1) if config.swapped else (mosaic.ROWS, 0)
        scales = plgpu.load(smem["x_scales"].at[slot, tokens], layout=layout, optimized=False)
        scales = scales * smem["w_scales"][slot, block if config.swapped else 0, lax.rem(step, i32(_ALIGNED))]
        return lax.broadcast_in_dim(jnp.minimum(scales, np.finfo(np.float32).max), shape, (dim,))

    def one_step(step, carry):
        slot, sums = carry
        plgpu.barrier_wait(smem["full"].at[slot])
        added = []
        for block, total in enumerate(sums):
            if block:  # also lest ptxas begin these products before the sums above, in registers that it has not got
                plgpu.barrier_wait(smem["rest"].at[slot])
            by = factor(slot, step, block) if kernel.by_block else None

            def multiply(acc, block=block):
                a = smem[of_rows].at[slot, pl.ds(_row(block), 64)]
                plgpu.wgmma(acc, a, smem[of_columns].at[slot].T)
                return acc[...]

            products = pl.run_scoped(multiply, mosaic.ACC(shape, f32))
            if block == config.blocks - 1:
                plgpu.barrier_arrive(smem["free"].at[slot])
            added.append(total + (products if by is None else products * by))
        return jnp.where(slot + 1 == kernel.stages, 0, slot + 1), added

    zero = plgpu.layout_cast(jnp.zeros(shape, f32), mosaic.Layout.WGMMA)
    first = lax.rem(run.taken, i32(kernel.stages))
    _, sums = lax.fori_loop(run.start, run.stop, one_step, (first, [zero] * config.blocks))
    if config.split > 1:
        token = run.token + lax.axis_index("rank") * config.share
        _store(kernel, gmem, smem, dataclasses.replace(run, token=token), _exchange(kernel, smem, sums))
        return
    if not config.even:
        _store(kernel, gmem, smem, run, sums)
        return

    @pl.when(run.start > 0)
    def _():
        _leave(gmem, sums)

    @pl.when(run.start == 0)
    def _():
        _store(kernel, gmem, smem, run, _collect(kernel, gmem, run, sums))


def _row(block: int) -> Any:
    """The first row, in its tile, of a block of this warpgroup's."""
    return (block * _WARPGROUPS + lax.axis_index("warpgroup")) * 64


def _exchange(kernel: _Kernel, smem: dict[str, Any], sums: list[Any]) -> list[Any]:
    """This CTA's share of the sums of all CTAs of the cluster. Their own share they send themselves, as the others'."""
    rank, w, split = lax.axis_index("rank"), lax.axis_index("warpgroup"), kernel.config.split
    came = smem["came"].at[w]
    for block, total in enumerate(sums):
        for other, part in enumerate(mosaic.columns_of(total, kernel.config.share)):
            target = smem["sums"].at[rank, w, block]
            plgpu.async_store_smem(part, target, came, cluster_idx=i32(other), cluster_dim="rank", optimized=False)
    plgpu.barrier_wait(came)

    def of(source: int, block: int) -> Any:
        part = smem["sums"].at[source, w, block]
        return plgpu.load(part, layout=mosaic.Layout.WGMMA, optimized=False)

    return [functools.reduce(operator.add, [of(n, block) for n in range(split)]) for block in range(len(sums))]


def _leave(gmem: dict[str, Any], sums: list[Any]) -> None:
    """Of a tile that another CTA has begun."""
    cta, w = lax.axis_index("cta"), lax.axis_index("warpgroup")
    for block, total in enumerate(sums):
        gmem["sums"].at[cta, w, block][...] = total
    mosaic_int4.announce(gmem["left"], cta * _WARPGROUPS + w)


def _collect(kernel: _Kernel, gmem: dict[str, Any], run: _Run, sums: list[Any]) -> list[Any]:
    """The sums of a tile's first steps and of those that the next CTAs have."""
    cta, w = lax.axis_index("cta"), lax.axis_index("warpgroup")
    # The last CTA whose first step comes before the tile's end: first_step(c) < end, solved for c.
    end = (run.tile + 1) * kernel.steps
    last = lax.div(end * i32(kernel.ctas) - 1, i32(kernel.all_steps))

    def add(other, sums):
        mosaic.wait_turn(gmem["left"], other * _WARPGROUPS + w, i32(1))
        parts = [gmem["sums"].at[other, w, block] for block in range(kernel.config.blocks)]
        loaded = [plgpu.load(part, layout=mosaic.Layout.WGMMA, optimized=False) for part in parts]
        return [total + part for total, part in zip(sums, loaded, strict=True)]

    return lax.fori_loop(cta + 1, last + 1, add, sums)


def _store(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run, sums: list[Any]) -> None:
    """A warpgroup's blocks of a tile to memory; TMA leaves out rows of x past M."""
    config, shape = kernel.config, (64, kernel.config.share)
    w = lax.axis_index("warpgroup")
    staging = smem["out"].at[w]
    width = kernel.out_rows if config.swapped else _OUT
    for block, total in enumerate(sums):
        row = _row(block)
        if not kernel.by_block:
            total = total * _epilogue_scales(kernel, gmem, run, row, shape)
        for n, part in enumerate(mosaic.columns_of(total.astype(jnp.bfloat16), width)):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            if config.swapped:
                staging.T[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                place = pl.ds(run.token + n * width, width), pl.ds(run.feature + row, 64)
            else:
                staging[...] = part
                place = pl.ds(run.token + row, 64), pl.ds(run.feature + n * width, width)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, gmem["out"].at[place])


def _epilogue_scales(kernel: _Kernel, gmem: dict[str, Any], run: _Run, row: Any, shape: tuple[int, int]) -> Any:
    """x's scales times W's for a block of a tile, where no scale changes along K."""
    rows, columns = pl.ds(row, 64), pl.ds(0, shape[1])
    x_part, w_part = (columns, rows) if kernel.config.swapped else (rows, columns)
    refs = {
        "x": gmem["x_scales"].at[pl.ds(run.token + x_part.start, x_part.size)],
        "w": gmem["w_scales"].at[pl.ds(run.feature + w_part.start, w_part.size)],
    }
    of_rows, of_columns = ("w", "x") if kernel.config.swapped else ("x", "w")
    down = plgpu.load(refs[of_rows], layout=mosaic.ROWS, optimized=False)
    across = plgpu.load(refs[of_columns], layout=mosaic.COLUMNS, optimized=False)
    by = lax.broadcast_in_dim(down, shape, (0,)) * lax.broadcast_in_dim(across, shape, (1,))
    return jnp.minimum(by, np.finfo(np.float32).max)
