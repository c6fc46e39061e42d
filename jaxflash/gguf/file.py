"""The header of a GGUF file: its key/value pairs and where each tensor lies.

    "GGUF" | version | number of tensors, of pairs | pairs | tensor infos | padding | data

Numbers are little endian; the format is public (ggml-org/ggml, docs/gguf.md). The `gguf` package's own reader believes
every count in the file, so that a broken one keeps it busy for ever; here each is held against the bytes that are left.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxflash.hf.documents import MAX_BYTES
from jaxflash.hf.tensors import MappedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """shape: as NumPy has it, slowest dim first. type: ggml's number. offset: first byte, from the file's start."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """metadata: key -> number, text, flag or list of them. tensors: ggml's name -> where it lies in `mapped`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    mapped: MappedFile


def read_header(path: Path) -> Header:
    """Reads the header of `path`; of the data, nothing.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not GGUF, another version, big endian, or a count, type or name that cannot be.
    """
    if not path.is_file():
        raise FileNotFoundError(f"load: no file {str(path)!r}. Give a .gguf file, or the folder of a checkpoint.")
    if path.stat().st_size < 24:
        raise ValueError(
            f"load: {path.name!r} has {path.stat().st_size} bytes - a GGUF header has more. Fetch it again."
        )
    mapped = MappedFile(path)
    cursor = _Cursor(mapped.bytes[:MAX_BYTES], path.name)
    magic, version = cursor.take(4), cursor.number("I")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(
            f"load: {path.name!r} begins with {magic!r} and {version=} - must be b'GGUF' and one of {_VERSIONS}, "
            "little endian. Fetch it again, or convert it with a current llama.cpp."
        )
    n_tensors, n_pairs = cursor.count(24), cursor.count(13)
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.text()
        if key in metadata:
            raise cursor.broken(f"key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    infos: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        name, dims = cursor.text(), cursor.number("I")
        if name in infos or not 1 <= dims <= _MAX_DIMS:
            raise cursor.broken(f"tensor {name!r} twice, or with {dims} dims")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        infos[name] = TensorInfo(shape=shape, type=cursor.number("I"), offset=cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.broken(f"{alignment=}, which must be a power of two,")
    start = -(-cursor.at // alignment) * alignment
    if any(info.offset % alignment for info in infos.values()):
        raise cursor.broken("a tensor that is not aligned")
    tensors = {
        name: TensorInfo(shape=info.shape, type=info.type, offset=start + info.offset) for name, info in infos.items()
    }
    return Header(path=path, metadata=metadata, tensors=tensors, mapped=mapped)


class _Cursor:
    """Reads values one after the other, and never past the end: of the file, or of what a header may take."""

    def __init__(self, data: np.ndarray, what: str):
        self._data, self._what, self.at = memoryview(data), what, 0

    def broken(self, fault: str) -> ValueError:
        return ValueError(f"load: {self._what!r} has {fault} at byte {self.at} - the file is broken. Fetch it again.")

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise self.broken(f"{size} bytes announced, more than it holds or a header may have ({MAX_BYTES}),")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def count(self, least: int) -> int:
        """A number of things that take `least` bytes each, or more."""
        count = self.number("Q")
        if count * least > len(self._data) - self.at:
            raise self.broken(f"{count} items announced, more than it holds or a header may have ({MAX_BYTES} bytes),")
        return count

    def text(self) -> str:
        content = self.take(self.count(1))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken("text that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.broken(f"a value of unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self) -> list:
        kind = self.number("I")
        if kind == _STRING:
            return [self.text() for _ in range(self.count(8))]
        if kind not in _SCALARS:
            raise self.broken(f"an array of type {kind}")
        size = struct.calcsize("<" + _SCALARS[kind])
        count = self.count(size)
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * size)))
