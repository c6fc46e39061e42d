"""The training step and the loop around it."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxflash.checkpoint import TrainState
from jaxflash.config import TrainConfig, override, train_preset
from jaxflash.model import abstract, flops_per_token, init_params
from jaxflash.step import compile_program, gradients, loss_sum, make_optimizer
from jaxflash.train import train
from sharding import rules
from sharding.mesh import make_mesh
from tests.jaxflash.rows import ragged_rows

MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (1, 8, 1)]
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_curve.json"


def on_mesh(config: TrainConfig, *sizes: int) -> TrainConfig:
    return dataclasses.replace(config, mesh=dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def one_device():
    return {}


@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_has_the_loss_of_one_device_and_a_part_of_the_state(small, sizes, one_device, compiled_anew, capfd):
    if not one_device:
        one_device.update(run=train(on_mesh(small, 1, 1, 1), quiet=True))
    run = train(on_mesh(small, *sizes), quiet=True)
    want, have = one_device["run"].curve()[1], run.curve()[1]
    assert len(want) == 10 and want[-1] < want[0] - 0.5
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)
    # XLA prints this when a layout forces it to copy an activation to every device.
    assert "rematerialization" not in capfd.readouterr().err
    check_split(run.config, run.state)


def check_split(config: TrainConfig, state: TrainState) -> None:
    """Every leaf of the state is split as its rule says."""
    axes, sizes = abstract(config.model)[2], config.mesh
    ways = jax.tree.map(
        lambda names: int(np.prod([sizes.get(a, 1) for n in names for a in rules.RULES[n]])),
        axes,
        is_leaf=lambda a: isinstance(a, tuple),
    )
    opt = [s for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    assert len(opt) == 1
    for tree in (state.params, opt[0].mu, opt[0].nu):

        def check(path, leaf, split):
            mine = leaf.addressable_shards[0].data.nbytes
            assert mine * split == leaf.nbytes, jax.tree_util.keystr(path)

        jax.tree_util.tree_map_with_path(check, tree, ways)
    if sizes.get("fsdp") == 8:  # ZeRO-3: an eighth of everything but the counters, on every device
        total = sum(x.nbytes for x in jax.tree.leaves(state))
        assert rules.bytes_per_device(state)[1] <= total / 8 + 64


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_gives_the_same_gradient(small, accumulate):
    graph, _, _ = abstract(small.model)
    params = init_params(small.model, 0)
    run = jax.jit(lambda p, rows: gradients(graph, p, rows, small.loss_chunk))
    want, total, count = run(params, ragged_rows(small, 1))
    have, total_a, count_a = run(params, ragged_rows(small, accumulate))
    assert count == count_a
    np.testing.assert_allclose(total_a, total, rtol=1e-6)
    norm = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(have), strict=True):
        assert float(jnp.abs(a - b).max()) <= 1e-6 * norm


def test_gradient_is_that_of_the_token_mean(small):
    graph, _, _ = abstract(small.model)
    params = init_params(small.model, 0)
    rows = ragged_rows(small, 1)
    flat = {name: value[0] for name, value in rows.items()}
    grads, total, count = jax.jit(lambda p: gradients(graph, p, rows, small.loss_chunk))(params)
    assert count == flat["loss_mask"].sum()
    direction = jax.tree.map(lambda g: np.asarray(g) / np.linalg.norm(g), grads)
    slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))

    @jax.jit
    def loss(eps):
        moved = jax.tree.map(lambda p, d: p + eps * d, params, direction)
        total, count = loss_sum(graph, moved, flat, small.loss_chunk)
        return total / count

    eps = 1e-2
    assert (loss(eps) - loss(-eps)) / (2 * eps) == pytest.approx(slope, rel=1e-2)
    assert loss(0.0) == pytest.approx(float(total / count), rel=1e-6)


def test_an_all_masked_batch_is_a_no_op_for_the_gradient(small):
    graph, _, _ = abstract(small.model)
    rows = ragged_rows(small, 2)
    rows["loss_mask"] = jnp.zeros_like(rows["loss_mask"])
    grads, total, count = gradients(graph, init_params(small.model, 0), rows, small.loss_chunk)
    assert total == 0 and count == 0
    assert all(not jnp.any(g) for g in jax.tree.leaves(grads))


def test_step_and_evaluation_compile_once(small):
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        config = dataclasses.replace(small, eval_every=2, steps=8)
        train(config, on_record=lambda record: counts.append(len(compiled)), quiet=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled and len(counts) == 12
    # Step 1, 2 and the first evaluation are behind us at the third record; nothing compiles after it.
    assert counts[3] == counts[-1]


def test_another_shape_is_refused_instead_of_compiled(small):
    mesh = make_mesh(small.mesh, devices=jax.devices()[:1])
    program = compile_program(dataclasses.replace(small, packing="stream"), mesh)
    with jax.set_mesh(mesh):
        rows = {k: np.asarray(v)[:, :, :-1] for k, v in ragged_rows(small, 1).items() if k != "segment_ids"}
        with pytest.raises(TypeError, match="compiled"):
            program.step(program.init(), program.put(rows))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 12, "mesh": {"fsdp": 8}}, r"12 rows at a time, not divisible by the 8 ways.*nearest.*is 16"),
        ({"batch_size": 16, "accumulate": 4, "mesh": {"data": 8}}, r"4 rows at a time.*nearest batch_size.*is 32"),
        ({"mesh": {"fsdp": 16}}, r"8"),
        ({"mesh": {"tenser": 2}}, r"tensor"),
        ({"model.n_kv_heads": 2, "model.n_heads": 12, "mesh": {"tensor": 8}}, r"heads.*tensor"),
        ({"data": ("/nowhere/at-all.txt",)}, r"/nowhere/at-all.txt"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, r"/nowhere/tokenizer.json"),
        ({"model.vocab_size": 128}, r"128"),
        ({"model.attention": "cudn"}, r"'cudnn'"),
        ({"seed": -1}, r"seed=-1"),
    ],
)
def test_bad_input_is_refused_before_any_compilation(small, changes, message, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled before the check"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(override(small, changes), quiet=True)


def test_a_layout_that_cannot_be_is_refused_before_the_data_is_read(small, monkeypatch):
    monkeypatch.setattr("jaxflash.data.tokenise", lambda *_, **__: pytest.fail("read the data before the check"))
    with pytest.raises(ValueError, match="not divisible"):
        train(override(small, {"batch_size": 12, "mesh": {"fsdp": 8}}), quiet=True)


def test_bfloat16_parameters_train_with_float32_moments_and_resume(small, out):
    config = override(small, {"model.param_dtype": "bfloat16", "out": out, "steps": 3, "schedule_steps": 6})
    first = train(config, quiet=True)
    assert {x.dtype for x in jax.tree.leaves(first.state.params)} == {jnp.dtype("bfloat16")}
    floats = {x.dtype for x in jax.tree.leaves(first.state.opt_state) if x.ndim}
    assert floats == {jnp.dtype("float32")}
    resumed = train(dataclasses.replace(config, steps=6), quiet=True)
    whole = train(dataclasses.replace(config, steps=6, out=None), quiet=True)
    assert resumed.curve() == whole.curve() and whole.curve()[1][-1] < whole.curve()[1][0]


def test_mfu_is_tokens_times_flops_over_the_peak(small, monkeypatch):
    monkeypatch.setattr(sys.modules[train.__module__], "peak_flops", lambda device: 1e12)
    run = train(dataclasses.replace(on_mesh(small, 8, 1, 1), steps=2, schedule_steps=10), quiet=True)
    for record in (r for r in run.records if "loss" in r):
        want = record["tokens_per_s"] * flops_per_token(small.model, small.seq_len) / 8e12
        assert record["mfu"] == pytest.approx(want, rel=1e-9)
        # A full batch of packed rows: nearly every place is a token.
        assert 0.9 * 8 * 32 < record["tokens_per_s"] * record["seconds"] <= 8 * 32


def test_the_bar_shows_loss_speed_and_time_left(small, capfd):
    train(dataclasses.replace(small, steps=2, schedule_steps=10))
    shown = capfd.readouterr().err
    assert re.search(r"2/2 .* loss \d\.\d+ \(validation \d\.\d+\) +[\d,]+ tokens/s +\d:\d\d:\d\d", shown), shown


def test_master_weights_stay_float32_under_bfloat16_compute(small):
    config = override(small, {"model.compute_dtype": "bfloat16", "steps": 6, "schedule_steps": 10})
    run = train(config, quiet=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state.params)} == {jnp.dtype("float32")}
    exact = train(override(config, {"model.compute_dtype": "float32"}), quiet=True)
    np.testing.assert_allclose(run.curve()[1], exact.curve()[1], rtol=2e-2)


def test_rate_warms_up_then_falls_along_a_cosine(small):
    config = dataclasses.replace(small, steps=100, warmup_steps=10, learning_rate=1.0, final_lr_fraction=0.1)
    schedule = make_optimizer(config, abstract(config.model)[2])[1]
    rate = [float(np.asarray(schedule(i))) for i in range(110)]  # rate[i] is used by step i + 1
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    turn = 0.5 * (1 + np.cos(np.pi * (np.arange(10, 100) - 9) / 90))
    np.testing.assert_allclose(rate[10:100], 0.1 + 0.9 * turn, rtol=1e-5)
    np.testing.assert_allclose(rate[99:], 0.1, rtol=1e-5)


def test_only_matrices_decay(small):
    config = dataclasses.replace(
        override(small, {"model.qkv_bias": True, "model.qk_norm": True}), weight_decay=0.5, warmup_steps=0
    )
    _, _, axes = abstract(config.model)
    tx, _ = make_optimizer(config, axes)
    params = jax.tree.map(lambda x: jnp.ones_like(x), init_params(config.model, 0))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        decays = path[-1].key in ("weight", "table")
        assert bool(jnp.all(update < 0) if decays else jnp.all(update == 0)), jax.tree_util.keystr(path)


def test_clipping_is_by_the_global_norm(small):
    config = dataclasses.replace(small, clip_norm=1e-3)
    tx, _ = make_optimizer(config, abstract(config.model)[2])
    params = init_params(config.model, 0)
    small_grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
    large_grads = jax.tree.map(lambda g: g * 1e3, small_grads)
    a, b = (tx.update(g, tx.init(params), params)[1] for g in (small_grads, large_grads))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)  # both are clipped to the same direction and length


def test_the_same_configuration_gives_the_same_bits(small):
    config = on_mesh(small, 2, 2, 2)
    assert bits(train(config, quiet=True).state) == bits(train(config, quiet=True).state)


def test_stream_packing_trains_and_evaluates(small):
    run = train(dataclasses.replace(small, packing="stream", eval_every=5), quiet=True)
    steps, losses = run.curve("validation_loss")
    assert steps == [5, 10] and losses[1] < losses[0]


def test_evaluation_is_the_mean_over_all_validation_tokens(small):
    config = dataclasses.replace(small, steps=1, eval_batches=0, seq_len=256, batch_size=8, validation_fraction=0.005)
    run = train(config, quiet=True)
    forward = jax.jit(nnx.merge(abstract(config.model)[0], run.state.params))
    total, count = 0.0, 0
    for i in range(len(run.dataset.validation)):
        row = run.dataset.validation[i]
        assert row.segment_ids is not None
        tokens, positions, segments = (jnp.asarray(x)[None] for x in (row.tokens, row.positions, row.segment_ids))
        logits = np.asarray(forward(tokens, positions=positions, segment_ids=segments), np.float64)[0]
        nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, row.targets[:, None], 1)[:, 0]
        total, count = total + nats[row.loss_mask].sum(), count + int((row.loss_mask).sum())
    assert count == run.dataset.validation.targets
    assert run.curve("validation_loss")[1][-1] == pytest.approx(total / count, rel=1e-5)


# The first 40 steps of 50: in the 49th, rounding in another order moves the loss by 0.25 %.
_GOLDEN_RUN: dict[str, Any] = {
    "steps": 40,
    "schedule_steps": 50,
    "batch_size": 2,
    "eval_batches": 1,
    "mesh": {"data": 1},
}


def test_golden_curve(optimised):
    """40 steps of the tiny preset. A change that moves them on purpose says so and writes the file anew (see below)."""
    run = train(train_preset("tiny", **_GOLDEN_RUN), quiet=True)
    golden = json.loads(GOLDEN.read_text())
    assert run.curve()[0] == golden["step"]
    np.testing.assert_allclose(run.curve()[1], golden["loss"], rtol=1e-3)


if __name__ == "__main__":  # python -m tests.jaxflash.test_train writes the golden curve
    steps, losses = train(train_preset("tiny", **_GOLDEN_RUN)).curve()
    GOLDEN.write_text(json.dumps({"step": steps, "loss": [round(x, 6) for x in losses]}) + "\n")
