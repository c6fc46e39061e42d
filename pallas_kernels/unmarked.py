"""Kernels inside a shard_map that checks how values vary (jax's default): traced and lowered without its marks.

jax has no kernels of arrays that carry them (0.11: "mpmd_map does not support Refs with varying manual axis types").
A primitive whose jaxpr has none can stand for such a kernel; its abstract evaluation marks the results again.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir


def equally_varying(*arrays: Any) -> list[Any]:
    """All marked as varying over the axes that any varies over, which a primitive must see."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return [jax.lax.pcast(x, tuple(union - own), to="varying") for x, own in zip(arrays, varying, strict=True)]


def plain(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes to trace on."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def marked(jaxpr: Any, like: Any) -> list[Any]:
    """The abstract results, varying as `like`, an abstract operand, does."""
    return [aval.update(manual_axis_type=like.manual_axis_type) for aval in jaxpr.out_avals]


def lower(context: Any, *operands: Any, jaxpr: Any, **_: Any) -> Any:
    """The lowering rule: that of the jaxpr, for operands as it was traced on."""
    rule = mlir.lower_fun(lambda *arrays: jaxpr_as_fun(jaxpr)(*arrays), multiple_results=True)
    return rule(context.replace(avals_in=jaxpr.in_avals), *operands)
