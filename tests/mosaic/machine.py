"""What the interpreter's threads do to its memory: the operations that jax's interpreter of Mosaic GPU kernels lacks.

These run as callbacks, on the CPU thread of a warpgroup or warp. Every one is checked by jax's race detector (vector
clocks, of which a thread has two: generic accesses, and what TMA and wgmma see of shared memory). Added to it here:
atomics, which race with everything but each other, and wgmma, which reads its operands until it is waited for.
"""

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu import core as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.mosaic.watch import watch

callbacks: Any
Key = memory.HostAllocationKey
REGS = memory.get_memory_space_idx(gpu.MemorySpace.REGS)

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

# Read-modify-writes and turns; a thread in a turn's wait sleeps on it.
_GLOBAL = threading.Condition()


def _memory() -> Any:
    return callbacks._get_shared_memory()


def place(source_info: Any) -> str:
    return source_info_util.summarize(source_info) if source_info is not None else "?"


def _cta(location: Any) -> tuple[int, ...]:
    return (*location.cluster_coords, *location.block_coords)


def _access(shared_memory: Any, key: Key, transforms: Any) -> Any:
    return shared_memory.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(tuple(transforms))))


def _of_memory(shared_memory: Any, name: str, make: Callable[[], Any]) -> Any:
    """State that lives as long as jax's clocks, which start anew with every cluster."""
    with _GLOBAL:
        epoch, value = vars(shared_memory).get(name, (None, None))
        if epoch is not shared_memory.clocks:
            value = make()
            vars(shared_memory)[name] = (shared_memory.clocks, value)
        return value


class _Atomic(str):
    """The source line of an atomic access in the detector's records: atomics do not race with each other."""


def _check_atomic(thread: Any, clock: Any, key: Key, where: Any, source_info: Any) -> None:
    races = callbacks.get_races()
    line = _Atomic(place(source_info))
    with races.lock:
        others = [*races.writes[key], *races.reads[key]]
        races.writes[key].append((thread, clock, where, line))
    for thread_, clock_, where_, line_ in others:
        if isinstance(line_, _Atomic) or clock_.ordered(clock) or not _ranges_overlap(where, where_):
            continue
        print(f"RACE DETECTED\n  atomic on {key}[{where}] from {thread}, {line}\n  {thread_}, {line_} [{where_}]\n")
        races.races_found = True
        return


def _combine(shared_memory: Any, key: Key, access: Any, value: Any, operation: str, thread: Any) -> None:
    with _GLOBAL:
        old = shared_memory.get_buffer_content(key, access, thread, increment_clock=False)[0]
        if old is None or old.shape != tuple(access.shape):
            raise IndexError(f"Out-of-bounds atomic: [{access}] of {key}.")
        new = COMBINE[operation](old, np.asarray(value)).astype(old.dtype)
        shared_memory.store_buffer_content(key, access, new, thread, increment_clock=False)


# Registers. Their keys come again in the next cluster and no other thread can reach them: nothing to detect.


@callbacks.fail_on_exception
def registers(token, mesh_location, thread, key, value, *, source_info):
    """Reads (value None) or writes a register buffer."""
    shared_memory = _memory()
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    key = Key.from_array(key)
    access = shared_memory.access(key, ())
    if value is None:
        content = shared_memory.get_buffer_content(key, access, thread, increment_clock=False, logging_info=info)[0]
        return token, content
    shared_memory.store_buffer_content(key, access, np.asarray(value), thread, increment_clock=False, logging_info=info)
    return token


@callbacks.fail_on_exception
def forget_registers(token, mesh_location, thread, key, *, source_info):
    del mesh_location, thread, source_info
    races = callbacks.get_races()
    with races.lock:
        races.reads.pop(Key.from_array(key), None)
        races.writes.pop(Key.from_array(key), None)
    return token


# wgmma


@callbacks.fail_on_exception
def wgmma(*, token, thread, source_info=None, **operands):
    """jax's own computes at once and without a check: here the operands are read until the wait."""
    shared_memory = _memory()
    if shared_memory.detect_races:
        clock = shared_memory.incr_clock(thread)
        clock.inc(shared_memory.get_next_tma_thread_id())
        for name in "ab":
            key = Key.from_array(operands[f"{name}_allocation_key_as_array"])
            if key.memory_space_id != REGS:
                access = _access(shared_memory, key, operands[f"{name}_transforms"])
                races = callbacks.get_races()
                races.check_read(thread, clock.async_smem_clock.copy(), key, access, source_info=source_info)
        _in_flight(shared_memory, thread).append(clock)
    return _STOCK_WGMMA(token=token, thread=thread, source_info=source_info, **operands)


@callbacks.fail_on_exception
def wgmma_load(*, token, thread, wait_n, **rest):
    if wait_n is not None:
        _wait_for_wgmma(_memory(), thread, wait_n)
    return _STOCK_WGMMA_LOAD(token=token, thread=thread, wait_n=wait_n, **rest)


