"""Kernels to sm_90a machine code with no GPU: registers, spills, serialised wgmma, SASS.

`make aot` builds the environment .aot (the locked jax, its CUDA plugin and ptxas) and runs check_aot.py. One kernel:

    .aot/bin/python -m tests.mosaic.aot FILE.py:NAME [--only PART] [--dump DIR]
    .aot/bin/python -m tests.mosaic.aot FILE.py:FUNCTION 'bf16[2,512,4,64]' 'f32[512]' ... [--dump DIR]

from the repository's root. NAME is a Candidate, a list of them, or a function without arguments that gives either;
FUNCTION takes arrays of the shapes that follow; `package.module` may stand for FILE.py. DIR/<candidate> gets each
kernel's SASS with its stalls and barriers (.sass_ctrl), PTX, ptxas log, inferred layouts, shared memory (.resources).
Exit status 1 if a candidate spills more than it may or has wgmma serialised.

A process of its own, because the CUDA plugin must find jax told to use the CPU before it starts a backend.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# XLA's description of a device (stream_executor.GpuTargetConfigProto): only what compiling for an H200 asks for.
H200_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
"""

# ptxas notes both with codes C7510 to C7517, a code for every cause. (C7519, an arrive put in where an accumulator
# starts, costs nothing.)
_SERIALISED = re.compile(r"wgmma\S* instructions are serialized|warpgroup\.wait is injected")
_SPILLED = re.compile(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A function that launches kernels, and the shapes to compile it for. Faults may be allowed, for a reason."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    spill_bytes: int = 0
    serialised: bool = False
    reason: str = ""

    def __post_init__(self):
        if (self.spill_bytes or self.serialised) and not self.reason:
            raise ValueError(f"Candidate: {self.name} is allowed spills or serialised wgmma - say why in `reason`.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ptxas said of one candidate's Mosaic kernels; the numbers are one a kernel."""

    registers: tuple[int, ...]
    spill_stores: tuple[int, ...]
    spill_loads: tuple[int, ...]
    serialised: tuple[str, ...]
    seconds: float
    log: str

    def faults(self, candidate: Candidate) -> list[str]:
        found = []
        if not self.registers:
            found.append("no Mosaic kernel was compiled")
        if (worst := max(self.spill_bytes, default=0)) > candidate.spill_bytes:
            found.append(f"{worst} bytes of spills, {candidate.spill_bytes} allowed")
        if self.serialised and not candidate.serialised:
            found.append(f"serialised wgmma: {self.serialised[0].strip()}")
        return found

    @property
    def spill_bytes(self) -> tuple[int, ...]:
        return tuple(max(pair) for pair in zip(self.spill_stores, self.spill_loads, strict=True))


def parse(log: str, seconds: float = 0.0) -> Report:
    """
    >>> parse("16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads").spill_bytes
    (8,)
    """
    spills = [(int(stores), int(loads)) for stores, loads in _SPILLED.findall(log)]
    return Report(
        registers=tuple(map(int, _REGISTERS.findall(log))),
        spill_stores=tuple(stores for stores, _ in spills),
        spill_loads=tuple(loads for _, loads in spills),
        serialised=tuple(line for line in log.splitlines() if _SERIALISED.search(line)),
        seconds=seconds,
        log=log,
    )


def lower(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """jax's Lowered, to be compiled for one H200."""
    sharding = NamedSharding(_mesh(), PartitionSpec())

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function, out_shardings=sharding).lower(*jax.tree.map(place, args))


def compile_candidate(candidate: Candidate, dump: Path | None = None) -> Report:
    start = time.perf_counter()
    log: list[str] = []
    with _dumped_to(dump and dump / candidate.name):
        lowered = lower(candidate.function, candidate.args)
        try:
            with everything_printed(log):
                lowered.compile()
        except Exception as error:
            raise RuntimeError(f"{candidate.name}: ptxas or XLA refused it:\n{''.join(log)[-4000:]}") from error
    if dump:  # the logs went there
        log = [path.read_text() for path in sorted((dump / candidate.name).glob("*.ptxas"))]
    return parse("".join(log), time.perf_counter() - start)


@functools.cache
def _mesh() -> Mesh:
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # `ptxas -v`, on stdout
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc("1x1x1", platform="cuda", target_config=H200_TARGET, topology="1x1x1")
    return Mesh(np.array(topology.devices[:1]), ("aot",))


@contextlib.contextmanager
def _dumped_to(folder: Path | None) -> Iterator[None]:
    """Mosaic reads these variables anew at every compilation."""
    if folder is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.update(MOSAIC_GPU_DUMP_TO=str(folder.resolve()), MOSAIC_GPU_DUMP_SASS="1")
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"], os.environ["MOSAIC_GPU_DUMP_SASS"]


@contextlib.contextmanager
def everything_printed(into: list[str]) -> Iterator[None]:
    """The log comes from C++, so the file descriptors themselves are what has to be caught."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+b") as file, contextlib.ExitStack() as undo:
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            undo.callback(os.close, saved)
            undo.callback(os.dup2, saved, descriptor)
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            undo.close()
            file.seek(0)
            into.append(file.read().decode(errors="replace"))


def check(candidates: Iterable[Candidate], dump: Path | None = None) -> int:
    """Compiles them all, prints a line each, and counts those with faults."""
    failed = 0
    for candidate in candidates:
        try:
            report = compile_candidate(candidate, dump)
        except Exception as error:
            failed += 1
            print(f"FAIL {candidate.name}: {type(error).__name__}: {error}", flush=True)
            continue
        faults = report.faults(candidate)
        failed += bool(faults)
        print(
            f"{'FAIL' if faults else 'ok  '} {candidate.name}: registers {_list(report.registers)},"
            f" spilled bytes {_list(report.spill_bytes)}, {len(report.serialised)} wgmma waits, {report.seconds:.1f} s"
            + "".join(f"\n     {fault}" for fault in faults)
            + (f"\n     allowed: {candidate.reason}" if candidate.reason and not faults else ""),
            flush=True,
        )
    return failed


def _list(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers)) or "-"


def shape_struct(text: str) -> jax.ShapeDtypeStruct:
    """
    >>> shape_struct("bf16[2,64]")
    ShapeDtypeStruct(shape=(2, 64), dtype=bfloat16)
    """
    short = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "pred": "bool"}
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if match is None:
        raise ValueError(f"shape_struct: {text!r} is not dtype[sizes] - write for example 'bf16[2,512,64]'.")
    name, sizes = match.groups()
    name = short.get(name) or re.sub(r"^([fsu])(?=\d+$)", lambda m: {"f": "float", "s": "int", "u": "uint"}[m[1]], name)
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size), jnp.dtype(name))


def find(target: str, shapes: list[str]) -> list[Candidate]:
    """The candidates that the command line names."""
    where, _, name = target.partition(":")
    path = Path(where).resolve()
    if where.endswith(".py") and path.is_relative_to(Path.cwd()):
        where = ".".join(path.relative_to(Path.cwd()).with_suffix("").parts)
    elif where.endswith(".py"):
        sys.path.insert(0, str(path.parent))
        where = path.stem
    module = importlib.import_module(where)
    found: Any = getattr(module, name)
    if shapes:
        return [Candidate(name=name, function=found, args=tuple(map(shape_struct, shapes)))]
    if callable(found):
        found = found()
    return [found] if isinstance(found, Candidate) else list(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="FILE.py:NAME or package.module:NAME")
    parser.add_argument("shapes", nargs="*", help="such as bf16[2,512,64]; where NAME is a function of arrays")
    parser.add_argument("--only", default="", metavar="PART", help="candidates whose name holds PART")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write SASS, PTX and logs there")
    options = parser.parse_args()
    candidates = [c for c in find(options.target, options.shapes) if options.only in c.name]
    if not candidates:
        parser.error(f"no candidate's name holds {options.only!r}")
    return bool(check(candidates, options.dump))


if __name__ == "__main__":
    sys.exit(main())
