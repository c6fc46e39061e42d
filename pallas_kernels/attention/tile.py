"""Tile mathematics of attention: pure functions of one tile of logits, shared by every implementation.

A tile is the logits of some queries (axis -2) against some keys (axis -1). Nothing here knows about chunking, layout
or memory; a kernel body is a schedule around these functions, and the same functions run on any backend.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Scalars = Int[Array, "..."] | int


def visible(
    row: Int[Array, "*#tile"],
    col: Int[Array, "*#tile"],
    *,
    shift: Scalars = 0,
    bounds: tuple[int | None, int | None] = (None, None),
    query_length: Scalars | None = None,
    kv_length: Scalars | None = None,
    query_segment: Int[Array, "..."] | None = None,
    kv_segment: Int[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
) -> Bool[Array, "..."] | None:
    """Which keys each query sees, broadcastable to the tile; None where every query sees every key.

    `row` and `col` are positions, of shapes (..., t, 1) and (..., 1, s); the other operands have the same rank (or
    are numbers). See AttentionSpec for `shift` and `bounds`. A negative segment id marks padding, which sees nothing
    and is seen by nothing.
    """
    below, above = bounds
    conditions = []
    if below is not None:
        conditions.append(col >= row + shift - below)
    if above is not None:
        conditions.append(col <= row + shift + above)
    if query_length is not None:
        conditions.append(row < query_length)
    if kv_length is not None:
        conditions.append(col < kv_length)
    if query_segment is not None and kv_segment is not None:
        conditions.append((query_segment == kv_segment) & (query_segment >= 0))
    if mask is not None:
        conditions.append(mask)
    if not conditions:
        return None
    seen = conditions[0]
    for condition in conditions[1:]:
        seen = seen & condition
    return seen


def softmax_step(
    maximum: Float[Array, "*b t"],
    total: Float[Array, "*b t"],
    logits: Float[Array, "*b t s"],
    seen: Bool[Array, "..."] | None,
) -> tuple[Float[Array, "*b t"], Float[Array, "*b t"], Float[Array, "*b t s"], Float[Array, "*b t"]]:
    """One step of the online softmax over a tile of keys: (maximum, total, weights, decay).

        maximum' = max(maximum, max_j logits_j)      weights_j = exp(logits_j - maximum')
        decay    = exp(maximum - maximum')           total'    = decay * total + sum_j weights_j

    The caller's accumulator follows as decay * accumulator + weights @ values. Start from `start`. Keys that are not
    seen weigh exactly 0, so a row that has seen nothing keeps maximum -inf and total 0.
    Source: arXiv 1805.02867, algorithm 3; arXiv 2205.14135, section 3.1.
    """
    # The result does not depend on the maximum, so no derivative flows through it, at any order.
    heights = jax.lax.stop_gradient(logits if seen is None else jnp.where(seen, logits, -jnp.inf))
    new_maximum = jnp.maximum(jax.lax.stop_gradient(maximum), heights.max(axis=-1))
    reference = _finite_maximum(new_maximum)
    shifted = logits - reference[..., None]
    # Hidden after the subtraction: in a row whose maximum is NaN, the NaN stays with the keys seen.
    weights = jnp.exp(shifted if seen is None else jnp.where(seen, shifted, -jnp.inf))
    decay = jnp.exp(maximum - reference)
    return new_maximum, decay * total + weights.sum(axis=-1), weights, decay


def start(shape: tuple[int, ...], dtype: Any) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """The (maximum, total) of rows that have seen nothing yet."""
    return jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype)


def finalise(
    maximum: Float[Array, "*b"], total: Float[Array, "*b"], accumulator: Float[Array, "*b h"]
) -> tuple[Float[Array, "*b h"], Float[Array, "*b"]]:
    """(out, lse) = (accumulator / total, maximum + log(total)); (0, -inf), with zero gradients, where total is 0."""
    nothing = total == 0
    # Dividing by and taking the log of 1 there, not 0, keeps NaN out of the derivative of the branch not taken. So it
    # does for a row that is NaN, whose accumulator says so: the cotangent of a NaN must not meet the keys that the row
    # does not see, whose weights are 0.
    safe = jnp.where(nothing | jnp.isnan(total), 1.0, total)
    lse = jnp.where(nothing, -jnp.inf, _finite_maximum(maximum) + jnp.log(safe))
    return jnp.where(nothing[..., None], 0.0, accumulator / safe[..., None]), lse


def merge(
    out: Float[Array, "*b h"],
    lse: Float[Array, "*b"],
    other_out: Float[Array, "*b h"],
    other_lse: Float[Array, "*b"],
) -> tuple[Float[Array, "*b h"], Float[Array, "*b"]]:
    """The (out, lse) over the union of two disjoint sets of keys, from the (out, lse) over each.

    Exact and differentiable; either side may have seen nothing.
    """
    maximum = jax.lax.stop_gradient(jnp.maximum(lse, other_lse))
    reference = _finite_maximum(maximum)
    weight, other_weight = jnp.exp(lse - reference), jnp.exp(other_lse - reference)
    accumulator = weight[..., None] * out + other_weight[..., None] * other_out
    return finalise(maximum, weight + other_weight, accumulator)


def split_finite(x: Float[Array, "*b n h"]) -> tuple[Float[Array, "*b n h"], Float[Array, "*b n"]]:
    """(finite, poison): x with every vector that holds a NaN or inf zeroed, and NaN for such vectors, 0 for others.

    A matmul multiplies what a mask hides by 0, and 0 * NaN is NaN. With the finite part in the matmuls and the poison
    added to the logits, a bad vector reaches the rows that see it (all of their outputs become NaN) and no other row,
    forward and backward, at the price of one elementwise pass.
    """
    good = jnp.isfinite(x).all(axis=-1)
    return jnp.where(good[..., None], x, 0.0), jnp.where(good, 0.0, jnp.nan).astype(x.dtype)


def _finite_maximum(maximum: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The maximum to subtract: 0 for rows that have seen nothing, whose -inf - -inf would be NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)
