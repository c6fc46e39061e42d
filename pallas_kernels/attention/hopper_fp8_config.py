"""What can be chosen about the FP8 forward kernel, and what is: limits, the tile for each head dim, candidates."""

import dataclasses
import itertools
from dataclasses import dataclass

from pallas_kernels.attention import hopper_config
from pallas_kernels.attention.fp8 import head_dims, kv_block
from pallas_kernels.attention.hopper_config import SMEM_LIMIT
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device

# Keys that a tensor core may sum by itself. A product loses what lies below 2^-13 of the sum so far: equal ones stop
# counting after about 11,000 (measured: 91 % of a sum of 131,072 was lost, 0.1 % with `promote`).
UNPROMOTED_KEYS = 16_384
# And may where there is room for float32 sums: of values of one sign it then loses 3 % at most, no more than rounding.
_PROMOTED_KEYS = 1792
# For barriers and small vectors, each rounded up to 1 KiB.
_SMEM_SPARE = 6 * 1024


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Tile sizes and schedule; fields as in `hopper_config.Config`.

    `promote`: after so many blocks what the tensor cores have summed up, of which they keep some 14 bits, is added to
    float32 sums in shared memory; 0: never (arXiv 2407.08608 does not; DeepSeek-V3, arXiv 2412.19437, 3.3.2, does).
    """

    warpgroups: int = 2
    kv_block: int = 128
    stages: int = 2
    turns: bool = False
    persistent: bool = True
    promote: int = 0
    l2_mib: int = 16

    def __post_init__(self):
        if self.warpgroups not in (2, 3):
            raise ValueError(f"Fp8Config: {self.warpgroups=} - there are registers for 2 or 3. Choose one of them.")
        if self.kv_block % 32 or not 64 <= self.kv_block <= 256:
            raise ValueError(
                f"Fp8Config: {self.kv_block=} - must be a multiple of 32 from 64 to 256. Choose such a block."
            )
        if self.promote < 0:
            raise ValueError(f"Fp8Config: {self.promote=} - counts blocks. Give 0 for sums of the tensor cores alone.")
        if self.stages < 2:
            raise ValueError(f"Fp8Config: {self.stages=} - a block is loaded while one is read. Give at least 2.")
        if self.l2_mib < 1:
            raise ValueError(f"Fp8Config: {self.l2_mib=} - must be at least 1. Give the share of the L2 cache in MiB.")

    @property
    def q_block(self) -> int:
        """Queries per tile."""
        return 64 * self.warpgroups

    def __str__(self) -> str:
        words = [f"{self.q_block} queries x {self.kv_block} keys", f"{self.warpgroups} warpgroups"]
        words += ["in turns"] * self.turns + [f"{self.stages} stages"] + ["persistent"] * self.persistent
        words += [f"sums in float32 every {self.promote} blocks"] * (self.promote > 0)
        return ", ".join([*words, f"{self.l2_mib} MiB of heads side by side"])


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
    warpgroups = 3 if max(head_dims(spec)) == 64 else 2
    return Fp8Config(warpgroups=warpgroups, kv_block=block, promote=promote)


def candidates(spec: AttentionSpec) -> list[Fp8Config]:
    """Configurations worth timing, the default first: those that fit."""
    first = default(spec)
    found = [first]
    for stages, persistent in itertools.product((2, 3), (True, False)):
        config = dataclasses.replace(first, stages=stages, persistent=persistent)
        if fits(spec, config):
            found.append(config)
    return list(dict.fromkeys(found))


def why_not(spec: AttentionSpec, device: Device) -> str | None:
    """The first limit of the kernels that the call exceeds."""
    if spec.S > UNPROMOTED_KEYS and spec.H_v > 128:
        limit = f"takes {UNPROMOTED_KEYS} keys at value head dims above 128, where no room is left for float32 sums"
        return f"{limit}, not {spec.S}"
    return hopper_config.why_not(spec, device)
