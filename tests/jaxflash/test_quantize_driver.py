"""Block by block: statistics and objectives against the float64 oracle of the whole model; memory; resuming."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxflash import calibration as calibrating
from jaxflash.calibration import STAGES, Calibration, block_params
from jaxflash.language_model import load, save
from jaxflash.quantize import quantize
from jaxflash.quantize_report import gain
from quant.tensor import Int4Tensor
from tests.jaxflash.quantize_model import LINEARS, RECIPE, assert_same_bits, batches, model, quantized, reads
from tests.jaxflash.test_quantize import dequantized
from tests.quant import oracle as oracle_codes
from tests.tolerance import assert_close


def test_statistics_are_the_oracles_in_every_block_whatever_the_padding_holds():
    dense = model()
    truth, plain = reads(dense.params), reads(dense.params, np.float32)
    given = Calibration(dense.config, dense.params, batches())
    other = Calibration(dense.config, dense.params, batches(padding=200))
    assert given.tokens == 80
    for layer in range(2):
        block = block_params(dense.params["blocks"], layer)
        seen = given.statistics(block, LINEARS)
        assert_same_bits(other.statistics(block, LINEARS), seen)
        for name, found in seen.items():
            x, x32 = truth[layer, name], plain[layer, name]
            assert int(found.count) == len(x) == 80
            assert_close(found.gram, x.T @ x, x32.T @ x32, name)
            assert_close(found.abs_sum, np.abs(x).sum(axis=0), np.abs(x32).sum(axis=0), name)
        for calibration in (given, other):
            calibration.advance(block)


@pytest.mark.parametrize(
    "method, share",
    [
        ("gptq", 0.5),
        pytest.param("gptq", 0.0, marks=pytest.mark.slow),
        pytest.param("rtn", 1.0, marks=pytest.mark.slow),
    ],
)
def test_each_objective_is_that_of_the_model_quantised_so_far(method, share):
    """True-sequential: a stage's inputs come from whatever stands before it, in its block too, in codes. Weights are
    corrected for what these inputs lost to those of the dense model."""
    dense, (packed, records) = model().params, quantized(method, share)
    meant = {dtype: reads(dense, dtype) for dtype in (np.float64, np.float32)}
    final = dequantized(packed.params)
    state = jax.tree.map(lambda leaf: np.array(leaf, np.float64), dense)
    found = {(r["block"], r["linear"]): r for r in records}
    assert list(found) == [(layer, name) for layer in range(2) for name in LINEARS]
    shares = []
    for layer in range(2):
        for stage in STAGES:
            truth, plain = (reads(state, dtype)[layer, stage.linears[0]] for dtype in (np.float64, np.float32))
            for name in stage.linears:
                part, _, last = name.partition("/")
                before, after = (tree["blocks"][part][last]["weight"] for tree in (dense, final))
                exact, rough = (
                    oracle_codes.propagated(np.asarray(before[layer], x.dtype), x, meant[t][layer, name], share, 0.05)
                    - np.asarray(after[layer], x.dtype)
                    for t, x in ((np.float64, truth), (np.float32, plain))
                )
                record = found[layer, name]
                exact, rough = np.square(truth @ exact).sum(), (rough * (plain.T @ plain @ rough)).sum()
                shares.append((record["objective"] / exact, rough / exact))
                assert record["objective"] <= record["rtn"] and record["tokens"] == 80
                state["blocks"][part][last]["weight"][layer] = np.asarray(after[layer])
    got, rough = np.array(shares).T
    assert_close(got.astype(np.float32), np.ones(len(got)), rough)


@pytest.mark.slow
def test_rounding_with_text_is_rounding_without():
    packed, records = quantized("rtn")
    assert_same_bits(packed.params, quantize(model(), RECIPE).params)
    assert {gain(record) for record in records} == {1.0}


@pytest.mark.parametrize("method", ["rtn", pytest.param("gptq", marks=pytest.mark.slow)])
def test_other_bits_are_simulated_in_dense_weights(method, tmp_path):
    dense, recipe, records = model(), dataclasses.replace(RECIPE, bits=3), []
    given = None if method == "rtn" else batches()
    simulated = quantize(dense, recipe, given, method=method, on_record=records.append, quiet=True)
    assert simulated.config == dataclasses.replace(dense.config, param_dtype="float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(simulated.params)} == {"float32"}
    before, after = (flatten_dict(each.params["blocks"], sep="/") for each in (dense, simulated))
    for name in LINEARS:
        w, weight = (np.asarray(tree[f"{name}/weight"]) for tree in (before, after))
        groups = weight.reshape(2, -1, 32, weight.shape[-1])
        values = [len(np.unique(group)) for group in np.moveaxis(groups, 2, -1).reshape(-1, 32)]
        assert 4 < max(values) <= 8
        if method == "rtn":
            parts = oracle_codes.rounded(w[1], 32, symmetric=False, scale_dtype=jnp.bfloat16, bits=3)
            np.testing.assert_array_equal(weight[1], oracle_codes.weight(*parts, 32).astype(np.float32))
    assert all(record["objective"] <= record["rtn"] for record in records)
    save(simulated, tmp_path / "x")
    assert_same_bits(load(tmp_path / "x").params, simulated.params)


def test_what_is_no_block_weight_stays():
    dense = model().params
    for packed in (quantized("gptq", 0.5)[0].params, quantized("awq+gptq")[0].params):
        for outer in packed.keys() - {"blocks"}:
            assert_same_bits(packed[outer], dense[outer])
        biases = [tree["blocks"]["attention"]["q"]["bias"] for tree in (packed, dense)]
        np.testing.assert_array_equal(*biases)
        named = [name for name in flatten_dict(packed["blocks"], sep="/") if name.endswith("/weight")]
        assert sorted(named) == sorted(f"{name}/weight" for name in LINEARS)
        weights = jax.tree.leaves(packed["blocks"], is_leaf=lambda leaf: isinstance(leaf, Int4Tensor))
        assert sum(isinstance(leaf, Int4Tensor) for leaf in weights) == len(LINEARS)
        jax.vmap(Int4Tensor.validate)(packed["blocks"]["mlp"]["down"]["weight"])


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """With the hidden states of the dense model, which go on too."""
    whole, all_records = quantized("gptq", 0.5)
    folder, seen = tmp_path / "blocks", []
    go_on = functools.partial(quantize, folder=folder, propagate_error=0.5, quiet=True)

    def killed(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(model(), RECIPE, batches(), on_record=killed)
    first = folder / "block-00000.json"
    written = first.stat().st_mtime_ns
    assert sorted(p.name for p in folder.iterdir()) == ["block-00000.json", "block-00000.safetensors", "settings.json"]
    (folder / "block-00001.safetensors").write_bytes(b"cut short before its JSON was written")
    for _ in range(2):  # the second finds every block
        seen.clear()
        packed = go_on(model(), RECIPE, batches(), on_record=seen.append)
        assert_same_bits(packed.params, whole.params)
        assert seen == all_records and first.stat().st_mtime_ns == written

    changed: list[dict[str, Any]] = [
        {"method": "rtn"}, {"order": "none"}, {"damping": 0.1}, {"mse": False}, {"propagate_error": 0.0},
    ]  # fmt: skip
    for changes in changed:
        with pytest.raises(ValueError, match=f"holds blocks that were quantised otherwise .{next(iter(changes))}: "):
            go_on(model(), RECIPE, batches(), **changes)
    with pytest.raises(ValueError, match="calibration: "):
        go_on(model(), RECIPE, batches(padding=3))
    other = model()
    other.params["blocks"]["mlp"]["down"]["weight"] = 2 * other.params["blocks"]["mlp"]["down"]["weight"]
    with pytest.raises(ValueError, match="is block 0 of another model"):
        go_on(other, RECIPE, batches())
    damaged = folder / "block-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged - its digest does not hold"):
        go_on(model(), RECIPE, batches())


@pytest.mark.slow
def test_an_order_of_rows_is_kept_in_the_store(tmp_path):
    quantize(model(1), RECIPE, batches(), order="activation", folder=tmp_path, quiet=True)
    packed = quantize(model(1), RECIPE, batches(), order="activation", folder=tmp_path, quiet=True)
    order = packed.params["blocks"]["mlp"]["down"]["weight"].permutation.tolist()
    assert [sorted(rows) for rows in order] == [list(range(64))] != order


def test_memory_and_compilations_do_not_grow_with_depth(monkeypatch):
    """What is alive beside the model, at each time that statistics were made, for 2 and 8 blocks."""
    quantized("gptq", 0.5)
    programs: Any = (calibrating._add_statistics, calibrating._forward)
    compiled = [program._cache_size() for program in programs]
    plain, sizes = Calibration.statistics, []

    def measured(self, *args):
        out = plain(self, *args)
        sizes.append(sum(array.nbytes for array in jax.live_arrays()))
        return out

    monkeypatch.setattr(Calibration, "statistics", measured)
    peaks = []
    for n_layers in (2, 8):
        dense = model(n_layers)
        before = sum(array.nbytes for array in jax.live_arrays())
        quantize(dense, RECIPE, batches(), propagate_error=0.5, quiet=True)
        assert len(sizes) == n_layers * len(STAGES)
        peaks.append(max(sizes) - before)
        sizes.clear()
    assert peaks[0] == peaks[1] > 0
    assert [program._cache_size() for program in programs] == compiled
