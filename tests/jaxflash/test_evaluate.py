"""Perplexity against the float64 oracle, token by token; which window scores which token; the interval."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest

from jaxflash.evaluate import bootstrap, evaluate, windows
from jaxflash.language_model import LanguageModel
from jaxflash.quantize import quantize
from jaxflash.tokenizer import ByteTokenizer
from quant.recipe import Recipe
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import SHAPES, random_params
from tests.jaxflash.test_quantize import dequantized
from tests.tolerance import assert_close

TEXT = "To be, or not to be, that is: no"
CONFIG = dataclasses.replace(SHAPES["llama2"], vocab_size=ByteTokenizer().vocab_size, n_layers=1)


@functools.cache
def model():
    return LanguageModel(CONFIG, random_params(CONFIG), ByteTokenizer())


@functools.cache
def packed():
    return quantize(model(), Recipe(group=32))


def spans(n, context, stride):
    """(begin, end, first scored target) of every window, as the loop over a text that everyone writes."""
    out, scored = [], 0
    for begin in range(0, n, stride):
        end = min(begin + context, n)
        first = max(scored, begin + 1)
        if first < end:
            out.append((begin, end, first))
        scored = end
        if end == n:
            return out
    raise AssertionError


def oracle_nats(params, tokens, context, stride, dtype: Any = np.float64):
    total = count = 0
    for begin, end, first in spans(len(tokens), context, stride):
        rows = oracle.logits(params, CONFIG, tokens[begin:end].tolist(), dtype=dtype)
        chosen = np.arange(first, end)
        mask = np.zeros(end - begin, bool)
        mask[chosen - begin - 1] = True
        total += oracle.nats(rows, np.append(tokens[begin + 1 : end], 0), mask)
        count += len(chosen)
    return total, count


@pytest.mark.parametrize("n", [2, 7, 8, 9, 15, 16, 17, 30])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_are_those_of_the_plain_loop(n, stride):
    tokens = np.random.default_rng(n).integers(1, 99, n)
    rows, targets, mask = windows(tokens, context=8, stride=stride)
    expected = spans(n, 8, stride)
    assert len(rows) == len(expected)
    for row, target, scored, (begin, end, first) in zip(rows, targets, mask, expected, strict=True):
        np.testing.assert_array_equal(row[: end - begin], tokens[begin:end])
        assert not row[end - begin :].any()
        assert target[scored].tolist() == tokens[first:end].tolist()
        assert np.flatnonzero(scored).tolist() == list(range(first - begin - 1, end - begin - 1))
    if stride < 8:
        assert mask.sum() == n - 1  # every token but the first, once


@pytest.mark.parametrize("which", ["dense", "packed"])
@pytest.mark.parametrize("stride, batch_size", [(None, 8), (3, 3), (3, 4)])
def test_perplexity_is_the_oracles(which, stride, batch_size):
    given = model() if which == "dense" else packed()
    params = given.params if which == "dense" else dequantized(given.params)
    found = evaluate(given, TEXT, context=8, stride=stride, batch_size=batch_size)
    tokens = ByteTokenizer().encode(TEXT)
    (truth, count), (plain, _) = (oracle_nats(params, tokens, 8, stride or 8, t) for t in (np.float64, np.float32))
    assert (found.tokens, found.context, found.stride) == (count, 8, stride or 8)
    assert_close(np.float32(found.nats), truth, plain)
    assert found.value == math.exp(found.nats / found.tokens) and found.low <= found.value <= found.high
    assert f"{found.value:.3f}" in str(found)


def test_texts_ids_and_a_limit_mean_the_same_tokens():
    parts = [TEXT[:11], TEXT[11:20], TEXT[20:]]
    found = evaluate(model(), iter(parts), context=8, max_tokens=24)
    assert found == evaluate(model(), ByteTokenizer().encode(TEXT)[:24], context=8)
    assert found.windows == 3 and found.tokens == 21


def test_the_interval_of_two_windows_is_the_two():
    """Both drawn are the first in a quarter of cases, the second in another."""
    low, high = bootstrap(np.array([1.0, 6.0]), np.array([1, 3]))
    assert (low, high) == (math.exp(1), math.exp(2))
    assert bootstrap(np.array([2.0, 4.0, 6.0]), np.array([2, 4, 6])) == (math.e, math.e)
    assert all(map(math.isnan, bootstrap(np.array([1.0]), np.array([1]))))


def test_the_interval_is_that_of_the_normal_approximation_for_many_windows():
    """Of a mean of 400 windows: 1.96 standard errors, each end known to the bootstrap's own sampling error."""
    nats = np.random.default_rng(0).gamma(4, 0.5, 400)
    low, high = bootstrap(nats, np.ones(400, int))
    center, error = nats.mean(), nats.std() / 20
    # Standard error of a 2.5 % quantile of 10,000 normal draws: sqrt(.025 * .975 / 10,000) / density there.
    slack = 5 * math.sqrt(0.025 * 0.975 / 10_000) / 0.0584 * error
    skew = error / 20  # of order 1 / windows
    assert abs(math.log(low) - (center - 1.96 * error)) < slack + skew
    assert abs(math.log(high) - (center + 1.96 * error)) < slack + skew


@pytest.mark.parametrize(
    "data, arguments, message",
    [
        (TEXT, {"context": 1}, "context=1 - must be from 2"),
        (TEXT, {"context": 513}, "to the model's context=512"),
        (TEXT, {"context": 8, "stride": 9}, "stride=9 - must be from 1 to context=8"),
        (TEXT, {"context": 8, "stride": 0}, "stride=0"),
        (TEXT, {"max_tokens": 1}, "max_tokens=1"),
        (TEXT, {"batch_size": 0}, "batch_size=0"),
        ("a", {}, r"the text has 1 token\(s\)"),
        ([], {}, r"the text has 0 token\(s\)"),
        (np.array([1, 257]), {}, r"\[1, 257\], outside the vocabulary of 257"),
        (np.array([-1, 3]), {}, r"\[-1, 3\]"),
        (np.zeros((2, 3), int), {}, r"shape \(2, 3\)"),
    ],
)
def test_wrong_calls_are_told(data, arguments, message):
    with pytest.raises(ValueError, match=f"^evaluate: .*{message}"):
        evaluate(model(), data, **arguments)


def test_a_loss_that_is_not_finite_is_told_with_its_window():
    tokens = ByteTokenizer().encode(TEXT)
    table = model().params["table"].at[int(tokens[-1])].set(np.nan)
    broken = dataclasses.replace(model(), params={**model().params, "table": table})
    with pytest.raises(FloatingPointError, match="^evaluate: the loss of window 0 is nan"):
        evaluate(broken, tokens, context=8)
