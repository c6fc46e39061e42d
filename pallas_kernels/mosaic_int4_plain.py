"""The stand-ins of mosaic_int4's inline functions, which tests/mosaic/interpreter.py runs on a CPU.

In what order words and zeros lie is stated anew here: tests hold it against `w4a16/layout.py`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_int4_step import Step


def multiply_add(step: Step, acc: Any, words: Any, scales: Any, zeros: Any | None, x: Any) -> Any:
    f32 = jnp.float32
    w = _centred(step, words, zeros).astype(f32)
    # Sums of whole groups, or of units where a group is longer, scaled and added in order.
    run = min(step.group, step.unit)
    partial = jnp.einsum("gkn,mgk->gnm", w.reshape(-1, run, step.rows), x.astype(f32).reshape(len(x), -1, run))
    scaled = partial * scales.astype(f32)[_scale_rows(step)[::run]][:, :, None]
    by_part = scaled.reshape(-1, step.parts, step.unit // run, step.rows, len(x))
    return acc + by_part.sum(axis=(0, 2)).reshape(64, len(x))


def dequantize(step: Step, words: Any, scales: Any, zeros: Any | None) -> Any:
    w = _centred(step, words, zeros).astype(jnp.float32)
    return (w * scales.astype(jnp.float32)[_scale_rows(step)]).astype(step.dtype).T


def codes_by_column(step: Step, words: Any) -> Any:
    """int32 (k, rows)."""
    shifts = np.array([16 * e + 8 * jj + 4 * rh for rh in range(2) for jj in range(2) for e in range(2)], np.int32)
    words = words.reshape(-1, step.rows // 16, 8, 4, 4, 1, 1, 1)  # tile, warp, l8, q, v
    codes = (words >> shifts.reshape(1, 1, 1, 1, 1, 2, 2, 2)) & 15  # ... rh, jj, e
    return codes.transpose(0, 1, 5, 2, 4, 6, 3, 7).reshape(-1, step.rows, 64).swapaxes(1, 2).reshape(-1, step.rows)


def _zeros_by_column(zeros: Any) -> Any:
    """int32 (groups, rows)."""
    return zeros.reshape(len(zeros), -1, 8, 2).swapaxes(2, 3).reshape(zeros.shape).astype(jnp.int32)


def _centred(step: Step, words: Any, zeros: Any | None) -> Any:
    """code - zero, int32 (k, rows)."""
    zero = 8 if zeros is None else _zeros_by_column(zeros)[_scale_rows(step)]
    return codes_by_column(step, words) - zero


def _scale_rows(step: Step) -> np.ndarray:
    return np.array([step.scale_row(k) for k in range(step.k)])
