"""Packed weights whose padding holds what nobody may see."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.w4a16 import layout
from pallas_kernels.w4a16.cases import Case


def hostile_padding(case: Case) -> tuple[Any, Any, Any]:
    """The words, scales and zeros of an asymmetric case with other codes, largest zero points and huge finite scales
    past K and N."""
    spec, (_, codes, _, _), (_, _, scales, packed) = case.spec(), case.operands(), case.packed()
    zeros = layout.zeros_by_column(packed)
    shape = spec.padded_K, spec.padded_N
    hostile = np.random.default_rng(1).integers(0, 16, shape, dtype=np.uint8)
    hostile[: case.K, : case.N] = codes
    beyond = (np.arange(spec.groups)[None, :, None] * case.group >= case.K) | (
        np.arange(spec.padded_N).reshape(-1, 1, layout.TILE) >= case.N
    )
    return (
        layout.pack(jnp.asarray(hostile)),
        jnp.where(beyond, 6e4, scales).astype(scales.dtype),
        layout.pack_zeros(layout.unpack_columns(jnp.where(beyond, 15, zeros).astype(jnp.uint8), spec.padded_N)),
    )
