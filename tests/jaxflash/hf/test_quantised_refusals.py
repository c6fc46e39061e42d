"""What a quantised checkpoint must not be, told before anything is placed; and what a format cannot hold."""

import dataclasses
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxflash.hf.convert import convert
from jaxflash.hf.load import open_checkpoint
from jaxflash.hf.safetensors import open_folder
from jaxflash.hf.save import FileFormat
from jaxflash.hf.save import _scheme as written_as
from jaxflash.language_model import load, save
from pallas_kernels.dispatch import Unsupported
from quant.tensor import Int4Tensor
from tests.jaxflash.hf.quantised import CONFIG, dense, packed, same, stack
from tests.jaxflash.hf.tiny import edit, rewrite

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def folder(tmp_path, request):
    """A folder of the kind and format that a test asks for, to be broken."""
    kind, name = getattr(request, "param", ("symmetric", "gptq"))
    save(packed(kind)[0], tmp_path / "x", format=name)
    return tmp_path / "x"


def change(folder, **tensors):
    rewrite(folder / "model.safetensors", **tensors)


def configure(folder, **keys):
    values = json.loads((folder / "config.json").read_text())["quantization_config"] | keys
    edit(folder / "config.json", quantization_config={key: value for key, value in values.items() if value is not ...})


def refused(folder, message, error: type[Exception] = ValueError):
    told = []
    with pytest.raises(error, match=message) as caught:
        load(folder, on_tensor=lambda *facts: told.append(facts))
    assert not told  # nothing had been placed
    return caught.value


def held(folder, name):
    return load_file(folder / "model.safetensors")[name]


# Loading.


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_missing_tensor_is_named(folder, suffix):
    change(folder, **{f"{UP.replace('.', '__')}__{suffix}": ...})
    refused(folder, rf"1 tensors of quantised weights are missing: '{UP}\.{suffix}'")


def test_many_missing_tensors_are_counted(folder):
    names = [name for name in open_folder(folder) if name.endswith("qweight")]
    change(folder, **{name.replace(".", "__"): ... for name in names})
    refused(folder, "14 tensors of quantised weights are missing: .* and 11 more")


def test_shapes_follow_from_the_configuration(folder):
    words = held(folder, f"{UP}.qweight")
    for wrong in (words[:-1], words.T.copy(), words.astype(np.int64)):
        change(folder, **{f"{UP.replace('.', '__')}__qweight": wrong})
        refused(folder, rf"'{UP}\.qweight' has shape=.* a weight of 64 inputs and 96 outputs .* makes it \(8, 96\)")


def test_a_group_size_that_is_another(folder):
    configure(folder, group_size=64)
    refused(folder, r"makes it \(1, 8\)")
    configure(folder, group_size=16)
    refused(folder, r"groups of 16 of the 64 rows .* Served are \(32, 64, 128\)", Unsupported)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_are_finite(folder, value):
    scales = held(folder, f"{UP}.scales")
    scales[1, 7] = value
    change(folder, **{f"{UP.replace('.', '__')}__scales": scales})
    refused(folder, rf"'{UP}': 1 of 192 scales are NaN or infinite, first that of group=1 column=7")


@pytest.mark.parametrize("value, message", [(2, r"g_idx\[5\]=2 - there are 2 groups"), (-1, "=-1"), (1, "31 rows")])
def test_groups_are_those_of_the_weight(folder, value, message):
    g_idx = held(folder, f"{UP}.g_idx")
    g_idx[5] = value
    change(folder, **{f"{UP.replace('.', '__')}__g_idx": g_idx})
    refused(folder, f"'{UP}': .*{message}")


def test_the_shape_that_compressed_tensors_stores(tmp_path):
    save(packed("symmetric")[0], tmp_path / "x", format="compressed-tensors")
    change(tmp_path / "x", **{f"{UP.replace('.', '__')}__weight_shape": np.array([64, 96])})
    refused(tmp_path / "x", rf"'{UP}': weight_shape holds \[64, 96\]")


