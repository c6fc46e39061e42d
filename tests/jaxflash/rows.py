"""Batches that are hostile to averages: masks of all lengths, packed documents."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash.config import TrainConfig


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
