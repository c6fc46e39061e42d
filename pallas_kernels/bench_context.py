"""Times causal attention over a sequence that is cut over several GPUs, beside one GPU with all of it.

    python -m pallas_kernels.bench_context --out notebooks/results/context_h200.jsonl [--length 32768]

A row's `efficiency` is the FLOP rate of a device of the mesh over that of one GPU alone: 1 would be a sequence that
costs nothing to cut. By the clock, since kernels of several devices and their transfers overlap: the median over
repeats of several calls in one go. Forward, and forward with backward; 16 heads of 128, bfloat16, zigzag order.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.spec import ContextParallel, make_spec
from pallas_kernels.timing import arguments, has_gpu, record, setting
from sharding.mesh import make_mesh

HEADS, HEAD_DIM = 16, 128
WAYS: tuple[ContextParallel, ...] = ("ring", "all_gather")


def milliseconds(function: Callable[..., Any], arrays: tuple[Any, ...], *, repeats: int, calls: int) -> float:
    """Median time of a call, of `calls` that are started before the first one ends."""
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([function(*arrays) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def measure(length: int, devices: int, way: ContextParallel, *, backward: bool, calls: int = 5) -> dict[str, Any]:
    """Milliseconds and TFLOP/s a device of one call over `devices` devices."""
    mesh = make_mesh({"context": devices})
    sharding = NamedSharding(mesh, P(None, "context"))

    @functools.partial(jax.jit, out_shardings=sharding)
    def arrays() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(jax.random.normal(key, (1, length, HEADS, HEAD_DIM), jnp.bfloat16) for key in keys)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(q, k, v, is_causal=True, zigzag=devices, context_parallel=way)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    with jax.set_mesh(mesh):
        q, k, v, dout = arrays()
        spec = make_spec(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), is_causal=True)
        flops = spec.flops() + (spec.flops(backward=True) if backward else 0)
        operands = (q, k, v, dout) if backward else (q, k, v)
        ms = milliseconds(jax.jit(both if backward else attend), operands, repeats=5, calls=calls)
    return {"ms": round(ms, 3), "tflops_a_device": round(flops / ms / 1e9 / devices, 1)}


def rows(length: int, devices: int) -> Iterator[dict[str, Any]]:
    """A row for each way, forward and with backward, after that of one device."""
    for backward in (False, True):
        facts = {"cell": f"d{HEAD_DIM}-s{length}-causal-{'both' if backward else 'forward'}"}
        alone = measure(length, 1, "ring", backward=backward)
        yield facts | {"devices": 1, **alone}
        for way in WAYS:
            row = measure(length, devices, way, backward=backward)
            efficiency = round(alone["ms"] / row["ms"] / devices, 3)
            yield facts | {"devices": devices, "way": way, **row, "efficiency": efficiency}


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.bench_context", __doc__ or "")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the sequence (default 32768)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if not has_gpu():
        return 2
    devices = make_mesh({"context": -1}).size
    if devices < 2:
        print("error: one GPU - a sequence is cut over at least 2.", file=sys.stderr)
        return 2
    shared = setting("pallas_kernels.bench_context", argv, args.commit)
    return int(record(rows(args.length, devices), shared, args.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
