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

Or the CTAs of a cluster (`split`) have a tile together, each a run of its steps. They exchange their sums through
shared memory, and each adds up and stores those of its share of the tile's columns, in the order of ranks: no counters
in global memory, which an XLA program has to clear before every call.
"""

import dataclasses
import functools
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

from pallas_kernels import mosaic, mosaic_turns
from pallas_kernels.device import H200, Device
from pallas_kernels.fp8.hopper_config import (
    ALIGNED,
    LEAST_BOX,
    OUT,
    WARPGROUPS,
    Config,
    Kernel,
    config_of,
    cores_of,
    fits,
)
from pallas_kernels.fp8.spec import BLOCK, Fp8Spec

_REGISTERS = (232, 40)  # of a thread that computes and of one that loads; ptxas counts neither (a loader needs 29)

i32, f32 = jnp.int32, jnp.float32


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
    config = config or config_of(spec, device)
    if (reason := fits(spec, config, device)) is not None:
        raise ValueError(f"{spec.op}: {config=} for {spec!s} - {reason}. Choose one of `candidates`.")
    kernel = Kernel(spec=spec, config=config, cores=cores_of(device))
    # TMA fills up with zeros, but Mosaic wants whole tiles of 8 rows, and W's columns of y in whole blocks.
    x, w = (_padded(a, (multiple, BLOCK)) for a, multiple in ((x, 8), (w, BLOCK)))
    operands = {"x": x, "w": w}
    if kernel.by_block:
        operands["x_scales"] = _padded(x_scales.T, (1, kernel.scale_box))
        operands["w_scales"] = _padded(w_scales, (1, ALIGNED))
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


def _call(kernel: Kernel, operands: dict[str, Array]) -> Array:
    """Launches the kernel: y (M in whole tiles of 8, N')."""
    config, stages, shapes = kernel.config, kernel.stages, kernel.stage_shapes()
    smem: dict[str, Any] = {}
    for name, (shape, dtype) in shapes.items():
        make = plgpu.SMEM if name.endswith("scales") else mosaic.swizzled
        smem[name] = make((stages, *shape), jnp.dtype(dtype))
    smem |= {
        "out": mosaic.swizzled((WARPGROUPS, kernel.out_rows, OUT), jnp.bfloat16),
        "full": plgpu.Barrier(num_arrivals=len(shapes), num_barriers=stages),
        "rest": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }
    if config.split > 1:
        smem["sums"] = mosaic.swizzled(kernel.exchanged_shape, f32)
        smem["came"] = plgpu.Barrier(num_arrivals=config.split * config.blocks, num_barriers=WARPGROUPS)
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
        num_threads=WARPGROUPS + 1,
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
    counters = kernel.ctas * WARPGROUPS
    return mosaic_turns.with_zeros(counters, lambda left: launch(*operands.values(), left), tuple(outputs.values()))[0]


def _body(kernel: Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    warpgroup = lax.axis_index("warpgroup")
    compute, load = _REGISTERS

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(compute, action="increase")
        _over_runs(kernel, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
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


def _over_runs(kernel: Kernel, one: Callable[[_Run], None]) -> Any:
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


def _first_step(kernel: Kernel, cta: Any) -> Any:
    """Of the run of a CTA."""
    return lax.div(cta * i32(kernel.all_steps), i32(kernel.ctas))


def _drain(kernel: Kernel, smem: dict[str, Any], taken: Any) -> None:
    """Waits until every stage that was loaded has been read: a barrier's last phase may not pass unseen."""

    @pl.loop(0, jnp.minimum(taken, kernel.stages))
    def _(n):
        slot = lax.rem(jnp.maximum(taken - kernel.stages, 0) + n, i32(kernel.stages))
        plgpu.barrier_wait(smem["free"].at[slot])


def _load(kernel: Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run) -> None:
    stages = i32(kernel.stages)

    @pl.loop(run.start, run.stop)
    def _(step):
        taken = run.taken + step - run.start
        slot = lax.rem(taken, stages)
        full = smem["full"].at[slot]

        @pl.when(taken >= stages)
        def _():
            plgpu.barrier_wait(smem["free"].at[slot])
            mosaic_turns.fence_async()  # scales were read by ordinary loads

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
            first = lax.div(step, i32(ALIGNED)) * ALIGNED
            scales = gmem["w_scales"].at[features, pl.ds(first, LEAST_BOX)]
            plgpu.copy_gmem_to_smem(scales, smem["w_scales"].at[slot], full)


def _consume(kernel: Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run) -> None:
    """One warpgroup's blocks of a run."""
    config, shape = kernel.config, (64, kernel.config.columns)
    of_rows, of_columns = ("w", "x") if config.swapped else ("x", "w")

    def factor(slot, step, block):
        """What the products of a step are multiplied by."""
        tokens = pl.ds(0, config.columns) if config.swapped else pl.ds(_row(block), 64)
        layout, dim = (mosaic.COLUMNS, 1) if config.swapped else (mosaic.ROWS, 0)
        scales = plgpu.load(smem["x_scales"].at[slot, tokens], layout=layout, optimized=False)
        scales = scales * smem["w_scales"][slot, block if config.swapped else 0, lax.rem(step, i32(ALIGNED))]
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
    return (block * WARPGROUPS + lax.axis_index("warpgroup")) * 64


def _exchange(kernel: Kernel, smem: dict[str, Any], sums: list[Any]) -> list[Any]:
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
    mosaic_turns.announce(gmem["left"], cta * WARPGROUPS + w)


def _collect(kernel: Kernel, gmem: dict[str, Any], run: _Run, sums: list[Any]) -> list[Any]:
    """The sums of a tile's first steps and of those that the next CTAs have."""
    cta, w = lax.axis_index("cta"), lax.axis_index("warpgroup")
    # The last CTA whose first step comes before the tile's end: first_step(c) < end, solved for c.
    end = (run.tile + 1) * kernel.steps
    last = lax.div(end * i32(kernel.ctas) - 1, i32(kernel.all_steps))

    def add(other, sums):
        mosaic_turns.wait_turn(gmem["left"], other * WARPGROUPS + w, i32(1))
        parts = [gmem["sums"].at[other, w, block] for block in range(kernel.config.blocks)]
        loaded = [plgpu.load(part, layout=mosaic.Layout.WGMMA, optimized=False) for part in parts]
        return [total + part for total, part in zip(sums, loaded, strict=True)]

    return lax.fori_loop(cta + 1, last + 1, add, sums)


def _store(kernel: Kernel, gmem: dict[str, Any], smem: dict[str, Any], run: _Run, sums: list[Any]) -> None:
    """A warpgroup's blocks of a tile to memory; TMA leaves out rows of x past M.

    But not where y is one tile of 8 rows and so is what is stored: Mosaic leaves that index out, whatever it is. (Seen
    on an H200; the interpreter does not.)
    """
    config, shape = kernel.config, (64, kernel.config.share)
    w = lax.axis_index("warpgroup")
    staging = smem["out"].at[w]
    width = kernel.out_rows if config.swapped else OUT
    for block, total in enumerate(sums):
        row = _row(block)
        if not kernel.by_block:
            total = total * _epilogue_scales(kernel, gmem, run, row, shape)
        for n, part in enumerate(mosaic.columns_of(total.astype(jnp.bfloat16), width)):

            def store(part=part, n=n, row=row):
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

            if config.swapped and width == 8 and kernel.spec.M <= 8:
                pl.when(run.token + n * width < kernel.spec.M)(store)
            else:
                store()


def _epilogue_scales(kernel: Kernel, gmem: dict[str, Any], run: _Run, row: Any, shape: tuple[int, int]) -> Any:
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
