"""Every test sees eight CPU devices and no silent rank promotion; equal programs are compiled once a session."""

import gc
import itertools
import os
import tempfile
from pathlib import Path

# Most of the suite's time is compilation, and LLVM's optimisations do not pay for themselves at these sizes; without
# the emitters that go through MLIR it is a quarter (2026-11-30, jaxlib 0.11.2: a training step 1.1 s of CPU for 5.3, an
# attention's gradient 0.2 for 0.9). Read when the backend starts; the programs, and how XLA partitions them, stay.
_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)

# Of xdist's processes and those that tests start: they inherit the environment, and with it what the first one found
# compiled. A folder of this session's own cannot be stale.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST}".strip()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import compilation_cache  # noqa: E402

from sharding.mesh import use_cpu_devices  # noqa: E402

# The interpreter of Hopper kernels runs every warpgroup of a call in a thread of the pool.
os.environ.setdefault("NPROC", "128")
use_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")

_MAPS = Path("/proc/self/maps")
_DONE = itertools.count(1)


def pytest_collection_finish():
    """What has been imported stays: to go through it for garbage, again and again, was 6 % of the suite's time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _few_programs():
    """Every compiled program has mappings of memory, 65,530 of which Linux gives a process: an interpreted kernel takes
    some 440, and where none are left XLA's compiler ends the process (2026-11-30, jaxlib 0.11.2)."""
    yield
    if next(_DONE) % 16 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()  # programs that only garbage still knows have mappings too


@pytest.fixture
def compiled_anew(monkeypatch):
    """For what XLA says while it partitions a program: one from the cache is silent."""
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", lambda *_, **__: (None, None))


@pytest.fixture
def optimised(monkeypatch):
    """For training steps that run longer than they compile: LLVM's optimiser halves their time."""
    compile, options = jax.stages.Lowered.compile, {"xla_backend_optimization_level": "2"}
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: compile(self, compiler_options=options))
