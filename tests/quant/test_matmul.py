"""The one product: plain and packed weights, batch dims, bias, activation order; what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import current_device
from pallas_kernels.w4a16.api import IMPLEMENTATIONS
from pallas_kernels.w4a16.spec import make_spec
from quant.matmul import matmul, w4a16_matmul
from quant.tensor import Int4Tensor
from tests.quant import oracle
from tests.tolerance import assert_close

RNG = np.random.default_rng(0)
K, N, GROUP = 200, 70, 64
CODES = RNG.integers(0, 16, (K, N), dtype=np.uint8)
SCALES = RNG.uniform(0.01, 0.02, (4, N)).astype(jnp.bfloat16)
ZEROS = RNG.integers(0, 16, (4, N), dtype=np.uint8)
G_IDX = RNG.permutation(np.arange(K) // GROUP)
BIAS = RNG.standard_normal(N).astype(np.float32)
PLAIN = Int4Tensor.from_codes(CODES, SCALES, ZEROS, group=GROUP)
ORDERED = Int4Tensor.from_codes(CODES, SCALES, ZEROS, group=GROUP, g_idx=G_IDX)


def check(y, x, w, bias=None):
    truth, plain = (oracle.product(x.reshape(-1, K), w, precision) for precision in (None, x.dtype))
    if bias is not None:
        truth, plain = truth + bias.astype(x.dtype).astype(float), plain + bias.astype(x.dtype)
    assert y.dtype == x.dtype
    assert_close(y, truth.reshape(y.shape), plain.reshape(y.shape))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_batch_dims(batch, dtype):
    x = RNG.standard_normal((*batch, K)).astype(jnp.dtype(dtype))
    y = w4a16_matmul(x, PLAIN)
    assert y.shape == (*batch, N)
    if y.size:
        check(y, x, oracle.weight(CODES, SCALES, ZEROS, GROUP))


@pytest.mark.parametrize("weight", [PLAIN, ORDERED, jnp.asarray(PLAIN.dequantize())], ids=["plain", "ordered", "dense"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_weight_is_a_weight_whatever_its_type(weight, dtype):
    """With bias, under jit, and by gradient: the same call for the three of them."""
    x = RNG.standard_normal((2, 3, K)).astype(jnp.dtype(dtype))
    dy = RNG.standard_normal((2, 3, N)).astype(jnp.dtype(dtype))

    @jax.jit
    def both(x, weight, bias):
        y, pull = jax.vjp(lambda x, bias: matmul(x, weight, bias), x, bias)
        return y, *pull(jnp.asarray(dy))

    y, dx, dbias = both(x, weight, jnp.asarray(BIAS))
    w = np.asarray(weight, float) if isinstance(weight, jax.Array) else np.asarray(weight.dequantize(), float)
    check(y, x, w, BIAS)
    flat = dy.reshape(-1, N)
    summed = sum(flat, np.zeros(N, x.dtype))
    assert_close(dx.reshape(-1, K), oracle.product(flat, w.T), oracle.product(flat, w.T, x.dtype))
    assert_close(dbias, flat.astype(float).sum(0), summed)


def test_activation_order_is_the_formula():
    w = np.stack([(CODES[k] - ZEROS[r].astype(float)) * SCALES[r].astype(float) for k, r in enumerate(G_IDX)])
    x = RNG.standard_normal((5, K)).astype(np.float32)
    check(w4a16_matmul(x, ORDERED), x, w)


def test_a_numpy_array_is_an_array():
    x = RNG.standard_normal((5, K)).astype(np.float32)
    check(w4a16_matmul(x, jax.tree.map(np.asarray, ORDERED), bias=BIAS), x, np.asarray(ORDERED.dequantize()), BIAS)


def test_activations_of_1e4_do_not_overflow():
    """All of one sign, so that the sums reach 1e4 * K * 7 * 6e4 = 1e12."""
    codes, scales = np.full((256, 64), 15, np.uint8), np.full((4, 64), 6e4, np.float32).astype(jnp.bfloat16)
    w = Int4Tensor.from_codes(codes, scales, group=64)
    x = np.full((3, 256), 1e4, jnp.bfloat16)
    truth = oracle.product(x, oracle.weight(codes, scales, None, 64))
    assert_close(w4a16_matmul(x, w), truth, truth.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": np.ones((3, K + 1), np.float32)}, r"x of shape \(3, 201\) for a weight of shape \(200, 70\)"),
        ({"x": np.float32(1)}, r"x of shape \(\)"),
        ({"x": np.ones((3, K), np.int32)}, "dtype='int32' - must be one of"),
        ({"bias": np.ones((1, N), np.float32)}, r"bias of shape \(1, 70\) .* must be \(70,\)"),
        ({"w": dataclasses.replace(PLAIN, shape=(K, 200)), "bias": None}, r"words of shape \(2, 4, 8, 64\)"),
        ({"implementation": "xl"}, "unknown name='xl'"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    call = {"x": np.ones((3, K), np.float32), "w": PLAIN, "bias": BIAS}
    w4a16_matmul(**call)
    with pytest.raises(ValueError, match=f"^w4a16_matmul: .*{message}"):
        w4a16_matmul(**(call | changes))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def test_an_implementation_by_name(implementation):
    x = RNG.standard_normal((5, K)).astype(jnp.bfloat16)
    spec = make_spec(x, PLAIN.words, PLAIN.scales, PLAIN.zeros, shape=PLAIN.shape, group=PLAIN.group)
    if (reason := implementation.why_not(spec, current_device())) is not None:
        pytest.skip(reason)
    check(w4a16_matmul(x, PLAIN, implementation=implementation.name), x, oracle.weight(CODES, SCALES, ZEROS, GROUP))


def test_operands_that_were_turned_over_are_summed_in_float32():
    """XLA's CPU backend sums bfloat16 products in bfloat16 where it has turned their first operand over, as it does
    with the result of a gather (jaxlib 0.11.2: 9 times the error of a dense product)."""
    order, columns = RNG.permutation(K), RNG.permutation(N)
    x, dy = RNG.standard_normal((6, K)).astype(jnp.bfloat16), RNG.standard_normal((N, 6)).astype(jnp.bfloat16)

    @jax.jit
    def gathered(x, dy):
        y, pull = jax.vjp(lambda x: matmul(x, PLAIN), x[:, order])
        return y, pull(dy[columns].T)[0]

    w = np.asarray(PLAIN.dequantize(), float)
    y, dx = gathered(x, dy)
    check(y, x[:, order], w)
    turned = dy[columns].T
    assert_close(dx, oracle.product(turned, w.T), oracle.product(turned, w.T, dx.dtype))
