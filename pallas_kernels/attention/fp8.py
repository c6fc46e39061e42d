"""Attention operands in e4m3: what is rotated, which scale belongs to what, and how values are stored.

    q^ = s_q e4m3(R q / s_q)      k^ = s_k e4m3(R k / s_k)      v^ = s_v e4m3(v / s_v)

R is a random orthogonal transform of the head dim, the same for queries and keys, so that R q . R k = q . k while an
outlier is spread over all dims (arXiv 2407.08608, section 3.3). A scale belongs to a block: 64 queries, or `kv_block`
keys or values, of one head. Scales are powers of two: then q^, k^ and v^ are exact in 16 bits, and a backward pass in
16 bits multiplies just what the forward pass did. e4m3 is a floating-point format, so a scale's fraction buys nothing.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.spec import DESCALED_ROWS, AttentionSpec

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
Q_BLOCK, KV_BLOCK, _ = DESCALED_ROWS  # rows that share a scale; of keys and values more where a kernel wants more
# Weights of the softmax, at most 1, are multiplied by this before they are cast: below 2^-6 e4m3 loses bits.
WEIGHT_SCALE = 256.0
# Scales of queries and keys lie between 2^-100 and 2^100, those of values between 2^-44 and 2^44: the kernel's
# accumulator changes from one's unit to another's.
EXPONENT, VALUE_EXPONENT = 100, 44
LARGEST_VALUE = LARGEST * 2.0**VALUE_EXPONENT
# How `permuted` goes to the kernel's order of tokens, and back.
TO_KERNEL, TO_TOKENS = (2, 4, 2), (4, 2, 2)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How operands are quantised; everything but the defaults is for comparison.

    `transform`: whether queries and keys are rotated, by signs drawn from `seed`; `whole`: one scale for each head's
    whole sequence instead of one a block.
    """

    transform: bool = True
    seed: int = 0
    whole: bool = False


STANDARD = Recipe()
_FACTS = ("query_lengths", "kv_lengths", "query_segments", "kv_segments")


class Operands(NamedTuple):
    """What the forward pass multiplies; H and H_v are multiples of 64, T8 of 8, S' of kv_block."""

    query: Float[Array, "B T8 N H"]
    query_scale: Float[Array, "B N q_blocks"]
    key: Float[Array, "B S_ K H"]
    key_scale: Float[Array, "B K kv_blocks"]
    value: Float[Array, "B K H_v S_"]  # tokens in the kernel's order
    value_scale: Float[Array, "B K kv_blocks"]


