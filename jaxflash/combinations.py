"""What `jaxflash verify` trains: meshes x schedules, with all other choices in turn; and the rows that it reads."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxflash.config import ModelConfig, TrainConfig, override
from sharding.mesh import AXES, factorisations

# Heads and widths that 8 divides; fewer key/value heads than devices; 24 rows make 1, 2, 3, 4, 6 or 8 microbatches.
SMALL = TrainConfig(
    model=ModelConfig(
        vocab_size=64, d_model=32, n_layers=8, n_heads=8, n_kv_heads=2, head_dim=4, d_ff=64, context=32,
        tie_embeddings=True, compute_dtype="float32", init_std=0.08,
    ),
    seq_len=32, batch_size=24, steps=3, warmup_steps=2, learning_rate=3e-3,
)  # fmt: skip

_SCHEDULES = ("gpipe", "1f1b", "interleaved")
_REMAT = ("none", "full", "dots", "dots_and_attention")


def meshes(devices: int) -> list[dict[str, int]]:
    """Every way to give the devices to the axes of a mesh; axes of size 1 are left out.

    >>> meshes(2)[:2]
    [{'tensor': 2}, {'context': 2}]
    """
    grids = factorisations(devices, len(AXES))
    return [{axis: size for axis, size in zip(AXES, grid, strict=True) if size > 1} or {"data": 1} for grid in grids]


def combinations(config: TrainConfig, meshes: Sequence[Mapping[str, int]]) -> list[TrainConfig]:
    """What to train on each mesh: every schedule where it has stages, elsewhere with accumulation and without.

    All else that may be chosen changes from one to the next, in `turns` that visit every combination of choices before
    one comes again.
    """
    choices = turns(config)
    stride = next(n for n in range(len(choices) * 5 // 8, 2 * len(choices)) if math.gcd(n, len(choices)) == 1)
    found: list[TrainConfig] = []
    for mesh in meshes:
        ways = mesh.get("data", 1) * mesh.get("fsdp", 1)
        parts = [n for n in range(1, 9) if config.batch_size % (n * ways) == 0] or [1]
        if mesh.get("stage", 1) > 1:
            how = [(name, parts[(len(found) + i) % len(parts)]) for i, name in enumerate(_SCHEDULES)]
        else:
            several = parts[1:] or parts
            how = [("1f1b", parts[0]), ("1f1b", several[len(found) % len(several)])][: len(parts)]
        for schedule, accumulate in how:
            changes = {"mesh": dict(mesh), "schedule": schedule, "accumulate": accumulate}
            found.append(override(config, changes | choices[len(found) * stride % len(choices)]))
    return found


def turns(config: TrainConfig) -> list[dict[str, object]]:
    """Every choice that no mesh depends on: for the model as it is, and one that differs in what meshes treat apart.

    The other has one layer more, a window or none, tied embeddings or not, norms of queries and keys or not. Chunks of
    the loss do not divide a row.
    """
    model = config.model
    other = {
        "model.n_layers": model.n_layers + 1,
        "model.sliding_window": None if model.sliding_window else max(3 * config.seq_len // 8, 1),
        "model.tie_embeddings": not model.tie_embeddings,
        "model.qk_norm": not model.qk_norm,
    }
    axes = (
        [{}, other],
        [{"packing": name} for name in ("documents", "stream")],
        [{"zero": name} for name in (3, 1)],
        [{"model.context_parallel": name} for name in ("ring", "all_gather")],
        [{"loss_chunk": size} for size in (config.seq_len, max(config.seq_len // 3, 1))],
        [{"model.remat": name} for name in _REMAT],
    )
    return [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*axes)]


def on_one_device(config: TrainConfig) -> TrainConfig:
    """The same mathematics in the plainest way: no mesh, whole batches, nothing computed twice or by chunks."""
    plain = {"mesh": {"data": 1}, "accumulate": 1, "schedule": "1f1b", "zero": 3, "loss_chunk": config.seq_len}
    return override(config, plain | {"model.remat": "none", "model.context_parallel": "ring"})


def hostile_rows(config: TrainConfig, step: int) -> dict[str, np.ndarray]:
    """(B, T) rows of random tokens whose masks keep from none to all of a row, in up to four documents each."""
    rng = np.random.default_rng(step)
    shape = (config.batch_size, config.seq_len)
    places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    kept = rng.integers(0, shape[1] + 1, (shape[0], 1))
    kept[rng.integers(shape[0])] = 0
    tokens = rng.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
    rows = {"tokens": tokens[0], "targets": tokens[1], "loss_mask": places < kept, "positions": places}
    if config.packing == "documents":
        starts = np.zeros(shape, bool)
        np.put_along_axis(starts, rng.integers(0, shape[1], (shape[0], 3)), True, axis=1)
        rows["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
        rows["positions"] = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return rows
