"""What can be chosen about the Hopper kernels, and what is: limits, configurations, defaults, candidates for tuning."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pallas_kernels import tuned
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use on sm_90
# Of those, what barriers and small vectors may need beside the tiles, each rounded up to 1 KiB.
_SMEM_SPARE = 6 * 1024

TUNED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tile sizes and schedule of a forward kernel.

    `warpgroups` consumers of 64 queries each; `kv_block` keys a step; `stages` blocks of K and of V in flight; `turns`:
    the warpgroups alternate at the tensor cores; `persistent`: one CTA per SM takes tile after tile, and loads the next
    one while it finishes this; `uncleared`: scores go where no zeros were written before (`mosaic.product`); `lazy`:
    a row's weights are relative to a new maximum only where they would be too large (`hopper`; not for float16);
    `l2_mib`: heads run side by side as long as their keys and values fit into so many MiB.
    """

    warpgroups: int = 2
    kv_block: int = 128
    stages: int = 2
    turns: bool = False
    persistent: bool = True
    uncleared: bool = False
    lazy: bool = False
    l2_mib: int = 16

    _KEYS: ClassVar[int] = 64  # whose multiples blocks are

    def __post_init__(self):
        name = type(self).__name__
        if self.warpgroups not in (2, 3):
            raise ValueError(f"{name}: {self.warpgroups=} - there are registers for 2 or 3. Choose one of them.")
        if self.kv_block % self._KEYS or not 64 <= self.kv_block <= 256:
            raise ValueError(
                f"{name}: {self.kv_block=} - must be a multiple of {self._KEYS} from 64 to 256. Choose such a block."
            )
        if self.stages < 2:
            raise ValueError(f"{name}: {self.stages=} - a block is loaded while one is read. Give at least 2.")
        if self.l2_mib < 1:
            raise ValueError(f"{name}: {self.l2_mib=} - must be at least 1. Give the share of the L2 cache in MiB.")

    @property
    def q_block(self) -> int:
        """Queries per tile."""
        return 64 * self.warpgroups

    def __str__(self) -> str:
        words = [f"{self.q_block} queries x {self.kv_block} keys", f"{self.warpgroups} warpgroups"]
        words += ["in turns"] * self.turns + [f"{self.stages} stages"] + ["persistent"] * self.persistent
        words += ["uncleared"] * self.uncleared + ["lazy"] * self.lazy
        return ", ".join([*words, f"{self.l2_mib} MiB of heads side by side"])


@dataclass(frozen=True, kw_only=True)
class Config(Schedule):
    """Of the kernel in 16 bits; `own_output`: the output leaves through shared memory of its own, not through Q's."""

    own_output: bool = True


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Schedule of the backward kernels; their tiles follow from the head dims (`backward_tiles`).

    `l2_mib`: heads run side by side as long as their Q, dO and float32 dQ fit into so many MiB.
    """

    l2_mib: int = 32

    def __post_init__(self):
        if self.l2_mib < 1:
            raise ValueError(f"BackwardConfig: {self.l2_mib=} - must be at least 1. Give the share of the L2 in MiB.")

    def __str__(self) -> str:
        return f"{self.l2_mib} MiB of heads side by side"


def backward_tiles(spec: AttentionSpec) -> tuple[int, int]:
    """(queries, keys) of a step of the backward kernel for the head dims."""
    if is_wide(spec):
        return 64, 64
    return (128 if max(head_dims(spec)) == 64 else 64), 128


def backward_default(spec: AttentionSpec) -> BackwardConfig:
    """The backward configuration for a call that nobody has tuned.

    Under a causal mask CTAs of one head wait for one another the longer, the fewer heads are at work: above head dim
    128, 32, 64, 128 and 256 MiB gave 355, 403, 433 and 362 TFLOP/s at 8k, and 301, 345, 371 and 358 for head dims 192
    and 128 (H200, 2026-11).
    """
    return BackwardConfig(l2_mib=128 if is_wide(spec) and spec.is_causal else 32)


def is_wide(spec: AttentionSpec) -> bool:
    """Whether the call takes the backward kernel for head dims above 128."""
    return max(spec.H, spec.H_v) > 128


def padded_head_dims(spec: AttentionSpec) -> tuple[int, int]:
    """(H, H_v) as every kernel pads them: the next multiples of 64."""
    H, H_v = (-(-head_dim // 64) * 64 for head_dim in (spec.H, spec.H_v))
    return H, H_v


def head_dims(spec: AttentionSpec) -> tuple[int, int]:
    """The forward kernel's (H, H_v): padded, and alike where they would be 192 and 256, which do not fit."""
    dims = padded_head_dims(spec)
    return (256, 256) if set(dims) == {192, 256} else dims


def default(spec: AttentionSpec) -> Config:
    """The forward configuration for a call that nobody has tuned (H200, 2026-11; ARCHITECTURE.md, log).

    A persistent grid gains at head dims 64 and 128, where Q, K, V and the output fit side by side.
    """
    H, H_v = head_dims(spec)
    persistent = max(H, H_v) <= 128
    first = Config(turns=True, persistent=persistent, own_output=persistent or H != H_v, uncleared=True, lazy=True)
    if max(H, H_v) == 64:
        return dataclasses.replace(first, warpgroups=3, lazy=False)
    if max(H, H_v) == 128:
        return first
    return dataclasses.replace(first, kv_block=64, turns=(H, H_v) == (192, 128))


