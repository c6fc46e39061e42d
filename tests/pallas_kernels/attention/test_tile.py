"""Tile functions: folding any blocks, in any order, gives the whole; what is masked has no say."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import tile
from tests import oracle
from tests.tolerance import assert_close

settings.register_profile("tile", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("tile")


@st.composite
def calls(draw):
    """A random call of one batch entry and one head, with a random cut of its keys into blocks."""
    # Few sizes, so that most operations are compiled once.
    T, S, H, H_v = draw(st.sampled_from([1, 5])), draw(st.sampled_from([1, 12, 15])), 4, 3
    arguments = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.none() | st.tuples(st.integers(0, S), st.integers(0, S))),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "query_seq_lengths": draw(st.none() | st.integers(0, T).map(lambda n: np.array([n]))),
        "key_value_seq_lengths": draw(st.none() | st.integers(0, S).map(lambda n: np.array([n]))),
    }
    if draw(st.booleans()):
        ids = st.integers(-1, 2)
        sides = (draw(st.lists(ids, min_size=n, max_size=n)) for n in (T, S))
        arguments["segment_ids"] = tuple(np.array([side], np.int32) for side in sides)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    sizes = ((1, T, 1, H), (1, S, 1, H), (1, S, 1, H_v))
    operands = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    if draw(st.booleans()):
        arguments["mask"] = rng.random((1, 1, T, S)) < 0.6
    cuts = sorted(draw(st.sets(st.sampled_from(range(3, S, 3)), max_size=3))) if S > 1 else []
    return operands, arguments, draw(st.permutations(list(zip([0, *cuts], [*cuts, S], strict=True))))


def seen_tile(arguments, T, S, start, stop):
    """(T, stop - start) booleans by `tile.visible`."""
    queries = T if (lengths := arguments["query_seq_lengths"]) is None else int(lengths[0])
    keys = S if (lengths := arguments["key_value_seq_lengths"]) is None else int(lengths[0])
    left, right = arguments["local_window_size"] or (None, None)
    query_ids, kv_ids = arguments.get("segment_ids", (None, None))
    mask = arguments.get("mask")
    seen = tile.visible(
        jnp.arange(T)[:, None],
        jnp.arange(start, stop)[None, :],
        shift=keys - queries if arguments["causal_alignment"] == "bottom_right" else 0,
        bounds=(left, 0 if arguments["is_causal"] else right),
        query_length=queries,
        kv_length=keys,
        query_segment=None if query_ids is None else jnp.asarray(query_ids[0])[:, None],
        kv_segment=None if kv_ids is None else jnp.asarray(kv_ids[0, start:stop])[None, :],
        mask=None if mask is None else jnp.asarray(mask[0, 0, :, start:stop]),
    )
    assert seen is not None
    return jnp.broadcast_to(seen, (T, stop - start))


@given(calls())
def test_online_softmax_over_any_blocks_in_any_order(call):
    (q, k, v), arguments, blocks = call
    T, S, H_v = q.shape[1], k.shape[1], v.shape[3]
    scale = np.float32(1 / np.sqrt(q.shape[3]))
    maximum, total = tile.start((T,), jnp.float32)
    accumulator = jnp.zeros((T, H_v))
    parts = []
    for start, stop in blocks:
        logits = jnp.asarray(q[0, :, 0] @ k[0, start:stop, 0].T * scale)
        seen = seen_tile(arguments, T, S, start, stop)
        values = jnp.asarray(v[0, start:stop, 0])
        maximum, total, weights, decay = tile.softmax_step(maximum, total, logits, seen)
        accumulator = decay[:, None] * accumulator + weights @ values
        alone, alone_total, weights, _ = tile.softmax_step(*tile.start((T,), jnp.float32), logits, seen)
        parts.append(tile.finalise(alone, alone_total, weights @ values))
    want = oracle.attention(q, k, v, **arguments)
    plain = oracle.attention(q, k, v, **arguments, precision=np.float32)
    merged = parts[0]
    for part in parts[1:]:
        merged = tile.merge(*merged, *part)
    for out, lse in (tile.finalise(maximum, total, accumulator), merged):
        assert_close(out, want.out[0, :, 0], plain.out[0, :, 0], "out")
        assert_close(lse, want.lse[0, :, 0], plain.lse[0, :, 0], "lse")


def test_nothing_to_hide_is_no_mask():
    assert tile.visible(jnp.arange(3)[:, None], jnp.arange(4)[None, :]) is None


def test_split_finite_moves_what_is_bad_into_the_poison():
    x = jnp.array([[1.0, 2.0], [jnp.nan, 3.0], [4.0, -jnp.inf]])
    finite, poison = tile.split_finite(x)
    np.testing.assert_array_equal(finite, [[1, 2], [0, 0], [0, 0]])
    np.testing.assert_array_equal(poison, [0, np.nan, np.nan])
    gradient = jax.grad(lambda x: (tile.split_finite(x)[0] ** 2).sum())(x)
    np.testing.assert_array_equal(gradient, [[2, 4], [0, 0], [0, 0]])


def test_merge_with_a_side_that_saw_nothing():
    out, lse = jnp.array([[3.0], [0.0]]), jnp.array([0.5, -jnp.inf])
    nothing = jnp.zeros((2, 1)), jnp.full(2, -jnp.inf)
    for merged in (tile.merge(out, lse, *nothing), tile.merge(*nothing, out, lse)):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)
    gradients = jax.grad(lambda *a: tile.merge(*a)[0].sum(), (0, 1, 2, 3))(out, lse, *nothing)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(gradients[0], [[1.0], [0.0]])


def test_merge_is_differentiable_through_both_lse():
    """Halves merged by their float32 LSE equal the whole, with the gradients of the whole."""
    rng = np.random.default_rng(0)
    logits, v = (
        jnp.asarray(rng.standard_normal((3, 8)), jnp.float32),
        jnp.asarray(rng.standard_normal((8, 2)), jnp.float32),
    )

    def part(logits, v):
        maximum, total, weights, _ = tile.softmax_step(*tile.start((3,), jnp.float32), logits, None)
        return tile.finalise(maximum, total, weights @ v)

    def whole(logits):
        out, lse = part(logits, v)
        return (out**2).sum() + (jnp.array([1.0, -2.0, 3.0]) * lse).sum()

    def halves(logits):
        out, lse = tile.merge(*part(logits[:, :3], v[:3]), *part(logits[:, 3:], v[3:]))
        return (out**2).sum() + (jnp.array([1.0, -2.0, 3.0]) * lse).sum()

    np.testing.assert_allclose(halves(logits), whole(logits), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(halves)(logits), jax.grad(whole)(logits), rtol=1e-5, atol=1e-6)
