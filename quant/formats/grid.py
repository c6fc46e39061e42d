"""What every format of 4-bit weights says in its own way: the facts of a linear, the grid of its codes, a format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32, UInt8

SYMMETRIC_ZERO = 8
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """The facts of a quantised weight W (K, N), y = x W, known before any of it is read. Hashable.

    group: rows of a group, K for the whole column. zeros, ordered: whether zero points, and the group of every row, are
    stored; formats that always store them do not look.
    """

    K: int
    N: int
    group: int
    zeros: bool = True
    ordered: bool = True

    @property
    def groups(self) -> int:
        """Rows of scales; the last group may have fewer rows."""
        return -(-self.K // self.group)


class TensorLayout(NamedTuple):
    """Shape of a stored tensor and the dtypes it may have, by their NumPy names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the codes of a weight W (K, N) stand for:

        W[k, n] = (code[k, n] - zeros[g_idx[k], n]) * scales[g_idx[k], n]

    scales: floating (ceil(K / group), N). zeros: uint8 0..15 of that shape; None where all are 8. g_idx: int32 (K,);
    None where it is k // group. group: K for the whole column. `grid_of` makes it so.
    """

    shape: tuple[int, int]
    group: int
    scales: Any
    zeros: Any = None
    g_idx: Any = None

    def all_zeros(self) -> UInt8[np.ndarray, "groups n"]:
        """Zero points, also where all are 8."""
        return np.full(self.scales.shape, SYMMETRIC_ZERO, np.uint8) if self.zeros is None else self.zeros

    def all_groups(self) -> Int32[np.ndarray, " k"]:
        """The group of every row, also where it is k // group."""
        return plain_groups(self.shape[0], self.group) if self.g_idx is None else self.g_idx

    def columns(self, part: slice) -> "Grid":
        """The grid of these columns of W alone."""
        zeros = None if self.zeros is None else self.zeros[:, part]
        scales = self.scales[:, part]
        return Grid(
            shape=(self.shape[0], scales.shape[1]), group=self.group, scales=scales, zeros=zeros, g_idx=self.g_idx
        )

    def same_as(self, other: "Grid") -> bool:
        """Whether codes stand for the same numbers on both, in the same groups; scales may differ in dtype."""
        return (
            (self.shape, self.group) == (other.shape, other.group)
            and np.array_equal(self.scales.astype(np.float32), other.scales.astype(np.float32))
            and np.array_equal(self.all_zeros(), other.all_zeros())
            and np.array_equal(self.all_groups(), other.all_groups())
        )


def grid_of(
    spec: LinearSpec,
    scales: Float[np.ndarray, "groups n"],
    zeros: UInt8[np.ndarray, "groups n"] | None,
    g_idx: Int[np.ndarray, " k"] | None,
) -> Grid:
    """The grid, with None for zeros that are all 8 and for groups in order.

    Raises ValueError for scales that are not finite, or a g_idx that does not give every group its number of rows.
    """
    bad = np.argwhere(~np.isfinite(scales))
    if len(bad):
        group, column = map(int, bad[0])
        raise ValueError(
            f"{len(bad)} of {scales.size} scales are NaN or infinite, first that of {group=} {column=} - the weight "
            "would be. Fetch the checkpoint again, or quantise anew."
        )
    if zeros is not None and (zeros == SYMMETRIC_ZERO).all():
        zeros = None
    if g_idx is not None:
        g_idx = _checked_groups(g_idx, spec)
    return Grid(shape=(spec.K, spec.N), group=spec.group, scales=scales, zeros=zeros, g_idx=g_idx)


def plain_groups(rows: int, group: int) -> Int32[np.ndarray, " k"]:
    """Groups in order: k // group."""
    return np.arange(rows, dtype=np.int32) // np.int32(group)


def _checked_groups(g_idx: Int[np.ndarray, " k"], spec: LinearSpec) -> Int32[np.ndarray, " k"] | None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= spec.groups:
        row = int(np.argmax((g_idx < 0) | (g_idx >= spec.groups)))
        raise ValueError(
            f"g_idx[{row}]={int(g_idx[row])} - there are {spec.groups} groups, numbered from 0. Fetch the checkpoint "
            "again."
        )
    plain = plain_groups(spec.K, spec.group)
    counts, wanted = (np.bincount(index, minlength=spec.groups) for index in (g_idx, plain))
    if (counts != wanted).any():
        number = int(np.argmax(counts != wanted))
        raise ValueError(
            f"g_idx puts {int(counts[number])} rows into group {number}, which has {int(wanted[number])} - g_idx is of "
            "another weight. Fetch the checkpoint again."
        )
    return None if (g_idx == plain).all() else g_idx.astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a format stores a 4-bit weight, as tensors by their suffix after the linear's name. Arrays in, arrays out.

    codes: the suffix of the tensor with the codes. columns: which of its dims runs along W's columns, and how many
    columns an entry of it holds. layout: the tensors that a spec asks for. read_codes, read_grid: W's codes, and their
    grid from the other tensors. write: all tensors; None where a format is only read. faults: what a grid has that the
    format cannot hold, as clauses that name how much of it and where first; empty where it holds it exactly.
    scales_written_as: their dtype in a file; None: their own.
    """

    name: str
    codes: str
    columns: tuple[int, int]
    layout: Callable[[LinearSpec], dict[str, TensorLayout]]
    read_codes: Callable[[Int32[np.ndarray, "a b"], LinearSpec], UInt8[np.ndarray, "k n"]]
    read_grid: Callable[[Tensors, LinearSpec], Grid]
    write: Callable[[UInt8[np.ndarray, "k n"], Grid, LinearSpec], dict[str, np.ndarray]] | None = None
    faults: Callable[[Grid], list[str]] = lambda grid: []
    scales_written_as: str | None = None


def where(condition: Bool[np.ndarray, "groups n"], what: str) -> list[str]:
    """One clause for `faults`: in how many groups of a column `condition` holds, and in which first."""
    found = np.argwhere(condition)
    if not len(found):
        return []
    return [f"{what} in {len(found)} of {condition.size} groups, first group {found[0][0]} of column {found[0][1]}"]


def whole_words(grid: Grid, *, rows: bool) -> list[str]:
    """Clauses for `faults`: dims of W that a format packs by eight and that are no multiple of 8."""
    named = (("K", grid.shape[0], rows), ("N", grid.shape[1], True))
    return [f"{name}={size} is no multiple of 8" for name, size, packed in named if packed and size % 8]


def whole_groups(grid: Grid) -> list[str]:
    """A clause for `faults`: a last group with fewer rows."""
    return [f"K={grid.shape[0]} is no multiple of group={grid.group}"] if grid.shape[0] % grid.group else []
