"""Block by block: statistics, objectives and folds against the float64 oracle of the whole model; memory; resuming."""

import copy
import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxflash import calibration as calibrating
from jaxflash.calibration import STAGES, Calibration, block_params, calibration_batches
from jaxflash.cli import main
from jaxflash.config import Sampling
from jaxflash.data import Batch
from jaxflash.evaluate import evaluate
from jaxflash.generate import generate
from jaxflash.hf.pieces import check_sizes
from jaxflash.language_model import LanguageModel, load, save
from jaxflash.quantize import METHODS, fold_scales, input_scales, quantize
from jaxflash.quantize_report import REPORT, gain, summary, write_report
from jaxflash.tokenizer import ByteTokenizer
from pallas_kernels.dispatch import Unsupported
from quant.recipe import Recipe
from quant.tensor import Int4Tensor
from sharding.mesh import make_mesh
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import random_params, small
from tests.jaxflash.test_quantize import dequantized
from tests.quant import oracle as oracle_codes
from tests.tolerance import assert_close

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
def quantized(method, n_layers=2):
    records = []
    packed = quantize(model(n_layers), RECIPE, batches(), method=method, on_record=records.append, quiet=True)
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


@pytest.mark.parametrize("method", ["gptq", pytest.param("rtn", marks=pytest.mark.slow)])
def test_each_objective_is_that_of_the_model_quantised_so_far(method):
    """True-sequential: a stage's inputs come from whatever stands before it, in its block too, in codes."""
    dense, (packed, records) = model().params, quantized(method)
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
                change = np.asarray(before[layer], np.float64) - np.asarray(after[layer], np.float64)
                record = found[layer, name]
                exact = np.square(truth @ change).sum()
                rough = (change.astype(np.float32) * (plain.T @ plain @ change.astype(np.float32))).sum()
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


@pytest.mark.parametrize("method", ["awq+gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_scaled_methods_do_better_than_the_nearest_codes_and_generate(method):
    packed, records = quantized(method)
    gains = [gain(record) for record in records]
    assert len(gains) == 14 and np.log(gains).mean() < 0 and max(gains) <= 1
    dense = dataclasses.replace(packed, params=dequantized(packed.params))
    assert generate(packed, "To be", Sampling(max_new_tokens=4)) == generate(dense, "To be", Sampling(max_new_tokens=4))


def test_scales_that_make_a_linear_worse_are_taken_back(monkeypatch):
    """All of them here: the result is that of the method without scales, and so no worse than the nearest codes."""
    monkeypatch.setattr(sys.modules[quantize.__module__], "awq_scales", wild)
    records = []
    packed = quantize(model(), RECIPE, batches(), method="awq+gptq", on_record=records.append, quiet=True)
    plain, plain_records = quantized("gptq")
    assert max(gain(record) for record in records) <= 1
    assert records == plain_records
    assert_same_bits(packed.params, plain.params)


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
    for method in ("gptq", "awq+gptq"):
        packed = quantized(method)[0].params
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
    whole, all_records = quantized("gptq")
    folder, seen = tmp_path / "blocks", []

    def killed(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model(), RECIPE, batches(), folder=folder, on_record=killed, quiet=True)
    first = folder / "block-00000.json"
    written = first.stat().st_mtime_ns
    assert sorted(p.name for p in folder.iterdir()) == ["block-00000.json", "block-00000.safetensors", "settings.json"]
    (folder / "block-00001.safetensors").write_bytes(b"cut short before its JSON was written")
    for _ in range(2):  # the second finds every block
        seen.clear()
        packed = quantize(model(), RECIPE, batches(), folder=folder, on_record=seen.append, quiet=True)
        assert_same_bits(packed.params, whole.params)
        assert seen == all_records and first.stat().st_mtime_ns == written

    changed: list[dict[str, Any]] = [{"method": "rtn"}, {"order": "none"}, {"damping": 0.1}, {"mse": False}]
    for changes in changed:
        with pytest.raises(ValueError, match=f"holds blocks that were quantised otherwise .{next(iter(changes))}: "):
            quantize(model(), RECIPE, batches(), folder=folder, quiet=True, **changes)
    with pytest.raises(ValueError, match="calibration: "):
        quantize(model(), RECIPE, batches(padding=3), folder=folder, quiet=True)
    other = model()
    other.params["blocks"]["mlp"]["down"]["weight"] = 2 * other.params["blocks"]["mlp"]["down"]["weight"]
    with pytest.raises(ValueError, match="is block 0 of another model"):
        quantize(other, RECIPE, batches(), folder=folder, quiet=True)
    damaged = folder / "block-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged - its digest does not hold"):
        quantize(model(), RECIPE, batches(), folder=folder, quiet=True)


@pytest.mark.slow
def test_an_order_of_rows_is_kept_in_the_store(tmp_path):
    quantize(model(1), RECIPE, batches(), order="activation", folder=tmp_path, quiet=True)
    packed = quantize(model(1), RECIPE, batches(), order="activation", folder=tmp_path, quiet=True)
    order = packed.params["blocks"]["mlp"]["down"]["weight"].permutation.tolist()
    assert [sorted(rows) for rows in order] == [list(range(64))] != order


def test_memory_and_compilations_do_not_grow_with_depth(monkeypatch):
    """What is alive beside the model, at each time that statistics were made, for 2 and 8 blocks."""
    quantized("gptq")
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
        quantize(dense, RECIPE, batches(), quiet=True)
        assert len(sizes) == n_layers * len(STAGES)
        peaks.append(max(sizes) - before)
        sizes.clear()
    assert peaks[0] == peaks[1] > 0
    assert [program._cache_size() for program in programs] == compiled


NO_TEXT = [batch._replace(loss_mask=np.zeros_like(batch.loss_mask)) for batch in batches()]


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "calibration has no batches"),
        (NO_TEXT, "all 96 places of calibration are padding"),
        (batches()[:1], "40 tokens of calibration - must be at least 64"),
        ([batches()[0]._replace(tokens=batches()[0].tokens + 250)], "outside the vocabulary of 257"),
        ([batches()[0]._replace(positions=np.zeros((2, 3), np.int32))], r"shapes \[\(2, 24\), \(2, 3\), \(2, 24\)\]"),
        ([batches()[0]._replace(loss_mask=np.ones((2, 24)))], "loss_mask bool"),
        ([Batch(*[np.zeros((1, 513), t) for t in (int, int, bool, int)], segment_ids=None)], "rows of 513 tokens"),
    ],
)
def test_calibration_that_says_nothing_is_refused_before_any_work(given, message):
    with pytest.raises(ValueError, match=f"^quantize: .*{message}"):
        quantize(model(), RECIPE, given, quiet=True)


