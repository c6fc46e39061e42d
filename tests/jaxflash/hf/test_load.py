"""What `load` refuses before any weight is read, how much of a file it reads, and how much memory that takes."""

import dataclasses
import json
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxflash.hf import names
from jaxflash.hf.load import load_params, open_checkpoint
from jaxflash.hf.safetensors import INDEX, open_file
from jaxflash.hf.tensors import MappedFile
from jaxflash.language_model import load
from jaxflash.model import abstract
from sharding.mesh import make_mesh
from tests.jaxflash.hf.tiny import GOLDEN, copy, edit, llama_folder, rewrite

FIRST = "model-00001-of-00002.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"


def refused(folder, message, error: type[Exception] = ValueError):
    """Refused by the checks alone, in one paragraph and quickly."""
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith("load: ") and "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


def test_a_truncated_shard(tmp_path):
    folder = copy("llama3", tmp_path)
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:-1])
    refused(folder, f"'{FIRST}' is truncated")
    (folder / FIRST).write_bytes(content[:100])
    refused(folder, "announces a header of")
    (folder / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(folder, "announces a header of")


def test_a_missing_shard_and_a_missing_index(tmp_path):
    folder = copy("llama3", tmp_path)
    (folder / FIRST).unlink()
    refused(folder, f"lacks '{FIRST}', which .* names", FileNotFoundError)
    (folder / INDEX).unlink()
    refused(folder, "holds neither model.safetensors nor", FileNotFoundError)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(folder, "'pytorch_model.bin' is a pickle, which runs code", FileNotFoundError)


def test_two_sets_of_weights(tmp_path):
    folder = copy("llama3", tmp_path)
    (folder / "model.safetensors").write_bytes((folder / FIRST).read_bytes())
    refused(folder, "holds both")


def test_an_index_of_one_file_by_the_usual_name(tmp_path):
    """As mlx writes it: the index decides, and names the file that would be read without it."""
    folder = copy("llama2", tmp_path)
    names_there = load_file(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names_there, "model.safetensors")}))
    assert open_checkpoint(folder).stored.keys() == names_there.keys()


def test_an_index_and_shards_that_disagree(tmp_path):
    folder = copy("llama3", tmp_path)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(name for name, shard in index.items() if shard != FIRST)
    edit(folder / INDEX, weight_map=index | {name: FIRST})
    refused(folder, f"lacks 1 of the .* first '{name}'")
    edit(folder / INDEX, weight_map={key: shard for key, shard in index.items() if key != name})
    refused(folder, f"1 of 20 tensors are missing: '{name}'")


def test_only_the_tensors_of_the_index_are_read(tmp_path):
    """A shard may hold others, such as leftovers of another split: the index decides."""
    folder = copy("qwen3", tmp_path)
    one, two = sorted(folder.glob("*.safetensors"))
    both = load_file_any(one) | load_file_any(two)
    save_file({name: value * 0 if name in load_file_any(two) else value for name, value in both.items()}, one)
    expected, found = load(GOLDEN / "qwen3"), load(folder)
    np.testing.assert_array_equal(np.asarray(found.params["table"]), np.asarray(expected.params["table"]))
    np.testing.assert_array_equal(
        np.asarray(found.params["norm"]["scale"]), np.asarray(expected.params["norm"]["scale"])
    )


def load_file_any(path):
    return {name: np.asarray(value) for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: ...}, f"1 of 21 tensors are missing: '{Q}'"),
        ({"lm_head.weight": ...}, "'lm_head.weight' .* set tie_word_embeddings"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, "1 tensors are not expected"),
        ({"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)}, "not expected: 'model.layers.2"),
        ({Q: np.zeros((32, 31), np.float32)}, r"shape=\(32, 31\), the configuration makes it \(32, 32\)"),
        ({Q: np.zeros(1024, np.float32)}, r"shape=\(1024,\)"),
        ({Q: np.zeros((32, 32), np.int8)}, "has dtype='I8' - dense weights are"),
        ({Q: np.zeros((32, 32), np.float64)}, "has dtype='F64'"),
    ],
)
def test_tensors_that_are_not_the_configurations(changes, message, tmp_path):
    folder = copy("llama2", tmp_path)
    rewrite(folder / "model.safetensors", **{name.replace(".", "__"): value for name, value in changes.items()})
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "9 of 30 tensors are missing"),
        ({"num_hidden_layers": 1}, "9 tensors are not expected"),
        ({"num_hidden_layers": 1 << 30}, "n_layers=1073741824, the files 21 tensors"),
        ({"vocab_size": (1 << 31) - 1}, r"configuration makes it \(2147483647, 32\)"),
        ({"hidden_size": 64}, r"configuration makes it \(96, 64\)"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "6 of 27 tensors are missing"),
    ],
)
def test_a_configuration_of_another_model(changes, message, tmp_path):
    folder = copy("llama2", tmp_path)
    edit(folder / "config.json", **changes)
    refused(folder, message)


def test_derived_buffers_of_old_files_are_passed_over(tmp_path):
    folder = copy("llama2", tmp_path)
    frequencies = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32) for i in range(2)}
    rewrite(folder / "model.safetensors", **frequencies)
    assert len(open_checkpoint(folder).stored) == 21


