"""What a custom partition of an operation needs to know: which mesh axes split a dim, and which can."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from sharding.rules import RULES, entry_axes


def axes_of(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """The mesh axes that split a dim of an array, outermost first.

    >>> from jax.sharding import AbstractMesh, PartitionSpec as P
    >>> layout = NamedSharding(AbstractMesh((2, 2), ("data", "fsdp")), P(("data", "fsdp")))
    >>> axes_of(layout, 0), axes_of(layout, 1)
    (('data', 'fsdp'), ())
    """
    return entry_axes((*sharding.spec, *[None] * (dim + 1))[dim])


def dividing(axes: Sequence[str], size: int, mesh: Any) -> tuple[str, ...]:
    """Those of the mesh axes, taken in order, that split a dim of this size evenly."""
    kept: tuple[str, ...] = ()
    for axis in axes:
        if size % math.prod(mesh.shape[name] for name in (*kept, axis)) == 0:
            kept = (*kept, axis)
    return kept


def free_axes(name: str, mesh: Any) -> tuple[str, ...]:
    """The mesh axes that the rules give to a logical axis, those that `mesh` has and no `shard_map` has split yet."""
    return tuple(axis for axis in RULES[name] if axis in mesh.axis_names and axis not in mesh.manual_axes)
