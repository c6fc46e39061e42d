"""Round to nearest: every weight to the nearest code of its group's grid, without looking at activations."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from quant.grid import Codes, nearest
from quant.recipe import Recipe
from quant.tensor import Int4Tensor, check_storable

_OP = "round_to_nearest"


def round_to_nearest(weight: ArrayLike, recipe: Recipe) -> Int4Tensor:
    """The weight, or every weight of a stack, in the codes nearest to it.

        symmetric     s = 2 max|w| / 15,                         z = 8
        asymmetric    s = (max(w, 0) - min(w, 0)) / 15,          z = round(-min(w, 0) / s)
        code = clip(round(w / s) + z, 0, 15)    with s as `recipe.scale_dtype` stores it

    over the rows of a group; the last group has the rows that are left. Zero is always a code: an all-zero group comes
    back exactly. No weight of any other is further away than half a step and the rounding of s, whatever its signs.

    Args:
      weight: floating (K, N), or (layers, K, N) for a stack, which is quantised a layer at a time.
      recipe: group, symmetry and the dtype of scales. bits must be 4; `nearest_codes` takes others.

    Returns:
      An Int4Tensor of shape (K, N), its arrays with the stack's dim in front.

    Raises:
      ValueError: another shape or dtype, or bits other than 4; outside of jit also weights that are not finite, and
        scales that `scale_dtype` cannot hold.

    Sources: the scales of GPTQ (IST-DASLab/gptq, quant.py), but of max|w| also where no weight of a group is negative.
    """
    recipe.check_stored(_OP)
    return _checked(weight, recipe, Codes.pack)


def nearest_codes(weight: ArrayLike, recipe: Recipe) -> Codes:
    """`round_to_nearest` for 2, 3, 4 and 8 bits, of one weight (K, N) or a stack, as codes that are not packed."""
    return _checked(weight, recipe, _as_they_are)


def nearest_stored(weight: ArrayLike, recipe: Recipe) -> Any:
    """`Codes.stored` of the nearest codes of one weight or a stack, of which one at a time is alive unpacked."""
    return _checked(weight, recipe, Codes.stored)


def check_weight(op: str, weight: Array) -> None:
    """Refuses what is no weight, nor a stack of them."""
    if weight.ndim not in (2, 3) or 0 in weight.shape or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{op}: got a weight of shape {weight.shape} and dtype {weight.dtype} - must be floating (K, N), or "
            "(layers, K, N). Reshape or cast it."
        )


def _as_they_are(codes: Codes) -> Codes:
    return codes


def _checked(weight: ArrayLike, recipe: Recipe, finish: Callable[[Codes], Any]) -> Any:
    weight = jnp.asarray(weight)
    check_weight(_OP, weight)
    done, scales, finite = _quantise(weight, recipe, finish)
    if not isinstance(finite, Tracer) and not bool(finite):
        raise ValueError(f"{_OP}: the weight has NaN or infinite entries - no code is near. Repair the checkpoint.")
    check_storable(scales, recipe.scale_dtype, _OP)
    return done


@functools.partial(jax.jit, static_argnames=("recipe", "finish"))
def _quantise(
    weight: Float[Array, "*stack k n"], recipe: Recipe, finish: Callable[[Codes], Any]
) -> tuple[Any, Float[Array, "*stack groups n"], Bool[Array, ""]]:
    """(what `finish` makes of the codes, scales before they were stored, whether all weights are finite)."""

    def one(matrix):
        codes, scales = nearest(matrix, recipe)
        return finish(codes), scales

    done, scales = one(weight) if weight.ndim == 2 else jax.lax.map(one, weight)
    return done, scales, jnp.isfinite(weight).all()
