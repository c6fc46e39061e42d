"""From a corpus to batches: the split, the purity of the order, entropies, and what bad input says."""

import json
import math
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.corpus.documents import read_documents, shipped_corpus
from jaxflash.data import Dataset, batches, ngram_entropy, open_dataset, split_documents, validation_batches
from jaxflash.packing import Batch, PackedRows, pack
from jaxflash.tokenizer import ByteTokenizer


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def open_bytes(data, cache: Path, **arguments: Any) -> Dataset:
    defaults: dict[str, Any] = dict(seq_len=8, packing="documents", vocab_size=257, validation_fraction=0.2)
    return open_dataset(data, ByteTokenizer(), cache_dir=cache, **(defaults | arguments))


def same(a: Batch, b: Batch) -> None:
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


def numbered_rows(count: int, seq_len: int = 2) -> PackedRows:
    """Rows that can be told apart: row i begins with token i * seq_len."""
    length = count * seq_len + 1
    return pack(np.arange(length, dtype=np.uint32), np.array([[0, length]]), seq_len=seq_len, packing="stream")


def order_of(reader, count: int) -> list[int]:
    return np.concatenate([batch.tokens[:, 0] // 2 for batch in islice(reader, count)]).tolist()


# The split


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.floats(0, 0.95))
def test_the_split_is_a_partition(lengths, fraction):
    offsets = np.append(0, np.cumsum(lengths))
    train, validation = split_documents(offsets, fraction)
    held = [place for start, end in validation.tolist() for place in range(start, end)]
    kept = [place for start, end in train.tolist() for place in range(start, end)]
    assert sorted(held + kept) == list(range(offsets[-1]))
    assert len(held) <= offsets[-1] * fraction
    wanted = int(offsets[-1] * fraction)
    assert 2 * len(held) >= min(wanted, max(lengths))  # never far from what was asked for
    again = split_documents(offsets, fraction)
    assert again[0].tolist() == train.tolist() and again[1].tolist() == validation.tolist()


def test_the_split_takes_whole_documents_from_all_over():
    offsets = np.arange(0, 1001, 10)
    train, validation = split_documents(offsets, 0.1)
    assert len(validation) == 10 and len(train) == 90
    assert (np.diff(validation, axis=1) == 10).all()
    assert validation[0, 0] < 300 and validation[-1, 0] > 700


def test_one_document_gives_its_tail():
    train, validation = split_documents(np.array([0, 100]), 0.25)
    assert train.tolist() == [[0, 75]] and validation.tolist() == [[75, 100]]
    assert split_documents(np.array([0, 100]), 0.0)[1].shape == (0, 2)


# Batches


@pytest.mark.parametrize("batch_size", [1, 3, 9])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_batch_n_depends_on_seed_and_n_alone(count, batch_size):
    rows = numbered_rows(count)
    for seed, start in ((0, 0), (1, 5), (2**40, 29)):
        whole = order_of(batches(rows, batch_size=batch_size, seed=seed), start + 3)
        resumed = order_of(batches(rows, batch_size=batch_size, seed=seed, start=start, threads=1, buffer=1), 3)
        assert whole[start * batch_size :] == resumed


def test_a_process_reads_its_own_rows_of_the_same_batches(monkeypatch):
    rows, mine, own = numbered_rows(11), numbered_rows(11), np.array([0, 1, 4])
    gather, read = type(rows).gather, []

    def counting(self, indices):
        if self is mine:  # the other reader may still read ahead
            read.append(len(indices))
        return gather(self, indices)

    monkeypatch.setattr(type(rows), "gather", counting)
    whole = [*islice(batches(rows, batch_size=6, seed=1), 4), *validation_batches(rows, batch_size=6)]
    parts = [*islice(batches(mine, batch_size=6, seed=1, own=own), 4)]
    parts += validation_batches(mine, batch_size=6, own=own)
    for part, batch in zip(parts, whole, strict=True):
        for have, want in zip(part[:4], batch[:4], strict=True):
            np.testing.assert_array_equal(have, want[own])
    assert set(read) == {3}


def test_epochs_are_permutations_that_differ():
    rows = numbered_rows(50)
    order = np.array(order_of(batches(rows, batch_size=10, seed=3), 50)).reshape(10, 50)
    assert (np.sort(order, axis=1) == np.arange(50)).all()
    assert len({tuple(epoch) for epoch in order}) == 10
    # Neighbouring seeds share no epoch, not even one shifted by the difference of the seeds.
    other = np.array(order_of(batches(rows, batch_size=10, seed=4), 50)).reshape(10, 50)
    assert not {tuple(epoch) for epoch in order} & {tuple(epoch) for epoch in other}


def test_the_order_does_not_depend_on_the_batch_size():
    rows = numbered_rows(11)
    assert order_of(batches(rows, batch_size=3, seed=0), 20) == order_of(batches(rows, batch_size=20, seed=0), 3)


def test_a_split_smaller_than_a_batch_still_trains():
    order = order_of(batches(numbered_rows(3), batch_size=8, seed=0), 3)
    assert Counter(order) == {0: 8, 1: 8, 2: 8}
    assert order_of(batches(numbered_rows(1), batch_size=2, seed=0, start=10**9), 1) == [0, 0]


def test_another_process_gets_the_same_batches(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", *(f"document number {i} " * (i % 7 + 1) for i in range(60)))
    program = f"""
from hashlib import sha256
from itertools import islice
from jaxflash.data import batches, open_dataset
from jaxflash.tokenizer import ByteTokenizer
data = open_dataset({str(file)!r}, ByteTokenizer(), seq_len=16, packing="documents", vocab_size=257,
                    validation_fraction=0.2, cache_dir={str(tmp_path / "cache")!r})
for batch in islice(batches(data.train, batch_size=4, seed=5, start=3), 3):
    print(sha256(b"".join(field.tobytes() for field in batch)).hexdigest())
"""
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    ).stdout.split()
    here = batches(open_bytes(file, tmp_path / "cache", seq_len=16).train, batch_size=4, seed=5)
    digests = [
        sha256(b"".join(np.asarray(field).tobytes() for field in batch)).hexdigest() for batch in islice(here, 6)
    ]
    assert len(there) == 3 and there == digests[3:]


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_validation_sees_every_row_once_in_order(tmp_path, packing):
    texts = ["to be or not to be " * n for n in range(1, 20)]
    rows = open_bytes(jsonl(tmp_path / "a.jsonl", *texts), tmp_path / "cache", packing=packing).train
    size = next(size for size in range(5, 9) if len(rows) % size)
    seen = list(validation_batches(rows, batch_size=size))
    assert {batch.tokens.shape for batch in seen} == {(size, 8)}
    place = 0
    for batch in seen:
        for b in range(size):
            if place < len(rows):
                same(rows[place], Batch(*(None if field is None else field[b] for field in batch)))  # type: ignore
            else:
                assert batch.loss_mask[b].sum() == 0
            place += 1
    assert sum(batch.loss_mask.sum() for batch in seen) == rows.targets


# The whole way


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_ragged_documents_open(tmp_path, packing):
    texts = ["", "a", "bc", "x" * 8, "y" * 9, "z" * 40, ""]
    data = open_bytes(jsonl(tmp_path / "a.jsonl", *texts), tmp_path / "cache", packing=packing)
    assert data.documents == 5 and data.tokens == sum(map(len, texts)) + 5
    train, held = (
        {letter for letter in data.tokenizer.decode(rows.gather(range(len(rows))).targets.ravel())}
        for rows in (data.train, data.validation)
    )
    assert train and held


def test_the_fingerprint_tells_datasets_apart(tmp_path):
    file, cache = jsonl(tmp_path / "a.jsonl", *["some text"] * 20), tmp_path / "cache"
    first = open_bytes(file, cache)
    assert open_bytes([file], cache).fingerprint == first.fingerprint
    for arguments in (dict(seq_len=9), dict(packing="stream"), dict(validation_fraction=0.3)):
        assert open_bytes(file, cache, **arguments).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(vocab_size=256),
            r"the tokenizer has 257 ids with vocab_size=256 - a tokenizer larger than the vocabulary",
        ),
        (dict(packing="dense"), r"packing='dense' - 'documents' or 'stream' is needed"),
        (dict(seq_len=0), r"seq_len=0 - a row needs at least one token"),
        (dict(validation_fraction=1.0), r"validation_fraction=1.0 - a share in \[0, 1\)"),
    ],
)
def test_cheap_checks_come_before_any_work(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        open_bytes(tmp_path / "absent.txt", tmp_path / "cache", **arguments)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(seq_len=400, packing="stream"), r"no row in the train split of .*a row needs seq_len \+ 1 = 401 tokens"),
        (dict(seq_len=50, packing="stream"), r"no row in the validation split .*validation_fraction=0.2"),
        (dict(validation_fraction=1e-6), r"no row in the validation split .*two tokens in one document"),
    ],
)
def test_a_corpus_too_small_for_a_row_says_so(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        open_bytes(jsonl(tmp_path / "a.jsonl", *["some text"] * 20), tmp_path / "cache", **arguments)


def test_batches_refuse(tmp_path):
    empty = open_bytes(jsonl(tmp_path / "a.jsonl", "text"), tmp_path, validation_fraction=0.0).validation
    assert len(empty) == 0 and list(validation_batches(empty, batch_size=2)) == []
    with pytest.raises(ValueError, match=r"batches of DocumentRows\(0 rows.* - at least one row is needed"):
        batches(empty, batch_size=2, seed=0)  # at the call, not at the first batch
    wrong: dict[str, Any]
    for wrong in (dict(batch_size=0, seed=0), dict(batch_size=1, seed=-1), dict(batch_size=1, seed=0, start=-1)):
        with pytest.raises(ValueError, match=r"needs batch_size >= 1, seed >= 0 and start >= 0"):
            batches(numbered_rows(2), **wrong)
    with pytest.raises(ValueError, match=r"batch_size=0 - a batch needs at least one row"):
        next(validation_batches(numbered_rows(2), batch_size=0))
    with pytest.raises(ValueError, match=r"order=3 - needs a row, and order 1 or 2"):
        ngram_entropy(numbered_rows(2), 3)


# Entropy and the shipped corpus


def test_entropy_is_that_of_the_pairs_that_count(tmp_path):
    texts = ["the cat sat on the mat", "that hat", "a", "the end of the tale " * 40]
    rows = open_bytes(jsonl(tmp_path / "a.jsonl", *texts), tmp_path / "cache", validation_fraction=0.0).train
    pairs = Counter((a, b) for text in texts for a, b in zip(text, text[1:] + "\0", strict=True))
    total = pairs.total()
    after, before = Counter(), Counter()
    for (a, b), count in pairs.items():
        before[a] += count
        after[b] += count
    assert rows.targets == total
    unigram = -sum(n / total * math.log(n / total) for n in after.values())
    bigram = -sum(n / total * math.log(n / before[a]) for (a, _), n in pairs.items())
    assert ngram_entropy(rows, 1) == pytest.approx(unigram, rel=1e-12)
    assert ngram_entropy(rows, 2) == pytest.approx(bigram, rel=1e-12)


def test_the_shipped_corpus_is_what_its_readme_says(tmp_path):
    content = shipped_corpus().read_bytes()
    readme = shipped_corpus().with_name("README.md").read_text()
    assert sha256(content).hexdigest() in readme
    for word in (b"gutenberg", b"etext", b"e-text", b"copyright", b"trademark", b"http", b"\\r"):
        assert word not in content.lower()
    texts = list(read_documents([shipped_corpus()]))
    assert len(texts) == 167 and sum(map(len, texts)) == 1_069_209 and all(text.isascii() for text in texts)
    assert "To be, or not to be,--that is the question:--" in "".join(texts)
    data = open_bytes(None, tmp_path, seq_len=128, validation_fraction=0.1)
    assert data.documents == 167 and data.tokens == 1_069_209 + 167
    assert data.train.targets / (len(data.train) * 128) > 0.99
    assert 2.3 < ngram_entropy(data.validation, 2) < 2.6 < 3.2 < ngram_entropy(data.validation, 1) < 3.5
