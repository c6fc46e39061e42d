"""RMSNorm, Linear and the rotary embedding against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxflash.config import RopeScaling
from jaxflash.layers import Linear, RMSNorm, matmul_float32, rotary_frequencies, rotary_table, rotate
from tests.tolerance import assert_close


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def norm_of(size, eps=1e-5, param_dtype="float32"):
    return RMSNorm(size, eps=eps, axes=("norm",), param_dtype=param_dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_formula(dtype):
    norm, x = norm_of(24, eps=1e-3), 0.1 * normal(2, 3, 24, dtype=dtype)
    norm.scale[...] = normal(24)
    wide, scale = np.asarray(x, np.float64), np.asarray(norm.scale[...], np.float64)
    truth = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * scale
    assert norm(x).dtype == dtype
    # The same precision: one rounding to float32 inside, one to the dtype at the end.
    assert_close(norm(x), truth, truth.astype(np.float32).astype(dtype))


def test_rms_norm_is_blind_to_scale_and_safe_at_zero():
    norm, x = norm_of(16, eps=0.0), normal(1, 4, 16)
    np.testing.assert_array_equal(norm(x), norm(x * 2.0**40))  # powers of two are exact
    safe = norm_of(16)
    value, gradient = jax.value_and_grad(lambda x: safe(x).sum())(jnp.zeros((1, 1, 16)))
    assert value == 0 and np.isfinite(gradient).all()


def test_rms_norm_sums_in_float32():
    # 4096 equal squares of bfloat16: a running sum of that type would stop growing at 256.
    np.testing.assert_array_equal(norm_of(4096)(jnp.ones((1, 4096), "bfloat16")), 1)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear(dtype, use_bias):
    linear = Linear(
        48, 20, axes=("embed", "mlp"), std=0.5, use_bias=use_bias, dtype=dtype, param_dtype="float32", rngs=nnx.Rngs(1)
    )
    x = normal(3, 5, 48, dtype=dtype)
    w = np.asarray(linear.weight[...].astype(dtype), np.float64)
    bias = np.zeros(20)
    if linear.bias is not None:
        linear.bias[...] = normal(20)
        bias = np.asarray(linear.bias[...].astype(dtype), np.float64)
    truth = np.asarray(x, np.float64) @ w + bias
    product = (np.asarray(x, np.float32) @ w.astype(np.float32)).astype(dtype)
    assert linear(x).dtype == dtype
    assert_close(linear(x), truth, product + bias.astype(dtype))
    assert (linear.bias is not None) == use_bias


def test_linear_parameters():
    linear = Linear(
        200, 300, axes=("embed", "mlp"), std=0.25, use_bias=True, dtype="float32", param_dtype="bfloat16",
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert linear.bias is not None
    assert linear.weight[...].dtype == jnp.bfloat16 and linear.bias[...].dtype == jnp.bfloat16
    assert linear.weight.axes == ("embed", "mlp") and linear.bias.axes == ("mlp",)
    assert not linear.bias[...].any()
    w = np.asarray(linear.weight[...], np.float64)
    # Five standard errors of a sample's mean and standard deviation.
    assert abs(w.mean()) < 5 * 0.25 / w.size**0.5
    assert abs(w.std() - 0.25) < 5 * 0.25 / (2 * w.size) ** 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_gradients_sum_over_tokens_in_float32(dtype):
    # The bias gradient is 1 for each of 4096 tokens; summed in bfloat16 it would stop at 256.
    linear = Linear(
        4, 3, axes=("embed", "mlp"), std=0.5, use_bias=True, dtype=dtype, param_dtype="float32", rngs=nnx.Rngs(0)
    )
    gradient = jax.grad(lambda m: m(jnp.ones((4, 1024, 4), dtype)).astype(jnp.float32).sum())(linear)
    np.testing.assert_array_equal(gradient.bias[...], 4096)
    np.testing.assert_array_equal(gradient.weight[...], 4096)


def wavelength_scaled(frequency, scaling):
    """Llama 3.1's published rule, by wavelength and with three branches."""
    wavelength = 2 * math.pi / frequency
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_slowed = scaling.original_context / scaling.low_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_slowed:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling(factor=8.0), RopeScaling(factor=32.0), RopeScaling(factor=1.0),
     RopeScaling(factor=4.0, low_freq_factor=0.5, high_freq_factor=16.0, original_context=2048)],
)  # fmt: skip
def test_frequencies(scaling):
    head_dim, theta = 128, 500_000.0
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    truth = np.array(plain if scaling is None else [wavelength_scaled(f, scaling) for f in plain])
    if scaling is not None and scaling.factor > 1:
        branches = {f for f, p in zip(truth / plain, plain, strict=True) if f not in (1.0, 1 / scaling.factor)}
        assert len(branches) > 3 and truth[0] == plain[0] and truth[-1] == plain[-1] / scaling.factor
    # A float32 power: the exponent's half ulp times ln(theta) = 13, and a few roundings.
    np.testing.assert_allclose(rotary_frequencies(head_dim, theta, scaling), truth, rtol=16 * 2.0**-24)


