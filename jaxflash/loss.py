"""Losses as (sum, count) pairs: they add up over microbatches, devices and batches, and are divided once at the end.

The mean of microbatch means weighs a token by how full its microbatch is; with ragged masks the gradient is wrong by
tens of per cent. A sum and a count cannot go wrong that way.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cross_entropy(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over unmasked tokens of `logsumexp(logits) - logits[target]` in nats, and their number; both float32.

    What a masked place holds does not matter, NaN and inf included, its target may be any id: value and gradient are
    exactly zero.
    """
    # Cleared before the arithmetic: zero times the derivative of a NaN is NaN.
    logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
    # Shifted before the target is taken: the difference of two large numbers would lose the small loss.
    logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    nats = jnp.log(jnp.exp(logits).sum(axis=-1)) - _of_target(logits, targets)
    return jnp.where(mask, nats, 0.0).sum(), mask.sum().astype(jnp.float32)


@jax.custom_vjp
def _of_target(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """The logit of each target; any value where a target is no id."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        # In a pipeline's shard_map a gather over a split vocabulary ends the process (jaxlib 0.11.2). This splits.
        return jnp.where(_is_target(logits, targets), logits, 0.0).sum(axis=-1)
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]


def _of_target_forward(logits: Array, targets: Array) -> tuple[Array, tuple[Array, Array]]:
    return _of_target(logits, targets), (logits, targets)


def _of_target_backward(kept: tuple[Array, Array], dy: Float[Array, "b t"]) -> tuple[Array, None]:
    logits, targets = kept  # of the logits no more than their shape is read

    def compared(dy: Array) -> Array:
        return jnp.where(_is_target(logits, targets), dy[..., None], 0.0)

    def scattered(dy: Array) -> Array:
        rows = jnp.indices(targets.shape, sparse=True)
        return jnp.zeros_like(logits).at[*rows, targets].set(dy, mode="clip")

    # XLA writes the gradient of all logits in float32 before it scatters into it, to read it again (8B width: 34 GB
    # more a step of 32,768 tokens). On a CPU a comparison hangs its collectives on a mesh of three axes
    # (ARCHITECTURE.md, log), but not in a pipeline.
    cpu = compared if jax.sharding.get_abstract_mesh().manual_axes else scattered
    return jax.lax.platform_dependent(dy, cpu=cpu, default=compared), None


_of_target.defvjp(_of_target_forward, _of_target_backward)


def _is_target(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Bool[Array, "b t v"]:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def chunked_cross_entropy(
    head: Callable[[Float[Array, "b c d"]], Float[Array, "b c v"]],
    hidden: Float[Array, "b t d"],
    targets: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    chunk: int,
    shards: int = 1,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy(head(hidden), ...)` with the logits of at most `chunk` places of each row alive at a time.

    The backward pass computes each chunk's logits again, so memory is O(B chunk V) instead of O(B T V). The last chunk
    is filled up with masked places when T is not a multiple of `chunk`. A masked hidden state may hold NaN or inf too.

    shards: the equal parts of T that lie on different devices. A chunk has its share of each, so that none moves.
    """
    length, chunk = hidden.shape[1] // shards, -(-chunk // shards)
    hidden = jnp.where(mask[..., None], hidden, 0)  # the head's gradient multiplies it by zero, and zero NaN is NaN
    if length <= chunk:
        return cross_entropy(head(hidden), targets, mask)
    count = -(-length // chunk)

    def chunks(x: Array) -> Array:
        rest = x.shape[2:]
        x = x.reshape(x.shape[0], shards, length, *rest)
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, count * chunk - length)] + [(0, 0)] * len(rest))
        cut = padded.reshape(x.shape[0], shards, count, chunk, *rest)
        return jnp.moveaxis(cut, 2, 0).reshape(count, x.shape[0], shards * chunk, *rest)

    @jax.checkpoint
    def one(xs):
        part, part_targets, part_mask = xs
        return cross_entropy(head(part), part_targets, part_mask)

    sums, counts = jax.lax.map(one, (chunks(hidden), chunks(targets), chunks(mask)))
    return sums.sum(), counts.sum()
