"""Generated tokens against full forwards of the oracle, and what `sample` may and does draw."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from jaxflash.config import ModelConfig, Sampling
from jaxflash.generate import generate, generate_tokens, sample
from jaxflash.language_model import LanguageModel
from jaxflash.model import KVCache, abstract
from jaxflash.tokenizer import ByteTokenizer
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import SHAPES, random_params, small

module = importlib.import_module("jaxflash.generate")  # the package's own name for it is the function
NEW = 7
CONFIG = SHAPES["qwen2"]
PARAMS = random_params(CONFIG)
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(0, 37, n).tolist() for n in (1, 6, 9)]
GREEDY = Sampling(max_new_tokens=NEW)


def greedy_by_oracle(params, config, prompt, new):
    """One whole float64 forward a token; refuses a case whose two best tokens rounding could swap."""
    tokens = list(prompt)
    for _ in range(new):
        last = oracle.logits(params, config, tokens)[-1]
        second, first = np.sort(last)[-2:]
        assert first - second > 1e-4 * np.abs(last).max(), "a tie proves nothing: take other prompts"
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_equals_the_argmax_of_full_forwards(name):
    config, params = SHAPES[name], random_params(SHAPES[name])
    expected = [greedy_by_oracle(params, config, prompt, NEW) for prompt in PROMPTS]
    assert generate_tokens(config, params, PROMPTS, GREEDY) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS)


def test_a_row_does_not_depend_on_its_neighbours():
    together = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    assert generate_tokens(CONFIG, PARAMS, PROMPTS[::-1], GREEDY) == together[::-1]
    assert [generate_tokens(CONFIG, PARAMS, [prompt], GREEDY)[0] for prompt in PROMPTS] == together
    drawn = dataclasses.replace(GREEDY, temperature=1.0)
    first = generate_tokens(CONFIG, PARAMS, PROMPTS, drawn)[0]
    assert generate_tokens(CONFIG, PARAMS, PROMPTS[:1], drawn)[0] == first


def test_prompts_longer_than_a_bucket():
    prompts = [RNG.integers(0, 37, n).tolist() for n in (63, 64, 65)]
    expected = [greedy_by_oracle(PARAMS, CONFIG, prompt, 3) for prompt in prompts]
    assert generate_tokens(CONFIG, PARAMS, prompts, dataclasses.replace(GREEDY, max_new_tokens=3)) == expected


def test_a_stop_token_ends_its_row_alone_and_is_left_out():
    free = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    stops = (free[1][2], free[2][4], free[2][4])  # three of them, as below: one compilation
    expected = []
    for row in free:
        ends = [index for index, token in enumerate(row) if token in stops]
        expected.append(row[: ends[0]] if ends else row)
    assert len({len(row) for row in expected}) > 1 and max(map(len, expected)) > min(map(len, expected))
    assert generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY, stops=stops) == expected


def test_a_stop_at_once_and_one_that_never_comes():
    free = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    all_first = tuple(row[0] for row in free)
    assert generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY, stops=all_first) == [[], [], []]
    absent = next(token for token in range(37) if all(token not in row for row in free))
    assert generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY, stops=(absent,) * 3) == free


def test_max_new_tokens():
    free = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    one = generate_tokens(CONFIG, PARAMS, PROMPTS, dataclasses.replace(GREEDY, max_new_tokens=1))
    assert one == [row[:1] for row in free]


def test_vocab_limit_is_never_exceeded():
    free = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    limit = sorted({token for row in free for token in row})[1]  # some of the free choices are now out of bounds
    for change in ({}, {"temperature": 5.0}, {"temperature": 5.0, "top_k": 30}):
        sampling = dataclasses.replace(GREEDY, **change)
        rows = generate_tokens(CONFIG, PARAMS, PROMPTS, sampling, vocab_limit=limit)
        assert max(map(max, rows)) < limit and all(len(row) == NEW for row in rows)


def test_seeds():
    drawn = [
        generate_tokens(CONFIG, PARAMS, PROMPTS, Sampling(max_new_tokens=NEW, temperature=3.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    same_prompt = generate_tokens(CONFIG, PARAMS, [PROMPTS[0]] * 2, Sampling(max_new_tokens=NEW, temperature=3.0))
    assert same_prompt[0] != same_prompt[1]  # every row has a stream of its own


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 1e-300])
def test_no_temperature_is_greedy(temperature):
    expected = generate_tokens(CONFIG, PARAMS, PROMPTS, GREEDY)
    assert generate_tokens(CONFIG, PARAMS, PROMPTS, dataclasses.replace(GREEDY, temperature=temperature)) == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-6)])
def test_one_token_left_is_greedy(top_k, top_p):
    for logits in ([0.1, 0.0, 0.2, 0.2, -1.0, 0.0], [-5.0, -4.0, -4.5, -9.0, -4.1, -4.2]):
        assert set(draw(logits, temperature=2.0, top_k=top_k, top_p=top_p)) == {int(np.argmax(logits))}


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "no prompts"),
        ([[1], []], 1, "prompt 1 has no tokens"),
        (
            [[1], [1] * 500],
            13,
            "prompt 1 has 500 tokens and max_new_tokens=13 follow, more than the model's context=512",
        ),
        ([[1, 37]], 1, r"prompt tokens lie in \[1, 37\], outside the vocabulary of 37"),
        ([[-1, 3]], 1, r"prompt tokens lie in \[-1, 3\]"),
    ],
)
def test_errors_come_before_any_compilation(prompts, new, message, monkeypatch):
    monkeypatch.setattr(module, "program", None)
    with pytest.raises(ValueError, match=message):
        generate_tokens(CONFIG, PARAMS, prompts, Sampling(max_new_tokens=new))


def test_the_longest_prompt_that_fits_is_served():
    config = dataclasses.replace(CONFIG, context=70)
    rows = generate_tokens(config, PARAMS, [[1] * 63], GREEDY)
    assert len(rows[0]) == 7


def test_one_compilation_for_a_bucket():
    sampling = Sampling(max_new_tokens=NEW, temperature=0.5)
    generate_tokens(CONFIG, PARAMS, PROMPTS, sampling)
    before = module.program(False)._cache_size()
    generate_tokens(CONFIG, PARAMS, PROMPTS, dataclasses.replace(sampling, seed=3, temperature=0.7), vocab_limit=30)
    generate_tokens(CONFIG, PARAMS, [[1] * n for n in (64, 2, 30)], sampling)
    assert module.program(False)._cache_size() == before
    generate_tokens(CONFIG, PARAMS, [[1] * n for n in (65, 2, 30)], sampling)
    assert module.program(False)._cache_size() == before + 1


def loop_body_dots(config, width, steps):
    """(Shapes of every matmul result inside the decoding loop, the same outside it.)"""
    shapes = jax.ShapeDtypeStruct((2, width), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    run = functools.partial(module._run, config=config, steps=steps, greedy=True, top_k=0, top_p=1.0)
    rest = jax.random.key(0), np.float32(1), np.zeros(0, np.int32), np.int32(37)
    jaxpr = jax.make_jaxpr(run)(abstract(config)[1], *shapes, *rest).jaxpr
    inside, outside = [], []

    def walk(jaxpr, found):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append(equation.outvars[0].aval.shape)
            for inner in jaxprs_in_params(equation.params):
                walk(inner, inside if equation.primitive.name == "while" else found)

    walk(jaxpr, outside)
    return inside, outside


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_a_decoded_token_costs_one_row_of_scores(name):
    config = SHAPES[name]
    inside, outside = loop_body_dots(config, width=128, steps=64)
    slots = 192
    scores = 2 * config.n_heads * slots
    assert scores in [np.prod(shape) for shape in inside]  # one query a head, over the cache
    assert max(map(np.prod, inside)) == scores  # and nothing larger: no second forward over the prompt
    assert max(map(np.prod, outside)) >= 2 * config.n_heads * 128 * 128


SIZE, DRAWS = 6, 2000


@functools.partial(jax.jit, static_argnames=("top_k", "top_p"))
def jitted_draw(logits, key, temperature, top_k, top_p):
    rows = jnp.broadcast_to(logits[None], (DRAWS, SIZE))
    return sample(rows, jax.random.split(key, DRAWS), temperature, greedy=False, top_k=top_k, top_p=top_p)


def draw(logits, *, seed=0, temperature=1.0, top_k=0, top_p=1.0):
    """DRAWS draws from one row of logits."""
    logits = np.asarray(logits, np.float32)
    return np.asarray(jitted_draw(logits, jax.random.key(seed), np.float32(temperature), top_k=top_k, top_p=top_p))


def support(logits, temperature, top_k, top_p):
    """The tokens that may be drawn, in exact terms: rank by (-logit, id), cut to top_k, then to the least nucleus."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        ranked = ranked[:top_k]
    weights = np.exp((np.array([logits[t] for t in ranked]) - max(logits)) / temperature)
    probability, kept, total = weights / weights.sum(), [], 0.0
    for token, p in zip(ranked, probability, strict=True):
        kept.append(token)
        total += p
        if total >= top_p:
            break
    return kept, total - top_p


