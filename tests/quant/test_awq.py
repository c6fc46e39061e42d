"""AWQ's searches, from second moments, against running the layer again for every candidate; folding by equality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.awq import awq_codes, awq_scales
from quant.fold import fold_scale, head_sources
from quant.gptq import gptq
from quant.matmul import matmul
from quant.observe import observe
from quant.recipe import Recipe
from quant.report import measure, objective
from quant.rtn import round_to_nearest
from tests.quant import oracle

K, TOKENS = 100, 300
RNG = np.random.default_rng(0)
# A few inputs are much larger than the others, as in language models; one is never used.
SIZES = np.exp(RNG.standard_normal(K)) * np.where(np.arange(K) % 25 == 3, 20.0, 1.0) * (np.arange(K) != 50)
X = RNG.standard_normal((TOKENS, K)) @ (np.eye(K) + 0.1 * RNG.standard_normal((K, K))) * SIZES
WEIGHTS = [RNG.standard_normal((K, 12)), 3 * RNG.standard_normal((K, 8))]
RECIPE = Recipe(group=32, symmetric=False)
GROUPS = [slice(i, i + 32) for i in range(0, K, 32)]


def rounded(w):
    codes, scales, zeros = oracle.rounded(w, 32, symmetric=False, scale_dtype=jnp.bfloat16)
    return oracle.weight(codes, scales, zeros, 32)


def candidates(x, live):
    """Of the formulas, feature by feature."""
    size = np.abs(x).mean(axis=0)
    share = np.concatenate(
        [np.abs(w) / np.repeat([np.abs(w[g]).max(0) for g in GROUPS], 32, 0)[:K] for w in WEIGHTS], 1
    )
    share = share.mean(axis=1)
    for share_too in (False, True):
        for i in range(20):
            s = np.where(live, size, 1) ** (i / 20) / (share ** (1 - i / 20) if share_too else 1)
            s = s / np.sqrt(s[live].max() * s[live].min())
            yield np.where(live, s, 1)


def test_the_scale_is_the_best_by_running_the_layer_again():
    live = np.arange(K) != 50
    tried = list(candidates(X, live))
    losses = np.array([[(((X / s) @ rounded(w * s[:, None]) - X @ w) ** 2).sum() for w in WEIGHTS] for s in tried])
    harmless = (losses <= losses[0]).all(axis=1)  # to each of the weights
    losses = np.where(harmless, losses.sum(axis=1), np.inf)
    with jax.enable_x64(True):
        got = np.asarray(awq_scales(WEIGHTS, observe(X), RECIPE))
    np.testing.assert_allclose(got, tried[int(np.argmin(losses))], rtol=1e-9)
    assert min(losses) < 0.6 * losses[0] and got[50] == 1
    np.testing.assert_allclose(got[live].max() * got[live].min(), 1, rtol=1e-9)


@pytest.mark.parametrize("symmetric", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranges_are_the_best_by_running_every_group_again(symmetric):
    """Each end on its own where zero may be any code. Columns that came out worse than nearest codes are those."""
    w, recipe = WEIGHTS[1], Recipe(group=32, symmetric=symmetric)
    kind = {"symmetric": symmetric, "scale_dtype": jnp.bfloat16}
    plain = oracle.weight(*oracle.rounded(w, 32, **kind), 32)
    with jax.enable_x64(True):
        codes, report = awq_codes(w, observe(X), recipe)
        got = np.asarray(codes.dequantize())
    best = np.empty_like(w)
    shares = [(1 - i / 20, 1 - j / 20) for i in range(10) for j in range(10) if i == j or not symmetric]
    for rows in GROUPS:
        x = X[:, rows]
        for n in range(w.shape[1]):
            part = w[rows, n]
            ends = np.array([min(part.min(), 0.0), max(part.max(), 0.0)])
            tried = []
            for share in shares:
                scale, zero = oracle.grid(ends * share, **kind)
                tried.append((oracle.code(part, scale, zero) - zero) * float(scale))
            best[rows, n] = tried[int(np.argmin([((x @ (q - part)) ** 2).sum() for q in tried]))]
    costs, before = ((X @ (q - w)) ** 2 for q in (best, plain))
    kept = costs.sum(axis=0) >= before.sum(axis=0)
    np.testing.assert_array_equal(got, np.where(kept, plain, best).astype(np.float32))
    assert report.fallback == kept.sum() and report.clipped > 0
    np.testing.assert_allclose(report.rtn, before.sum(), rtol=1e-9)
    np.testing.assert_allclose(report.objective, np.minimum(costs.sum(axis=0), before.sum(axis=0)).sum(), rtol=1e-9)
    assert report.objective < 0.9 * report.rtn


def test_ranges_of_hostile_inputs_are_no_worse_than_nearest_codes():
    """One token, none, twins, and inputs of which one is all; a group that lies on its grid stays there."""
    w = jnp.asarray(WEIGHTS[0], jnp.float32)
    twins, outlier = np.repeat(X[:, : K // 2], 2, axis=1), X * np.where(np.arange(K) == 7, 1e4, 1.0)
    for x in (X[:1], np.zeros((3, K)), twins, outlier, X * 1e12, X * 1e-12):
        codes, report = awq_codes(w, observe(jnp.asarray(x, jnp.float32)), RECIPE)
        codes.pack().validate()
        assert report.objective <= report.rtn
    on_grid = round_to_nearest(w, RECIPE).dequantize()
    codes, report = awq_codes(on_grid, SEEN, RECIPE)
    np.testing.assert_array_equal(codes.dequantize(), round_to_nearest(on_grid, RECIPE).dequantize())
    for weight, x in ((w.at[3, 2].set(jnp.nan), SEEN), (w, observe(jnp.full((3, K), jnp.inf)))):
        with pytest.raises(ValueError, match="^awq_codes: weight or gram have NaN"):
            awq_codes(weight, x, RECIPE)


FLOAT32 = [jnp.asarray(w, jnp.float32) for w in WEIGHTS]
SEEN = observe(jnp.asarray(X, jnp.float32))


def test_each_step_lowers_the_objective():
    """Rounding, then scaled, then ranges, then errors fed back: all report the objective of the layer itself."""
    w = FLOAT32[0]
    before = objective(w, round_to_nearest(w, RECIPE), SEEN)
    s = awq_scales(FLOAT32, SEEN, RECIPE)
    scaled, seen = w * s[:, None], SEEN.divided(s)
    plain, clipped = round_to_nearest(scaled, RECIPE), awq_codes(scaled, seen, RECIPE)[0]
    fed_back, report = gptq(scaled, seen, RECIPE)
    reports = [measure(scaled, tensor, seen, before) for tensor in (plain, clipped)]
    costs = [float(before), *(float(r.objective) for r in reports), float(report.objective)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.3 * costs[0]
    assert all(r.rtn == before for r in reports) and 0 == reports[0].clipped < reports[1].clipped
    # What the layer does with its new inputs is what the report says.
    for tensor, cost in zip((plain, clipped, fed_back), costs[1:], strict=True):
        y = (X / np.asarray(s, float)) @ np.asarray(tensor.dequantize(), float)
        np.testing.assert_allclose(((y - X @ np.asarray(w, float)) ** 2).sum(), cost, rtol=1e-3)


def test_no_scale_where_none_helps():
    """Equal inputs and weights of one size; and inputs that were never seen."""
    even = jnp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], (K, 12)), jnp.float32)
    ones = observe(jnp.asarray(np.random.default_rng(2).choice([-1.0, 1.0], (TOKENS, K)), jnp.float32))
    np.testing.assert_array_equal(awq_scales([even, even[:, :8]], ones, RECIPE), 1)
    np.testing.assert_array_equal(awq_scales(FLOAT32, observe(jnp.zeros((3, K))), RECIPE), 1)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_scales_do_not_depend_on_the_unit_of_inputs(size):
    seen = observe(jnp.asarray(X * size, jnp.float32))
    np.testing.assert_allclose(awq_scales(FLOAT32, seen, RECIPE), awq_scales(FLOAT32, SEEN, RECIPE), rtol=1e-4)


def test_one_token_makes_nothing_worse():
    seen = observe(jnp.asarray(X[:1], jnp.float32))
    s = awq_scales(FLOAT32, seen, RECIPE)
    assert np.isfinite(s).all() and (s > 0).all()
    before = sum(objective(w, round_to_nearest(w, RECIPE), seen) for w in FLOAT32)
    after = sum(objective(w * s[:, None], round_to_nearest(w * s[:, None], RECIPE), seen.divided(s)) for w in FLOAT32)
    assert after <= before * (1 + 1e-3)


HEADS, KV_HEADS, H = 10, 5, 10


def attention(x, norm, q, k, v, bias, out):
    """Causal grouped-query attention on normalised inputs, and its bias on values."""
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True)) * norm[None]
    T = len(x)
    q, k, v = (matmul(x, q).reshape(T, HEADS, H), matmul(x, k).reshape(T, KV_HEADS, H), matmul(x, v) + bias[None])
    k, v = (jnp.repeat(a.reshape(T, KV_HEADS, H), HEADS // KV_HEADS, axis=1) for a in (k, v))
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], jnp.einsum("tnh,snh->nts", q, k) / H**0.5, -jnp.inf)
    return matmul(jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v).reshape(T, HEADS * H), out)


def test_a_block_computes_what_it_did():
    """Before rounding, to 1e-6 in float32: norm before q, k and v; v with its bias before out, heads grouped; up."""
    f = lambda *shape: jnp.asarray(RNG.standard_normal(shape), jnp.float32)  # noqa: E731
    x, norm, bias = f(30, K), f(K), f(KV_HEADS * H)
    q, k, v, out = f(K, HEADS * H) / 10, f(K, KV_HEADS * H) / 10, f(K, KV_HEADS * H) / 10, f(HEADS * H, K) / 10
    before = attention(x, norm, q, k, v, bias, out)

    scale = awq_scales(FLOAT32, SEEN, RECIPE)
    folded_norm, (q, k, v) = fold_scale(scale, norm, [q, k, v])
    source = head_sources(HEADS, KV_HEADS, H)
    tied = awq_scales(FLOAT32, SEEN, RECIPE, source)
    np.testing.assert_array_equal(tied, np.asarray(tied).reshape(KV_HEADS, 2, H)[:, :1].repeat(2, 1).reshape(-1))
    assert np.ptp(np.log(tied)) > 1 and np.ptp(np.log(scale)) > 1
    (v, bias), out = fold_scale(tied, (v, bias), out, source)
    after = attention(x, folded_norm, q, k, v, bias, out)
    assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max()

    gate, up, down = f(K, K), f(K, K), f(K, 20)
    mlp = lambda up, down: matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)  # noqa: E731
    before = mlp(up, down)
    after = mlp(*fold_scale(scale, up, down))
    assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max()


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(ValueError, match="^head_sources: n_heads=9 of n_kv_heads=6"):
        head_sources(9, 6, 4)


@pytest.mark.parametrize(
    "producers, consumers, message",
    [
        (jnp.ones((7, K - 1)), jnp.ones((K, 3)), r"a producer of shape \(7, 99\) for a scale of 100 .* one column"),
        (jnp.ones(K), jnp.ones((K + 1, 3)), r"a consumer of shape \(101, 3\) for a scale of 100 .* one row"),
        (round_to_nearest(jnp.ones((7, K)), RECIPE), jnp.ones((K, 3)), "a producer is packed already"),
        (jnp.ones(K), [round_to_nearest(jnp.ones((K, 3)), RECIPE)], "a consumer is packed already"),
    ],
)
def test_folds_that_do_not_fit_are_refused(producers, consumers, message):
    with pytest.raises(ValueError, match=f"^fold_scale: {message}"):
        fold_scale(jnp.ones(K), producers, consumers)


def test_other_statistics_are_refused():
    with pytest.raises(ValueError, match=r"^awq_scales: got weights of shapes \[\(7, 3\)\] for statistics of 100"):
        awq_scales([jnp.ones((7, 3))], SEEN, RECIPE)
    with pytest.raises(ValueError, match=r"^awq_scales: .* at least one"):
        awq_scales([], SEEN, RECIPE)
    with pytest.raises(ValueError, match=r"^awq_scales: got source of shape \(3,\)"):
        awq_scales(FLOAT32, SEEN, RECIPE, jnp.zeros(3, "int32"))
    with pytest.raises(ValueError, match=r"^awq_codes: got a weight of shape \(7, 3\)"):
        awq_codes(jnp.ones((7, 3)), SEEN, RECIPE)
