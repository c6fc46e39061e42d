"""From text files to batches: split, packed, shuffled by grain, and resumable from one integer."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from jaxflash.corpus.documents import find_files, read_documents, shipped_corpus
from jaxflash.corpus.tokens import default_cache_dir, tokenise
from jaxflash.packing import Batch, PackedRows, check_packing, pack
from jaxflash.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Dataset",
    "PackedRows",
    "batches",
    "default_cache_dir",
    "ngram_entropy",
    "open_dataset",
    "read_documents",
    "split_documents",
    "validation_batches",
]

_NO_END = 1 << 53  # rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A corpus, tokenised, split and packed.

    documents, tokens: their number in both splits together, end tokens included. fingerprint: a digest of text,
    tokenizer, split and packing; two datasets with the same one give the same rows, so a run can be resumed on either.
    """

    train: PackedRows
    validation: PackedRows
    tokenizer: Tokenizer
    documents: int
    tokens: int
    fingerprint: str


def open_dataset(
    data: Sequence[str | Path] | str | Path | None,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    packing: str,
    vocab_size: int,
    validation_fraction: float,
    cache_dir: str | Path | None = None,
) -> Dataset:
    """Open the corpus `data` (see `find_files`; None: the one that ships with the package), tokenising it if need be.

    packing: 'documents' or 'stream', see `jaxflash.packing`. vocab_size: the model's; it may be larger than the
    tokenizer's. validation_fraction: the share of tokens to hold out, in [0, 1); 0 leaves the validation split empty.
    cache_dir: where the memory map is kept, ~/.cache/jaxflash/tokens when None.

    Raises:
      FileNotFoundError: `data` names no file.
      ValueError: bad files (named), a tokenizer larger than the vocabulary, a split without a single row, arguments
        out of range. The cheap checks come before any text is read.
    """
    check_packing(seq_len=seq_len, packing=packing)
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"data: {validation_fraction=} - a share in [0, 1) is needed, e.g. 0.1.")
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"data: the tokenizer has {tokenizer.vocab_size} ids with {vocab_size=} - a tokenizer larger than the "
            f"vocabulary would index past the embedding. Set vocab_size to at least {tokenizer.vocab_size}."
        )
    named = [data] if isinstance(data, str | Path) else [shipped_corpus()] if data is None else data
    corpus = tokenise(find_files(named), tokenizer, cache_dir=cache_dir)
    train, validation = (
        pack(corpus.tokens, spans, seq_len=seq_len, packing=packing)
        for spans in split_documents(corpus.offsets, validation_fraction)
    )
    for rows, split in ((train, "train"), (validation, "validation")):
        if len(rows) == 0 and (split == "train" or validation_fraction > 0):
            needed = "two tokens in one document" if packing == "documents" else f"seq_len + 1 = {seq_len + 1} tokens"
            raise ValueError(
                f"data: no row in the {split} split of {len(corpus.tokens)} tokens with {validation_fraction=}, "
                f"{packing=} - a row needs {needed}. Add text, shorten seq_len or change validation_fraction."
            )
    facts = f"{corpus.key} {seq_len} {packing} {validation_fraction}"
    return Dataset(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        documents=len(corpus.offsets) - 1,
        tokens=len(corpus.tokens),
        fingerprint=hashlib.sha256(facts.encode()).hexdigest()[:32],
    )


def split_documents(
    offsets: Int64[np.ndarray, " boundaries"], validation_fraction: float
) -> tuple[Int64[np.ndarray, "a 2"], Int64[np.ndarray, "b 2"]]:
    """The (start, end) spans of the train and the validation split, in corpus order; the same on every call.

    Validation gets whole documents, picked at random, of at most `validation_fraction` of the tokens. Where the
    documents are too long for that (a corpus of one file, a few novels), it gets the tail of the longest one instead.

    >>> train, validation = split_documents(np.array([0, 100]), 0.25)
    >>> train.tolist(), validation.tolist()
    ([[0, 75]], [[75, 100]])
    """
    spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
    lengths = spans[:, 1] - spans[:, 0]
    wanted = int(offsets[-1] * validation_fraction)
    # RandomState, not default_rng: NumPy promises never to change its stream, and so the split.
    order = np.random.RandomState(0).permutation(np.flatnonzero(lengths <= wanted))
    chosen = order[np.cumsum(lengths[order]) <= wanted]
    if 2 * lengths[chosen].sum() >= wanted:
        held_out = np.isin(np.arange(len(spans)), chosen)
        return spans[~held_out], spans[held_out]
    longest = int(lengths.argmax())
    cut = max(spans[longest, 1] - wanted, spans[longest, 0])
    train = spans.copy()
    train[longest, 1] = cut
    return train, np.array([[cut, spans[longest, 1]]])


