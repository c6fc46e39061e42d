"""FP8 weights: exact where a scale has 20 bits, clipped before the cast, blocks with tails."""

import ml_dtypes
import numpy as np
import pytest

from quant.formats import fp8
from tests.quant.formats import statement

ALL = np.arange(256, dtype=np.uint8).view(fp8.DTYPE)
FINITE = ALL[np.isfinite(ALL.astype(np.float32))]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_value_times_a_16_bit_scale_is_exact(dtype):
    scales = np.random.default_rng(0).uniform(1e-3, 2, (7, 1)).astype(dtype)
    values = np.repeat(FINITE[None], 7, axis=0)
    got = fp8.dequantize(values, scales, block=(1, values.shape[1]))
    assert got.dtype == np.float32
    assert np.array_equal(got.astype(np.float64), statement.fp8(values, scales, (1, values.shape[1])))


def test_a_float32_scale_is_rounded_once():
    scales = np.random.default_rng(1).uniform(1e-3, 2, (7, 1)).astype(np.float32)
    values = np.repeat(FINITE[None], 7, axis=0)
    truth = statement.fp8(values, scales, (1, values.shape[1]))
    assert np.array_equal(fp8.dequantize(values, scales, block=(1, values.shape[1])), truth.astype(np.float32))


def test_blocks_have_tails_and_rectangles_are_slices():
    """N=192, K=320 in blocks of 128: scales 2 x 3 (as a shard of a larger weight may be)."""
    rng = np.random.default_rng(2)
    values = rng.choice(FINITE, (192, 320))
    assert fp8.scale_shape((192, 320), fp8.BLOCK) == (2, 3)
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    whole = fp8.dequantize(values, scales, block=fp8.BLOCK)
    assert np.array_equal(whole, statement.fp8(values, scales, (128, 128)).astype(np.float32))
    part = fp8.dequantize(values[100:140, 250:300], scales, block=fp8.BLOCK, start=(100, 250))
    assert np.array_equal(part, whole[100:140, 250:300])


@pytest.mark.parametrize(
    "scales, block, expected",
    [
        ((), None, (192, 320)),
        ((1,), None, (192, 320)),
        ((1, 1), None, (192, 320)),
        ((192,), None, (1, 320)),
        ((192, 1), None, (1, 320)),
        ((2, 3), fp8.BLOCK, fp8.BLOCK),
        ((3, 2), fp8.BLOCK, None),
        ((2, 3), None, None),
        ((1, 320), None, None),
    ],
)
def test_shapes_say_what_shares_a_scale(scales, block, expected):
    assert fp8.scale_block((192, 320), scales, block) == expected
    if expected is not None:
        got = fp8.dequantize(np.ones((192, 320), fp8.DTYPE), np.full(scales, 0.5, np.float32), block=expected)
        assert got.shape == (192, 320) and (got == 0.5).all()


def test_casts_are_clipped():
    """464 rounds to 448 and 464.1 to NaN where nobody clips."""
    with np.errstate(invalid="ignore"):
        raw = np.array([448, 464, 464.1, 1e4], np.float32).astype(fp8.DTYPE).astype(np.float32)
    assert raw[:2].tolist() == [448, 448] and np.isnan(raw[2:]).all()
    weight = np.array([[448, 464, 464.1, 1e4, -1e4]], np.float32)
    got = fp8.quantize(weight, np.ones((1, 1), np.float32), block=(1, 5)).astype(np.float32)
    assert got.tolist() == [[448, 448, 448, 448, -448]]


@pytest.mark.parametrize("block", [(192, 320), (1, 320), fp8.BLOCK])
def test_quantised_by_its_own_scales(block):
    """The largest of a block is 448 of its scale; each value is the nearest that there is; zeros stay zeros."""
    weight = np.random.default_rng(3).normal(size=(192, 320)).astype(np.float32)
    weight[:128, 128:256] = 0
    scales = fp8.amax_scales(weight, block)
    assert scales.shape == fp8.scale_shape(weight.shape, block) and np.isfinite(scales).all()
    values = fp8.quantize(weight, scales, block=block)
    got = fp8.dequantize(values, scales, block=block)
    step = fp8.dequantize(np.ones(weight.shape, np.float32), scales, block=block)
    ratio, chosen = weight / step, values.astype(np.float32)
    nearest = np.abs(ratio[..., None] - FINITE.astype(np.float32)).min(axis=-1)
    assert np.array_equal(np.abs(ratio - chosen), nearest)
    assert (got[weight == 0] == 0).all() and np.abs(chosen).max() == 448
    assert np.array_equal(fp8.quantize(got, scales, block=block).view(np.uint8) & 127, values.view(np.uint8) & 127)


def test_weights_that_are_not_finite():
    with pytest.raises(ValueError, match="NaN or infinite entries"):
        fp8.quantize(np.array([[np.inf]], np.float32), np.ones((1, 1), np.float32), block=(1, 1))
