"""Few rows times a packed 4-bit weight for Hopper (sm_90a) in Pallas Mosaic GPU: y^T = W^T x^T on mma.sync.

The weight is read once and nothing else matters. A CTA of each SM owns a run of columns of W and walks down them, a few
slices of columns at a time, so that no sum ever crosses CTAs:

    loader       | k0 k1 k2 k3 ...                    (TMA, a ring of `stages`; a warp for each slice, one for x)
    warpgroup 0  | k0 -> 16-bit (code - zero) -> mma.sync -> * scale -> float32 sum | k4 ... | sums meet, y -> memory
    warpgroup 1  |    k1 ...                                                        | k5 ... |

`split` warpgroups share a slice and take its steps in turn; the others work on neighbouring slices, or each on `blocks`
of them at a time, for which it reads x once. A slice of 16 or 32 columns is split between the warps of a warpgroup as
well. Sums are added in one order: same bits every time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import mosaic, mosaic_int4, mosaic_int4_sums, mosaic_turns
from pallas_kernels.device import H200, Device
from pallas_kernels.mosaic_int4_step import Step
from pallas_kernels.mosaic_int4_sums import PITCH
from pallas_kernels.w4a16.spec import W4A16Spec

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use on sm_90
_RESERVED = 8 * 1024  # barriers, and what rounding each array up to 1 KiB adds
_MOST_STAGES = 32  # of a ring: a thread keeps a barrier's phases in the bits of a word
MOST_ROWS = 32  # of x; above, wgmma does more of them in the same time

# Registers of a thread that computes and of one that loads, by computing warpgroups: what a launch gets, divided anew.
_REGISTERS = {2: (232, 32), 4: (104, 32)}

# Rows of x times blocks of a warpgroup whose sums fit into a thread's registers, by computing warpgroups.
_MOST_SUMS = {2: 128, 4: 32}

_COLUMN = 1 << 30  # a group that no step exceeds
_LOADERS = 4  # warps, which take slices in turn; the last loads x as well
_X_WARP = _LOADERS - 1

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class Config:
    """Slices and schedule.

    `columns` of W to a slice, 16, 32 or 64; `warpgroups` that compute, of which `split` share a slice, or each works on
    `blocks` slices at a time; `depth`: a step is this many times the least; `stages` steps in flight, all of shared
    memory where None.
    """

    columns: int = 64
    warpgroups: int = 4
    split: int = 1
    blocks: int = 1
    depth: int = 1
    stages: int | None = None

    def __post_init__(self):
        if self.columns not in (16, 32, 64):
            raise ValueError(f"Config: {self.columns=} - a warp multiplies 16. Choose 16, 32 or 64.")
        if self.warpgroups not in _REGISTERS:
            raise ValueError(f"Config: {self.warpgroups=} - there are registers for 2 or 4. Choose one of them.")
        if self.split < 1 or self.warpgroups % self.split:
            raise ValueError(
                f"Config: {self.split=} of {self.warpgroups=} - slices have equally many. Choose a divisor."
            )
        if self.blocks not in (1, 2, 4) or min(self.blocks, self.split) > 1:
            raise ValueError(
                f"Config: {self.blocks=} of {self.split=} - a slice's sums meet one at a time. Choose 1, or 2 or 4 of "
                "slices that are not split."
            )
        if self.depth not in (1, 2, 4):
            raise ValueError(f"Config: {self.depth=} - a copy has at most 16 tiles of 64 rows. Choose 1, 2 or 4.")
        if self.stages is not None and (not 2 * self.split <= self.stages <= _MOST_STAGES or self.stages % self.split):
            raise ValueError(
                f"Config: {self.stages=} - each of {self.split=} warpgroups has a ring of two or more, of "
                f"{_MOST_STAGES} in all. Choose such a multiple."
            )

    @property
    def readers(self) -> int:
        """Warpgroups that read a step."""
        return self.warpgroups // self.split

    @property
    def slices(self) -> int:
        """Slices that a CTA works on at a time."""
        return self.readers * self.blocks


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What the body knows at trace time."""

    spec: W4A16Spec
    config: Config
    cores: int

    @property
    def step(self) -> Step:
        spec, config = self.spec, self.config
        group = spec.group if spec.groups > 1 else _COLUMN
        unit = 64 * max(1, min(group, 128) // 64)
        return Step(
            rows=config.columns,
            k=unit * (64 // config.columns) * config.depth,
            tokens=-(-spec.M // 8) * 8,
            group=group,
            dtype=spec.dtype,
            scale_dtype=spec.scale_dtype,
        )

    @property
    def steps(self) -> int:
        """Of a slice."""
        return pl.cdiv(self.spec.padded_K, self.step.k)

    @property
    def all_slices(self) -> int:
        return self.spec.padded_N // self.config.columns

    @property
    def ctas(self) -> int:
        return min(self.cores, pl.cdiv(self.all_slices, self.config.readers))

    def stage_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one stage of every ring. A row of TMA's box has 16 bytes, and a box 128 or more."""
        step, slices, columns = self.step, self.config.slices, self.config.columns
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "words": ((slices, step.k // 64, columns // 8, 64), "int32"),
            "scales": ((slices, max(step.scale_rows, 64 // columns), columns), self.spec.scale_dtype),
            "x": ((step.tokens, step.k), self.spec.dtype),
        }
        if self.spec.zeros:
            shapes["zeros"] = ((slices, max(step.scale_rows, 128 // columns), columns), "uint8")
        return shapes

    @property
    def sums_shape(self) -> tuple[int, ...]:
        return (self.config.warpgroups, self.step.tokens, PITCH)

    @property
    def stages(self) -> int:
        """As many as fit, if the configuration does not say, and no more than there are steps."""
        split = self.config.split
        if self.config.stages is not None:
            return self.config.stages
        room = SMEM_LIMIT - _RESERVED - _bytes(self.sums_shape, "float32")
        turns = pl.cdiv(pl.cdiv(self.all_slices, self.ctas), self.config.slices)
        ring = min(room // self.stage_bytes // split, _MOST_STAGES // split, turns * pl.cdiv(self.steps, split))
        return max(2, ring) * split

    @property
    def stage_bytes(self) -> int:
        return sum(_bytes(shape, dtype) for shape, dtype in self.stage_shapes().values())


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = jnp.dtype(dtype).itemsize
    for n in shape:
        size *= n
    return size


def smem_bytes(spec: W4A16Spec, config: Config) -> int:
    """Shared memory of the rings and of the sums; barriers and rounding add less than 8 KiB."""
    kernel = _Kernel(spec=spec, config=config, cores=1)
    return kernel.stages * kernel.stage_bytes + _bytes(kernel.sums_shape, "float32")


def candidates(spec: W4A16Spec, device: Device) -> list[Config]:
    """Configurations worth timing."""
    every = [
        Config(columns=columns, warpgroups=warpgroups, split=split, blocks=blocks, depth=depth)
        for columns in (64, 32, 16)
        for warpgroups in (4, 2)
        for split in (1, 2, 4)
        for blocks in (1, 2, 4)
        for depth in (1, 2)
        if split <= warpgroups and (blocks == 1 or (split == 1 and columns == 64))
    ]
    return [
        config
        for config in every
        if smem_bytes(spec, config) <= SMEM_LIMIT - _RESERVED
        and (config.blocks == 1 or config.blocks * spec.M <= _MOST_SUMS[config.warpgroups])
    ]


def default(spec: W4A16Spec, device: Device) -> Config:
    """The configuration whose busiest SM takes in the fewest bytes of weight and x; of those, wide slices first."""

    def cost(config: Config) -> tuple[float, int, int]:
        kernel = _Kernel(spec=spec, config=config, cores=device.num_cores or H200.num_cores or 1)
        most = pl.cdiv(kernel.all_slices, kernel.ctas)
        turns = pl.cdiv(most, config.slices)
        taken = spec.padded_K * (most * config.columns / 2 + turns * spec.M * 2)
        return taken, -config.columns * config.readers, config.blocks

    four = [config for config in candidates(spec, device) if config.warpgroups == 4 and config.depth == 1]
    return min(four or candidates(spec, device), key=cost)


def why_not(spec: W4A16Spec, device: Device) -> str | None:
    """The first limit of the kernel that the call exceeds."""
    if device.compute_capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16 activations, not {spec.dtype}"
    if spec.M > MOST_ROWS:
        return f"takes up to {MOST_ROWS} rows of activations, not {spec.M}"
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
    """y = x W with code - zero exact, scales and sums in float32, rounded to x's dtype. No derivative rule.

    Raises ValueError where the configuration does not fit into shared memory.
    """
    config = config or default(spec, device)
    kernel = _Kernel(spec=spec, config=config, cores=device.num_cores or H200.num_cores or 1)
    if (need := smem_bytes(spec, config)) > SMEM_LIMIT - _RESERVED:
        raise ValueError(
            f"{spec.op}: {config} needs {need} bytes of shared memory - there are {SMEM_LIMIT - _RESERVED}. Take fewer "
            "stages or rows of x."
        )
    # TMA fills up with zeros, but Mosaic wants whole tiles of 8 x 64, or fewer rows than one.
    rows = kernel.step.tokens if spec.M > 8 else spec.M
    x = jnp.pad(x, ((0, rows - spec.M), (0, spec.padded_K - spec.K)))
    side = {"scales": scales} if zeros is None else {"scales": scales, "zeros": zeros}
    return _call(kernel, {"words": words, **side, "x": x})[:, : spec.N]


def _call(kernel: _Kernel, operands: dict[str, Array]) -> Array:
    """Launches the kernel: y (M, N')."""
    spec, config, stages = kernel.spec, kernel.config, kernel.stages
    smem: dict[str, Any] = {}
    for name, (shape, dtype) in kernel.stage_shapes().items():
        make = mosaic.swizzled if name == "x" else plgpu.SMEM
        smem[name] = make((stages, *shape), jnp.dtype(dtype))
    copies = config.slices * (len(smem) - 1) + 1
    smem |= {
        "sums": plgpu.SMEM(kernel.sums_shape, f32),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=config.readers, num_barriers=stages),
    }
    if config.split > 1:
        smem["summed"] = plgpu.Barrier(num_arrivals=config.split, num_barriers=config.slices)
        smem["stored"] = plgpu.Barrier(num_arrivals=1, num_barriers=config.slices)
    names = tuple(smem)

    def body(*refs):
        gmem = dict(zip((*operands, "out"), refs, strict=False))
        _body(kernel, gmem, dict(zip(names, refs[len(gmem) :], strict=True)))

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((spec.M, spec.padded_N), spec.dtype),
        scratch_types=list(smem.values()),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Every exchange through shared memory below is fenced or goes through a barrier.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    return launch(*operands.values())


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    config = kernel.config
    warpgroup = lax.axis_index("warpgroup")
    compute, load = _REGISTERS[config.warpgroups]

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(compute, action="increase")
        _over_turns(kernel, functools.partial(_consume, kernel, gmem, smem))

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(load, action="decrease")

        @plgpu.warp_map
        def _(warp):
            @pl.when((warp < config.slices) | (warp == _X_WARP))
            def _():
                _drain(kernel, smem, _over_turns(kernel, functools.partial(_load, kernel, gmem, smem, warp)))


@dataclass(frozen=True)
class _Turn:
    """The turn-th time that a CTA walks down W: its first slice, the number of slices, whether it is the last time."""

    turn: Any
    first: Any
    count: Any
    last: Any


def _over_turns(kernel: _Kernel, one: Callable[[_Turn], None]) -> Any:
    """Runs `one` for the slices of this CTA, as even as they come, and returns the number of turns."""
    cta = lax.axis_index("cta")
    start, stop = (lax.div(c * i32(kernel.all_slices), i32(kernel.ctas)) for c in (cta, cta + 1))
    turns = lax.div(stop - start + (kernel.config.slices - 1), i32(kernel.config.slices))

    @pl.loop(0, turns)
    def _(turn):
        first, end = (start + lax.div(t * (stop - start), turns) for t in (turn, turn + 1))
        one(_Turn(turn, first, end - first, turn + 1 == turns))

    return turns


def _slot(kernel: _Kernel, turn: Any, k_group: Any, n: Any) -> Any:
    """Where the n-th step of the turn lies that the k_group-th warpgroups of all slices take: each has a ring."""
    split = kernel.config.split
    taken = turn * _steps_of(kernel, k_group) + n
    return lax.rem(taken, i32(kernel.stages // split)) * split + k_group


def _steps_of(kernel: _Kernel, k_group: Any) -> Any:
    split = kernel.config.split
    return lax.div(kernel.steps + (split - 1) - k_group, i32(split))


def _drain(kernel: _Kernel, smem: dict[str, Any], turns: Any) -> None:
    """Waits until every stage that was loaded has been read: a barrier's last phase may not pass unseen."""
    split = kernel.config.split

    @pl.loop(0, kernel.stages)
    def _(slot):
        place, k_group = lax.div(slot, i32(split)), lax.rem(slot, i32(split))

        @pl.when(place < turns * _steps_of(kernel, k_group))
        def _():
            plgpu.barrier_wait(smem["free"].at[slot])


def _load(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], warp: Any, turn: _Turn) -> None:
    """One warp's part of a turn: words, scales and zeros of its slices, or x, or both."""
    config, spec = kernel.config, kernel.spec
    columns, split = config.columns, config.split
    slices = i32(64 // columns)  # of a tile
    k = kernel.step.k

    @pl.loop(0, kernel.steps)
    def _(step):
        n, k_group = lax.div(step, i32(split)), lax.rem(step, i32(split))
        slot = _slot(kernel, turn.turn, k_group, n)

        @pl.when(turn.turn * _steps_of(kernel, k_group) + n >= kernel.stages // split)
        def _():
            plgpu.barrier_wait(smem["free"].at[slot])
            mosaic_turns.fence_async()  # the stage was read by ordinary loads

        def load_slice(which):
            slice_ = turn.first + jnp.minimum(which, turn.count - 1)
            tile, inside = lax.div(slice_, slices), lax.rem(slice_, slices)

            def copy(name, source):
                # Where the turn has fewer slices, only the barrier hears of it.
                target, full = smem[name].at[slot, which], smem["full"].at[slot]
                plgpu.copy_gmem_to_smem(source, target, full, predicate=which < turn.count)

            eighths = pl.ds(inside * (columns // 8), columns // 8)
            copy("words", gmem["words"].at[tile, pl.ds(step * (k // 64), k // 64), eighths])
            group = 0 if spec.groups == 1 else step * kernel.step.scale_rows
            for name in ("scales", "zeros"):
                if name in gmem:
                    rows = pl.ds(group, smem[name].shape[2])
                    copy(name, gmem[name].at[tile, rows, pl.ds(inside * columns, columns)])

        for offset in range(0, config.slices, _LOADERS):
            which = offset + warp
            pl.when(which < config.slices)(functools.partial(load_slice, which))

        @pl.when(warp == _X_WARP)
        def _():
            # Rows past M and columns past K come as zeros.
            source = gmem["x"].at[pl.ds(0 * step, kernel.step.tokens), pl.ds(step * k, k)]
            plgpu.copy_gmem_to_smem(source, smem["x"].at[slot], smem["full"].at[slot])


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], turn: _Turn) -> None:
    """One warpgroup's slices, or share of a slice."""
    config, step = kernel.config, kernel.step
    w = lax.axis_index("warpgroup")
    which, k_group = lax.div(w, i32(config.split)), lax.rem(w, i32(config.split))
    mine = [which + n * config.readers for n in range(config.blocks)]
    steps = _steps_of(kernel, k_group)
    first_slot = _slot(kernel, turn.turn, k_group, 0)

    def after(slot):  # instead of a division each step
        return jnp.where(slot + config.split >= kernel.stages, k_group, slot + config.split)

    def multiply(slices, _, carry):
        slot, accs = carry
        plgpu.barrier_wait(smem["full"].at[slot])
        words, scales = ([smem[name].at[slot, n] for n in slices] for name in ("words", "scales"))
        zeros = [smem["zeros"].at[slot, n] for n in slices] if kernel.spec.zeros else None
        accs = mosaic_int4.multiply_add(step, accs, words, scales, zeros, smem["x"].at[slot])
        plgpu.barrier_arrive(smem["free"].at[slot])
        return after(slot), tuple(accs)

    def skip(_, slot):
        plgpu.barrier_wait(smem["full"].at[slot])
        plgpu.barrier_arrive(smem["free"].at[slot])
        return after(slot)

    def wait_stored():
        if config.split > 1:
            pl.when(turn.turn > 0)(lambda: plgpu.barrier_wait(smem["stored"].at[which]))

    def store(acc, n):
        mosaic_int4_sums.put_partial(acc, smem["sums"].at[w])
        if config.split > 1:
            plgpu.barrier_arrive(smem["summed"].at[which])

        @pl.when(k_group == 0)
        def _():
            if config.split > 1:
                plgpu.barrier_wait(smem["summed"].at[which])
            sums = smem["sums"].at[pl.ds(which * config.split, config.split)]
            columns = pl.ds((turn.first + n) * config.columns, config.columns)
            mosaic_int4_sums.store_sum(step, sums, gmem["out"].at[:, columns])

    def multiply_all(slices):
        accs = tuple(plgpu.layout_cast(jnp.zeros((64, step.tokens), f32), mosaic.Layout.WGMMA) for _ in slices)
        _, accs = lax.fori_loop(0, steps, functools.partial(multiply, slices), (first_slot, accs))
        wait_stored()
        for acc, n in zip(accs, slices, strict=True):
            store(acc, n)

    for count in range(1, config.blocks + 1):
        more = mine[count] < turn.count if count < config.blocks else False
        pl.when((mine[count - 1] < turn.count) & jnp.logical_not(more))(functools.partial(multiply_all, mine[:count]))

    @pl.when(mine[0] >= turn.count)
    def _():
        lax.fori_loop(0, steps, skip, first_slot)
        wait_stored()

    if config.split > 1:

        @pl.when((k_group == 0) & jnp.logical_not(turn.last))
        def _():
            plgpu.barrier_arrive(smem["stored"].at[which])
