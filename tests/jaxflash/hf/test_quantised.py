"""Models of 4-bit weights in every format: read by another reader, the same bits and logits back, on a mesh too."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxflash.hf.convert import convert
from jaxflash.hf.inspect import inspect
from jaxflash.hf.save import FileFormat
from jaxflash.language_model import load, save
from jaxflash.model import abstract
from jaxflash.quantize import quantize
from quant.recipe import Recipe
from quant.tensor import Int4Tensor
from sharding.mesh import make_mesh
from tests.jaxflash.hf.quantised import (
    CONFIG,
    WIDE,
    by_statement,
    dense,
    dense_weight,
    linear_tensors,
    packed,
    same,
)
from tests.jaxflash.hf.test_golden import PROMISED
from tests.jaxflash.hf.tiny import edit
from tests.quant.formats import statement

WRITTEN: tuple[FileFormat, ...] = ("gptq", "gptq_v2", "awq", "compressed-tensors")
KINDS: dict[str, tuple[FileFormat, ...]] = {
    "symmetric": WRITTEN,
    "asymmetric": WRITTEN,
    "ordered": tuple(name for name in WRITTEN if name != "awq"),  # which has no word for it
}
CASES = [(kind, name) for kind, names in KINDS.items() for name in names]
# A few of each kind with every run, and the others with the long tests.
FAST = {("ordered", "gptq"), ("ordered", "gptq_v2"), ("ordered", "compressed-tensors"), ("asymmetric", "awq")}
slow = pytest.mark.slow
SOME = [case if case in FAST else pytest.param(*case, marks=slow) for case in CASES]
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 9))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a kind of model in a format that holds it."""
    root = tmp_path_factory.mktemp("quantised")

    @functools.cache
    def of(kind: str, name: FileFormat):
        save(packed(kind)[0], root / kind / name, format=name)
        return root / kind / name

    return of


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@functools.cache
def compiled():
    graph = abstract(CONFIG)[0]
    return jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(TOKENS)))


def logits(params):
    return np.asarray(compiled()(params))


@pytest.mark.parametrize("kind, name", SOME)
def test_there_and_back(folder_of, tmp_path, kind, name):
    """Codes, scales, zeros and order are the model's own, bit by bit, and so is every file written from them."""
    model, _ = packed(kind)
    again = load(folder_of(kind, name))
    assert same(again.params, model.params)
    save(again, tmp_path / "x", format=name)
    assert contents(tmp_path / "x") == contents(folder_of(kind, name))


@pytest.mark.parametrize("kind, name", SOME)
def test_another_reader_finds_the_same_weights(folder_of, kind, name):
    for linear, raw in packed(kind)[1].items():
        if ".0." in linear and "mlp" in linear:
            got = by_statement(name, linear_tensors(folder_of(kind, name), linear))
            assert np.array_equal(got, dense_weight(*raw)), linear


@pytest.mark.parametrize("kind", ["ordered", *(pytest.param(k, marks=slow) for k in ("symmetric", "asymmetric"))])
def test_logits_are_the_same_bits(folder_of, tmp_path, kind):
    """Of the model in memory, of each file that holds it, and of a run's folder; and not those of other weights."""
    expected = logits(packed(kind)[0].params)
    assert np.isfinite(expected).all() and expected.std() > 1e-3
    convert(folder_of(kind, "gptq"), tmp_path / "run", "orbax")
    for folder in (*(folder_of(kind, name) for name in KINDS[kind]), tmp_path / "run"):
        assert np.array_equal(logits(load(folder, param_dtype="float32").params), expected), folder
    other = packed(kind)[0].params | {"table": packed(kind)[0].params["table"] * 1.5}
    assert not np.array_equal(logits(other), expected)


PAIRS = [(kind, a, b) for kind in KINDS for a in KINDS[kind] for b in KINDS[kind] if a != b]


@pytest.mark.parametrize(
    "kind, source, target", [p if {p[:2], (p[0], p[2])} <= FAST else pytest.param(*p, marks=slow) for p in PAIRS]
)
def test_any_format_becomes_any_other(folder_of, tmp_path, kind, source, target):
    convert(folder_of(kind, source), tmp_path / "x", target)
    assert contents(tmp_path / "x") == contents(folder_of(kind, target))


