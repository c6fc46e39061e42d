"""Training over pipeline stages: the gradients and curves of one device, on any number of them, from any checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxflash import step
from jaxflash.config import TrainConfig, override, preset
from jaxflash.model import abstract
from jaxflash.train import train
from pallas_kernels.attention import api
from pallas_kernels.device import H200
from sharding import rules
from sharding.mesh import make_mesh
from tests.jaxflash.rows import ragged_rows

ALL = {"fsdp": 2, "stage": 2, "tensor": 2}
# What issue 7 asks of any mesh in float32, relative to a leaf's largest gradient.
WITHIN = 1e-5


@pytest.fixture
def tiny() -> TrainConfig:
    """A step of two microbatches; one key/value head, whole on every device of a tensor axis."""
    model = preset("tiny", n_layers=4, d_model=16, n_heads=4, n_kv_heads=1, head_dim=4, d_ff=32)
    return TrainConfig(
        model=model, seq_len=32, batch_size=8, accumulate=2, steps=3, warmup_steps=2, learning_rate=3e-3,
        eval_batches=2, seed=3, mesh={"data": 1},
    )  # fmt: skip


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def losses(run):
    return run.curve()[1] + run.curve("validation_loss")[1]


def test_the_trainer_runs_over_stages(tiny, compiled_anew, capfd):
    one = train(tiny, quiet=True)
    piped = train(dataclasses.replace(tiny, mesh=ALL), quiet=True)
    # XLA prints this when a layout forces it to copy an array to every device.
    assert "rematerialization" not in capfd.readouterr().err
    np.testing.assert_allclose(losses(piped), losses(one), rtol=WITHIN)
    assert piped.curve("bubble")[1] == pytest.approx([1 / 3] * 3)
    assert not any("bubble" in record for record in one.records)
    weight = piped.state.params["blocks"]["mlp"]["up"]["weight"]
    assert weight.addressable_shards[0].data.shape == (2, 8, 16)


@pytest.mark.slow
def test_a_run_moves_between_numbers_of_stages_and_schedules(tiny, tmp_path):
    """Six layers: four stages cannot hold them evenly, and interleaved ones hold them in turns."""
    config = override(tiny, {"schedule_steps": 6, "steps": 2, "out": str(tmp_path), "model.n_layers": 6})
    saved = train(dataclasses.replace(config, mesh={"stage": 4}, schedule="gpipe"), quiet=True)
    restored = train(config, quiet=True)  # takes no step
    assert bits(restored.state) == bits(saved.state)
    moved = train(dataclasses.replace(config, steps=4, mesh=ALL, schedule="interleaved"), quiet=True)
    restored = train(dataclasses.replace(config, steps=4), quiet=True)
    assert bits(restored.state) == bits(moved.state)
    whole = train(dataclasses.replace(config, steps=4, out=None), quiet=True)
    np.testing.assert_allclose(restored.curve()[1], whole.curve()[1], rtol=WITHIN)


@pytest.mark.slow
def test_bfloat16_takes_the_same_way(tiny):
    config = override(tiny, {"model.compute_dtype": "bfloat16", "model.param_dtype": "bfloat16", "steps": 6})
    one, piped = train(config, quiet=True), train(dataclasses.replace(config, mesh=ALL), quiet=True)
    np.testing.assert_allclose(losses(piped), losses(one), rtol=2e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"stage": 8}}, r"8 stages for n_layers=4 - every one needs a layer. Use at most stage=4"),
        ({"mesh": {"stage": 4}, "schedule": "interleaved"}, r"4 stages of 2 chunks .* n_layers=4.* at most stage=2"),
        ({"mesh": {"stage": 2}, "schedule": "interleaved", "stage_chunks": 5}, r"Use fewer chunks"),
        ({"mesh": {"stage": 2, "fsdp": 4}, "model.n_layers": 5, "model.d_model": 20},
            r"d_model=20 .*fsdp\*stage=8 .*n_layers=5 over stage=2.* Use stage=1 or 5, or"),
        ({"mesh": {"stage": 2, "data": 4}, "accumulate": 4}, r"2 rows at a time, not divisible by the 4 ways"),
        ({"schedule": "1f2b"}, r"Did you mean '1f1b'"),
        ({"stage_chunks": 1}, r"stage_chunks=1 - interleaved"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_any_compilation(tiny, changes, message, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled before the check"))
    with pytest.raises(ValueError, match=message):
        train(override(tiny, changes), quiet=True)


@pytest.mark.parametrize("dealt", [False, True])
def test_layers_that_do_not_divide_take_no_more_memory(tiny, dealt):
    """No leaf is whole on every stage but biases and the scales of heads."""
    changes = {"mesh": ALL, "schedule": "interleaved" if dealt else "1f1b", "model.n_layers": 4 if dealt else 5}
    config = override(tiny, changes)
    mesh = make_mesh(config.mesh)
    step.check_layout(config, mesh)
    _, shapes, axes = abstract(config.model)
    layout = rules.shardings(axes, mesh, step.stages.layout_rules(config, mesh))
    for shape, sharding in zip(jax.tree.leaves(shapes["blocks"]), jax.tree.leaves(layout["blocks"]), strict=True):
        assert np.prod(sharding.shard_shape(shape.shape)) * 4 <= shape.size


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "kernels"), [({"fsdp": 2}, 2), ({"context": 2}, 4)])
def test_hopper_kernels_run_inside_stages(tiny, monkeypatch, inner, kernels):
    """Forward, and backward from what it kept. Each once a step of the ring, where rows are cut."""
    monkeypatch.setattr(api, "current_device", lambda: H200)
    sizes = {"model.d_model": 256, "model.head_dim": 64, "seq_len": 128, "model.compute_dtype": "bfloat16"}
    config = override(
        tiny, sizes | {"mesh": inner | {"stage": 2, "tensor": 2}, "model.attention": "hopper", "model.n_kv_heads": 2}
    )
    mesh = make_mesh(config.mesh)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ragged_rows(config, 2))
    with jax.set_mesh(mesh):
        traced = jax.jit(step.loss_functions(config, mesh)[0]).trace(abstract(config.model)[1], rows)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
