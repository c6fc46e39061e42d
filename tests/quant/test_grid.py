"""Grids of groups: ranges by least squares against trying them all, and codes in and out of their packed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from quant import grid
from quant.recipe import BITS, Recipe
from tests.quant import oracle

RNG = np.random.default_rng(0)
# Long tails, which a narrower range pays for.
WEIGHT = RNG.standard_t(3, (100, 6))
IMPORTANCE = np.exp(RNG.standard_normal(100))


@pytest.mark.parametrize("bits, symmetric", [(4, True), (3, False)])
def test_least_squares_find_the_best_of_all_ranges(bits, symmetric):
    recipe = Recipe(bits=bits, group=32, symmetric=symmetric)
    with jax.enable_x64(True):
        rows = grid.grouped(jnp.asarray(WEIGHT), 32)
        importance = grid.grouped(jnp.asarray(IMPORTANCE)[:, None], 32)[..., 0]
        scales, zeros, _ = map(np.asarray, grid.fit(rows, recipe, importance=importance))
        plain = np.asarray(grid.fit(rows, recipe)[0])
    for g in range(4):
        part = slice(g * 32, (g + 1) * 32)
        for n in range(6):
            scale, zero = oracle.shrunk(
                WEIGHT[part, n], IMPORTANCE[part], symmetric=symmetric, scale_dtype=jnp.bfloat16, bits=bits
            )
            assert (scales[g, n], zeros[g, n]) == (float(scale), zero)
    assert (scales < 0.95 * plain).any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_least_squares_lower_the_error_of_any_magnitude(symmetric, size):
    rows = grid.grouped(jnp.asarray(WEIGHT * size, jnp.float32), 32)
    recipe, errors = Recipe(group=32, symmetric=symmetric), []
    for importance in (None, jnp.ones(rows.shape[:2])):
        scale, zero = (a[:, None] for a in grid.fit(rows, recipe, importance)[:2])
        value = grid.decode(grid.encode(rows, scale, zero, recipe), scale, zero).reshape(-1, 6)[:100]
        errors.append(((np.asarray(value, float) / size - WEIGHT) ** 2).sum(axis=0))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all() and errors[1].sum() < 0.97 * errors[0].sum()


def without_casts(jaxpr, *args):
    """What the program computes where a compiler keeps excess precision: values are not rounded by casts."""
    values = dict(zip(jaxpr.jaxpr.invars, args, strict=True)) | dict(
        zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    )
    for eqn in jaxpr.jaxpr.eqns:
        read = [values[v] if isinstance(v, Var) else v.val for v in eqn.invars]
        if eqn.primitive.name == "jit":
            out = without_casts(eqn.params["jaxpr"], *read)
        elif eqn.primitive.name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
            out = [jnp.asarray(read[0], jnp.promote_types(eqn.params["new_dtype"], read[0].dtype))]
        else:
            out = eqn.primitive.bind(*read, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values |= zip(eqn.outvars, out, strict=True)
    return [values[v] for v in jaxpr.jaxpr.outvars]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_are_rounded_even_where_casts_there_and_back_are_taken_out(dtype):
    recipe = Recipe(group=32, symmetric=True, scale_dtype=dtype)
    high = jnp.asarray(RNG.uniform(0.01, 1, 50), jnp.float32)
    program = jax.make_jaxpr(functools.partial(grid.of_range, recipe=recipe))(-high / 2, high)
    step, _, exact = without_casts(program, -high / 2, high)
    np.testing.assert_array_equal(step, np.asarray(exact).astype(jnp.dtype(dtype)).astype(np.float32))
    assert (np.asarray(step) != exact).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_number_of_bits(bits, symmetric):
    recipe = Recipe(bits=bits, group=64, symmetric=symmetric)
    with jax.enable_x64(True):
        codes, _ = grid.nearest(jnp.asarray(WEIGHT), recipe)
    want, scales, zeros = oracle.rounded(WEIGHT, 64, symmetric=symmetric, scale_dtype=jnp.bfloat16, bits=bits)
    np.testing.assert_array_equal(codes.codes, want)
    value = (want - np.repeat(zeros.astype(float), 64, 0)[:100]) * np.repeat(scales.astype(float), 64, 0)[:100]
    np.testing.assert_array_equal(codes.dequantize(), value.astype(np.float32))
    assert codes.clipped(jnp.asarray(WEIGHT, jnp.float32)) == 0


def test_packed_codes_come_back():
    order = jnp.asarray(RNG.permutation(100), jnp.int32)
    weight = jnp.asarray(WEIGHT, jnp.float32)
    for recipe in (Recipe(group=32, symmetric=False), Recipe(group=None)):
        codes, _ = grid.nearest(weight, recipe, order=None if recipe.group is None else order)
        tensor = codes.pack().validate()
        again = grid.as_codes(tensor)
        assert (again.group, again.bits) == (codes.group, 4)
        jax.tree.map(np.testing.assert_array_equal, again, codes)
        np.testing.assert_array_equal(codes.dequantize(), tensor.dequantize())
    assert grid.as_codes(codes) is codes


def test_weights_beyond_their_grid_are_counted():
    weight, recipe = jnp.asarray(WEIGHT, jnp.float32), Recipe(group=32, symmetric=False)
    codes, _ = grid.nearest(jnp.clip(weight, -1, 1), recipe)
    outside = np.mean(np.abs(WEIGHT) > 1 + 0.62 * 2 / 15)
    np.testing.assert_allclose(codes.clipped(weight), outside, atol=0.01)
    assert outside > 0.2