def table(positions, head_dim=16, theta=100.0, scaling=None):
    return rotary_table(jnp.asarray(positions, jnp.int32)[None], head_dim, theta, scaling)


def test_rotation_formula():
    x, positions = normal(1, 6, 3, 16), [0, 1, 2, 7, 30, 511]
    got = rotate(x, *table(positions))
    wide = np.asarray(x, np.float64)
    angles = np.array(positions)[:, None] * 100.0 ** (-np.arange(8) / 8)
    pairs = wide[..., :8] + 1j * wide[..., 8:]
    turned = pairs * np.exp(1j * angles)[None, :, None, :]
    truth = np.concatenate([turned.real, turned.imag], -1)
    in_float32 = angles.astype(np.float32)
    cos, sin = np.cos(in_float32)[None, :, None], np.sin(in_float32)[None, :, None]
    a, b = np.split(np.asarray(x), 2, -1)
    assert_close(got, truth, np.concatenate([a * cos - b * sin, a * sin + b * cos], -1))


def test_position_zero_is_the_identity():
    x = normal(1, 1, 2, 16)
    np.testing.assert_array_equal(rotate(x, *table([0])), x)


def test_rotation_keeps_norms():
    x = normal(1, 64, 2, 16)
    before, after = (np.linalg.norm(np.asarray(y, np.float64), axis=-1) for y in (x, rotate(x, *table(range(64)))))
    np.testing.assert_allclose(after, before, rtol=8 * 2.0**-24)


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0, original_context=64)])
def test_scores_depend_on_the_distance_only(scaling):
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def score(m, n):
        a, b = (np.asarray(rotate(x, *table([p], scaling=scaling)), np.float64) for x, p in ((q, m), (k, n)))
        return float((a * b).sum())

    size = float(np.linalg.norm(q) * np.linalg.norm(k))
    for distance in (0, 1, 5, 40):
        scores = [score(n + distance, n) for n in (0, 3, 64, 200)]
        # An angle of up to 240 radians is known to half a float32 ulp, and both sides have one.
        assert max(scores) - min(scores) < 2 * 240 * 2.0**-24 * size
    assert abs(score(5, 0) - score(0, 5)) > 1e-3 * size  # the sign of the distance matters


def test_each_row_has_its_own_positions():
    x = normal(2, 3, 2, 16)
    positions = jnp.array([[0, 1, 2], [9, 4, 7]], jnp.int32)
    both = rotate(x, *rotary_table(positions, 16, 100.0, None))
    for row in range(2):
        alone = rotate(x[row : row + 1], *rotary_table(positions[row : row + 1], 16, 100.0, None))
        np.testing.assert_array_equal(both[row : row + 1], alone)


def test_rotation_keeps_the_dtype_and_turns_in_float32():
    x = normal(1, 8, 1, 16, dtype="bfloat16")
    got = rotate(x, *table(range(1000, 1008)))
    assert got.dtype == jnp.bfloat16
    wide = rotate(x.astype(jnp.float32), *table(range(1000, 1008)))
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


def test_matmul_float32_keeps_the_sum_and_rounds_the_cotangent():
    key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(key[0], (3, 5, 64), jnp.bfloat16)
    w = jax.random.normal(key[1], (64, 7), jnp.bfloat16)
    g = jax.random.normal(key[2], (3, 5, 7))
    out, pull = jax.vjp(matmul_float32, x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert out.dtype == jnp.float32
    # Products of bfloat16 are exact in float32; a chain of 64 sums of them rounds 64 times at most.
    bound = 64 * np.finfo(np.float32).eps * (np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)))
    assert (np.abs(np.asarray(out, np.float64) - exact) <= bound).all()
    dx, dw = pull(g)
    assert dx.dtype == dw.dtype == jnp.bfloat16
    rounded = np.asarray(g.astype(jnp.bfloat16), np.float64)
    for got, want in (
        (dx, rounded @ np.asarray(w, np.float64).T),
        (dw, np.einsum("abi,abo->io", np.asarray(x, np.float64), rounded)),
    ):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-7, atol=2**-7)
