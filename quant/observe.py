"""What a quantiser has to know of a linear layer's inputs, as sums over tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

_OP = "observe"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Sums over the tokens x of a calibration set, which add up over batches:

        gram = sum x x^T  (K, K)        abs_sum = sum |x|  (K,)        count = number of tokens, int32
        drift = sum x (r - x)^T  (K, K), r being what the layer reads in the dense model; None where r was not given

    float32 (float64 of float64 inputs). Transformations may put layers or experts on leading axes of all of them.
    """

    gram: Any
    abs_sum: Any
    count: Any
    drift: Any = None

    @classmethod
    def empty(cls, features: int, *, drift: bool = False) -> "Statistics":
        """Of no tokens."""
        return cls(
            gram=jnp.zeros((features, features), jnp.float32),
            abs_sum=jnp.zeros(features, jnp.float32),
            count=jnp.zeros((), jnp.int32),
            drift=jnp.zeros((features, features), jnp.float32) if drift else None,
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        return jax.tree.map(jnp.add, self, other)

    def divided(self, scale: Float[Array, " k"]) -> "Statistics":
        """Those of the inputs x / scale, which a layer sees once a scale is folded into the weights before it."""

        def both(products: Array) -> Array:
            return products / scale[:, None] / scale[None, :]

        drift = None if self.drift is None else both(self.drift)
        return Statistics(gram=both(self.gram), abs_sum=self.abs_sum / scale, count=self.count, drift=drift)


def observe(x: ArrayLike, mask: ArrayLike | None = None, reference: ArrayLike | None = None) -> Statistics:
    """Statistics of one batch of inputs. 16-bit products are exact and summed in float32.

    Args:
      x: (..., K) floating.
      mask: (...) bool, False for padding, which is not counted, whatever it holds; None: every token counts.
      reference: (..., K) floating, what the layer reads of the same tokens in the dense model: `drift` is summed too,
        in the memory of the gram again, by a product in float32, which differences of 16-bit numbers need.

    Raises:
      ValueError: x is not floating or has no features, the mask is not bool or has not x's leading dims, or the
        reference is not floating or has not x's shape.

    >>> import jax.numpy as jnp
    >>> observe(jnp.array([[1.0, 2.0], [9.0, 9.0]]), jnp.array([True, False])).gram
    Array([[1., 2.],
           [2., 4.]], dtype=float32)
    """
    x = jnp.asarray(x)
    if x.ndim < 1 or x.shape[-1] < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{_OP}: got x of shape {x.shape} and dtype {x.dtype} - must be floating (..., K). Bring the features last."
        )
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{_OP}: got a mask of shape {mask.shape} and dtype {mask.dtype} for x of shape {x.shape} - must be "
                f"bool {x.shape[:-1]}. Give one entry a token."
            )
        x = jnp.where(mask[..., None], x, 0)
    rows = x.reshape(-1, x.shape[-1])
    wide = jnp.promote_types(x.dtype, jnp.float32)
    drift = None
    if reference is not None:
        reference = jnp.asarray(reference)
        if reference.shape != x.shape or not jnp.issubdtype(reference.dtype, jnp.floating):
            raise ValueError(
                f"{_OP}: got a reference of shape {reference.shape} and dtype {reference.dtype} for x of shape "
                f"{x.shape} - must be floating, of that shape. Give the same tokens' inputs in the dense model."
            )
        moved = reference.astype(wide) - x.astype(wide)  # before the sum: two grams would cancel
        moved = moved if mask is None else jnp.where(mask[..., None], moved, 0)
        moved = moved.reshape(rows.shape)
        drift = jnp.einsum("tk,tl->kl", rows.astype(wide), moved, precision="highest")
    return Statistics(
        gram=jnp.einsum("tk,tl->kl", rows, rows, preferred_element_type=wide, precision="highest"),
        abs_sum=jnp.abs(rows).sum(axis=0, dtype=wide),
        count=jnp.asarray(len(rows), jnp.int32) if mask is None else mask.sum(dtype=jnp.int32),
        drift=drift,
    )
