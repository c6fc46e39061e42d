"""Attention's operands to e4m3 for Hopper in Pallas Mosaic GPU: `fp8.quantise` in one read and one write of everything.

    64 rows a warpgroup, a block of rows (or of keys and their values) a CTA; TMA in and out.

    x -> x R' by wgmma -> the block's largest |x| -> scale -> codes      rows along the head dim
    v -> the block's largest |v| -> scale -> v' I by wgmma -> codes      rows along the keys, in the attention's order

R is taken 64 dims at a time, the rest of a longer Hadamard matrix are additions of registers. Its columns, and the keys
of V', come out in the order that makes four codes of a thread neighbours (`mosaic.as_operand`): for values just that is
wanted, for queries and keys it is undone in the matrix. Memory bounds it: 2 bytes read and 1 written an element.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.attention import fp8
from pallas_kernels.attention.blocks import aligned
from pallas_kernels.attention.hopper_walk import broadcast
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.mosaic import ROWS

i32, f32 = jnp.int32, jnp.float32
_WIDTH = 64  # of what a product takes and gives, both ways
_WARPS = 4  # of a warpgroup
_LARGEST = float(np.finfo(np.float32).max)
_SQUARE = (_WIDTH, _WIDTH)


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """What the body knows at trace time."""

    blocks: int  # of a head's sequence
    block: int  # rows that share a scale, a multiple of 32
    heads: int
    H: int
    H_v: int  # 0: there are no values

    @property
    def warpgroups(self) -> int:
        return pl.cdiv(self.block, _WIDTH)

    @property
    def unit(self) -> int:
        """Rows that are stored at a time: a block may end within a warpgroup's 64."""
        return math.gcd(self.block, _WIDTH)


def quantise(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    *,
    block: int | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
) -> fp8.Operands:
    """`fp8.quantise` by the standard recipe, of 16-bit arrays; blocks of keys are multiples of 32."""
    H, H_v = fp8.head_dims(spec)
    block = block or fp8.kv_block(spec)
    facts = {"query": (query_lengths, query_segments), "key": (kv_lengths, kv_segments)}
    rows, cols = (fp8.present(x, *facts[name]) for name, x in (("query", query), ("key", key)))
    query, key, value = aligned(query, H), aligned(key, H), aligned(value, H_v)
    q, q_scale = _call(fp8.Q_BLOCK, query, None, rows)
    k, k_scale, v, v_scale = _call(block, key, value, cols)
    return fp8.Operands(q, q_scale, k, k_scale, v, v_scale)


def _matrices(H: int, dtype: Any) -> np.ndarray:
    """(H / 64 + 1, 64, 64): R' of every 64 dims before the sums over them, and the identity."""
    matrix = fp8.rotation(H, fp8.STANDARD)
    width = H & -H  # of a Hadamard matrix; its first 64 rows hold every column's sign as it is
    parts = [matrix[c - c % width :][:_WIDTH, c : c + _WIDTH].T for c in range(0, H, _WIDTH)]
    parts = [fp8.permuted(part, fp8.TO_TOKENS) for part in parts]
    return np.stack([*parts, np.eye(_WIDTH)]).astype(dtype)