@callbacks.fail_on_exception
def wgmma_wait(token, mesh_location, thread, *, n, source_info):
    del mesh_location, source_info
    _wait_for_wgmma(_memory(), thread, n)
    return token


def _in_flight(shared_memory: Any, thread: Any) -> collections.deque:
    return _of_memory(shared_memory, "wgmma_in_flight", lambda: collections.defaultdict(collections.deque))[thread]


def _wait_for_wgmma(shared_memory: Any, thread: Any, n: int) -> None:
    queue = _in_flight(shared_memory, thread)
    while len(queue) > n:
        done = queue.popleft()
        with shared_memory.lock:
            shared_memory.clocks[thread].update(done)


_STOCK_WGMMA = callbacks.wgmma
_STOCK_WGMMA_LOAD = callbacks.wgmma_accumulator_deref


# Atomics and reducing copies


@callbacks.fail_on_exception
def atomic(token, mesh_location, thread, ref, transforms, value, *, operation, source_info):
    del mesh_location
    shared_memory, key = _memory(), Key.from_array(ref)
    access = _access(shared_memory, key, transforms)
    if shared_memory.detect_races:
        clock = shared_memory.incr_clock(thread).generic_clock
        _check_atomic(thread, clock, key, access.range, source_info)
    _combine(shared_memory, key, access, value, operation, thread)
    return token


