"""The accuracy of products of 8-bit operands over a long K, against float64: what is lost where sums have few bits.

    python -m pallas_kernels.accuracy_fp8 --out notebooks/results/fp8_accuracy.jsonl [--K 131072]

"equal": K products of 1.875 x 1.875, all with the scale 1, whose sum bfloat16 holds exactly: what is missing was lost
in sums. "random": log-normal codes of both signs with uniform scales; the error includes the rounding of y. Both as
|y - exact| / |exact|, norms of Frobenius. On Hopper the kernel with scales by block, as it runs by default and split
over a cluster, and cuBLASLt's product with one scale a tensor, summed by the tensor core alone and promoted; elsewhere
the plain path.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device, current_device
from pallas_kernels.fp8 import hopper, hopper_config, native, reference
from pallas_kernels.fp8.cases import Case
from pallas_kernels.fp8.hopper_config import Config
from pallas_kernels.fp8.spec import Fp8Spec, w_block, x_block
from pallas_kernels.timing import setting

ROWS, COLUMNS = (64, 300), 128  # of which the kernel has few in other schedules
EQUAL = 1.875  # all four bits of an e4m3 value

type Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def operands(kind: str, case: Case) -> Operands:
    """x, x_scales, w, w_scales."""
    found = case.operands()
    return (
        found
        if kind == "random"
        else tuple(  # pyright: ignore[reportReturnType]
            np.full(a.shape, EQUAL if n % 2 == 0 else 1.0).astype(a.dtype) for n, a in enumerate(found)
        )
    )


def exact(spec: Fp8Spec, arrays: Operands) -> np.ndarray:
    """y in float64."""
    x, x_scales, w, w_scales = (a.astype(np.float64) for a in arrays)
    return _scaled(x, x_scales, x_block(spec.scaling, x.shape)) @ _scaled(w, w_scales, w_block(spec.scaling, w.shape)).T


def _scaled(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = (np.arange(size) // part for size, part in zip(codes.shape, block, strict=True))
    return codes * scales[rows[:, None], columns]


def products(M: int, K: int, device: Device) -> Iterator[tuple[str, Config | None, Fp8Spec, Callable[..., Any]]]:
    """(implementation, configuration, spec, function of the operands) of what can run there."""

    def spec(scaling: str, **facts: Any) -> Fp8Spec:
        return Fp8Spec(M=M, K=K, N=COLUMNS, scaling=scaling, dtype="bfloat16", **facts)

    block = spec("block")
    if hopper.why_not(block, device) is None:
        every = hopper_config.candidates(block, device)
        for config in [every[0], *[config for config in every if config.split > 1][:1]]:
            yield "hopper", config, block, functools.partial(hopper.matmul, block, config=config, device=device)
    if native.why_not(spec("tensor"), device) is None:
        for fast in (True, False):
            whole = spec("tensor", fast_accumulation=fast)
            yield "xla_fp8", None, whole, functools.partial(native.matmul, whole)
    if device.platform != "gpu":
        yield "xla", None, block, functools.partial(reference.matmul, block)


def rows(K: int, device: Device) -> Iterator[dict[str, Any]]:
    """A row for every kind of operands, number of rows, and implementation."""
    for kind, M in itertools.product(("equal", "random"), ROWS):
        for name, config, spec, function in products(M, K, device):
            arrays = operands(kind, Case(M=M, K=K, N=COLUMNS, scaling=spec.scaling))
            right = exact(spec, arrays)
            y = np.asarray(jax.jit(function)(*map(jnp.asarray, arrays))).astype(np.float64)
            facts = {"kind": kind, **dataclasses.asdict(spec), "config": config and dataclasses.asdict(config)}
            error = float(np.linalg.norm(y - right) / np.linalg.norm(right))
            yield {"implementation": name, **facts, "error": error}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.accuracy_fp8", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--K", type=int, default=131072, help="products to a sum (default 131072)")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="goes into the rows; default: git's")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    shared = setting("pallas_kernels.accuracy_fp8", argv, args.commit)
    for row in rows(args.K, current_device()):
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row | shared) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
