"""Times generation: `python -m jaxflash.bench_decode --preset llama3-8b` decodes with 16-bit and with 4-bit weights.

    prompt | prefill | short new tokens        |
    prompt | prefill | long new tokens                  |      a token = (long - short) / (tokens between them)

Weights are random, of the preset's shapes; tokens are drawn greedily by the same `generate_tokens` that `generate`
calls. The 4-bit weights are those of `jaxflash.quantize`: round-to-nearest, symmetric groups of 128, blocks only.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxflash.bench import top_kernels
from jaxflash.config import ModelConfig, Sampling, preset
from jaxflash.generate import generate_tokens
from jaxflash.language_model import LanguageModel
from jaxflash.model import init_params
from jaxflash.quantize import quantize
from jaxflash.tokenizer import ByteTokenizer
from pallas_kernels.timing import arguments, record, setting

SHORT, LONG = 32, 160  # new tokens
WEIGHTS = ("bf16", "int4")


def random_model(config: ModelConfig, weights: str) -> LanguageModel:
    """A model of random weights, in 16 bits or with its blocks in 4."""
    params = jax.jit(lambda: init_params(config, 0))()
    model = LanguageModel(config, params, ByteTokenizer())
    return quantize(model) if weights == "int4" else model


def measure(model: LanguageModel, *, batch: int, prompt: int, repeats: int = 3, trace: Path | None = None) -> dict:
    """Milliseconds a decoded token (of all rows at once) and tokens/s; with `trace`, the heaviest kernels too."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (batch, prompt)).tolist()

    def seconds(new: int) -> float:
        start = time.perf_counter()
        generate_tokens(model.config, model.params, prompts, Sampling(max_new_tokens=new))
        return time.perf_counter() - start

    for new in (SHORT, LONG):  # compiles
        seconds(new)
    each = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) for _ in range(repeats)]
    token = statistics.median(each)
    row = {
        "ms_per_token": round(1e3 * token, 4),
        "tokens_per_s": round(batch / token, 1),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }
    if trace is not None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(trace, profiler_options=options):
            seconds(SHORT)
        row |= top_kernels(trace, steps=SHORT)
    return row


def rows(name: str, *, batch: int, prompt: int, only: str) -> Iterator[dict[str, Any]]:
    """A row for each kind of weights, the second with its ratio to the first."""
    config = dataclasses.replace(preset(name), param_dtype="bfloat16", compute_dtype="bfloat16")
    base = None
    for weights in (kind for kind in WEIGHTS if only in kind):
        with tempfile.TemporaryDirectory() as trace:
            model = random_model(config, weights)
            row = measure(model, batch=batch, prompt=prompt, trace=Path(trace))
        row = {"what": "decode", "preset": name, "weights": weights, "batch": batch, "prompt": prompt, **row}
        if base is not None:
            row["ratio"] = round(row["tokens_per_s"] / base, 3)
        base = base or row["tokens_per_s"]
        yield row
        del model


def main(argv: list[str] | None = None) -> int:
    parser = arguments("jaxflash.bench_decode", __doc__ or "")
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--batch", type=int, default=1, help="rows at once (default 1)")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS", help="of each row (default 64)")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    shared = setting("jaxflash.bench_decode", argv, args.commit)
    found = rows(args.preset, batch=args.batch, prompt=args.prompt, only=args.only)
    return int(record(found, shared, args.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