def _call(block: int, x: Array, value: Array | None, present: Any) -> tuple[Array, ...]:
    """(codes, scales) of x and, if there are, of the values."""
    B, L, heads, H = x.shape
    tile = _Tile(blocks=pl.cdiv(L, block), block=block, heads=heads, H=H, H_v=0 if value is None else value.shape[3])
    wgs = tile.warpgroups
    operands = {"x": x, "matrices": jnp.asarray(_matrices(H, x.dtype))}
    scales = jax.ShapeDtypeStruct((B, heads, tile.blocks), f32)
    smem: dict[str, Any] = {
        "x": mosaic.swizzled((wgs, _WIDTH, H), x.dtype),
        "matrices": mosaic.swizzled(operands["matrices"].shape, x.dtype),
        "x_codes": mosaic.swizzled((wgs, _WIDTH, _WIDTH), fp8.E4M3),
        "x_scales": plgpu.SMEM((_WARPS * wgs,), f32),
        "x_ready": plgpu.Barrier(num_barriers=wgs),
        "matrices_ready": plgpu.Barrier(),
        "x_sized": plgpu.Barrier(num_arrivals=wgs),
    }
    if value is None:
        out = {"x_codes": jax.ShapeDtypeStruct(x.shape, fp8.E4M3), "x_scale": scales}
    else:
        operands["v"], length = value, tile.blocks * block
        out = {
            "x_codes": jax.ShapeDtypeStruct((B, length, heads, H), fp8.E4M3),
            "x_scale": scales,
            "v_codes": jax.ShapeDtypeStruct((B, heads, tile.H_v, length), fp8.E4M3),
            "v_scale": scales,
        }
        smem |= {
            "v": mosaic.swizzled((wgs, _WIDTH, tile.H_v), x.dtype),
            "v_codes": mosaic.swizzled((wgs, _WIDTH // tile.unit, _WIDTH, tile.unit), fp8.E4M3),
            "v_scales": plgpu.SMEM((_WARPS * wgs,), f32),
            "v_sized": plgpu.Barrier(num_arrivals=wgs),
            "v_ready": plgpu.Barrier(num_barriers=wgs),
        }
    if present is not True:
        length = (tile.blocks - 1) * block + wgs * _WIDTH
        present = present[:, :length, 0, 0].astype(i32)
        operands["present"] = jnp.pad(present, ((0, 0), (0, length - present.shape[1])))
    names = (*operands, *out)

    def run(*refs):
        _body(tile, dict(zip(names, refs, strict=False)), dict(zip(smem, refs[len(names) :], strict=True)))

    return tuple(
        plgpu.kernel(
            run,
            out_type=tuple(out.values()),
            scratch_types=list(smem.values()),
            grid=(B * tile.blocks * heads,),
            grid_names=("cta",),
            num_threads=wgs,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                # Every exchange through shared memory in the body is fenced or goes through an mbarrier.
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
            ),
        )(*operands.values())
    )


def _body(tile: _Tile, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    w = lax.axis_index("warpgroup")
    rest, head = _divided(lax.axis_index("cta"), tile.heads)  # heads side by side: they share pages of memory
    batch, block = _divided(rest, tile.blocks)
    first = block * tile.block + w * _WIDTH
    rows = pl.ds(first, _WIDTH)

    def load(name):
        plgpu.copy_gmem_to_smem(gmem[name].at[batch, rows, head], smem[name].at[w], smem[f"{name}_ready"].at[w])

    if tile.H_v:
        load("v")
    load("x")

    @pl.when(w == 0)
    def _():
        plgpu.copy_gmem_to_smem(gmem["matrices"], smem["matrices"], smem["matrices_ready"])

    present: Any = None
    mine: Any = None
    if "present" in gmem:
        present = plgpu.load(gmem["present"].at[batch, rows], layout=ROWS, optimized=False)
    if tile.unit < _WIDTH:  # the last warpgroup's rows may be the next block's
        mine = plgpu.broadcasted_iota(i32, (_WIDTH,), 0, layout=ROWS) < tile.block - w * _WIDTH
    plgpu.barrier_wait(smem["matrices_ready"])

    def scale_of(name, size, largest, exponent):
        """The block's scale, from the largest magnitude of each row; rows with more than `largest`, or NaN, are out."""
        size = jnp.where(size <= largest, size, 0.0)
        size = size if present is None else jnp.where(present > 0, size, 0.0)
        size = size if mine is None else jnp.where(mine, size, 0.0)
        cells = smem[f"{name}_scales"]
        # The scale of the largest is the largest scale; that of an array, because Mosaic has no bits of scalars.
        mosaic.store_largest(fp8.scale_of(size, exponent), cells.at[pl.ds(w * _WARPS, _WARPS)])
        plgpu.barrier_arrive(smem[f"{name}_sized"])
        plgpu.barrier_wait(smem[f"{name}_sized"])
        scale = functools.reduce(jnp.maximum, [cells[i] for i in range(_WARPS * tile.warpgroups)])

        @pl.when(w == 0)
        def _():
            gmem[f"{name}_scale"][batch, head, block] = scale

        return scale

    def send(source, target):
        """Rows of the block, `unit` at a time, by functions of which of these."""
        plgpu.commit_smem()
        for u in range(_WIDTH // tile.unit):
            inside = True if mine is None else w * _WIDTH + u * tile.unit < tile.block
            pl.when(inside)(functools.partial(plgpu.copy_smem_to_gmem, source(u), target(u)))

    def rows_of(u):
        return pl.ds(first + u * tile.unit, tile.unit)

    v_size: Any = None
    if tile.H_v:
        plgpu.barrier_wait(smem["v_ready"].at[w])
        v_size = _look_at_values(smem["v"].at[w], present)
        scale = scale_of("v", v_size, fp8.LARGEST_VALUE, fp8.VALUE_EXPONENT)
        staging = smem["v_codes"].at[w]
        for c in range(0, tile.H_v, _WIDTH):
            part = _transposed(smem["v"].at[w, :, pl.ds(c, _WIDTH)], smem["matrices"].at[tile.H // _WIDTH])
            if c > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for u, columns in enumerate(mosaic.columns_of(part, tile.unit)):
                staging[u] = mosaic.as_operand(columns * (1 / scale), fp8.E4M3)
            target = gmem["v_codes"].at[batch, head, pl.ds(c, _WIDTH)]
            send(lambda u: staging.at[u], lambda u, target=target: target.at[:, rows_of(u)])

    plgpu.barrier_wait(smem["x_ready"].at[w])
    parts = _rotated(tile, smem["x"].at[w], smem["matrices"])
    norm = fp8.norm(tile.H)
    size = _largest(parts) * norm
    if tile.H_v:
        size = jnp.where(v_size <= fp8.LARGEST_VALUE, size, jnp.nan)
    # Exact: scales are powers of two.
    factor = norm * (1 / scale_of("x", size, _LARGEST, fp8.EXPONENT))
    factor = broadcast(jnp.where(size <= _LARGEST, factor, jnp.nan), _SQUARE)
    staging = smem["x_codes"].at[w]
    for c, part in enumerate(parts):
        if c > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = part * factor
        if present is not None:
            part = jnp.where(broadcast(present, _SQUARE) > 0, part, 0.0)
        staging[...] = mosaic.as_operand(part, fp8.E4M3)
        target = gmem["x_codes"].at[batch, :, head, pl.ds(c * _WIDTH, _WIDTH)]
        send(lambda u: staging.at[pl.ds(u * tile.unit, tile.unit)], lambda u, target=target: target.at[rows_of(u)])
    plgpu.wait_smem_to_gmem(0)


def _divided(index: Any, by: int) -> tuple[Any, Any]:
    return lax.div(index, i32(by)), lax.rem(index, i32(by))


def _largest(parts: list[Any]) -> Any:
    """The largest magnitude of each row, NaN if there is one."""
    return functools.reduce(jnp.maximum, map(jnp.abs, parts)).max(axis=1)


def _look_at_values(v: Any, present: Any) -> Any:
    """The largest |v| of each row. Rows that are not finite, too large or not there are zeros afterwards."""
    count = v.shape[1] // _WIDTH
    wide = [v.at[:, pl.ds(c * _WIDTH, _WIDTH)] for c in range(count)]
    size = _largest([plgpu.load(part, layout=mosaic.Layout.WGMMA).astype(f32) for part in wide])
    hidden = jnp.where(size <= fp8.LARGEST_VALUE, 0, 1)
    hidden = hidden if present is None else jnp.where(present > 0, hidden, 1)

    @pl.when(mosaic.any_nonzero(hidden) > 0)
    def _():
        for part in wide:
            x = plgpu.load(part, layout=mosaic.Layout.WGMMA)
            part[...] = jnp.where(broadcast(hidden, _SQUARE) > 0, jnp.zeros((), x.dtype), x)
        plgpu.commit_smem()

    return size


def _transposed(v: Any, identity: Any) -> Any:
    """v' in float32, by a product with what is 1 and 0."""

    def product(acc):
        plgpu.wgmma(acc, v.T, identity)
        return acc[...]

    return pl.run_scoped(product, mosaic.ACC(_SQUARE, f32))


def _rotated(tile: _Tile, x: Any, matrices: Any) -> list[Any]:
    """R x but for `fp8.norm`, 64 dims at a time, in float32."""
    count = tile.H // _WIDTH

    def products(*accumulators):
        for c, acc in enumerate(accumulators):
            plgpu.wgmma(acc, x.at[:, pl.ds(c * _WIDTH, _WIDTH)], matrices.at[c])
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accumulators]

    parts = pl.run_scoped(products, *[mosaic.ACC(_SQUARE, f32)] * count)
    step = 1
    while step * _WIDTH < tile.H & -tile.H:
        parts = [parts[c - step] - part if c & step else part + parts[c + step] for c, part in enumerate(parts)]
        step *= 2
    return parts
