"""A run that is stopped, killed, moved or refused, and what its folder holds."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxflash.config import TrainConfig, override
from jaxflash.train import train

pytestmark = pytest.mark.usefixtures("same_programs")


def on_mesh(config: TrainConfig, *sizes: int) -> TrainConfig:
    return dataclasses.replace(config, mesh=dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def whole(small):
    """A run that nothing disturbs."""
    return train(small, quiet=True)


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(small, tmp_path):
    config = dataclasses.replace(on_mesh(small, 2, 2, 2), steps=7, schedule_steps=10, checkpoint_every=3)
    whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")), quiet=True)
    parts = dataclasses.replace(config, out=str(tmp_path / "parts"))
    train(dataclasses.replace(parts, steps=5), quiet=True)  # past the warm-up
    resumed = train(parts, quiet=True)
    assert resumed.curve() == whole.curve()
    assert bits(resumed.state) == bits(whole.state)


def test_checkpoint_is_restored_bit_for_bit_on_another_mesh(small, out):
    saved = train(dataclasses.replace(on_mesh(small, 2, 2, 2), out=out, steps=4, schedule_steps=10), quiet=True)
    for sizes in [(1, 1, 1), (1, 8, 1), (1, 1, 8)]:
        again = train(dataclasses.replace(on_mesh(small, *sizes), out=out, steps=4, schedule_steps=10), quiet=True)
        assert bits(again.state) == bits(saved.state)
        assert len(again.state.params["table"].sharding.device_set) == np.prod(sizes)


def test_resume_on_another_mesh_continues_the_curve(small, whole, tmp_path):
    parts = dataclasses.replace(small, schedule_steps=10, out=str(tmp_path))
    train(dataclasses.replace(on_mesh(parts, 2, 2, 2), steps=5), quiet=True)
    resumed = train(on_mesh(parts, 2, 1, 2), quiet=True)
    np.testing.assert_allclose(resumed.curve()[1], whole.curve()[1], rtol=0, atol=1e-5)


def test_a_signal_saves_and_the_next_call_goes_on(small, whole, tmp_path):
    config = dataclasses.replace(small, out=str(tmp_path / "run"))
    before = signal.getsignal(signal.SIGTERM)
    stopped = train(config, quiet=True, on_record=lambda r: r["step"] == 3 and os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.stopped == "SIGTERM" and 3 < int(stopped.state.step) < 10
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = train(config, quiet=True)
    assert resumed.stopped is None
    assert resumed.curve() == whole.curve()


def test_a_signal_during_an_evaluation_is_not_forgotten(small, whole, tmp_path):
    """It comes after the loop has decided about this step: one more step is taken, and then saved."""
    config = dataclasses.replace(small, out=str(tmp_path / "run"), eval_every=3)

    def interrupt(record):
        if record["step"] == 3 and "validation_loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(config, quiet=True, on_record=interrupt)
    assert stopped.stopped == "SIGTERM" and int(stopped.state.step) == 4
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    assert [r["step"] for r in stopped.records if "loss" in r] == [1, 2, 3, 4]
    assert train(config, quiet=True).curve() == whole.curve()


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
    with pytest.raises(ValueError, match="schedule_steps: 2 there, 5 now.* schedule_steps=2 keeps"):
        train(dataclasses.replace(small, out=out, steps=5), quiet=True)
    train(dataclasses.replace(small, out=out, steps=4, schedule_steps=2, keep=1), quiet=True)
    assert (Path(out) / "notes.txt").read_text() == "mine"
    assert [p.name for p in (Path(out) / "checkpoints").iterdir()] == ["4"]


def test_a_refused_or_failed_call_does_not_claim_the_folder(small, out):
    config = dataclasses.replace(small, out=out, steps=2)
    with pytest.raises(ValueError, match="'cudnn'"):
        train(override(config, {"model.attention": "cudn"}), quiet=True)
    with pytest.raises(FloatingPointError):
        train(dataclasses.replace(config, learning_rate=1e38, clip_norm=1e38, warmup_steps=0, steps=6), quiet=True)
    assert int(train(config, quiet=True).state.step) == 2


def test_a_run_is_not_taken_back(small, out):
    train(dataclasses.replace(small, out=out, steps=4, schedule_steps=10), quiet=True)
    with pytest.raises(ValueError, match="already at step 4, beyond steps=3"):
        train(dataclasses.replace(small, out=out, steps=3, schedule_steps=10), quiet=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "checkpoints"])
def test_files_of_others_by_our_names_are_not_written_over(small, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}"):
        train(dataclasses.replace(small, out=str(tmp_path)), quiet=True)
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_without_a_run_keeps_its_files(small, out):
    Path(out).mkdir()
    (Path(out) / "notes.txt").write_text("mine")
    train(dataclasses.replace(small, out=out, steps=2, schedule_steps=10), quiet=True)
    assert (Path(out) / "notes.txt").read_text() == "mine"
