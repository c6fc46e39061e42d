"""Rows of fixed length cut from a memory map of tokens: whole documents packed together, or one long stream.

```
documents   | doc 3 .......... eos | doc 8 .... eos | pad |     segments 0, 1, -1; positions restart in each
            | doc 5 ...................................... |     a longer document is cut into pieces that
            | (doc 5) ... eos | doc 1 ...... eos | doc 7 |       overlap by one token: no target is lost
stream      | doc 0 ... eos doc 1 ... eos doc 2 ......... |     no segments: attention sees across documents
```
A row of T inputs comes from T + 1 tokens: inputs are all but the last, targets all but the first.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer, Shaped


class Batch(NamedTuple):
    """B rows of T tokens; a pytree. A single row has the same fields without the B.

    tokens, targets: (B, T) int32; target t is the token that follows token t.
    loss_mask: (B, T) bool, True where the target counts, False on padding.
    positions: (B, T) int32, from 0 in each segment; 0 on padding.
    segment_ids: (B, T) int32, from 0 in each row and -1 on padding; None for a stream, where every token of a row may
      attend to all before it.
    """

    tokens: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray | None


class PackedRows(ABC):
    """Random access to the packed rows of one split: `len(rows)` of them, `rows[i]` a Batch of (seq_len,) arrays.

    A row depends on nothing but the text, the tokenizer, the split and seq_len. `targets` is the number of targets that
    count in all rows together.
    """

    seq_len: int
    targets: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Sequence[int] | Int[np.ndarray, " B"]) -> Batch:
        """The batch (B, seq_len) of the rows `indices`, each in [0, len(self)). Much faster than row by row."""

    def __getitem__(self, index: SupportsIndex) -> Batch:
        i = index.__index__()
        if not 0 <= i < len(self):
            raise IndexError(f"data: row {i} of {len(self)} rows.")
        batch = self.gather([i])
        segments = None if batch.segment_ids is None else batch.segment_ids[0]
        return Batch(batch.tokens[0], batch.targets[0], batch.loss_mask[0], batch.positions[0], segments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows of {self.seq_len} tokens, {self.targets} targets)"


def pack(
    tokens: Integer[np.ndarray, " n"], spans: Int64[np.ndarray, "d 2"], *, seq_len: int, packing: str
) -> PackedRows:
    """Pack tokens[start:end], for each (start, end) of `spans`, into rows of `seq_len`.

    packing: "documents" or "stream", as drawn at the top of this file.

    Raises:
      ValueError: an unknown `packing`, or seq_len < 1.
    """
    check_packing(seq_len=seq_len, packing=packing)
    if packing == "documents":
        starts, lengths, rows = plan_documents(spans, seq_len=seq_len)
        return DocumentRows(tokens=tokens, seq_len=seq_len, starts=starts, lengths=lengths, rows=rows)
    offsets = np.append(0, np.cumsum(spans[:, 1] - spans[:, 0]))
    return StreamRows(tokens=tokens, seq_len=seq_len, starts=spans[:, 0], offsets=offsets)


def check_packing(*, seq_len: int, packing: str) -> None:
    """Refuse what `pack` cannot do, before there are tokens to pack.

    Raises:
      ValueError: an unknown `packing`, or seq_len < 1.
    """
    if packing not in ("documents", "stream"):
        raise ValueError(f"data: {packing=} - 'documents' or 'stream' is needed. Choose one.")
    if seq_len < 1:
        raise ValueError(f"data: {seq_len=} - a row needs at least one token. Raise seq_len.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DocumentRows(PackedRows):
    """Rows of whole documents. Row i holds pieces rows[i]:rows[i+1]; piece p has the lengths[p] inputs from starts[p].

    The last token of a piece is a target only, so a document of n tokens takes n - 1 places, and every pair of
    neighbours (token, next token) within a document is trained on exactly once an epoch.
    """

    tokens: np.ndarray
    seq_len: int
    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def targets(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def gather(self, indices: Sequence[int] | Int[np.ndarray, " B"]) -> Batch:
        rows = np.asarray(indices, np.int64)
        counts = self.rows[rows + 1] - self.rows[rows]  # pieces a row
        row, segment = np.repeat(np.arange(len(rows)), counts), _restarting(counts)
        piece = self.rows[rows][row] + segment
        lengths = self.lengths[piece].astype(np.int64)
        before = np.cumsum(lengths) - lengths  # inputs before each piece in the batch, then in its row
        before -= before[np.searchsorted(row, row)]

        position = _restarting(lengths)
        source = np.repeat(self.starts[piece], lengths) + position
        place = np.repeat(row * self.seq_len + before, lengths) + position

        def spread(values: Shaped[np.ndarray, " used"], dtype: type, padding: int) -> Shaped[np.ndarray, "B T"]:
            out = np.full(len(rows) * self.seq_len, padding, dtype)
            out[place] = values
            return out.reshape(len(rows), self.seq_len)

        return Batch(
            tokens=spread(self.tokens[source], np.int32, 0),
            targets=spread(self.tokens[source + 1], np.int32, 0),
            loss_mask=spread(np.ones(len(place)), np.bool_, 0),
            positions=spread(position, np.int32, 0),
            segment_ids=spread(np.repeat(segment, lengths), np.int32, -1),
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StreamRows(PackedRows):
    """Rows of one stream, the spans one after another: row i holds stream[i T : i T + T + 1].

    Neighbouring rows share one token, so each token after the first is a target exactly once; the fewer than T targets
    past the last full row are dropped. `offsets` (spans + 1,) is where each span begins in the stream.
    """

    tokens: np.ndarray
    seq_len: int
    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return max(int(self.offsets[-1]) - 1, 0) // self.seq_len

    @property
    def targets(self) -> int:
        return len(self) * self.seq_len

    def gather(self, indices: Sequence[int] | Int[np.ndarray, " B"]) -> Batch:
        places = np.asarray(indices, np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        span = np.searchsorted(self.offsets, places, side="right") - 1
        window = self.tokens[self.starts[span] + places - self.offsets[span]].astype(np.int32)
        return Batch(
            tokens=window[:, :-1],
            targets=window[:, 1:],
            loss_mask=np.ones((len(places), self.seq_len), np.bool_),
            positions=np.tile(np.arange(self.seq_len, dtype=np.int32), (len(places), 1)),
            segment_ids=None,
        )


def _restarting(counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " total"]:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def plan_documents(
    spans: Int64[np.ndarray, "d 2"], *, seq_len: int
) -> tuple[Int64[np.ndarray, " pieces"], Int32[np.ndarray, " pieces"], Int64[np.ndarray, " boundaries"]]:
    """The (starts, lengths, rows) of a DocumentRows: pieces of `seq_len` fill a row each, the rests are best-fitted.

    Rows of full pieces come first, in the order of the documents. Spans of fewer than two tokens hold no target and
    are left out.
    """
    full, rest = np.divmod(np.maximum(spans[:, 1] - spans[:, 0] - 1, 0), seq_len)
    full_starts = np.repeat(spans[:, 0], full) + _restarting(full) * seq_len

    rest_starts, rest = (spans[:, 0] + full * seq_len)[rest > 0], rest[rest > 0]
    bins = best_fit_decreasing(rest, seq_len)
    order = np.argsort(bins, kind="stable")
    starts = np.concatenate([full_starts, rest_starts[order]])
    lengths = np.concatenate([np.full(len(full_starts), seq_len), rest[order]]).astype(np.int32)
    pieces_per_row = np.concatenate([np.ones(len(full_starts), np.int64), np.bincount(bins)])
    return starts, lengths, np.append(0, np.cumsum(pieces_per_row))


def best_fit_decreasing(sizes: Int[np.ndarray, " n"], capacity: int) -> Int64[np.ndarray, " n"]:
    """The bin of each item: largest item first, each into the fullest open bin that still takes it (at most 11/9
    of the fewest bins, plus one). Ties go to the earlier item and the bin touched last.

    Every size lies in [1, capacity]. Takes O(n log n) for the sort, and O(capacity / 64) words an item to find its bin.

    >>> best_fit_decreasing(np.array([2, 7, 3, 8]), 10).tolist()
    [0, 1, 1, 0]
    """
    bins = np.empty(len(sizes), np.int64)
    open_bins: dict[int, list[int]] = {}  # room left -> the bins with that much
    rooms = 0  # bit r is set when a bin with room r is open; one shift and one carry find the smallest r >= size
    count = 0
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            target = open_bins[room].pop()
            if not open_bins[room]:
                rooms ^= 1 << room
        else:
            room, target, count = capacity, count, count + 1
        bins[item] = target
        if left := room - size:
            open_bins.setdefault(left, []).append(target)
            rooms |= 1 << left
    return bins
