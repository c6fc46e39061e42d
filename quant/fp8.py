"""A weight of 8-bit floats as a pytree, its product, and how it is made of a dense one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8 import api, tile
from pallas_kernels.fp8.spec import E4M3, OP, Fp8Spec, check_scaling, scale_shape, w_block

_OP = "Fp8Tensor"
SCALE_DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("shape", "scaling"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tensor:
    """A weight W of shape (K, N), used as y = x W, of e4m3 codes with a scale for the tensor, a column or a block.

        W[k, n] = codes[n, k] * scales[n // rows, k // columns]

    with the arrays, of which the codes lie along K, as files and tensor cores want them,

        codes      float8_e4m3fn (N, K), finite
        scales     float32, bfloat16 or float16 (R, C), finite

    and the static facts `shape` = (K, N) and `scaling`, which says (R, C) and how many (rows, columns) share a scale:

        tensor     (1, 1)                              all
        row        (N, 1)                              a column of W, which is a row of the codes
        block      (ceil(N / 128), ceil(K / 128))      128 x 128; the last may be smaller

    In a product, x is rounded to e4m3 as well, with scales of its own (`fp8_matmul`). Transformations may stack weights
    on leading axes of both arrays and put other things in their places; so nothing is checked on construction.
    `validate` checks.
    """

    codes: Any
    scales: Any
    shape: tuple[int, int]
    scaling: str

    def validate(self) -> "Fp8Tensor":
        """The tensor itself, once its arrays are seen to be those of a weight of this shape and scaling.

        Raises ValueError, naming the array, its shape and the right one, or (outside of jit) values not finite.
        """
        check_scaling(_OP, self.scaling)
        K, N = self.shape
        wanted: dict[str, tuple[Any, tuple[int, int], tuple[str, ...]]] = {
            "codes": (self.codes, (N, K), (E4M3,)),
            "scales": (self.scales, scale_shape((N, K), w_block(self.scaling, (N, K))), SCALE_DTYPES),
        }
        for name, (array, right, dtypes) in wanted.items():
            if tuple(array.shape) != right or jnp.dtype(array.dtype).name not in dtypes:
                got = f"{name} of shape {tuple(array.shape)} and dtype {jnp.dtype(array.dtype).name}"
                raise ValueError(
                    f"{_OP}: got {got} - a weight of shape {self.shape} with scaling={self.scaling!r} needs {right} of "
                    f"{' or '.join(dtypes)}. Use quantize_fp8."
                )
            known = isinstance(array, jax.Array) and not isinstance(array, Tracer)
            if known and not bool(jnp.isfinite(array.astype(jnp.float32)).all()):
                raise ValueError(
                    f"{_OP}: {name} are not all finite - the weight would not be. Quantise finite weights."
                )
        return self

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "k n"]:
        """W (K, N): the equation above, multiplied in float32 and rounded once to `dtype`."""
        block = w_block(self.scaling, (self.shape[1], self.shape[0]))
        return _dequantized(self.codes, self.scales.astype(jnp.float32), block, jnp.dtype(dtype).name).T


_dequantized = jax.jit(tile.dequantize, static_argnums=(2, 3))


def quantize_fp8(weight: ArrayLike, scaling: str = "block") -> Fp8Tensor:
    """The weight, or every weight of a stack, in the nearest codes, the largest of each scale at e4m3's 448.

        scale = max|w| / 448        codes = w / scale, nearest, at most 448 in size

    Args:
      weight: floating (K, N), or (layers, K, N) for a stack.
      scaling: "tensor", "row" or "block", see `Fp8Tensor`.

    Raises:
      ValueError: another shape, dtype or scaling; outside of jit also weights that are not finite.
    """
    weight = jnp.asarray(weight)
    check_scaling("quantize_fp8", scaling)
    if weight.ndim not in (2, 3) or 0 in weight.shape or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"quantize_fp8: got a weight of shape {weight.shape} and dtype {weight.dtype} - must be floating (K, N), "
            "or (layers, K, N). Reshape or cast it."
        )
    tensor, finite = _quantised(weight, scaling)
    if not isinstance(finite, Tracer) and not bool(finite):
        raise ValueError("quantize_fp8: the weight has NaN or infinite entries - no code is near. Repair it.")
    return tensor


@functools.partial(jax.jit, static_argnames="scaling")
def _quantised(weight: Float[Array, "*stack k n"], scaling: str) -> tuple[Fp8Tensor, Array]:
    K, N = weight.shape[-2:]

    def one(w: Float[Array, "k n"]) -> Fp8Tensor:
        codes, scales = tile.quantize(w.T, w_block(scaling, (N, K)), E4M3)
        return Fp8Tensor(codes=codes, scales=scales, shape=(K, N), scaling=scaling)

    return (one(weight) if weight.ndim == 2 else jax.lax.map(one, weight)), jnp.isfinite(weight).all()


def fp8_matmul(
    x: ArrayLike,
    w: Fp8Tensor | ArrayLike,
    *,
    bias: ArrayLike | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch n"]:
    """y = x W + b of operands in 8 bits: x is rounded to e4m3 now, W was before or is now.

        x8[m, k] = x[m, k] / x_scale, nearest, at most 448 in size;    x_scale = max|x| / 448

    over what `scaling` says shares a scale: all of x, a row, or 128 of a row. Sums of 128 products are promoted to
    float32 where the scaling is by block.

    Args:
      x: (..., K) in bfloat16 or float32.
      w: an Fp8Tensor of shape (K, N), or floating (K, N).
      bias: (N,), cast to x's dtype.
      scaling: None: the Fp8Tensor's own, and "block" for an array.
      implementation: a name to get that implementation or an error; None: the first that applies, never an error.

    Returns:
      (..., N) in x's dtype. Differentiable by x and by a dense w as if neither had been rounded here, and by bias; not
      by codes or scales.

    Raises:
      ValueError: x or bias do not fit the weight or have a dtype that is not served; an unknown name or scaling, or one
        that is not the tensor's.
      Unsupported: the named implementation cannot serve the call; the message says why.

    Source: DeepSeek-V3, 2412.19437, section 3.3.2.

    >>> import jax.numpy as jnp
    >>> fp8_matmul(jnp.array([[2.0, 1.0]]), quantize_fp8(jnp.array([[0.5], [-1.0]])))
    Array([[0.]], dtype=float32)
    """
    x, bias = jnp.asarray(x), None if bias is None else jnp.asarray(bias)
    tensor = w if isinstance(w, Fp8Tensor) else quantize_fp8(jax.lax.stop_gradient(w), scaling or "block")
    K, N = tensor.shape
    if scaling not in (None, tensor.scaling):
        raise ValueError(f"{OP}: {scaling=} for a weight with scales by {tensor.scaling} - leave it out.")
    if x.ndim < 1 or x.shape[-1] != K:
        raise ValueError(
            f"{OP}: got x of shape {x.shape} for a weight of shape {tensor.shape} - the last dim must be the {K} rows. "
            "Bring the input features last."
        )
    if bias is not None and bias.shape != (N,):
        raise ValueError(
            f"{OP}: got bias of shape {bias.shape} for a weight of shape {tensor.shape} - must be {(N,)}. "
            "Add anything else to the result."
        )
    rows = x.reshape(-1, K)
    spec = Fp8Spec(M=rows.shape[0], K=K, N=N, scaling=tensor.scaling, dtype=x.dtype.name)
    codes, scales = jnp.asarray(tensor.codes), jnp.asarray(tensor.scales).astype(jnp.float32)
    y: Array = api.matmul(spec, rows, codes, scales, implementation=implementation)
    if not isinstance(w, Fp8Tensor):
        y = jnp.asarray(_with_slope(y, rows, jnp.asarray(w)))
    y = y.reshape(*x.shape[:-1], N)
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


@jax.custom_jvp
def _with_slope(y: Float[Array, "m n"], x: Float[Array, "m k"], w: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """y, whose derivative by w is that of x w."""
    return y


@_with_slope.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (y, x, _), (dy, _, dw) = primals, tangents
    return y, dy + (x @ dw.astype(x.dtype)).astype(y.dtype)
