"""FP8 weights of a Hub folder as the float32 that they stand for, rectangle by rectangle (kept_fp8: as they are).

Activations are not quantised, whatever the checkpoint was made for; scales for them (`input_scale`) are not read.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxflash.hf.scheme import Scheme
from jaxflash.hf.tensors import StoredTensor
from quant.formats import fp8

SCALES = ("weight_scale_inv", "weight_scale")


def dequantised(
    scheme: Scheme, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[Callable[[], None]]]:
    """(`stored` with the FP8 weights and their scales as float32 weights, checks of the scales). Reads nothing.

    The checks read scales and raise ValueError where one is not finite.

    Raises:
      ValueError: a weight without its scale, or with one of another shape than its own.
    """
    rest = {name: tensor for name, tensor in stored.items() if not name.endswith(".input_scale")}
    checks = []
    for name, tensor in stored.items():
        if tensor.dtype != fp8.DTYPE:
            continue
        scales, block = find_scales(scheme, name, tensor, rest)
        del rest[scales.name]
        rest[name] = dataclasses.replace(
            tensor,
            dtype=np.dtype(np.float32),
            nbytes=tensor.nbytes + scales.nbytes,
            read=functools.partial(_read, tensor, scales, block),
        )
        checks.append(functools.partial(check_scales, scales))
    return rest, checks


def find_scales(
    scheme: Scheme, name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]
) -> tuple[StoredTensor, tuple[int, int]]:
    """(the scales of the FP8 weight of that name, the rows and columns that share one). Reads nothing.

    Raises ValueError where there are none, or none of a shape that goes with the weight's.
    """
    module = name.removesuffix("weight")
    found = [module + suffix for suffix in SCALES if module + suffix in stored]
    if len(found) != 1 or len(tensor.shape) != 2:
        raise ValueError(
            f"load: {name!r} of shape={tensor.shape} has {len(found)} scales - an FP8 weight is a matrix with one "
            f"of {' and '.join(module + suffix for suffix in SCALES)}. Fetch the checkpoint again."
        )
    scales = stored[found[0]]
    block = fp8.scale_block((tensor.shape[0], tensor.shape[1]), scales.shape, scheme.block)
    if block is None or scales.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"load: {scales.name!r} has shape={scales.shape} and dtype={scales.dtype.name!r} for a weight of shape "
            f"{tensor.shape} and {scheme.block=} - one scale for the tensor, one a row, or one a block. Fetch "
            "both again."
        )
    return scales, block


def _read(tensor: StoredTensor, scales: StoredTensor, block: tuple[int, int], index: Any) -> Float32[np.ndarray, "n k"]:
    rows, columns = (part.indices(size) for part, size in zip(index, tensor.shape, strict=True))
    return fp8.dequantize(tensor.read(index), _whole(scales), block=block, start=(rows[0], columns[0]))


def check_scales(scales: StoredTensor) -> None:
    """Reads the scales; raises ValueError where one is not finite."""
    bad = int((~np.isfinite(_whole(scales).astype(np.float32))).sum())
    if bad:
        raise ValueError(
            f"load: {scales.name!r} has {bad} scales that are NaN or infinite - the weight would be. Fetch the "
            "checkpoint again."
        )


def _whole(tensor: StoredTensor) -> Any:
    return tensor.read((slice(None),) * len(tensor.shape))