class _ReducingCopy(callbacks.AsyncCopySmemToGmemTask):
    operation: str
    clock: Any

    def __call__(self, tma_thread_id: int) -> None:
        shared_memory = _memory()
        self.pre_read(tma_thread_id, shared_memory)
        value = shared_memory.get_buffer_content(
            self.src_allocation_key, self.src_access, self.thread, increment_clock=False
        )[0]
        if value is None or value.shape != self.src_access.shape:
            raise IndexError(f"Out-of-bounds copy from {self.src_allocation_key}: [{self.src_access}].")
        shape = tuple(shared_memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if shared_memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            vars(self.write_clock)["reduces"] = True
            if inside is not None:
                clock = self.clock.async_smem_clock.copy()
                _check_atomic(self.thread, clock, self.dst_allocation_key, inside[0].range, self.source_info)
        if inside is not None:
            access, value = inside
            _combine(shared_memory, self.dst_allocation_key, access, value, self.operation, self.thread)
        self.post_write(tma_thread_id, shared_memory)


@callbacks.fail_on_exception
def reducing_copy(token, mesh_location, thread, src, src_transforms, dst, dst_transforms, *, operation, source_info):
    shared_memory, src, dst = _memory(), Key.from_array(src), Key.from_array(dst)
    task = _ReducingCopy(
        mesh_location=mesh_location,
        thread=thread,
        src_allocation_key=src,
        src_access=_access(shared_memory, src, src_transforms),
        dst_allocation_key=dst,
        dst_access=_access(shared_memory, dst, dst_transforms),
        source_info=source_info,
        clock=shared_memory.incr_clock(thread) if shared_memory.detect_races else None,
    )
    task.operation = operation
    shared_memory.execute_async_task(task)
    return token


# Stores into the shared memory of another CTA of the cluster


@callbacks.fail_on_exception
def store_to_peer(token, mesh_location, thread, ref, transforms, value, barrier, blocks, *, source_info):
    """blocks: how far the other CTA's number is from this one's. All is done when its barrier hears of it."""
    shared_memory = _memory()
    key, barrier = (replace(k, block_id=k.block_id + int(blocks)) for k in map(Key.from_array, (ref, barrier)))
    with watch().waiting(thread, f"shared memory of another CTA than {_cta(mesh_location)}, {place(source_info)}"):
        while not {key, barrier} <= shared_memory.mem.keys():  # that CTA has not begun; the hardware's all have
            if key.block_id in _of_memory(shared_memory, "ended", set):
                raise ValueError(f"CTA {_cta(mesh_location)} stores into the shared memory of one that has ended")
            shared_memory.check_failed()
            time.sleep(0.01)
    access = _access(shared_memory, key, transforms)
    shared_memory.store_buffer_content(key, access, np.asarray(value), thread, increment_clock=False)
    barrier, clock = shared_memory.get_barrier_and_increment_clock(barrier, thread)
    if shared_memory.detect_races:
        callbacks.get_races().check_write(thread, clock.generic_clock, key, access, source_info=source_info)
    barrier.arrive(thread, clock, memory.GPULoggingInfo(mesh_location, thread, source_info))
    return token


# Named barriers


class NamedBarrier:
    """`bar.sync` and `bar.arrive`: whoever syncs waits for the phase that it arrived in."""

    def __init__(self, threads: int):
        self.threads, self.arrived, self.phase = threads, 0, 0
        self.clock: Any = None
        self.clocks: dict[int, Any] = {}  # of the phases that have completed
        self.changed = threading.Condition()

    def arrive(self, threads: int, expected: int, clock: Any) -> int:
        with self.changed:
            if expected != self.threads and self.arrived:
                raise ValueError(f"named barrier of {self.threads} threads is used with {expected}")
            self.threads = expected
            phase = self.phase
            self.arrived += threads
            if self.arrived > self.threads:
                raise ValueError(f"{self.arrived} threads arrived at a named barrier of {self.threads}")
            if clock is not None:
                if self.clock is None:
                    self.clock = clock.copy()
                else:
                    self.clock.update(clock)
            if self.arrived == self.threads:
                self.clocks[phase], self.clock = self.clock, None
                self.phase, self.arrived = phase + 1, 0
                self.changed.notify_all()
            return phase

    def wait(self, phase: int, check_failed: Callable[[], None]) -> Any:
        with self.changed:
            while self.phase == phase:
                check_failed()
                self.changed.wait(0.05)
            return self.clocks[phase]


@callbacks.fail_on_exception
def named_barrier(token, mesh_location, thread, barrier, *, threads, sync, source_info):
    shared_memory = _memory()
    key = (thread.device_id, thread.block_id, int(barrier))
    with shared_memory.lock:
        named = shared_memory.named_barriers.setdefault(key, NamedBarrier(threads))
    clock = shared_memory.incr_clock(thread) if shared_memory.detect_races else None
    phase = named.arrive(32 if isinstance(thread, memory.Warp) else 128, threads, clock)
    if sync:
        what = f"named barrier {key[2]} of CTA {_cta(mesh_location)}, {place(source_info)}"
        with watch().waiting(thread, what):
            done = named.wait(phase, shared_memory.check_failed)
        if done is not None:
            with shared_memory.lock:
                shared_memory.clocks[thread].update(done)
    return token


# Turns


@callbacks.fail_on_exception
def turn_wait(token, mesh_location, thread, ref, transforms, index, value, *, source_info):
    shared_memory, key, index = _memory(), Key.from_array(ref), int(index)
    access = _access(shared_memory, key, transforms)
    what = f"element {index} of turns >= {int(value)} in CTA {_cta(mesh_location)}, {place(source_info)}"
    with _GLOBAL, watch().waiting(thread, what):
        while True:
            content = shared_memory.get_buffer_content(key, access, thread, increment_clock=False)[0]
            if content.reshape(-1)[index] >= int(value):
                break
            shared_memory.check_failed()
            _GLOBAL.wait(0.05)
        _turn_accessed(shared_memory, thread, key, access, index, source_info, release=False)
    return token


@callbacks.fail_on_exception
def turn_add(token, mesh_location, thread, ref, transforms, index, *, source_info):
    del mesh_location
    shared_memory, key, index = _memory(), Key.from_array(ref), int(index)
    access = _access(shared_memory, key, transforms)
    if any("reduces" in vars(clock) for clock in shared_memory.pending_smem_to_gmem_write_clocks[thread]):
        raise ValueError("The turn is passed on while the thread's adds may be in flight: wait_smem_to_gmem(0) first.")
    with _GLOBAL:
        content = shared_memory.get_buffer_content(key, access, thread, increment_clock=False)[0].copy()
        content.reshape(-1)[index] += 1
        shared_memory.store_buffer_content(key, access, content, thread, increment_clock=False)
        _turn_accessed(shared_memory, thread, key, access, index, source_info, release=True)
        _GLOBAL.notify_all()
    return token


def _turn_accessed(shared_memory, thread, key, access, index, source_info, *, release: bool) -> None:
    if not shared_memory.detect_races:
        return
    turns = _of_memory(shared_memory, "turns", dict)
    clock = shared_memory.incr_clock(thread)
    where = access.range
    if len(where) == 1 and isinstance(where[0], slice):
        start = int(where[0].start or 0) + index
        where = (slice(start, start + 1),)
    _check_atomic(thread, clock.generic_clock, key, where, source_info)
    name = (key, str(access.range), index)
    if release:
        turns.setdefault(name, clock.copy()).update(clock)
    elif name in turns:
        with shared_memory.lock:
            shared_memory.clocks[thread].update(turns[name])


# Ends


def cluster_ended(shared_memory: Any) -> None:
    for (_, block, barrier), named in getattr(shared_memory, "named_barriers", {}).items():
        if isinstance(named, NamedBarrier) and named.arrived:
            raise ValueError(f"named barrier {barrier} of block {block} ends with {named.arrived} threads arrived")


def thread_ended(shared_memory: Any, thread: Any) -> None:
    _of_memory(shared_memory, "ended", set).add(thread.block_id)
    if not shared_memory.detect_races:
        return
    if _in_flight(shared_memory, thread):
        raise ValueError(f"{thread} ended without waiting for its last wgmma")
    for warp in range(gpu.WarpMesh._NUM_WARPS_PER_WARPGROUP):
        if shared_memory.pending_smem_to_gmem_read_clocks[thread.warp(warp)]:
            raise ValueError(f"{thread.warp(warp)} ended with copies to global memory unfinished: wait_smem_to_gmem")
