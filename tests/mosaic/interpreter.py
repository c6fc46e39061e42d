"""Pallas Mosaic GPU kernels on a CPU: jax's interpreter, with what Hopper kernels need and it lacks.

    out = run_interpreted(kernel, x)             # races, deadlocks and unobserved barriers are errors
    with interpreted(): ...                      # the same for several calls

Outside pytest set NPROC=64: XLA's pool needs a thread for each warpgroup and warp that runs at a time.

An inline function is run by a stand-in, an attribute of what is given to `plgpu.inline_mgpu`:
- `interpret(*args) -> result(s)`, a function of jax.numpy, where every argument is an array or scalar;
- `interpret_refs(*args) -> (result(s) or None, {position in args: new contents})`, the same where some arguments are
  refs: they come in as their contents, after `.at[...]`, and what was written goes out;
- `interpret`, a tuple, names an operation of the machine with its static numbers; the arguments are the dynamic ones:
    ("fence",)              f()             fence.proxy.async, by the calling warpgroup or warp
    ("bar.sync", threads)   f(barrier)      named barrier of the CTA; `threads` counts 128 a warpgroup, 32 a warp
    ("bar.arrive", threads) f(barrier)
    ("turn.wait",)          f(ref, i, n)    until element i (row-major) of int32 GMEM `ref` >= n; acquire
    ("turn.add",)           f(ref, i)       adds 1 to it; release
    ("product",)            f(a, b)         a b' by wgmma, until somebody waits for it
    ("nothing",)            f(...)          has no meaning here (prefetches, hints)
A barrier that is a constant of the kernel follows `threads`: ("bar.sync", 160, 4) for f(). The callers are warps inside
`plgpu.warp_map`, warpgroups elsewhere. CTAs run one after another, in the order of the grid: a kernel whose turns wait
for a later CTA is reported as a deadlock, unless they run `together`.

What it cannot see: layouts and what the hardware refuses (lowering.py, aot.py); barriers missing between the four warps
of a warpgroup; registers that wgmma still reads; the order of floating-point adds, but for turns passed on too early.
"""

import contextlib
import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback, dispatch
from jax._src import core as jax_core
from jax._src.pallas import mpmd
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

from pallas_kernels.device import H200, Device
from tests.mosaic import handlers, machine
from tests.mosaic.lowering import gpu_mesh
from tests.mosaic.watch import Deadlock as Deadlock
from tests.mosaic.watch import Watch


class Race(AssertionError):
    """The race detector found accesses that nothing orders; it printed them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Params(InterpretGPUParams):
    """A part of jit's cache key."""

    together: bool = False


@contextlib.contextmanager
def interpreted(
    *, together: bool = False, detect_races: bool = True, idle: float = 60.0, device: Device = H200, **options: Any
) -> Iterator[None]:
    """Kernels that are called in the block run on the CPU; wait for their results in there.

    `together` runs all CTAs of a grid at the same time, in as many threads: their turns may wait for each other in any
    order, and only then does the detector know what turns order between CTAs. Threads that wait for `idle` seconds
    while nothing happens are a Deadlock. Whatever a kernel raised comes out as it was. Keep grids small: a step of a
    warpgroup takes about 10 ms.
    """
    fields = {field.name for field in dataclasses.fields(_Params)}
    if "on_race" in fields:  # jax 0.12
        options.setdefault("on_race", "warn")
    # TMA and wgmma take turns on these clock positions; one that is used twice at a time hides a race.
    options.setdefault("num_tma_threads_per_device", 32)
    params = _Params(together=together, detect_races=detect_races, **options)
    watch = Watch(idle)
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with _patched(watch), watch.running():
            with jax.sharding.use_abstract_mesh(gpu_mesh(device)), force_gpu_interpret_mode(params):
                yield
    except Exception as error:
        _forget_failed_effects()
        if watch.failure is None:
            raise
        raise watch.failure from error
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if any(races.races_found for races in watch.races):
        raise Race("the interpreter found races between threads; they are on stdout.")


