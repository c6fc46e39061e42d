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
# For barriers and small vectors, each rounded up to 1 KiB.
_SMEM_SPARE = 6 * 1024


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Tile sizes and schedule; fields as in `hopper_config.Config`.

    `promote`: the product with each block of values starts from 0 and is added to the output in float32 outside of the
    tensor cores, whose own sums keep some 14 bits (arXiv 2407.08608 does not; DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    """

    warpgroups: int = 2
    kv_block: int = 128
    stages: int = 2
    turns: bool = False
    persistent: bool = True
    promote: bool = False
    l2_mib: int = 16

    def __post_init__(self):
        if self.warpgroups not in (2, 3):
            raise ValueError(f"Fp8Config: {self.warpgroups=} - there are registers for 2 or 3. Choose one of them.")
        if self.kv_block % 32 or not 64 <= self.kv_block <= 256:
            raise ValueError(
                f"Fp8Config: {self.kv_block=} - must be a multiple of 32 from 64 to 256. Choose such a block."
            )
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
        words += ["sums in float32"] * self.promote
        return ", ".join([*words, f"{self.l2_mib} MiB of heads side by side"])


def staged_columns(H_v: int) -> int:
    """Columns of the output that a warpgroup hands to TMA at a time."""
    return 128 if H_v == 256 else H_v


def smem_bytes(spec: AttentionSpec, config: Fp8Config) -> int:
    """Shared memory of the kernel's tiles."""
    H, H_v = head_dims(spec)
    return config.q_block * (H + 2 * staged_columns(H_v)) + config.stages * config.kv_block * (H + H_v)


def fits(spec: AttentionSpec, config: Fp8Config, spare: int = _SMEM_SPARE) -> bool:
    """Whether the kernel can run so."""
    return smem_bytes(spec, config) <= SMEM_LIMIT - spare


def default(spec: AttentionSpec) -> Fp8Config:
    """The configuration for the head dims and the number of keys."""
    # Above 128 there are no registers for it.
    promote = head_dims(spec)[1] <= 128
    warpgroups = 3 if max(head_dims(spec)) == 64 else 2
    return Fp8Config(warpgroups=warpgroups, kv_block=kv_block(spec), promote=promote)


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
        limit = (
            f"takes {UNPROMOTED_KEYS} keys at value head dims above 128, where no registers are left for float32 sums"
        )
        return f"{limit}, not {spec.S}"
    return hopper_config.why_not(spec, device)
