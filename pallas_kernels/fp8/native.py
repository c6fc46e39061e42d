"""The product by XLA's own multiplication of 8-bit operands (cuBLASLt, or Triton where its autotuner found it faster).

Both operands lie along K: with another order XLA is 2 to 10 times slower (H200, jax 0.11.2). It shards as any dot does.
"""

import functools

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

from pallas_kernels.device import Device
from pallas_kernels.fp8.spec import E5M2, Fp8Spec

_ALONG_K = (((1,), (1,)), ((), ()))


def matmul(
    spec: Fp8Spec,
    x: Float[Array, "m k"],
    x_scales: Float[Array, "m_blocks 1"],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "n_blocks 1"],
) -> Float[Array, "m n"]:
    """y = x W^T, rounded once where scales are powers of two; else rounded, times the scales, rounded again.

    With `fast_accumulation` sums are the tensor core's own, in fewer bits than float32 has; without, they are promoted
    now and then, which XLA has cuBLASLt do for a product of the highest precision. A separate multiplication by the
    scales takes half as long again at K = 2048 (H200, 2026-11-30: 1011 us for 704).
    """
    precision = Precision.DEFAULT if spec.fast_accumulation else Precision.HIGHEST
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=_ALONG_K,
        precision=precision,
        preferred_element_type=jnp.dtype(spec.dtype),
    )
    if spec.power_of_two and spec.scaling == "tensor":
        # XLA would make one product, of 16 bits, of small ones that share x, as k's and v's of "1b" do. With scales of
        # their own they share nothing in its eyes.
        x_scales, w_scales = jax.lax.optimization_barrier((x_scales, w_scales))
        # XLA's name for a product of codes with one scale each. bfloat16 holds these values, so nothing is rounded.
        a, b = (codes.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for codes, s in ((x, x_scales), (w, w_scales)))
        return product(a, b)
    y = product(x, w)
    return (y.astype(jnp.float32) * (x_scales * w_scales.T)).astype(spec.dtype)


def why_not(spec: Fp8Spec, device: Device) -> str | None:
    """The first limit that the call exceeds."""
    if device.platform != "gpu" or device.compute_capability is None or device.compute_capability < (8, 9):
        return f"needs an NVIDIA GPU with 8-bit tensor cores (compute capability 8.9 or more), not {device}"
    if spec.scaling == "block":
        return "has no scales that change along K"
    if spec.x_dtype == spec.w_dtype == E5M2:
        return "takes float8_e5m2 for one operand, not for both"
    if spec.dtype != "bfloat16":
        return f"writes bfloat16 results, not {spec.dtype}"
    return None
