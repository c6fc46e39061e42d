"""A model with 4-bit blocks is the model of the dequantised weights: logits, gradients, generation, on a mesh too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxflash.config import Sampling
from jaxflash.generate import generate
from jaxflash.language_model import LanguageModel
from jaxflash.model import abstract
from jaxflash.quantize import quantize
from jaxflash.tokenizer import ByteTokenizer
from quant import split
from quant.recipe import Recipe
from quant.tensor import Int4Tensor
from sharding import rules
from sharding.mesh import make_mesh
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import SHAPES, random_params
from tests.tolerance import assert_close

RECIPE = Recipe(group=32)
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 12))


def is_packed(leaf):
    return isinstance(leaf, Int4Tensor)


def dequantized(params):
    """The params with dense weights again, a layer at a time."""
    dense = jax.jit(jax.vmap(Int4Tensor.dequantize))
    return jax.tree.map(lambda leaf: dense(leaf) if is_packed(leaf) else leaf, params, is_leaf=is_packed)


def model_of(name):
    config = dataclasses.replace(SHAPES[name], vocab_size=ByteTokenizer().vocab_size)
    return LanguageModel(config, random_params(config), ByteTokenizer())


@functools.cache
def packed_of(name):
    return quantize(model_of(name), RECIPE)


def logits_by_oracle(params, config):
    """(truth, the same in float32)."""
    return (
        np.stack([oracle.logits(params, config, row.tolist(), dtype=dtype) for row in TOKENS])
        for dtype in (np.float64, np.float32)
    )


def test_block_weights_are_packed_and_nothing_else():
    model, packed = model_of("qwen2"), packed_of("qwen2")
    for key in model.params.keys() - {"blocks"}:
        jax.tree.map(np.testing.assert_array_equal, packed.params[key], model.params[key])
    leaves = dict(jax.tree_util.tree_leaves_with_path(packed.params["blocks"], is_leaf=is_packed))
    dense = dict(jax.tree_util.tree_leaves_with_path(model.params["blocks"]))
    assert leaves.keys() == dense.keys() and packed.config == model.config
    for path, leaf in leaves.items():
        assert is_packed(leaf) == (path[-1].key == "weight")
        if is_packed(leaf):
            assert leaf.shape == dense[path].shape[1:] and leaf.words.shape[0] == model.config.n_layers
            jax.eval_shape(lambda leaf=leaf: jax.vmap(Int4Tensor.validate)(leaf))
        else:
            np.testing.assert_array_equal(leaf, dense[path])


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_logits_are_those_of_the_dequantised_model(name):
    packed = packed_of(name)
    truth, plain = logits_by_oracle(dequantized(packed.params), packed.config)
    assert_close(jax.jit(packed.module.__call__)(TOKENS), truth, plain)


def test_it_generates_what_the_dequantised_model_generates():
    packed = packed_of("qwen2")
    dense = dataclasses.replace(packed, params=dequantized(packed.params))
    texts = [generate(model, ["To be", "or"], Sampling(max_new_tokens=4)) for model in (packed, dense)]
    assert texts[0] == texts[1] and all(texts[0])


@pytest.mark.slow
def test_gradients_flow_through_the_packed_blocks_to_the_table():
    """Along random directions, against central differences of the float64 oracle."""
    packed = packed_of("qwen2")
    dense = dequantized(packed.params)
    graph, row = abstract(packed.config)[0], TOKENS[0, :4]

    @jax.jit
    def gradient(table, params):
        def loss(table):
            return jnp.square(nnx.merge(graph, {**params, "table": table})(jnp.asarray(row[None]))).sum()

        return jax.grad(loss)(table)

    def oracle_loss(table):
        params = {**dense, "table": table}
        return (oracle.logits(params, packed.config, row.tolist()) ** 2).sum()

    table = np.asarray(packed.params["table"], float)
    directions = np.random.default_rng(1).standard_normal((3, *table.shape))
    h = 1e-5
    truth = np.array([(oracle_loss(table + h * d) - oracle_loss(table - h * d)) / (2 * h) for d in directions])
    along = [
        np.einsum("dij,ij->d", directions, np.asarray(gradient(packed.params["table"], params), float))
        for params in (packed.params, dense)
    ]
    assert_close(along[0].astype(np.float32), truth, along[1])


@pytest.mark.slow
def test_over_a_mesh_it_is_the_same_model():
    """Blocks over fsdp and tensor; weights of 64 tiles so that every split is between tiles and groups."""
    config = dataclasses.replace(
        SHAPES["llama2"], d_model=128, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=256, vocab_size=40
    )
    packed = quantize(LanguageModel(config, random_params(config), ByteTokenizer()), RECIPE)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])
    axes = abstract(config)[2]
    split.check(packed.params, axes, mesh, units={"heads": 4, "kv_heads": 4})
    spread = jax.device_put(packed.params, rules.shardings(split.axes_of_arrays(packed.params, axes), mesh))
    graph = abstract(config)[0]
    f = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    with jax.set_mesh(mesh):
        together = f(spread, TOKENS)
    truth, plain = logits_by_oracle(dequantized(packed.params), config)
    assert_close(together, truth, plain)
    words = spread["blocks"]["mlp"]["down"]["weight"].words
    assert words.addressable_shards[0].data.size * 4 == words.size


def test_a_default_recipe():
    model = model_of("qwen2")
    params = jax.eval_shape(lambda params: quantize(dataclasses.replace(model, params=params)).params, model.params)
    gate = params["blocks"]["mlp"]["gate"]["weight"]
    assert gate.zeros is None and gate.scales.dtype == jnp.bfloat16 and gate.scales.shape[-2] == 1


def test_what_cannot_be_quantised_is_named():
    model = model_of("qwen2")
    with pytest.raises(ValueError, match="^quantize: blocks/attention/k/weight is quantised already"):
        quantize(packed_of("qwen2"), RECIPE)
    down = model.params["blocks"]["mlp"]["down"]["weight"]
    blocks = {
        **model.params["blocks"],
        "mlp": {**model.params["blocks"]["mlp"], "down": {"weight": down.at[0, 1, 1].set(jnp.nan)}},
    }
    with pytest.raises(ValueError, match="^quantize: blocks/mlp/down/weight: round_to_nearest: .* NaN"):
        quantize(dataclasses.replace(model, params={**model.params, "blocks": blocks}), RECIPE)
