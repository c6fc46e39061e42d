"""Stored tensors -> parameters laid out on a mesh, one tensor in host memory at a time.

Every process reads the slices of its own devices and no others. A slice goes to its device as the file has it; there it
is turned round, cast, and written into the stack of its layers, whose buffer is donated and so updated in place. The
host holds the slices of one tensor at most.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from jaxflash.config import DType, ModelConfig
from jaxflash.hf.names import Place
from jaxflash.hf.tensors import StoredTensor
from jaxflash.model import abstract, axis_units
from quant import split
from sharding import rules

# Told after every tensor that is read or written: its name, and its bytes in the file.
type OnTensor = Callable[[str, int], None]


def exact_dtype(stored: Mapping[str, StoredTensor]) -> DType:
    """The parameter dtype that holds every stored value as it is: bfloat16 if all are, else float32."""
    return "bfloat16" if {tensor.dtype.name for tensor in stored.values()} == {"bfloat16"} else "float32"


def layout(config: ModelConfig, mesh: Mesh, packed: Mapping[tuple[str, ...], Any] | None = None) -> tuple:
    """(shapes, shardings) of the parameters of `config` by rule on `mesh`. packed: shapes of those that are not dense.

    Raises:
      ValueError: a mesh that the model does not divide over.
    """
    _, shapes, axes = abstract(config)
    for path, tensor in (packed or {}).items():
        at(shapes, path[:-1])[path[-1]] = tensor
    units = axis_units(config)
    table = rules.fitted(mesh, units)
    split.check(shapes, axes, mesh, units, table)
    return shapes, rules.shardings(split.axes_of_arrays(shapes, axes), mesh, table)


def put_on_mesh(
    pairs: Mapping[str, tuple[Place, StoredTensor]],
    shapes: Any,
    shardings: Any,
    dtype: DType,
    on_tensor: OnTensor | None = None,
) -> dict:
    """The parameters in `pairs` (of `names.match`) as `dtype`, of the shapes and shardings that `layout` gives."""
    params: dict = {}
    for name, (place, tensor) in pairs.items():
        sharding, shape = at(shardings, place.path), at(shapes, place.path).shape
        parent = functools.reduce(lambda node, key: node.setdefault(key, {}), place.path[:-1], params)
        finish = finisher(sharding, dtype, place.transposed, place.layer is not None)
        piece = transfer(tensor, _file_sharding(sharding, place))
        if place.layer is None:
            parent[place.path[-1]] = finish(piece)
        else:
            stack = parent.pop(place.path[-1], None)
            stack = jnp.zeros(shape, dtype, device=sharding) if stack is None else stack
            parent[place.path[-1]] = finish(stack, piece, np.int32(place.layer))
        jax.block_until_ready(parent[place.path[-1]])  # before the next slice is read: the host holds one at a time
        if on_tensor is not None:
            on_tensor(name, tensor.nbytes)
    return params


def _file_sharding(sharding: NamedSharding, place: Place) -> NamedSharding:
    """The layout of one layer's tensor in the orientation of the file."""
    own = sharding if place.layer is None else of_layer(sharding)
    return NamedSharding(own.mesh, P(*reversed(tuple(own.spec)))) if place.transposed else own


def of_layer(sharding: NamedSharding) -> NamedSharding:
    """The layout of one layer of a stack."""
    return NamedSharding(sharding.mesh, P(*tuple(sharding.spec)[1:]))


def transfer(tensor: StoredTensor, sharding: NamedSharding) -> Shaped[Array, "..."]:
    """Each slice is read once and sent to all the local devices that hold it."""
    holders: dict[Any, list[jax.Device]] = {}  # pyright: ignore[reportInvalidTypeForm]
    for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
        key = tuple((part.start, part.stop) for part in index or ())
        holders.setdefault(key, []).append(device)
    shards = []
    for key, devices in holders.items():
        values = tensor.read(tuple(slice(*bounds) for bounds in key))
        shards += [jax.device_put(values, device) for device in devices]
        del values
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, shards)


@functools.lru_cache(maxsize=256)
def finisher(sharding: NamedSharding, dtype: str, transposed: bool, stacked: bool) -> Any:
    """The compiled last step for one parameter: turn round, cast, and where stacked, write into its layer."""

    def turned(piece):
        return (piece.T if transposed else piece).astype(dtype)

    if not stacked:
        return jax.jit(turned, out_shardings=sharding)

    def write(stack, piece, layer):
        return jax.lax.dynamic_update_index_in_dim(stack, turned(piece), layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The node of a nested dict under these keys."""
    return functools.reduce(lambda node, key: node[key], path, tree)
