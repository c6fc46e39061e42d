"""GPTQ against elimination in float64 without factors or blocks, its identities, and inputs that break others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.gptq import ORDERS, gptq, gptq_codes
from quant.matmul import w4a16_matmul
from quant.observe import Statistics, observe
from quant.recipe import Recipe
from quant.report import measure, objective
from quant.rtn import round_to_nearest
from tests.quant import oracle

K, N, TOKENS = 100, 12, 400
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((K, N))
# Correlated inputs, a few of them large.
X = RNG.standard_normal((TOKENS, K)) @ RNG.standard_normal((K, K)) * np.exp(RNG.standard_normal(K) / 2)
ASYMMETRIC = Recipe(group=32, symmetric=False)


def statistics(gram, tokens=TOKENS):
    gram = jnp.asarray(gram)
    return Statistics(gram=gram, abs_sum=jnp.sqrt(jnp.abs(jnp.diagonal(gram))), count=jnp.asarray(tokens, jnp.int32))


@functools.cache
def solved(order, recipe, block=128, mse=False):
    """(the codes, report, the weight they stand for) of float64 in NumPy arrays."""
    with jax.enable_x64(True):
        how = {"order": order, "block": block, "damping": 0.01, "mse": mse}
        codes, report = gptq_codes(jnp.asarray(WEIGHT), observe(X), recipe, **how)
        return jax.device_get((codes, report, codes.dequantize()))


def expected(order, recipe, mse):
    return oracle.gptq(
        WEIGHT,
        X.T @ X,
        recipe.group,
        symmetric=recipe.symmetric,
        scale_dtype=jnp.dtype(recipe.scale_dtype),
        damping=0.01,
        order=order,
        bits=recipe.bits,
        mse=mse,
    )


LONG = pytest.mark.slow


@pytest.mark.parametrize(
    "order, recipe, mse",
    [
        ("none", ASYMMETRIC, False),
        ("static", ASYMMETRIC, False),
        ("activation", ASYMMETRIC, False),
        ("static", ASYMMETRIC, True),
        pytest.param("none", Recipe(group=32), True, marks=LONG),
        pytest.param("none", Recipe(group=64, bits=8), False, marks=LONG),
        pytest.param("static", Recipe(group=None, bits=3, scale_dtype="float16"), False, marks=LONG),
        pytest.param("activation", Recipe(group=32, bits=2, symmetric=False, scale_dtype="float16"), True, marks=LONG),
    ],
    ids=str,
)
def test_it_is_elimination_of_one_row_after_another(order, recipe, mse):
    codes, report, value = solved(order, recipe, mse=mse)
    want, scales, zeros, g_idx, q, squares, hessian = expected(order, recipe, mse)
    assert report.fallback == 0 and report.damping == 0.01
    rows = np.arange(K) if codes.order is None else codes.order
    np.testing.assert_array_equal(codes.codes, want[rows])
    np.testing.assert_array_equal(codes.scales, scales)
    np.testing.assert_array_equal(zeros if codes.zeros is None else codes.zeros, zeros)
    np.testing.assert_array_equal(g_idx[rows], np.arange(K) // (recipe.group or K))
    np.testing.assert_array_equal(value, q.astype(np.float32))
    # The identities: sum e^2 = tr(dW^T H dW) of the damped H, and the report's objective that of H.
    np.testing.assert_allclose(squares, oracle.objective(WEIGHT, q, hessian).sum(), rtol=1e-10)
    assert report.residual < 1e-10
    np.testing.assert_allclose(report.objective, oracle.objective(WEIGHT, q, X.T @ X).sum(), rtol=1e-10)
    # A lower bound of the condition number, and not a useless one.
    exact = np.linalg.cond(hessian)
    assert exact / K <= report.condition <= exact


@pytest.mark.parametrize(
    "order, block",
    [
        ("none", 1),
        ("none", 16),
        pytest.param("static", 16, marks=LONG),
        pytest.param("none", 64, marks=LONG),
        pytest.param("static", 1, marks=LONG),
        pytest.param("activation", 1, marks=LONG),
        pytest.param("activation", 64, marks=LONG),
    ],
)
def test_blocks_of_any_size_give_the_same_codes(order, block):
    """In groups smaller than the block, where published ones take scales that are out of date, and larger ones."""
    jax.tree.map(np.testing.assert_array_equal, solved(order, ASYMMETRIC, block)[0], solved(order, ASYMMETRIC)[0])


def test_scales_are_those_of_the_corrected_weights():
    """Inside a block too: AutoGPTQ and others take them from the weights as they were at its start."""
    scales = {order: np.asarray(solved(order, ASYMMETRIC)[0].scales, float) for order in ORDERS}
    original = oracle.rounded(WEIGHT, 32, symmetric=False, scale_dtype=jnp.bfloat16)[1].astype(float)
    np.testing.assert_array_equal(scales["static"], original)
    np.testing.assert_array_equal(scales["none"][0], original[0])
    assert (scales["none"][1:] != original[1:]).mean() > 0.5


IDENTITY = statistics(np.eye(K, dtype=np.float32))


@pytest.mark.parametrize("order, recipe", [*((order, ASYMMETRIC) for order in ORDERS), ("none", Recipe(group=32))])
def test_uncorrelated_inputs_give_the_nearest_codes_bit_for_bit(order, recipe):
    weight = jnp.asarray(WEIGHT, jnp.float32)
    got, report = gptq(weight, IDENTITY, recipe, order=order, mse=False)
    want = round_to_nearest(weight, recipe)
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(got, permutation=None), want)
    assert report.objective == report.rtn and (got.permutation is not None) == (order == "activation")
    assert order != "activation" or (got.permutation == np.arange(K)).all()


@pytest.mark.parametrize(
    "values, nearest, best, before, after", [(0.6, [1, 1], [1, 0], 0.8, 0.2), (0.3, [0, 0], [0, 1], 0.45, 0.25)]
)
def test_two_weights_by_hand(values, nearest, best, before, after):
    """H = [[2, 1], [1, 1]], and a third input that was always 0, whose weight of 7.5 makes the scale 1."""
    gram = np.zeros((K, K), np.float32)
    gram[:2, :2] = [[2, 1], [1, 1]]
    weight = jnp.zeros((K, N)).at[:2].set(values).at[2].set(7.5)
    recipe = Recipe(group=32)
    got, report = gptq(weight, statistics(gram), recipe, order="none", damping=0.0, mse=False)
    assert (got.dequantize()[:4] == np.array([*best, 7, 0])[:, None]).all()
    assert (round_to_nearest(weight, recipe).dequantize()[:4] == np.array([*nearest, 7, 0])[:, None]).all()
    np.testing.assert_allclose([report.rtn, report.objective], [N * before, N * after], rtol=1e-6)


def hostile():
    few = RNG.standard_normal((5, K))
    dead = RNG.standard_normal((TOKENS, K)) * (np.arange(K) % 3 > 0)
    twins = np.repeat(RNG.standard_normal((TOKENS, K // 2)), 2, axis=1)
    outlier = RNG.standard_normal((TOKENS, K)) * np.where(np.arange(K) == 7, 1e4, 1.0)
    constant = 50 + 1e-2 * RNG.standard_normal((TOKENS, K))
    return {
        "few": few,
        "one": few[:1],
        "zero": np.zeros((3, K)),
        "dead": dead,
        "twins": twins,
        "outlier": outlier,
        "constant": constant,
        "huge": X * 1e15,
        "tiny": X * 1e-15,
    }


HOSTILE = hostile()


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_never_worse_than_the_nearest_codes(name, order, damping):
    x, weight = HOSTILE[name], jnp.asarray(WEIGHT, jnp.float32)
    seen = observe(jnp.asarray(x, jnp.float32))
    tensor, report = gptq(weight, seen, ASYMMETRIC, order=order, damping=damping)
    tensor.validate()
    plain = round_to_nearest(weight, ASYMMETRIC).dequantize()
    gram = np.asarray(seen.gram, np.float64)
    costs, before = (oracle.objective(weight, q, gram) for q in (tensor.dequantize(), plain))
    # The two were compared in float32: sums of K products of K-term sums.
    unit = 2 * K * float(jnp.finfo(jnp.float32).eps)
    noise, noise_before = (
        unit * oracle.objective(np.abs(weight - np.asarray(q)), 0, np.abs(gram)) for q in (tensor.dequantize(), plain)
    )
    limit = before + noise + noise_before
    assert (costs <= limit).all() if order != "activation" else costs.sum() <= limit.sum()
    assert report.objective <= report.rtn
    assert abs(float(report.objective) - costs.sum()) <= noise.sum()
    assert abs(float(report.rtn) - before.sum()) <= noise_before.sum()
    assert report.damping >= damping and np.isfinite(report.damping) and report.tokens == len(x)


def test_damping_grows_until_there_is_a_factor():
    one = observe(jnp.asarray(HOSTILE["one"], jnp.float32))
    _, report = gptq(jnp.asarray(WEIGHT, jnp.float32), one, ASYMMETRIC, damping=0.0)
    assert 0 < report.damping < 0.1 and report.objective < report.rtn


def test_inputs_that_were_always_zero_are_rounded_to_nearest():
    """Published ones set their weights to 0, and a layer that saw only zeros to 0 as a whole."""
    weight = jnp.asarray(WEIGHT, jnp.float32)
    dead = np.arange(K) % 3 == 0
    plain = round_to_nearest(weight, ASYMMETRIC)
    tensor, _ = gptq(weight, observe(jnp.asarray(HOSTILE["dead"], jnp.float32)), ASYMMETRIC, mse=False)
    np.testing.assert_array_equal(tensor.dequantize()[dead], plain.dequantize()[dead])
    assert (tensor.dequantize()[~dead] != plain.dequantize()[~dead]).any()
    zeros, report = gptq(weight, observe(jnp.zeros((3, K))), ASYMMETRIC)
    np.testing.assert_array_equal(zeros.dequantize(), plain.dequantize())
    assert report.objective == 0 and np.isnan(report.condition)
    # And of the others none learns of it: as if H were the identity.
    gram = np.eye(K, dtype=np.float32)
    gram[2, 2] = 0
    tensor, _ = gptq(weight, statistics(gram), ASYMMETRIC, mse=False)
    np.testing.assert_array_equal(tensor.dequantize(), plain.dequantize())


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_of_one_sign(sign):
    """Their largest weight is kept where scales are symmetric, and zero, with its code 0 or 15, where they are not."""
    values = sign * jnp.abs(jnp.asarray(WEIGHT, jnp.float32)).at[32:64].add(3.0)
    for recipe in (Recipe(group=32), ASYMMETRIC):
        tensor, _ = gptq(values, IDENTITY, recipe, order="none", mse=False)
        _, scales, zeros = tensor.codes()
        steps = np.repeat(np.asarray(scales, float), 32, axis=0)[:K]
        assert (np.abs(tensor.dequantize() - np.asarray(values)) <= 0.62 * steps).all()
        np.testing.assert_allclose(
            np.abs(values[32:64]).max(axis=0) * (2 if zeros is None else 1) / 15, steps[32], rtol=2**-8
        )
        assert zeros is None or (zeros == (0 if sign > 0 else 15)).all()


@pytest.mark.parametrize("order", ["activation", *(pytest.param(order, marks=LONG) for order in ("none", "static"))])
def test_layers_side_by_side_are_each_alone(order):
    """Even with some of statistics that no inputs have, far from positive, NaN, infinite: these get the nearest codes,
    and say so. Outside of a transformation the last two are refused."""
    with jax.enable_x64(True):
        grams = np.stack([X.T @ X] * 4)
        for i, value in enumerate((-1e9, np.nan, np.inf), start=1):
            grams[i, 3, 5] = grams[i, 5, 3] = value
            grams[i, 3, 3] = grams[i, 5, 5] = 1.0
        layers = jax.vmap(statistics)(jnp.asarray(grams))
        solve = functools.partial(gptq_codes, recipe=ASYMMETRIC, order=order, damping=0.01, mse=False)
        codes, report = jax.device_get(jax.vmap(solve)(jnp.stack([jnp.asarray(WEIGHT)] * 4), layers))
        plain = round_to_nearest(jnp.asarray(WEIGHT), ASYMMETRIC).codes()[0]
    alone, lone, _ = solved(order, ASYMMETRIC)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), codes, alone)
    np.testing.assert_allclose(report.objective[0], lone.objective, rtol=1e-9)
    assert report.damping.tolist() == [0.01, *3 * [np.inf]] and report.fallback.tolist() == [0, N, N, N]
    np.testing.assert_array_equal(codes.codes[1:], np.stack([plain] * 3))
    assert report.as_dict()["damping"] == [0.01, None, None, None] and report.as_dict()["residual"][1:] == 3 * [None]


def test_a_permuted_weight_multiplies_as_it_reads():
    codes, _, value = solved("activation", ASYMMETRIC)
    tensor = jax.tree.map(jnp.asarray, codes).pack().validate()
    np.testing.assert_array_equal(tensor.dequantize(), value)
    np.testing.assert_array_equal(tensor.permutation, np.argsort(-np.diag(X.T @ X), kind="stable"))
    x = jnp.asarray(X[:3], jnp.float32)
    np.testing.assert_allclose(w4a16_matmul(x, tensor), x @ value, rtol=1e-4, atol=1e-3 * np.abs(X[:3]).max())
    assert solved("static", ASYMMETRIC)[0].order is None and solved("none", ASYMMETRIC)[0].order is None


@LONG
def test_a_gram_over_a_mesh():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    weight, seen = jnp.asarray(WEIGHT, jnp.float32), observe(jnp.asarray(X, jnp.float32))
    split = dataclasses.replace(seen, gram=jax.device_put(seen.gram, rows))
    (got, report), (want, alone) = (gptq(weight, s, ASYMMETRIC) for s in (split, seen))
    assert (got.dequantize() != want.dequantize()).mean() < 0.02
    np.testing.assert_allclose(report.objective, alone.objective, rtol=0.02)


def test_the_program_does_not_grow_with_the_weight():
    def lines(rows):
        shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 8), (rows, rows), (rows,)))
        weight, gram, abs_sum = shapes
        seen = Statistics(gram=gram, abs_sum=abs_sum, count=jax.ShapeDtypeStruct((), jnp.int32))
        return len(jax.jit(functools.partial(gptq, recipe=Recipe())).lower(weight, seen).as_text().splitlines())

    assert lines(1024) == lines(4096)


def test_a_report_of_the_nearest_codes():
    weight, seen = jnp.asarray(WEIGHT, jnp.float32), observe(jnp.asarray(X, jnp.float32))
    tensor = round_to_nearest(weight, ASYMMETRIC)
    report = measure(weight, tensor, seen)
    before = oracle.objective(WEIGHT, tensor.dequantize(), X.T @ X).sum()
    np.testing.assert_allclose([report.objective, report.rtn], before, rtol=1e-4)
    assert report.clipped == 0 and report.as_dict()["damping"] is None and report.as_dict()["tokens"] == TOKENS
    _, solved_report = gptq(weight, seen, ASYMMETRIC)
    np.testing.assert_allclose(solved_report.rtn, before, rtol=1e-4)
    np.testing.assert_allclose(objective(weight, weight, seen), 0)


GOOD = dict(weight=jnp.ones((K, N)), statistics=statistics(np.eye(K, dtype=np.float32)), recipe=ASYMMETRIC)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(recipe=Recipe(bits=3)), "bits=3 - packed weights have 4"),
        (dict(weight=jnp.ones(K)), r"got a weight of shape \(100,\)"),
        (dict(weight=jnp.ones((K, N), "int32")), "got a weight of shape .* int32"),
        (dict(weight=jnp.ones((K + 1, N))), r"got a gram of shape \(100, 100\) .* must be \(101, 101\)"),
        (dict(order="descending"), "order='descending' - must be one of none, static, activation"),
        (dict(block=0), "block=0"),
        (dict(damping=-1.0), "damping=-1.0"),
        (dict(damping=float("nan")), "damping=nan"),
        (dict(weight=jnp.ones((2, K, N))), r"got a stack of weights \(2, 100, 12\)"),
        (dict(weight=jnp.full((K, N), jnp.nan)), "the weight has NaN"),
        (dict(statistics=statistics(np.full((K, K), np.inf, np.float32))), "the gram has NaN or infinite"),
        (dict(weight=jnp.full((K, N), 1e-9), recipe=Recipe(group=32, scale_dtype="float16")), "Use bfloat16 scales"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^gptq: .*{message}"):
        gptq(**{**GOOD, **change})
