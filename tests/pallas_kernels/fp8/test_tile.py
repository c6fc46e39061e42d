"""Rounding to 8 bits against the definition of the formats, on hostile values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import tile
from pallas_kernels.fp8.spec import E4M3, E5M2, LARGEST, scale_shape
from tests.pallas_kernels.fp8 import oracle

FORMATS = (E4M3, E5M2)
SHAPE = (70, 300)
BLOCKS = {"tensor": SHAPE, "row": (1, 300), "x": (1, 128), "w": (128, 128)}
quantize = jax.jit(tile.quantize, static_argnums=(1, 2))
dequantize = jax.jit(tile.dequantize, static_argnums=(2, 3))


@functools.cache
def hostile() -> np.ndarray:
    """Float32 of all sizes, rows of zeros, of one value, of subnormals, of the largest float32 there is."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(SHAPE) * np.exp(5 * rng.standard_normal(SHAPE))).astype(np.float32)
    x[3], x[4], x[5] = 0.0, 1e-40, 3.4e38
    x[6, :128], x[7, 200:] = 0.0, -0.0
    x[8, 1:], x[9] = 0.0, rng.choice([-3.0, 3.0], SHAPE[1])
    return x


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_is_the_nearest_code_and_saturates(dtype):
    table = oracle.grid(dtype)
    middles = (table[1:] + table[:-1]) / 2
    sizes = np.concatenate([table, middles, middles * (1 + 1e-6), [LARGEST[dtype] * 1.04, 1e30, np.inf]])
    values = np.concatenate([sizes, -sizes]).astype(np.float32)
    got = np.asarray(tile.cast(jnp.asarray(values), dtype)).astype(np.float64)
    np.testing.assert_array_equal(got, oracle.nearest(values.astype(np.float64), dtype))
    assert np.isnan(np.asarray(tile.cast(jnp.array([np.nan]), dtype)).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_finite_values_come_back_within_half_a_step(kind, dtype):
    x, block = hostile(), BLOCKS[kind]
    codes, scales = (np.asarray(a) for a in quantize(jnp.asarray(x), block, dtype))
    assert codes.dtype == jnp.dtype(dtype) and scales.shape == scale_shape(SHAPE, block)
    wide = codes.astype(np.float64)
    assert np.isfinite(wide).all() and np.isfinite(scales).all() and (scales > 0).all()
    by = oracle.expanded(scales, block, SHAPE)
    # The factor is rounded: an ulp of float32 may move a value across the middle of two codes.
    near = oracle.nearest(x.astype(np.float64) / by, dtype)
    slack = np.abs(x / by) * 2.0**-22
    assert (np.abs(wide - x / by) <= np.abs(near - x / by) + slack).all()
    largest = np.abs(codes.astype(np.float32)).max()
    assert largest == LARGEST[dtype]
    assert (wide[3] == 0).all()


def test_blocks_of_zeros_stay_zeros():
    codes, scales = quantize(jnp.zeros(SHAPE), (1, 128), E4M3)
    back = np.asarray(dequantize(codes, scales, (1, 128), "float32"))
    assert (back == 0).all() and (np.asarray(scales) == 1).all()


def test_dequantised_is_codes_times_scales():
    x = jnp.asarray(hostile())
    for block in BLOCKS.values():
        codes, scales = quantize(x, block, E4M3)
        want = oracle.values(np.asarray(codes), np.asarray(scales), block).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(dequantize(codes, scales, block, "float32")), want)


def test_nan_stays_nan():
    x = hostile().copy()
    x[10, 5] = np.nan
    codes, _ = quantize(jnp.asarray(x), (1, 128), E4M3)
    assert np.isnan(np.asarray(codes).astype(np.float32)[10, 5])
