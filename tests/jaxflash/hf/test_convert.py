"""`convert` and `inspect`, in Python and on the command line, and a conversation there."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxflash.config import Sampling
from jaxflash.generate import generate_tokens
from jaxflash.hf.chat import chat
from jaxflash.hf.convert import convert
from jaxflash.hf.inspect import inspect
from jaxflash.language_model import load, save
from jaxflash.model import count_parameters
from sharding.mesh import make_mesh
from tests.jaxflash.hf.gguf_files import quantised_file, with_tokenizer
from tests.jaxflash.hf.quantised import packed, same
from tests.jaxflash.hf.test_golden import raw
from tests.jaxflash.hf.tiny import GOLDEN, copy, edit
from tests.jaxflash.test_tokenizer import write_bpe


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return quantised_file(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A golden checkpoint with a tokenizer of 300 tokens, of which its table has 96."""
    folder = copy("llama3", tmp_path_factory.mktemp("hub"))
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ raise_exception('no') if no else '' }}"
    )
    write_bpe(folder, specials=("<s>", "</s>"), tokenizer_config={"eos_token": "</s>", "chat_template": template})
    return folder


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)))


def test_there_and_back_through_a_run_folder(hub, tmp_path):
    told = []
    convert(hub, tmp_path / "run", "orbax", on_read=lambda *f: told.append(f), on_write=lambda *f: told.append(f))
    model = load(hub)
    run = load(tmp_path / "run", mesh=make_mesh({"fsdp": 2}))
    assert equal(run.params, model.params) and run.config == model.config
    assert run.tokenizer.prefix_ids == model.tokenizer.prefix_ids == (0,)
    assert run.tokenizer.stop_ids == model.tokenizer.stop_ids and run.tokenizer.chat_template
    convert(tmp_path / "run", tmp_path / "dense", "dense")
    assert raw(tmp_path / "dense") == raw(hub)
    sizes = sum(size for _, size in told)
    assert sizes == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []
    assert load(tmp_path / "run", param_dtype="float32").params["table"].dtype == np.float32


@pytest.mark.parametrize("kind", ["symmetric", "ordered"])
def test_4_bits_stay_packed_in_a_run_folder(kind, tmp_path):
    """There, on a mesh, in other precision, and back in a Hub folder: the same codes, a seventh of the bytes."""
    model = packed(kind)[0]
    save(model, tmp_path / "hub")
    model.tokenizer.save(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "run", "orbax")
    found = inspect(tmp_path / "run")
    kinds = {k.name: k for k in found.kinds}
    assert kinds["layers.*.mlp.up_proj.weight"].precisions == ("INT4 packed, groups of 32",)
    assert kinds["layers.*.mlp.up_proj.weight"].nbytes < 2 * 64 * 96 * 2 and len(found.products) == 7
    run = load(tmp_path / "run")
    assert same(run.params, model.params) and run.config == load(tmp_path / "hub").config
    assert same(load(tmp_path / "run", mesh=make_mesh({"data": 2})).params, model.params)
    half = load(tmp_path / "run", param_dtype="bfloat16")
    assert half.params["table"].dtype == "bfloat16" and half.config.param_dtype == "bfloat16"
    assert same(half.params["blocks"]["mlp"]["down"], model.params["blocks"]["mlp"]["down"])
    convert(tmp_path / "run", tmp_path / "back", "compressed-tensors")
    assert raw(tmp_path / "back") == raw(tmp_path / "hub")
    with pytest.raises(ValueError, match="to='fp8' - the source is in 4 bits already"):
        convert(tmp_path / "run", tmp_path / "x", "fp8")


def test_a_gguf_file_becomes_a_folder(quantised, tmp_path):
    path, _, config = quantised
    convert(path, tmp_path / "x", "dense")
    assert equal(load(tmp_path / "x").params, load(path).params) and load(tmp_path / "x").config == config


def test_half_precision_stays_what_it_is(tmp_path):
    """Held as float32, and written as float16 where all of it was; where only some was, as float32."""
    halves = copy("llama2", tmp_path)
    tensors = {name: values.astype(np.float16) for name, values in load_file(halves / "model.safetensors").items()}
    save_file(tensors, halves / "model.safetensors")
    convert(halves, tmp_path / "x", "dense")
    assert raw(tmp_path / "x") == raw(halves)
    save_file(tensors | {"model.norm.weight": np.ones(32, np.float32)}, halves / "model.safetensors")
    convert(halves, tmp_path / "y", "dense")
    assert {dtype for dtype, _, _ in raw(tmp_path / "y").values()} == {"float32"}


def test_what_cannot_be_converted(hub, tmp_path):
    with pytest.raises(ValueError, match="unknown to='dens'. Did you mean 'dense'"):
        convert(hub, tmp_path / "x", "dens")
    with pytest.raises(ValueError, match="dtype='float16' - the parameters of a run"):
        convert(hub, tmp_path / "x", "orbax", dtype="float16")
    with pytest.raises(FileExistsError, match="nothing is written over"):
        convert(hub, hub, "dense")
    told = []
    with pytest.raises(ValueError, match="the source has no tokenizer"):
        convert(GOLDEN / "qwen2", tmp_path / "x", "orbax", on_read=lambda *facts: told.append(facts))
    assert not told and not list(tmp_path.iterdir())


