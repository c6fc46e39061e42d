"""Times attention beside its peer on the GPU at hand: one JSON row a cell, appended to a file.

    python -m pallas_kernels.bench --out notebooks/results/attention_h200.jsonl [--only PART] [--seconds S]
    python -m pallas_kernels.bench --table notebooks/results/attention_h200.jsonl       # README's table

A figure is the sum of the kernels' times that CUPTI reports for one call, median over repeats, on random normal inputs;
backward is (forward + backward) - forward. With --workers, cells compile side by side and are timed one at a time.
TFLOP/s by the FlashAttention papers' convention (`AttentionSpec.flops`), or, for windows and packed documents, per live
pair. The peer is cuDNN as jax.nn calls it, in the same run: not this library's adapter, which also makes it safe
against NaN.
"""

import functools
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.spec import make_spec
from pallas_kernels.timing import arguments, each, has_gpu, milliseconds, record, setting

TOKENS = 16_384
# Packed documents of the row: 16k tokens in all.
DOCUMENTS = (4096, 3072, 2500, 2000, 1700, 1300, 1000, 716)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One call to time: TOKENS tokens in rows of `length`; heads as given, or as many as make 2048 columns."""

    head_dim: int
    length: int
    causal: bool
    heads: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    window: int | None = None
    documents: bool = False
    backward: bool = False

    @property
    def name(self) -> str:
        parts = [f"d{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else ""), f"s{self.length}"]
        parts += ["causal" if self.causal else "none"]
        parts += [f"{self.heads}/{self.kv_heads}"] if self.kv_heads else []
        parts += [f"window{self.window}"] if self.window else []
        parts += ["documents"] if self.documents else []
        return "-".join([*parts, "backward" if self.backward else "forward"])


def cells() -> Iterator[Cell]:
    """The table of README, the most wanted first."""
    for backward, length, head_dim, causal in itertools.product(
        (False, True), (8192, 4096, 2048, 16_384), (128, 64, 256), (True, False)
    ):
        yield Cell(head_dim=head_dim, length=length, causal=causal, backward=backward)
    for head_dim, backward in itertools.product((128, 64), (False, True)):
        yield Cell(head_dim=head_dim, length=4096, causal=True, heads=32, kv_heads=8, backward=backward)
    for backward in (False, True):
        yield Cell(head_dim=192, value_dim=128, length=8192, causal=True, heads=16, backward=backward)
        yield Cell(head_dim=128, length=TOKENS, causal=True, documents=True, backward=backward)
        yield Cell(head_dim=128, length=TOKENS, causal=True, window=1024, backward=backward)


def run(job: tuple[Cell, bool]) -> dict[str, Any]:
    """Times a cell, by this library's kernel or (True) by the peer; the row's figures."""
    cell, peer = job
    heads = cell.heads or 2048 // cell.head_dim
    kv_heads, value_dim = cell.kv_heads or heads, cell.value_dim or cell.head_dim
    batch = TOKENS // cell.length
    columns = ((heads, cell.head_dim), (kv_heads, cell.head_dim), (kv_heads, value_dim), (heads, value_dim))
    q, k, v, dout = (
        functools.partial(jax.random.normal, jax.random.key(seed), (batch, cell.length, *size), jnp.bfloat16)
        for seed, size in enumerate(columns)
    )
    arguments: dict[str, Any] = {"is_causal": cell.causal}
    if cell.window:
        arguments["local_window_size"] = (cell.window - 1, 0)
    spec = make_spec(*map(jax.eval_shape, (q, k, v)), **arguments)
    flops = spec.flops(backward=cell.backward, live=cell.window is not None)
    segments = ()
    if cell.documents:
        segments = (jnp.repeat(jnp.arange(len(DOCUMENTS)), jnp.asarray(DOCUMENTS), total_repeat_length=TOKENS)[None],)
        pairs = sum(n * (n + 1) // 2 for n in DOCUMENTS)
        flops = 2 * heads * pairs * (cell.head_dim + value_dim) * (5 if cell.backward else 2) // 2

    def attend(q, k, v, *segments):
        if peer:
            return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **arguments)
        ids = segments[0] if segments else None
        return dot_product_attention(q, k, v, segment_ids=ids, implementation="hopper", **arguments)

    def both(q, k, v, dout, *segments):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
        return out, pull(dout)

    time = milliseconds(attend, q, k, v, *segments)
    if cell.backward:
        time = milliseconds(both, q, k, v, dout, *segments) - time
    return {
        "cell": cell.name,
        "implementation": "jax.nn cudnn" if peer else "hopper",
        "ms": round(time, 4),
        "tflops": round(flops / time / 1e9, 1),
    }


def rows(chosen: list[Cell], *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each cell, as they come; one with "error" where a cell could not be timed."""
    has_peer = {cell: not (cell.documents or cell.value_dim) for cell in chosen}
    jobs = [(cell, peer) for cell in chosen for peer in (False, True)[: 1 + has_peer[cell]]]
    ours: dict[Cell, Any] = {}
    peers: dict[Cell, Any] = {}
    for (cell, peer), result in each(run, jobs, workers=workers, seconds=seconds):
        if isinstance(result, str):
            yield {"cell": cell.name, "error": ("cudnn: " if peer else "") + result}
            continue
        (peers if peer else ours)[cell] = result
        if cell not in ours or (has_peer[cell] and cell not in peers):
            continue
        row, other = ours[cell], peers.get(cell)
        if other:
            ratio = round(other["ms"] / row["ms"], 3)
            row |= {"cudnn_ms": other["ms"], "cudnn_tflops": other["tflops"], "ratio": ratio}
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: TFLOP/s of the last row of every cell and, in brackets, the ratio to cuDNN's."""
    last = {row["cell"]: row for row in rows}
    kinds = [(mask, way) for way in ("forward", "backward") for mask in ("none", "causal")]
    lines = ["| head dim, length | " + " | ".join(f"{way}, {mask}" for mask, way in kinds) + " |", "|---" * 5 + "|"]
    for head_dim, length in itertools.product((64, 128, 256), (2048, 4096, 8192, 16_384)):
        found = [last.get(f"d{head_dim}-s{length}-{mask}-{way}") for mask, way in kinds]
        if any(found):
            figures = [
                f"{row['tflops']:.0f}" + (f" ({row['ratio']:.2f}x)" if "ratio" in row else "") if row else "-"
                for row in found
            ]
            lines.append(f"| {head_dim}, {length} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.bench", __doc__ or "")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--table", type=Path, help="print this file's rows as a table, and time nothing")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    if not has_gpu():
        return 2
    shared = setting("pallas_kernels.bench", argv, args.commit)
    chosen = [cell for cell in cells() if args.only in cell.name]
    return int(record(rows(chosen, workers=args.workers, seconds=args.seconds), shared, args.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
