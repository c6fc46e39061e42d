"""Times the product with packed 4-bit weights beside 16-bit cuBLAS and beside dequantising in XLA, on the GPU at hand.

    XLA_FLAGS="--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+CUBLAS,+CUBLASLT --xla_gpu_graph_min_graph_size=1" \\
        XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pallas_kernels.bench_w4a16 --workers 12 [--only PART] \\
        --out notebooks/results/w4a16_h200.jsonl --write

A figure is the time of a chain of calls in one program over at least 200 MB of distinct weights, so that every call
finds the L2 cache cold, divided by the calls; the sum of the kernels' times by CUPTI stands beside it. Every candidate
of the kernels is timed, and the row of a cell holds the best of each implementation.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.device import current_device
from pallas_kernels.timing import arguments, chained, each, has_gpu, record, setting
from pallas_kernels.w4a16 import hopper, hopper_large, reference
from pallas_kernels.w4a16.api import KERNELS
from pallas_kernels.w4a16.layout import TILE
from pallas_kernels.w4a16.spec import W4A16Spec

# (K, N) of the linears of Llama-3's 8B and 70B shapes.
SHAPES = {
    "70B gate_up": (8192, 57344), "8B gate_up": (4096, 28672), "8B down": (14336, 4096), "8B o": (4096, 4096),
}  # fmt: skip
ROWS = (1, 16, 64, 256, 4096)
MOST_TRIED = 8  # configurations of hopper_large, the ones predicted to be best
COLD = 220_000_000  # bytes of weights, four times the L2 cache
MOST_BYTES = 5_000_000_000  # of weights in 16 bits, so that several workers' fit into the GPU side by side


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One product: a shape, rows of x, and how the weight is packed."""

    shape: str
    M: int
    group: int = 128
    zeros: bool = False

    @property
    def name(self) -> str:
        packed = (f" group {self.group}" if self.group != 128 else "") + (" asymmetric" if self.zeros else "")
        return f"{self.shape} M{self.M}{packed}"

    @property
    def is_plain(self) -> bool:
        return self.group == 128 and not self.zeros

    @property
    def spec(self) -> W4A16Spec:
        K, N = SHAPES[self.shape]
        facts: dict[str, Any] = {"dtype": "bfloat16", "scale_dtype": "bfloat16"}
        return W4A16Spec(M=self.M, K=K, N=N, group=self.group, zeros=self.zeros, **facts)


Job = tuple[Cell, str, Any]
Best = dict[Cell, dict[str, dict[str, Any]]]


def cells() -> list[Cell]:
    """The table, large products first, whose kernels compile longest; then other groups and zero points."""
    table = [Cell(shape=shape, M=M) for M, shape in itertools.product(reversed(ROWS), SHAPES)]
    packed = [(128, True), (64, False), (64, True), (32, False), (32, True)]
    return table + [Cell(shape=s, M=16, group=g, zeros=z) for s in ("70B gate_up", "8B down") for g, z in packed]


def jobs(cell: Cell) -> list[Job]:
    """(cell, implementation, configuration) of what is timed for a cell, a kernel's default first."""
    spec, device = cell.spec, current_device()
    found: list[Job] = [(cell, "bf16", None), (cell, "xla", None)] if cell.is_plain else []
    if hopper.why_not(spec, device) is None:
        # A step of twice the least was the best of every shape, or within 2 % of it (H200, 2026-11-30).
        every = [config for config in hopper.candidates(spec, device) if config.depth == 2]
        found += [(cell, "hopper", config) for config in dict.fromkeys([hopper.default(spec, device), *every])]
    # From how many rows on hopper_large is the best is what is to be found out; one is not among them.
    if spec.M >= 8 and hopper_large.why_not(spec, device) is None:
        every = hopper_large.ranked(spec, device)[:MOST_TRIED]
        found += [(cell, "hopper_large", config) for config in every]
    return found


