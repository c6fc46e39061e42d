"""Folders that `save` writes: what is in them, what is refused, and what a kill leaves."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash.config import preset
from jaxflash.hf import pieces as module
from jaxflash.hf.folder import check_room
from jaxflash.hf.safetensors import INDEX, open_folder
from jaxflash.language_model import LanguageModel, load, save
from jaxflash.model import init_params
from jaxflash.tokenizer import ByteTokenizer, NoTokenizer, load_tokenizer
from pallas_kernels.dispatch import Unsupported
from tests.jaxflash.hf.tiny import GOLDEN
from tests.jaxflash.test_tokenizer import write_bpe

CONFIG = preset("tiny", n_layers=2, d_model=32, d_ff=48, tie_embeddings=False)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(CONFIG, jax.jit(lambda: init_params(CONFIG, 0))(), ByteTokenizer())


def test_shards_are_as_large_as_allowed_and_the_index_names_them_all(model, tmp_path):
    save(model, tmp_path / "x", max_shard_bytes=30_000)
    files = sorted(file.name for file in (tmp_path / "x").glob("*.safetensors"))
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    stored = open_folder(tmp_path / "x")
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held = {file: sum(t.nbytes for t in stored.values() if t.file.name == file) for file in files}
    alone = [file for file in files if sum(t.file.name == file for t in stored.values()) == 1]
    assert all(size <= 30_000 for file, size in held.items() if file not in alone)
    assert index["metadata"]["total_size"] == sum(held.values()) == sum(x.nbytes for x in jax.tree.leaves(model.params))


def test_one_shard_has_no_index(model, tmp_path):
    save(model, tmp_path / "x")
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json",
    ]  # fmt: skip
    written = json.loads((tmp_path / "x" / "generation_config.json").read_text())
    assert written == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    again = load(tmp_path / "x")
    assert isinstance(again.tokenizer, ByteTokenizer)
    assert again.config == dataclasses.replace(CONFIG, compute_dtype="bfloat16")


def test_the_tokenizer_comes_along(model, tmp_path):
    folder = write_bpe(
        tmp_path / "bpe",
        specials=("<s>", "</s>", "<|eot|>"),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>", "chat_template": "{{ bos_token }}hi"},
        generation_config={"eos_token_id": [1, 2]},
    )
    tokenizer = load_tokenizer(folder)
    save(dataclasses.replace(model, tokenizer=tokenizer), tmp_path / "x")
    again = load(tmp_path / "x").tokenizer
    assert again.fingerprint == tokenizer.fingerprint and again.chat_template == "{{ bos_token }}hi"
    assert again.stop_ids == (1, 2) and again.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    for name in ("config", "generation_config"):
        written = json.loads((tmp_path / "x" / f"{name}.json").read_text())
        assert [written[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [0, [1, 2], None]
    # The file's post-processor starts a prompt, but no text of a corpus.
    assert again.prefix_ids == (0,) and again.encode_prompt("be").tolist() == [0, *again.encode("be").tolist()]
    assert tokenizer.prefix_ids == () and tokenizer.encode_prompt("be").tolist() == tokenizer.encode("be").tolist()


def test_all_named_templates_come_along(model, tmp_path):
    """The one called "default" is used, and the others are kept; a file of its own wins, as in transformers."""
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_bpe(tmp_path / "bpe", tokenizer_config={"eos_token": "</s>", "chat_template": templates})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "plain"
    save(dataclasses.replace(model, tokenizer=tokenizer), tmp_path / "x")
    assert json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())["chat_template"] == templates
    (folder / "chat_template.jinja").write_text("its own")
    load_tokenizer(folder).save(tmp_path / "again")
    assert load_tokenizer(folder).chat_template == load_tokenizer(tmp_path / "again").chat_template == "its own"


def test_nothing_is_written_over(model, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("x", "file"):
        with pytest.raises(FileExistsError, match="nothing is written over"):
            save(model, tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "mine", "x"]
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_model_without_a_tokenizer_names_no_token(model, tmp_path):
    """null, since transformers takes a missing one for Llama's; and no file that says nothing."""
    save(dataclasses.replace(model, tokenizer=NoTokenizer(tmp_path)), tmp_path / "x")
    values = json.loads((tmp_path / "x" / "config.json").read_text())
    assert [values[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [None] * 3
    assert not (tmp_path / "x" / "generation_config.json").exists()


def test_the_current_folder_is_not_replaced(model, tmp_path, monkeypatch):
    """The shell that stands in it would stand in a deleted one."""
    monkeypatch.chdir(tmp_path)
    for path in (".", tmp_path, tmp_path / "a" / ".."):
        with pytest.raises(FileExistsError, match="nor the current folder is replaced"):
            save(model, path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(FileExistsError, match="neither a mount point"):
        save(model, "disk")


def test_a_link_leads_to_where_it_points(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name, target in (("link", "real"), ("dangling", "new"), ("full link", "full")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name, target in (("link", "real"), ("dangling", "new")):
        save(model, tmp_path / name)
        assert (tmp_path / name).is_symlink() and (tmp_path / target / "model.safetensors").is_file()
    with pytest.raises(FileExistsError, match="nothing is written over"):
        save(model, tmp_path / "full link")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_place_where_nothing_can_be_made_is_told_first(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"'.*/file/x/y' cannot be made: '.*/file' is a file"):
        check_room(tmp_path / "file" / "x" / "y", 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write everywhere
    with pytest.raises(PermissionError, match="may not be written to"):
        save(model, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_little_space_is_told_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="free=1000 bytes, 217728 are needed"):
        save(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(model, tmp_path, monkeypatch):
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) == 5:
            raise OSError("No space left on device")
        return real(*args)

    real = module.fetch_dense
    monkeypatch.setattr(module, "fetch_dense", fails)
    with pytest.raises(OSError, match="No space left"):
        save(model, tmp_path / "x")
    assert len(calls) == 5 and not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from jaxflash.language_model import load, save
at = int(sys.argv[3])
def told(name, size):
    global at
    at -= 1
    if at == 0:
        os.kill(os.getpid(), signal.SIGKILL)
save(load(sys.argv[1]), sys.argv[2], on_tensor=told)
"""


def test_a_kill_leaves_no_half_checkpoint(tmp_path):
    out = tmp_path / "x"
    command = [sys.executable, "-c", KILLED, str(GOLDEN / "llama3"), str(out), "11"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=200)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not out.exists() and [p.suffix for p in tmp_path.iterdir()] == [".partial"]
    save(load(GOLDEN / "llama3"), out)
    assert load(out).config == load(GOLDEN / "llama3").config
    assert [p.name for p in tmp_path.iterdir()] == ["x"]  # what the kill left is gone


def test_half_precision_refuses_what_it_cannot_hold(model, tmp_path):
    params = {**model.params, "norm": {"scale": model.params["norm"]["scale"].at[3].set(70_000.0)}}
    with pytest.raises(ValueError, match="'model.norm.weight' has weights beyond the largest float16"):
        save(dataclasses.replace(model, params=params), tmp_path / "x", dtype="float16")
    assert not list(tmp_path.iterdir())
    infinite = {**model.params, "norm": {"scale": model.params["norm"]["scale"].at[3].set(jnp.inf)}}
    save(dataclasses.replace(model, params=infinite), tmp_path / "x", dtype="float16")
    assert np.isinf(np.asarray(load(tmp_path / "x").params["norm"]["scale"])[3])


def test_a_model_of_no_architecture_is_refused_before_writing(tmp_path):
    config = preset("tiny", n_layers=1, qkv_bias=True, qk_norm=True)
    with pytest.raises(Unsupported, match="is in none of them"):
        save(LanguageModel(config, {"blocks": {}}, ByteTokenizer()), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_progress_is_told_of_every_tensor(model, tmp_path):
    told = []
    save(model, tmp_path / "x", on_tensor=lambda name, size: told.append((name, size)))
    assert told == [(t.name, t.nbytes) for t in open_folder(tmp_path / "x").values()]


def test_a_shard_limit_that_is_none(model, tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save(model, tmp_path / "x", max_shard_bytes=0)
