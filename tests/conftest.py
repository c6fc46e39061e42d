"""Every test sees eight CPU devices and no silent rank promotion; equal programs are compiled once a session."""

import os
import tempfile

# Most of the suite's time is compilation, and LLVM's optimisations do not pay for themselves at these sizes. Read when
# the backend starts; the programs, and how XLA partitions them, stay the same.
_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from sharding.mesh import use_cpu_devices  # noqa: E402

# The interpreter of Hopper kernels runs every warpgroup of a call in a thread of the pool.
os.environ.setdefault("NPROC", "128")
use_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """A folder of this session's own cannot be stale."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        yield
        jax.config.update("jax_compilation_cache_dir", None)
