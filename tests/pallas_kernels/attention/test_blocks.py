"""The plan of a fused kernel against all pairs of a query and a key, one by one."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import blocks
from pallas_kernels.attention.spec import AttentionSpec
from tests.oracle import visible

Call = tuple[AttentionSpec, dict[str, Any]]

positions = st.integers(1, 13)
sizes = st.integers(1, 8)


def plan_of(call: Call, q_block: int, kv_block: int, **options: Any) -> tuple[Any, Any]:
    spec, arrays = call
    return blocks.overlaps(spec, q_block, kv_block, **arrays, **options)


def visible_pairs(call: Call) -> np.ndarray:
    """(b, T, S) booleans."""
    spec, arrays = call
    ids = arrays["query_segments"], arrays["kv_segments"]
    facts: dict[str, Any] = {
        "is_causal": spec.is_causal,
        "causal_alignment": spec.causal_alignment,
        "local_window_size": spec.window,
        "query_seq_lengths": arrays["query_lengths"],
        "key_value_seq_lengths": arrays["kv_lengths"],
        "segment_ids": None if ids[0] is None else ids,
    }
    alike = all(x is None for x in arrays.values())
    return np.stack([visible(b, spec.T, spec.S, **facts) for b in range(1 if alike else spec.B)])


def by_block(pairs: np.ndarray, q_block: int, kv_block: int, absent: bool) -> np.ndarray:
    """(b, nq, nk, q_block * kv_block); positions past the ends are `absent`."""
    b, T, S = pairs.shape
    pairs = np.pad(pairs, ((0, 0), (0, -T % q_block), (0, -S % kv_block)), constant_values=absent)
    pairs = pairs.reshape(b, pairs.shape[1] // q_block, q_block, -1, kv_block)
    return pairs.swapaxes(2, 3).reshape(b, pairs.shape[1], pairs.shape[3], -1)


@st.composite
def calls(draw: Any, segments: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and arrays of a call with few positions."""
    B, T, S = 2, draw(positions), draw(positions)

    def lengths(most: int) -> np.ndarray:
        return np.array([draw(st.integers(-1, most + 2)) for _ in range(B)], np.int32)

    def ids(length: int) -> np.ndarray:
        rows = [draw(st.lists(st.integers(-1, 3), min_size=length, max_size=length)) for _ in range(B)]
        return np.array(rows, np.int32)

    with_segments = segments and draw(st.booleans())
    arrays = {
        "query_lengths": lengths(T) if draw(st.booleans()) else None,
        "kv_lengths": lengths(S) if draw(st.booleans()) else None,
        "query_segments": ids(T) if with_segments else None,
        "kv_segments": ids(S) if with_segments else None,
    }
    facts = {
        "T": T,
        "S": S,
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "window": draw(st.none() | st.tuples(st.integers(0, 16), st.integers(0, 16))),
        "query_lengths": arrays["query_lengths"] is not None,
        "kv_lengths": arrays["kv_lengths"] is not None,
        "segments": with_segments,
    }
    return facts, arrays


def call_of(drawn: tuple[dict[str, Any], dict[str, Any]]) -> Call:
    """Outside of what hypothesis draws, for beartype looks at random elements."""
    facts, arrays = drawn
    return AttentionSpec(B=2, N=1, K=1, H=64, H_v=64, dtype="bfloat16", **facts), arrays


many = settings(max_examples=200, deadline=None, derandomize=True)


@many
@given(calls(), sizes, sizes, st.booleans())
def test_live_and_full_blocks(drawn, q_block, kv_block, hide_tail):
    """What is visible is live; what is full is visible, but for positions that are absent."""
    call = call_of(drawn)
    live, full = (np.asarray(x) for x in plan_of(call, q_block, kv_block, hide_tail=hide_tail))
    pairs = visible_pairs(call)
    some, every = (by_block(pairs, q_block, kv_block, absent) for absent in (False, True))
    assert live.shape == full.shape == some.shape[:3]
    assert (live | ~some.any(-1)).all(), "a visible pair in a dead block"
    assert (every.all(-1) | ~full).all(), "a hidden pair in a full block"
    assert (live | ~full).all()
    if hide_tail and call[0].S % kv_block:
        assert not full[:, :, -1].any()


@many
@given(calls(), sizes, sizes, st.booleans(), st.booleans())
def test_ranges(drawn, q_block, kv_block, hide_tail, of_keys):
    """Along both axes, as the forward kernel reads the plan and as the backward one does."""
    call = call_of(drawn)
    live, full = (np.asarray(x) for x in plan_of(call, q_block, kv_block, hide_tail=hide_tail))
    if of_keys:
        live, full = live.swapaxes(1, 2), full.swapaxes(1, 2)
    start, full_start, full_stop, stop = (x[..., None] for x in blocks.ranges(live, full))
    assert (0 <= start).all() and (start < stop).all() and (stop <= live.shape[2]).all()
    assert (start <= full_start).all() and (full_start <= full_stop).all() and (full_stop <= stop).all()
    index = np.arange(live.shape[2])
    visited = (start <= index) & (index < stop)
    without_mask = (full_start <= index) & (index < full_stop)
    assert (visited | ~live).all() and (full | ~without_mask).all()
    # The ends are live, so that nothing is computed that a range could leave out.
    some = live.any(-1)
    for end in (start, stop - 1):
        assert np.take_along_axis(live, end, axis=2)[some].all()
    assert (visited.sum(-1)[~some] == 1).all()


