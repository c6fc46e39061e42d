"""Sums over the mesh that are taken once a step instead of once a microbatch.

Left to itself, XLA adds up the gradients of a microbatch over all devices before it adds them to those of the ones
before it. Inside a `shard_map` that is manual over some axes, each of their devices has sums of its own.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from sharding.rules import entry_axes, entry_without

Sums = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def summed_once(sums: Sums, axes: Sequence[str], specs: PyTree) -> Sums:
    """`sums`, with what the devices of `axes` find added up after its last microbatch.

    Args:
        sums: (params, batch) -> (gradients like params, other sums), all of them sums over the batch's rows.
        axes: mesh axes over which the second dim of every array of the batch is split, outermost first, and which no
            parameter is split over. None of them: `sums` itself.
        specs: the layout of each gradient, like params. One that is split over axes of `axes` alone along some dim is
            reduce-scattered there; others are whole on all their devices.
    """
    axes = tuple(axes)
    if not axes:
        return sums
    # A partitioner that is left some axes gathers what a reduce-scatter reads over them; so all are manual there.
    scattered, elsewhere = _layouts(specs, axes, own=True), _layouts(specs, axes, own=False)

    def local(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        # As if every device had parameters of its own, or their gradients would be added up where they arise.
        grads, others = sums(jax.tree.map(lambda p: jax.lax.pcast(p, axes, to="varying"), params), batch)
        mesh = jax.sharding.get_abstract_mesh()
        rest = {axis for axis in mesh.axis_names if axis not in axes}
        add_up = jax.shard_map(
            lambda grads: jax.tree.map(_add_up, grads, scattered), in_specs=(elsewhere,), out_specs=elsewhere,
            axis_names=rest,
        )  # fmt: skip
        return add_up(grads), jax.lax.psum(others, axes)

    def _add_up(grad: jax.Array, spec: P) -> jax.Array:
        left = list(axes)
        for dim, entry in enumerate(spec):
            for axis in entry_axes(entry):
                grad = jax.lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True)
                left.remove(axis)
        return jax.lax.psum(grad, tuple(left)) if left else grad  # last: of the least that is left to send

    return jax.shard_map(local, in_specs=(P(), P(None, axes)), out_specs=(scattered, P()), axis_names=set(axes))


def _layouts(specs: PyTree, axes: Sequence[str], *, own: bool) -> PyTree:
    """The layouts with only the dims that some of `axes` split alone; or with all axes but those."""

    def part(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        others = entry_without(entry, axes)
        return (None if others else entry_axes(entry) or None) if own else others

    return jax.tree.map(lambda spec: P(*map(part, spec)), specs, is_leaf=lambda spec: isinstance(spec, P))
