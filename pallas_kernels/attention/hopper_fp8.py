"""FlashAttention-3's forward pass in e4m3 for Hopper (sm_90a) in Pallas Mosaic GPU: block scales, float32 softmax.

The schedule of `hopper.py`, with operands from `hopper_fp8_prologue.quantise`: queries and keys rotated, values
transposed, because an 8-bit product wants both operands along the keys. The weights of a block go from accumulator to
operand without a shuffle (`mosaic.as_operand`); values lie in the order of tokens that this makes.

    S = Q8 K8'                        product in e4m3, float32 sums
    P = exp2(c S - m + 8)             c = scale log2(e) s_q s_k, of 64 queries and the block of keys
    O = O decay s_v'/s_v + e4m3(P) V8 s_v' of the block before: O is in units of its last block's scale
    out = O s_v / sum P               LSE = ln 2 m + ln(sum P / 256), of the P before the cast

Source: arXiv 2407.08608, section 3.3.
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
from pallas_kernels.attention import fp8, hopper_fp8_prologue
from pallas_kernels.attention.hopper_config import SMEM_LIMIT, heads_side_by_side
from pallas_kernels.attention.hopper_fp8_config import Fp8Config, default, fits, smem_bytes, staged_columns
from pallas_kernels.attention.hopper_reader import Reader
from pallas_kernels.attention.hopper_walk import (
    REGISTERS,
    Seen,
    Walk,
    broadcast,
    follow,
    launch,
    lead,
    load_tile,
    locate,
    positive_scale,
    rings,
    sides,
    with_scores,
)
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import H200, Device
from pallas_kernels.mosaic import ROWS

i32, f32 = jnp.int32, jnp.float32

_WEIGHT_BITS = math.log2(fp8.WEIGHT_SCALE)
_SPARE_BITS = math.log2(fp8.LARGEST) - _WEIGHT_BITS  # by which a weight may exceed 1


@dataclass(frozen=True, kw_only=True)
class _Kernel(Walk):
    """What the body knows at trace time."""

    config: Fp8Config
    scale: float  # of the logits, in base 2


def attend(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    *,
    scale: float,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    shifts: Int[Array, " B"] | None = None,
    config: Fp8Config | None = None,
    device: Device = H200,
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """(out in the input dtype, lse float32); there is no derivative rule here. `device` sizes a persistent grid."""
    config = config or default(spec)
    facts: dict[str, Any] = {
        "query_lengths": query_lengths, "kv_lengths": kv_lengths,
        "query_segments": query_segments, "kv_segments": kv_segments,
    }  # fmt: skip
    query, scale = positive_scale(query, scale)
    operands = hopper_fp8_prologue.quantise(spec, query, key, value, block=config.kv_block, **facts)
    return attend_operands(spec, operands, scale=scale, shifts=shifts, config=config, device=device, **facts)


def attend_codes(
    spec: AttentionSpec, query: Array, *arrays: Array, scale: float, device: Device = H200, **facts: Any
) -> tuple[Array, Array]:
    """As `attend`, of `fp8.given`'s arrays: e4m3 numbers and their scales."""
    query, scale = positive_scale(query, scale)
    operands = fp8.given(spec, query, *arrays, **facts)
    return attend_operands(spec, operands, scale=scale, config=default(spec), device=device, **facts)


