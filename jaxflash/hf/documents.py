"""JSON objects of a checkpoint folder, read with the distrust that downloaded files deserve."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# safetensors' own limit for a header; an index or a config is far below it.
MAX_BYTES = 100_000_000


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `text` holds; `what` names it in errors.

    Raises:
      ValueError: not JSON, nested too deeply, not an object, or with a key given twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"load: {what} is not JSON ({error}) - the file is damaged. Fetch it again.") from error
    except RecursionError as error:
        raise ValueError(f"load: {what} is nested too deeply - no real one is. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"load: {what} holds a JSON {type(value).__name__} - must be an object. Fetch it again.")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: what `parse_object` refuses, or an absurd size.
    """
    if not path.is_file():
        raise FileNotFoundError(f"load: no file {str(path)!r} - the checkpoint is not complete. Fetch it again.")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"load: {str(path)!r} has {size=} bytes - at most {MAX_BYTES}. Is it the right file?")
    return parse_object(path.read_bytes(), repr(str(path)))


def _unique(pairs: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"load: {what} gives {twice!r} twice - which one holds is not defined. Fetch it again.")
    return values
