"""Round to nearest: every weight to the nearest code of its group's grid, without looking at activations."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from quant.grid import nearest
from quant.recipe import Recipe
from quant.tensor import Int4Tensor, check_storable

_OP = "round_to_nearest"


def round_to_nearest(weight: ArrayLike, recipe: Recipe, clip: ArrayLike | None = None) -> Int4Tensor:
    """The weight, or every weight of a stack, in the codes nearest to it.

        symmetric     s = 2 max|w| / 15,                         z = 8
        asymmetric    s = (max(w, 0) - min(w, 0)) / 15,          z = round(-min(w, 0) / s)
        code = clip(round(w / s) + z, 0, 15)    with s as `recipe.scale_dtype` stores it

    over the rows of a group; the last group has the rows that are left. Zero is always a code: an all-zero group comes
    back exactly. No weight of any other is further away than half a step and the rounding of s, whatever its signs,
    unless `clip` or `recipe.mse` narrow the range.

    Args:
      weight: floating (K, N), or (layers, K, N) for a stack, which is quantised a layer at a time.
      recipe: group, symmetry and the dtype of scales.
      clip: limits of |w| (groups, N), as `quant.awq.awq_clip` finds them, for the range of every group; stacked as the
        weight is.

    Returns:
      An Int4Tensor of shape (K, N), its arrays with the stack's dim in front.

    Raises:
      ValueError: another shape or dtype, or bits other than 4; outside of jit also weights that are not finite, and
        scales that `scale_dtype` cannot hold.

    Sources: the scales of GPTQ (IST-DASLab/gptq, quant.py), but of max|w| also where no weight of a group is negative.
    """
    weight, clip = jnp.asarray(weight), None if clip is None else jnp.asarray(clip)
    recipe.check_stored(_OP)
    if weight.ndim not in (2, 3) or 0 in weight.shape or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{_OP}: got a weight of shape {weight.shape} and dtype {weight.dtype} - must be floating (K, N), or "
            "(layers, K, N). Reshape or cast it."
        )
    check_clip(_OP, clip, weight.shape, recipe)
    tensor, scales, finite = _quantise(weight, clip, recipe)
    if not isinstance(finite, Tracer) and not bool(finite):
        raise ValueError(f"{_OP}: the weight has NaN or infinite entries - no code is near. Repair the checkpoint.")
    check_storable(scales, recipe.scale_dtype, _OP)
    return tensor


def check_clip(op: str, clip: Array | None, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Refuses limits that are not one a group of a weight of that shape."""
    *stack, K, N = shape
    wanted = (*stack, -(-K // recipe.group_rows(K)), N)
    if clip is not None and clip.shape != wanted:
        raise ValueError(
            f"{op}: got clip of shape {clip.shape} for a weight of shape {shape} in groups of {recipe.group_rows(K)} "
            f"rows - must be {wanted}. Use quant.awq.awq_clip with this recipe."
        )


@functools.partial(jax.jit, static_argnames="recipe")
def _quantise(
    weight: Float[Array, "*stack k n"], clip: Float[Array, "*stack groups n"] | None, recipe: Recipe
) -> tuple[Int4Tensor, Float[Array, "*stack groups n"], Bool[Array, ""]]:
    """(tensor, scales before they were stored, whether all weights are finite)."""

    def one(operands):
        codes, scales = nearest(operands[0], recipe, operands[1])
        return codes.pack(), scales

    tensor, scales = one((weight, clip)) if weight.ndim == 2 else jax.lax.map(one, (weight, clip))
    return tensor, scales, jnp.isfinite(weight).all()
