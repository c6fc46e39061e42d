"""safetensors files: the header checked against the file, the index against its shards, tensors by slices.

    8 bytes, little endian: N | N bytes of JSON: {name: {dtype, shape, data_offsets}} | the tensors, one after the other

The format is public (huggingface/safetensors, README, "Format"). Nothing else is ever opened: a pickle runs code.
"""

import functools
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxflash.hf.documents import MAX_BYTES, parse_object, read_object
from jaxflash.hf.tensors import MappedFile, StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a Hub folder by its name: those of the index, each in the shard it names, and no others.

    Raises:
      FileNotFoundError: no safetensors file, or a shard that the index names is missing.
      ValueError: a broken header or index, an entry that its shard does not hold, or weights beside the index's.
    """
    index, single = folder / INDEX, folder / SINGLE
    weight_map = read_index(index) if index.is_file() else None
    if weight_map is not None and single.is_file() and SINGLE not in weight_map.values():
        raise ValueError(
            f"load: {str(folder)!r} holds both {INDEX} and {SINGLE} - which one is the model is not defined. "
            "Remove the one that is not."
        )
    if weight_map is None:
        if not single.is_file():
            raise FileNotFoundError(f"load: {str(folder)!r} holds neither {SINGLE} nor {INDEX}. {_remedy(folder)}")
        return open_file(single)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise FileNotFoundError(
                f"load: {str(folder)!r} lacks {shard!r}, which {INDEX} names - the download is not complete. Fetch it."
            )
        held = open_file(folder / shard)
        wanted = [name for name, file in weight_map.items() if file == shard]
        lacking = [name for name in wanted if name not in held]
        if lacking:
            raise ValueError(
                f"load: {shard!r} lacks {len(lacking)} of the {len(wanted)} tensors that {INDEX} places there, first "
                f"{lacking[0]!r} - index and shard are of different checkpoints. Fetch both again."
            )
        found |= {name: held[name] for name in wanted}
    return found


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> name of a shard in the same folder.

    Raises:
      ValueError: not an index, an empty one, or a shard that is no plain .safetensors file name of this folder.
    """
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"load: {str(path)!r} has no weight_map - must map tensors to files. Fetch it again.")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and not set("/\\\0") & set(shard) and not shard.startswith(".")
        if not plain or not shard.endswith(".safetensors"):
            raise ValueError(
                f"load: {str(path)!r} places {name!r} in {shard!r} - must be a .safetensors file of the same folder, "
                "by its plain name. Do not use this checkpoint."
            )
    return weight_map


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Reads its header only.

    Raises:
      ValueError: whatever `parse_header` refuses, or a file that is shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = header_length(start, size, path.name)
        header = parse_header(file.read(length), size - 8 - length, path.name)
    mapped = MappedFile(path)

    def stored(name: str, entry: Mapping[str, Any]) -> StoredTensor:
        shape, dtype, (begin, end) = tuple(entry["shape"]), DTYPES[entry["dtype"]], entry["data_offsets"]
        read = functools.partial(mapped.copy, 8 + length + begin, shape, dtype)
        return StoredTensor(
            name=name, shape=shape, dtype=dtype, stored_as=entry["dtype"], nbytes=end - begin, file=path, read=read
        )

    return {name: stored(name, entry) for name, entry in header.items()}


def header_length(start: bytes, size: int, what: str) -> int:
    """The length of the header, from the first 8 bytes of a file of `size` bytes.

    Raises:
      ValueError: too short a file, or a length beyond its end or the format's limit.
    """
    if len(start) < 8:
        raise ValueError(f"load: {what!r} has {size=} bytes - a safetensors file has at least 8. Fetch it again.")
    length = struct.unpack("<Q", start)[0]
    if length > min(size - 8, MAX_BYTES):
        limit = "the file's end" if length > size - 8 else f"the format's limit of {MAX_BYTES}"
        raise ValueError(
            f"load: {what!r} announces a header of {length} bytes, beyond {limit} ({size=}) - the file is truncated, "
            "or no safetensors file. Fetch it again."
        )
    return length


def parse_header(text: bytes, data_size: int, what: str) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}, checked: the tensors tile the `data_size` bytes after the header.

    Raises:
      ValueError: not JSON, a name given twice, an unknown dtype, a shape that its bytes do not fit, or tensors that
        overlap, leave a gap, or reach beyond the file (a truncated one) or not to its end.
    """
    header = parse_object(text, f"the header of {what!r}")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        fault = _fault(entry)
        if fault is not None:
            raise ValueError(f"load: {name!r} in {what!r} {fault}. Fetch the file again.")
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at:
            raise ValueError(
                f"load: {name!r} in {what!r} begins at byte {begin}, the one before it ends at {at} - tensors must lie "
                "end to end. Fetch the file again."
            )
        at = end
    if at != data_size:
        state = "truncated" if data_size < at else "longer than its header says"
        raise ValueError(
            f"load: {what!r} is {state}: its tensors take {at} bytes, after the header come {data_size}. "
            "Fetch it again."
        )
    return header


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length and header of a file that holds `tensors` (name, dtype, shape), in this order. Padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for name, dtype, shape in tensors:
        end = at + int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _fault(entry: object) -> str | None:
    """What is wrong with one tensor's entry, as a clause; None where nothing is."""
    if not isinstance(entry, dict):
        return "is no object with dtype, shape and data_offsets"
    dtype, shape, offsets = (entry.get(key, ()) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"has unknown {dtype=} - must be one of {', '.join(DTYPES)}"
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return f"has {shape=} and data_offsets={offsets} - must be lists of sizes, two of them offsets"
    size = DTYPES[dtype].itemsize
    for dim in shape:
        size *= dim
    if offsets[1] - offsets[0] != size:
        return f"has {dtype=} and {shape=}, {size} bytes, but data_offsets={offsets} hold {offsets[1] - offsets[0]}"
    return None


def _are_sizes(value: Any) -> bool:
    # At most 64 dims of less than 2^63: what NumPy can hold, and what keeps the product below short to compute.
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )


def _remedy(folder: Path) -> str:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for p in folder.glob(pattern))
    if pickles:
        return f"{pickles[0]!r} is a pickle, which runs code when it is read: convert it to safetensors elsewhere."
    return "Give the folder of a checkpoint in safetensors."