def test_too_little_space_is_told_before_reading(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    told = []
    for to in ("dense", "orbax"):
        with pytest.raises(OSError, match="free=1000 bytes"):
            convert(hub, tmp_path / "a" / "b", to, on_read=lambda *facts: told.append(facts))
    assert not told and not list(tmp_path.iterdir())


def test_inspect_reads_headers_only(quantised):
    found = inspect(quantised[0])
    assert found.parameters == count_parameters(quantised[2])
    kinds = {kind.name: kind for kind in found.kinds}
    assert kinds["layers.*.self_attn.q_proj.weight"].precisions == ("Q4_0",)
    assert kinds["layers.*.mlp.up_proj.weight"].nbytes == 16 * 210
    text = str(found)
    assert "GGUF file" in text and "tied embeddings" in text and re.search(r"> xla_chunked +chosen", text)


def test_inspect_names_the_layers_of_a_mixed_precision(tmp_path):
    folder = copy("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(np.float16)}, folder / "model.safetensors")
    kind = next(kind for kind in inspect(folder).kinds if kind.name == "layers.*.mlp.up_proj.weight")
    assert kind.precisions == ("F32 (0)", "F16 (1)") and kind.count == 2


PROMPT = "abc"


def with_template(path, **keys):
    return with_tokenizer(path, tokenizer__chat_template="{{ messages[-1].content }}", **keys)


def test_a_reply_ends_at_the_model_s_own_token(tmp_path):
    model = load(with_template(tmp_path / "x.gguf"))
    sampling = Sampling(max_new_tokens=6)
    prompt = model.tokenizer.encode(PROMPT).tolist()
    row = generate_tokens(model.config, model.params, [prompt], sampling, stops=(1,))[0]
    assert len(row) == 6 and row[1] != row[0]
    assert chat(model, PROMPT, sampling) == model.tokenizer.decode(row)
    ends = load(with_template(tmp_path / "y.gguf", tokenizer__ggml__eos_token_id=row[1]))
    assert chat(ends, PROMPT, sampling) == model.tokenizer.decode(row[:1]) != ""
    first = dataclasses.replace(sampling, stop_tokens=(row[0],))
    assert chat(ends, [{"role": "user", "content": PROMPT}], first) == ""


SCRIPT = """
import json, sys
from jaxflash.cli import main
for args in json.loads(sys.argv[1]):
    code = 0
    try:
        main(args)
    except SystemExit as error:
        code = error.code
    print("EXIT", code, flush=True)
    print("EXIT", file=sys.stderr, flush=True)
"""


def commands(*calls: list[str], cwd: Path) -> list[tuple[str, str, str]]:
    """(exit status, stdout, stderr) of each call of the command line, one after the other in one process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "COLUMNS": "300"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^EXIT (.*)$", done.stdout, re.MULTILINE)
    return list(zip(codes, re.split(r"EXIT.*\n", done.stdout), done.stderr.split("EXIT\n"), strict=False))


@pytest.mark.slow
def test_the_command_line(hub, tmp_path):
    gguf = str(with_template(tmp_path / "x.gguf"))
    awq = copy("llama2", tmp_path)
    edit(awq / "config.json", quantization_config={"quant_method": "awq", "bits": 8})
    save(packed("asymmetric")[0], tmp_path / "gptq", format="gptq")
    convert_it = ["convert", str(hub), "out", "--to", "dense", "--dtype", "float32"]
    inspected, converted, replied, requantised, shown, *refused = commands(
        ["inspect", str(hub)],
        convert_it,
        ["generate", "--model", gguf, "--chat", "--prompt", PROMPT, "--prompt", "cab", "--max-new-tokens", "3"],
        ["convert", "gptq", "awq", "--to", "awq"],
        ["inspect", "awq"],
        convert_it,
        ["inspect", "nothing"],
        ["inspect", str(awq)],
        ["generate", "--model", gguf, "--prompt", "x", "--system", "y"],
        ["generate", "--model", str(GOLDEN / "qwen2"), "--prompt", "x"],
        cwd=tmp_path,
    )
    assert inspected[0] == "0" and "Llama-3 rotary scaling" in inspected[1] and "BF16" in inspected[1], inspected
    assert converted[0] == "0" and "done, in out/" in converted[2], converted
    assert load(tmp_path / "out").config.param_dtype == "float32"
    model = load(gguf)
    expected = [chat(model, prompt, Sampling(max_new_tokens=3)) for prompt in (PROMPT, "cab")]
    assert replied[:2] == ("0", "\n".join(expected) + "\n")
    assert requantised[0] == "0" and "14 4-bit weights, each read back and found the same" in requantised[2], (
        requantised
    )
    assert same(load(tmp_path / "awq").params, packed("asymmetric")[0].params)
    assert shown[0] == "0" and "INT4 awq, groups of 32" in shown[1] and "w4a16_matmul on cpu" in shown[1]
    messages = [
        "nothing is written over",
        "does not exist",
        "8 bits, which is not served",
        "Add --chat",
        "no tokenizer.json",
    ]
    assert [code for code, _, _ in refused] == ["2"] * len(messages)
    for (_, _, stderr), message in zip(refused, messages, strict=True):
        assert message in stderr and "Traceback" not in stderr and len(stderr.strip().splitlines()) <= 2
