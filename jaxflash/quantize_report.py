"""What a quantisation says of itself: every linear as JSON, and a table of all blocks together."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxflash.atomic import write_atomically
from quant.recipe import Fp8Recipe, Recipe

REPORT = "quantization_report.json"


def gain(record: dict[str, Any]) -> float:
    """The objective of a linear as a share of the nearest codes' own; 1 where those have no error."""
    return record["objective"] / record["rtn"] if record["rtn"] else 1.0


def write_report(folder: Path, records: Sequence[dict[str, Any]], recipe: Recipe | Fp8Recipe, **settings: Any) -> None:
    """`quantization_report.json` in `folder`: the recipe, the settings, and the records that `quantize` gave."""
    content = {"recipe": dataclasses.asdict(recipe), **settings, "linears": list(records)}
    write_atomically(folder / REPORT, json.dumps(content, indent=1))


def summary(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each kind of linear, over all blocks."""
    table = Table("linear", "shape", "error, of nearest codes'", "worst", "columns kept nearest", "clipped", "damping")
    for name, kind in _by_linear(records).items():
        gains = [gain(record) for record in kind]
        worst = max(range(len(kind)), key=gains.__getitem__)
        columns = sum(record["fallback"] for record in kind) / (len(kind) * kind[0]["shape"][1])
        dampings = [math.nan if record["damping"] is None else record["damping"] for record in kind]
        table.add_row(
            name,
            " x ".join(map(str, kind[0]["shape"])),
            f"{sum(r['objective'] for r in kind) / (sum(r['rtn'] for r in kind) or 1):.1%}",
            f"{gains[worst]:.1%} (block {kind[worst]['block']})",
            f"{columns:.1%}",
            f"{sum(record['clipped'] for record in kind) / len(kind):.1%}",
            "none solved" if all(map(math.isnan, dampings)) else f"{max(dampings):.2g}",
        )
    return table


def fp8_summary(records: Sequence[dict[str, Any]]) -> Table:
    """The same of weights in 8-bit floats: |W - Q| / |W|, whose mean over blocks is that of squares."""
    table = Table("linear", "shape", "error of the weights", "worst")
    for name, kind in _by_linear(records).items():
        worst = max(kind, key=lambda record: record["error"])
        mean = math.sqrt(sum(record["error"] ** 2 for record in kind) / len(kind))
        shape = " x ".join(map(str, kind[0]["shape"]))
        table.add_row(name, shape, f"{mean:.2%}", f"{worst['error']:.2%} (block {worst['block']})")
    return table


def _by_linear(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["linear"], []).append(record)
    return kinds
