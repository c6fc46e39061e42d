"""config.json <-> ModelConfig: published files, both generations of keys, switches that are not there, and nonsense."""

import dataclasses
import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.config import PRESETS, ModelConfig, RopeScaling, preset
from jaxflash.hf.config import ARCHITECTURES, from_model_config, to_model_config
from jaxflash.hf.names import places
from jaxflash.model import abstract
from pallas_kernels.dispatch import Unsupported
from tests.jaxflash.hf.test_safetensors import JSON

LLAMA31: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=False, mlp_bias=False,
    hidden_act="silu", pretraining_tp=1, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True,
    bos_token_id=128000, eos_token_id=128001, initializer_range=0.02,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
)  # fmt: skip
QWEN25 = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=3584, intermediate_size=18944,
    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
    max_position_embeddings=32768, max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1000000.0,
    sliding_window=131072, use_sliding_window=False, tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128, hidden_size=4096,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, vocab_size=151936,
    max_position_embeddings=40960, max_window_layers=36, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
    sliding_window=None, use_sliding_window=False, tie_word_embeddings=False,
)  # fmt: skip
MISTRAL = dict(
    architectures=["MistralForCausalLM"], model_type="mistral", hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
    max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096,
    tie_word_embeddings=False,
)  # fmt: skip
LLAMA2 = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=11008,
    num_hidden_layers=32, num_attention_heads=32, vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("published", "name"),
    [(LLAMA31, "llama3.1-8b"), (QWEN25, "qwen2.5-7b"), (QWEN3, "qwen3-8b"), (MISTRAL, "mistral-7b"),
     (LLAMA2, "llama2-7b")],
)  # fmt: skip
def test_published_files_are_the_presets(published, name):
    assert to_model_config(published) == preset(name)


def test_transformers_5_keys_say_the_same():
    scaling = LLAMA31["rope_scaling"] | {"rope_theta": LLAMA31["rope_theta"]}
    new = {k: v for k, v in LLAMA31.items() if k not in ("rope_scaling", "rope_theta")} | {"rope_parameters": scaling}
    assert to_model_config(new) == to_model_config(LLAMA31)
    with pytest.raises(ValueError, match=r"has \[1.0, 500000.0\] as rope_theta"):
        to_model_config(new | {"rope_theta": 1.0})


SCALING = LLAMA31["rope_scaling"]


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {}},
        {"rope_parameters": {"rope_theta": 500000.0}},
        {"rope_parameters": {**SCALING, "rope_theta": 500000.0}},
        {"rope_parameters": SCALING, "rope_scaling": {}},
        {"rope_parameters": SCALING, "rope_scaling": {"rope_type": None, "type": None}},
        {"rope_scaling": {"type": "llama3", **{k: v for k, v in SCALING.items() if k != "rope_type"}},
         "rope_parameters": SCALING},
    ],
)  # fmt: skip
def test_both_generations_of_keys_together_lose_nothing(change):
    assert to_model_config(LLAMA31 | change) == to_model_config(LLAMA31)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "Keep the one that holds"),
        ({"rope_parameters": SCALING | {"factor": 4.0}}, "Keep the one that holds"),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": SCALING}, "Keep the one that holds"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "as rope_theta"),
        ({"rope_scaling": SCALING | {"rope_theta": 1.0}}, "as rope_theta"),
        ({"rope_scaling": SCALING | {"type": "linear"}}, "type='linear' but rope_type='llama3'"),
    ],
)
def test_two_keys_that_contradict_each_other(change, message):
    with pytest.raises(ValueError, match=message):
        to_model_config(LLAMA31 | change)


def test_biases_are_said_where_the_architecture_has_a_key_for_them():
    values = {name: from_model_config(preset(name), "float32", {}) for name in ("qwen2.5-7b", "qwen3-8b", "llama2-7b")}
    assert {name: [v.get(key) for key in ("attention_bias", "mlp_bias")] for name, v in values.items()} == {
        "qwen2.5-7b": [None, None], "qwen3-8b": [False, False], "llama2-7b": [False, False],
    }  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_there_and_back(name):
    values = json.loads(json.dumps(from_model_config(preset(name), "float32", {})))
    back = to_model_config(values)
    kept = {f.name: getattr(preset(name), f.name) for f in dataclasses.fields(ModelConfig)}
    for field in ("compute_dtype", "param_dtype"):  # of the run and of the files, not of config.json
        kept[field] = getattr(back, field)
    assert back == ModelConfig(**kept)


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"qk_norm": True}, {}])
def test_a_window_goes_there_and_back(changes):
    config = preset("tiny", sliding_window=9, compute_dtype="bfloat16", **changes)
    assert to_model_config(from_model_config(config, "float32", {})) == config


