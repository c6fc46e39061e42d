"""Presets, JSON, overrides and refusals of the configurations."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from jaxflash.config import (
    PRESETS,
    RESUMABLE,
    ModelConfig,
    RopeScaling,
    Sampling,
    TrainConfig,
    differences,
    from_json,
    override,
    preset,
    to_json,
    train_preset,
)


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    config = train_preset(name, data=("a.txt", "b"), mesh={"fsdp": 4, "tensor": 2}, out="runs/x", schedule_steps=7)
    again = from_json(to_json(config))
    assert again == config
    assert type(again.model) is ModelConfig
    assert type(again.model.rope_scaling) is type(config.model.rope_scaling)
    assert again.data == ("a.txt", "b") and hash(again.model) == hash(config.model)


def test_json_is_refused_by_key():
    values = json.loads(to_json(train_preset("1b")))
    cases = {
        r"TrainConfig: unknown key 'sede'\. Did you mean 'seed'": values | {"sede": 1},
        r"TrainConfig\.model: unknown key 'dmodel'\. Did you mean 'd_model'": values
        | {"model": values["model"] | {"dmodel": 1}},
        r"TrainConfig\.model\.rope_scaling: unknown key 'fctor'": values
        | {"model": values["model"] | {"rope_scaling": {"fctor": 8.0}}},
        r"TrainConfig\.model: .*missing.*'vocab_size'": values
        | {"model": {k: v for k, v in values["model"].items() if k != "vocab_size"}},
        r"TrainConfig: .*missing.*'model'": {k: v for k, v in values.items() if k != "model"},
        r"TrainConfig: seq_len=0": values | {"seq_len": 0},
        "TrainConfig.seq_len: 'long' is not of type int": values | {"seq_len": "long"},
        "TrainConfig.mesh: 3 is not of type Mapping": values | {"mesh": 3},
        "TrainConfig: unknown packing='x'": values | {"packing": "x"},
        r"TrainConfig\.model: '1b' is not of type": values | {"model": "1b"},
        "TrainConfig: the JSON text is a list": [1],
    }
    for message, broken in cases.items():
        with pytest.raises(ValueError, match=message):
            from_json(json.dumps(broken))


@pytest.mark.parametrize(
    ("key", "given", "read"),
    [
        ("seq_len", "64", 64), ("seq_len", 64.0, 64), ("seed", "3", 3),
        ("learning_rate", "3e-4", 3e-4), ("learning_rate", 1, 1.0),
        ("schedule_steps", "none", None), ("schedule_steps", None, None), ("schedule_steps", "12", 12),
        ("data", "a.txt,b", ("a.txt", "b")), ("data", ["x"], ("x",)), ("data", "None", None), ("data", None, None),
        ("out", "runs/1", "runs/1"), ("out", None, None), ("tokenizer", "none", "none"),
        ("packing", "stream", "stream"), ("mesh", {"fsdp": 2}, {"fsdp": 2}),
        ("model.n_layers", "2", 2), ("model.qkv_bias", "true", True), ("model.qkv_bias", "False", False),
        ("model.tie_embeddings", True, True), ("model.remat", "dots", "dots"), ("model.remat", "none", "none"),
        ("model.sliding_window", "8", 8), ("model.sliding_window", "none", None), ("model.attention", "xla", "xla"),
        ("model.rope_scaling.factor", "4", 4.0), ("model.rope_scaling", None, None),
        ("model.rope_scaling", RopeScaling(factor=2.0), RopeScaling(factor=2.0)),
    ],
)  # fmt: skip
def test_override_reads_the_type_of_the_field(key, given, read):
    start = train_preset("1b", seq_len=32, schedule_steps=5)
    value = override(start, {key: given})
    for name in key.split("."):
        value = getattr(value, name)
    assert value == read and type(value) is type(read)


def test_override_changes_only_what_it_names():
    start = train_preset("1b")
    config = override(start, {"model.n_layers": "2", "model.rope_scaling.factor": 8, "seed": 5})
    scaling = RopeScaling(factor=8.0)  # the preset has 32, and the defaults else
    assert config == dataclasses.replace(
        start, seed=5, model=dataclasses.replace(start.model, n_layers=2, rope_scaling=scaling)
    )
    assert override(start, {}) == start
    assert override(start, {"model.n_layers": 2, "model": preset("tiny"), "seq_len": 8}).model == preset(
        "tiny", n_layers=2
    )


def test_override_of_sampling():
    config = override(Sampling(), {"stop_tokens": "1,2", "temperature": "0.5", "max_new_tokens": "7"})
    assert config == Sampling(stop_tokens=(1, 2), temperature=0.5, max_new_tokens=7)
    assert override(config, {"stop_tokens": [3]}).stop_tokens == (3,)
    assert override(config, {"stop_tokens": ""}).stop_tokens == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lerning_rate", 1, "TrainConfig: unknown key 'lerning_rate'. Did you mean 'learning_rate'"),
        ("model.n_layer", 1, "ModelConfig: unknown key 'n_layer'. Did you mean 'n_layers'"),
        ("qqq", 1, "unknown key 'qqq'. Known: model, data"),
        ("seed.x", 1, "TrainConfig: 'seed' is 0 and has no fields"),
        ("model.rope_scaling.factor", 4, "ModelConfig: 'rope_scaling' is None and has no fields"),
        ("seq_len", "long", "TrainConfig.seq_len: 'long' is not of type int"),
        ("seq_len", 1.5, "TrainConfig.seq_len: 1.5 is not of type int"),
        ("seq_len", float("inf"), "TrainConfig.seq_len: inf is not of type int"),
        ("seq_len", None, "TrainConfig.seq_len: None is not allowed"),
        ("seq_len", [1], "is not of type int"),
        ("learning_rate", "fast", "is not of type float"),
        ("model.qkv_bias", "maybe", "ModelConfig.qkv_bias: 'maybe' is not of type bool"),
        ("model.rope_scaling", "llama3", "ModelConfig.rope_scaling: 'llama3' is not of type RopeScaling"),
        ("model", "1b", "TrainConfig.model: '1b' is not of type ModelConfig"),
        ("data", 5, "TrainConfig.data: 5 is not of type tuple"),
        ("mesh", "fsdp=4", "TrainConfig.mesh: 'fsdp=4' is not of type Mapping"),
        ("packing", "document", "TrainConfig: unknown packing='document'. Did you mean 'documents'"),
        ("model.remat", "attn", "ModelConfig: unknown remat='attn'. Did you mean 'attention'"),
    ],
)
def test_override_refuses(key, value, message):
    with pytest.raises(ValueError) as error:
        override(train_preset("tiny"), {key: value})
    assert message in str(error.value)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match=r"preset: unknown name='llama3-8'\. Did you mean 'llama3-8b'"):
        preset("llama3-8")
    with pytest.raises(ValueError, match="Did you mean 'n_layers'"):
        preset("tiny", n_layer=2)


def test_presets_may_be_changed():
    assert preset("tiny", n_layers="2") == dataclasses.replace(preset("tiny"), n_layers=2)
    assert train_preset("tiny", **{"model.n_layers": 2}).model.n_layers == 2
    assert train_preset("1b").model == preset("1b", remat=train_preset("1b").model.remat)


def checked(config, **change):
    """`config` with fields set and checked by `__post_init__` alone: in tests, __init__ refuses other types itself."""
    config = copy.copy(config)
    for name, value in change.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


GOOD: dict[str, Any] = dict(
    vocab_size=8, d_model=8, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=8, context=16
)


@pytest.mark.parametrize(
    ("change", "message"),
    [({name: 0}, f"ModelConfig: {name}=0 - must be at least 1") for name in GOOD]
    + [
        ({"n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"compute_dtype": "float16"}, "unknown compute_dtype='float16'"),
        ({"param_dtype": "int8"}, "unknown param_dtype='int8'"),
        ({"remat": "dot"}, "unknown remat='dot'. Did you mean 'dots'"),
    ],
)
def test_model_config_refuses(change, message):
    with pytest.raises(ValueError) as error:
        checked(ModelConfig(**GOOD), **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(factor=0.5), "factor=0.5"),
        (dict(factor=8.0, low_freq_factor=4.0), "below"),
        (dict(factor=8.0, low_freq_factor=5.0), "below"),
    ],
)
def test_rope_scaling_refuses(change, message):
    with pytest.raises(ValueError) as error:
        checked(RopeScaling(factor=2.0), **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [({name: 0}, f"{name}=0 - must be at least 1") for name in
     ("seq_len", "batch_size", "accumulate", "steps", "loss_chunk", "keep")]
    + [({name: -1}, f"{name}=-1 - must not be negative") for name in
       ("warmup_steps", "eval_every", "eval_batches", "checkpoint_every")]
    + [
        ({"schedule_steps": 0}, "decay_steps=0 - must be at least 1"),
        ({"seq_len": 17}, "seq_len=17 is longer than the model's context=16"),
        ({"batch_size": 10, "accumulate": 4}, "Use batch_size=12"),
        ({"validation_fraction": 0.0}, "validation_fraction=0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"learning_rate": float("nan")}, "must be positive"),
        ({"clip_norm": 0.0}, "must be positive"),
        ({"beta2": 1.0}, "must lie in [0, 1)"),
        ({"epsilon": 0.0}, "self.epsilon=0.0 be positive"),
        ({"packing": "docs"}, "unknown packing='docs'. Did you mean 'documents'"),
    ],
)  # fmt: skip
def test_train_config_refuses(change, message):
    with pytest.raises(ValueError) as error:
        checked(TrainConfig(model=ModelConfig(**GOOD), seq_len=8), **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_sampling_refuses(change, message):
    with pytest.raises(ValueError) as error:
        checked(Sampling(), **change)
    assert message in str(error.value)


def test_collections_are_normalised():
    start, mesh = train_preset("tiny"), {"fsdp": 2}
    assert checked(start, data="corpus/*.txt").data == ("corpus/*.txt",)
    assert checked(start, data=["a", "b"]).data == ("a", "b")
    held = checked(start, mesh=mesh)
    mesh["fsdp"] = 3
    assert held.mesh == {"fsdp": 2}
    assert checked(Sampling(), stop_tokens=[1, 2]).stop_tokens == (1, 2)


def test_differences_are_dotted_and_leave_out_what_may_change():
    a = train_preset("tiny", steps=10, schedule_steps=20)
    changed = dict(
            steps=15, mesh={"fsdp": 2}, schedule="gpipe", stage_chunks=3, out="b", eval_every=1, eval_batches=2,
            checkpoint_every=3, keep=4,
        )  # fmt: skip
    assert changed.keys() == RESUMABLE
    assert differences(a, override(a, changed)) == {}
    b = override(a, {"seed": 1, "model.n_layers": 3, "data": "x", "model.rope_scaling": RopeScaling(factor=2.0)})
    assert differences(a, b) == {
        "seed": (0, 1),
        "model.n_layers": (4, 3),
        "data": (None, ("x",)),
        "model.rope_scaling.factor": (None, 2.0),
        "model.rope_scaling.low_freq_factor": (None, 1.0),
        "model.rope_scaling.high_freq_factor": (None, 4.0),
        "model.rope_scaling.original_context": (None, 8192),
    }


def test_differences_see_the_schedule_that_steps_imply():
    a = train_preset("tiny", steps=10)
    assert differences(a, override(a, {"steps": 20})) == {"schedule_steps": (10, 20)}
    assert differences(a, override(a, {"steps": 20, "schedule_steps": 10})) == {}