def test_what_they_stand_for(folder_of, tmp_path):
    """A dense folder of the numbers, float32, in which a code times a 16-bit scale is exact, or their rounding."""
    convert(folder_of("ordered", "gptq"), tmp_path / "dense", "dense")
    held = load_file(tmp_path / "dense" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    for linear, raw in packed("ordered")[1].items():
        assert held[f"{linear}.weight"].dtype == np.float32
        assert np.array_equal(held[f"{linear}.weight"].T, dense_weight(*raw))
    params, again = packed("ordered")[0].params, load(tmp_path / "dense").params
    assert same(again["blocks"]["mlp"]["up"]["weight"], jax.vmap(Int4Tensor.dequantize)(packed_up("ordered")))
    # The packed product adds up in the order of its words: rounding of float32 sums is all that differs.
    expected = logits(params)
    assert 0 < np.abs(logits(again) - expected).max() <= PROMISED * np.abs(expected).max()


@slow
def test_what_they_stand_for_in_half_precision(folder_of, tmp_path):
    convert(folder_of("ordered", "gptq"), tmp_path / "dense", "dense")
    convert(folder_of("ordered", "gptq"), tmp_path / "half", "dense", dtype="bfloat16")
    half = load(tmp_path / "half")
    assert half.config.param_dtype == "bfloat16"
    assert same(half.params, jax.tree.map(lambda a: a.astype("bfloat16"), load(tmp_path / "dense").params))


def test_the_default_format_holds_the_model(tmp_path):
    save(packed("ordered")[0], tmp_path / "x")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.parametrize("name", ["gptq", *(pytest.param(name, marks=slow) for name in WRITTEN[1:])])
def test_on_a_mesh_and_from_it(tmp_path, name):
    """Each device has its part, cut between tiles and groups; the file written from there is the same."""
    model, _ = packed("asymmetric", WIDE)
    save(model, tmp_path / "one", format=name, max_shard_bytes=60_000)
    spread = load(tmp_path / "one", mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert same(spread.params, model.params)
    for leaf in (spread.params["blocks"]["mlp"][key]["weight"] for key in ("up", "down")):
        assert leaf.words.addressable_shards[0].data.size * 4 == leaf.words.size
        assert leaf.scales.addressable_shards[0].data.size * 4 == leaf.scales.size
    save(spread, tmp_path / "eight", format=name, max_shard_bytes=60_000)
    assert contents(tmp_path / "eight") == contents(tmp_path / "one") and len(contents(tmp_path / "one")) > 5


def test_a_mesh_that_cuts_a_group_or_an_order(folder_of, tmp_path):
    mesh = make_mesh({"tensor": 2, "data": 4})
    with pytest.raises(ValueError, match="a boundary would cut a tile|columns in tiles of 64 over 2 devices"):
        load(folder_of("symmetric", "gptq"), mesh=mesh)
    save(packed("ordered", WIDE)[0], tmp_path / "x", format="gptq_v2")
    with pytest.raises(ValueError, match="in activation order"):
        load(tmp_path / "x", mesh=mesh)
    data = load(tmp_path / "x", mesh=make_mesh({"data": 8}))
    assert same(data.params, packed("ordered", WIDE)[0].params)


@pytest.mark.parametrize("name", ["gptq", *(pytest.param(name, marks=slow) for name in WRITTEN[1:])])
def test_linears_that_stay_dense(tmp_path, name):
    """The configuration names them in its format's own way, and they are read as dense again."""
    model, raw = packed("asymmetric", skip=("down_proj", "v_proj"))
    save(model, tmp_path / "x", format=name)
    again = load(tmp_path / "x")
    assert same(again.params, model.params) and len(raw) == 2 * 5
    assert not isinstance(again.params["blocks"]["mlp"]["down"]["weight"], Int4Tensor)
    written = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert "down_proj" in json.dumps(written) and "up_proj" not in json.dumps(written)


@slow
def test_a_head_of_its_own_and_biases(tmp_path):
    config = dataclasses.replace(CONFIG, qkv_bias=True, tie_embeddings=False)
    model, _ = packed("symmetric", config)
    params = jax.tree.map(lambda a: a, model.params)
    for key in "qkv":
        bias = params["blocks"]["attention"][key]["bias"]
        params["blocks"]["attention"][key]["bias"] = bias + np.arange(bias.size, dtype=np.float32).reshape(bias.shape)
    model = dataclasses.replace(model, params=params)
    save(model, tmp_path / "x", format="gptq")
    assert same(load(tmp_path / "x").params, params)


@slow
def test_layers_that_differ_share_a_stack(tmp_path):
    """Zero points in one layer only, rows in order in the other: all are kept as they are."""
    (model, _), (other, _) = packed("symmetric"), packed("ordered")
    params = jax.tree.map(lambda a: a, model.params)
    first, second = (m.params["blocks"]["mlp"]["up"]["weight"] for m in (model, other))
    layer = [jax.tree.map(lambda a, i=i: a[i], t) for i, t in ((0, first), (1, second))]
    codes, scales, _ = layer[0].codes()
    plain = Int4Tensor.from_codes(codes, scales, np.full(scales.shape, 8, np.uint8), group=32)
    plain = dataclasses.replace(plain, permutation=np.arange(64, dtype=np.int32))
    params["blocks"]["mlp"]["up"]["weight"] = jax.tree.map(lambda *a: np.stack(a), plain, layer[1])
    params = jax.device_put(params)
    for name in ("gptq_v2", "compressed-tensors"):
        save(dataclasses.replace(model, params=params), tmp_path / name, format=name)
        again = load(tmp_path / name)
        assert same(again.params, params)
        assert again.params["blocks"]["mlp"]["gate"]["weight"].zeros is None


def test_gemv_is_read(folder_of, tmp_path):
    """Written here from the statement of the format; zero points are the true ones."""
    model, raw = packed("asymmetric")
    source = folder_of("asymmetric", "awq")
    convert(source, tmp_path / "x", "awq")
    held = load_file(tmp_path / "x" / "model.safetensors")
    tensors = {name: a for name, a in held.items() if name.rsplit(".", 1)[0] not in raw}
    for linear, (codes, scales, zeros, _) in raw.items():
        made = statement.gemv_tensors(codes, scales, zeros, 32)
        tensors |= {f"{linear}.{suffix}": a for suffix, a in made.items()}
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    values = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    edit(tmp_path / "x" / "config.json", quantization_config=values | {"version": "GEMV"})
    assert same(load(tmp_path / "x").params, model.params)


@slow
def test_bfloat16_scales(tmp_path):
    """Kept by GPTQ and compressed-tensors; AWQ has them in float16, with the same values."""
    model, _ = packed("symmetric", dtype="bfloat16")
    for name in WRITTEN:
        save(model, tmp_path / name, format=name)
        again = load(tmp_path / name).params["blocks"]["mlp"]["down"]["weight"]
        weight = model.params["blocks"]["mlp"]["down"]["weight"]
        assert again.scales.dtype == ("float16" if name == "awq" else "bfloat16")
        assert np.array_equal(again.words, weight.words) and again.group == weight.group
        assert np.array_equal(again.scales.astype(np.float32), weight.scales.astype(np.float32))


@slow
@pytest.mark.parametrize("recipe", [Recipe(group=None), Recipe(group=32, symmetric=False)], ids=str)
def test_what_round_to_nearest_gives_comes_back(tmp_path, recipe):
    """Whole columns, and the zero points of data."""
    model = quantize(dense(), recipe)
    for name in ("gptq_v2", "compressed-tensors"):
        save(model, tmp_path / name, format=name)
        assert same(load(tmp_path / name).params, model.params)


@slow
def test_float32_scales_of_compressed_tensors(folder_of, tmp_path):
    """Kept in the 16 bits that hold all of them; refused where neither does."""
    convert(folder_of("symmetric", "compressed-tensors"), tmp_path / "x", "compressed-tensors")
    file = tmp_path / "x" / "model.safetensors"
    wide = {k: a.astype(np.float32) if k.endswith("scale") else a for k, a in load_file(file).items()}
    save_file(wide, file)
    again = load(tmp_path / "x").params["blocks"]["mlp"]["up"]["weight"]
    assert again.scales.dtype == "bfloat16" and np.array_equal(again.words, packed_up("symmetric").words)
    save_file(wide | {"model.layers.1.mlp.up_proj.weight_scale": np.full((96, 2), 0.1, np.float32)}, file)
    with pytest.raises(NotImplementedError, match="float32 scales of 'blocks/mlp/up/weight'"):
        load(tmp_path / "x")


def packed_up(kind):
    return packed(kind)[0].params["blocks"]["mlp"]["up"]["weight"]


def test_inspect_says_what_would_run(folder_of):
    found = inspect(folder_of("asymmetric", "awq"))
    kinds = {kind.name: kind for kind in found.kinds}
    up = kinds["layers.*.mlp.up_proj.weight"]
    assert up.precisions == ("INT4 awq, groups of 32",) and up.shape == (96, 64) and up.count == 2
    assert up.nbytes == 2 * (64 * 96 // 2 + 2 * 96 // 2 + 2 * 96 * 2)
    assert [product.name for product in found.products][-1] == "mlp.down_proj" and len(found.products) == 7
    assert found.products[-1].token.chosen == "xla"
    text = str(found)
    assert "products with 4-bit weights would run" in text and "K=96 N=64" in text and "needs a Hopper GPU" in text
    assert "and 4 bits" in text