def head_dims(spec: AttentionSpec) -> tuple[int, int]:
    """(H, H_v) of the operands: the next multiples of 64."""
    H, H_v = (-(-head_dim // 64) * 64 for head_dim in (spec.H, spec.H_v))
    return H, H_v


def kv_block(spec: AttentionSpec) -> int:
    """Keys that share a scale: the kernel's block for the head dims, or what the call's descales are of."""
    return 224 if max(head_dims(spec)) == 128 and spec.descaled != "by block" else KV_BLOCK


def rotation(dim: int, recipe: Recipe) -> np.ndarray:
    """R (dim, dim), float32, up to its normalisation: entries -1, 0 and 1, rows of equal length; and see `norm`.

    Signs times a Hadamard matrix; of a dim that is no power of two, blocks of its largest factor that is one.
    """
    size = dim & -dim
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = 1 - 2 * np.random.RandomState(recipe.seed).randint(2, size=dim)
    return (np.kron(np.eye(dim // size), hadamard) * signs).astype(np.float32)


def norm(dim: int) -> float:
    """What makes `rotation` orthogonal."""
    return float(dim & -dim) ** -0.5


def rotated(x: Float[Array, "*b h"], recipe: Recipe) -> Float[Array, "*b h"]:
    """R x in float32, along the last axis."""
    if not recipe.transform:
        return x.astype(jnp.float32)
    # Entries of R are exact in any format: products of 16-bit numbers lose nothing on tensor cores.
    return _product(x, rotation(x.shape[-1], recipe).T) * norm(x.shape[-1])


def _product(x: Array, matrix: np.ndarray) -> Array:
    """x times a matrix of -1, 0 and 1, in float32."""
    precise: Any = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return jnp.einsum("...h,hg->...g", x, matrix.astype(x.dtype), **precise)


def power_of_two(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The least power of two >= x, of positive normal float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)


def scale_of(size: Any, exponent: int) -> Any:
    """The least power of two that brings float32 `size` to at most 448."""
    return power_of_two(jnp.clip(size / LARGEST, 2.0**-exponent, 2.0**exponent))


def scales(
    x: Float[Array, "*b l h"], block: int, recipe: Recipe, exponent: int = EXPONENT
) -> Float[Array, "*b blocks"]:
    """`scale_of` the largest entry of each block's finite rows."""
    size = jnp.abs(x).max(-1)
    size = jnp.where(jnp.isfinite(size), size, 0.0)
    size = size.reshape(*size.shape[:-1], -1, block).max(-1)
    if recipe.whole:
        size = jnp.broadcast_to(size.max(-1, keepdims=True), size.shape)
    return scale_of(size, exponent)


def cast(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """float32 x in e4m3: NaN and inf become NaN; what is too large the largest number, as Hopper casts.

    Rounded by float32 arithmetic first, to the nearest, ties to even: XLA may leave out a cast to a narrow type and
    back (`xla_allow_excess_precision`), and then the rounding is still there.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    binade = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    step = jnp.clip(binade, 2.0**-6, LARGEST) / 8
    return jnp.where(jnp.isfinite(x), jnp.clip(jnp.round(x / step) * step, -LARGEST, LARGEST), jnp.nan).astype(E4M3)


def quantise(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    *,
    recipe: Recipe = STANDARD,
    block: int | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
) -> Operands:
    """The operands of a call, in blocks of `block` keys; None: of `kv_block`.

    What lengths and negative segment ids exclude is 0, and moves no scale.

    A query or key that holds NaN or inf is NaN throughout. For a value that does, or holds more than 2^52, its key is,
    which makes NaN of all that see it and of nothing else, and the value is 0.
    """
    H, H_v = head_dims(spec)
    block = block or kv_block(spec)
    rows = present(query, query_lengths, query_segments)
    cols = present(key, kv_lengths, kv_segments)
    # Lengths in front of heads: (B, N, T, H).
    q, k, v = (jnp.where(there, x, 0).swapaxes(1, 2) for x, there in ((query, rows), (key, cols), (value, cols)))
    q = rotated(_padded(q, Q_BLOCK, H), recipe)
    k = rotated(_padded(k, block, H), recipe)
    v = _padded(v, block, H_v).astype(jnp.float32)
    finite = (jnp.abs(v) <= LARGEST_VALUE).all(-1, keepdims=True)
    q, k = (jnp.where(jnp.isfinite(x).all(-1, keepdims=True), x, jnp.nan) for x in (q, k))
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0.0)
    q_scale, k_scale = scales(q, Q_BLOCK, recipe), scales(k, block, recipe)
    v_scale = scales(v, block, recipe, VALUE_EXPONENT)
    q, k, v = (cast(_by_block(x, 1 / scale)) for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale)))
    v = permuted(v.swapaxes(2, 3), TO_KERNEL)
    T8 = -(-spec.T // 8) * 8
    return Operands(q[:, :, :T8].swapaxes(1, 2), q_scale, k.swapaxes(1, 2), k_scale, v, v_scale)


def given(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    query_scale: Float[Array, "B N q_blocks"],
    key_scale: Float[Array, "B K k_blocks"],
    value_scale: Float[Array, "B K v_blocks"],
    **facts: Any,
) -> Operands:
    """The operands of a call that gives e4m3 numbers and their scales, one a head or one a block; as `quantise`.

    Nothing is rotated: that is the caller's affair. Works on bits, which no device is slow with.
    """
    H, H_v = head_dims(spec)
    block = kv_block(spec)
    rows, cols, _ = _there(query, key, facts)
    zero, nan = jnp.uint8(0), jnp.uint8(0x7F)
    q, k, v = (
        _padded(jnp.where(there, jax.lax.bitcast_convert_type(x, jnp.uint8), zero).swapaxes(1, 2), rows_of, head_dim)
        for x, there, rows_of, head_dim in ((query, rows, Q_BLOCK, H), (key, cols, block, H), (value, cols, block, H_v))
    )
    q_scale, k_scale, v_scale = (
        jnp.broadcast_to(scale, (*x.shape[:2], x.shape[2] // rows_of))
        for scale, x, rows_of in ((query_scale, q, Q_BLOCK), (key_scale, k, block), (value_scale, v, block))
    )
    bad = ((v & nan) == nan).any(-1, keepdims=True)
    # The kernel divides by a value's scale: a block of zeros may as well have the scale 1.
    bad_or_zero = bad | jnp.repeat(v_scale == 0, block, axis=2)[..., None]
    k, v = jnp.where(bad, nan, k), jnp.where(bad_or_zero, zero, v)
    v_scale = jnp.where(v_scale == 0, 1.0, v_scale)
    v = permuted(v.swapaxes(2, 3), TO_KERNEL)
    T8 = -(-spec.T // 8) * 8
    q, k, v = (jax.lax.bitcast_convert_type(x, E4M3) for x in (q[:, :, :T8].swapaxes(1, 2), k.swapaxes(1, 2), v))
    return Operands(q, q_scale, k, k_scale, v, v_scale)


def dequantised(
    operands: Operands,
) -> tuple[Float[Array, "B N T_ H"], Float[Array, "B K S_ H"], Float[Array, "B K S_ H_v"]]:
    """(q^, k^, v^) in float32, by heads, of whole blocks."""
    q, k, v = (x.astype(jnp.float32) for x in (operands.query, operands.key, operands.value))
    q = _padded(q.swapaxes(1, 2), Q_BLOCK, q.shape[-1])
    v = permuted(v, TO_TOKENS).swapaxes(2, 3)
    return (
        _by_block(q, operands.query_scale),
        _by_block(k.swapaxes(1, 2), operands.key_scale),
        _by_block(v, operands.value_scale),
    )


def rounded(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    **facts: Any,
) -> tuple[Float[Array, "B T N H_"], Float[Array, "B S K H_"], Float[Array, "B S K H_v"]]:
    """(q^, k^, v^), differentiable: straight through the rounding, as if q^ = R q, k^ = R k and v^ = v.

    In float32; the dtype of the inputs holds them exactly too.
    """
    there = _there(query, key, facts)
    head_dim = head_dims(spec)[0]
    q, k, v = (jnp.where(where, x, 0) for where, x in zip(there, (query, key, value), strict=True))
    smooth = *(rotated(_padded(x, 1, head_dim), STANDARD) for x in (q, k)), v.astype(jnp.float32)
    hats = _hats(spec, *(jax.lax.stop_gradient(x) for x in (query, key, value)), quantise=quantise, facts=facts)
    return tuple(  # pyright: ignore[reportReturnType]
        hat + (x - jax.lax.stop_gradient(x)) for hat, x in zip(hats, smooth, strict=True)
    )


def through_rounding(backward: Callable[..., Any], quantise: Callable[..., Operands] = quantise) -> Callable[..., Any]:
    """The backward pass of attention in e4m3, made of one in 16 bits that is given q^, k^ and v^.

    These are what the forward pass multiplied, so that its LSE and output belong to them: weights sum to 1, and the
    gradient of a row with one key is 0. Given q, k and v instead, weights would be those of other logits than the LSE.
    Only the rounding of the weights to e4m3 is not seen. Gradients pass straight through the rounding of operands.
    `quantise` is the forward pass's.
    """

    def differentiate(
        spec: AttentionSpec, query: Any, key: Any, value: Any, out: Any, lse: Any, dout: Any, dlse: Any, **operands: Any
    ) -> tuple[Any, Any, Any]:
        facts = {name: operands.get(name) for name in _FACTS}
        hats = _hats(spec, query, key, value, quantise=quantise, facts=facts)
        narrow = (x.astype(spec.dtype) for x in hats)
        wide = dataclasses.replace(spec, H=head_dims(spec)[0])
        dq, dk, dv = backward(wide, *narrow, out, lse, dout, dlse, **operands)
        dq, dk = (_product(x, rotation(wide.H, STANDARD)) * norm(wide.H) for x in (dq, dk))
        there = _there(query, key, facts)
        return tuple(  # pyright: ignore[reportReturnType]
            jnp.where(where, x[..., : like.shape[3]], 0).astype(like.dtype)
            for where, x, like in zip(there, (dq, dk, dv), (query, key, value), strict=True)
        )

    return differentiate


def exact(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` of q^, k^ and v^: what the forward pass computes but for the rounding of weights, differentiable."""

    def attend_rounded(spec: AttentionSpec, query: Any, key: Any, value: Any, **operands: Any) -> Any:
        hats = rounded(spec, query, key, value, **{name: operands.get(name) for name in _FACTS})
        return attend(dataclasses.replace(spec, H=head_dims(spec)[0]), *hats, **operands)

    return attend_rounded


def _hats(
    spec: AttentionSpec, *arrays: Any, quantise: Callable[..., Operands], facts: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """(q^, k^, v^) in float32, of the lengths of q, k and v; no derivative."""
    head_dim = head_dims(spec)[0]
    hats = zip(dequantised(quantise(spec, *arrays, **facts)), arrays, (head_dim, head_dim, spec.H_v), strict=True)
    return tuple(hat.swapaxes(1, 2)[:, : x.shape[1], :, :width] for hat, x, width in hats)  # pyright: ignore


def _there(query: Any, key: Any, facts: dict[str, Any]) -> tuple[Any, Any, Any]:
    """`present` of queries, keys and values."""
    rows = present(query, facts.get("query_lengths"), facts.get("query_segments"))
    cols = present(key, facts.get("kv_lengths"), facts.get("kv_segments"))
    return rows, cols, cols


def present(x: Any, lengths: Any, segments: Any) -> Any:
    """(B, L, 1, 1) booleans, or True."""
    there: Any = True
    if lengths is not None:
        there = jnp.arange(x.shape[1])[None] < lengths[:, None]
    if segments is not None:
        there = there & (segments >= 0)
    return there if there is True else there[:, :, None, None]


def _padded(x: Array, block: int, head_dim: int) -> Array:
    """(..., l, h) with zeros up to whole blocks and to the head dim."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % block), (0, head_dim - x.shape[-1])])


def permuted(x: Any, tokens: tuple[int, int, int]) -> Any:
    """(..., l) with every 16 tokens, as so many by so many pairs, transposed; an array of jax or of NumPy.

    16 tokens are held as 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, as a warpgroup's accumulator holds them: its registers
    then are the operand of the product with the values as they are, without a shuffle (`mosaic.as_operand`).
    """
    groups = x.reshape(*x.shape[:-1], -1, *tokens)
    return groups.swapaxes(-3, -2).reshape(x.shape)


def _by_block(x: Array, factor: Array) -> Array:
    """(..., blocks * n, h) times (..., blocks)."""
    blocks = x.reshape(*factor.shape, -1, x.shape[-1])
    return (blocks * factor[..., None, None]).reshape(x.shape)
