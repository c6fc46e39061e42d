"""The product of activations and an 8-bit weight as arrays: checks, and chooses an implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.device import Device, current_device
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import hopper, hopper_config, hopper_quantize, native, partition, reference, tile
from pallas_kernels.fp8.derivative import straight_through, trained
from pallas_kernels.fp8.spec import E4M3, Fp8Spec, make_spec, x_block


def _on_hopper(spec: Fp8Spec, *operands: Any) -> Any:
    return hopper.matmul(spec, *operands, device=current_device())


HOPPER = Implementation(
    name="hopper",
    why_not=hopper.why_not,
    forward=partition.product(_on_hopper),
    describe=lambda spec, device: str(hopper_config.config_of(spec, device)),
)
NATIVE = Implementation(name="xla_fp8", why_not=native.why_not, forward=native.matmul)
XLA = Implementation(name="xla", why_not=reference.why_not, forward=reference.matmul)

# In order of preference.
IMPLEMENTATIONS = (NATIVE, HOPPER, XLA)


@functools.partial(jax.jit, static_argnames="scaling")
def quantize(x: Float[Array, "m k"], scaling: str) -> tuple[Float[Array, "m k"], Float[Array, "m_blocks k_blocks"]]:
    """Activations as e4m3 codes and their scales, by `tile.quantize`; by block in one pass where there is a kernel."""
    if scaling == "block" and hopper_quantize.why_not(x, current_device()) is None:
        return partition.rounding(functools.partial(hopper_quantize.quantize, dtype=E4M3))(x)
    return tile.quantize(x, x_block(scaling, (x.shape[0], x.shape[1])), E4M3)


def product(
    spec: Fp8Spec,
    x: Float[Array, "m k"],
    x_scales: Float[Array, "m_blocks k_blocks"],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "n_blocks k_blocks_of_w"],
    *,
    implementation: str | None = None,
) -> Float[Array, "m n"]:
    """y = x W^T of codes and scales. No derivative rule.

    Raises what `matmul` does.
    """
    _check(
        spec,
        make_spec(
            x,
            x_scales,
            w,
            w_scales,
            scaling=spec.scaling,
            dtype=spec.dtype,
            power_of_two=spec.power_of_two,
            fast_accumulation=spec.fast_accumulation,
        ),
    )
    chosen = dispatch.choose(IMPLEMENTATIONS, spec, current_device(), implementation)
    return jnp.zeros((0, spec.N), spec.dtype) if spec.empty else chosen.forward(spec, x, x_scales, w, w_scales)


def matmul(
    spec: Fp8Spec,
    x: Float[Array, "m k"],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "n_blocks k_blocks"],
    *,
    implementation: str | None = None,
) -> Float[Array, "m n"]:
    """y = x W^T for a weight W (N, K) of 8-bit codes; x is rounded to e4m3 as `spec.scaling` says.

    Args:
      spec: the facts of the call. spec.x_dtype is what x is rounded to.
      x: (M, K) in `spec.dtype`, bfloat16 or float32. w, w_scales: see `Fp8Spec`.
      implementation: a name to get that implementation or an error; None: the first that applies, never an error.

    Returns:
      (M, N) in `spec.dtype`. Differentiable by x, as if x had not been rounded.

    Raises:
      ValueError: the arrays are not those of the spec, or the name is unknown.
      Unsupported: the named implementation cannot serve the call; the message says why.
    """
    codes, scales = jax.eval_shape(functools.partial(quantize, scaling=spec.scaling), x)
    _check(spec, make_spec(codes, scales, w, w_scales, scaling=spec.scaling, dtype=x.dtype.name))
    chosen = dispatch.choose(IMPLEMENTATIONS, spec, current_device(), implementation)
    return jnp.zeros((0, spec.N), spec.dtype) if spec.empty else _ROUNDED[chosen.name](spec, x, w, w_scales)


def _rounded(implementation: Implementation) -> Any:
    def forward(spec: Fp8Spec, x: Any, w: Any, w_scales: Any) -> Any:
        return implementation.forward(spec, *quantize(x, spec.scaling), w, w_scales)

    return straight_through(jax.jit(forward, static_argnums=0))


_ROUNDED = {implementation.name: _rounded(implementation) for implementation in IMPLEMENTATIONS}


def _check(spec: Fp8Spec, given: Fp8Spec) -> None:
    if given != spec:
        raise ValueError(f"{spec.op}: the arrays are of {given}, not of {spec=!s} - they must agree. Use make_spec.")


def _of_codes(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any, *, fast_accumulation: bool) -> Any:
    facts: dict[str, Any] = {"scaling": "tensor", "dtype": jnp.dtype(dtype).name, "power_of_two": True}
    spec = make_spec(a, a_scale, b, b_scale, **facts, fast_accumulation=fast_accumulation)
    return product(spec, a, a_scale, b, b_scale)


_trained = trained(_of_codes)


def train_matmul(x: Float[Array, "m k"], w: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """y = x W of operands rounded to 8 bits, in both passes, for a dense weight (K, N) that is being trained.

    e4m3 with one scale a tensor, e5m2 for cotangents; where no GPU has 8-bit tensor cores, the same rounded numbers are
    multiplied exactly. y in x's dtype, bfloat16 or float32; the gradient of W in its own.
    """
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[1]), x.dtype)
    return _trained(x, w)


def explain(spec: Fp8Spec, *, device: Device | None = None, implementation: str | None = None) -> dispatch.Explanation:
    """What a call would run, and the reason against every other implementation; prints as a table.

    >>> from pallas_kernels.device import Device
    >>> spec = Fp8Spec(M=1, K=64, N=64, scaling="block", dtype="bfloat16")
    >>> explain(spec, device=Device(platform="cpu", kind="cpu")).chosen
    'xla'
    """
    return dispatch.explain(IMPLEMENTATIONS, spec, device or current_device(), implementation)
