"""The product in plain jax.numpy: exact on every backend, but for sums in float32.

Both operands are brought to what they stand for in float32 and multiplied as such: where a scale changes along K, no
narrower dtype holds that.
"""

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

from pallas_kernels.device import Device
from pallas_kernels.fp8 import tile
from pallas_kernels.fp8.spec import Fp8Spec, w_block, x_block


def matmul(
    spec: Fp8Spec,
    x: Float[Array, "m k"],
    x_scales: Float[Array, "m_blocks k_blocks"],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "n_blocks k_blocks_of_w"],
) -> Float[Array, "m n"]:
    """y = x W^T, rounded once, to `spec.dtype`."""
    x = tile.dequantize(x, x_scales, x_block(spec.scaling, (spec.M, spec.K)))
    w = tile.dequantize(w, w_scales, w_block(spec.scaling, (spec.N, spec.K)))
    return jnp.matmul(x, w.T, precision=Precision.HIGHEST).astype(spec.dtype)


def why_not(spec: Fp8Spec, device: Device) -> str | None:
    """Nothing speaks against it."""
    return None
