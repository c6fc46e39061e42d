"""A small model, its calibration text and what becomes of it, for the tests of `jaxflash.quantize`."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxflash.calibration import STAGES
from jaxflash.data import Batch
from jaxflash.language_model import LanguageModel
from jaxflash.quantize import quantize
from jaxflash.tokenizer import ByteTokenizer
from quant.recipe import Recipe
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import random_params, small

CONFIG = small(vocab_size=257, d_ff=64, qkv_bias=True, tie_embeddings=True)
RECIPE = Recipe(group=32, symmetric=False)
LINEARS = tuple(name for stage in STAGES for name in stage.linears)


def model(n_layers=2):
    config = dataclasses.replace(CONFIG, n_layers=n_layers)
    return LanguageModel(config, random_params(config), ByteTokenizer())


def batches(padding=0):
    """Two of two rows of 24: documents of 9 and 11 tokens with a gap of nothing, then 4 places of padding."""
    segments = np.repeat([0, 1, -1], [9, 11, 4]).astype(np.int32)
    mask, positions = segments >= 0, np.concatenate([np.arange(9), np.arange(11), np.zeros(4)]).astype(np.int32)
    out = []
    for seed in range(2):
        tokens = np.random.default_rng(seed).integers(0, 257, (2, 24), dtype=np.int32)
        tokens[:, ~mask] = padding
        out.append(Batch(tokens, np.roll(tokens, -1, 1), *(np.tile(a, (2, 1)) for a in (mask, positions, segments))))
    return out


@functools.cache
def quantized(method, propagate_error=0.0):
    records = []
    packed = quantize(
        model(), RECIPE, batches(), method=method, propagate_error=propagate_error, on_record=records.append, quiet=True
    )
    return packed, records


def reads(params, dtype: Any = np.float64):
    """(block, linear) -> what it reads of all tokens that count (n, K), by the oracle."""
    seen = {}
    for batch in batches():
        for row in range(2):
            mask = batch.loss_mask[row]
            oracle.logits(
                params, CONFIG, batch.tokens[row].tolist(), positions=batch.positions[row].tolist(),
                segments=batch.segment_ids[row].tolist(), dtype=dtype,
                watch=lambda layer, name, h, mask=mask: seen.setdefault((layer, name), []).append(h[mask]),
            )  # fmt: skip
    return {key: np.concatenate(parts) for key, parts in seen.items()}


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
