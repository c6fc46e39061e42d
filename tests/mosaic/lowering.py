"""Kernels to MLIR on a CPU-only jaxlib: unknown primitives, layouts without a solution, too much shared memory."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.device import H200, Device


def gpu_mesh(device: Device = H200) -> jax.sharding.AbstractMesh:
    """What a kernel that asks for the number of SMs is told, where there is no GPU."""
    return jax.sharding.AbstractMesh(
        (),
        (),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=device.kind, platform=device.platform, num_cores=device.num_cores
        ),
    )


def lower_for_cuda(function: Callable[..., Any], *args: Any, device: Device = H200) -> jax.stages.Lowered:
    """`function` of arrays or jax.ShapeDtypeStructs, lowered for CUDA; `.as_text()` has the kernels as custom calls."""
    # A new function each time: a trace that was made for the interpreter must not be taken from jit's cache.
    with jax.sharding.use_abstract_mesh(gpu_mesh(device)):
        return jax.jit(lambda *a: function(*a)).trace(*args).lower(lowering_platforms=("cuda",))
