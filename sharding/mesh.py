"""The device mesh: its axes, and the ways to ask for one.

Everything else in the package reads axis names and sizes from the `Mesh` that `make_mesh` returns.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sharding.names import did_you_mean

# Slow axes outermost: `data` crosses hosts first, `tensor` stays on the fastest links.
AXES = ("data", "fsdp", "stage", "context", "tensor")

type Devices = Sequence[jax.Device]  # pyright: ignore[reportInvalidTypeForm]  # jax deletes the module it comes from


def use_cpu_devices(count: int) -> None:
    """Splits the CPU into `count` devices, to try a mesh on it. Call it before anything asks JAX for its devices.

    XLA's CPU collectives block a thread each until all their devices arrive, on a pool with a thread per core; with
    more devices than cores they can wait for each other for ever (jaxlib 0.11.2 ends the process after 40 s: 13 of 20
    runs of a (2, 2, 2) training step on two cores, none of 18 with a larger pool). The pool's size is read from NPROC.

    Raises:
        ValueError: count is not positive.
        RuntimeError: JAX's backend has already started.
    """
    if count < 1:
        raise ValueError(f"use_cpu_devices: {count=} - must be at least 1.")
    jax.config.update("jax_num_cpu_devices", count)
    _widen_cpu_pool()


def _widen_cpu_pool() -> None:
    """Also for who set JAX_NUM_CPU_DEVICES: does nothing once the backend has started, or where NPROC is set."""
    count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if count is not None and count > 1:
        os.environ.setdefault("NPROC", str(4 * count))


def make_mesh(axes: Mapping[str, int] | None = None, *, devices: Devices | None = None) -> Mesh:
    """Builds a mesh that has every axis of `AXES`; an axis that `axes` does not name has size 1.

    Args:
        axes: mesh axis -> size. One size may be -1: the devices that the other axes leave.
            `None` or empty puts every device on `fsdp`: the one layout that lowers memory and needs nothing of a
            model but an `embed` dimension that divides.
        devices: the devices to use, in order; `jax.devices()` when `None`.

    Returns:
        A mesh whose axes are all `AxisType.Auto`, for `jax.set_mesh`. When the product of the sizes is smaller than
        the number of devices, the first ones are used; a mesh over several processes must use all of them, since a
        process left out would wait for ever in its first collective. There, the outermost axes cross processes.

    Raises:
        ValueError: an unknown axis, a size that is neither positive nor -1, a second -1, a product that the devices
            cannot hold, or processes that bring different numbers of devices.

    >>> dict(make_mesh({"tensor": 1}, devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'stage': 1, 'context': 1, 'tensor': 1}
    """
    wanted = _checked(axes or {"fsdp": -1}, "make_mesh")
    _widen_cpu_pool()
    pool = list(jax.devices() if devices is None else devices)
    if not pool:
        raise ValueError("make_mesh: devices=[] - a mesh needs a device. Pass devices=None for all of them.")
    per_process = Counter(device.process_index for device in pool)
    sizes = _sizes(wanted, pool, processes=len(per_process))
    if len(set(per_process.values())) > 1:
        raise ValueError(
            f"make_mesh: processes bring different numbers of devices, {dict(per_process)} - a mesh is a full grid. "
            "Give every process the same number."
        )
    grid = _arrange(sizes, pool[: math.prod(sizes)], processes=len(per_process))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parse_mesh(text: str) -> dict[str, int]:
    """Reads a mesh from a command line: `name=size` pairs with commas between; an empty text is an empty dict.

    Raises:
        ValueError: a part that is not `name=size`, an axis named twice, or what `make_mesh` refuses without devices.

    >>> parse_mesh("fsdp=4,tensor=2")
    {'fsdp': 4, 'tensor': 2}
    """
    axes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not size.removeprefix("-").isdecimal():
            raise ValueError(f"parse_mesh: {part=} in {text=} - every part is name=size. Write fsdp=4,tensor=2.")
        if name in axes:
            raise ValueError(f"parse_mesh: axis {name=} appears twice in {text=} - once each. Keep one of them.")
        axes[name] = int(size)
    return _checked(axes, "parse_mesh")


def _checked(axes: Mapping[str, int], op: str) -> dict[str, int]:
    for name, size in axes.items():
        if name not in AXES:
            raise ValueError(f"{op}: unknown mesh axis {name=}. {did_you_mean(name, AXES)}")
        if size < 1 and size != -1:
            raise ValueError(f"{op}: mesh axis {name!r} has {size=} - sizes are positive. Use 1, or -1 for the rest.")
    rest = [name for name, size in axes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{op}: {len(rest)} axes of size -1, {rest} - one can take the rest. Give the others sizes.")
    return dict(axes)


def _sizes(wanted: Mapping[str, int], devices: Devices, processes: int) -> tuple[int, ...]:
    """One size per axis of AXES with -1 filled in; refuses what `devices` cannot hold."""
    count = len(devices)
    fixed = math.prod(size for size in wanted.values() if size != -1)
    takes_rest = -1 in wanted.values()
    whole = takes_rest or processes > 1
    if fixed <= count and (count % fixed == 0 if takes_rest else fixed == count or not whole):
        return tuple(count // fixed if wanted.get(name) == -1 else wanted.get(name, 1) for name in AXES)

    if fixed > count:
        requirement = "the product cannot be larger"
    elif takes_rest:
        requirement = "the sizes that are given must divide it"
    else:
        requirement = f"a mesh over {processes} processes uses every device"
    remedy = f"Nearest mesh that works here: {_nearest(wanted, count)}."
    if fixed > count and devices[0].platform == "cpu":
        remedy += f" Or start with --cpu-devices {fixed} (JAX_NUM_CPU_DEVICES={fixed} before JAX starts)."
    raise ValueError(f"make_mesh: {_text(wanted)} needs {fixed} devices of {count=} - {requirement}. {remedy}")


def _nearest(wanted: Mapping[str, int], count: int) -> str:
    """The mesh over exactly `count` devices with the fewest halvings and doublings away from `wanted`."""

    def distance(sizes: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        asked = [wanted.get(name, 1) for name in AXES]
        steps = sum(abs(math.log2(size / want)) for size, want in zip(sizes, asked, strict=True) if want != -1)
        return steps, sizes[::-1]  # among equals, the one that asks least of the inner axes

    best = min(factorisations(count, len(AXES)), key=distance)
    return _text({name: size for name, size in zip(AXES, best, strict=True) if size > 1} or {"fsdp": 1})


def factorisations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (count,)
        return
    for first in (size for size in range(1, count + 1) if count % size == 0):
        for others in factorisations(count // first, parts - 1):
            yield (first, *others)


def _text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())


def _arrange(sizes: tuple[int, ...], devices: Devices, processes: int) -> np.ndarray:
    """The grid of devices. Across processes, the outermost axes take as much of the process count as they can."""
    if processes == 1:
        return mesh_utils.create_device_mesh(sizes, devices)
    across, left = [], processes
    for size in sizes:
        across.append(math.gcd(size, left))
        left //= across[-1]
    within = [size // outer for size, outer in zip(sizes, across, strict=True)]
    # By process, not by slice: CPU devices have no slices, and GPUs give every host its own.
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, process_is_granule=True)