def run(job: Job) -> dict[str, Any]:
    """Times one implementation of a cell."""
    cell, name, config = job
    spec, device = cell.spec, current_device()
    bytes_of_weights = 2 * spec.K * spec.N if name == "bf16" else spec.weight_bytes()
    copies = max(1, -(-COLD // bytes_of_weights))
    calls, rounds = (40, 8) if cell.M <= 64 else (12, 6) if cell.M <= 256 else (4, 2)
    calls = max(calls, copies)
    if name in ("bf16", "xla"):  # XLA would make one product of two that share a weight
        calls = copies = max(copies, min(calls, MOST_BYTES // (2 * spec.K * spec.N)))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    inputs = [functools.partial(normal, jax.random.key(n), (spec.M, spec.K)) for n in range(calls)]
    if name == "bf16":
        weights = [[functools.partial(normal, jax.random.key(-1 - n), (spec.K, spec.N))] for n in range(copies)]
    else:
        weights = [_packed(spec, n) for n in range(copies)]

    def one(x: Any, w: Any, scales: Any = None, zeros: Any = None) -> Any:
        if name == "bf16":
            return x @ w
        if name == "xla":
            return reference.matmul(spec, x, w, scales, zeros)
        return KERNELS[name].matmul(spec, x, w, scales, zeros, config=config, device=device)

    chain = chained(one, [(x, *weights[n % copies]) for n, x in enumerate(inputs)], rounds=rounds)
    if name.startswith("hopper") and chain.custom_calls < calls:
        raise RuntimeError(f"bench_w4a16: {chain.custom_calls} custom calls for {calls} - XLA merged some.")
    return {
        "us": round(chain.us, 2),
        "cupti_us": round(chain.cupti_us, 2),
        "tb_s": round(bytes_of_weights / chain.us / 1e6, 2),
        "config": None if config is None else dataclasses.asdict(config),
    }


def _packed(spec: W4A16Spec, seed: int) -> list[Any]:
    """Makers of random words, scales and zeros."""
    tiles = (spec.padded_N // TILE, spec.padded_K // TILE, 8, 64)
    groups = (spec.padded_N // TILE, spec.groups, TILE)
    key = jax.random.key(1000 + seed)

    def words() -> Any:
        return jax.lax.bitcast_convert_type(jax.random.bits(key, tiles, jnp.uint32), jnp.int32)

    def scales() -> Any:
        return jax.random.uniform(key, groups, jnp.bfloat16, 0.005, 0.01)

    def zeros() -> Any:
        return jax.random.randint(key, groups, 0, 16).astype(jnp.uint8)

    return [words, scales, zeros][: 2 + spec.zeros]


def rows(chosen: list[Cell], *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each cell once all its jobs are done, and one with "error" for each job that failed.

    Other groups and zero points are timed with the best configurations of the plain cell, and with the default.
    """
    start, best = time.monotonic(), Best()
    plain = {cell: jobs(cell) for cell in chosen if cell.is_plain}
    yield from _timed(plain, best, workers=workers, seconds=seconds)
    others = {}
    for cell in chosen:
        if not cell.is_plain:
            like = best.get(replace(cell, group=128, zeros=False), {})
            kept = {name: KERNELS[name].Config(**like[name]["config"]) for name in KERNELS if name in like}
            defaults = {name: KERNELS[name].default(cell.spec, current_device()) for name in kept or KERNELS}
            others[cell] = [
                (cell, name, c) for name in defaults for c in {defaults[name], kept.get(name, defaults[name])}
            ]
    yield from _timed(others, best, workers=workers, seconds=seconds - (time.monotonic() - start))


def _timed(todo: dict[Cell, list[Job]], best: Best, *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows, as they come; `best` is filled with the fastest of each implementation and the time of its default."""
    left = {cell: len(these) for cell, these in todo.items()}
    defaults: dict[Cell, dict[str, float]] = {cell: {} for cell in todo}
    every = [job for these in todo.values() for job in these]
    for (cell, name, config), result in each(run, every, workers=workers, seconds=seconds):
        left[cell] -= 1
        of = best.setdefault(cell, {})
        if isinstance(result, str):
            yield {"cell": cell.name, "implementation": name, "config": str(config), "error": result}
        else:
            if name not in of or result["us"] < of[name]["us"]:
                of[name] = result
            if config is not None and config == KERNELS[name].default(cell.spec, current_device()):
                defaults[cell][name] = result["us"]
        if not left[cell]:
            for name, us in defaults[cell].items():
                of[name]["default_us"] = us
            yield {"cell": cell.name, **dataclasses.asdict(cell), **of}


KEYS = ("device", "kernel", "K", "N", "length")  # what no two rows of tuned.json have in common


def tuned_rows(row: dict[str, Any], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """A measured cell as rows of tuned.json: the best configuration of each kernel, whose `length` is M."""
    if not Cell(shape=row["shape"], M=row["M"], group=row["group"], zeros=row["zeros"]).is_plain:
        return []
    K, N = SHAPES[row["shape"]]
    return [
        {"kernel": name, "K": K, "N": N, "length": row["M"]}
        | {fact: row[name][fact] for fact in ("config", "us", "default_us")}
        | {"rivals_us": {rival: row[rival]["us"] for rival in ("bf16", "xla") if rival in row}}
        | shared
        for name in KERNELS
        if name in row and "default_us" in row[name]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: microseconds by the clock of the kernel that a call runs, from the last row of every plain cell.

    In brackets how many times as long 16-bit weights take by cuBLAS in the same run.
    """
    last = {row["cell"]: row for row in rows if "peer" not in row}
    lines = ["| weight, K x N | " + " | ".join(f"M={M}" for M in ROWS) + " |", "|---" * (1 + len(ROWS)) + "|"]
    for shape, (K, N) in SHAPES.items():
        figures = []
        for M in ROWS:
            cell = Cell(shape=shape, M=M)
            row, kernel = last.get(cell.name), "hopper" if M <= hopper.MOST_ROWS else "hopper_large"
            figures.append(f"{row[kernel]['us']:.4g} ({row['bf16']['us'] / row[kernel]['us']:.2f}x)" if row else "-")
        lines.append(f"| {shape}, {K} x {N} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.bench_w4a16", __doc__ or "")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the best configurations into this tuned.json")
    parser.add_argument("--table", type=Path, help="print this file's rows as a table, and time nothing")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    if not has_gpu():
        return 2
    shared = setting("pallas_kernels.bench_w4a16", argv, args.commit)
    chosen = [cell for cell in cells() if args.only in cell.name]
    found = []

    def kept() -> Iterator[dict[str, Any]]:
        for row in rows(chosen, workers=args.workers, seconds=args.seconds):
            found.append(row)
            yield row

    failed = record(kept(), shared, args.out)
    if args.write is not None:
        best = [new for row in found if "error" not in row for new in tuned_rows(row, shared)]
        tuned.write(args.write, best, KEYS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
