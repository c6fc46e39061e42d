"""FP8 weights of a Hub folder that stay what they are: stacks of Fp8Tensors in, the same bytes out.

Every process reads the rectangles of its own devices and no others.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped

from jaxflash.config import ModelConfig
from jaxflash.hf.fp8 import check_scales, find_scales
from jaxflash.hf.names import Place, wanted
from jaxflash.hf.place import OnTensor, finisher, of_layer, transfer
from jaxflash.hf.scheme import Scheme
from jaxflash.hf.tensors import StoredTensor
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.fp8.spec import E4M3, scale_shape, w_block
from quant.formats import fp8
from quant.fp8 import Fp8Tensor


@dataclass(frozen=True, kw_only=True)
class StoredFp8:
    """One FP8 weight of a checkpoint, of which nothing has been read."""

    place: Place
    weight: StoredTensor
    scales: StoredTensor
    scaling: str

    @property
    def facts(self) -> tuple[str, str]:
        """What all layers of a parameter have in common, so that they can be one stack."""
        return self.scaling, self.scales.dtype.name

    @property
    def arrays(self) -> dict[str, StoredTensor]:
        """Those of an Fp8Tensor. Files have scales with two dims or fewer; here they have two."""
        N, K = self.weight.shape
        shape = scale_shape((N, K), w_block(self.scaling, (N, K)))

        def read(index: Any) -> Shaped[np.ndarray, "rows columns"]:
            return self.scales.read((slice(None),) * len(self.scales.shape)).reshape(shape)[index]

        return {"codes": self.weight, "scales": dataclasses.replace(self.scales, shape=shape, read=read)}


type Stacks = Mapping[tuple[str, ...], Sequence[StoredFp8]]


def take_fp8(
    config: ModelConfig, scheme: Scheme, stored: Mapping[str, StoredTensor]
) -> tuple[dict[tuple[str, ...], list[StoredFp8]], dict[str, StoredTensor], list[Callable[[], None]]]:
    """(the blocks' FP8 weights by parameter, layer by layer; the tensors that are left; checks of the scales).

    Reads nothing. Scales of activations (`input_scale`) are left out: they are found anew for every product.

    Raises:
      ValueError: a weight without its scale, or with one of another shape than its own.
      Unsupported: blocks that are not 128 x 128; a parameter whose layers are not all alike.
    """
    rest = {name: tensor for name, tensor in stored.items() if not name.endswith(".input_scale")}
    stacks: dict[tuple[str, ...], list[StoredFp8]] = {}
    for name, place in wanted(config, stored).items():
        tensor = rest.get(name)
        if tensor is None or tensor.dtype != fp8.DTYPE or place.layer is None or not place.transposed:
            continue
        scales, block = find_scales(scheme, name, tensor, rest)
        scaling = "tensor" if scales.shape in ((), (1,), (1, 1)) else "row"
        if scheme.block is not None:
            scaling = "block" if block == fp8.BLOCK else None
        if scaling is None:
            _refuse(
                f"scales for blocks of {block} of {name!r}", f"Kept are those of {fp8.BLOCK}, of rows, of a tensor."
            )
        del rest[name], rest[scales.name]
        stacks.setdefault(place.path, []).append(StoredFp8(place=place, weight=tensor, scales=scales, scaling=scaling))
    for path, layers in stacks.items():
        if len(layers) < config.n_layers or len({layer.facts for layer in layers}) > 1:
            kinds = sorted({f"{scaling} scales in {dtype}" for scaling, dtype in (layer.facts for layer in layers)})
            _refuse(
                f"{'/'.join(path)!r} in FP8 in {len(layers)} of {config.n_layers} layers ({', '.join(kinds)})",
                "All layers of a parameter are kept alike, or none.",
            )
    checks = [functools.partial(check_scales, layer.scales) for layers in stacks.values() for layer in layers]
    return stacks, rest, checks


def abstract_stack(layers: Sequence[StoredFp8]) -> Fp8Tensor:
    """The stack of all layers without its numbers."""
    first, (N, K) = layers[0], layers[0].weight.shape
    scales = scale_shape((N, K), w_block(first.scaling, (N, K)))
    return Fp8Tensor(
        codes=jax.ShapeDtypeStruct((len(layers), N, K), E4M3),
        scales=jax.ShapeDtypeStruct((len(layers), *scales), first.scales.dtype),
        shape=(K, N),
        scaling=first.scaling,
    )


def put_stack(layers: Sequence[StoredFp8], shardings: Fp8Tensor, on_tensor: OnTensor | None = None) -> Fp8Tensor:
    """All layers of one parameter as a stack laid out by `shardings` (of `place.layout`)."""
    shapes = abstract_stack(layers)
    stack = jax.tree.map(lambda a, sharding: jnp.zeros(a.shape, a.dtype, device=sharding), shapes, shardings)
    for layer in layers:
        written = {
            name: _write_layer(getattr(stack, name), tensor, getattr(shardings, name), layer.place)
            for name, tensor in layer.arrays.items()
        }
        stack = dataclasses.replace(stack, **written)
        jax.block_until_ready(stack)  # before the next is read: the host holds one at a time
        for tensor in (layer.weight, layer.scales) if on_tensor is not None else ():
            on_tensor(tensor.name, tensor.nbytes)  # pyright: ignore[reportOptionalCall]
    return stack


def _write_layer(array: Array, tensor: StoredTensor, sharding: NamedSharding, place: Place) -> Array:
    finish = finisher(sharding, array.dtype.name, False, True)
    return finish(array, transfer(tensor, of_layer(sharding)), np.int32(place.layer or 0))


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise Unsupported(
        f"load: keep_fp8=True: {reason}, which is not served. {remedy} Or take their numbers (load "
        "without, convert --to dense).",
        [("fp8", reason)],
    )