def test_wrong_calls_are_told():
    with pytest.raises(ValueError, match="unknown method='gptk'. Did you mean 'gptq'?"):
        quantize(model(), RECIPE, batches(), method="gptk")
    with pytest.raises(ValueError, match="unknown order='statik'. Did you mean 'static'?"):
        quantize(model(), RECIPE, batches(), order="statik")
    with pytest.raises(ValueError, match="damping=-1.0 - must be finite"):
        quantize(model(), RECIPE, batches(), damping=-1.0)
    with pytest.raises(ValueError, match="method='awq' without batches"):
        quantize(model(), RECIPE, method="awq")
    with pytest.raises(ValueError, match="blocks/attention/k/weight is quantised already"):
        quantize(quantized("gptq")[0], RECIPE, batches())
    broken = model()
    up = broken.params["blocks"]["mlp"]["up"]
    up["weight"] = up["weight"].at[1, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="blocks/mlp/up/weight has NaN"):
        quantize(broken, RECIPE, batches(), quiet=True)
    spread = model()
    mesh = make_mesh({"data": 2}, devices=jax.devices()[:2])
    spread.params["blocks"]["mlp_norm"]["scale"] = jax.device_put(jnp.ones((2, 32)), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="blocks/mlp_norm/scale lies on 2 devices"):
        quantize(spread, RECIPE, batches(), quiet=True)
    large = model()
    large.params["blocks"]["attention_norm"]["scale"] = jnp.full((2, 32), 1e30)
    with pytest.raises(ValueError, match="the inputs of blocks/attention/q in block 0 are not finite"):
        quantize(large, RECIPE, batches(), quiet=True)
    assert set(METHODS) == {"rtn", "gptq", "awq", "awq+gptq"}


