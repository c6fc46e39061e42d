"""Small models with 4-bit weights, made code by code, and their folders."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxflash.config import ModelConfig, preset
from jaxflash.hf.names import places
from jaxflash.language_model import LanguageModel
from jaxflash.model import init_params
from jaxflash.tokenizer import ByteTokenizer
from quant.tensor import Int4Tensor
from tests.quant.formats import statement

GROUP = 32
CONFIG = preset("tiny", n_layers=2, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=96)
WIDE = dataclasses.replace(CONFIG, d_model=128, head_dim=32, d_ff=128)
type Raw = dict[str, tuple[Any, Any, Any, Any]]  # codes, scales, zeros, g_idx of a linear, by its name


def random_linear(rng, K: int, N: int, kind: str, group: int = GROUP):
    """Codes, scales, zeros and g_idx: kind is symmetric, asymmetric, or ordered, which is asymmetric too.

    Scales are float16 that bfloat16 holds too; no zero point is 0.
    """
    codes = rng.integers(0, 16, (K, N), np.uint8)
    scales = (rng.integers(1, 64, (K // group, N)) / 4096).astype(np.float16)
    zeros = None if kind == "symmetric" else rng.integers(1, 16, scales.shape, np.uint8)
    g_idx = rng.permutation(np.arange(K, dtype=np.int32) // group) if kind == "ordered" else None
    return codes, scales, zeros, g_idx


def stack(layers, group: int = GROUP) -> Int4Tensor:
    tensors = [Int4Tensor.from_codes(c, s, z, group=group, g_idx=g) for c, s, z, g in layers]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *tensors)


@functools.cache
def packed(
    kind: str, config: ModelConfig = CONFIG, skip: tuple[str, ...] = (), dtype: str = "float16"
) -> tuple[LanguageModel, Raw]:
    """(a model with random 4-bit weights in its blocks but for `skip`, what they were made of)."""
    rng = np.random.default_rng(0)
    params, raw = jax.tree.map(lambda a: a, dense(config).params), {}
    for name, place in places(config).items():
        if place.layer != 0 or not place.transposed or any(part in name for part in skip):
            continue
        modules = [name.replace(".0.", f".{i}.").removesuffix(".weight") for i in range(config.n_layers)]
        layers = [random_linear(rng, place.shape[1], place.shape[0], kind) for _ in modules]
        layers = [(c, s.astype(jnp.dtype(dtype)), z, g) for c, s, z, g in layers]
        raw |= zip(modules, layers, strict=True)
        parent = functools.reduce(lambda node, key: node[key], place.path[:-1], params)
        parent[place.path[-1]] = stack(layers)
    return LanguageModel(config, params, ByteTokenizer()), raw


@functools.cache
def dense(config: ModelConfig = CONFIG) -> LanguageModel:
    return LanguageModel(config, jax.jit(lambda: init_params(config, 0))(), ByteTokenizer())


def same(a: Any, b: Any) -> bool:
    """Whether two trees are one: structure, dtypes and every bit."""
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y)), a, b)
    return all(jax.tree.leaves(equal))


def linear_tensors(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The tensors of one linear by their suffix, by the `safetensors` package."""
    held = load_file(folder / "model.safetensors")
    return {key.removeprefix(f"{name}."): value for key, value in held.items() if key.startswith(f"{name}.")}


def by_statement(format: str, tensors: dict[str, np.ndarray], group: int = GROUP) -> np.ndarray:
    """W (in, out) in float64, by the tests' own reader."""
    if format.startswith("gptq"):
        return statement.gptq(tensors, version=1 if format == "gptq" else 2)
    return (statement.awq if format == "awq" else statement.pack_quantized)(tensors, group=group)


def dense_weight(codes, scales, zeros, g_idx, group: int = GROUP) -> np.ndarray:
    g = np.arange(len(codes)) // group if g_idx is None else g_idx
    return (codes.astype(np.float64) - (8 if zeros is None else zeros[g])) * scales.astype(np.float64)[g]
