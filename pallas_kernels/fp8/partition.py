"""Runs kernels, which know one device and no vmap, on every device's part of their operands and under vmap.

    product    x (M, K) over (batch, k)    w (N, K) over (columns, k)    ->    y (M, N) over (batch, columns)
    rounding   x (M, K) over (batch, k)                                  ->    codes (M, K), scales (M, blocks) alike

The parts are those that the weight comes in, if they are whole blocks of 128; where K is split, every device multiplies
its own and the partial products are added in float32. Sizes that are no multiples of 128 are not split.
"""

import dataclasses
import functools
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
from jaxtyping import Array, Float

from pallas_kernels import unmarked
from pallas_kernels.device import alone
from pallas_kernels.fp8.spec import BLOCK, Fp8Spec
from sharding.local import axes_of, dividing

Axes = tuple[str, ...]


def product(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(spec, x, x_scales, w, w_scales)` for arrays that are split over a mesh, mapped, or neither."""

    def run(
        spec: Fp8Spec,
        x: Float[Array, "m k"],
        x_scales: Float[Array, "m_blocks k_blocks"],
        w: Float[Array, "n k"],
        w_scales: Float[Array, "n_blocks k_blocks_of_w"],
    ) -> Float[Array, "m n"]:
        return _mapped(functools.partial(_product_by_parts, kernel, spec))(x, x_scales, w, w_scales)

    return run


def rounding(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(x)` -> (codes, scales of 1 x 128) for arrays that are split over a mesh, mapped, or neither."""

    def run(x: Float[Array, "m k"]) -> tuple[Float[Array, "m k"], Float[Array, "m k_blocks"]]:
        return _mapped(functools.partial(_rounding_by_parts, kernel))(x)

    return run


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @custom_vmap
    def run(*arrays: Array) -> Any:
        return _unmarked(function, *arrays)

    @run.def_vmap
    def rule(size: int, mapped: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        moving = [a for a, moves in zip(arrays, mapped, strict=True) if moves]

        def one(some: Sequence[Array]) -> Any:
            rest = iter(some)
            return run(*(next(rest) if moves else a for a, moves in zip(arrays, mapped, strict=True)))

        out = jax.lax.map(one, moving)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _unmarked(function: Callable[..., Any], *arrays: Array) -> Any:
    """function(*arrays), traced on arrays that do not say over which axes of a shard_map they vary; its result does."""
    if not any(jax.typeof(a).manual_axis_type.varying for a in arrays):
        return function(*arrays)
    traced = jax.jit(function).trace(*unmarked.plain(arrays))
    out = _unmarked_call.bind(*unmarked.equally_varying(*arrays), jaxpr=traced.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)


_unmarked_call = Primitive("fp8_unmarked")
_unmarked_call.multiple_results = True
_unmarked_call.def_abstract_eval(lambda x, *_, jaxpr: unmarked.marked(jaxpr, x))
_unmarked_call.def_impl(lambda *arrays, jaxpr: jaxpr_as_fun(jaxpr)(*arrays))
mlir.register_lowering(_unmarked_call, unmarked.lower)


def _one_device() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    return alone() or bool(manual and all(mesh.shape[a] == 1 for a in mesh.axis_names if a not in manual))


def _product_by_parts(kernel: Callable[..., Any], spec: Fp8Spec, *operands: Array) -> Array:
    if _one_device():
        return kernel(spec, *operands)
    whole = spec.N % BLOCK == 0 and spec.K % BLOCK == 0

    def local(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
        return kernel(dataclasses.replace(spec, M=x.shape[0], K=x.shape[1], N=w.shape[0]), x, x_scales, w, w_scales)

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        x, _, w, _ = (shape.sharding for shape in shapes)
        batch, columns, k = (), (), ()
        if not isinstance(w, NamedSharding):  # jax could not name the axes: everything everywhere
            mesh = Mesh(np.array(list(w.device_set)), ("all",))
        else:
            if whole:
                columns = dividing(axes_of(w, 0), spec.N // BLOCK, mesh)
                k = dividing(axes_of(w, 1), spec.K // BLOCK, mesh)
            wanted = axes_of(x, 0) if isinstance(x, NamedSharding) else ()
            if 4 * spec.M > spec.K:  # bytes a column: y in float32, to be summed, and W, to be gathered
                k = tuple(axis for axis in k if axis not in wanted)
            batch = dividing([axis for axis in wanted if axis not in (*columns, *k)], spec.M, mesh)

        def part(*operands: Array) -> Array:
            y = local(*operands)
            return jax.lax.psum(y.astype(jnp.float32), k).astype(y.dtype) if k else y

        by_scale = {
            "tensor": (P(), P()),
            "row": (P(batch or None, None), P(columns or None, None)),
            "block": (P(batch or None, k or None), P(columns or None, k or None)),
        }[spec.scaling]
        places = (P(batch or None, k or None), by_scale[0], P(columns or None, k or None), by_scale[1])
        operands = tuple(NamedSharding(mesh, place) for place in places)
        return mesh, jax.jit(part), NamedSharding(mesh, P(batch or None, columns or None)), operands

    # jit keeps constants, such as a kernel's plan, inside: custom_partitioning refuses them.
    function = custom_partitioning(jax.jit(local))
    function.def_partition(partition, sharding_rule="m k, i a, n k, j b -> m n")
    return function(*operands)


def _rounding_by_parts(kernel: Callable[..., Any], x: Array) -> tuple[Array, Array]:
    if _one_device():
        return kernel(x)

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        sharding, (M, K) = shapes[0].sharding, shapes[0].shape
        batch, k = (), ()
        if not isinstance(sharding, NamedSharding):
            mesh = Mesh(np.array(list(sharding.device_set)), ("all",))
        else:
            batch = dividing(axes_of(sharding, 0), M, mesh)
            k = dividing(axes_of(sharding, 1), K // BLOCK, mesh) if K % BLOCK == 0 else ()
        place = NamedSharding(mesh, P(batch or None, k or None))
        return mesh, jax.jit(kernel), (place, place), (place,)

    function = custom_partitioning(jax.jit(kernel))
    function.def_partition(partition, sharding_rule="m k -> m k, m a")
    return function(x)
