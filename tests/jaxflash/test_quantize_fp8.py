"""`jaxflash quantize` to 8-bit floats: the files, by NumPy from the dense weights; the report; what is refused."""

import json

import jax
import numpy as np
import pytest

from jaxflash.cli import main
from jaxflash.hf.scheme import to_scheme
from jaxflash.language_model import LanguageModel, load, save
from jaxflash.quantize_report import REPORT
from jaxflash.tokenizer import ByteTokenizer
from quant.formats import fp8 as files
from quant.fp8 import Fp8Tensor
from tests.jaxflash.hf.test_fp8_folder import tensors_of
from tests.jaxflash.model_oracle import random_params, small
from tests.jaxflash.test_quantize_command import command  # noqa: F401

# All linears of one shape, which compiles once, in blocks that do not come out even.
SIZES = {"d_model": 192, "n_heads": 4, "n_kv_heads": 4, "head_dim": 48, "d_ff": 192}
CONFIG = small(vocab_size=257, n_layers=2, tie_embeddings=True, **SIZES)
SCALINGS = {"block": ("fp8", "weight_scale_inv"), "row": ("float-quantized", "weight_scale")}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    params = random_params(CONFIG)
    folder = tmp_path_factory.mktemp("models") / "dense"
    save(LanguageModel(CONFIG, params, ByteTokenizer()), folder)
    return folder


@pytest.mark.parametrize("scaling", ["block", pytest.param("row", marks=pytest.mark.slow)])
def test_the_files_and_the_report_are_those_of_the_dense_weights(scaling, dense, command, tmp_path):  # noqa: F811
    out, (format, suffix) = tmp_path / scaling, SCALINGS[scaling]
    how = ("--format", "fp8", "--method", "rtn") if scaling == "block" else ("--scaling", scaling)
    told = command("quantize", "--model", dense, "--out", out, *how).err
    assert "attention/out" in told and f"done, in {out}/" in told
    before, after = tensors_of(dense), tensors_of(out)
    report = json.loads((out / REPORT).read_text())
    records = {(record["block"], record["linear"]): record for record in report["linears"]}
    assert report["recipe"] == {"scaling": scaling} and len(records) == len(report["linears"]) == 14
    names = {"mlp.up_proj": "mlp/up", "self_attn.o_proj": "attention/out", "mlp.down_proj": "mlp/down"}
    for name, weight in before.items():
        if not name.startswith("model.layers.") or "norm" in name:
            assert after[name].tobytes() == weight.tobytes(), name
            continue
        weight, block = weight.astype(np.float32), (128, 128) if scaling == "block" else (1, weight.shape[1])
        scales = files.amax_scales(weight, block)
        codes, stored = after[name], after[name.removesuffix("weight") + suffix]
        np.testing.assert_allclose(stored, scales, rtol=2.0**-22, err_msg=name)  # two roundings of float32
        assert (codes != files.quantize(weight, scales, block=block)).mean() < 1e-3, name  # ties, by the last bit
        layer, linear = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if linear in names:
            record = records[int(layer), names[linear]]
            value = files.dequantize(codes, stored, block=block).astype(np.float64)
            error = np.linalg.norm(weight - value) / np.linalg.norm(weight.astype(np.float64))
            assert record["shape"] == [*weight.shape[::-1]]
            assert abs(record["error"] / error - 1) < 1e-4  # sums of float32
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == ("fp8" if format == "fp8" else "compressed-tensors")
    assert to_scheme(written).block == ((128, 128) if scaling == "block" else None)
    up = load(out, keep_fp8=True).params["blocks"]["mlp"]["up"]["weight"]
    assert isinstance(up, Fp8Tensor) and up.scaling == scaling
    jax.tree.map(lambda a: a[1], up).validate()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--format", "fp8", "--bits", "4", "--calibration", "x"], "--calibration, --bits with 8-bit floats"),
        (["--format", "fp8", "--method", "gptq"], "--method with 8-bit floats"),
        (["--format", "fp8", "--order", "none", "--rows", "1"], "--order, --rows with 8-bit floats"),
        (["--scaling", "row", "--format", "fp8"], "cannot hold FP8 weights with scales by row. Use 'compressed-tens"),
        (["--scaling", "block", "--format", "awq"], "format='awq' - that holds 4-bit weights"),
        (["--format", "fp8"], "'none' does not exist"),
    ],
)
def test_what_does_not_go_together_is_told_before_any_work(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["quantize", "--model", "none", "--out", "o", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_evaluated_with_activations_in_8_bits(dense, command, tmp_path):  # noqa: F811
    """`--keep-fp8` rounds activations too, so that it is another model than the numbers of the same folder."""
    (text := tmp_path / "text.txt").write_text("Now is the winter of our discontent made glorious summer. " * 3)
    command("quantize", "--model", dense, "--out", tmp_path / "x", "--format", "fp8")
    how = ("--compute-dtype", "float32", "--data", text, "--context", 16, "--json")
    found = [
        json.loads(command("evaluate", "--model", model, *how, *more).out)["nats"]
        for model, more in ((dense, ()), (tmp_path / "x", ()), (tmp_path / "x", ("--keep-fp8",)))
    ]
    assert len({*found}) == 3 and max(found) < 1.02 * min(found)
    prompt = ("--prompt", "To be", "--max-new-tokens", 3, "--temperature", 0)
    assert "To be" in command("generate", "--model", tmp_path / "x", "--keep-fp8", *prompt).out
