"""FP8 folders of DeepSeek's and compressed-tensors' layouts as dense models, exact; written in blocks."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxflash.hf.convert import convert
from jaxflash.hf.inspect import inspect
from jaxflash.hf.safetensors import open_folder
from jaxflash.hf.save import FileDType
from jaxflash.language_model import load, save
from quant.formats import fp8
from sharding.mesh import make_mesh
from tests.jaxflash.hf.quantised import CONFIG, WIDE, dense, same
from tests.jaxflash.hf.tiny import edit
from tests.quant.formats import statement

UP = "model.layers.1.mlp.up_proj"
BLOCK = (32, 32)


def tensors_of(folder):
    """All tensors by the statement of the file format: the package's reader has FP8 for torch only."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    dtypes = {"F8_E4M3": fp8.DTYPE, "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def write(path, layout, dtype, config=WIDE, block=BLOCK, rest: FileDType = "float32"):
    """(folder of random FP8 weights with scales of `layout`, {linear: its weight as the statement has it})."""
    save(dense(config), path, dtype=rest)
    rng, expected = np.random.default_rng(0), {}
    values = np.arange(256, dtype=np.uint8).view(fp8.DTYPE)
    values = values[np.isfinite(values.astype(np.float32))]
    suffix = "weight_scale_inv" if layout == "block" else "weight_scale"
    tensors = tensors_of(path)
    for name in [name for name in tensors if "_proj" in name]:
        N, K = tensors[name].shape
        shared = {"tensor": (N, K), "channel": (1, K), "block": block}[layout]
        scales = rng.uniform(0.5, 2, fp8.scale_shape((N, K), shared)).astype(dtype)
        tensors[name] = rng.choice(values, (N, K))
        expected[name] = statement.fp8(tensors[name], scales, shared)
        module = name.removesuffix("weight")
        tensors[module + suffix] = scales.reshape(1) if layout == "tensor" else scales
        tensors[module + "input_scale"] = np.ones(1, np.float32)
    save_file(tensors, path / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "strategy": layout, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    edit(
        path / "config.json",
        quantization_config={"quant_method": "fp8", "weight_block_size": list(block)}
        if layout == "block"
        else {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}},
    )
    return path, expected


@pytest.mark.parametrize(
    "layout, dtype", [("tensor", np.float32), ("channel", ml_dtypes.bfloat16), ("block", np.float32)]
)
def test_weights_are_those_of_the_statement(tmp_path, layout, dtype):
    """float32, one rounding of the exact product; on a mesh each device reads its rectangle."""
    path, expected = write(tmp_path / "x", layout, dtype)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model, spread = load(path), load(path, mesh=mesh)
    assert model.config.param_dtype == "float32" and same(model.params, spread.params)
    params = model.params["blocks"]["mlp"]
    for layer in range(2):
        for key in ("up", "down"):
            weight = expected[f"model.layers.{layer}.mlp.{key}_proj.weight"]
            if dtype is not np.float32:
                assert np.array_equal(weight, weight.astype(np.float32))  # exact: the scale has 8 bits
            assert np.array_equal(np.asarray(params[key]["weight"][layer]).T, weight.astype(np.float32))
    kind = next(kind for kind in inspect(path).kinds if "up_proj" in kind.name)
    assert kind.quantised and kind.precisions[0].startswith("F8_E4M3")


def test_a_scale_of_no_dims(tmp_path):
    path, expected = write(tmp_path / "x", "tensor", np.float32)
    tensors = tensors_of(path)
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].reshape(())
    save_file(tensors, path / "model.safetensors")
    got = open_folder(path)[f"{UP}.weight_scale"].read(())
    assert got.shape == () and got == tensors[f"{UP}.weight_scale"]
    up = np.asarray(load(path).params["blocks"]["mlp"]["up"]["weight"][1])
    assert np.array_equal(up.T, expected[f"{UP}.weight"].astype(np.float32))


def test_written_in_blocks_by_the_largest_of_each(tmp_path):
    model = dense(CONFIG)
    save(model, tmp_path / "x", format="fp8")
    held = tensors_of(tmp_path / "x")
    written = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "fp8" and written["weight_block_size"] == [128, 128]
    weight = np.asarray(model.params["blocks"]["mlp"]["up"]["weight"][1]).T
    scale = held[f"{UP}.weight_scale_inv"]
    assert scale.shape == (1, 1) and scale.dtype == np.float32 and scale == np.abs(weight).max() / np.float32(448)
    stored = held[f"{UP}.weight"].astype(np.float32)
    assert held[f"{UP}.weight"].dtype == fp8.DTYPE and np.abs(stored).max() == 448
    up = np.asarray(load(tmp_path / "x").params["blocks"]["mlp"]["up"]["weight"][1]).T
    assert np.array_equal(up, stored * scale)
    convert(tmp_path / "x", tmp_path / "dense", "dense")
    assert np.array_equal(load_file(tmp_path / "dense" / "model.safetensors")[f"{UP}.weight"], up)


def test_what_cannot_be_written(tmp_path):
    params = jax.tree.map(lambda a: a, dense(CONFIG).params)
    params["blocks"]["mlp"]["up"]["weight"] = params["blocks"]["mlp"]["up"]["weight"].at[1, 2, 3].set(np.inf)
    with pytest.raises(ValueError, match=rf"'{UP}\.weight': the weight has NaN or infinite entries"):
        save(dataclasses.replace(dense(CONFIG), params=params), tmp_path / "x", format="fp8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "suffix, value, message",
    [
        ("weight_scale", ..., "has 0 scales"),
        ("weight_scale_inv", np.ones(1, np.float32), "has 2 scales"),
        ("weight_scale", np.ones((2, 3), np.float32), r"shape=\(2, 3\)"),
        ("weight_scale", np.ones((128, 1), np.int32), "dtype='int32'"),
        ("weight_scale", np.full((128, 1), np.nan, np.float32), "128 scales that are NaN or infinite"),
    ],
)
def test_scales_that_are_not_the_weight_s(tmp_path, suffix, value, message):
    path, _ = write(tmp_path / "x", "channel", np.float32)
    tensors = tensors_of(path) | {f"{UP}.{suffix}": value}
    save_file({name: value for name, value in tensors.items() if value is not ...}, path / "model.safetensors")
    told = []
    with pytest.raises(ValueError, match=message):
        load(path, on_tensor=lambda *facts: told.append(facts))
    assert not told
