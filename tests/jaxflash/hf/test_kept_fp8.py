"""FP8 folders whose weights stay FP8: byte by byte into a model, over a mesh, and out again."""

import dataclasses
import json
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash.config import preset
from jaxflash.finetune import add_adapters, merge
from jaxflash.hf.convert import convert
from jaxflash.hf.kept_fp8 import StoredFp8, put_stack
from jaxflash.hf.names import Place
from jaxflash.hf.tensors import StoredTensor
from jaxflash.language_model import load, save
from jaxflash.model import abstract
from jaxflash.quantize import quantize
from pallas_kernels.dispatch import Unsupported
from quant import split
from quant.fp8 import Fp8Tensor, quantize_fp8
from quant.lora import LoraConfig
from quant.recipe import Fp8Recipe
from sharding.mesh import make_mesh
from tests.jaxflash.hf.quantised import dense, same
from tests.jaxflash.hf.test_fp8_folder import tensors_of, write

# Blocks of 128 x 128 that do not come out even, and, for a mesh, ones that do.
CONFIG = preset("tiny", n_layers=2, d_model=128, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=192)
EVEN = dataclasses.replace(CONFIG, d_model=256, head_dim=64, d_ff=256)
KINDS = [("tensor", np.float32), ("channel", ml_dtypes.bfloat16), ("block", np.float32)]


@pytest.mark.parametrize("layout, dtype", KINDS)
def test_bytes_in_are_bytes_out(tmp_path, layout, dtype):
    """Loaded, and converted to what they are: the tensors of the source, then the same file; or their numbers."""
    path, expected = write(tmp_path / "x", layout, dtype, config=CONFIG, block=(128, 128), rest="bfloat16")
    told = []
    model = load(path, keep_fp8=True, on_tensor=lambda name, size: told.append(name))
    up = model.params["blocks"]["mlp"]["up"]["weight"]
    assert isinstance(up, Fp8Tensor) and up.scaling == {"channel": "row"}.get(layout, layout)
    for layer in range(2):
        jax.tree.map(lambda a, layer=layer: a[layer], up).validate()
    to = "fp8" if layout == "block" else "compressed-tensors"
    convert(path, tmp_path / "y", to)
    before, after = tensors_of(path), tensors_of(tmp_path / "y")
    before = {name: array for name, array in before.items() if not name.endswith("input_scale")}
    assert before.keys() == after.keys() == {*told}
    for name, array in before.items():
        assert (array.dtype, array.shape) == (after[name].dtype, after[name].shape), name
        assert array.tobytes() == after[name].tobytes(), name
    assert same(model.params, load(tmp_path / "y", keep_fp8=True).params)
    convert(tmp_path / "y", tmp_path / "z", to)
    for file in (tmp_path / "y").iterdir():
        assert file.read_bytes() == (tmp_path / "z" / file.name).read_bytes(), file
    convert(path, tmp_path / "dense", "dense")
    numbers = tensors_of(tmp_path / "dense")
    assert before.keys() - numbers.keys() == {name for name in before if "weight_scale" in name}
    for name, array in numbers.items():
        weight = expected[name] if name in expected else before[name]
        assert array.dtype == np.float32 and np.array_equal(array, weight.astype(np.float32)), name
    if layout == "block":
        _by_the_other_name(path, tmp_path, model)


def _by_the_other_name(path, tmp_path, model):
    """DeepSeek's blocks as compressed-tensors', and back; and as numbers, from memory."""
    convert(path, tmp_path / "other", "compressed-tensors")
    config = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert config["format"] == "float-quantized" and weights["block_structure"] == [128, 128]
    assert "model.layers.0.mlp.up_proj.weight_scale" in tensors_of(tmp_path / "other")
    convert(tmp_path / "other", tmp_path / "back", "fp8")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "y/model.safetensors").read_bytes()
    save(model, tmp_path / "numbers", format="dense", dtype="float32")
    assert (tmp_path / "numbers/model.safetensors").read_bytes() == (tmp_path / "dense/model.safetensors").read_bytes()


def test_the_host_holds_little_more_than_one_weight(tmp_path):
    """One layer at a time is read; jax lets go of the one before in its own time."""
    alive, most = Counter(), Counter()
    arrays = [np.full((64, 32), layer, ml_dtypes.float8_e4m3fn) for layer in range(8)]

    def stored(array):
        def read(index):
            values = array[index].copy()
            alive["bytes"] += values.nbytes
            weakref.finalize(values, alive.subtract, {"bytes": values.nbytes})
            most["bytes"] = max(most["bytes"], alive["bytes"])
            return values

        return StoredTensor(
            name="x", shape=array.shape, dtype=array.dtype, stored_as="", nbytes=0, file=tmp_path, read=read
        )

    scales = dataclasses.replace(stored(np.ones(1, np.float32)), read=lambda index: np.ones(1, np.float32))
    layers = [
        StoredFp8(place=Place(("weight",), layer, (64, 32)), weight=stored(array), scales=scales, scaling="tensor")
        for layer, array in enumerate(arrays)
    ]
    everywhere = NamedSharding(make_mesh({"data": 1}, devices=jax.devices()[:1]), P(None, None, None))
    stack = put_stack(layers, Fp8Tensor(codes=everywhere, scales=everywhere, shape=(32, 64), scaling="tensor"))
    assert np.array_equal(np.asarray(stack.codes), np.stack(arrays))
    assert most["bytes"] <= 2 * arrays[0].nbytes


