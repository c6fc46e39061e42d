"""Attention in e4m3 in plain jax.numpy: the operands, blocks, scales and casts of the kernel, on any device.

Blocks of keys are folded from the last to the first, as the kernel does, so that the weights it casts are the same.
Linear memory: the logits of one block of keys at a time. Products are of numbers that float32 holds exactly.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import fp8, tile
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device


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
    recipe: fp8.Recipe = fp8.STANDARD,
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """(out in the input dtype, lse float32). No derivative rule: the casts have none (`fp8.through_rounding`)."""
    facts: dict[str, Any] = {
        "query_lengths": query_lengths, "kv_lengths": kv_lengths,
        "query_segments": query_segments, "kv_segments": kv_segments,
    }  # fmt: skip
    operands = fp8.quantise(spec, query, key, value, recipe=recipe, **facts)
    return attend_operands(spec, operands, scale=scale, shifts=shifts, **facts)


def attend_codes(spec: AttentionSpec, *arrays: Array, scale: float, **facts: Any) -> tuple[Array, Array]:
    """As `attend`, of `fp8.given`'s arrays: e4m3 numbers and their scales."""
    return attend_operands(spec, fp8.given(spec, *arrays, **facts), scale=scale, shifts=None, **facts)


def attend_operands(
    spec: AttentionSpec, operands: fp8.Operands, *, scale: float, shifts: Int[Array, " B"] | None, **facts: Any
) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
    """As `attend`, of operands in blocks of `fp8.kv_block` keys."""
    block = fp8.kv_block(spec)
    q, k, v = fp8.dequantised(operands)
    (B, K, S), G, T = k.shape[:3], spec.G, spec.T
    q = q[:, :, :T].reshape(B, K, G, T, -1)
    # Blocks in front: (blocks, B, K, block, H).
    k, v = (jnp.moveaxis(x.reshape(B, K, -1, block, x.shape[-1]), 2, 0) for x in (k, v))
    see = functools.partial(_visible, spec, shifts=shifts, **facts)
    shape = (B, K, G, T)

    def fold(carry: Any, chunk: Any) -> tuple[Any, None]:
        maximum, total, accumulator = carry
        k, v, start = chunk
        logits = jnp.einsum("bkgth,bksh->bkgts", q, k, precision="highest") * scale
        maximum, total, weights, decay = tile.softmax_step(maximum, total, logits, see(start, block))
        # NaN among weights, of keys that hold NaN, is in `total` too.
        weights = fp8.cast(weights * fp8.WEIGHT_SCALE).astype(jnp.float32) / fp8.WEIGHT_SCALE
        product = jnp.einsum("bkgts,bksh->bkgth", weights, v, precision="highest")
        return (maximum, total, decay[..., None] * accumulator + product), None

    start = (*tile.start(shape, jnp.float32), jnp.zeros((*shape, v.shape[-1]), jnp.float32))
    (maximum, total, accumulator), _ = jax.lax.scan(fold, start, (k, v, jnp.arange(0, S, block)), reverse=True)
    out, lse = tile.finalise(maximum, total, accumulator[..., : spec.H_v])
    out = out.transpose(0, 3, 1, 2, 4).reshape(B, T, spec.N, spec.H_v).astype(spec.dtype)
    return out, lse.transpose(0, 3, 1, 2).reshape(B, T, spec.N)


def _visible(
    spec: AttentionSpec, first: Any, block: int, *, query_lengths, kv_lengths, query_segments, kv_segments, shifts
) -> Any:
    """As `tile.visible`, of all queries and the keys of the block that begins at `first`; (B, 1, 1, T, block)."""

    def rows(x: Any, *axes: int) -> Any:
        return None if x is None else jnp.expand_dims(x, axes)

    lengths = [None if x is None else x.clip(0, most)[:, None, None, None, None]
               for x, most in ((query_lengths, spec.T), (kv_lengths, spec.S))]  # fmt: skip
    shift = spec.shift if shifts is None else rows(shifts, 1, 2, 3, 4)
    if shift is None:
        shift = (spec.S if lengths[1] is None else lengths[1]) - (spec.T if lengths[0] is None else lengths[0])
    ids = None
    if kv_segments is not None:
        ids = jnp.pad(kv_segments, ((0, 0), (0, -spec.S % block)), constant_values=-1)
        ids = rows(jax.lax.dynamic_slice_in_dim(ids, first, block, axis=1), 1, 2, 3)
    return tile.visible(
        jnp.arange(spec.T)[None, None, None, :, None],
        first + jnp.arange(block)[None, None, None, None, :],
        shift=shift,
        bounds=spec.bounds,
        query_length=lengths[0],
        kv_length=spec.S if lengths[1] is None else lengths[1],
        query_segment=rows(query_segments, 1, 2, 4),
        kv_segment=ids,
    )


def why_not(spec: AttentionSpec, device: Device) -> str | None:
    """What attention in e4m3 is not written for, on any device."""
    del device
    if spec.dtype == "float64":
        return "takes float16, bfloat16 and float32, not float64"
    if spec.bias is not None:
        return "has no bias"
    if spec.mask is not None:
        return "has no boolean mask"
    if spec.traced_scale:
        return "the scale must be a Python number, not an array"
    return None
