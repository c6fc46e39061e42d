"""Rows of a table that is split by rows, inside a region that is manual over other axes of the mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sharding.rules import entry_axes, spec


def take_rows(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """`table[ids]`, with the table in the layout `vocab` and the ids in that of `batch`, `sequence`.

    XLA partitions the gather, except inside a `shard_map` that leaves it some axes: there, jaxlib 0.11.2 ends the
    process when table and ids are split over two of them ("Check failed: partition_group_list.num_replica_groups()").
    Each device then looks up the ids that fall into its own rows, and the finds are added up.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or all(axis in mesh.manual_axes or mesh.shape[axis] == 1 for axis in mesh.axis_names):
        return table[ids]
    return _take(table, ids)


@jax.custom_vjp  # jax's own rule for a shard_map in a shard_map splits its residuals over the outer axes as well
def _take(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    vocab, places, free = _layout()

    def local(rows, ids):
        own, inside = _own(ids, rows.shape[0], vocab)
        found = jnp.where(inside[..., None], rows[own], 0)
        return _sum(found, vocab)

    run = jax.shard_map(local, in_specs=(P(vocab), P(*places)), out_specs=P(*places), axis_names=free)
    return run(table, ids)


def _take_forward(table, ids):
    return _take(table, ids), (ids, jnp.zeros_like(table, shape=(table.shape[0], 0)))


def _take_backward(saved, cotangent):
    ids, like = saved
    vocab, places, free = _layout()
    ways = jax.sharding.get_abstract_mesh().shape
    size = like.shape[0]
    for axis in vocab:
        size //= ways[axis]
    over = tuple(axis for entry in places if entry for axis in entry)

    def local(ids, cotangent):
        own, inside = _own(ids, size, vocab)
        rows = jnp.zeros((size, cotangent.shape[-1]), cotangent.dtype)
        rows = rows.at[own].add(jnp.where(inside[..., None], cotangent, 0))
        return _sum(rows, over)

    run = jax.shard_map(local, in_specs=(P(*places), P(*places)), out_specs=P(vocab), axis_names=free)
    return run(ids, cotangent), None


_take.defvjp(_take_forward, _take_backward)


def _layout() -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], set[str]]:
    """(axes of the table's rows, axes of each dim of the ids, all axes) that are not manual yet."""
    mesh = jax.sharding.get_abstract_mesh()
    free = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}

    def kept(name: str) -> tuple[str, ...]:
        return tuple(axis for axis in entry_axes(spec((name,))[0]) if axis in free)

    return kept("vocab"), (kept("batch"), kept("sequence")), free


def _own(ids: Int[Array, "b t"], size: int, vocab: tuple[str, ...]) -> tuple[Int[Array, "b t"], Array]:
    """The ids as places in this device's rows, and which of them are there."""
    first = jax.lax.axis_index(vocab) * size if vocab else 0
    inside = (ids >= first) & (ids < first + size)
    return jnp.where(inside, ids - first, 0), inside


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    """psum. Float32 on the way: one of bfloat16 aborts XLA's CPU compiler (jaxlib 0.11.2)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.psum(x.astype(wide), axes).astype(x.dtype) if axes else x
