"""Round to nearest against its formula, and on the groups where published quantisers fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.recipe import Recipe
from quant.rtn import round_to_nearest
from tests.quant import oracle


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "K, group, symmetric, scale_dtype",
    [
        (128, 32, True, "bfloat16"),
        (100, 32, False, "bfloat16"),
        (100, 64, True, "float16"),
        (130, 128, False, "float16"),
        (128, 128, True, "bfloat16"),
        (50, 128, True, "bfloat16"),
        (70, None, False, "bfloat16"),
        (70, None, True, "float16"),
    ],
)
def test_codes_are_the_nearest(K, group, symmetric, scale_dtype):
    recipe = Recipe(group=group, symmetric=symmetric, scale_dtype=scale_dtype)
    w = normal(K, 21)
    tensor = round_to_nearest(w, recipe).validate()
    codes, scales, zeros = oracle.rounded(w, group, symmetric=symmetric, scale_dtype=jnp.dtype(scale_dtype))
    got_codes, got_scales, got_zeros = tensor.codes()
    # Float32 and float64 may round a scale or a code that lies between two of them to different sides.
    steps = np.repeat(scales.astype(float), K if group is None else group, axis=0)[:K]
    np.testing.assert_array_less(
        np.abs(np.asarray(got_scales, float) / scales.astype(float) - 1), jnp.finfo(scale_dtype).eps
    )
    assert (got_codes != codes).mean() < 0.01
    assert (got_zeros is None) == symmetric and (symmetric or (got_zeros != zeros).mean() < 0.01)
    # Half a step, and what rounding the scale moves the ends of 15 steps by.
    limit = (0.5 + 15 * float(jnp.finfo(scale_dtype).eps)) * steps
    assert (np.abs(np.asarray(tensor.dequantize(), float) - np.asarray(w, float)) <= limit).all()


def rounded(values, **recipe):
    return np.asarray(
        round_to_nearest(jnp.asarray(values, jnp.float32)[:, None], Recipe(group=32, **recipe)).dequantize()
    )


def test_a_symmetric_group_of_one_sign_keeps_its_largest():
    """AutoGPTQ takes max / 15 there, and clips the largest to 47 %."""
    got = rounded([0.1, 0.5, 1.0, 0.75])[:, 0]
    np.testing.assert_allclose(got, np.array([1, 4, 7, 6]) * float(jnp.bfloat16(2 / 15)), rtol=1e-6)
    np.testing.assert_array_equal(
        rounded([-0.1, -0.5, -1.0, -0.75])[:, 0], np.array([-1, -4, -7, -6]) * float(jnp.bfloat16(2 / 15))
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_an_asymmetric_group_of_one_sign_holds_zero(sign):
    """AutoAWQ's range lacks 0: 1, 1.5, 2, 1.75 all became 1, and a constant 1e-5."""
    values = np.array([1.0, 1.5, 2.0, 1.75])
    step = float(jnp.bfloat16(2 / 15))
    assert np.abs(rounded(sign * values, symmetric=False)[:, 0] - sign * values).max() <= 0.51 * step
    np.testing.assert_allclose(rounded([sign * 0.5] * 4, symmetric=False), sign * 0.5, rtol=2**-7)


@pytest.mark.parametrize("symmetric", [True, False])
def test_all_zero_groups_come_back_exactly(symmetric):
    w = normal(100, 20).at[32:64].set(0.0).at[:, 3].set(0.0)
    tensor = round_to_nearest(w, Recipe(group=32, symmetric=symmetric)).validate()
    got = np.asarray(tensor.dequantize())
    assert not got[32:64].any() and not got[:, 3].any() and got[:32, :3].any()
    assert np.isfinite(np.asarray(tensor.scales, np.float32)).all()


@pytest.mark.parametrize("zero", [None, 0, 5, 15])
def test_weights_on_the_grid_come_back_exactly(zero):
    """A group with both ends of its grid; symmetric: with a weight of 7.5 steps, which sets the step."""
    codes = np.random.default_rng(0).permutation(np.repeat(np.arange(16), 2)).astype(np.float32)[:, None]
    w = (codes - (8 if zero is None else zero)) * 0.25
    if zero is None:
        w = np.where(codes == 0, -7.5 * 0.25, w)
    got = np.asarray(round_to_nearest(w, Recipe(group=32, symmetric=zero is None)).dequantize())
    exact = (codes > 0) | (zero is not None)
    np.testing.assert_array_equal(got[exact], w[exact])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights(dtype):
    w = normal(64, 5, dtype=dtype)
    for a, b in zip(
        jax.tree.leaves(round_to_nearest(w, Recipe())),
        jax.tree.leaves(round_to_nearest(w.astype(jnp.float32), Recipe())),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 6e4, 1e30])
def test_any_magnitude_with_bfloat16_scales(size):
    w = normal(64, 5)
    for symmetric in (True, False):
        small, plain = (round_to_nearest(x, Recipe(symmetric=symmetric)) for x in (w * size, w))
        error = np.abs(np.asarray(small.validate().dequantize(), float) / size - np.asarray(w))
        assert error.max() <= 1.1 * np.abs(np.asarray(plain.dequantize(), float) - np.asarray(w)).max()


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_float16_scales_refuse_what_they_cannot_hold(size):
    with pytest.raises(ValueError, match="^round_to_nearest: scales between .* in float16 .* Use bfloat16"):
        round_to_nearest(normal(64, 5) * size, Recipe(scale_dtype="float16"))


def test_a_stack_is_its_layers():
    stack = normal(3, 100, 20)
    tensor = round_to_nearest(stack, Recipe(group=32, symmetric=False))
    assert tensor.shape == (100, 20)
    for i in range(3):
        alone = round_to_nearest(stack[i], Recipe(group=32, symmetric=False))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a, i=i: a[i], tensor), alone)


def test_under_jit_it_is_the_same():
    w = normal(64, 5)
    inside = jax.jit(round_to_nearest, static_argnums=1)(w, Recipe())
    jax.tree.map(np.testing.assert_array_equal, inside, round_to_nearest(w, Recipe()))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused(value, dtype):
    with pytest.raises(ValueError, match="^round_to_nearest: the weight has NaN or infinite entries"):
        round_to_nearest(normal(64, 5, dtype=dtype).at[3, 2].set(value), Recipe())


@pytest.mark.parametrize(
    "weight", [jnp.zeros(5), jnp.zeros((2, 2, 2, 2)), jnp.zeros((0, 5)), jnp.zeros((4, 4), "int32")]
)
def test_what_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match="^round_to_nearest: got a weight of shape"):
        round_to_nearest(weight, Recipe())


@pytest.mark.parametrize("fields", [{"bits": 5}, {"group": 16}, {"group": 0}, {"scale_dtype": "float32"}])
def test_recipes_that_nothing_serves_are_refused(fields):
    with pytest.raises(ValueError, match=f"^Recipe: {next(iter(fields))}="):
        Recipe(**fields)