def candidates(spec: AttentionSpec) -> list[Config]:
    """Forward configurations worth timing, the default first: those that fit.

    Left out are blocks of 192 keys (spills), blocks of 64 at head dims 64 and 128 and two warpgroups at head dim 64,
    both 15 % slower at least; persistent grids above 128 (spills) (ARCHITECTURE.md, log).
    """
    first = default(spec)
    changes: list[dict[str, Any]] = [{}, {"lazy": not first.lazy}, {"lazy": False, "uncleared": False}]
    changes += [{"persistent": False}]
    changes += [{"stages": stages, "turns": turns} for stages, turns in itertools.product((2, 3), (False, True))]
    found = [dataclasses.replace(first, **change) for change in changes]
    return [config for config in dict.fromkeys(found) if fits(spec, config)]


def cache_shares[C: (Config, BackwardConfig)](config: C) -> list[C]:
    """The same with more and with fewer heads side by side."""
    return [dataclasses.replace(config, l2_mib=mib) for mib in (4, 8, 16, 32, 64, 128, 256) if mib != config.l2_mib]


def smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Shared memory of the forward kernel's tiles; barriers and vectors, rounded up to 1 KiB, add less than 6 KiB."""
    H, H_v = head_dims(spec)
    output = config.q_block * H_v if config.own_output else 0
    return 2 * (config.q_block * H + output + config.stages * config.kv_block * (H + H_v))


def fits(spec: AttentionSpec, config: Config, spare: int = _SMEM_SPARE) -> bool:
    """Whether the forward kernel can run so: shared memory, and an output that leaves through Q's has Q's shape."""
    H, H_v = head_dims(spec)
    return smem_bytes(spec, config) <= SMEM_LIMIT - spare and (config.own_output or H == H_v)


def forward_config(spec: AttentionSpec, device: Device) -> Config:
    """What was measured to be best for such calls on such a device (tuned.json), else the default."""
    found = tuned.lookup(TUNED, device, "forward", _facts(spec), max(spec.T, spec.S))
    config = default(spec) if found is None else Config(**found)
    return config if fits(spec, config) else default(spec)


def backward_config(spec: AttentionSpec, device: Device) -> BackwardConfig:
    """As `forward_config`, of the backward kernel for the head dims."""
    found = tuned.lookup(TUNED, device, "backward", _facts(spec), max(spec.T, spec.S))
    return backward_default(spec) if found is None else BackwardConfig(**found)


def _facts(spec: AttentionSpec) -> dict[str, int | bool]:
    """What calls must have in common to share a tuned configuration, besides a similar length."""
    H, H_v = head_dims(spec)
    return {"H": H, "H_v": H_v, "is_causal": spec.is_causal}


def heads_side_by_side(spec: AttentionSpec, config: Schedule, itemsize: int = 2) -> int:
    """Query heads whose tiles the forward grid mixes: a divisor of all of them, whose keys and values share the L2.

    At 8k causal, head dim 128, groups of 2 heads gave 654 TFLOP/s, 1 head 631, 16 heads 645 and 6 heads, which do not
    divide the 32, 627 (H200, 2026-11).
    """
    return _largest_divisor(spec.B * spec.N, config.l2_mib, itemsize * spec.S * (spec.H + spec.H_v) // spec.G)


def kv_heads_side_by_side(spec: AttentionSpec, config: BackwardConfig) -> int:
    """Key heads whose CTAs the backward grid mixes: a divisor of their number, Q, dO and float32 dQ counted.

    With few, long chains of CTAs wait for one another's dQ: 4, 8, 16 heads gave 396, 429, 441 TFLOP/s at head dim 64,
    causal, 4k. With too many the L2 cache overflows: 16 for 8 at 8k without a mask, 488 for 541 (H200, 2026-11).
    """
    return _largest_divisor(spec.B * spec.K, config.l2_mib, 8 * spec.G * spec.T * max(spec.H, spec.H_v))


def _largest_divisor(heads: int, mib: int, bytes_per_head: int) -> int:
    """The largest divisor of `heads` that fits into so many MiB; at least 1."""
    most = max(1, min(heads, mib * 2**20 // max(bytes_per_head, 1)))
    return max(n for n in range(1, most + 1) if heads % n == 0)


def why_not(spec: AttentionSpec, device: Device) -> str | None:
    """The first limit of the forward kernel that the call exceeds."""
    if device.compute_capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {spec.dtype}"
    if max(spec.H, spec.H_v) > 256:
        return f"takes head dims up to 256, not {spec.H} and {spec.H_v}"
    if spec.bias is not None:
        return "has no bias"
    if spec.mask is not None:
        return "has no boolean mask"
    if spec.traced_scale:
        return "the scale must be a Python number, not an array"
    return None