def test_the_report_is_json_and_a_table(tmp_path):
    records = quantized("gptq")[1]
    write_report(tmp_path, records, RECIPE, method="gptq")
    said = json.loads((tmp_path / REPORT).read_text())
    assert said["recipe"] == dataclasses.asdict(RECIPE) and said["method"] == "gptq" and said["linears"] == records
    assert records[-1].keys() >= {"block", "linear", "objective", "rtn", "damping", "condition", "clipped", "tokens"}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary(records))
    lines = capture.get().splitlines()
    assert [line.split()[1] for line in lines if "(block" in line] == list(LINEARS)


def test_rows_come_from_all_over_the_text(tmp_path):
    text = "".join(chr(97 + i // 100) for i in range(1000))
    (tmp_path / "text.txt").write_text(text)
    take = functools.partial(
        calibration_batches, [tmp_path / "text.txt"], ByteTokenizer(), vocab_size=257, seq_len=10, batch_size=3
    )
    found = take(rows=5)
    assert [batch.tokens.shape for batch in found] == [(3, 10), (2, 10)]
    assert [chr(row[0]) for batch in found for row in batch.tokens] == list("acegi")
    with pytest.raises(ValueError, match="makes 100 rows of seq_len=10 tokens, and rows=101"):
        take(rows=101)
    with pytest.raises(ValueError, match="rows=0 and batch_size=3"):
        take(rows=0)


@pytest.fixture
def command(capsys, monkeypatch):
    """The command line in this process; gives what it printed."""
    monkeypatch.setenv("COLUMNS", "300")
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]

    def run(*args):
        main([str(arg) for arg in args])
        return capsys.readouterr()

    yield run
    jax.config.update("jax_compilation_cache_dir", cache)


def test_formats_that_cannot_hold_the_result_are_told_before_any_work(command, capsys, tmp_path):
    flags = ("quantize", "--model", tmp_path / "none", "--out", tmp_path / "x", "--method", "rtn")
    with pytest.raises(SystemExit):
        command(*flags, "--bits", 3, "--format", "gptq")
    assert "quantize: bits=3 with format='gptq' - packed files have 4 bits" in capsys.readouterr().err
    config = dataclasses.replace(CONFIG, d_model=96, head_dim=24)
    with pytest.raises(Unsupported, match="(?s)'awq' cannot hold 6 .*q_proj.weight: K=96 is no multiple of group=64"):
        check_sizes("quantize", config, "awq", Recipe(group=64), ordered=False)
    with pytest.raises(Unsupported, match="rows in activation order"):
        check_sizes("quantize", CONFIG, "awq", RECIPE, ordered=True)
    for format in ("gptq", "compressed-tensors"):
        check_sizes("quantize", CONFIG, format, RECIPE, ordered=True)


@pytest.mark.slow
def test_the_command_line_quantises_evaluates_and_generates(command, tmp_path, capsys):
    dense, text, out = tmp_path / "dense", tmp_path / "text.txt", tmp_path / "packed"
    save(model(), dense)
    text.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 3)
    flags = (
        "--model",
        dense,
        "--compute-dtype",
        "float32",
        "--out",
        out,
        "--calibration",
        text,
        "--method",
        "awq+gptq",
    )
    sizes = ("--rows", 4, "--seq-len", 24, "--batch-size", 2, "--group", 32, "--symmetric", "false")
    told = command("quantize", *flags, *sizes).err
    assert "attention/out" in told and f"done, in {out}/" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "packed", "text.txt"]
    said = json.loads((out / REPORT).read_text())
    assert said["method"] == "awq+gptq" and len(said["linears"]) == 14 and said["calibration"]["rows"] == 4

    rows = calibration_batches([text], ByteTokenizer(), vocab_size=257, rows=4, seq_len=24, batch_size=2)
    expected, loaded = quantize(model(), RECIPE, rows, method="awq+gptq", quiet=True), load(out)
    assert_same_bits(dequantized(loaded.params), dequantized(expected.params))

    printed = command(
        "evaluate", "--model", out, "--compute-dtype", "float32", "--data", text, "--context", 8, "--json"
    )
    found = evaluate(expected, text.read_text(), context=8)
    assert json.loads(printed.out) == dataclasses.asdict(found)
    assert "To be" in command("generate", "--model", out, "--prompt", "To be", "--max-new-tokens", 3).out

    with pytest.raises(SystemExit):
        command("quantize", *flags, *sizes)
    assert "nothing is written over" in capsys.readouterr().err