# Halves make ties common; a spread of 2 keeps every kept token's share above 1 in 100 at temperature 1.
LOGITS = st.lists(st.integers(-2, 2).map(lambda n: n / 2), min_size=SIZE, max_size=SIZE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.sampled_from([0, 3]), top_p=st.sampled_from([1.0, 0.5, 0.9]))
def test_top_k_and_top_p_keep_exactly_the_right_tokens(logits, top_k, top_p):
    kept, surplus = support(logits, 1.0, top_k, top_p)
    if top_p < 1 and abs(surplus) < 1e-6:
        kept = support(logits, 1.0, top_k, top_p * (1 - 1e-5))[0]  # on the edge, where rounding decides
    # The rarest of six tokens within e^2 has a share over 2.3 %: missed by 2000 draws once in 10^20.
    assert set(draw(logits, top_k=top_k, top_p=top_p)) == set(kept)


def test_a_nucleus_that_is_met_exactly_takes_no_more():
    # Shares of exactly 1/4: two of them reach 0.5, and the lower ids come first.
    assert set(draw([-np.inf, 0, 0, 0, 0, -np.inf], top_p=0.5)) == {1, 2}
    assert set(draw([0, 1, 1, 1, 1, 0], top_k=3)) == {1, 2, 3}


def test_infinitely_unlikely_tokens_are_never_drawn():
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.9), (3, 0.9)):
        assert set(draw([0, -np.inf, 1, -np.inf, -np.inf, -np.inf], top_k=top_k, top_p=top_p)) == {0, 2}


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 2.5}])
def test_draws_follow_the_softmax(cut):
    logits, repeats = [0.3, -1.0, 1.7, 0.3, -0.2, 0.9], 10
    temperature = cut.get("temperature", 1.0)
    kept, _ = support(logits, temperature, cut.get("top_k", 0), cut.get("top_p", 1.0))
    weights = np.zeros(SIZE)
    weights[kept] = np.exp(np.array(logits)[kept] / temperature)
    expected = DRAWS * repeats * weights / weights.sum()
    draws = np.concatenate([draw(logits, seed=seed, **cut) for seed in range(repeats)])
    seen = np.bincount(draws, minlength=SIZE)
    assert (seen[expected == 0] == 0).all()
    degrees = len(kept) - 1
    chi_square = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations over its mean