def test_a_mesh_reads_its_rectangles_and_cuts_between_blocks(tmp_path):
    path, _ = write(tmp_path / "x", "block", np.float32, config=EVEN, block=(128, 128))
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])
    model = load(path, mesh=mesh, keep_fp8=True)
    up = model.params["blocks"]["mlp"]["up"]["weight"]
    assert up.codes.addressable_shards[0].data.shape == (2, 128, 128)
    assert up.scales.addressable_shards[0].data.shape == (2, 1, 1)
    assert same(model.params, load(path, keep_fp8=True).params)
    other, _ = write(tmp_path / "y", "block", np.float32, config=CONFIG, block=(128, 128))
    with pytest.raises(ValueError, match=r"mlp/up/weight: N=192 in blocks of 128 over 2 devices.*would cut a block"):
        load(other, mesh=mesh, keep_fp8=True)


def test_a_row_s_scale_goes_with_its_row():
    shapes, axes = abstract(CONFIG)[1:]
    stack = jax.eval_shape(lambda: quantize_fp8(jnp.zeros((2, 128, 192)), "row"))
    shapes["blocks"]["mlp"]["up"]["weight"] = stack
    names = split.axes_of_arrays(shapes, axes)["blocks"]["mlp"]["up"]["weight"]
    assert names.codes == ("layer", "mlp", "embed") and names.scales == ("layer", "mlp", None)
    split.check(shapes, axes, make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4]))


def test_refused(tmp_path):
    small, _ = write(tmp_path / "x", "block", np.float32)
    for refused in (lambda: load(small, keep_fp8=True), lambda: convert(small, tmp_path / "z", "fp8")):
        with pytest.raises(Unsupported, match=r"blocks of \(32, 32\).*convert --to dense"):
            refused()
    rows, _ = write(tmp_path / "y", "channel", np.float32, config=CONFIG)
    model = load(rows, keep_fp8=True)
    with pytest.raises(Unsupported, match="scales by row.*compressed-tensors"):
        save(model, tmp_path / "z", format="fp8")
    with pytest.raises(Unsupported, match="scales by row.*compressed-tensors"):
        convert(rows, tmp_path / "z", "fp8", on_read=lambda *_: pytest.fail("read before it was refused"))
    with pytest.raises(ValueError, match="no 4-bit weights"):
        convert(rows, tmp_path / "z", "awq")
    with pytest.raises(ValueError, match="no 4-bit weights"):
        save(model, tmp_path / "z", format="gptq")
    with pytest.raises(ValueError, match="quantised already"):
        quantize(model, quiet=True)


def test_a_model_is_quantised_to_fp8_and_computes(tmp_path):
    """The logits of W8A8 are near those of the dense model, and those of the folder are the model's.

    Fresh adapters change no bit of them; merged, the weights are the numbers that the codes stand for.
    """
    model = dense(CONFIG)
    packed = quantize(model, Fp8Recipe(scaling="block"))
    save(packed, tmp_path / "x")
    back = load(tmp_path / "x", keep_fp8=True)
    assert same(packed.params["blocks"], back.params["blocks"])
    tokens = jnp.arange(24).reshape(2, 12)

    @jax.jit
    def logits(params):
        return jax.lax.stop_gradient(nnx.merge(abstract(CONFIG)[0], params)(tokens))

    exact, rounded = (np.asarray(logits(m.params)) for m in (model, packed))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()
    adapted = add_adapters(back, LoraConfig(rank=2, targets="mlp/.*"))
    np.testing.assert_array_equal(logits(adapted.params), rounded)
    down = packed.params["blocks"]["mlp"]["down"]["weight"]
    merged = merge(adapted).params["blocks"]["mlp"]["down"]["weight"]
    np.testing.assert_array_equal(merged, jax.vmap(Fp8Tensor.dequantize)(down))
    assert np.array_equal(np.asarray(logits(back.params)), rounded)
    some = {"table": packed.params["table"], "up": packed.params["blocks"]["mlp"]["up"]}
    half = dataclasses.replace(packed, params=some).astype("bfloat16").params
    assert half["table"].dtype == "bfloat16" and same(half["up"], some["up"])
    with pytest.raises(ValueError, match="method='gptq'.*nearest"):
        quantize(model, Fp8Recipe(), method="gptq")
    with pytest.raises(ValueError, match="scaling='column'"):
        Fp8Recipe(scaling="column")