def attend_operands(
    spec: AttentionSpec,
    operands: fp8.Operands,
    *,
    scale: float,
    config: Fp8Config,
    device: Device = H200,
    shifts: Int[Array, " B"] | None = None,
    **facts: Any,
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """As `attend`, of operands quantised in blocks of config.kv_block keys; the scale is above 0."""
    if not fits(spec, config, spare=0):
        raise ValueError(
            f"hopper_fp8: {config} does not fit head dims {spec.H} and {spec.H_v} - tiles take "
            f"{smem_bytes(spec, config)} of {SMEM_LIMIT} bytes of shared memory. Take one of "
            "hopper_fp8_config.candidates(spec)."
        )
    masked, side = sides(spec, config, shifts=shifts, **facts)
    kernel = _Kernel(
        spec=spec,
        config=config,
        heads=heads_side_by_side(spec, config, itemsize=1),
        cores=device.num_cores or H200.num_cores or 1,
        scale=scale * math.log2(math.e),
        masked=masked,
    )
    out, lse = _call(kernel, operands._asdict() | side)
    return out[:, : spec.T, :, : spec.H_v], lse.swapaxes(1, 2)[:, : spec.T]


def _call(kernel: _Kernel, operands: dict[str, Array]) -> tuple[Array, ...]:
    """Launches the kernel: (out (B, T8, N, H_v64), lse (B, N, tiles * q_block))."""
    spec, config = kernel.spec, kernel.config
    B, T, N, H = operands["query"].shape
    H_v = operands["value"].shape[2]
    wgs, stages, kv_block = config.warpgroups, config.stages, config.kv_block
    smem = {
        "q": mosaic.swizzled((config.q_block, H), fp8.E4M3),
        "k": mosaic.swizzled((stages, kv_block, H), fp8.E4M3),
        "v": mosaic.swizzled((stages, H_v, kv_block), fp8.E4M3),
        "o": mosaic.swizzled((config.q_block, staged_columns(H_v, config)), spec.dtype),
        "lse": plgpu.SMEM((wgs, 64), f32),
        **rings(kernel),
    }
    if config.promote:
        smem["sums"] = plgpu.SMEM((config.q_block, H_v), f32)
    if config.turns:
        smem["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=wgs)
    if spec.segments:
        smem["ids"] = plgpu.SMEM((stages, kv_block), i32)
    out_type = {
        "out": jax.ShapeDtypeStruct((B, T, N, H_v), spec.dtype),
        "lse": jax.ShapeDtypeStruct((B, N, kernel.q_tiles * config.q_block), f32),
    }
    return launch(kernel, functools.partial(_body, kernel), operands, out_type, smem, listeners=wgs)


def _body(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
    config = kernel.config
    warpgroup = lax.axis_index("warpgroup")

    def values(batch, kv_head, tokens):
        return gmem["value"].at[batch, kv_head, :, tokens]

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][0], action="increase")
        follow(kernel, smem, functools.partial(_consume, kernel, gmem, smem))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(
                lambda: lead(kernel, gmem, smem, functools.partial(load_tile, kernel, gmem, smem, values))
            )


def _consume(kernel: _Kernel, gmem: dict[str, Any], smem: dict[str, Any], index: Any, turn: Any, count: Any) -> Any:
    """Computes one warpgroup's 64 queries of one tile."""
    del turn
    spec, config = kernel.spec, kernel.config
    w = lax.axis_index("warpgroup")
    tile = locate(kernel, gmem, index)
    steps = tile.stop - tile.start
    kv_head = lax.div(tile.head, i32(spec.G))
    first_row = tile.q_tile * config.q_block + w * 64
    q = smem["q"].at[pl.ds(w * 64, 64)]
    H_v = smem["v"].shape[1]
    seen = Seen(kernel, gmem, smem, tile, first_row)
    reader = Reader(kernel, smem, seen, w, count)
    # The last tile may have warpgroups without queries.
    q_block = jnp.minimum(tile.q_tile * config.warpgroups + w, i32(gmem["query_scale"].shape[2] - 1))
    q_scale = gmem["query_scale"][tile.batch, tile.head, q_block] * kernel.scale

    def scale_of(name, n):
        return gmem[name][tile.batch, kv_head, tile.stop - 1 - n]

    def factor_of(n):
        """Of the logits; above 0, which hidden ones must not be multiplied by, though queries and keys may be zeros."""
        return jnp.maximum(q_scale * scale_of("key_scale", n), float(np.finfo(np.float32).tiny))

    def softmax(s, maximum, total, n, factor):
        """(weights, maximum, total, decay); maxima are of logits in base 2, weights 256 times as large.

        `total` (64, 8) has the sums of every eighth column, each in one thread: they meet at the end.
        """
        s = reader.visible(s, n)
        largest = s.max(axis=1) * factor
        new = jnp.maximum(maximum, largest)
        if config.lazy:  # NaN is not less than anything
            new = jnp.where(largest <= maximum + _SPARE_BITS, maximum, new)
        # A row that has seen nothing keeps the maximum -inf, and must not subtract it from itself.
        reference = jnp.where(new == -jnp.inf, 0.0, new) if kernel.masked else new
        weights = jnp.exp2(s * factor - broadcast(reference - _WEIGHT_BITS, s.shape))
        decay = jnp.exp2(maximum - reference)
        total = functools.reduce(jnp.add, mosaic.columns_of(weights, 8), total * broadcast(decay, total.shape))
        return weights, new, total, decay

    plgpu.barrier_wait(smem["q_ready"])

    # What blocks before the last few summed up to, in float32.
    sums: Any = smem["sums"].at[pl.ds(w * 64, 64)] if config.promote else None

    def zeros(columns):
        return plgpu.layout_cast(jnp.zeros((64, columns), f32), plgpu.Layout.WGMMA)

    def summed(o, since):
        """o and those sums, which `since` brings up to date."""
        return mosaic.load_by_thread(sums) * broadcast(since, o.shape) + o

    def with_output(product):
        maximum = plgpu.layout_cast(jnp.full((64,), -jnp.inf, f32), ROWS)
        since = plgpu.layout_cast(jnp.ones((64,), f32), ROWS)
        total = zeros(8)
        if sums is not None:
            mosaic.store_by_thread(zeros(H_v), sums)

        skipped = seen.skipped_blocks(steps)
        reader.leave_keys(skipped)
        first: Any = i32(0) if skipped is None else skipped

        s = with_scores(kernel, smem, q, reader.slot(first), lambda scores: scores(0))
        weights, maximum, total = softmax(s, maximum, total, first, factor_of(first))[:3]
        weights = mosaic.as_operand(weights, fp8.E4M3)
        reader.begin_turns()
        reader.leave_values(skipped)

        def step(n, carry):
            """Scores of block n + 1, product of block n with its values."""
            weights, maximum, total, since = carry
            here = reader.slot(n)
            # Read here, long before they are needed.
            factor = factor_of(n + 1)
            unit = scale_of("value_scale", n) / scale_of("value_scale", n + 1)

            def beside_them(scores):
                plgpu.barrier_wait(smem["v_ready"].at[here])
                plgpu.wgmma(product, weights, smem["v"].at[here].T)
                s = scores(1)
                new_weights, new_maximum, new_total, decay = softmax(s, maximum, total, n + 1, factor)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["v_free"].at[here])
                reader.pass_turn()
                # Not before: a register that the running product reads must not be written, and ptxas would serialise.
                new_weights = mosaic.as_operand(new_weights, fp8.E4M3)
                product[...], new_since = moved(n, product[...], since, decay * unit)
                return new_weights, new_maximum, new_total, new_since

            return with_scores(kernel, smem, q, reader.slot(n + 1), beside_them, reader.wait_turn)

        def moved(n, o, since, decay):
            """(what the next block is added to, since); after every few blocks o goes over to the sums."""

            def scaled(o, since):
                return o * broadcast(decay, o.shape), since * decay

            def handed_over(o, since):
                mosaic.store_by_thread(summed(o, since), sums)
                return zeros(H_v), decay

            usual = scaled
            if config.lazy:
                any_moved = mosaic.any_of_warp(jnp.where(decay == 1.0, 0, 1)) > 0
                usual = functools.partial(lax.cond, any_moved, scaled, lambda *same: same)
            if sums is None:
                return usual(o, since)
            due = lax.rem(n, i32(config.promote)) == config.promote - 1
            return lax.cond(due, handed_over, usual, o, since)

        carry = weights, maximum, total, since
        weights, maximum, total, since = lax.fori_loop(first, steps - 1, step, carry)
        reader.end_turns()
        plgpu.barrier_arrive(smem["q_free"])
        last = reader.slot(steps - 1)
        unit = scale_of("value_scale", steps - 1)
        plgpu.barrier_wait(smem["v_ready"].at[last])

        plgpu.wgmma(product, weights, smem["v"].at[last].T)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["v_free"].at[last])
        o = product[...] if sums is None else summed(product[...], since)
        total = total.sum(axis=1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        nothing = maximum == -jnp.inf
        inverse = jnp.where(nothing, 0.0, unit / jnp.where(nothing, 1.0, total))
        lse = jnp.where(nothing, -jnp.inf, maximum * math.log(2) + jnp.log(total * (1 / fp8.WEIGHT_SCALE)))
        return o * broadcast(inverse, o.shape), lse

    o, lse = pl.run_scoped(with_output, mosaic.ACC((64, H_v), f32))
    smem["lse"][w] = lse
    out = gmem["out"].at[tile.batch, pl.ds(first_row, 64), tile.head]
    staging = smem["o"].at[pl.ds(w * 64, 64)]
    width = staging.shape[1]
    for i, part in enumerate(mosaic.columns_of(o.astype(spec.dtype), width)):
        if i > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out.at[:, pl.ds(i * width, width)])
    plgpu.copy_smem_to_gmem(smem["lse"].at[w], gmem["lse"].at[tile.batch, tile.head, pl.ds(first_row, 64)])
    return count + steps
