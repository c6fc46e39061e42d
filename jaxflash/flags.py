"""Values of flags that more than one command reads."""

import argparse
import re
from collections.abc import Sequence

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def assignments(
    items: Sequence[str],
    *,
    reserved: frozenset[str] = frozenset(),
    flag: str = "--set",
    example: str = "model.n_layers=2",
) -> dict[str, str]:
    """What `--set KEY=VALUE` said; a key that has a flag of its own here is refused."""
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{flag} {item!r}: must be KEY=VALUE, for instance {example}.")
        if key in reserved:
            raise ValueError(f"{flag} {item!r}: {key} has a flag of its own here. Use --{key} {value}.")
        pairs[key] = value
    return pairs


def size(text: str) -> float:
    """A positive number of bytes, with a unit or without.

    >>> size("141GB"), size("1.5 GiB"), size("5e10")
    (141000000000.0, 1610612736.0, 50000000000.0)
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGT]?i?)B?\s*", text)
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of bytes, for instance 141GB")
    return float(match[1]) * _UNITS[match[2]]
