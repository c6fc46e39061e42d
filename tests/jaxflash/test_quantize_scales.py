"""AWQ's scales in a model: folded they change nothing, and they are taken back where they do harm."""

import copy
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash.calibration import STAGES, Calibration, block_params
from jaxflash.config import Sampling
from jaxflash.generate import generate
from jaxflash.quantize import fold_scales, input_scales, quantize
from jaxflash.quantize_report import gain
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.quantize_model import CONFIG, RECIPE, assert_same_bits, batches, model, quantized
from tests.jaxflash.test_quantize import dequantized
from tests.tolerance import assert_close


def wild(weights, statistics, recipe, source=None):
    """Scales that suit nobody, alike where inputs come from the same source."""
    size = jnp.exp(2 * jnp.sin(jnp.arange(len(statistics.abs_sum), dtype=jnp.float32)))
    return size if source is None else size[source]


def test_folded_scales_leave_the_model_what_it_was(monkeypatch):
    """Value heads that several query heads read, and biases, included."""
    monkeypatch.setattr(sys.modules[quantize.__module__], "awq_scales", wild)
    dense = model()
    calibration = Calibration(dense.config, dense.params, batches())
    blocks = []
    for layer in range(2):
        block = block_params(dense.params["blocks"], layer)
        scales = input_scales(block, calibration, dense.config, RECIPE, layer)
        folded = fold_scales(block, scales, dense.config)
        assert list(scales) == list(STAGES)
        assert not np.array_equal(folded["attention/v/bias"], block["attention/v/bias"])
        calibration.advance(block)
        blocks.append(folded)
    params = copy.deepcopy(jax.tree.map(np.asarray, dense.params))
    for name in blocks[0]:
        *owners, last = name.split("/")
        owner = functools.reduce(lambda tree, key: tree[key], owners, params["blocks"])
        owner[last] = np.stack([block[name] for block in blocks])
    row = batches()[0].tokens[0].tolist()
    truth, plain = (oracle.logits(dense.params, CONFIG, row, dtype=t) for t in (np.float64, np.float32))
    assert_close(oracle.logits(params, CONFIG, row).astype(np.float32), truth, plain)


@pytest.mark.parametrize(
    "method, share",
    [
        ("awq+gptq", 0.0),
        pytest.param("awq+gptq", 0.5, marks=pytest.mark.slow),
        pytest.param("awq", 0.5, marks=pytest.mark.slow),
    ],
)
def test_scaled_methods_do_better_than_the_nearest_codes_and_generate(method, share):
    packed, records = quantized(method, share)
    gains = [gain(record) for record in records]
    assert len(gains) == 14 and np.log(gains).mean() < 0 and max(gains) <= 1
    dense = dataclasses.replace(packed, params=dequantized(packed.params))
    assert generate(packed, "To be", Sampling(max_new_tokens=4)) == generate(dense, "To be", Sampling(max_new_tokens=4))


def test_scales_that_make_a_linear_worse_are_taken_back(monkeypatch):
    """All of them here: the result is that of the method without scales, and so no worse than the nearest codes.
    Weights are corrected for the error before them in both."""
    monkeypatch.setattr(sys.modules[quantize.__module__], "awq_scales", wild)
    records = []
    how = {"method": "awq+gptq", "propagate_error": 0.5}
    packed = quantize(model(), RECIPE, batches(), on_record=records.append, quiet=True, **how)
    plain, plain_records = quantized("gptq", 0.5)
    assert max(gain(record) for record in records) <= 1
    assert records == plain_records
    assert_same_bits(packed.params, plain.params)
