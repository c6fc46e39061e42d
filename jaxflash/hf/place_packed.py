"""Stored 4-bit weights -> packed stacks on a mesh, one linear in host memory at a time.

Every process reads the codes of its own devices' columns and no others, rows whole: their order may be any. Scales and
zero points, a sixteenth of the bytes or less, are read whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped

from jaxflash.hf.linears import StackFacts, StoredLinear
from jaxflash.hf.place import OnTensor, finisher, of_layer
from pallas_kernels.w4a16.layout import TILE, padded
from pallas_kernels.w4a16.spec import group_count
from quant.tensor import Int4Tensor

_ARRAYS = ("words", "scales", "zeros", "permutation")


def abstract_stack(facts: StackFacts, layers: int) -> Int4Tensor:
    """The stack of all layers without its numbers."""
    K, N = facts.shape
    tiles = padded(N) // TILE
    per_group = (layers, tiles, group_count(K, facts.group), TILE)
    return Int4Tensor(
        words=jax.ShapeDtypeStruct((layers, tiles, padded(K) // TILE, 8, TILE), jnp.int32),
        scales=jax.ShapeDtypeStruct(per_group, facts.scale_dtype),
        zeros=jax.ShapeDtypeStruct(per_group, jnp.uint8) if facts.zeros else None,
        permutation=jax.ShapeDtypeStruct((layers, K), jnp.int32) if facts.ordered else None,
        shape=facts.shape,
        group=facts.group,
    )


def put_stack(
    linears: Sequence[StoredLinear], facts: StackFacts, shardings: Int4Tensor, on_tensor: OnTensor | None = None
) -> Int4Tensor:
    """All layers of one parameter as a stack laid out by `shardings` (of `place.layout`)."""
    shapes = abstract_stack(facts, len(linears))
    stack = jax.tree.map(lambda a, sharding: jnp.zeros(a.shape, a.dtype, device=sharding), shapes, shardings)
    for linear in linears:
        stack = _write_layer(stack, linear, facts, shardings)
        jax.block_until_ready(stack)  # before the next is read: the host holds one at a time
        for tensor in linear.tensors.values() if on_tensor is not None else ():
            on_tensor(tensor.name, tensor.nbytes)  # pyright: ignore[reportOptionalCall]
    return stack


def _write_layer(stack: Int4Tensor, linear: StoredLinear, facts: StackFacts, shardings: Int4Tensor) -> Int4Tensor:
    arrays = {name: getattr(stack, name) for name in _ARRAYS if getattr(stack, name) is not None}
    layouts = {name: of_layer(getattr(shardings, name)) for name in arrays}
    pieces = _packed_columns(linear, facts, layouts["words"], arrays["words"].shape[1:])
    written = {}
    for name, array in arrays.items():
        finish = finisher(getattr(shardings, name), array.dtype.name, False, True)
        piece = _transfer(pieces, name, array.shape[1:], layouts[name])
        written[name] = finish(array, piece, np.int32(linear.place.layer or 0))
    return Int4Tensor(**{"zeros": None, "permutation": None, **written}, shape=facts.shape, group=facts.group)


def _packed_columns(
    linear: StoredLinear, facts: StackFacts, sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[tuple[int, int], Mapping[str, Any]]:
    """(first tile of columns, one past the last) -> the packed arrays of those columns, for this process's devices."""
    grid = linear.grid()
    spans = {_span(index[0], shape[0]) for index in sharding.addressable_devices_indices_map(shape).values() if index}
    return {
        span: _pack(linear, facts, grid, slice(span[0] * TILE, min(span[1] * TILE, linear.spec.N)))
        for span in sorted(spans)
    }


def _pack(linear: StoredLinear, facts: StackFacts, grid: Any, columns: slice) -> Mapping[str, Any]:
    own = grid.columns(columns)
    tensor = Int4Tensor.from_codes(
        linear.codes(columns),
        own.scales,
        own.all_zeros() if facts.zeros else None,
        group=facts.group,
        g_idx=own.g_idx,
        scale_dtype=facts.scale_dtype,
    )
    packed = {name: np.asarray(getattr(tensor, name)) for name in ("words", "scales")}
    if facts.zeros:
        packed["zeros"] = np.asarray(tensor.zeros)
    if facts.ordered:
        in_order = tensor.permutation is None
        packed["permutation"] = np.arange(linear.spec.K, dtype=np.int32) if in_order else np.asarray(tensor.permutation)
    return packed


def _transfer(
    pieces: Mapping[tuple[int, int], Mapping[str, Any]], name: str, shape: tuple[int, ...], sharding: NamedSharding
) -> Shaped[Array, "..."]:
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or (slice(None),) * len(shape)
        if name == "permutation":  # of the rows, and so alike in all columns
            values = next(iter(pieces.values()))[name]
        else:
            values = pieces[_span(index[0], shape[0])][name][:, *index[1:]]
        shards.append(jax.device_put(values, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _span(part: slice, size: int) -> tuple[int, int]:
    start, stop, _ = part.indices(size)
    return start, stop