def batches(
    source: PackedRows,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    own: Int[np.ndarray, " o"] | None = None,
    threads: int = 2,
    buffer: int = 8,
) -> Iterator[Batch]:
    """Endless shuffled batches of (batch_size, seq_len), beginning with batch number `start`.

    own: the rows of every batch that are wanted, of 0 .. batch_size - 1, in this order; no other is read.

    Batch n holds places n B .. (n + 1) B - 1 of the epochs laid end to end; epoch e is a permutation of the rows that
    depends on (seed, e) alone. So batch n is a pure function of (seed, n), and n is all there is to save. A batch may
    straddle two epochs, or repeat rows when the split has fewer of them than a batch. threads, buffer: grain's
    read-ahead; they change nothing but speed.

    Raises:
      ValueError: no rows, batch_size < 1, or a negative seed or start.
    """
    if len(source) == 0:
        raise ValueError(f"data: batches of {source} - at least one row is needed. Add text or shorten seq_len.")
    if batch_size < 1 or seed < 0 or start < 0:
        raise ValueError(f"data: {batch_size=}, {seed=}, {start=} - needs batch_size >= 1, seed >= 0 and start >= 0.")
    return _read_ahead(source, batch_size, seed, start, own, threads, buffer)


def _read_ahead(
    source: PackedRows,
    batch_size: int,
    seed: int,
    start: int,
    own: Int[np.ndarray, " o"] | None,
    threads: int,
    buffer: int,
) -> Iterator[Batch]:
    import grain  # takes a second; `import jaxflash` and whoever only looks at rows should not pay for it

    # grain shuffles epoch e with its seed + e, so that seed 1 would see the epochs of seed 0 one later. A hash of the
    # seed keeps runs with neighbouring seeds apart.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(len(source)).shuffle(seed=hashed)
    # Not repeat() for ever: grain 0.2.18 takes its length, sys.maxsize, through a float, and a batch of 1 overflows.
    wanted = slice(None) if own is None else own
    repeated = order.repeat(_NO_END // len(source))
    dataset = repeated.batch(batch_size, batch_fn=lambda rows: source.gather(np.asarray(rows)[wanted]))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    reader = iter(dataset[start:].to_iter_dataset(options))
    try:
        yield from reader
    finally:
        reader.close()


def validation_batches(
    source: PackedRows, *, batch_size: int, own: Int[np.ndarray, " o"] | None = None
) -> Iterator[Batch]:
    """Every row once, in order, in batches of (batch_size, seq_len). own: as `batches` takes it.

    The last batch is filled up with copies of the last row whose loss_mask is False, so that one compiled program
    serves all of them.

    Raises:
      ValueError: batch_size < 1.
    """
    if batch_size < 1:
        raise ValueError(f"data: {batch_size=} - a batch needs at least one row. Raise it.")
    for first in range(0, len(source), batch_size):
        indices = first + (np.arange(batch_size) if own is None else own)
        batch = source.gather(np.minimum(indices, len(source) - 1))
        batch.loss_mask[indices >= len(source)] = False
        yield batch


def ngram_entropy(source: PackedRows, order: int) -> float:
    """Entropy in nats per target of the targets that count in `source`, by their own statistics.

    order 1: H(x_t) = -sum_x p(x) log p(x). order 2: H(x_t | x_{t-1}) = H(x_{t-1}, x_t) - H(x_{t-1}). No table of
    unigrams (bigrams) has a lower mean loss on exactly these targets, so a model below it has learnt more than that.

    Raises:
      ValueError: an `order` other than 1 or 2, or no rows.
    """
    if order not in (1, 2) or len(source) == 0:
        raise ValueError(f"data: ngram_entropy of {source} with {order=} - needs a row, and order 1 or 2.")
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for batch in validation_batches(source, batch_size=256):
        counted = batch.loss_mask
        new = (batch.tokens[counted].astype(np.int64) << 32) | batch.targets[counted]
        pairs, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        weights = np.concatenate([counts, np.ones(len(new), np.int64)])
        counts = np.bincount(place, weights).astype(np.int64)
    if order == 1:
        return _entropy(pairs & 0xFFFFFFFF, counts)
    return _entropy(pairs, counts) - _entropy(pairs >> 32, counts)


def _entropy(values: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"]) -> float:
    totals = np.bincount(np.unique(values, return_inverse=True)[1], counts)
    shares = totals / totals.sum()
    return float(-(shares * np.log(shares)).sum())
