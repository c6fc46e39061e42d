"""JSON objects of a checkpoint folder, read with the distrust that downloaded files deserve."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# safetensors' own limit for a header; an index or a config is far below it.
MAX_BYTES = 100_000_000
MAX_CONFIG_BYTES = 10_000_000
# Python's own limit is 4300, told in words about `sys`; 2^64 has 20.
_MAX_DIGITS = 400


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `text` holds; `what` names it in errors.

    Raises:
      ValueError: not JSON, nested too deeply, not an object, a key given twice, or an integer of absurd length.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=functools.partial(_unique, what=what),
            parse_int=functools.partial(_integer, what=what),
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"load: {what} is not JSON ({error}) - the file is damaged. Fetch it again.") from error
    except RecursionError as error:
        raise ValueError(f"load: {what} is nested too deeply - no real one is. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"load: {what} holds a JSON {type(value).__name__} - must be an object. Fetch it again.")
    return value


def read_object(path: Path, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path`, of at most `limit` bytes.

    Raises:
      FileNotFoundError: no such file.
      ValueError: what `parse_object` refuses, or a larger file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"load: no file {str(path)!r} - the checkpoint is not complete. Fetch it again.")
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"load: {str(path)!r} has {size=} bytes - at most {limit}. Is it the right file?")
    return parse_object(path.read_bytes(), repr(str(path)))


def get_size(values: Mapping[str, Any], key: str, *, least: int = 1, what: str = "config.json") -> int:
    """`values[key]`, or ValueError where it is no integer from `least` to 2^31; `what` names the object."""
    value = values.get(key)
    if type(value) is not int or not least <= value < 1 << 31:
        raise ValueError(f"load: {what} has {key}={value!r} - must be an integer of at least {least}, below 2^31.")
    return value


def get_positive(
    values: Mapping[str, Any], key: str, default: float | None = None, *, what: str = "config.json"
) -> float:
    """`values[key]`, or the default where it is missing or null, or ValueError where it is no positive number."""
    value: Any = default if values.get(key) is None else values[key]
    if type(value) not in (int, float) or not 0 < value <= 1e30 or not math.isfinite(value):
        raise ValueError(f"load: {what} has {key}={value!r} - must be a positive number.")
    return float(value)


def get_flag(values: Mapping[str, Any], key: str, default: bool, *, what: str = "config.json") -> bool:
    """`values[key]`, or the default where it is missing or null, or ValueError where it is neither true nor false."""
    value = default if values.get(key) is None else values[key]
    if type(value) is not bool:
        raise ValueError(f"load: {what} has {key}={value!r} - must be true or false.")
    return value


def _unique(pairs: Sequence[tuple[str, Any]], *, what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"load: {what} gives {key!r} twice - which one holds is not defined. Fetch it again.")
        values[key] = value
    return values


def _integer(digits: str, *, what: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"load: {what} has an integer of {len(digits)} digits - no real one does. Fetch it again.")
    return int(digits)