def test_greedy_takes_the_lower_id_of_a_tie():
    rows = jnp.array([[1.0, 3.0, 3.0], [2.0, 2.0, -1.0]])
    got = sample(rows, jax.random.split(jax.random.key(0), 2), jnp.float32(1), greedy=True, top_k=0, top_p=1.0)
    assert got.tolist() == [1, 0]


BYTES = small(vocab_size=264, tie_embeddings=True)


@pytest.fixture(scope="module")
def language_model():
    params = random_params(BYTES, seed=4)
    return LanguageModel(BYTES, params, ByteTokenizer())


def test_text_in_text_out(language_model):
    tokenizer, sampling = ByteTokenizer(), Sampling(max_new_tokens=NEW)
    texts = ["To be", "x", ""]
    got = generate(language_model, texts, sampling)
    ids = [tokenizer.encode(text).tolist() or [256] for text in texts]  # an empty text starts a document
    for text, prompt in zip(got, ids, strict=True):
        row = oracle_within(language_model.params, BYTES, prompt, NEW, limit=257)
        assert text == tokenizer.decode(row)
    assert generate(language_model, texts[0], sampling) == got[0]


def oracle_within(params, config, prompt, new, limit):
    tokens = list(prompt)
    for _ in range(new):
        best = int(oracle.logits(params, config, tokens)[-1, :limit].argmax())
        if best == 256:
            break
        tokens.append(best)
    return tokens[len(prompt) :]


def test_stop_tokens_of_the_sampling_replace_the_end_of_text(language_model):
    sampling = Sampling(max_new_tokens=NEW)
    ids = generate_tokens(BYTES, language_model.params, [[120]], sampling, vocab_limit=257)[0]
    stopped = generate(language_model, "x", dataclasses.replace(sampling, stop_tokens=(ids[3],)))
    assert stopped == ByteTokenizer().decode(ids[: ids.index(ids[3])])


def test_cache_is_in_the_compute_dtype():
    config: ModelConfig = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    cache = KVCache.empty(config, 3, 64)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    assert cache.keys.shape == cache.values.shape == (2, 3, 64, 2, 8)
    rows = generate_tokens(config, PARAMS, PROMPTS, GREEDY)
    assert all(len(row) == NEW for row in rows)
