"""Lowering for CUDA without a GPU: what it accepts, and what only it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.device import H200
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import gpu_mesh, lower_for_cuda

plgpu: Any = mosaic_gpu
bf16 = jnp.bfloat16


def product(rows, *, k_major=True, dtype=bf16):
    """A kernel of A (rows, 64) by B (64, 64)."""

    def body(a_g, b_g, o_g, a, b, loaded):
        plgpu.copy_gmem_to_smem(a_g, a, loaded)
        plgpu.copy_gmem_to_smem(b_g, b, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc):
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if k_major else b)
            return acc[...]

        o_g[...] = pl.run_scoped(multiply, plgpu.ACC((rows, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((rows, 64), dtype), plgpu.SMEM((64, 64), dtype), plgpu.Barrier(num_arrivals=2)],
    )


def shapes(rows, dtype=bf16):
    return jax.ShapeDtypeStruct((rows, 64), dtype), jax.ShapeDtypeStruct((64, 64), dtype)


def test_kernels_become_custom_calls():
    text = lower_for_cuda(lambda a, b: product(64)(a, b) + product(64)(b, a), *shapes(64)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_what_the_interpreter_accepts_and_the_hardware_does_not():
    """wgmma wants 8-bit B along K."""
    e4m3 = jnp.float8_e4m3fn
    a, b = (jnp.ones(x.shape, x.dtype) for x in shapes(64, e4m3))
    np.testing.assert_array_equal(
        run_interpreted(product(64, k_major=False, dtype=e4m3), a, b), np.full((64, 64), 64.0)
    )
    lower_for_cuda(product(64, dtype=e4m3), *shapes(64, e4m3))
    with pytest.raises(Exception, match="(?i)transpose|major|layout"):
        lower_for_cuda(product(64, k_major=False, dtype=e4m3), *shapes(64, e4m3))


def test_too_much_shared_memory():
    with pytest.raises(ValueError, match="(?i)shared memory"):
        lower_for_cuda(product(1920), *shapes(1920))


def test_a_function_that_was_interpreted_is_lowered_anew():
    run = jax.jit(product(64))
    x, y = (jnp.ones(x.shape, x.dtype) for x in shapes(64))
    np.testing.assert_array_equal(run_interpreted(run, x, y), np.full((64, 64), 64.0))
    assert "mosaic_gpu" in lower_for_cuda(run, *shapes(64)).as_text()


def test_kernels_are_told_of_an_h200():
    with jax.sharding.use_abstract_mesh(gpu_mesh()):
        device = jax.sharding.get_abstract_mesh().abstract_device
    assert (device.device_kind, device.num_cores) == (H200.kind, 132)
