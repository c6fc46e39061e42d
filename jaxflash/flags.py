"""Values of flags: assignments, sizes, numbers of devices."""

import argparse
import re
from collections.abc import Sequence

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def assignments(
    items: Sequence[str],
    *,
    reserved: frozenset[str] = frozenset(),
    chosen: frozenset[str] = frozenset(),
    flag: str = "--set",
    example: str = "model.n_layers=2",
) -> dict[str, str]:
    """What `--set KEY=VALUE` said; refused are keys that have a flag of their own, or that the command itself chooses.

    Raises ValueError for these, and for what is not KEY=VALUE.
    """
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{flag} {item!r}: must be KEY=VALUE, for instance {example}.")
        if key in reserved:
            own = key.rpartition(".")[2].replace("_", "-")
            raise ValueError(f"{flag} {item!r}: {key} has a flag of its own here. Use --{own} {value}.")
        if key in chosen:
            raise ValueError(f"{flag} {item!r}: {key} is what this command chooses. Leave it out.")
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


def numbers(text: str) -> list[int]:
    """Numbers of devices.

    >>> numbers("0,3")
    [0, 3]
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of GPUs, for instance 0,1")
    return [int(number) for number in text.split(",")]
