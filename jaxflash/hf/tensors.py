"""A tensor that lies in a file: what it is, and how to read any rectangle of it."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

type Index = tuple[slice, ...]

# Bytes of the file that are mapped in at a time while a rectangle is copied out.
_BLOCK = 4 << 20


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint file, read on demand.

    shape: as the file has it, (out, in) for a matrix. dtype: of what `read` gives. stored_as: the file's own name of
    its type ("BF16", "Q4_1"). nbytes: in the file. read: a new array of the rectangle that the slices say (step 1).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored_as: str
    nbytes: int
    file: Path
    read: Callable[[Any], Shaped[np.ndarray, "..."]]


class MappedFile:
    """A file mapped into memory, from which copies are taken block by block: pages do not pile up beside the copy."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def copy(self, offset: int, shape: tuple[int, ...], dtype: np.dtype, index: Index) -> Shaped[np.ndarray, "..."]:
        """A new array with the rectangle `index` of the array of `shape` and `dtype` that begins at byte `offset`."""
        if not shape:
            return self.copy(offset, (1,), dtype, (slice(None),)).reshape(())
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        source = self.bytes[offset : offset + nbytes].view(dtype).reshape(shape)
        rows, *rest = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        out = np.empty((len(rows), *map(len, rest)), dtype)
        row_bytes = nbytes // max(shape[0], 1)
        step = max(_BLOCK // max(row_bytes, 1), 1)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            out[start - rows.start : stop - rows.start] = source[start:stop, *index[1:]]
            self.forget(offset + start * row_bytes, offset + stop * row_bytes)
        return out

    def forget(self, start: int, stop: int) -> None:
        """Lets the pages of these bytes go: they count as this process's memory while they are mapped in."""
        first = start - start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
