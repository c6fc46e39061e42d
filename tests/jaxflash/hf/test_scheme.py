"""quantization_config: what is read from each tool's keys, what is refused, and that no text does harm."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.hf.documents import parse_object
from jaxflash.hf.scheme import Scheme, read_scheme, to_config, to_scheme
from jaxflash.hf.selection import Selection
from pallas_kernels.dispatch import Unsupported

GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.1,
    "true_sequential": True, "static_groups": False, "lm_head": False, "checkpoint_format": "gptq",
    "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:1.0"]},
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "actorder": None, "block_structure": None, "observer": "minmax",
}  # fmt: skip
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
BLOCKS = {**FLOAT, "strategy": "block", "block_structure": [128, 128]}
DEEPSEEK = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip


def tensors_of(weights=WEIGHTS, *, format="pack-quantized", ignore=("lm_head",), targets=("Linear",), **keys):
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group | keys.pop("group", {})}, "ignore": list(ignore), **keys,
    }  # fmt: skip


@pytest.mark.parametrize(
    "values, facts",
    [
        (GPTQ, dict(format="gptq", group=128, symmetric=True, ordered=False)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "sym": False, "group_size": -1},
         dict(format="gptq_v2", group=None, symmetric=False, ordered=True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, dict(format="gptq", group=32, symmetric=True)),
        (AWQ, dict(format="awq", group=64, symmetric=False)),
        (AWQ | {"version": "GEMV", "zero_point": False}, dict(format="awq_gemv", symmetric=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}, dict(format="awq", group=128)),
        (tensors_of(), dict(format="compressed-tensors", group=32, symmetric=True, ordered=False)),
        (tensors_of(WEIGHTS | {"strategy": "channel", "group_size": None, "symmetric": False}),
         dict(group=None, symmetric=False)),
        (tensors_of(WEIGHTS | {"actorder": "group"}), dict(ordered=True)),
        (tensors_of(WEIGHTS | {"actorder": "weight"}), dict(ordered=False)),
        (tensors_of(FLOAT, format="float-quantized", group={"input_activations": {"num_bits": 8}}),
         dict(format="fp8", block=None)),
        (tensors_of(BLOCKS, format="float-quantized"), dict(format="fp8", block=(128, 128))),
        (DEEPSEEK, dict(format="fp8", block=(128, 128))),
        ({"quant_method": "fp8"}, dict(format="fp8", block=None)),
    ],
)  # fmt: skip
def test_what_each_tool_writes(values, facts):
    scheme = to_scheme(values)
    assert {key: getattr(scheme, key) for key in facts} == facts


UP, DOWN, HEAD = "model.layers.3.mlp.up_proj", "model.layers.13.mlp.down_proj", "lm_head"


@pytest.mark.parametrize(
    "values, quantised",
    [
        (GPTQ, {UP, DOWN, HEAD}),
        (GPTQ | {"dynamic": {r"-:.*\.down_proj": {}, r"+:.*\.up_proj": {"bits": 4}}}, {UP, HEAD}),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}, {DOWN}),
        (GPTQ | {"modules_in_block_to_quantize": ["mlp.up_proj"]}, {UP}),
        (AWQ | {"modules_to_not_convert": ["down_proj", "lm_head"]}, {UP}),
        (tensors_of(), {UP, DOWN}),
        (tensors_of(ignore=["lm_head", "re:.*down_proj$"]), {UP}),
        (tensors_of(ignore=[UP]), {DOWN, HEAD}),
        (tensors_of(ignore=["re:model.layers.3.*"]), {DOWN, HEAD}),
        (tensors_of(targets=["re:.*mlp.*"], ignore=[]), {UP, DOWN}),
        (tensors_of(targets=[UP], ignore=[]), {UP}),
    ],
)
def test_which_linears(values, quantised):
    scheme = to_scheme(values)
    assert {name for name in (UP, DOWN, HEAD) if scheme.quantises(name)} == quantised


@pytest.mark.parametrize(
    "values, message",
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes', which is not served"),
        ({"quant_method": "gptqq"}, "Did you mean 'gptq'"),
        ({}, "quant_method=None"),
        (GPTQ | {"bits": 8}, "8 bits, which is not served"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin' order"),
        (GPTQ | {"is_marlin_format": True}, "order"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype='int16'"),
        (GPTQ | {"lm_head": True}, "lm_head=true"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "8 bits"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"group_size": 32}}}, r"other settings for '\+:\.\*up_proj'"),
        (GPTQ | {"dynamic": {".*up_proj": {"sym": False}}}, "other settings"),
        (AWQ | {"bits": 3}, "3 bits"),
        (AWQ | {"version": "marlin"}, "version='marlin'"),
        (tensors_of(WEIGHTS | {"num_bits": 8}), "8 bits, type='int'"),
        (tensors_of(WEIGHTS, format="marlin-24"), "format='marlin-24'"),
        (tensors_of(WEIGHTS | {"strategy": "tensor"}), "strategy='tensor' of 4-bit"),
        (tensors_of(group={"input_activations": {"num_bits": 8}}), "quantised activations"),
        (tensors_of(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (tensors_of(config_groups={"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS | {"group_size": 64}}}),
         r"groups that differ \(a, b\)"),
        (tensors_of(ignore=["re:(a+)+b"]), "could run for long"),
        (tensors_of(ignore=["re:" + "a?" * 20]), "could run for long"),
        (tensors_of(ignore=["re:.*" + "x" * 300]), "could run for long"),
        (tensors_of(ignore=[f"re:{i}" for i in range(100)]), "100 patterns"),
    ],
)  # fmt: skip
def test_what_is_not_served(values, message):
    with pytest.raises(Unsupported, match=message) as refused:
        to_scheme(values)
    assert refused.value.rejected


@pytest.mark.parametrize(
    "values, message",
    [
        (GPTQ | {"bits": "4"}, "bits='4' - must be an integer"),
        (GPTQ | {"bits": True}, "bits=True"),
        (GPTQ | {"group_size": 0}, "group_size=0"),
        (GPTQ | {"group_size": 1 << 40}, "group_size="),
        (GPTQ | {"sym": "yes"}, "sym='yes' - must be true or false"),
        (GPTQ | {"dynamic": ["x"]}, "dynamic="),
        (GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        (GPTQ | {"modules_in_block_to_quantize": [[1]]}, "list of texts"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "must be a list of texts"),
        (tensors_of(config_groups={}), "must be an object with a group"),
        (tensors_of(config_groups={"a": {"weights": None}}), "no weights in config_groups.a"),
        (tensors_of(WEIGHTS | {"actorder": "sideways"}), "actorder='sideways'"),
        (tensors_of(BLOCKS | {"block_structure": [128]}, format="float-quantized"), "must be two sizes"),
        (DEEPSEEK | {"weight_block_size": [0, 128]}, "block size=0"),
    ],
)
def test_what_is_no_configuration(values, message):
    with pytest.raises(ValueError, match=message):
        to_scheme(values)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(format="gptq", group=128),
        Scheme(format="gptq_v2", group=None, symmetric=False, ordered=True),
        Scheme(format="awq", group=32, symmetric=False),
        Scheme(format="compressed-tensors", group=64),
        Scheme(format="compressed-tensors", group=None, symmetric=False, ordered=True),
        Scheme(format="fp8", block=(128, 128)),
    ],
    ids=str,
)
def test_what_is_written_is_read(scheme):
    again = to_scheme(json.loads(json.dumps(to_config(scheme, ["mlp.down_proj"]))))
    for field in ("format", "group", "symmetric", "ordered", "block"):
        assert getattr(again, field) == getattr(scheme, field)
    if scheme.format != "fp8":  # whose files say themselves which weights are
        assert again.quantises(UP) and not again.quantises(DOWN)


def test_a_file_beside_config_json(tmp_path):
    """AutoGPTQ's names no method; two places that say the same are one, and others contradict each other."""
    old = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    assert read_scheme(tmp_path, {}) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    assert read_scheme(tmp_path, {}) == read_scheme(tmp_path, {"quantization_config": GPTQ}) == to_scheme(GPTQ)
    with pytest.raises(ValueError, match="describe different weights"):
        read_scheme(tmp_path, {"quantization_config": GPTQ | {"group_size": 64}})
    with pytest.raises(ValueError, match="must be an object"):
        read_scheme(tmp_path, {"quantization_config": "gptq"})


