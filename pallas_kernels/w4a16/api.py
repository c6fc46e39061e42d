"""The product of activations and a packed 4-bit weight as arrays: checks, and chooses an implementation."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import dispatch, tuned
from pallas_kernels.device import Device, current_device
from pallas_kernels.dispatch import Implementation
from pallas_kernels.w4a16 import hopper, hopper_large, reference
from pallas_kernels.w4a16.derivative import differentiable
from pallas_kernels.w4a16.partition import partitioned
from pallas_kernels.w4a16.spec import W4A16Spec, make_spec

TUNED = Path(__file__).with_name("tuned.json")  # written by pallas_kernels.bench_w4a16
KERNELS: dict[str, Any] = {"hopper": hopper, "hopper_large": hopper_large}


def config_of(name: str, spec: W4A16Spec, device: Device) -> Any:
    """The configuration of a kernel that was measured to be best for such a weight and the nearest number of rows, if
    the call can run with it; else the kernel's default, the best by its model of the time."""
    kernel = KERNELS[name]
    found = tuned.lookup(TUNED, device, name, {"K": spec.K, "N": spec.N}, spec.M)
    config = None if found is None else kernel.Config(**found)
    return config if config in kernel.candidates(spec, device) else kernel.default(spec, device)


def _run(name: str, spec: W4A16Spec, *operands: Any) -> Any:
    device = current_device()
    return KERNELS[name].matmul(spec, *operands, config=config_of(name, spec, device), device=device)


def _fitting(spec: W4A16Spec, *operands: Any) -> Any:
    """By what applies to the sizes that one device has, once vmap and the mesh are known; never an error."""
    name = next((name for name in KERNELS if KERNELS[name].why_not(spec, current_device()) is None), None)
    return reference.matmul(spec, *operands) if name is None else _run(name, spec, *operands)


def _kernel(name: str, **limits: int) -> Implementation:
    return Implementation(
        name=name,
        why_not=KERNELS[name].why_not,
        forward=differentiable(partitioned(functools.partial(_run, name), **limits), exact=reference.matmul),
        describe=lambda spec, device: str(config_of(name, spec, device)),
    )


HOPPER = _kernel("hopper", most_rows=hopper.MOST_ROWS)
HOPPER_LARGE = _kernel("hopper_large")
XLA = Implementation(
    name="xla", why_not=reference.why_not, forward=differentiable(reference.matmul, exact=reference.matmul)
)

# In order of preference.
IMPLEMENTATIONS = (HOPPER, HOPPER_LARGE, XLA)
_FITTING = differentiable(partitioned(_fitting), exact=reference.matmul)


def matmul(
    spec: W4A16Spec,
    x: Float[Array, "m k"],
    words: Int32[Array, "column_tiles row_tiles 8 64"],
    scales: Float[Array, "column_tiles groups 64"],
    zeros: UInt8[Array, "column_tiles groups 64"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "m n"]:
    """y = x W for a weight W (K, N) of packed 4-bit codes.

        W[k, n] = (code[k, n] - zero[k // group, n]) * scale[k // group, n],    zero = 8 where there are no zeros

    Args:
      spec: the facts of the call; `spec.make_spec` reads them off the arrays.
      x: (M, K) in bfloat16, float16 or float32.
      words, scales, zeros: the packed weight, as `layout` orders it; scales bfloat16 or float16, zeros uint8. Padding
        past K and N may be any weight that is finite in x's dtype: kernels multiply it by zeros.
      implementation: a name to get that implementation or an error; None: the first that applies, never an error.
        A kernel serves any number of rows: at 4096 it takes 0.53 to 0.90 of the time of dequantising once for cuBLAS
        (w4a16_h200.jsonl). Under vmap and over a mesh it is that for the rows and columns of one device.

    Returns:
      (M, N) in x's dtype. W is rounded once, to x's dtype or not at all (never less exactly); sums are float32.
      Differentiable by x and scales, to any order; no 16-bit copy of W is kept for it.

    Raises:
      ValueError: the arrays are not those of the spec, or the name is unknown.
      Unsupported: the named implementation cannot serve the call; the message says why.
    """
    given = make_spec(x, words, scales, zeros, shape=(spec.K, spec.N), group=spec.group)
    if given != spec:
        raise ValueError(f"{spec.op}: the arrays are of {given}, not of {spec=!s} - they must agree. Use make_spec.")
    chosen = dispatch.choose(IMPLEMENTATIONS, spec, current_device(), implementation)
    if spec.empty:
        return jnp.zeros((spec.M, spec.N), spec.dtype)
    forward = _FITTING if implementation is None and chosen is not XLA else chosen.forward
    return forward(spec, x, words, scales, zeros)


def explain(
    spec: W4A16Spec, *, device: Device | None = None, implementation: str | None = None
) -> dispatch.Explanation:
    """What a call would run, and the reason against every other implementation; prints as a table.

    >>> from pallas_kernels.device import Device
    >>> spec = W4A16Spec(M=1, K=64, N=64, group=32, zeros=False, dtype="bfloat16", scale_dtype="bfloat16")
    >>> explain(spec, device=Device(platform="cpu", kind="cpu")).chosen
    'xla'
    """
    return dispatch.explain(IMPLEMENTATIONS, spec, device or current_device(), implementation)
