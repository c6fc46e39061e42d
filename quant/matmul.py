"""Products of activations and weights, whatever the weight is made of. The one place that looks at a weight's type."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.fp8.api import train_matmul
from pallas_kernels.w4a16 import api
from pallas_kernels.w4a16.spec import OP, make_spec
from quant.fp8 import Fp8Tensor, fp8_matmul
from quant.lora import LoraTensor, low_rank_product
from quant.tensor import Int4Tensor

Precision = Literal["compute_dtype", "fp8"]


def matmul(
    x: Float[Array, "*batch k"],
    weight: Float[Array, "k n"] | Int4Tensor | Fp8Tensor | LoraTensor,
    bias: Float[Array, " n"] | None = None,
    *,
    precision: Precision = "compute_dtype",
) -> Float[Array, "*batch n"]:
    """y = x W + b in x's dtype, accumulated in float32 by the hardware. Weight and bias are cast to x's dtype.

    Args:
      x: (..., K) floating.
      weight: (K, N), an array, an Int4Tensor, an Fp8Tensor, for which x is rounded to 8 bits as well, or any of them
        with an adapter, a LoraTensor.
      bias: (N,) or None.
      precision: "fp8" rounds x, a dense weight and cotangents to 8 bits (`pallas_kernels.fp8.derivative`).

    Raises:
      ValueError: what `w4a16_matmul` and `fp8_matmul` refuse.
    """
    if isinstance(weight, LoraTensor):
        return matmul(x, jax.lax.stop_gradient(weight.base), bias, precision=precision) + low_rank_product(x, weight)
    if isinstance(weight, Int4Tensor):
        return w4a16_matmul(x, weight, bias=bias)
    if isinstance(weight, Fp8Tensor):
        return fp8_matmul(x, weight, bias=bias)
    if precision != "compute_dtype":
        y = train_matmul(x.reshape(-1, x.shape[-1]), weight)
        return _add(y.reshape(*x.shape[:-1], weight.shape[-1]), bias)
    return _add(x @ weight.astype(x.dtype), bias)


def w4a16_matmul(
    x: ArrayLike, w: Int4Tensor, *, bias: ArrayLike | None = None, implementation: str | None = None
) -> Float[Array, "*batch n"]:
    """y = x W + b with a weight of packed 4-bit codes, which are all that is read of it.

        W[k, n] = (code[k, n] - zero[group of k, n]) * scale[group of k, n]

    Args:
      x: (..., K) in bfloat16, float16 or float32.
      w: an Int4Tensor of shape (K, N). Where its rows are in activation order, x is put into that order, once.
      bias: (N,), cast to x's dtype.
      implementation: a name to get that implementation or an error; None: the first that applies, never an error.

    Returns:
      (..., N) in x's dtype, sums in float32. Differentiable by x (dx = dy W^T of the packed weight), scales, bias.

    Raises:
      ValueError: x or bias do not fit the weight, or have a dtype that is not served; or the name is unknown.
      Unsupported: the named implementation cannot serve the call; the message says why.

    >>> import jax.numpy as jnp
    >>> w = Int4Tensor.from_codes(jnp.array([[9], [6]], "uint8"), jnp.array([[0.5]], "bfloat16"), group=None)
    >>> w4a16_matmul(jnp.array([[2.0, 1.0]]), w)
    Array([[0.]], dtype=float32)
    """
    x, (K, N) = jnp.asarray(x), w.shape
    bias = None if bias is None else jnp.asarray(bias)
    if x.ndim < 1 or x.shape[-1] != K:
        raise ValueError(
            f"{OP}: got x of shape {x.shape} for a weight of shape {w.shape} - the last dim must be the {K} rows. "
            "Bring the input features last."
        )
    if bias is not None and bias.shape != (N,):
        raise ValueError(
            f"{OP}: got bias of shape {bias.shape} for a weight of shape {w.shape} - must be {(N,)}. "
            "Add anything else to the result."
        )
    rows = x.reshape(-1, K)
    if w.permutation is not None:
        rows = jnp.take(rows, w.permutation, axis=1)
    packed = jax.tree.map(jnp.asarray, (w.words, w.scales, w.zeros))
    spec = make_spec(rows, *packed, shape=w.shape, group=w.group)
    y = api.matmul(spec, rows, *packed, implementation=implementation)
    return _add(y.reshape(*x.shape[:-1], N), bias)


def holds_packed(params: Any) -> bool:
    """Whether any weight of a model is packed."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Int4Tensor))
    return any(isinstance(leaf, Int4Tensor) for leaf in leaves)


def _add(y: Float[Array, "*batch n"], bias: Float[Array, " n"] | None) -> Float[Array, "*batch n"]:
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
