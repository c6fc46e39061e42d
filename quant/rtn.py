"""Round to nearest: every weight to the nearest code of its group's grid, without looking at activations."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from pallas_kernels.w4a16.tile import SYMMETRIC_ZERO
from quant.recipe import Recipe
from quant.tensor import Int4Tensor, check_storable

_OP = "round_to_nearest"
_LAST = 15


def round_to_nearest(weight: ArrayLike, recipe: Recipe) -> Int4Tensor:
    """The weight, or every weight of a stack, in the codes nearest to it.

        symmetric     s = 2 max|w| / 15,                         z = 8
        asymmetric    s = (max(w, 0) - min(w, 0)) / 15,          z = round(-min(w, 0) / s)
        code = clip(round(w / s) + z, 0, 15)    with s as `recipe.scale_dtype` stores it

    over the rows of a group; the last group has the rows that are left. Zero is always a code: an all-zero group comes
    back exactly. No weight of any other is further away than half a step and the rounding of s, whatever its signs.

    Args:
      weight: floating (K, N), or (layers, K, N) for a stack, which is quantised a layer at a time.
      recipe: group, symmetry and the dtype of scales.

    Returns:
      An Int4Tensor of shape (K, N), its arrays with the stack's dim in front.

    Raises:
      ValueError: another shape or dtype; outside of jit also weights that are not finite, and scales that
        `scale_dtype` cannot hold.

    Sources: the scales of GPTQ (IST-DASLab/gptq, quant.py), but of max|w| also where no weight of a group is negative.
    """
    weight = jnp.asarray(weight)
    if weight.ndim not in (2, 3) or 0 in weight.shape or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{_OP}: got a weight of shape {weight.shape} and dtype {weight.dtype} - must be floating (K, N), or "
            "(layers, K, N). Reshape or cast it."
        )
    tensor, scales, finite = _quantise(weight, recipe)
    if not isinstance(finite, Tracer) and not bool(finite):
        raise ValueError(f"{_OP}: the weight has NaN or infinite entries - no code is near. Repair the checkpoint.")
    check_storable(scales, recipe.scale_dtype, _OP)
    return tensor


@functools.partial(jax.jit, static_argnames="recipe")
def _quantise(
    weight: Float[Array, "*stack k n"], recipe: Recipe
) -> tuple[Int4Tensor, Float[Array, "*stack groups n"], Bool[Array, ""]]:
    """(tensor, scales before they were stored, whether all weights are finite)."""
    one = functools.partial(_quantise_one, recipe=recipe)
    tensor, scales = one(weight) if weight.ndim == 2 else jax.lax.map(one, weight)
    return tensor, scales, jnp.isfinite(weight).all()


def _quantise_one(weight: Float[Array, "k n"], *, recipe: Recipe) -> tuple[Int4Tensor, Float[Array, "groups n"]]:
    K, N = weight.shape
    group = K if recipe.group is None else min(recipe.group, K)
    groups = -(-K // group)
    # Zeros change no group's range: it holds zero already.
    rows = jnp.pad(weight.astype(jnp.float32), ((0, groups * group - K), (0, 0))).reshape(groups, group, N)
    high, low = jnp.maximum(rows.max(axis=1), 0), jnp.minimum(rows.min(axis=1), 0)
    scale = jnp.maximum(high, -low) * (2 / _LAST) if recipe.symmetric else high / _LAST - low / _LAST
    scale = jnp.where(scale == 0, 1.0, scale)
    step = scale.astype(recipe.scale_dtype).astype(jnp.float32)
    step = jnp.where(step == 0, 1.0, step)  # too small to be stored, which is refused outside of jit
    zero = jnp.full_like(step, SYMMETRIC_ZERO) if recipe.symmetric else jnp.clip(jnp.round(-low / step), 0, _LAST)
    codes = jnp.clip(jnp.round(rows / step[:, None]) + zero[:, None], 0, _LAST).reshape(-1, N)[:K]
    tensor = Int4Tensor.from_codes(
        codes.astype(jnp.uint8),
        step.astype(recipe.scale_dtype),
        None if recipe.symmetric else zero.astype(jnp.uint8),
        group=recipe.group,
    )
    return tensor, scale
