"""The training step and the loop around it."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxflash.config import TrainConfig, override, train_preset
from jaxflash.model import abstract, init_params
from jaxflash.step import compile_program, gradients, loss_sum, make_optimizer
from jaxflash.train import train
from sharding import rules
from sharding.mesh import make_mesh

MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_curve.json"


def on_mesh(config: TrainConfig, *sizes: int) -> TrainConfig:
    return dataclasses.replace(config, mesh=dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def ragged_rows(config: TrainConfig, accumulate: int) -> dict[str, jax.Array]:
    """(A, B/A, T) rows whose masks keep 1 to T tokens; half of the rows are packed documents."""
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.seq_len)
    kept = rng.integers(1, config.seq_len + 1, shape[0])
    rows = {
        "tokens": rng.integers(0, 256, shape, dtype=np.int32),
        "targets": rng.integers(0, 256, shape, dtype=np.int32),
        "loss_mask": np.arange(shape[1])[None] < kept[:, None],
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "segment_ids": (np.arange(shape[1])[None] > rng.integers(0, shape[1], shape[0])[:, None]).astype(np.int32),
    }
    split = (accumulate, shape[0] // accumulate, shape[1])
    return {name: jnp.asarray(value.reshape(split)) for name, value in rows.items()}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def one_device():
    return {}


@pytest.mark.parametrize("sizes", MESHES)
def test_loss_on_any_mesh_equals_one_device(small, sizes, one_device, capfd):
    if not one_device:
        one_device.update(run=train(on_mesh(small, 1, 1, 1), quiet=True))
    run = train(on_mesh(small, *sizes), quiet=True)
    want, have = one_device["run"].curve()[1], run.curve()[1]
    assert len(want) == 10 and want[-1] < want[0] - 0.5
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)
    # XLA prints this when a layout forces it to copy an activation to every device.
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("sizes", [*MESHES, (1, 8, 1)])
def test_every_leaf_of_the_state_is_split_as_its_rule_says(small, sizes):
    config = on_mesh(small, *sizes)
    mesh = make_mesh(config.mesh)
    program = compile_program(config, mesh)
    with jax.set_mesh(mesh):
        state = program.init()
    axes = abstract(config.model)[2]
    ways = jax.tree.map(
        lambda names: int(np.prod([mesh.shape[a] for n in names for a in rules.RULES[n]])),
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
    if sizes == (1, 8, 1):  # ZeRO-3: an eighth of everything but the counters, on every device
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
    grads, total, count = gradients(graph, params, rows, small.loss_chunk)
    assert count == flat["loss_mask"].sum()
    direction = jax.tree.map(lambda g: g / jnp.linalg.norm(g), grads)
    slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))

    def loss(eps):
        moved = jax.tree.map(lambda p, d: p + eps * d, params, direction)
        total, count = loss_sum(graph, moved, flat, small.loss_chunk)
        return float(total) / float(count)

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


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(small, tmp_path):
    config = dataclasses.replace(on_mesh(small, 2, 2, 2), schedule_steps=10, checkpoint_every=3)
    whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")), quiet=True)
    parts = dataclasses.replace(config, out=str(tmp_path / "parts"))
    train(dataclasses.replace(parts, steps=5), quiet=True)
    resumed = train(parts, quiet=True)
    assert resumed.curve() == whole.curve()
    assert bits(resumed.state) == bits(whole.state)


def test_checkpoint_is_restored_bit_for_bit_on_another_mesh(small, out):
    saved = train(dataclasses.replace(on_mesh(small, 2, 2, 2), out=out, steps=4, schedule_steps=10), quiet=True)
    for sizes in [(1, 1, 1), (1, 8, 1), (1, 2, 4)]:
        again = train(dataclasses.replace(on_mesh(small, *sizes), out=out, steps=4, schedule_steps=10), quiet=True)
        assert bits(again.state) == bits(saved.state)
        assert len(again.state.params["table"].sharding.device_set) == np.prod(sizes)


def test_resume_on_another_mesh_continues_the_curve(small, tmp_path):
    config = dataclasses.replace(small, schedule_steps=10)
    whole = train(on_mesh(config, 1, 1, 1), quiet=True)
    parts = dataclasses.replace(config, out=str(tmp_path))
    train(dataclasses.replace(on_mesh(parts, 1, 4, 2), steps=5), quiet=True)
    resumed = train(on_mesh(parts, 2, 1, 2), quiet=True)
    np.testing.assert_allclose(resumed.curve()[1], whole.curve()[1], rtol=0, atol=1e-5)


def test_a_signal_saves_and_the_next_call_goes_on(small, tmp_path):
    config = dataclasses.replace(small, out=str(tmp_path / "run"))
    before = signal.getsignal(signal.SIGTERM)
    stopped = train(config, quiet=True, on_record=lambda r: r["step"] == 3 and os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.stopped == "SIGTERM" and 3 < int(stopped.state.step) < 10
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = train(config, quiet=True)
    assert resumed.stopped is None
    assert resumed.curve() == train(dataclasses.replace(config, out=None), quiet=True).curve()


def test_records_of_steps_after_the_checkpoint_are_dropped_on_resume(small, out):
    train(dataclasses.replace(small, out=out, steps=4, schedule_steps=10), quiet=True)
    metrics = Path(out) / "metrics.jsonl"
    with metrics.open("a") as file:  # what a run killed at step 6 leaves behind: later records and half a line
        file.write(json.dumps({"step": 5, "loss": 99.0}) + "\n" + json.dumps({"step": 6, "loss": 99.0})[:9])
    train(dataclasses.replace(small, out=out, steps=6, schedule_steps=10), quiet=True)
    steps = [r["step"] for r in map(json.loads, metrics.read_text().splitlines()) if "loss" in r]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert "99.0" not in metrics.read_text()


def test_not_a_number_stops_and_names_the_step(small, out):
    config = dataclasses.replace(small, out=out, learning_rate=1e38, clip_norm=1e38, warmup_steps=0, checkpoint_every=1)
    with pytest.raises(FloatingPointError, match=r"at step [2-4] - it must be finite"):
        train(config, quiet=True)
    kept = [int(p.name) for p in (Path(out) / "checkpoints").iterdir()]
    assert kept and max(kept) < 4


def test_another_configuration_is_refused_naming_the_keys(small, out):
    train(dataclasses.replace(small, out=out, steps=2), quiet=True)
    (Path(out) / "notes.txt").write_text("mine")
    changed = override(dataclasses.replace(small, out=out, steps=2), {"learning_rate": 1e-4, "model.d_ff": 96})
    with pytest.raises(ValueError, match=r"learning_rate: 0.003 there, 0.0001 now; model.d_ff: 128 there, 96 now"):
        train(changed, quiet=True)
    with pytest.raises(ValueError, match="schedule_steps: 2 there, 5 now"):
        train(dataclasses.replace(small, out=out, steps=5), quiet=True)
    train(dataclasses.replace(small, out=out, steps=4, schedule_steps=2, keep=1), quiet=True)
    assert (Path(out) / "notes.txt").read_text() == "mine"
    assert [p.name for p in (Path(out) / "checkpoints").iterdir()] == ["4"]


def test_a_folder_without_a_run_keeps_its_files(small, out):
    Path(out).mkdir()
    (Path(out) / "notes.txt").write_text("mine")
    train(dataclasses.replace(small, out=out, steps=2), quiet=True)
    assert (Path(out) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 12, "mesh": {"fsdp": 8}}, r"12 rows at a time, not divisible by the 8 ways.*nearest.*is 16"),
        ({"batch_size": 16, "accumulate": 4, "mesh": {"data": 8}}, r"4 rows at a time.*nearest batch_size.*is 32"),
        ({"mesh": {"fsdp": 16}}, r"8"),
        ({"mesh": {"tenser": 2}}, r"tensor"),
        ({"model.n_kv_heads": 2, "mesh": {"tensor": 8}}, r"kv_heads.*tensor"),
        ({"data": ("/nowhere/at-all.txt",)}, r"/nowhere/at-all.txt"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, r"/nowhere/tokenizer.json"),
        ({"model.vocab_size": 128}, r"128"),
        ({"model.attention": "cudn"}, r"'cudnn'"),
    ],
)
def test_bad_input_is_refused_before_any_compilation(small, changes, message, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled before the check"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(override(small, changes), quiet=True)


def test_master_weights_stay_float32_under_bfloat16_compute(small):
    config = override(small, {"model.compute_dtype": "bfloat16", "steps": 6})
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
    config = dataclasses.replace(small, steps=1, eval_batches=0, seq_len=512, batch_size=8)
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


def test_golden_curve():
    """50 steps of the tiny preset. A change that moves them on purpose says so and writes the file anew (see below)."""
    run = train(train_preset("tiny", steps=50, batch_size=8, mesh={"data": 1}), quiet=True)
    golden = json.loads(GOLDEN.read_text())
    assert run.curve()[0] == golden["step"]
    np.testing.assert_allclose(run.curve()[1], golden["loss"], rtol=1e-3)


if __name__ == "__main__":  # PYTHONPATH=. python tests/jaxflash/test_train.py writes the golden curve
    steps, losses = train(train_preset("tiny", steps=50, batch_size=8, mesh={"data": 1})).curve()
    GOLDEN.write_text(json.dumps({"step": steps, "loss": [round(x, 6) for x in losses]}) + "\n")
