"""Times attention beside its peer on the GPU at hand: one JSON row a cell, appended to a file.

    python -m pallas_kernels.bench --out notebooks/results/attention_h200.jsonl [--only PART] [--seconds S]
    python -m pallas_kernels.bench --table notebooks/results/attention_h200.jsonl       # README's table

A figure is the sum of the kernels' times that CUPTI reports for one call, median over repeats, on random normal inputs;
backward is (forward + backward) - forward. TFLOP/s by the FlashAttention papers' convention (`AttentionSpec.flops`),
or, for windows and packed documents, per live pair. The peer is cuDNN as jax.nn calls it, in the same process: not
this library's adapter, which also makes it safe against NaN.
"""

import argparse
import datetime
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.spec import make_spec
from pallas_kernels.device import current_device

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
    def implementation(self) -> str:
        """Ours for it."""
        return "hopper" if max(self.head_dim, self.value_dim or 0) <= 128 else "hopper_forward"

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
        # There is no backward kernel for head dim 256 yet.
        if not (backward and head_dim == 256):
            yield Cell(head_dim=head_dim, length=length, causal=causal, backward=backward)
    for head_dim, backward in itertools.product((128, 64), (False, True)):
        yield Cell(head_dim=head_dim, length=4096, causal=True, heads=32, kv_heads=8, backward=backward)
    yield Cell(head_dim=192, value_dim=128, length=8192, causal=True, heads=16)
    for backward in (False, True):
        yield Cell(head_dim=128, length=TOKENS, causal=True, documents=True, backward=backward)
        yield Cell(head_dim=128, length=TOKENS, causal=True, window=1024, backward=backward)


def measure(function: Callable[..., Any], *args: Any, repeats: int = 3, iterations: int = 7) -> float:
    """Median time of one call's kernels on the device, in milliseconds."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        _, measured = profiler.measure(function, iterations=iterations)(*args)
        times += measured if isinstance(measured, list) else [measured]
    return float(np.median(times))


def run(cell: Cell, peer: bool = False) -> dict[str, Any]:
    """Times one cell, by this library's kernel or by the peer; the row's figures."""
    heads = cell.heads or 2048 // cell.head_dim
    kv_heads, value_dim = cell.kv_heads or heads, cell.value_dim or cell.head_dim
    batch = TOKENS // cell.length
    sizes = ((heads, cell.head_dim), (kv_heads, cell.head_dim), (kv_heads, value_dim))
    q, k, v = (
        jax.random.normal(jax.random.key(seed), (batch, cell.length, *size), jnp.bfloat16)
        for seed, size in enumerate(sizes)
    )
    arguments: dict[str, Any] = {"is_causal": cell.causal}
    if cell.window:
        arguments["local_window_size"] = (cell.window - 1, 0)
    spec = make_spec(q, k, v, **arguments)
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
        return dot_product_attention(q, k, v, segment_ids=ids, implementation=cell.implementation, **arguments)

    forward = jax.jit(attend)
    milliseconds = measure(forward, q, k, v, *segments)
    if cell.backward:
        dout = jax.random.normal(jax.random.key(9), (batch, cell.length, heads, value_dim), jnp.bfloat16)

        @jax.jit
        def both(q, k, v, dout, *segments):
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
            return out, pull(dout)

        milliseconds = measure(both, q, k, v, dout, *segments) - milliseconds
    return {
        "cell": cell.name,
        "implementation": "jax.nn cudnn" if peer else cell.implementation,
        "ms": round(milliseconds, 4),
        "tflops": round(flops / milliseconds / 1e9, 1),
    }


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


@functools.cache
def _setting(commit: str | None) -> dict[str, Any]:
    """What every row repeats."""
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": current_device().kind,
        "jax": jax.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "command": "python -m pallas_kernels.bench",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after so long")
    parser.add_argument("--commit", help="goes into the rows; default: git's")
    parser.add_argument("--table", type=Path, help="print this file's rows as a table, and time nothing")
    arguments = parser.parse_args(argv)
    if arguments.table:
        print(table([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return 0
    if current_device().platform != "gpu":
        print(f"error: {current_device()} - the benchmark needs a GPU.", file=sys.stderr)
        return 2
    start = time.monotonic()
    for cell in cells():
        if arguments.only not in cell.name or time.monotonic() - start > arguments.seconds:
            continue
        ours = run(cell)
        row = ours | _setting(arguments.commit)
        if not (cell.documents or cell.value_dim):
            peer = run(cell, peer=True)
            row |= {"cudnn_ms": peer["ms"], "cudnn_tflops": peer["tflops"], "ratio": round(peer["ms"] / ours["ms"], 3)}
        print(json.dumps(row), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
