"""Training on rows that a mesh cuts: the step of one device, in less memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxflash.config import override
from jaxflash.model import abstract, init_params
from jaxflash.step import compile_program, gradients
from jaxflash.train import train
from sharding import rules
from sharding.mesh import make_mesh
from sharding.ring import zigzag
from tests.jaxflash.test_train import ragged_rows


@pytest.fixture
def one_layer(small):
    """Chunks of the loss shorter than a row, grouped heads, and a window that reaches across chunks."""
    model = {"n_layers": 1, "n_kv_heads": 4, "sliding_window": 20}
    return override(small, {f"model.{name}": value for name, value in model.items()} | {"loss_chunk": 24})


def test_gradients_are_those_of_one_device(one_layer):
    config = one_layer
    graph, _, axes = abstract(config.model)
    params = init_params(config.model, 0)
    rows = ragged_rows(config, 2)
    want = jax.jit(lambda p, rows: gradients(graph, p, rows, config.loss_chunk))(params, rows)
    mesh = make_mesh({"context": 2, "fsdp": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        params = jax.device_put(params, rules.shardings(axes, mesh))
        layout = jax.NamedSharding(mesh, jax.P(None, *rules.spec(("batch", "sequence"))))
        rows = {name: jax.device_put(zigzag(np.asarray(x), 2, axis=-1), layout) for name, x in rows.items()}
        program = jax.jit(lambda p, rows: gradients(graph, p, rows, config.loss_chunk, 2)).lower(params, rows).compile()
        have = program(params, rows)
    assert have[2] == want[2] and "collective-permute" in str(program.as_text())
    np.testing.assert_allclose(have[1], want[1], rtol=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(want[0]), jax.tree.leaves(have[0]), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max() > 0, jax.tree_util.keystr(path)


def test_default_positions_follow_the_order(one_layer):
    """Rotary angles and the mask, through logits: a row in zigzag order gives its logits in zigzag order."""
    graph, _, _ = abstract(one_layer.model)
    model = nnx.merge(graph, init_params(one_layer.model, 0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 32), dtype=np.int32))
    want = np.asarray(model(tokens))
    have = np.asarray(model(zigzag(tokens, 4), zigzag=4))
    np.testing.assert_allclose(have, zigzag(want, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_only_a_shard_of_a_row_is_ever_alive(one_layer):
    """Activations take an n-th of the memory: temporaries of a step, beside those of one device."""

    def temporaries(mesh):
        config = override(one_layer, {"mesh": mesh, "seq_len": 256, "batch_size": 2})
        step: Any = compile_program(config, make_mesh(mesh)).step
        return step.memory_analysis().temp_size_in_bytes

    assert temporaries({"context": 4}) <= 0.5 * temporaries({"data": 1})


def test_a_row_that_cannot_be_cut_is_refused(small):
    config = override(small, {"mesh": {"context": 4}, "seq_len": 44})
    with pytest.raises(ValueError, match="seq_len=44 is not divisible by 8, two chunks for each of the 4.*works is 48"):
        train(config, quiet=True)
