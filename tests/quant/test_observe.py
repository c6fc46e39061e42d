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
DENSE = X + 0.3 * RNG.standard_normal(X.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_any_dtype_are_float32(dtype):
    x, dense = jnp.asarray(X, dtype), jnp.asarray(DENSE, dtype)
    seen = observe(x, None, dense)
    rows, lost = (np.asarray(a, np.float64).reshape(-1, 20) for a in (x, dense))
    lost -= rows
    plain, plain_drift = np.zeros((2, 20, 20), np.float32)
    for row, moved in zip(rows.astype(np.float32), lost.astype(np.float32), strict=True):
        plain += np.outer(row, row)
        plain_drift += np.outer(row, moved)
    assert_close(seen.gram, rows.T @ rows, plain)
    assert_close(seen.drift, rows.T @ lost, plain_drift)
    assert_close(seen.abs_sum, np.abs(rows).sum(axis=0), np.cumsum(np.abs(rows).astype(np.float32), axis=0)[-1])
    assert seen.gram.dtype == seen.abs_sum.dtype == seen.drift.dtype == jnp.float32 and observe(x).drift is None
    assert seen.count.item() == 150 and seen.count.dtype == jnp.int32


@pytest.mark.parametrize("padding", [0.0, 1e3, np.nan, np.inf])
def test_padding_is_never_counted(padding):
    given = (jnp.asarray(np.where(MASK[..., None], a, padding), jnp.float32) for a in (X, DENSE))
    seen = observe(next(given), jnp.asarray(MASK), next(given))
    alone = observe(jnp.asarray(X[MASK], jnp.float32), None, jnp.asarray(DENSE[MASK], jnp.float32))
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
    assert seen.count == MASK.sum()


def test_batches_add_up():
    with jax.enable_x64(True):
        parts = [observe(*part) for part in zip(X, MASK, DENSE, strict=True)]
        total = sum(parts, Statistics.empty(20, drift=True))
        whole = observe(X, MASK, DENSE)
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
        divided = observe(X, None, DENSE).divided(jnp.asarray(scale))
        again = observe(X / scale, None, DENSE / scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), divided, again)


@pytest.mark.parametrize(
    "x, mask, reference, message",
    [
        (jnp.ones(()), None, None, r"got x of shape \(\)"),
        (jnp.ones((3, 0)), None, None, r"got x of shape \(3, 0\)"),
        (jnp.ones((3, 4), "int32"), None, None, "got x of shape .* int32"),
        (jnp.ones((3, 4)), jnp.ones((3, 4), bool), None, r"got a mask of shape \(3, 4\) .* must be bool \(3,\)"),
        (jnp.ones((3, 4)), jnp.ones(3), None, "got a mask of shape .* float32"),
        (jnp.ones((3, 4)), None, jnp.ones((4, 3)), r"got a reference of shape \(4, 3\) .* of shape \(3, 4\)"),
        (jnp.ones((3, 4)), None, jnp.ones((3, 4), "int32"), "got a reference of shape .* int32"),
    ],
)
def test_what_makes_no_sense_is_refused(x, mask, reference, message):
    with pytest.raises(ValueError, match=f"^observe: {message}"):
        observe(x, mask, reference)
