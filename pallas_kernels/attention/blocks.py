"""Which blocks of keys each block of queries needs: the plan that a fused kernel follows, computed outside of it.

    queries \\ keys     | block 0 | block 1 | block 2 | block 3 |
    block of queries   |  dead   | partial |  full   | partial |      start=1  full_start=2  full_stop=3  stop=4

A partial block is computed under its mask, a full one without, a dead one outside start ... stop not at all. The same
rule read along the other axis is the plan of the backward kernel, which owns keys and walks over queries.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.spec import AttentionSpec


class Ranges(NamedTuple):
    """Along one axis of blocks, for every block of the other: start <= full_start <= full_stop <= stop, all (b, n).

    Blocks start ... stop - 1 are to be computed, those in full_start ... full_stop - 1 without a mask. b is B, or 1
    where all batch entries are alike.
    """

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


def overlaps(
    spec: AttentionSpec,
    q_block: int,
    kv_block: int,
    *,
    hide_tail: bool = False,
    query_lengths: Int[Any, " B"] | None = None,
    kv_lengths: Int[Any, " B"] | None = None,
    query_segments: Int[Any, "B T"] | None = None,
    kv_segments: Int[Any, "B S"] | None = None,
    shifts: Int[Any, " B"] | None = None,
) -> tuple[Bool[Any, "b nq nk"], Bool[Any, "b nq nk"]]:
    """(live, full) for each pair of blocks: whether it may hold a visible pair, and whether every pair is visible.

    Positions past T or S are absent and make no block partial, except that `hide_tail` makes the last block of keys
    partial if it reaches past S: a kernel must hide keys that are not there. NumPy arrays where everything is known,
    so that the plan is a constant of the program; b is 1 where no entry of the batch has facts of its own. Segments are
    compared by the range of ids in a block, which is exact for ids in order and errs towards live for others.
    """
    xp = _module(query_lengths, kv_lengths, query_segments, kv_segments, shifts)
    T, S = spec.T, spec.S
    q_length = _per_batch(xp, query_lengths, T)
    kv_length = _per_batch(xp, kv_lengths, S)
    shift = spec.shift if shifts is None else shifts[:, None, None]
    if shift is None:
        shift = kv_length - q_length
    q_first, q_stop = _edges(xp, T, q_block, axis=1)
    kv_first, kv_stop = _edges(xp, S, kv_block, axis=2)
    live = (q_first < q_length) & (kv_first < kv_length)
    full = (q_stop <= q_length) & (kv_stop <= kv_length)
    if hide_tail:
        full = full & (kv_first + kv_block <= S)
    below, above = spec.bounds
    q_last, kv_last = xp.minimum(q_stop, q_length) - 1, xp.minimum(kv_stop, kv_length) - 1
    if below is not None:
        live = live & (kv_last >= q_first + shift - below)
        full = full & (kv_first >= q_stop - 1 + shift - below)
    if above is not None:
        live = live & (kv_first <= q_last + shift + above)
        full = full & (kv_last <= q_first + shift + above)
    if query_segments is not None and kv_segments is not None:
        q_low, q_high = (x[:, :, None] for x in _extremes(xp, query_segments, q_block))
        kv_low, kv_high = (x[:, None, :] for x in _extremes(xp, kv_segments, kv_block))
        # A block of padding alone has low > high, and is met by nothing.
        live = live & (q_low <= kv_high) & (kv_low <= q_high) & (q_low <= q_high) & (kv_low <= kv_high)
        padded = _has_padding(xp, query_segments, q_block)[:, :, None]
        padded = padded | _has_padding(xp, kv_segments, kv_block)[:, None, :]
        full = full & (q_low == kv_high) & (kv_low == q_high) & (q_low == q_high) & ~padded
    return live, live & full


def ranges(live: Bool[Any, "b n m"], full: Bool[Any, "b n m"]) -> Ranges:
    """The ranges over the last axis. A block that needs nothing gets one partial block, so that it is still visited."""
    xp = _module(live, full)
    m = live.shape[-1]
    index = xp.arange(m, dtype=np.int32)[None, None]
    none = ~live.any(-1)
    start = xp.where(none, 0, xp.where(live, index, m).min(-1))
    stop = xp.where(none, 1, xp.where(live, index + 1, 0).max(-1))
    # The last run of full blocks; causal masks, windows and documents in order have only one.
    full_stop = xp.where(full, index + 1, 0).max(-1)
    full_start = xp.where(~full & (index < full_stop[..., None]), index + 1, 0).max(-1)
    some = full_stop > 0
    full_start, full_stop = xp.where(some, full_start, start), xp.where(some, full_stop, start)
    return Ranges(*(x.astype(np.int32) for x in (start, full_start, full_stop, stop)))


def aligned(x: Float[Array, "B L N H"], head_dim: int) -> Float[Array, "B L8 N H64"]:
    """Zeros up to a multiple of 8 rows, which tiled TMA wants, and to the kernel's head dim."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, head_dim - x.shape[3])))


def facts(
    spec: AttentionSpec, query_lengths: Any = None, kv_lengths: Any = None, shifts: Any = None
) -> Int[Array, "B 3"]:
    """(query length, key length, shift) of each batch entry."""
    query = jnp.broadcast_to(spec.T if query_lengths is None else query_lengths.clip(0, spec.T), (spec.B,))
    kv = jnp.broadcast_to(spec.S if kv_lengths is None else kv_lengths.clip(0, spec.S), (spec.B,))
    if shifts is None:
        shifts = kv - query if spec.shift is None else jnp.full((spec.B,), spec.shift)
    return jnp.stack([query, kv, shifts], axis=1).astype(jnp.int32)


def segment_blocks(ids: Int[Array, "B L"], block: int, padding: int) -> Int[Array, "B blocks block"]:
    """Segment ids by block; padding gets an id of its side's own, equal to nothing on the other."""
    return _cut(jnp, jnp.where(ids < 0, padding, ids).astype(jnp.int32), block, padding)


def _per_batch(xp: ModuleType, lengths: Any, most: int) -> Any:
    """(B, 1, 1), clipped to what there is; or (1, 1, 1)."""
    return xp.full((1, 1, 1), most, np.int32) if lengths is None else lengths.clip(0, most)[:, None, None]


def _edges(xp: ModuleType, length: int, block: int, *, axis: int) -> tuple[Any, Any]:
    """(first, stop) positions of each block, on the given one of three axes."""
    shape = [1, 1, 1]
    shape[axis] = -1
    first = xp.arange(-(-length // block), dtype=np.int32).reshape(shape) * block
    return first, xp.minimum(first + block, length)


def _cut(xp: ModuleType, ids: Any, block: int, fill: int) -> Any:
    """(B, length) -> (B, blocks, block)."""
    ids = xp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=fill)
    return ids.reshape(ids.shape[0], -1, block)


def _extremes(xp: ModuleType, ids: Any, block: int) -> tuple[Any, Any]:
    """The least and the greatest id that is no padding in each block, (B, blocks) each."""
    ids = _cut(xp, ids.astype(np.int32), block, -1)
    most = np.iinfo(np.int32).max
    return xp.where(ids < 0, most, ids).min(-1), xp.where(ids < 0, -1, ids).max(-1)


def _has_padding(xp: ModuleType, ids: Any, block: int) -> Any:
    # Positions past the end are absent, not padding.
    return (_cut(xp, ids, block, 0) < 0).any(-1)


def _module(*arrays: Any) -> ModuleType:
    return np if all(x is None or isinstance(x, np.ndarray) for x in arrays) else jnp
