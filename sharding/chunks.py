"""Stacked layers dealt out to pipeline stages, and their gradients collected: one exchange between stages, or none.

Chunk c of layers belongs to stage c mod S. Where a stage has one chunk and they are all full, that is how a leading dim
split over `stage` lies already. Elsewhere the layers are stored whole on every stage, split along another dim
(`rules.fitted`), and every stage sends each other its slice of that one's chunks.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from sharding.rules import entry_axes, entry_without
from sharding.schedule import Schedule

STAGE = "stage"


def deal(schedule: Schedule, layers: PyTree, specs: PyTree) -> PyTree:
    """(L, ...) arrays as (v, S, capacity, ...), zeros after the last layer, the second dim split over `stage`.

    Args:
        schedule: for v, S and the capacity.
        layers: pytree of arrays with one leading dim.
        specs: pytree of their `PartitionSpec`s on the mesh in force, an entry for each dim; `stage` last in its entry.
    """

    def one(x: Shaped[Array, "l ..."], spec: P) -> Shaped[Array, "v s c ..."]:
        shape = (schedule.chunks, schedule.stages, schedule.capacity(x.shape[0]))
        if _dim(spec) == 0:
            return x.reshape(*shape, *x.shape[1:])

        def local(x: Array) -> Array:
            missing = shape[0] * shape[1] * shape[2] - x.shape[0]
            x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(*shape, *x.shape[1:])
            dim = _dim(spec)
            if dim is None:
                return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(STAGE), 1)
            return jax.lax.all_to_all(x, STAGE, 1, dim + 2, tiled=True)

        return jax.shard_map(local, in_specs=spec, out_specs=dealt(spec), check_vma=False)(x)

    return jax.tree.map(one, layers, specs)


def collect(chunks: PyTree, specs: PyTree, n_layers: int) -> PyTree:
    """The inverse of `deal`: what has its shape and layout, in the order of the layers and laid out as `specs` say."""

    def one(x: Shaped[Array, "v s c ..."], spec: P) -> Shaped[Array, "l ..."]:
        if _dim(spec) == 0:
            return x.reshape(n_layers, *x.shape[3:])

        def local(x: Array) -> Array:
            dim = _dim(spec)
            if dim is None:
                x = jax.lax.all_gather(x, STAGE, axis=1, tiled=True)
            else:
                x = jax.lax.all_to_all(x, STAGE, dim + 2, 1, tiled=True)
            return x.reshape(-1, *x.shape[3:])[:n_layers]

        return jax.shard_map(local, in_specs=dealt(spec), out_specs=spec, check_vma=False)(x)

    return jax.tree.map(one, chunks, specs)


def dealt(spec: P) -> P:
    """The layout of a (v, S, capacity, ...) array that is stored by `spec`."""
    return P(None, STAGE, None, *(entry_without(entry, (STAGE,)) for entry in spec[1:]))


def _dim(spec: P) -> int | None:
    """The dim that is split over stages."""
    return next((dim for dim, entry in enumerate(spec) if STAGE in entry_axes(entry)), None)
