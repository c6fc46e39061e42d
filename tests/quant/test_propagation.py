"""Weights corrected for the error before them, against least squares on the inputs themselves in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.gptq import gptq_codes
from quant.observe import Statistics, observe
from quant.propagation import propagated
from quant.recipe import Recipe
from quant.rtn import nearest_codes
from tests.quant import oracle
from tests.tolerance import assert_close

K, N, TOKENS = 100, 12, 400  # the sizes of tests/quant/test_gptq.py, which makes the same programs
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((K, N))
# Correlated inputs, of which every seventh is always 0, and what they lost.
X = RNG.standard_normal((TOKENS, K)) @ RNG.standard_normal((K, K)) * (np.arange(K) % 7 > 0)
DENSE = X + 0.4 * RNG.standard_normal((TOKENS, K)) @ RNG.standard_normal((K, K))
RECIPE = Recipe(group=32, symmetric=False)


def error(q, share, damping):
    """E of quant/propagation.py, written out."""
    squares = (X**2).sum(axis=0)
    c = damping * squares[squares > 0].mean()
    return (((X + share * (DENSE - X)) @ WEIGHT - X @ q) ** 2).sum() + c * ((WEIGHT - q) ** 2).sum()


@pytest.mark.parametrize("share, damping", [(0.5, 0.05), (1.0, 0.05), (1.0, 1e-6), (0.0, 0.05)])
def test_it_is_the_least_squares_of_what_the_dense_layer_gives(share, damping):
    want = oracle.propagated(WEIGHT, X, DENSE, share, damping)
    with jax.enable_x64(True):
        got = np.asarray(propagated(WEIGHT, observe(X, None, DENSE), share=share, damping=damping))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())
    np.testing.assert_array_equal(got[::7], WEIGHT[::7])
    assert share == 0 or np.abs(got - WEIGHT).max() > 0.05
    # The square is completed: what E of any other weight has more is the objective of methods, damping included.
    hessian = X.T @ X + np.diag(((X**2).sum(axis=0) == 0).astype(float))
    hessian += damping * np.diag(X.T @ X)[np.arange(K) % 7 > 0].mean() * np.eye(K)
    other = np.where((np.arange(K) % 7 > 0)[:, None], np.round(2 * WEIGHT) / 2, WEIGHT)
    more = oracle.objective(got, other, hessian).sum()
    np.testing.assert_allclose(error(other, share, damping) - error(got, share, damping), more, rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_precision_of_a_model(dtype):
    weight, x, dense = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (WEIGHT, X, DENSE))
    got = propagated(
        jnp.asarray(weight, dtype), observe(jnp.asarray(x, dtype), None, jnp.asarray(dense, dtype)), share=0.5
    )
    single = (a.astype(np.float32) for a in (weight, x, dense))
    assert got.dtype == jnp.float32
    assert_close(got, oracle.propagated(weight, x, dense, 0.5, 0.05), normal_equations(*single))


def normal_equations(weight, x, dense):
    """The same in float32, by the formula."""
    gram = x.T @ x
    live = np.diag(gram) > 0
    damped = gram + np.diag(~live) + np.float32(0.05) * np.diag(gram)[live].mean() * np.eye(K, dtype=np.float32)
    return weight + np.float32(0.5) * np.linalg.solve(damped, x.T @ (dense - x) @ weight)


def test_codes_for_corrected_weights_are_nearer_to_what_the_dense_layer_gives():
    """Those of GPTQ, whose damping is the same; the nearest ones and GPTQ's without correction are further away."""
    with jax.enable_x64(True):
        seen = observe(X, None, DENSE)
        corrected = propagated(WEIGHT, seen, share=1.0, damping=0.01)
        values = [
            np.asarray(codes.dequantize())
            for codes in (
                gptq_codes(corrected, seen, RECIPE, damping=0.01, mse=False)[0],
                gptq_codes(WEIGHT, seen, RECIPE, damping=0.01, mse=False)[0],
                nearest_codes(WEIGHT, RECIPE),
            )
        ]
    best, without, nearest = (error(q, 1.0, 0.01) for q in values)
    assert best < without < nearest


def test_inputs_that_lost_nothing_and_statistics_without_a_factor_leave_the_weight():
    weight, x = jnp.asarray(WEIGHT, jnp.float32), jnp.asarray(X, jnp.float32)
    same = observe(x, None, x)
    lost = observe(x, None, jnp.asarray(DENSE, jnp.float32))
    unsolvable = dataclasses.replace(lost, gram=lost.gram.at[1, 2].set(jnp.nan).at[2, 1].set(jnp.nan))
    for seen in (same, unsolvable, observe(0 * x, None, x)):
        np.testing.assert_array_equal(propagated(weight, seen, share=0.5), weight)


@pytest.mark.slow
def test_over_a_mesh_and_for_experts_side_by_side():
    weight, x, dense = (jnp.asarray(a, jnp.float32) for a in (WEIGHT, X, DENSE))
    seen = observe(x, None, dense)
    want = oracle.propagated(WEIGHT, X, DENSE, 0.5, 0.05)
    plain = propagated(weight, seen, share=0.5)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    split = dataclasses.replace(seen, gram=jax.device_put(seen.gram, rows), drift=jax.device_put(seen.drift, rows))
    assert_close(propagated(weight, split, share=0.5), want, plain, "mesh")
    experts = jax.vmap(lambda w, s: propagated(w, s, share=0.5))
    twice = experts(jnp.stack([weight, 2 * weight]), jax.tree.map(lambda a: jnp.stack([a, a]), seen))
    assert_close(twice, np.stack([want, 2 * want]), np.stack([plain, 2 * plain]), "experts")


SEEN = Statistics.empty(K, drift=True)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(statistics=Statistics.empty(K)), "statistics without drift"),
        (
            dict(statistics=Statistics.empty(K + 1, drift=True)),
            r"a drift of shape \(101, 101\) .* must be \(100, 100\)",
        ),
        (dict(weight=jnp.ones((2, K, N))), r"got a stack of weights \(2, 100, 12\)"),
        (dict(weight=jnp.ones((K, N), "int32")), "got a weight of shape .* int32"),
        (dict(share=-0.1), "share=-0.1 - must be from 0"),
        (dict(share=float("nan")), "share=nan - must be from 0"),
        (dict(damping=float("inf")), "damping=inf - must be finite"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^propagated: .*{message}"):
        propagated(**{**dict(weight=jnp.ones((K, N)), statistics=SEEN, share=0.5), **change})
