"""Times attention in e4m3 beside the 16-bit kernel on the GPU at hand: one JSON row a cell, appended to a file.

    python -m pallas_kernels.bench_attention_fp8 --out notebooks/results/attention_fp8_h200.jsonl [--only PART]
    python -m pallas_kernels.bench_attention_fp8 --candidates [--only PART]

As `pallas_kernels.bench`; "kernel" is the kernel alone, on operands that are quantised, "included" the whole call with
rotation, scales, casts and the transposition of the values. With --candidates instead a row for each configuration of
the kernel alone, the default's first.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import fp8, hopper_fp8, hopper_fp8_config, hopper_fp8_prologue
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.hopper_fp8_config import Fp8Config
from pallas_kernels.attention.spec import AttentionSpec, make_spec
from pallas_kernels.bench import TOKENS, Cell
from pallas_kernels.device import current_device
from pallas_kernels.timing import arguments, each, has_gpu, milliseconds, record, setting

KINDS = ("kernel", "included", "bf16")


def cells() -> Iterator[Cell]:
    """The most wanted first."""
    for length, head_dim, causal in itertools.product((8192, 16_384, 4096, 2048), (128, 256, 64), (False, True)):
        yield Cell(head_dim=head_dim, length=length, causal=causal)


def inputs(cell: Cell) -> tuple[Sequence[Callable[[], jax.Array]], AttentionSpec]:
    """Functions that give query, key and value of a cell, and its spec."""
    heads, batch = 2048 // cell.head_dim, TOKENS // cell.length
    shape = (batch, cell.length, heads, cell.head_dim)
    arrays = [functools.partial(jax.random.normal, jax.random.key(n), shape, jnp.bfloat16) for n in range(3)]
    return arrays, make_spec(*map(jax.eval_shape, arrays), is_causal=cell.causal)


def run(job: tuple[Cell, str, Fp8Config | None]) -> dict[str, Any]:
    """Times one kind of a cell; the row's figures. The configuration is the default's unless given."""
    cell, kind, config = job
    arrays, spec = inputs(cell)
    config = config or hopper_fp8_config.default(spec)

    def attend(q, k, v):
        precision = "fp8" if kind == "included" else "input"
        implementation = "hopper_fp8" if kind == "included" else "hopper"
        return dot_product_attention(q, k, v, is_causal=cell.causal, precision=precision, implementation=implementation)

    def kernel(*operands):
        return hopper_fp8.attend_operands(
            spec, fp8.Operands(*operands), scale=spec.default_scale, config=config, device=current_device()
        )

    if kind == "kernel":
        operands = jax.jit(
            lambda: hopper_fp8_prologue.quantise(spec, *(array() for array in arrays), block=config.kv_block)
        )
        time = milliseconds(kernel, *(lambda n=n: operands()[n] for n in range(len(fp8.Operands._fields))))
    else:
        time = milliseconds(attend, *arrays)
    row = {f"{kind}_ms": round(time, 4), f"{kind}_tflops": round(spec.flops() / time / 1e9, 1)}
    return row | ({"config": str(config)} if kind == "kernel" else {})


def candidate_rows(chosen: list[Cell], *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each cell and candidate, as they come; the first candidates of all cells first."""
    jobs = [[(cell, "kernel", config) for config in hopper_fp8_config.candidates(inputs(cell)[1])] for cell in chosen]
    in_turn = [job for place in itertools.zip_longest(*jobs) for job in place if job is not None]
    for (cell, _, config), result in each(run, in_turn, workers=workers, seconds=seconds):
        failed = {"config": str(config), "error": result}
        yield {"cell": cell.name} | (failed if isinstance(result, str) else result)


def rows(chosen: list[Cell], *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each cell, as they come; one with "error" where a kind could not be timed."""
    jobs = [(cell, kind, None) for cell in chosen for kind in KINDS]
    found: dict[Cell, dict[str, Any]] = {}
    for (cell, kind, _), result in each(run, jobs, workers=workers, seconds=seconds):
        if isinstance(result, str):
            yield {"cell": cell.name, "error": f"{kind}: {result}"}
            continue
        row = found.setdefault(cell, {"cell": cell.name})
        row.update(result)
        if all(f"{kind}_ms" in row for kind in KINDS):
            yield row


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.bench_attention_fp8", __doc__ or "")
    parser.add_argument("--candidates", action="store_true", help="every configuration of the kernel alone")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if not has_gpu():
        return 2
    shared = setting("pallas_kernels.bench_attention_fp8", argv, args.commit)
    chosen = [cell for cell in cells() if args.only in cell.name]
    found = (candidate_rows if args.candidates else rows)(chosen, workers=args.workers, seconds=args.seconds)
    return int(record(found, shared, args.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
