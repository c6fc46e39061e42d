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

    float32 (float64 of float64 inputs). Transformations may put layers or experts on leading axes of all three.
    """

    gram: Any
    abs_sum: Any
    count: Any

    @classmethod
    def empty(cls, features: int) -> "Statistics":
        """Of no tokens."""
        return cls(
            gram=jnp.zeros((features, features), jnp.float32),
            abs_sum=jnp.zeros(features, jnp.float32),
            count=jnp.zeros((), jnp.int32),
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        return jax.tree.map(jnp.add, self, other)

    def divided(self, scale: Float[Array, " k"]) -> "Statistics":
        """Those of the inputs x / scale, which a layer sees once a scale is folded into the weights before it."""
        return Statistics(
            gram=self.gram / scale[:, None] / scale[None, :], abs_sum=self.abs_sum / scale, count=self.count
        )


def observe(x: ArrayLike, mask: ArrayLike | None = None) -> Statistics:
    """Statistics of one batch of inputs. 16-bit products are exact and summed in float32.

    Args:
      x: (..., K) floating.
      mask: (...) bool, False for padding, which is not counted, whatever it holds; None: every token counts.

    Raises:
      ValueError: x is not floating or has no features, or the mask is not bool or has not x's leading dims.

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
    return Statistics(
        gram=jnp.einsum("tk,tl->kl", rows, rows, preferred_element_type=wide, precision="highest"),
        abs_sum=jnp.abs(rows).sum(axis=0, dtype=wide),
        count=jnp.asarray(len(rows), jnp.int32) if mask is None else mask.sum(dtype=jnp.int32),
    )