def test_a_tied_head_that_is_there_again(tmp_path):
    folder = copy("qwen2", tmp_path)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder / "model.safetensors", lm_head__weight=table)
    assert "lm_head.weight" not in open_checkpoint(folder).stored
    np.testing.assert_array_equal(np.asarray(load(folder).params["table"]), table)
    changed = table.copy()
    changed[-1, -1] += 1
    for head in (changed, table[:-1], table.astype(np.float16)):
        rewrite(folder / "model.safetensors", lm_head__weight=head)
        with pytest.raises(ValueError, match="tie_word_embeddings=true, but 'lm_head.weight' is not the embedding"):
            load(folder)


def test_parts_of_a_comparison_are_all_of_it_together(tmp_path):
    table = np.random.default_rng(0).standard_normal((5000, 700)).astype(np.float32)  # 14 MB, four blocks
    for row in (0, 1499, 2999, 4999):
        changed = table.copy()
        changed[row, 3] += 1
        save_file({"a": table, "b": changed, "c": table}, tmp_path / f"{row}.safetensors")
        a, b, c = (open_file(tmp_path / f"{row}.safetensors")[name] for name in "abc")
        for parts in (1, 3, 7):
            found = [names.same_values(a, b, part=part, parts=parts) for part in range(parts)]
            assert found.count(False) == 1 and all(
                names.same_values(a, c, part=part, parts=parts) for part in range(parts)
            )


def test_opening_a_checkpoint_reads_no_weight(tmp_path, monkeypatch):
    """Not even of a tied model that brings its head again, nor where the mesh is refused."""
    folder = copy("qwen2", tmp_path)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder / "model.safetensors", lm_head__weight=table)
    read = []
    monkeypatch.setattr(MappedFile, "copy", lambda *args: read.append(args))
    opened = open_checkpoint(folder)
    with pytest.raises(ValueError, match="not divisible by tensor=8"):
        load_params(opened, make_mesh({"tensor": 8}))
    assert opened.second_head is not None and not read


def test_a_config_that_is_no_json(tmp_path):
    folder = copy("llama2", tmp_path)
    for content in (b'{"model_type": "llama"', b"\xff\xfe\x00", b"[" * 50_000, b" " * 10_000_001):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match="^load: "):
            load(folder)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        load(GOLDEN / "llama2" / "model.safetensors")
    with pytest.raises(ValueError, match="only run folders have steps"):
        load(GOLDEN / "llama2", step=3)


def test_a_mesh_that_does_not_divide_is_refused_before_reading(tmp_path):
    told = []
    with pytest.raises(ValueError, match="not divisible by tensor=8"):
        load(GOLDEN / "llama2", mesh=make_mesh({"tensor": 8}), on_tensor=lambda *facts: told.append(facts))
    assert not told


def test_half_precision_is_read_exactly(tmp_path):
    """Every float16 there is, subnormals, infinities and NaN included, as the float32 of the same value."""
    folder = llama_folder(tmp_path / "x", vocab=2048, width=32, dtype="F16")
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(2048, 32)
    rewrite(folder / "model.safetensors", model__embed_tokens__weight=every)
    model = load(folder)
    assert model.config.param_dtype == "float32"
    np.testing.assert_array_equal(np.asarray(model.params["table"]), every.astype(np.float32))


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_slice_is_read_once_however_many_devices_hold_it(axes):
    checkpoint = open_checkpoint(GOLDEN / "qwen3")
    read = defaultdict(int)

    def counting(tensor):
        def wrapped(index):
            values = tensor.read(index)
            read[tensor.name] += values.nbytes
            return values

        return dataclasses.replace(tensor, read=wrapped)

    stored = {name: counting(tensor) for name, tensor in checkpoint.stored.items()}
    load_params(dataclasses.replace(checkpoint, stored=stored), make_mesh(axes))
    assert dict(read) == {name: tensor.nbytes for name, tensor in checkpoint.stored.items()}


def test_progress_is_told_of_every_tensor():
    told = []
    load(GOLDEN / "qwen3", on_tensor=lambda name, size: told.append((name, size)))
    stored = open_checkpoint(GOLDEN / "qwen3").stored
    assert told == [(name, stored[name].nbytes) for name in names.places(open_checkpoint(GOLDEN / "qwen3").config)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_host_holds_little_more_than_the_largest_tensor(tmp_path, tied):
    """As Python's own allocator sees it: what is made on the way to the device."""
    folder = llama_folder(tmp_path / "x", vocab=16384, width=256, tied=tied)
    largest = max(tensor.nbytes for tensor in open_checkpoint(folder).stored.values())
    load(folder)  # compiled
    tracemalloc.start()
    load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest == 16 << 20 and peak <= 1.2 * largest


MEMORY = """
import resource, sys
import jax
from jaxflash.language_model import load
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
load(sys.argv[1])  # a small one of the same kind: everything is imported, and XLA has started
before = peak()
model = load(sys.argv[2])
arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(peak() - before - arrays)
"""


def test_the_process_grows_by_little_more_than_the_largest_tensor(tmp_path):
    """As the kernel sees it, mapped pages and XLA's copies on the CPU included."""
    small = llama_folder(tmp_path / "small", vocab=64, width=32, dtype="BF16")
    large = llama_folder(tmp_path / "large", vocab=131072, width=512, dtype="BF16", tied=False)
    command = [sys.executable, "-c", MEMORY, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=200)
    assert done.returncode == 0, done.stderr
    largest = 131072 * 512 * 2
    assert int(done.stdout) <= 1.2 * largest


def test_the_stack_of_layers_has_the_abstract_shapes():
    model = load(GOLDEN / "qwen2")
    shapes = abstract(model.config)[1]
    flat = jax.tree.map(
        lambda leaf, shape: (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), model.params, shapes
    )
    assert all(jax.tree.leaves(flat))
