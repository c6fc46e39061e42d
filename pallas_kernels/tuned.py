"""Configurations found by measurement: a family's tuned.json, written by `pallas_kernels.tune` and `bench_w4a16`."""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.device import Device


def lookup(path: Path, device: Device, kernel: str, facts: Mapping[str, Any], length: int) -> dict[str, Any] | None:
    """The configuration tuned for the device, the kernel and all of `facts`, at the nearest length; None without one.

    A pure function of its arguments and the file, which is part of the package: nothing is tuned while a program runs.
    Lengths are near by their ratio.
    """
    rows = [
        row
        for row in _rows(path)
        if row["device"] == device.kind and row["kernel"] == kernel and all(row[k] == v for k, v in facts.items())
    ]
    if not rows:
        return None
    return dict(min(rows, key=lambda row: abs(math.log(row["length"] / max(length, 1))))["config"])


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of both, the new one where both agree in all `keys`; in the order of these."""
    keys = tuple(keys)
    rows = {tuple(row[k] for k in keys): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows)]


def write(path: Path, rows: list[dict[str, Any]], keys: Iterable[str]) -> None:
    """Merges `rows` into the file, a row a line."""
    old = json.loads(path.read_text()) if path.exists() else []
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merge(old, rows, keys)) + "\n]\n")


@functools.cache
def _rows(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text()))
