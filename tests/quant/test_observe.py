"""Statistics of inputs against float64, whatever the padding holds and however the tokens come in batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.observe import Statistics, observe
from tests.tolerance import assert_close

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 50, 20)) * np.exp(2 * RNG.standard_normal(20)) + 1
MASK = RNG.random((3, 50)) < 0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_any_dtype_are_float32(dtype):
    x = jnp.asarray(X, dtype)
    seen = observe(x)
    rows = np.asarray(x, np.float64).reshape(-1, 20)
    plain = np.zeros((20, 20), np.float32)
    for row in rows.astype(np.float32):
        plain += np.outer(row, row)
    assert_close(seen.gram, rows.T @ rows, plain)
    assert_close(seen.abs_sum, np.abs(rows).sum(axis=0), np.cumsum(np.abs(rows).astype(np.float32), axis=0)[-1])
    assert seen.gram.dtype == seen.abs_sum.dtype == jnp.float32
    assert seen.count.item() == 150 and seen.count.dtype == jnp.int32


@pytest.mark.parametrize("padding", [0.0, 1e3, np.nan, np.inf])
def test_padding_is_never_counted(padding):
    seen = observe(jnp.asarray(np.where(MASK[..., None], X, padding), jnp.float32), jnp.asarray(MASK))
    alone = observe(jnp.asarray(X[MASK], jnp.float32))
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert seen.count == MASK.sum()


def test_batches_add_up():
    with jax.enable_x64(True):
        parts = [observe(x, m) for x, m in zip(X, MASK, strict=True)]
        total = sum(parts, Statistics.empty(20))
        whole = observe(X, MASK)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), total, whole)
    assert whole.gram.dtype == np.float64


def test_nothing_but_padding():
    seen = observe(jnp.asarray(X), jnp.zeros((3, 50), bool))
    jax.tree.map(np.testing.assert_array_equal, seen, Statistics.empty(20))


def test_under_jit_and_for_experts_side_by_side():
    x, mask = jnp.asarray(X, jnp.float32), jnp.asarray(MASK)
    experts = jax.jit(jax.vmap(observe))(x, mask)
    assert experts.gram.shape == (3, 20, 20) and experts.count.shape == (3,)
    for i in range(3):
        alone = observe(x[i], mask[i])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5), experts, alone)


def test_those_of_divided_inputs():
    scale = np.exp(RNG.standard_normal(20))
    with jax.enable_x64(True):
        divided, again = observe(X).divided(jnp.asarray(scale)), observe(X / scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), divided, again)


@pytest.mark.parametrize(
    "x, mask, message",
    [
        (jnp.ones(()), None, r"got x of shape \(\)"),
        (jnp.ones((3, 0)), None, r"got x of shape \(3, 0\)"),
        (jnp.ones((3, 4), "int32"), None, "got x of shape .* int32"),
        (jnp.ones((3, 4)), jnp.ones((3, 4), bool), r"got a mask of shape \(3, 4\) .* must be bool \(3,\)"),
        (jnp.ones((3, 4)), jnp.ones(3), "got a mask of shape .* float32"),
    ],
)
def test_what_makes_no_sense_is_refused(x, mask, message):
    with pytest.raises(ValueError, match=f"^observe: {message}"):
        observe(x, mask)
