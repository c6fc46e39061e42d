"""Rows of documents and of a stream: no target lost, none doubled, none across a border."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.packing import Batch, PackedRows, best_fit_decreasing, pack

SEQ_LEN = 7
EDGES = [0, 1, 2, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 2 * SEQ_LEN, 2 * SEQ_LEN + 1, 2 * SEQ_LEN + 2]
document_lengths = st.lists(st.sampled_from(EDGES) | st.integers(0, 40), max_size=30)


def packed(lengths: list[int], packing: str, seq_len: int = SEQ_LEN, gap: int = 0) -> tuple[PackedRows, np.ndarray]:
    """Rows of documents whose tokens are all different (token = its place in the file), `gap` tokens apart."""
    starts = np.cumsum([0] + [length + gap for length in lengths])[:-1].astype(np.int64)
    spans = np.stack([starts, starts + np.array(lengths, np.int64)], axis=1).reshape(-1, 2)
    tokens = np.arange(sum(lengths) + gap * len(lengths), dtype=np.uint32)
    return pack(tokens, spans, seq_len=seq_len, packing=packing), spans


def counted_pairs(rows: PackedRows) -> Counter:
    batch = rows.gather(range(len(rows)))
    counted = batch.loss_mask
    assert counted.dtype == np.bool_
    return Counter(zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist(), strict=True))


@settings(deadline=None)
@given(document_lengths)
def test_documents_train_on_every_pair_of_neighbours_exactly_once(lengths):
    rows, spans = packed(lengths, "documents")
    expected = Counter((place, place + 1) for start, end in spans.tolist() for place in range(start, end - 1))
    assert counted_pairs(rows) == expected
    assert rows.targets == expected.total()


@settings(deadline=None, max_examples=40)
@given(document_lengths)
def test_a_row_of_documents_is_segments_then_padding(lengths):
    rows, spans = packed(lengths, "documents")
    document_of = {place: d for d, (start, end) in enumerate(spans.tolist()) for place in range(start, end)}
    for i in range(len(rows)):
        row = rows[i]
        assert row.segment_ids is not None
        fields = (row.tokens, row.targets, row.loss_mask, row.positions, row.segment_ids)
        assert [field.dtype for field in fields] == [np.int32, np.int32, np.bool_, np.int32, np.int32]
        assert {field.shape for field in fields} == {(SEQ_LEN,)}
        used = int(row.loss_mask.sum())
        assert used > 0
        for field, padding in zip(fields, (0, 0, 0, 0, -1), strict=True):
            assert (field[used:] == padding).all()
        segments = row.segment_ids[:used]
        assert segments[0] == 0 and np.isin(np.diff(segments), [0, 1]).all()
        for segment in range(segments[-1] + 1):
            inside = np.flatnonzero(segments == segment)
            assert row.positions[inside].tolist() == list(range(len(inside)))
            assert (np.diff(row.tokens[inside]) == 1).all()
            assert len({document_of[place] for place in row.tokens[inside].tolist()}) == 1


@settings(deadline=None)
@given(document_lengths, st.integers(1, 9), st.integers(0, 3))
def test_a_stream_trains_on_every_token_but_the_first_and_the_tail(lengths, seq_len, gap):
    rows, spans = packed(lengths, "stream", seq_len, gap)
    stream = np.concatenate([np.arange(start, end) for start, end in spans.tolist()] or [np.arange(0)])
    kept = len(rows) * seq_len
    assert 0 <= max(len(stream) - 1, 0) - kept < seq_len
    batch = rows.gather(np.arange(len(rows)))
    assert batch.segment_ids is None
    assert batch.tokens.ravel().tolist() == stream[:kept].tolist()
    assert batch.targets.ravel().tolist() == stream[1 : kept + 1].tolist()
    assert (batch.positions == np.arange(seq_len)).all() and batch.loss_mask.all()
    assert rows.targets == kept


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_gather_is_the_rows_one_by_one(packing):
    rows, _ = packed([5, 30, 2, 2, 9, 1, 0, 16], packing)
    order = [2, 0, len(rows) - 1, 0]
    batch = rows.gather(order)
    for place, i in enumerate(order):
        same(rows[i], Batch(*(None if field is None else field[place] for field in batch)))  # type: ignore[arg-type]


def same(a: Batch, b: Batch) -> None:
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_rows_end(packing):
    rows, _ = packed([20], packing)
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {outside} of {len(rows)} rows"):
            rows[outside]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_opens_as_many_bins_as_the_textbook(sizes):
    bins = best_fit_decreasing(np.array(sizes, np.int64), 20)
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 20) - size)
    held = np.bincount(bins, sizes, minlength=len(rooms))
    assert sorted((20 - held).tolist()) == sorted(rooms)


def test_a_hundred_thousand_documents_fill_their_rows():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 100_000).astype(np.int64), 20_000)
    ends = np.cumsum(lengths)
    rows = pack(
        np.zeros(ends[-1], np.uint16), np.stack([ends - lengths, ends], axis=1), seq_len=512, packing="documents"
    )
    assert rows.targets == (lengths - 1).sum()
    assert rows.targets / (len(rows) * 512) > 0.99


def test_a_plan_is_the_same_every_time():
    a, b = (packed([3, 9, 9, 4, 4, 4, 15, 2], "documents")[0] for _ in range(2))
    same(a.gather(range(len(a))), b.gather(range(len(b))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(seq_len=0, packing="stream"), r"seq_len=0 - a row needs at least one token"),
        (dict(seq_len=4, packing="dense"), r"packing='dense' - 'documents' or 'stream' is needed"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(np.arange(9, dtype=np.uint16), np.array([[0, 9]]), **arguments)
