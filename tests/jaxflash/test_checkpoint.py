"""Run folders: what is saved, what is refused, what survives a kill."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxflash.checkpoint import read_config, write_atomically
from jaxflash.config import override
from jaxflash.language_model import load
from jaxflash.model import abstract
from jaxflash.train import train
from sharding.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("same_programs")


def _python(script: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("trained") / "run")
    config = dataclasses.replace(small, out=out, steps=3, schedule_steps=10, checkpoint_every=1, keep=2)
    return train(config, quiet=True)


@pytest.fixture
def run(trained, out):
    """A folder to change."""
    shutil.copytree(trained.path, out)
    return dataclasses.replace(trained, path=Path(out), config=dataclasses.replace(trained.config, out=out))


def test_the_newest_two_are_kept(run):
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["2", "3"]


def test_load_gives_the_trained_parameters_on_any_mesh(run):
    for mesh in (None, make_mesh({"fsdp": 4, "tensor": 2})):
        model = load(run.path, mesh=mesh)
        same = jax.tree.map(lambda a, b: np.array_equal(a, b), model.params, run.state.params)
        assert all(jax.tree.leaves(same)) and model.config == run.config.model
        assert len(model.params["table"].sharding.device_set) == (1 if mesh is None else 8)
    older = load(run.path, step=2)
    assert not np.array_equal(older.params["table"], run.state.params["table"])


def test_load_refuses_what_is_not_there(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; it has \[2, 3\]"):
        load(run.path, step=7)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(run, capfd):
    other = override(run.config, {"model.d_ff": 64})
    write_atomically(run.path / "config.json", json.dumps(dataclasses.asdict(other)))
    with pytest.raises(ValueError, match=r"another model: 3 parameters differ, first \['blocks'\]\['mlp'\]\['down'\]"):
        load(run.path)
    assert len(capfd.readouterr().err.splitlines()) < 20


def test_a_broken_configuration_is_named(run):
    (run.path / "config.json").write_text('{"model": {"vocab_size"')
    with pytest.raises(ValueError, match="config.json"):
        read_config(run.path)
    (run.path / "config.json").write_text('{"modle": {}}')
    with pytest.raises(ValueError, match="Did you mean 'model'"):
        read_config(run.path)


def test_an_out_that_is_a_file_is_refused(small, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        train(dataclasses.replace(small, out=str(tmp_path / "file")), quiet=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_half_written_checkpoint_is_passed_over(run):
    """What a kill in the middle of a save leaves: orbax's temporary folder, never the final name."""
    unfinished = run.path / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    (unfinished / "params").mkdir(parents=True)
    (unfinished / "params" / "d").write_text("half")
    np.testing.assert_array_equal(load(run.path).params["table"], run.state.params["table"])
    again = train(dataclasses.replace(run.config, steps=3), quiet=True)
    assert int(again.state.step) == 3


def test_a_failed_write_ends_the_run(run, tmp_path):
    """Training must not go on for hours on the belief that it is being saved: here no file may pass 20 kB."""
    script = (
        "import json, resource, signal, sys\n"
        "from jaxflash.config import from_json, override\n"
        "from jaxflash.train import train\n"
        "config = override(from_json(open(sys.argv[1]).read()), {'out': sys.argv[2], 'steps': 500})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "train(config, quiet=True)\n"
    )
    out = tmp_path / "full"
    child = _python(script, str(run.path / "config.json"), str(out))
    stderr = child.communicate(timeout=200)[1]
    assert child.returncode != 0 and "Error writing" in stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) < 100
    assert not [p for p in (out / "checkpoints").iterdir() if p.name.isdigit()]


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_abstract_shapes_are_what_is_saved(run):
    shapes = abstract(run.config.model)[1]
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype), run.state.params
    )


@pytest.mark.slow
def test_kill_nine_at_any_moment_loses_nothing(small, tmp_path):
    """Killed again and again, a run still ends with the bits of one that was left alone."""
    config = dataclasses.replace(small, steps=40, checkpoint_every=2)
    whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")), quiet=True)
    out = tmp_path / "killed"
    changes = {"out": str(out), "steps": 40, "checkpoint_every": 2}
    script = (
        "import jaxflash; jaxflash.use_cpu_devices(8)\n"
        "import json, sys\n"
        "from jaxflash.config import from_json, override\n"
        "from jaxflash.train import train\n"
        f"train(override(from_json(open(sys.argv[1]).read()), {changes!r}), quiet=True)\n"
    )
    recipe = tmp_path / "whole" / "config.json"
    kills = 0
    for delay in (0.0, 0.3, 0.1):
        child = _python(script, str(recipe))
        metrics = out / "metrics.jsonl"
        seen = metrics.stat().st_size if metrics.exists() else 0
        while child.poll() is None and (not metrics.exists() or metrics.stat().st_size == seen):
            time.sleep(0.05)
        time.sleep(delay)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
    assert kills >= 2
    resumed = train(dataclasses.replace(config, out=str(out)), quiet=True)
    assert resumed.curve() == whole.curve()
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_resume_on_other_data_is_refused(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    config = dataclasses.replace(small, data=(str(text),), out=str(tmp_path / "run"), steps=2, schedule_steps=4)
    train(config, quiet=True)
    text.write_text("All the world's a stage, and all the men and women merely players. " * 200)
    with pytest.raises(ValueError, match="trained on other data"):
        train(dataclasses.replace(config, steps=4), quiet=True)
