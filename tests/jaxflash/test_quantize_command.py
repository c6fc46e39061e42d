"""Quantising as a command, its report, and wrong calls, which are told before any work."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxflash.calibration import calibration_batches
from jaxflash.cli import main
from jaxflash.data import Batch
from jaxflash.evaluate import evaluate
from jaxflash.hf.pieces import check_sizes
from jaxflash.language_model import load, save
from jaxflash.quantize import METHODS, quantize
from jaxflash.quantize_report import REPORT, summary, write_report
from jaxflash.tokenizer import ByteTokenizer
from pallas_kernels.dispatch import Unsupported
from quant.recipe import Recipe
from sharding.mesh import make_mesh
from tests.jaxflash.quantize_model import CONFIG, LINEARS, RECIPE, assert_same_bits, batches, model, quantized
from tests.jaxflash.test_quantize import dequantized

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
    with pytest.raises(ValueError, match="propagate_error=1.5 - must be from 0"):
        quantize(model(), RECIPE, batches(), propagate_error=1.5)
    with pytest.raises(ValueError, match="propagate_error=0.5 without batches"):
        quantize(model(), RECIPE, method="rtn", propagate_error=0.5)
    with pytest.raises(ValueError, match="method='awq' without batches"):
        quantize(model(), RECIPE, method="awq")
    with pytest.raises(ValueError, match="blocks/attention/k/weight is quantised already"):
        quantize(quantized("gptq", 0.5)[0], RECIPE, batches())
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
    records = quantized("gptq", 0.5)[1]
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
    sizes += ("--propagate-error", 0.5)
    told = command("quantize", *flags, *sizes).err
    assert "attention/out" in told and f"done, in {out}/" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "packed", "text.txt"]
    said = json.loads((out / REPORT).read_text())
    assert (
        said["method"] == "awq+gptq"
        and said["propagate_error"] == 0.5
        and len(said["linears"]) == 14
        and said["calibration"]["rows"] == 4
    )

    rows = calibration_batches([text], ByteTokenizer(), vocab_size=257, rows=4, seq_len=24, batch_size=2)
    how = {"method": "awq+gptq", "propagate_error": 0.5}
    expected, loaded = quantize(model(), RECIPE, rows, quiet=True, **how), load(out)
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
