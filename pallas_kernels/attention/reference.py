"""Attention in plain jax.numpy: `xla` with all logits at once, `xla_chunked` tile by tile in O(length) memory.

Both fold the same tile over the same operands and differ only in the size of a tile:

              key chunks (scan, carry = maximum, total, accumulator)
             +------+------+------+
    query    | tile | tile | skip |   -> finalise -> out, lse of the chunk
    chunks   +------+------+------+
    (map)    | tile | tile | tile |   -> finalise
             +------+------+------+

There is no derivative rule: both loops' bodies are rematerialised (`jax.checkpoint`), so reverse mode keeps one
carry per key chunk of one query chunk, and jvp, vmap and higher derivatives are jax's own. Batch and head dims are
never merged with others, so that a sharding over them survives.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import tile
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device
from pallas_kernels.dispatch import Implementation


class _Rows(NamedTuple):
    """What belongs to queries, all with T at axis 3."""

    query: Float[Array, "B K G T H"]
    poison: Float[Array, "B K G T 1"]
    position: Int[Array, "1 1 1 T 1"]
    segment: Int[Array, "B 1 1 T 1"] | None


class _Cols(NamedTuple):
    """What belongs to keys, all with S at axis 3."""

    key: Float[Array, "B K 1 S H"]
    value: Float[Array, "B K 1 S H_v"]
    poison: Float[Array, "B K 1 S 1"]
    position: Int[Array, "1 1 1 S 1"]
    segment: Int[Array, "B 1 1 S 1"] | None


class _Shared(NamedTuple):
    """What every tile needs; lengths are (B, 1, 1, 1, 1), or numbers that fence off the padding of the last chunk."""

    scale: Float[Array, ""] | float
    shift: Int[Array, "B 1 1 1 1"] | int
    query_length: Int[Array, "B 1 1 1 1"] | int | None
    kv_length: Int[Array, "B 1 1 1 1"] | int | None


_Pair = dict[str, Array]  # "bias" and "mask", (1|B, 1|K, 1|G, 1|T, 1|S) each
_Carry = tuple[Float[Array, "B K G T"], Float[Array, "B K G T"], Float[Array, "B K G T H_v"]]


def _tile(spec: AttentionSpec, shared: _Shared, rows: _Rows, cols: _Cols, pair: _Pair, carry: _Carry) -> _Carry:
    """Folds one tile into the carry, all in the accumulation dtype.

    Operands of 16 bits fit the tensor cores' TF32 whole. Cast to their own dtype, they would cast their cotangents
    too, and dP rounded to bfloat16 no longer cancels against the row's delta: dq of a row with one key, which is 0,
    came out at 1 % of the largest.
    """
    maximum, total, accumulator = carry
    wide = accumulator.dtype
    precision = jax.lax.Precision.DEFAULT if jnp.dtype(spec.dtype).itemsize == 2 else jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bkgth,bksh->bkgts", rows.query, cols.key[:, :, 0], precision=precision)
    logits = logits * shared.scale + (rows.poison + cols.poison.swapaxes(3, 4))
    seen = tile.visible(
        rows.position,
        cols.position.swapaxes(3, 4),
        shift=shared.shift,
        bounds=spec.bounds,
        query_length=shared.query_length,
        kv_length=shared.kv_length,
        query_segment=rows.segment,
        kv_segment=None if cols.segment is None else cols.segment.swapaxes(3, 4),
        mask=pair.get("mask"),
    )
    if "bias" in pair:
        bias = pair["bias"]
        # A bias of -inf hides the pair, as a mask would; only finite numbers may meet the logits' derivative.
        hidden = bias == -jnp.inf
        logits = logits + jnp.where(hidden, 0.0, bias).astype(wide)
        seen = ~hidden if seen is None else seen & ~hidden
    maximum, total, weights, decay = tile.softmax_step(maximum, total, logits, seen)
    product = jnp.einsum("bkgts,bksh->bkgth", weights, cols.value[:, :, 0], precision=precision)
    return maximum, total, decay[..., None] * accumulator + product


def _any_pair(spec: AttentionSpec, shared: _Shared, rows: _Rows, cols: _Cols) -> Bool[Array, ""]:
    """Whether causality and the window leave any pair of the tile."""
    below, above = spec.bounds
    live = jnp.bool_(True)
    if above is not None:
        live &= cols.position[0, 0, 0, 0, 0] <= rows.position[0, 0, 0, -1, 0] + jnp.max(shared.shift) + above
    if below is not None:
        live &= cols.position[0, 0, 0, -1, 0] >= rows.position[0, 0, 0, 0, 0] + jnp.min(shared.shift) - below
    return live


def _attend_rows(
    spec: AttentionSpec, kv_chunk: int, shared: _Shared, rows: _Rows, cols: _Cols, pair: _Pair
) -> tuple[Float[Array, "B K G T H_v"], Float[Array, "B K G T"]]:
    """(out, lse) of one chunk of queries against all keys."""
    shape, wide = rows.query.shape[:4], spec.accumulation_dtype
    carry = (*tile.start(shape, wide), jnp.zeros((*shape, spec.H_v), wide))
    if kv_chunk == spec.S:
        return tile.finalise(*_tile(spec, shared, rows, cols, pair, carry))
    sliced, fixed = _slice_pair(pair, axis=4, size=kv_chunk)

    def step(carry: _Carry, chunk: tuple[_Cols, _Pair]) -> tuple[_Carry, None]:
        cols, sliced = chunk

        def fold(carry: _Carry) -> _Carry:
            return _tile(spec, shared, rows, cols, fixed | sliced, carry)

        # A shift that comes of lengths may be split over devices with the batch; a look at all of it would gather it.
        if spec.bounds == (None, None) or (spec.shift is None and not spec.shifted):
            return fold(carry), None
        return jax.lax.cond(_any_pair(spec, shared, rows, cols), fold, lambda carry: carry, carry), None

    chunks = (jax.tree.map(functools.partial(_chunked, axis=3, size=kv_chunk), cols), sliced)
    carry, _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, chunks)
    return tile.finalise(*carry)


def attend(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    *,
    scale: Float[Array, ""] | float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    shifts: Int[Array, " B"] | None = None,
    chunks: tuple[int, int] | None = None,
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """(out in the input dtype, lse in the accumulation dtype). `chunks` is (queries, keys) per tile; None: all."""
    q_chunk, kv_chunk = chunks or (spec.T, spec.S)
    B, T, S, K, G, wide = spec.B, spec.T, spec.S, spec.K, spec.G, spec.accumulation_dtype
    # Widened before the loops: gradients of a loop's constants are summed in their dtype.
    q, q_poison = tile.split_finite(query.astype(wide).reshape(B, T, K, G, spec.H).transpose(0, 2, 3, 1, 4))
    k, k_poison = tile.split_finite(key.astype(wide).transpose(0, 2, 1, 3)[:, :, None])
    v, v_poison = tile.split_finite(value.astype(wide).transpose(0, 2, 1, 3)[:, :, None])
    rows = _Rows(
        query=q,
        poison=q_poison[..., None],
        position=jnp.arange(math.ceil(T / q_chunk) * q_chunk)[None, None, None, :, None],
        segment=None if query_segments is None else query_segments[:, None, None, :, None],
    )
    cols = _Cols(
        key=k,
        value=v,
        poison=(k_poison + v_poison)[..., None],
        position=jnp.arange(math.ceil(S / kv_chunk) * kv_chunk)[None, None, None, :, None],
        segment=None if kv_segments is None else kv_segments[:, None, None, :, None],
    )
    pair = {name: _grouped(x, spec) for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    query_length = None if query_lengths is None else query_lengths.clip(0, T)[:, None, None, None, None]
    kv_length = None if kv_lengths is None else kv_lengths.clip(0, S)[:, None, None, None, None]
    shift: Any = spec.shift if shifts is None else shifts[:, None, None, None, None]
    if shift is None:
        shift = (S if kv_length is None else kv_length) - (T if query_length is None else query_length)
    shared = _Shared(
        scale=scale,
        shift=shift,
        query_length=T if query_length is None and T % q_chunk else query_length,
        kv_length=S if kv_length is None and S % kv_chunk else kv_length,
    )
    if q_chunk == T:
        out, lse = _attend_rows(spec, kv_chunk, shared, rows, cols, pair)
    else:
        sliced, fixed = _slice_pair(pair, axis=3, size=q_chunk)

        def body(chunk: tuple[_Rows, _Pair]) -> tuple[Float[Array, "B K G t H_v"], Float[Array, "B K G t"]]:
            rows, sliced = chunk
            return _attend_rows(spec, kv_chunk, shared, rows, cols, fixed | sliced)

        row_chunks = jax.tree.map(functools.partial(_chunked, axis=3, size=q_chunk), rows)
        out, lse = jax.lax.map(jax.checkpoint(body, prevent_cse=False), (row_chunks, sliced))
        out, lse = _joined(out, axis=3, length=T), _joined(lse, axis=3, length=T)
    out = out.astype(spec.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, spec.N, spec.H_v)
    return out, lse.transpose(0, 3, 1, 2).reshape(B, T, spec.N)


def chunk_sizes(spec: AttentionSpec) -> tuple[int, int]:
    """(queries, keys) per tile: 256 x 512, more keys for fewer queries, each evened out over its chunks."""
    # On two CPU cores at B=1, T=4096, N=8, H=64, causal, 256 x 512 took 2.7 s for the gradient, 256 x 1024 3.8 s and
    # 1024 x 1024 5.3 s (2026-08): larger tiles leave the cache and skip less above the diagonal.
    queries = _even(spec.T, 256)
    return queries, _even(spec.S, 256 * 512 // queries)


def _attend_chunked(spec: AttentionSpec, *arrays: Array, **operands) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    return attend(spec, *arrays, **operands, chunks=chunk_sizes(spec))


def _even(length: int, most: int) -> int:
    return math.ceil(length / math.ceil(length / most))


def _grouped(x: Array, spec: AttentionSpec) -> Array:
    """(b, n, t, s) -> (b, k, g, t, s), a head axis of 1 staying 1."""
    b, n, t, s = x.shape
    return x.reshape(b, 1, 1, t, s) if n == 1 else x.reshape(b, spec.K, spec.G, t, s)


def _slice_pair(pair: _Pair, *, axis: int, size: int) -> tuple[_Pair, _Pair]:
    """(chunks to loop over, the rest): an axis of size 1 is never repeated in memory."""
    sliced = {name: _chunked(x, axis=axis, size=size) for name, x in pair.items() if x.shape[axis] > 1}
    return sliced, {name: x for name, x in pair.items() if x.shape[axis] == 1}


def _chunked(x: Array, *, axis: int, size: int) -> Array:
    """Cuts an axis into chunks, the last padded with zeros, and puts the chunk index in front."""
    count = math.ceil(x.shape[axis] / size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _joined(x: Array, *, axis: int, length: int) -> Array:
    """Undoes `_chunked`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _why_not(spec: AttentionSpec, device: Device) -> str | None:
    return None


XLA = Implementation(name="xla", why_not=_why_not, forward=attend)
XLA_CHUNKED = Implementation(name="xla_chunked", why_not=_why_not, forward=_attend_chunked)
