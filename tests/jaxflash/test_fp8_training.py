"""`linear_precision="fp8"`: what is rounded, that training tracks 16 bits, and that a mesh changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxflash.config import TrainConfig, override
from jaxflash.layers import Linear
from jaxflash.model import abstract, init_params
from jaxflash.train import train
from pallas_kernels.fp8 import api
from quant import matmul


def with_precision(config: TrainConfig, precision: str, **mesh: int) -> TrainConfig:
    changes = {"model.linear_precision": precision, "model.compute_dtype": "bfloat16", "steps": 20, "eval_every": 0}
    return dataclasses.replace(override(config, changes), mesh=mesh)


@pytest.mark.slow
def test_training_tracks_sixteen_bits(small):
    """Same seed and batches: the curves are those of one run, up to the rounding of operands."""
    losses = [
        np.asarray(train(with_precision(small, precision, data=1), quiet=True).curve()[1])
        for precision in ("compute_dtype", "fp8")
    ]
    assert losses[0][-1] < losses[0][0] - 0.5
    assert not np.array_equal(losses[0], losses[1])  # the switch does something
    # The measure, at the end of a run: half a percent of the mean loss.
    means = [loss[-5:].mean() for loss in losses]
    assert abs(means[1] / means[0] - 1) < 0.005, means


@pytest.mark.slow
def test_a_mesh_changes_nothing(small):
    """Scales are of whole tensors, wherever their parts are."""
    one, many = (
        train(with_precision(small, "fp8", **sizes), quiet=True).curve()[1]
        for sizes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2})
    )
    np.testing.assert_allclose(many, one, rtol=2e-3)


def test_the_blocks_linears_are_rounded_and_nothing_else(small):
    """The parameters are those of any precision; the head multiplies as it did."""
    plain, rounded = (with_precision(small, p).model for p in ("compute_dtype", "fp8"))
    shapes = [jax.eval_shape(lambda c=config: init_params(c, 0)) for config in (plain, rounded)]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), *shapes))
    model = nnx.merge(abstract(rounded)[0], shapes[1])
    linears = {type(m).__name__: m.precision for _, m in nnx.iter_graph(model.blocks) if isinstance(m, Linear)}
    assert set(linears.values()) == {"fp8"}


def test_a_linear_multiplies_as_train_matmul_does(monkeypatch):
    linear = Linear(
        32, 16, axes=("embed", "mlp"), std=0.1, use_bias=True, dtype="float32", precision="fp8",
        param_dtype="float32", rngs=nnx.Rngs(0),
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    want = api.train_matmul(x.reshape(10, 32), linear.weight[...]).reshape(2, 5, 16)
    np.testing.assert_array_equal(np.asarray(linear(x)), np.asarray(want))
    asked = []
    monkeypatch.setattr(matmul, "train_matmul", lambda x, w: asked.append(linear.precision) or api.train_matmul(x, w))
    for linear.precision in ("fp8", "compute_dtype"):
        linear(x)
    assert asked == ["fp8"]
    linear.precision = "fp8"
    assert jnp.abs(linear(x) - x @ linear.weight[...]).max() > 0


@pytest.mark.parametrize("remat", ["full", "dots_and_attention"])
def test_one_pass_finds_an_operands_scale_whatever_is_computed_again(small, remat):
    """In the body of a layer's loop: over x and w of seven linears in the forward pass, over dy in the backward."""

    def maxima(precision):
        config = override(with_precision(small, precision).model, {"remat": remat})
        graph, params, _ = abstract(config)
        tokens = jax.ShapeDtypeStruct((2, 8), "int32")
        gradient = jax.grad(lambda p, t: nnx.merge(graph, p).hidden(t).astype("float32").sum())
        return count_maxima(jax.make_jaxpr(gradient)(params, tokens).jaxpr)

    assert maxima("fp8") - maxima("compute_dtype") == 2 * (7 * 2 + 7)  # over columns, then over rows


def count_maxima(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == "reduce_max"
        total += sum(map(count_maxima, jaxprs_in_params(equation.params)))
    return total