def test_a_model_of_no_architecture_is_not_written():
    with pytest.raises(Unsupported, match="config.qkv_bias=True together with config.qk_norm=True"):
        from_model_config(preset("tiny", qkv_bias=True, qk_norm=True), "float32", {})


@pytest.mark.parametrize("name", PRESETS)
def test_names_cover_every_parameter_with_its_shape(name):
    config = preset(name)
    shapes = abstract(config)[1]
    found: dict[tuple, set] = {}
    for place in places(config).values():
        leaf: Any = functools.reduce(lambda node, key: node[key], place.path, shapes)
        shape = leaf.shape if place.layer is None else leaf.shape[1:]
        assert place.shape == (shape[::-1] if place.transposed else shape), place
        found.setdefault(place.path, set()).add(place.layer)
    flat = {tuple(shapes_path) for shapes_path in _paths(shapes)}
    assert found.keys() == flat
    layers = set(range(config.n_layers))
    assert all(held == (layers if path[0] == "blocks" else {None}) for path, held in found.items())


def _paths(tree, before=()):
    for key, value in tree.items():
        yield from _paths(value, (*before, key)) if isinstance(value, dict) else [(*before, key)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLn"]},
            "'LlamaForCausalLn' is not a known .*Did you mean 'LlamaForCausalLM'",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a known architecture"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "Known: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "lama"}, "Did you mean 'llama'"),
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "1 \\+ weight"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "caps its logits"),
        ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}, "mixes window sizes"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
            "rope_parameters of its own for each of 'full_attention', 'sliding_attention'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling of type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "scaling of type 'yarn'"),
    ],
)
def test_what_the_model_has_not_is_refused(change, message):
    with pytest.raises(Unsupported, match=message) as refused:
        to_model_config(LLAMA31 | change)
    assert str(refused.value).startswith("load: ") and refused.value.rejected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (QWEN25 | {"use_sliding_window": True, "max_window_layers": 7}, "in 21 of 28 layers"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
                  "layer_types": ["full_attention", "sliding_attention"] * 18}, "in 18 of 36 layers"),
    ],
)  # fmt: skip
def test_windows_in_some_layers_are_refused(values, message):
    with pytest.raises(Unsupported, match=message):
        to_model_config(values)


def test_windows_in_all_layers_or_none():
    window = QWEN25 | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64}
    assert to_model_config(window).sliding_window == 64
    assert to_model_config(window | {"max_window_layers": 28}).sliding_window is None
    assert to_model_config(MISTRAL | {"sliding_window": None}).sliding_window is None
    missing = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert to_model_config(missing).sliding_window == 4096  # what transformers takes it for
    assert to_model_config(LLAMA2 | {"sliding_window": 8}).sliding_window is None  # Llama has none, whatever is said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None - must be an integer"),
        ({"vocab_size": "big"}, "vocab_size='big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": 1 << 40}, "below 2\\^31"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 - must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rope_theta": 10**400}, "must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 - must be true or false"),
        ({"rope_scaling": "llama3"}, "must be an object or null"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor=None"),
        ({"architectures": []}, "must be a list of one name"),
        ({"architectures": ["A", "B"]}, "must be a list of one name"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "which one holds"),
        ({"num_attention_heads": 31, "head_dim": None}, "no multiple"),
        ({"num_key_value_heads": 5}, "n_heads=32 is not a multiple"),
    ],
)
def test_a_broken_value_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        to_model_config(LLAMA31 | change)


def test_null_is_what_is_left_out():
    keys = ("rope_theta", "rope_scaling", "attention_bias", "hidden_act", "partial_rotary_factor", "head_dim")
    assert to_model_config(LLAMA2 | dict.fromkeys(keys)) == to_model_config(LLAMA2)
    assert to_model_config(QWEN25 | {"use_sliding_window": None, "tie_word_embeddings": None}) == preset("qwen2.5-7b")


def test_scaling_is_read():
    assert to_model_config(LLAMA31).rope_scaling == RopeScaling(factor=8.0, original_context=8192)


KEYS = sorted({*LLAMA31, *QWEN3, "rope_parameters", "quantization_config", "layer_types"})


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([LLAMA31, QWEN25, QWEN3, MISTRAL]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_json_as_values(base, changes):
    try:
        config = to_model_config({**base, **changes})
    except (ValueError, Unsupported) as error:
        assert str(error).split(":")[0] in ("load", "ModelConfig", "RopeScaling")
    else:
        assert config.n_layers >= 1


def test_every_architecture_is_known_by_both_names():
    assert len({known.name for known in ARCHITECTURES.values()}) == len(ARCHITECTURES)
