"""The accuracy of attention in e4m3: RMSE against float64 on unrounded inputs with outliers, as in the paper.

    python -m pallas_kernels.accuracy_attention_fp8 --out notebooks/results/attention_fp8_accuracy.jsonl [--length 4096]

Entries of q, k and v are N(0, 1) + N(0, 100) Bernoulli(0.001), one head of dim 128, no mask, mean over seeds (arXiv
2407.08608, section 4.3); by the reference on a CPU, by the kernel on Hopper. "full" is the
call with precision="fp8"; "no transform" does not rotate; "whole" has one scale for a whole head, "baseline" neither;
"bfloat16" and "float16" are calls without it.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import fp8, hopper_fp8, hopper_fp8_config, hopper_fp8_prologue, reference_fp8
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device, current_device
from pallas_kernels.timing import setting

RECIPES = {
    "full": fp8.STANDARD,
    "no transform": fp8.Recipe(transform=False),
    "whole": fp8.Recipe(whole=True),
    "baseline": fp8.Recipe(transform=False, whole=True),
}
PLAIN = "bfloat16", "float16"
HEAD_DIM = 128


def inputs(length: int, seed: int) -> list[np.ndarray]:
    """q, k, v (length, HEAD_DIM) in float64."""
    rng = np.random.default_rng(seed)

    def one() -> np.ndarray:
        shape = (length, HEAD_DIM)
        return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)

    return [one() for _ in range(3)]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k' / sqrt(d)) v in float64, some rows at a time."""
    out = np.empty_like(v, shape=(len(q), v.shape[1]))
    for first in range(0, len(q), 1024):
        rows = slice(first, first + 1024)
        logits = q[rows] @ k.T / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out[rows] = weights @ v / weights.sum(1, keepdims=True)
    return out


def methods(length: int, device: Device) -> dict[str, Any]:
    """Functions of (q, k, v), (1, length, 1, HEAD_DIM) in bfloat16 or, of that name, float16, by name."""
    spec = AttentionSpec(B=1, T=length, S=length, N=1, K=1, H=HEAD_DIM, H_v=HEAD_DIM, dtype="bfloat16")
    kernel = hopper_fp8_config.why_not(spec, device) is None
    config = hopper_fp8_config.default(spec)

    def rounded(recipe: fp8.Recipe, q: Any, k: Any, v: Any) -> Any:
        if not kernel:
            return reference_fp8.attend(spec, q, k, v, scale=spec.default_scale, recipe=recipe)[0]
        quantise = hopper_fp8_prologue.quantise
        if recipe != fp8.STANDARD:
            quantise = functools.partial(fp8.quantise, recipe=recipe)
        operands = quantise(spec, q, k, v)
        return hopper_fp8.attend_operands(spec, operands, scale=spec.default_scale, config=config, device=device)[0]

    return {name: functools.partial(rounded, recipe) for name, recipe in RECIPES.items()} | dict.fromkeys(
        PLAIN, dot_product_attention
    )


def table(length: int, seeds: int, device: Device) -> list[dict[str, Any]]:
    """A row for each method: mean RMSE over the seeds, and that of each seed."""
    compiled = {name: jax.jit(function) for name, function in methods(length, device).items()}
    errors: dict[str, list[float]] = {name: [] for name in compiled}
    for seed in range(seeds):
        arrays = inputs(length, seed)
        want = exact(*arrays)
        for name, function in compiled.items():
            dtype = name if name in PLAIN else "bfloat16"
            narrow = [jnp.asarray(x[None, :, None], dtype) for x in arrays]
            got = np.asarray(function(*narrow).astype(jnp.float32))[0, :, 0]
            errors[name].append(float(np.sqrt(((got - want) ** 2).mean())))
    return [
        {"method": name, "length": length, "rmse": float(np.mean(x)), "rmse_by_seed": [float(f"{e:.4g}") for e in x]}
        for name, x in errors.items()
    ]


def drift(length: int, device: Device) -> list[dict[str, Any]]:
    """Relative error of uniform weights over values 1, 1.125 ... 1.875, with and without sums in float32; on Hopper."""
    spec = AttentionSpec(B=1, T=128, S=length, N=1, K=1, H=HEAD_DIM, H_v=HEAD_DIM, dtype="bfloat16")
    value = 1 + np.random.default_rng(0).integers(8, size=(1, length, 1, HEAD_DIM)) / 8
    zeros = jnp.zeros((1, 128, 1, HEAD_DIM), jnp.bfloat16)
    key = jnp.zeros(value.shape, jnp.bfloat16)
    rows = []
    default = hopper_fp8_config.default(spec)
    for config in (default, dataclasses.replace(default, promote=0)):
        attend = functools.partial(hopper_fp8.attend, spec, scale=1.0, config=config, device=device)
        out = np.asarray(jax.jit(attend)(zeros, key, jnp.asarray(value, jnp.bfloat16))[0].astype(jnp.float32))
        error = np.abs(out[0, :, 0] / value.mean((0, 1, 2)) - 1).max()
        rows.append({"method": "drift", "promote": config.promote, "length": length, "relative_error": float(error)})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pallas_kernels.accuracy_attention_fp8", description=__doc__)
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="queries and keys")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--drift", type=int, default=0, metavar="LENGTH", help="also the drift over so many keys")
    parser.add_argument("--commit", help="the commit, where there is no git")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    shared = setting("pallas_kernels.accuracy_attention_fp8", argv, args.commit)
    found = [row for length in args.length for row in table(length, args.seeds, current_device())]
    found += drift(args.drift, current_device()) if args.drift else []
    lines = [json.dumps(row | shared) for row in found]
    print("\n".join(lines))
    if args.out:
        args.out.open("a").write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