def test_a_dense_weight_in_a_packed_one_s_place(folder):
    change(folder, **{f"{UP.replace('.', '__')}__weight": np.zeros((96, 64), np.float32)})
    refused(folder, rf"1 tensors are not expected: '{UP}\.weight'")


def test_a_parameter_quantised_in_some_layers(folder):
    names = [name for name in open_folder(folder) if name.startswith(f"{UP}.")]
    dense_one = {f"{UP.replace('.', '__')}__weight": np.zeros((96, 64), np.float32)}
    change(folder, **{name.replace(".", "__"): ... for name in names}, **dense_one)
    configure(folder, dynamic={r"-:model\.layers\.1\.mlp\.up_proj": {}})
    refused(folder, "'blocks/mlp/up/weight' quantised in 1 of 2 layers, not in layer 1", Unsupported)


def test_a_quantised_head(folder):
    edit(folder / "config.json", tie_word_embeddings=False)
    change(folder, lm_head__qweight=np.zeros((8, 320), np.int32))
    refused(folder, "'lm_head.qweight', a quantised head", Unsupported)


def test_biases_of_linears_that_have_none(folder):
    """Early quantisers wrote zeros for all."""
    change(folder, **{f"{UP.replace('.', '__')}__bias": np.zeros(96, np.float16)})
    assert same(load(folder).params, packed("symmetric")[0].params)
    change(folder, **{f"{UP.replace('.', '__')}__bias": np.eye(1, 96, dtype=np.float16)[0]})
    refused(folder, rf"'{UP}\.bias' is not 0")


@pytest.mark.parametrize(
    "folder, says",
    [(("symmetric", "gptq_v2"), "gptq"), (("symmetric", "gptq"), "gptq_v2"), (("symmetric", "gptq_v2"), ...)],
    indirect=["folder"],
)
def test_the_version_that_zero_points_show(folder, says):
    """Symmetric zero points are 0x77777777 in version 1 and 0x88888888 in version 2, whatever the file says."""
    configure(folder, checkpoint_format=says)
    with pytest.warns(UserWarning, match="but its symmetric zero points are 'gptq"):
        again = load(folder)
    assert same(again.params, packed("symmetric")[0].params)


@pytest.mark.parametrize(
    "folder, keys, message",
    [
        (("asymmetric", "gptq_v2"), {"sym": True}, "says that it is symmetric, but has zero points that are not 8"),
        (("ordered", "gptq"), {"desc_act": False}, "says that rows are in order, but has a g_idx that is not"),
    ],
    indirect=["folder"],
)
def test_other_contradictions_are_told(folder, keys, message):
    expected = load(folder).params
    configure(folder, **keys)
    with pytest.warns(UserWarning, match=message):
        assert same(load(folder).params, expected)


def test_no_warning_without_a_contradiction(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)
        assert open_checkpoint(folder).scheme is not None


