"""Sizes and schedules of the Hopper kernel of 8-bit products: what can be chosen, the default, what was measured."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.device import H200, Device
from pallas_kernels.fp8.spec import BLOCK, Fp8Spec

TUNED = Path(__file__).with_name("tuned.json")  # written by `pallas_kernels.tune --family fp8`
KERNEL = "hopper"  # of its rows
SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use on sm_90
RESERVED = 8 * 1024  # barriers, and what rounding each array up to 1 KiB adds
WARPGROUPS = 2  # that compute
OUT = 64  # columns of y, or rows of y^T, that leave through shared memory at a time
_FEWEST_STAGES = 2
_MOST_STAGES = 16
LEAST_BOX = 32  # float32 values: TMA moves 128 bytes or more
ALIGNED = 4  # float32 values: 16 bytes


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
                f"Config: {self.split=} with {self.swapped=} and {self.even=} - a cluster has up to 8 CTAs, and tiles "
                "of few rows of x are split, one way. Choose 1, or 2, 4 or 8 swapped and not even."
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
        return 64 * self.blocks * WARPGROUPS

    @property
    def share(self) -> int:
        """Columns of a tile that a CTA stores."""
        return self.columns // self.split


@dataclass(frozen=True, kw_only=True)
class Kernel:
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
        return max(LEAST_BOX, self.tokens)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Sums that a CTA leaves for the one before it."""
        return self.ctas, WARPGROUPS, self.config.blocks, 64, self.config.columns

    def stage_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one stage of every ring."""
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "x": ((self.tokens, BLOCK), self.spec.x_dtype),
            "w": ((self.features, BLOCK), self.spec.w_dtype),
        }
        if self.by_block:
            shapes["x_scales"] = ((self.scale_box,), "float32")
            shapes["w_scales"] = ((self.features // BLOCK, LEAST_BOX), "float32")  # of which a step uses one
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
        return min(OUT, self.config.share) if self.config.swapped else 64

    @property
    def out_bytes(self) -> int:
        return WARPGROUPS * self.out_rows * OUT * 2

    @property
    def exchanged_shape(self) -> tuple[int, ...]:
        """Sums that the CTAs of a cluster send each other, by the rank that they come from."""
        return self.config.split, WARPGROUPS, self.config.blocks, 64, self.config.share

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the rings'."""
        return self.out_bytes + (4 * math.prod(self.exchanged_shape) if self.config.split > 1 else 0)

    @property
    def stages(self) -> int:
        """As many as fit, if the configuration does not say."""
        fitting = (SMEM_LIMIT - RESERVED - self.fixed_bytes) // self.stage_bytes
        return self.config.stages or max(_FEWEST_STAGES, min(fitting, _MOST_STAGES))


def smem_bytes(spec: Fp8Spec, config: Config) -> int:
    """Shared memory of the rings, of exchanged sums and of the output; barriers and rounding add less than 8 KiB."""
    kernel = Kernel(spec=spec, config=config, cores=1)
    return kernel.stages * kernel.stage_bytes + kernel.fixed_bytes


def config_of(spec: Fp8Spec, device: Device) -> Config:
    """What was measured to be best for such a weight and the nearest number of rows (tuned.json), if it is a candidate
    for this number, too; else the default."""
    facts = {"K": spec.K, "N": spec.N, "scaling": spec.scaling}
    found = tuned.lookup(TUNED, device, KERNEL, facts, spec.M)
    config = None if found is None else Config(**found)
    return config if config in candidates(spec, device) else default(spec, device)


def candidates(spec: Fp8Spec, device: Device) -> list[Config]:
    """Configurations worth timing, the default first.

    Whole tiles that leave most SMs idle are not (H200, M=64, 56 of 132 SMs: 46.4 us for 40.8), nor even runs of tiles
    that fill them anyway (M=4096: 1003 us for 770) or of 256 rows of W, of which more CTAs share one (47.5 us).
    """
    cores, every = cores_of(device), [default(spec, device)]
    shapes: list[Config] = []
    if spec.M <= 512:
        shapes += [Config(swapped=True, columns=_columns(spec.M), blocks=b) for b in (1, 2)]
    if spec.M > 64:
        shapes += [Config(blocks=b) for b in (2, 1)]
    for config in shapes:
        tiles = Kernel(spec=spec, config=config, cores=cores).tiles
        busy = tiles / (pl.cdiv(tiles, cores) * cores)
        every += [config] if busy >= 0.6 else []
        wide = config.swapped and config.blocks == 2
        every += [dataclasses.replace(config, even=True)] if busy <= 0.9 and not wide else []
        every += _splits(spec, config, tiles, cores) if config.swapped else []
    return [config for config in dict.fromkeys(every) if fits(spec, config, device) is None]


def _splits(spec: Fp8Spec, config: Config, tiles: int, cores: int) -> list[Config]:
    """Clusters that use the most SMs; of large ones fewer may be resident at once, so also the next smaller."""
    counts = [n for n in (2, 4, 8) if n <= spec.k_blocks and tiles * n <= cores]
    fitting = [dataclasses.replace(config, split=n, columns=max(config.columns, 8 * n)) for n in counts]
    return fitting[-2:] if config.blocks == 1 else fitting[-1:]


def _columns(M: int) -> int:
    """Rows of x to a swapped tile."""
    return next((columns for columns in (16, 32, 64) if M <= columns), 128)


def default(spec: Fp8Spec, device: Device) -> Config:
    """Few rows: swapped, and even runs; many: whole tiles."""
    known = device.num_cores is not None  # CTAs that wait for each other must all be resident
    if spec.M <= 256:
        return Config(swapped=True, columns=_columns(spec.M), blocks=1, even=known)
    tiles = pl.cdiv(spec.M, 256) * pl.cdiv(spec.N, 128)
    return Config(blocks=2) if tiles >= cores_of(device) or not known else Config(blocks=1, even=True)


def cores_of(device: Device) -> int:
    """SMs, an H200's where they are not known."""
    return device.num_cores or H200.num_cores or 1


def fits(spec: Fp8Spec, config: Config, device: Device) -> str | None:
    """Why the call cannot run with the configuration."""
    kernel = Kernel(spec=spec, config=config, cores=cores_of(device))
    if (need := smem_bytes(spec, config)) > SMEM_LIMIT - RESERVED:
        return f"it needs {need} bytes of shared memory, and there are {SMEM_LIMIT - RESERVED}"
    if config.even and device.num_cores is None:
        return f"CTAs wait for each other, and how many fit on {device} at a time is not known"
    if config.even and kernel.all_steps * kernel.ctas >= 2**31:
        return f"{kernel.all_steps} steps over {kernel.ctas} CTAs exceed the integers that they are counted in"
    return None
