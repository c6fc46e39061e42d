"""What the host offers. The only file that asks jax which device is present."""

from dataclasses import dataclass
from typing import Any

import jax

# Dense bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (the figures without sparsity). The first entry
# whose words all occur in the device's name applies, so the narrower names come first.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("h100 pcie", 756e12),
    ("h100 nvl", 835e12),
    ("h100", 989e12),
    ("h200 nvl", 835e12),
    ("h200", 989e12),
    ("gh200", 989e12),
    ("b200", 2250e12),
    ("a100", 312e12),
    ("l40s", 362e12),
    ("l4", 121e12),
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The facts of one device that a choice or a plan may depend on; made by hand in tests and ahead-of-time builds.

    `platform` is jax's ("cpu", "gpu", "tpu"), `compute_capability` is (major, minor) on CUDA and None elsewhere,
    `num_cores` counts streaming multiprocessors and is None where jax does not report them.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None

    def __str__(self) -> str:
        return self.kind if self.platform in self.kind.lower() else f"{self.kind} ({self.platform})"


# The GPU that the kernels are built and tuned for; ahead-of-time builds and tests name it on hosts without one.
H200 = Device(platform="gpu", kind="NVIDIA H200", compute_capability=(9, 0), num_cores=132)


def current_device() -> Device:
    """The device that an unplaced array lands on: `jax.default_device` where one is set, else the first device."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        chosen = jax.devices(chosen)[0]
    return describe(chosen or jax.devices()[0])


def alone() -> bool:
    """Whether the program can only be meant for one device, so that there is nothing to partition."""
    return jax.device_count() == 1


def describe(device: Any) -> Device:
    """The facts of a `jax.Device`."""
    # Only GPU devices carry these attributes, and ROCm's "compute capability" is a name such as gfx942.
    parts = str(getattr(device, "compute_capability", "")).split(".")
    capability = (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=capability,
        num_cores=getattr(device, "core_count", None),
    )


def peak_flops(device: Device) -> float | None:
    """Dense bf16 peak of the device in FLOP/s (the denominator of MFU), or None where it is not on record."""
    words = device.kind.lower().replace("-", " ").split()
    for name, peak in _PEAK_FLOPS:
        if all(part in words for part in name.split()):
            return peak
    return None