def test_one_configuration_file_of_another_tool(folder):
    values = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder / "config.json", quantization_config=...)
    refused(folder, "tensors are missing: 'model.layers.0.self_attn.q_proj.weight'")
    (folder / "quantize_config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "quant_method"}))
    assert same(load(folder).params, packed("symmetric")[0].params)


# Saving: the explicit list of what a format cannot hold.


def with_up(model, layers):
    params = jax.tree.map(lambda a: a, model.params)
    params["blocks"]["mlp"]["up"]["weight"] = stack(layers) if isinstance(layers, list) else layers
    return dataclasses.replace(model, params=params)


def up_layers():
    raw = packed("asymmetric")[1]
    return [raw[f"model.layers.{layer}.mlp.up_proj"] for layer in range(2)]


def listed(model, path, format: FileFormat):
    with pytest.raises(Unsupported, match=f"save: '{format}' cannot hold .* of this model's properties") as caught:
        save(model, path, format=format)
    assert not list(path.parent.iterdir())
    return [reason for _, reason in caught.value.rejected]


def test_awq_has_no_order(tmp_path):
    assert listed(packed("ordered")[0], tmp_path / "x", "awq") == [
        f"{name}.weight: rows in activation order (g_idx)" for name in names_in_order(packed("ordered")[1])
    ]


def names_in_order(raw):
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return sorted(raw, key=lambda name: (name.split(".")[2], [name.endswith(part) for part in parts].index(True)))


def test_version_1_has_no_zero_point_of_0(tmp_path):
    (c, s, z, g), second = up_layers()
    z = z.copy()
    z[1, 5], z[0, 9] = 0, 0
    model = with_up(packed("asymmetric")[0], [(c, s, z, g), second])
    assert listed(model, tmp_path / "x", "gptq") == [
        "model.layers.0.mlp.up_proj.weight: a zero point of 0, which version 1 has no word for, in 2 of 192 groups, "
        "first group 0 of column 9"
    ]
    save(model, tmp_path / "v2", format="gptq_v2")
    assert same(load(tmp_path / "v2").params, model.params)
    with pytest.raises(Unsupported, match="in 2 of 192 groups"):
        convert(tmp_path / "v2", tmp_path / "v1", "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


def test_awq_has_no_scales_beyond_float16(tmp_path):
    layers = [(c, s.astype(jnp.bfloat16), z, g) for c, s, z, g in up_layers()]
    layers[1][1][0, 3] = 1e-9
    model = with_up(packed("asymmetric")[0], layers)
    assert listed(model, tmp_path / "x", "awq") == [
        f"{UP}.weight: a bfloat16 scale that float16 does not hold in 1 of 192 groups, first group 0 of column 3"
    ]


def test_a_checkpoint_has_one_group_size(tmp_path):
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 16, (64, 96), np.uint8), np.ones((1, 96), np.float16)
    model = with_up(packed("symmetric")[0], stack([(codes, scales, None, None)] * 2, group=64))
    reasons = listed(model, tmp_path / "x", "gptq")
    assert reasons == ["groups of 32 rows and whole columns, of which a checkpoint has one"]


def test_formats_are_for_models(tmp_path):
    wrong: Any = [
        (dense(), "gptq", "the model has no 4-bit weights"),
        (packed("symmetric")[0], "fp8", "the model is in 4 bits already"),
    ]
    for model, name, message in wrong:
        with pytest.raises(ValueError, match=message):
            save(model, tmp_path / "x", format=name)
    for name in ("gtpq", "awq_gemv"):  # past the annotation, which tests check as well
        with pytest.raises(ValueError, match=f"unknown format='{name}'. Did you mean '"):
            written_as(CONFIG, dense().params, name)
    save(dense(), tmp_path / "dense")
    with pytest.raises(ValueError, match="the source has no 4-bit weights"):
        convert(tmp_path / "dense", tmp_path / "x", "awq")
    save(packed("symmetric")[0], tmp_path / "packed")
    with pytest.raises(ValueError, match="the source is in 4 bits already"):
        convert(tmp_path / "packed", tmp_path / "x", "fp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "packed"]


def test_a_ragged_last_group_where_a_format_has_one(tmp_path):
    config = dataclasses.replace(CONFIG, d_ff=80)  # 80 rows: groups of 32, 32 and 16
    rng = np.random.default_rng(4)
    params = jax.tree.map(lambda a: a, dense(config).params)
    layers = [(rng.integers(0, 16, (80, 64), np.uint8), np.full((3, 64), 0.25, np.float16), None, None)] * 2
    params["blocks"]["mlp"]["down"]["weight"] = stack(layers)
    model = dataclasses.replace(dense(config), params=params)
    assert isinstance(params["blocks"]["mlp"]["down"]["weight"], Int4Tensor)
    names: tuple[FileFormat, ...] = ("awq", "compressed-tensors")
    for name in names:
        assert set(listed(model, tmp_path / "x", name)) == {
            f"model.layers.{layer}.mlp.down_proj.weight: K=80 is no multiple of group=32" for layer in range(2)
        }
    save(model, tmp_path / "x", format="gptq")
    assert same(load(tmp_path / "x").params, params)
