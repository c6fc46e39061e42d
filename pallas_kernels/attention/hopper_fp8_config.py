"""What can be chosen about the FP8 forward kernel, and what is: limits, the tile for each head dim, candidates."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pallas_kernels.attention import hopper_config
from pallas_kernels.attention.fp8 import head_dims, kv_block
from pallas_kernels.attention.hopper_config import SMEM_LIMIT, Schedule
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device

# Keys that a tensor core may sum by itself. A product loses what lies below 2^-13 of the sum so far: equal ones stop
# counting after about 11,000 (measured: 91 % of a sum of 131,072 was lost, 0.1 % with `promote`).
UNPROMOTED_KEYS = 16_384
# And may where there is room for float32 sums: of equal weights 0.9 % would be lost with 1792 keys, nothing with 1344;
# periods in blocks of 128, 224 and 256 keys are powers of two so, which cost less to find than others.
_PROMOTED_KEYS = 1024
# For barriers and small vectors, each rounded up to 1 KiB.
_SMEM_SPARE = 6 * 1024


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Schedule):
    """Of the kernel in e4m3, where with `turns` a warpgroup begins its products when the other's are done.

    `promote`: after so many blocks what the tensor cores have summed up, of which they keep some 14 bits, is added to
    float32 sums in shared memory; 0: never (arXiv 2407.08608 does not; DeepSeek-V3, arXiv 2412.19437, 3.3.2, does).
    """

    promote: int = 0

    _KEYS: ClassVar[int] = 32

    def __post_init__(self):
        super().__post_init__()
        if self.promote < 0:
            raise ValueError(f"Fp8Config: {self.promote=} - counts blocks. Give 0 for sums of the tensor cores alone.")

    def __str__(self) -> str:
        return super().__str__() + f", sums in float32 every {self.promote} blocks" * (self.promote > 0)


def staged_columns(H_v: int, config: Fp8Config) -> int:
    """Columns of the output that a warpgroup hands to TMA at a time."""
    if config.promote:
        return 64
    return 128 if H_v == 256 else H_v


def smem_bytes(spec: AttentionSpec, config: Fp8Config) -> int:
    """Shared memory of the kernel's tiles."""
    H, H_v = head_dims(spec)
    columns = H + 2 * staged_columns(H_v, config) + 4 * H_v * (config.promote > 0)
    return config.q_block * columns + config.stages * config.kv_block * (H + H_v)


def prologue_bytes(spec: AttentionSpec, kv_block: int) -> int:
    """Shared memory of the tiles of the kernel that makes the operands, for keys and values."""
    H, H_v = head_dims(spec)
    rows = -(-kv_block // 64) * 64
    return 2 * rows * (H + H_v) + 2 * 64 * (H + 64) + 2 * 64 * rows


def fits(spec: AttentionSpec, config: Fp8Config, spare: int = _SMEM_SPARE) -> bool:
    """Whether the kernels can run so."""
    return max(smem_bytes(spec, config), prologue_bytes(spec, config.kv_block)) <= SMEM_LIMIT - spare


def default(spec: AttentionSpec) -> Fp8Config:
    """The configuration for the head dims and the number of keys."""
    block = kv_block(spec)
    # Above 128 there is no shared memory for it.
    promote = _PROMOTED_KEYS // block if head_dims(spec)[1] <= 128 else 0
    widest = max(head_dims(spec))
    warpgroups = 3 if widest == 64 else 2
    return Fp8Config(warpgroups=warpgroups, kv_block=block, promote=promote, uncleared=True, lazy=widest != 128)


def candidates(spec: AttentionSpec) -> list[Fp8Config]:
    """Configurations worth timing, the default first: those that fit."""
    first = default(spec)
    changes: list[dict[str, Any]] = [
        {}, {"lazy": not first.lazy}, {"uncleared": False}, {"uncleared": False, "lazy": False}, {"turns": True},
        {"promote": first.promote * 3 // 2}, {"stages": 3}, {"persistent": False},
    ]  # fmt: skip
    found = [dataclasses.replace(first, **change) for change in changes]
    return [config for config in dict.fromkeys(found) if fits(spec, config)]


def why_not(spec: AttentionSpec, device: Device) -> str | None:
    """The first limit of the kernels that the call exceeds."""
    if spec.S > UNPROMOTED_KEYS and spec.H_v > 128:
        limit = f"takes {UNPROMOTED_KEYS} keys at value head dims above 128, where no room is left for float32 sums"
        return f"{limit}, not {spec.S}"
    return hopper_config.why_not(spec, device)
