"""Runs a kernel, which knows one device and no vmap, on every device's part of a packed weight and under vmap.

    x (M, K') over (.., rows)     words, scales, zeros over (columns, rows)     ->  y (M, N') over (.., columns)

The parts are those that the weight comes in. A column-parallel weight needs nothing else; where rows are split, every
device multiplies its own and the partial products are added in float32. An axis of the mesh that splits rows of both x
and W splits only those of x where that moves fewer bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import unmarked
from pallas_kernels.device import alone
from pallas_kernels.w4a16.layout import TILE
from pallas_kernels.w4a16.spec import W4A16Spec
from sharding.local import axes_of, dividing

Kernel = Callable[..., Any]


def partitioned(kernel: Kernel, *, most_rows: int | None = None) -> Kernel:
    """`kernel(spec, x, words, scales, zeros)` for arrays that are split over a mesh, mapped, or neither.

    The kernel sees the arrays of one device, and a spec of their sizes. Rows of x that vmap maps go to it at once, if
    they are no more than `most_rows`.
    """

    def product(
        spec: W4A16Spec,
        x: Float[Array, "m k"],
        words: Int32[Array, "column_tiles row_tiles 8 64"],
        scales: Float[Array, "column_tiles groups 64"],
        zeros: UInt8[Array, "column_tiles groups 64"] | None,
    ) -> Float[Array, "m n"]:
        packed = (words, scales) if zeros is None else (words, scales, zeros)
        return _mapped(kernel, most_rows, spec)(x, *packed)

    return product


def _mapped(kernel: Kernel, most_rows: int | None, spec: W4A16Spec) -> Callable[..., Any]:
    @custom_vmap
    def run(x: Array, *packed: Array) -> Array:
        by_parts = functools.partial(_by_parts, kernel, dataclasses.replace(spec, M=x.shape[0]))
        return _unmarked(by_parts, x, *packed)

    @run.def_vmap
    def rule(size: int, mapped: Sequence[bool], x: Array, *packed: Array) -> tuple[Array, bool]:
        rows = x.shape[-2]
        if size == 0:
            return jnp.zeros((0, rows, spec.N), spec.dtype), True
        if not any(mapped[1:]) and (most_rows is None or size * rows <= most_rows):  # one weight for all: a larger M
            return run(x.reshape(-1, x.shape[-1]), *packed).reshape(size, rows, spec.N), True
        everything = (x, *packed)
        moving = [a for a, moves in zip(everything, mapped, strict=True) if moves]

        def one(some: Sequence[Array]) -> Array:
            rest = iter(some)
            return run(*(next(rest) if moves else a for a, moves in zip(everything, mapped, strict=True)))

        return jax.lax.map(one, moving), True

    return run


def _unmarked(function: Callable[..., Any], *arrays: Array) -> Array:
    """function(*arrays), traced on arrays that do not say over which axes of a shard_map they vary; its result does."""
    if not any(jax.typeof(a).manual_axis_type.varying for a in arrays):
        return function(*arrays)
    jaxpr = jax.jit(function).trace(*unmarked.plain(arrays)).jaxpr
    return _unmarked_call.bind(*unmarked.equally_varying(*arrays), jaxpr=jaxpr)[0]


_unmarked_call = Primitive("w4a16_unmarked")
_unmarked_call.multiple_results = True
_unmarked_call.def_abstract_eval(lambda x, *_, jaxpr: unmarked.marked(jaxpr, x))
_unmarked_call.def_impl(lambda *arrays, jaxpr: jaxpr_as_fun(jaxpr)(*arrays))
mlir.register_lowering(_unmarked_call, unmarked.lower)


def _by_parts(kernel: Kernel, spec: W4A16Spec, x: Array, *packed: Array) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if alone() or (mesh.manual_axes and all(mesh.shape[a] == 1 for a in mesh.axis_names if a not in mesh.manual_axes)):
        return _call(kernel, spec, x, *packed)
    whole = dataclasses.replace(spec, K=spec.padded_K, N=spec.padded_N)

    def tiled(x: Array, *packed: Array) -> Array:
        """Features of x and y by tiles, since a device has whole ones."""
        M, row_tiles, _ = x.shape
        local = dataclasses.replace(whole, M=M, K=row_tiles * TILE, N=packed[0].shape[0] * TILE)
        return _call(kernel, local, x.reshape(M, -1), *packed).reshape(M, -1, TILE)

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        x, words = (shape.sharding for shape in shapes[:2])
        if not isinstance(words, NamedSharding):  # jax could not name the axes: everything everywhere
            mesh = Mesh(np.array(list(words.device_set)), ("all",))
            columns, rows, batch = (), (), ()
        else:
            columns = dividing(axes_of(words, 0), words_shape[0], mesh)
            wanted = axes_of(x, 0) if isinstance(x, NamedSharding) else ()
            rows = axes_of(words, 1)
            if 4 * whole.M > whole.K / 2:  # bytes a column: y in float32, to be summed, and W, to be gathered
                rows = tuple(axis for axis in rows if axis not in wanted)
            rows = _rows(rows, whole, mesh)
            batch = [axis for axis in wanted if axis not in (*columns, *rows)]
            batch = dividing(batch, whole.M, mesh)

        def part(x: Array, *packed: Array) -> Array:
            y = tiled(x, *packed)
            return jax.lax.psum(y.astype(jnp.float32), rows).astype(y.dtype) if rows else y

        by_group = rows if whole.groups > 1 else ()
        places = [P(batch or None, rows or None, None), P(columns or None, rows or None)]
        places += [P(columns or None, by_group or None)] * (len(packed) - 1)
        operands = tuple(NamedSharding(mesh, place) for place in places)
        return mesh, jax.jit(part), NamedSharding(mesh, P(batch or None, columns or None, None)), operands

    words_shape = packed[0].shape
    # jit keeps constants, such as a kernel's plan, inside: custom_partitioning refuses them.
    function = custom_partitioning(jax.jit(tiled))
    operands = ["m r t", "c r e w", *["c g w"] * (len(packed) - 1)]
    rule = f"{', '.join(operands)} -> m c w"
    function.def_partition(partition, sharding_rule=rule, need_replication_factors=("t", "e", "w"))
    x = jnp.pad(x, ((0, 0), (0, whole.K - spec.K))).reshape(spec.M, -1, TILE)
    return function(x, *packed).reshape(spec.M, whole.N)[:, : spec.N]


def _call(kernel: Kernel, spec: W4A16Spec, x: Array, words: Array, scales: Array, zeros: Array | None = None) -> Array:
    return kernel(spec, x, words, scales, zeros)


def _rows(axes: Sequence[str], spec: W4A16Spec, mesh: Any) -> tuple[str, ...]:
    """Those of the mesh axes that split the rows between tiles and between groups."""
    kept = dividing(axes, spec.K // TILE, mesh)
    if spec.groups == 1:
        return kept
    whole_groups = spec.K // math.lcm(spec.group, TILE) if spec.K % spec.group == 0 else 1
    return dividing(kept, whole_groups, mesh)
