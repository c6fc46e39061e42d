"""Kernel times on the GPU at hand, as CUPTI reports them; jobs compile side by side and are timed one at a time."""

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import queue
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.device import current_device

# Set in each worker of `each`: the lock of the GPU.
_gpu: Any = contextlib.nullcontext()


def milliseconds(function: Callable[..., Any], *args: Any, repeats: int = 3, iterations: int = 7) -> float:
    """Median time of one call's kernels on the device, in milliseconds.

    `function` is compiled first, and only then the GPU taken, so that workers of `each` do not disturb one another.
    args: arrays, or functions without arguments that make them on the device.
    """
    shapes = [jax.eval_shape(a) if callable(a) else a for a in args]
    compiled = jax.jit(function).lower(*shapes).compile()
    with _gpu:
        arrays = [a() if callable(a) else a for a in args]
        times = []
        for _ in range(repeats):
            _, measured = profiler.measure(compiled, iterations=iterations)(*arrays)
            times += measured if isinstance(measured, list) else [measured]
    return float(np.median(times))


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Microseconds a call by the clock and by CUPTI, and the custom calls in the program."""

    us: float
    cupti_us: float
    custom_calls: int


def chained(function: Callable[..., Any], calls: Sequence[Sequence[Callable[[], Any]]], *, rounds: int) -> Chain:
    """Times calls that follow each other in one program, which runs `rounds` times through them.

    One launch of the program from Python takes some 100 us, which enough rounds make negligible.
    calls: for each call, functions without arguments that make its operands. Operands made by the same function are the
    same array; no two calls may have all of them in common, or XLA would merge them. For kernels of few microseconds,
    whose launches the clock should not count, let CUDA graphs launch them:
    XLA_FLAGS="--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+CUBLAS,+CUBLASLT --xla_gpu_graph_min_graph_size=1".
    """
    makers = list(dict.fromkeys(make for call in calls for make in call))
    places = [[makers.index(make) for make in call] for call in calls]
    inner = jax.jit(function)

    def program(arrays: list[Any]) -> list[Any]:
        def once(_: Any, outs: list[Any]) -> list[Any]:
            # Else the calls would not depend on the round, and XLA would move them out of the loop.
            arrays_now, _ = jax.lax.optimization_barrier((arrays, outs))
            return [inner(*(arrays_now[n] for n in call)) for call in places]

        shapes = jax.eval_shape(lambda: [inner(*(arrays[n] for n in call)) for call in places])
        return jax.lax.fori_loop(0, rounds, once, [jnp.zeros(out.shape, out.dtype) for out in shapes])

    compiled = jax.jit(program).lower([jax.eval_shape(make) for make in makers]).compile()
    with _gpu:
        arrays = [make() for make in makers]
        jax.block_until_ready(compiled(arrays))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(compiled(arrays))
            times.append((time.perf_counter() - start) / rounds / len(calls))
        kernels: Any = profiler.measure(compiled)(arrays)[1]
    return Chain(
        us=1e6 * float(np.median(times)),
        cupti_us=1e3 * float(kernels) / rounds / len(calls),
        custom_calls=(compiled.as_text() or "").count("custom-call("),
    )


def each[J](run: Callable[[J], Any], jobs: Iterable[J], *, workers: int, seconds: float) -> Iterator[tuple[J, Any]]:
    """(job, run(job)) as they come, from `workers` processes; ends when all are done, or after so many seconds.

    run: a function of a module, which times with `milliseconds`. A job that raises gives the text of the error as its
    result. One worker is this process; several share the device's memory, so that preallocation must be off
    (XLA_PYTHON_CLIENT_PREALLOCATE=false).
    """
    deadline = time.monotonic() + seconds
    if workers == 1:
        for job in jobs:
            if time.monotonic() < deadline:
                yield job, _result(run, job)
        return
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    done: Any = context.Queue()
    lock = context.Lock()
    jobs = list(jobs)
    for index, job in enumerate(jobs):
        todo.put((index, job))
    for _ in range(workers):
        todo.put(None)
    processes = [context.Process(target=_work, args=(run, todo, done, lock), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    left = len(jobs)
    while left and time.monotonic() < deadline:
        try:
            index, result = done.get(timeout=0.5)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        left -= 1
        yield jobs[index], result
    for process in processes:
        process.kill()


class _Alone:
    """The lock of the GPU as a context; a worker that died with it, or hangs, is told instead of waited for."""

    def __init__(self, lock: Any, seconds: float = 120.0):
        self.lock, self.seconds = lock, seconds

    def __enter__(self) -> None:
        if not self.lock.acquire(timeout=self.seconds):
            raise RuntimeError(f"timing: another worker has held the GPU for {self.seconds:.0f} s - it hangs or died.")

    def __exit__(self, *_: Any) -> None:
        self.lock.release()


def _work(run: Callable[[Any], Any], todo: Any, done: Any, lock: Any) -> None:
    global _gpu
    _gpu = _Alone(lock)
    for index, job in iter(todo.get, None):
        done.put((index, _result(run, job)))


def _result(run: Callable[[Any], Any], job: Any) -> Any:
    # What a kernel that does not compile, or does not run, raises.
    try:
        return run(job)
    except (RuntimeError, ValueError, NotImplementedError, TypeError, LookupError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:500]}"


def versions() -> dict[str, str]:
    """What a figure depends on, as far as it is installed here: packages, and the driver."""
    installed: dict[str, str] = {}
    for package in importlib.metadata.distributions():  # in the order of sys.path: the first is the one imported
        installed.setdefault(package.name, package.version)
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "nvidia-cudnn-cu13")
    found = {name: installed[name] for name in names if name in installed}
    if current_device().platform == "gpu" and (smi := shutil.which("nvidia-smi")):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = _output(query).partition("\n")[0]
    return found


def commit() -> str | None:
    """The checkout's commit, with `-dirty` where tracked files differ from it; None outside a checkout."""
    root, git = Path(__file__).parents[1], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    return _output([git, "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]) or None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def setting(prog: str, argv: Sequence[str], given: str | None) -> dict[str, Any]:
    """What every measured row repeats: device, versions, commit (as given, or git's), date and command."""
    return {
        "device": current_device().kind,
        "versions": versions(),
        "commit": given or commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", prog, *argv]),
    }


def arguments(prog: str, text: str) -> argparse.ArgumentParser:
    """What every command that times takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=text.splitlines()[0])
    parser.add_argument("--only", default="", help="what is timed: names that hold this text")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long (default 3600)")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes; several need XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
    parser.add_argument("--commit", help="goes into the rows; default: git's")
    return parser


def has_gpu() -> bool:
    """Whether there is a GPU to time; says so on stderr where there is none."""
    if current_device().platform != "gpu":
        print(f"error: {current_device()} - timing needs a GPU.", file=sys.stderr)
    return current_device().platform == "gpu"


def record(rows: Iterable[dict[str, Any]], shared: dict[str, Any], out: Path | None) -> int:
    """Prints rows as they come, and appends those without "error", with `shared`, to `out`; how many had an error."""
    failed = 0
    for row in rows:
        failed += "error" in row
        print(json.dumps(row), flush=True)
        if out and "error" not in row:
            with out.open("a") as file:
                file.write(json.dumps(row | shared) + "\n")
    return failed
