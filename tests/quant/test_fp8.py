"""Fp8Tensor: its equation, its making, its product, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import Fp8Tensor, fp8_matmul
from pallas_kernels.fp8.spec import SCALINGS, w_block
from quant.formats import fp8 as files
from quant.fp8 import quantize_fp8
from quant.matmul import matmul
from tests.tolerance import assert_close

K, N = 200, 130


def weight(seed: int = 0, shape: tuple[int, ...] = (K, N)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def dense(tensor: Fp8Tensor) -> np.ndarray:
    """W in float64, from the docstring's equation."""
    rows, columns = w_block(tensor.scaling, (N, K))
    n, k = np.meshgrid(np.arange(N), np.arange(K), indexing="ij")
    codes, scales = (np.asarray(a).astype(np.float64) for a in (tensor.codes, tensor.scales))
    return (codes * scales[n // rows, k // columns]).T


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rounds_to_nearest_as_files_do(scaling):
    """Scales and codes are the NumPy writer's, but for the last bit of a scale and the ties that it moves."""
    w = weight()
    tensor = quantize_fp8(w, scaling).validate()
    assert tensor.shape == (K, N) and tensor.codes.shape == (N, K)
    block = w_block(scaling, (N, K))
    scales = files.amax_scales(w.T, block)
    np.testing.assert_allclose(np.asarray(tensor.scales), scales, rtol=2.0**-22)  # two roundings of float32
    codes = files.quantize(w.T, scales, block=block)
    assert (np.asarray(tensor.codes) != codes).mean() < 1e-3
    half_a_step = np.maximum(np.abs(w) * 2.0**-4, scales.max() * 2.0**-10)
    assert (np.abs(dense(tensor) - w) <= half_a_step * (1 + 2.0**-20)).all()
    np.testing.assert_array_equal(np.asarray(tensor.dequantize()), dense(tensor).astype(np.float32))


def test_a_stack_is_its_layers():
    w = weight(shape=(2, K, N))
    stack = quantize_fp8(w)
    for layer in range(2):
        one = jax.tree.map(lambda a, layer=layer: a[layer], stack)
        np.testing.assert_array_equal(np.asarray(one.codes).view(np.uint8), _bits(quantize_fp8(w[layer])))


def _bits(tensor: Fp8Tensor) -> np.ndarray:
    return np.asarray(tensor.codes).view(np.uint8)


def test_the_product_of_a_linear():
    """`quant.matmul` takes it; errors are those of rounding x, and derivatives those of the dense weight."""
    tensor = quantize_fp8(weight())
    x = np.random.default_rng(1).standard_normal((3, 4, K)).astype(np.float32)
    bias = np.arange(N, dtype=np.float32)
    y, pull = jax.vjp(lambda x, b: matmul(x, tensor, b), jnp.asarray(x), jnp.asarray(bias))
    want = x.astype(np.float64) @ dense(tensor) + bias
    # Rounding x moves each of the K terms by 2^-4 of its size at most.
    slack = np.abs(x).astype(np.float64) @ np.abs(dense(tensor)) * 2.0**-4 + 1e-3
    assert (np.abs(np.asarray(y) - want) <= slack).all() and y.shape == (3, 4, N)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    dx, db = pull(jnp.asarray(dy))
    assert_close(dx, dy @ dense(tensor).T, dy @ dense(tensor).astype(np.float32).T, "dx")
    assert_close(db, dy.astype(np.float64).sum((0, 1)), dy.sum((0, 1)), "db")


def test_a_dense_weight_is_rounded_now_and_has_a_slope():
    w, x = jnp.asarray(weight()), jnp.asarray(weight(1, (5, K)))
    np.testing.assert_array_equal(np.asarray(fp8_matmul(x, w)), np.asarray(fp8_matmul(x, quantize_fp8(w))))
    dw = jax.grad(lambda w: fp8_matmul(x, w).sum())(w)
    ones = np.ones((5, N), np.float32)
    assert_close(dw, np.asarray(x, np.float64).T @ ones, np.asarray(x).T @ ones, "dw")


def test_scales_keep_their_dtype_and_are_widened_in_products():
    tensor = quantize_fp8(weight())
    narrow = Fp8Tensor(
        codes=tensor.codes, scales=tensor.scales.astype("bfloat16"), shape=tensor.shape, scaling="block"
    ).validate()
    wide = Fp8Tensor(codes=tensor.codes, scales=narrow.scales.astype("float32"), shape=tensor.shape, scaling="block")
    x = jnp.asarray(weight(1, (5, K)))
    np.testing.assert_array_equal(np.asarray(fp8_matmul(x, narrow)), np.asarray(fp8_matmul(x, wide)))


def test_refused():
    tensor, x = quantize_fp8(weight()), jnp.ones((2, K))
    with pytest.raises(ValueError, match="codes of shape.*needs"):
        Fp8Tensor(codes=tensor.codes.T, scales=tensor.scales, shape=(K, N), scaling="block").validate()
    with pytest.raises(ValueError, match="scales of shape.*scaling='row'"):
        Fp8Tensor(codes=tensor.codes, scales=tensor.scales, shape=(K, N), scaling="row").validate()
    with pytest.raises(ValueError, match="scales are not all finite"):
        Fp8Tensor(codes=tensor.codes, scales=tensor.scales.at[0].set(jnp.nan), shape=(K, N), scaling="block").validate()
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_fp8(jnp.full((2, 2), jnp.inf))
    with pytest.raises(ValueError, match="floating"):
        quantize_fp8(jnp.ones((2, 2), "int32"))
    with pytest.raises(ValueError, match="scaling='channel'"):
        quantize_fp8(weight(), "channel")
    with pytest.raises(ValueError, match="leave it out"):
        fp8_matmul(x, tensor, scaling="row")
    with pytest.raises(ValueError, match="last dim must be the 200 rows"):
        fp8_matmul(x[:, :5], tensor)
    with pytest.raises(ValueError, match="bias of shape"):
        fp8_matmul(x, tensor, bias=jnp.ones(3))
    with pytest.raises(ValueError, match="dtype='float16'"):
        fp8_matmul(x.astype("float16"), tensor)
