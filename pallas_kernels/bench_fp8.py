"""Times products of 8-bit operands beside XLA's own with one scale a tensor, and beside bfloat16, on the GPU at hand.

    XLA_FLAGS="--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_command_buffer=+CUSTOM_CALL,+CUBLAS,+CUBLASLT \\
        --xla_gpu_graph_min_graph_size=1" XLA_PYTHON_CLIENT_PREALLOCATE=false \\
        python -m pallas_kernels.bench_fp8 --workers 12 [--only PART] --out notebooks/results/fp8_matmul_h200.jsonl

A figure is the time of a chain of calls in one program, over weights of more than the L2 cache holds where rows are
few, divided by the calls; the sum of the kernels' times by CUPTI stands beside it. "hopper" runs what a call runs
(tuned.json), on operands rounded before, scales as the kernel that rounds leaves them; "w8a8" rounds bfloat16
activations, too, and "quantize" does nothing else. Without Triton XLA's autotuner is a matter of seconds; cuBLASLt is
the faster of the two here.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import current_device
from pallas_kernels.fp8 import hopper, hopper_config, hopper_quantize, native, tile
from pallas_kernels.fp8.hopper_config import Config
from pallas_kernels.fp8.spec import E4M3, Fp8Spec, w_block, x_block
from pallas_kernels.timing import arguments, chained, each, has_gpu, record, setting

# (K, N) of DeepSeek-V3's linears, and of a 1B and an 8B Llama's up projection.
SHAPES = {
    "7168x16384": (16384, 7168), "4096x7168": (7168, 4096), "24576x1536": (1536, 24576), "2112x7168": (7168, 2112),
    "1B up": (2048, 8192), "8B up": (4096, 14336),
}  # fmt: skip
ROWS = (64, 16, 4096, 256)
COLD = 220_000_000  # bytes of weights, four times the L2 cache


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One product: rows of x, and a shape."""

    M: int
    shape: str

    @property
    def name(self) -> str:
        return f"{self.shape} M{self.M}"

    def spec(self, scaling: str) -> Fp8Spec:
        K, N = SHAPES[self.shape]
        power = scaling == "tensor"
        return Fp8Spec(M=self.M, K=K, N=N, scaling=scaling, dtype="bfloat16", power_of_two=power)


Job = tuple[Cell, str, Config | None]


def cells() -> list[Cell]:
    """Those with a goal first; then all shapes, and more rows, and fewer."""
    first = [(64, "7168x16384"), (4096, "7168x16384")]
    more = [(32768, "1B up"), (32768, "8B up"), (1, "7168x16384"), (128, "7168x16384")]
    every = dict.fromkeys([*first, *itertools.product(ROWS, SHAPES), *more])
    return [Cell(M=M, shape=shape) for M, shape in every]


def jobs(cell: Cell) -> list[Job]:
    """(cell, implementation, configuration) of what is timed for a cell."""
    peers = ["xla_fp8", "bf16", "w8a8"] + (["quantize", "quantize_xla"] if cell.shape == "7168x16384" else [])
    config = hopper_config.config_of(cell.spec("block"), current_device())
    return [(cell, "hopper", config), *((cell, peer, None) for peer in peers)]


def run(job: Job) -> dict[str, Any]:
    """Times one implementation of a cell."""
    cell, name, config = job
    spec = cell.spec("tensor" if name == "xla_fp8" else "block")
    few = cell.M <= 512
    copies = max(1, -(-COLD // spec.weight_bytes())) if few else 1
    calls, rounds = (max(8, copies), 6) if few else (2, 2)
    if name in ("bf16", "xla_fp8"):  # XLA would make one product of two that share a weight
        copies = calls
    x, w = (spec.M, spec.K), (spec.N, spec.K)

    def plain(seed: int, shape: tuple[int, int]) -> list[Any]:
        return [functools.partial(jax.random.normal, jax.random.key(seed), shape, jnp.bfloat16)]

    def rounded(seed: int, shape: tuple[int, int], block: tuple[int, int]) -> list[Any]:
        @jax.jit
        def make() -> Any:
            (values,) = (one() for one in plain(seed, shape))
            codes, scales = tile.quantize(values, block, E4M3, power_of_two=spec.power_of_two)
            # Of activations, as `hopper_quantize` writes them, so that no transpose is timed that no call has.
            return codes, scales.T if name == "hopper" and seed >= 0 else scales

        return [make]

    of_x = name in ("bf16", "w8a8", "quantize", "quantize_xla")
    xs = [plain(n, x) if of_x else rounded(n, x, x_block(spec.scaling, x)) for n in range(calls)]
    ws = [plain(-1 - n, w) if name == "bf16" else rounded(-1 - n, w, w_block(spec.scaling, w)) for n in range(copies)]
    ws = [[]] if name.startswith("quantize") else ws
    chain = chained(_function(spec, name, config), [a + ws[n % len(ws)] for n, a in enumerate(xs)], rounds=rounds)
    read = {"bf16": 2 * spec.N * spec.K, "quantize": 3 * spec.M * spec.K, "quantize_xla": 3 * spec.M * spec.K}
    return {
        "us": round(chain.us, 2),
        "cupti_us": round(chain.cupti_us, 2),
        "tb_s": round(read.get(name, spec.weight_bytes()) / chain.cupti_us / 1e6, 2),
        "config": None if config is None else dataclasses.asdict(config),
    } | ({} if name.startswith("quantize") else {"tflops": round(spec.flops() / chain.cupti_us / 1e6, 1)})


def _function(spec: Fp8Spec, name: str, config: Config | None) -> Callable[..., Any]:
    device = current_device()
    return {
        "bf16": lambda x, w: x @ w.T,
        "xla_fp8": lambda x, w: native.matmul(spec, *x, *w),
        "hopper": lambda x, w: hopper.matmul(spec, x[0], x[1].T, *w, config=config, device=device),
        "w8a8": lambda x, w: hopper.matmul(spec, *hopper_quantize.quantize(x, E4M3), *w, config=config, device=device),
        "quantize": lambda x: hopper_quantize.quantize(x, E4M3)[0],
        "quantize_xla": lambda x: tile.quantize(x, (1, 128), E4M3)[0],
    }[name]


def rows(chosen: list[Cell], *, workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for every job, as they come; one with "error" for each that failed."""
    for (cell, name, config), result in each(
        run, [j for c in chosen for j in jobs(c)], workers=workers, seconds=seconds
    ):
        facts = {"cell": cell.name, **dataclasses.asdict(cell), "implementation": name}
        yield facts | ({"config": str(config), "error": result} if isinstance(result, str) else result)


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.bench_fp8", __doc__ or "")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if not has_gpu():
        return 2
    shared = setting("pallas_kernels.bench_fp8", argv, args.commit)
    chosen = [cell for cell in cells() if args.only in cell.name]
    return int(record(rows(chosen, workers=args.workers, seconds=args.seconds), shared, args.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