def run_interpreted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`function(*args)` under `interpreted(**options)`, in one jit of its own."""
    with interpreted(**options):
        return jax.block_until_ready(jax.jit(lambda *a: function(*a))(*args))


def _forget_failed_effects() -> None:
    """Ordered callbacks hand a token on; that of a failed kernel would fail every later one."""
    dispatch.runtime_tokens.clear()


def _patched(watch: Watch) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()

    def replace(where: Any, name: str, make: Callable[[Any], Any]) -> None:
        stack.enter_context(mock.patch.object(where, name, make(getattr(where, name))))

    def recorded(make_races):
        def make(*args, **kwargs):
            watch.races.append(make_races(*args, **kwargs))
            return watch.races[-1]

        return make

    def seen(get):
        def get_shared_memory():
            shared_memory = get()
            watch.alive(shared_memory)
            return shared_memory

        return get_shared_memory

    def waited(wait):
        def wait_and_tell(self, thread, logging_info=None):
            line = machine.place(logging_info.source_info if logging_info is not None else None)
            with watch.waiting(thread, f"{self}, {line}"):
                return wait(self, thread, logging_info)

        return wait_and_tell

    def failed(set_failed):
        def fail(self, exception, *args, **kwargs):
            watch.failure = watch.failure or exception
            return set_failed(self, exception, *args, **kwargs)

        return fail

    def before(action):
        def wrap(method):
            def both(self, *args):
                action(self, *args)
                return method(self, *args)

            return both

        return wrap

    # A jax array made of every argument of every callback would be most of an interpreted kernel's time.
    replace(callback, "io_callback_impl", lambda original: _call_with_numpy)
    replace(memory, "_to_int", lambda original: lambda x: x.item() if isinstance(x, np.ndarray) else original(x))
    replace(jaxpr_interpret.JaxprInterpreter, "interpret", lambda original: handlers.interpret)
    replace(interpret_pallas_call, "interpret_pallas_call", _one_cluster)
    replace(gpu_callbacks, "wgmma", lambda original: machine.wgmma)
    replace(gpu_callbacks, "wgmma_accumulator_deref", lambda original: machine.wgmma_load)
    replace(gpu_callbacks, "GPURaceDetectionState", recorded)
    replace(gpu_callbacks, "_get_shared_memory", seen)
    replace(memory.Barrier, "wait", waited)
    replace(memory.GPUSharedMemory, "set_failed", failed)
    replace(memory.GPUSharedMemory, "reset_per_cluster_state", before(machine.cluster_ended))
    replace(memory.GPUSharedMemory, "kernel_thread_finished", before(machine.thread_ended))
    return stack


def _call_with_numpy(*args, callback, **_):
    """Of copies: what XLA hands over lives as long as the call."""
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _one_cluster(original):
    """The interpreter runs the blocks of a cluster at the same time: `together` makes the grid one cluster."""

    def interpret(*args, mesh, interpret_params, **kwargs):
        if mesh is not None:
            if getattr(interpret_params, "together", False):
                mesh = copy.copy(mesh)
                vars(mesh).update(  # not dataclasses.replace, which allows a cluster three axes
                    cluster=(*mesh.grid, *mesh.cluster),
                    cluster_names=(*mesh.grid_names, *mesh.cluster_names),
                    grid=(),
                    grid_names=(),
                )
            warps = 4 if _has_warp_map(kwargs["jaxpr"]) else 0
            _check_pool(math.prod(mesh.cluster) * ((mesh.num_threads or 1) + warps))
        return original(*args, mesh=mesh, interpret_params=interpret_params, **kwargs)

    return interpret


def _has_warp_map(jaxpr) -> bool:
    if any(eqn.primitive is mpmd.mpmd_map_p for eqn in jaxpr.eqns):
        return True
    return any(map(_has_warp_map, jax_core.subjaxprs(jaxpr)))


def _check_pool(threads: int) -> None:
    """A thread that waits may hold one of the threads on which XLA runs all of them; too few look like a deadlock."""
    pool = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if threads >= pool:
        raise ValueError(
            f"interpreted: {threads} warpgroups and warps at a time, for a pool of {pool=} threads - needs more. Use a"
            " smaller grid or set the environment variable NPROC before jax's backend starts (tests/conftest.py)."
        )
