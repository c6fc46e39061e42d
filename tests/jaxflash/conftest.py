"""Configurations small enough to train in seconds."""

import dataclasses
import sys
from pathlib import Path

import pytest

from jaxflash.config import TrainConfig, preset, to_json
from jaxflash.train import train


@pytest.fixture(scope="session")
def small() -> TrainConfig:
    """Eight query and eight key/value heads, so that tensor=8 divides; float32, so that meshes can be compared."""
    model = preset("tiny", n_layers=2, d_model=64, n_heads=8, n_kv_heads=8, head_dim=8, d_ff=128)
    return TrainConfig(
        model=model,
        seq_len=32,
        batch_size=8,
        steps=10,
        warmup_steps=4,
        learning_rate=3e-3,
        eval_batches=2,
        seed=3,
        mesh={"data": 1},
    )


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture(scope="module")
def same_programs():
    """Runs of the module that differ in what no program knows, as folders and numbers of steps, share their program."""
    module, made = sys.modules[train.__module__], {}
    compile_program = module.compile_program

    def find(config, mesh, start=None):
        alike = {"steps": 1, "schedule_steps": config.decay_steps, "out": None, "keep": 1}
        alike |= {"eval_every": 0, "eval_batches": 0, "checkpoint_every": 0}
        if start is not None:
            return compile_program(config, mesh, start)
        key = to_json(dataclasses.replace(config, **alike)), mesh
        if key not in made:
            made[key] = compile_program(config, mesh)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_program", find)
        yield