# Anything at all is either a scheme, or told in words.

SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=6) | st.sampled_from(
    ["gptq", "awq", "fp8", "group", "channel", "pack-quantized", "float-quantized", "Linear", "re:.*", "-:.*", "("]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
STARTS = (GPTQ, AWQ, DEEPSEEK, tensors_of(), tensors_of(BLOCKS, format="float-quantized"))
KEYS = sorted({*GPTQ, *AWQ, *DEEPSEEK, *tensors_of(), "dynamic", "modules_in_block_to_quantize", "sparsity_config"})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(STARTS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_change_is_a_scheme_or_told(start, changes):
    check({**start, **changes})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(WEIGHTS)), VALUES, max_size=2), VALUES)
def test_any_group_is_a_scheme_or_told(changes, targets):
    check(tensors_of(WEIGHTS | changes, group={"targets": targets}))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_told(text):
    try:
        check(parse_object(text, "it"))
    except ValueError:
        pass


def check(values):
    try:
        scheme = to_scheme(values)
    except (ValueError, Unsupported) as error:
        assert str(error).startswith("load: ") and len(str(error)) < 3000
    else:
        assert isinstance(scheme.quantises(UP), bool)


@settings(max_examples=100, deadline=None)
@given(st.text("a.*+?|()[]\\d^${}12", max_size=24))
def test_any_pattern_ends_soon(pattern):
    started = time.process_time()
    try:
        found = Selection(patterns=(pattern,))
    except (ValueError, Unsupported):
        return
    for name in (UP, "a" * 40, "a" * 39 + "b"):
        assert isinstance(name in found, bool)
    assert time.process_time() - started < 5
