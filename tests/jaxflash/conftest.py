"""Configurations small enough to train in seconds."""

from pathlib import Path

import pytest

from jaxflash.config import TrainConfig, preset


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
