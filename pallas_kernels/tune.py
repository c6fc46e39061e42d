"""Times the candidates of a family's kernels on the GPU at hand and writes the best to its tuned.json.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pallas_kernels.tune --family attention --workers 12 [--only PART]
    XLA_FLAGS=... XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pallas_kernels.tune --family fp8 --workers 12

Two rounds a problem: the schedules, then, of attention, for the best of them the share of the L2 cache. What beats the
default by less than `MARGIN` may be noise, and the default stays. Rows of other devices and other problems stay in the
file. Attention is timed by CUPTI; 8-bit products by the clock, in the chains and with the XLA_FLAGS of `bench_w4a16`,
since configurations differ in what runs besides the kernel. (`bench_w4a16` tunes 4-bit products itself.)
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels import bench_fp8, tuned
from pallas_kernels.attention import hopper, hopper_bwd, hopper_bwd_wide, hopper_config
from pallas_kernels.attention.hopper_config import BackwardConfig, Config
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.bench import TOKENS
from pallas_kernels.device import current_device
from pallas_kernels.fp8 import hopper_config as fp8_config
from pallas_kernels.timing import arguments, each, has_gpu, milliseconds, setting

MARGIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Problem:
    """16,384 tokens of 2048 columns, bfloat16, in rows of `length`."""

    rounds: ClassVar[int] = 2

    kernel: str  # "forward" or "backward"
    H: int
    H_v: int
    is_causal: bool
    length: int

    @property
    def name(self) -> str:
        return f"{self.kernel}-d{self.H}/{self.H_v}-s{self.length}-{'causal' if self.is_causal else 'none'}"

    @property
    def spec(self) -> AttentionSpec:
        heads = 16 if self.H == 192 else 2048 // self.H
        sizes: dict[str, Any] = dict(B=TOKENS // self.length, T=self.length, S=self.length, N=heads, K=heads)
        return AttentionSpec(**sizes, H=self.H, H_v=self.H_v, dtype="bfloat16", is_causal=self.is_causal)

    @property
    def candidates(self) -> list[Any]:
        """The default first."""
        spec = self.spec
        return (
            list(hopper_config.candidates(spec)) if self.kernel == "forward" else [hopper_config.backward_default(spec)]
        )

    def milliseconds(self, config: Any) -> float:
        """Of one kernel at one configuration."""
        return _of_attention(self, config)

    def tflops(self, ms: float) -> float:
        """TFLOP/s of a call that takes so long."""
        return self.spec.flops(backward=self.kernel == "backward") / ms / 1e9


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of `length` rows by a weight (N, K), both in 8 bits."""

    rounds: ClassVar[int] = 1

    kernel: str
    K: int
    N: int
    scaling: str
    length: int

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def cell(self) -> bench_fp8.Cell:
        shape = next(name for name, sizes in bench_fp8.SHAPES.items() if sizes == (self.K, self.N))
        return bench_fp8.Cell(M=self.length, shape=shape)

    @property
    def candidates(self) -> list[Any]:
        """The default first."""
        return fp8_config.candidates(self.cell.spec(self.scaling), current_device())

    def milliseconds(self, config: Any) -> float:
        """A call's, by the clock."""
        return bench_fp8.run((self.cell, "hopper", config))["us"] / 1e3

    def tflops(self, ms: float) -> float:
        """TFLOP/s of a call that takes so long."""
        return self.cell.spec(self.scaling).flops() / ms / 1e9


type Job = tuple[Problem | Product, Any]


def keys(kind: type) -> tuple[str, ...]:
    """What no two rows of a family's tuned.json have in common."""
    return ("device", *(f.name for f in dataclasses.fields(kind)))


KEYS = keys(Problem)


def problems() -> list[Problem]:
    """What is tuned; other calls take the nearest."""
    dims = {
        "forward": [(64, 64), (128, 128), (256, 256), (192, 128)],
        "backward": [(64, 64), (128, 128), (256, 256)],
    }
    return [
        Problem(kernel=kernel, H=H, H_v=H_v, is_causal=is_causal, length=length)
        for kernel, pairs in dims.items()
        for (H, H_v), length, is_causal in itertools.product(pairs, (8192, 2048), (True, False))
    ]


def products() -> list[Product]:
    """What is tuned of 8-bit products, few rows first: theirs depend on the configuration most."""
    return [
        Product(kernel=fp8_config.KERNEL, K=K, N=N, scaling="block", length=M)
        for M, (K, N) in itertools.product(bench_fp8.ROWS, bench_fp8.SHAPES.values())
    ]