@many
@given(calls(segments=False), sizes, sizes)
def test_nothing_is_computed_or_masked_in_vain(drawn, q_block, kv_block):
    """Causality, windows and lengths: a live block holds a visible pair, a partial one a hidden pair."""
    exact(call_of(drawn), q_block, kv_block)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 1), sizes, sizes, st.booleans())
def test_nor_for_packed_documents(counts, padding, q_block, kv_block, is_causal):
    """Documents of these lengths; the last one may be padding."""
    ids = np.repeat(np.arange(len(counts)), counts)
    ids = np.where(ids >= len(counts) - padding, -1, ids)
    ids = np.pad(ids, (0, 30 - len(ids)), constant_values=-1).astype(np.int32)[None]
    spec = AttentionSpec(
        B=1, T=30, S=30, N=1, K=1, H=64, H_v=64, dtype="bfloat16", is_causal=is_causal, segments=True
    )  # fmt: skip
    none = dict.fromkeys(("query_lengths", "kv_lengths"))
    exact((spec, {**none, "query_segments": ids, "kv_segments": ids}), q_block, kv_block)


def exact(call: Call, q_block: int, kv_block: int) -> None:
    pairs = visible_pairs(call)
    some, every = (by_block(pairs, q_block, kv_block, absent) for absent in (False, True))
    live, full = plan_of(call, q_block, kv_block)
    np.testing.assert_array_equal(live, some.any(-1))
    np.testing.assert_array_equal(full, every.all(-1))


FACTS: dict[str, dict[str, Any]] = {
    "lengths": dict(T=12, S=13, is_causal=True, causal_alignment="bottom_right", window=(5, 5)),
    "segments": dict(T=13, S=7, is_causal=True, causal_alignment="top_left"),
    "lengths segments": dict(T=13, S=12, window=(3, 2)),
}


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize(("q_block", "kv_block", "hide_tail"), [(2, 3, True), (1, 2, False)])
def test_traced_calls_get_the_same_plan(kind, q_block, kv_block, hide_tail):
    """What is known gets it in NumPy."""
    rng, B = np.random.default_rng(0), 200
    T, S = FACTS[kind]["T"], FACTS[kind]["S"]
    arrays = {}
    if "lengths" in kind:
        arrays = {name: rng.integers(-1, n + 3, B, np.int32) for name, n in (("query_lengths", T), ("kv_lengths", S))}
    if "segments" in kind:
        ids = {"query_segments": (T, 2), "kv_segments": (S, 3)}
        arrays |= {name: rng.integers(-1, ids, (B, n), np.int32) for name, (n, ids) in ids.items()}
    given: dict[str, Any] = {
        "query_lengths": "lengths" in kind,
        "kv_lengths": "lengths" in kind,
        "segments": "segments" in kind,
    }
    spec = AttentionSpec(B=B, N=1, K=1, H=64, H_v=64, dtype="bfloat16", **FACTS[kind], **given)

    def plan(arrays):
        live, full = blocks.overlaps(spec, q_block, kv_block, hide_tail=hide_tail, **arrays)
        return live, full, *blocks.ranges(live, full)

    for want, got in zip(plan(arrays), jax.jit(plan)(arrays), strict=True):
        assert isinstance(want, np.ndarray) and got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert plan(arrays)[0].any() and not plan(arrays)[0].all() and plan(arrays)[1].any()


def test_the_picture_of_the_module():
    """A window over blocks of 4: dead, partial, full, partial."""
    spec = AttentionSpec(
        B=1, T=4, S=16, N=1, K=1, H=64, H_v=64, dtype="bfloat16", window=(7, 1), causal_alignment="bottom_right"
    )
    live, full = blocks.overlaps(spec, 4, 4)
    assert live.tolist() == [[[False, True, True, True]]] and full.tolist() == [[[False, False, True, False]]]
    assert [x.item() for x in blocks.ranges(live, full)] == [1, 2, 3, 4]


@pytest.mark.parametrize("full", [[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0]])
def test_of_several_runs_of_full_blocks_the_last_is_taken(full):
    live, full = np.ones((1, 1, 6), bool), np.array(full, bool)[None, None]
    assert [x.item() for x in blocks.ranges(live, full)] == [0, 4, 5, 6]
