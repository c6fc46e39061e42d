"""Logits of every architecture against those that transformers gave (tests/golden/hf/make_golden.py), and back."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxflash.config import Sampling
from jaxflash.generate import generate_tokens
from jaxflash.language_model import LanguageModel, load, save
from sharding.mesh import make_mesh
from tests.jaxflash.hf.tiny import GOLDEN, NAMES

# What the project promises: logits of transformers, both in float32, to 1e-4.
PROMISED = 1e-4


def logits(model: LanguageModel, tokens):
    module = dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype="float32")).module
    return np.asarray(jax.jit(lambda t: module(t))(tokens))


@functools.cache
def loaded(name) -> LanguageModel:
    return load(GOLDEN / name)


@functools.cache
def golden(name):
    with np.load(GOLDEN / name / "logits.npz") as held:
        return held["tokens"], held["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    tokens, expected = golden(name)
    model = loaded(name)
    assert np.abs(logits(model, tokens) - expected).max() <= PROMISED
    assert expected.std() > 0.5  # of a size at which 1e-4 says something


def test_the_goldens_cover_every_switch():
    configs = [loaded(name).config for name in NAMES]
    for field in ("qkv_bias", "qk_norm", "tie_embeddings", "sliding_window", "rope_scaling"):
        assert {bool(getattr(config, field)) for config in configs} == {True, False}, field
    assert {config.param_dtype for config in configs} == {"float32", "bfloat16"}
    assert any(config.n_kv_heads < config.n_heads for config in configs)
    assert any(config.head_dim * config.n_heads != config.d_model for config in configs)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4}])
def test_on_a_mesh_the_same_parameters(name, axes):
    alone, split = loaded(name), load(GOLDEN / name, mesh=make_mesh(axes))
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), alone.params, split.params)
    assert all(jax.tree.leaves(same))
    weight = split.params["blocks"]["mlp"]["gate"]["weight"]
    assert weight.addressable_shards[0].data.size * axes.get("fsdp", 1) * axes.get("tensor", 1) == weight.size


def test_a_chosen_dtype_is_the_rounded_one():
    exact, rounded = loaded("llama2"), load(GOLDEN / "llama2", param_dtype="bfloat16")
    assert exact.config.param_dtype == "float32" and rounded.config.param_dtype == "bfloat16"
    for a, b in zip(jax.tree.leaves(exact.params), jax.tree.leaves(rounded.params), strict=True):
        assert b.dtype == "bfloat16" and np.array_equal(np.asarray(a.astype("bfloat16")), np.asarray(b))


def raw(folder):
    """name -> (dtype, shape, bytes) of a folder's tensors, by the `safetensors` package."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="flax") as opened:
            for name in opened.keys():
                value = np.asarray(opened.get_tensor(name))
                found[name] = (value.dtype.name, value.shape, value.tobytes())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same_bytes(name, tmp_path):
    """Read by another reader than ours. float16 is kept as float32 in memory, and asked for again."""
    model = loaded(name)
    was = raw(GOLDEN / name)
    dtype = {dtype for dtype, _, _ in was.values()}.pop()
    save(model, tmp_path / "out", dtype=dtype, max_shard_bytes=20_000)
    assert raw(tmp_path / "out") == was
    again = load(tmp_path / "out")
    assert again.config == model.config
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), model.params, again.params)
    assert all(jax.tree.leaves(same))


def test_saved_from_a_mesh_it_is_the_same_file(tmp_path):
    save(loaded("qwen3"), tmp_path / "one")
    save(load(GOLDEN / "qwen3", mesh=make_mesh({"fsdp": 2, "tensor": 2, "data": 2})), tmp_path / "eight")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "eight"))
    assert a == b


def test_ids_can_be_generated_without_a_tokenizer():
    model = loaded("qwen3")
    tokens, expected = golden("qwen3")
    prompt = tokens[0, :20].tolist()
    config = dataclasses.replace(model.config, compute_dtype="float32")
    row = generate_tokens(config, model.params, [prompt], Sampling(max_new_tokens=1))[0]
    assert row == [int(expected[0, 19].argmax())]
    with pytest.raises(ValueError, match="holds no tokenizer.json - text needs one"):
        model.tokenizer.encode("text")