FAMILIES: dict[str, tuple[Any, type, Path]] = {
    "attention": (problems, Problem, hopper_config.TUNED),
    "fp8": (products, Product, fp8_config.TUNED),
}


def run(job: Job) -> float:
    """Milliseconds of one problem at one configuration."""
    return job[0].milliseconds(job[1])


def _of_attention(problem: Problem, config: Config | BackwardConfig) -> float:
    spec, device = problem.spec, current_device()
    widths = (spec.H, spec.H, spec.H_v, spec.H_v)
    q, k, v, dout = (
        functools.partial(jax.random.normal, jax.random.key(n), (spec.B, spec.T, spec.N, width), jnp.bfloat16)
        for n, width in enumerate(widths)
    )

    def forward(q, k, v, config=None):
        return hopper.attend(spec, q, k, v, scale=spec.default_scale, config=config, device=device)

    if isinstance(config, Config):
        return milliseconds(functools.partial(forward, config=config), q, k, v, repeats=2)

    # Near what the forward pass would give, without its compilation: the mean of n random values, log of n terms.
    count = jnp.arange(1, spec.T + 1.0) if spec.is_causal else jnp.full(spec.T, float(spec.S))

    def out() -> Any:
        return (1.65 * dout() / jnp.sqrt(count)[:, None, None]).astype(jnp.bfloat16)

    def lse() -> Any:
        return jnp.broadcast_to(jnp.log(count)[:, None] + 0.5, (spec.B, spec.T, spec.N))

    def backward(q, k, v, out, lse, dout):
        kernel: Any = hopper_bwd_wide if hopper_config.is_wide(spec) else hopper_bwd
        return kernel.backward(spec, q, k, v, out, lse, dout, scale=spec.default_scale, config=config)

    return milliseconds(backward, q, k, v, out, lse, dout, repeats=2)


def tune(
    chosen: Sequence[Problem | Product], *, workers: int, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows of tuned.json, what went wrong), for the problems whose candidates could all be timed or refused."""
    errors: list[str] = []
    times: dict[Problem | Product, dict[Any, float]] = {problem: {} for problem in chosen}
    unanswered = dict.fromkeys(chosen, 0)
    rounds = max((problem.rounds for problem in chosen), default=1)

    def time_all(jobs: list[Job]) -> None:
        for problem, _ in jobs:
            unanswered[problem] += 1
        for (problem, config), result in each(run, jobs, workers=workers, seconds=seconds / rounds):
            unanswered[problem] -= 1
            if isinstance(result, str):
                errors.append(f"{problem.name}, {config}: {result}")
                continue
            times[problem][config] = result
            print(
                f"{problem.name:32} {problem.tflops(result):6.1f} TFLOP/s {1e3 * result:9.1f} us  {config}", flush=True
            )

    time_all([(problem, config) for problem in chosen for config in problem.candidates])
    shares = []
    for problem, of in times.items():
        if of and problem.rounds > 1:
            best = min(of, key=of.__getitem__)
            shares += [(problem, config) for config in hopper_config.cache_shares(best)]
    if shares:  # else the processes would be started for nothing
        time_all(shares)
    errors += [
        f"{problem.name}: {n} candidates were left when the time was over" for problem, n in unanswered.items() if n
    ]
    return [row for problem, of in times.items() if not unanswered[problem] and (row := _row(problem, of))], errors


def _row(problem: Problem | Product, times: dict[Any, float]) -> dict[str, Any] | None:
    default = problem.candidates[0]
    if default not in times:
        return None
    best = min(times, key=times.__getitem__)
    if times[best] > times[default] * (1 - MARGIN):
        best = default
    changed = {f.name: getattr(best, f.name) for f in dataclasses.fields(best)}
    return dataclasses.asdict(problem) | {
        "config": changed,
        "ms": round(times[best], 5),
        "default_ms": round(times[default], 5),
        "candidates": len(times),
    }


def main(argv: list[str] | None = None) -> int:
    parser = arguments("pallas_kernels.tune", __doc__ or "")
    parser.add_argument("--family", choices=FAMILIES, default="attention", help="of kernels (default attention)")
    parser.add_argument("--write", type=Path, help="the file (default: the package's own)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if not has_gpu():
        return 2
    shared = setting("pallas_kernels.tune", argv, args.commit)
    every, kind, path = FAMILIES[args.family]
    chosen = [problem for problem in every() if args.only in problem.name]
    rows, errors = tune(chosen, workers=args.workers, seconds=args.seconds)
    tuned.write(args.write or path, [row | shared for row in rows], keys(kind))
    print(*errors, sep="\n", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
