"""The grids that weights are rounded to: a scale and a zero point for every group of rows of a column.

    value = (code - zero) * scale,    code = clip(round(value / scale) + zero, 0, 2^bits - 1)

Every method chooses its codes by these functions; they differ in the values that they round.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.w4a16.tile import repeated
from quant.recipe import STORED_BITS, Recipe
from quant.tensor import Int4Tensor

# Ranges that least squares try: 1, 0.99, ... 0.21 of the whole (IST-DASLab/gptq, quant.py).
_SHRINKS, _SHRINK_STEP = 80, 0.01


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "zeros", "order"),
    meta_fields=("group", "bits"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """A quantised weight of any bits, not packed: what every method makes, and what stands for one in simulation.

        V[i, n] = (codes[i, n] - zeros[i // group, n]) * scales[i // group, n]        W[order[i], n] = V[i, n]

    codes uint8 (K, N); scales (G, N) in the dtype that stores them; zeros uint8 (G, N), or None: symmetric; order int32
    (K,), or None: the identity; group rows a group, or None: the whole column.
    """

    codes: Any
    scales: Any
    zeros: Any
    order: Any
    group: int | None
    bits: int

    def dequantize(self) -> Float[Array, "k n"]:
        """W (K, N) float32 in the order of its rows."""
        values = decode(self.codes, *self._grids())
        return values if self.order is None else jnp.zeros_like(values).at[self.order].set(values)

    def clipped(self, weight: Float[Array, "k n"]) -> Float[Array, ""]:
        """The share of these weights beyond their grid, by more than half a step and the rounding of scales."""
        scale, zero = self._grids()
        last = 2**self.bits - 1
        margin = 0.5 + last * float(jnp.finfo(self.scales.dtype).eps)
        place = (weight if self.order is None else weight[self.order]) / scale + zero
        return ((place < -margin) | (place > last + margin)).mean(dtype=jnp.float32)

    def _grids(self) -> tuple[Float[Array, "_ n"], Float[Array, "_ n"]]:
        """(scale, zero) float32 of every row, or one row of them for all."""
        K = self.codes.shape[0]
        zeros = jnp.full_like(self.scales, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros
        scale, zero = (repeated(a.astype(jnp.float32), self.group or K, K, axis=0) for a in (self.scales, zeros))
        return scale, zero

    def stored(self) -> Int4Tensor | Float[Array, "k n"]:
        """What takes the weight's place in a model: packed where that is 4 bits, else the numbers."""
        return self.pack() if self.bits == STORED_BITS else self.dequantize()

    def pack(self) -> Int4Tensor:
        """The weight as it is stored. The caller has seen to it that `bits` is 4 (`Recipe.check_stored`)."""
        tensor = Int4Tensor.from_codes(self.codes, self.scales, self.zeros, group=self.group)
        return tensor if self.order is None else dataclasses.replace(tensor, permutation=self.order)


def as_codes(weight: Int4Tensor | Codes) -> Codes:
    """The same weight, unpacked."""
    if isinstance(weight, Codes):
        return weight
    codes, scales, zeros = weight.codes()
    group = None if len(scales) == 1 else weight.group
    return Codes(codes=codes, scales=scales, zeros=zeros, order=weight.permutation, group=group, bits=STORED_BITS)


def where(condition: Bool[Array, "*n"], a: Codes, b: Codes) -> Codes:
    """Of every column, or of all, a or b; columns have one order of rows."""

    def pick(x: Array, y: Array) -> Array:
        return jnp.where(jnp.broadcast_to(condition, x.shape), x, y)

    arrays = jax.tree.map(pick, (a.codes, a.scales, a.zeros), (b.codes, b.scales, b.zeros))
    order = a.order if condition.ndim else jax.tree.map(pick, a.order, b.order)
    return dataclasses.replace(a, **dict(zip(("codes", "scales", "zeros"), arrays, strict=True)), order=order)


def encode(
    values: Float[Array, "*w"], scale: Float[Array, "*s"], zero: Float[Array, "*s"], recipe: Recipe
) -> Float[Array, "*w"]:
    """The nearest code, a whole number in floating point; scale and zero broadcast."""
    return jnp.clip(jnp.round(values / scale) + zero, 0, recipe.last)


def decode(codes: Num[Array, "*w"], scale: Float[Array, "*s"], zero: Float[Array, "*s"]) -> Float[Array, "*w"]:
    """The value of a code."""
    return (codes.astype(scale.dtype) - zero) * scale


def grouped(rows: Float[Array, "k n"], group: int) -> Float[Array, "groups group n"]:
    """Rows by groups, the last one filled with zeros, which change no group's range: it holds zero already."""
    K, N = rows.shape
    groups = -(-K // group)
    return jnp.pad(rows, ((0, groups * group - K), (0, 0))).reshape(groups, group, N)


def fit(
    rows: Float[Array, "*groups group n"],
    recipe: Recipe,
    importance: Float[Array, "*groups group"] | None = None,
) -> tuple[Float[Array, "*groups n"], Float[Array, "*groups n"], Float[Array, "*groups n"]]:
    """(scale as it is stored, zero, scale before it was stored) for each group of rows.

        symmetric     s = 2 max|w| / last,                         z = 2^(bits-1)
        asymmetric    s = (max(w, 0) - min(w, 0)) / last,          z = round(-min(w, 0) / s)

    of the whole range; with `importance` of its share p in 1, .99, ... .21 that has the least
    sum of importance (w - its value)^2. Zero is always a code.
    """
    low, high = ends(rows)
    if importance is None:
        return of_range(low, high, recipe)
    unit = jnp.maximum(high, -low)[..., None, :]
    unit = jnp.where(unit == 0, 1.0, unit)  # so that no square overflows

    def attempt(i, best):
        share = 1 - _SHRINK_STEP * i
        grid = of_range(low * share, high * share, recipe)
        scale, zero = (a[..., None, :] for a in grid[:2])
        delta = (decode(encode(rows, scale, zero, recipe), scale, zero) - rows) / unit
        error = (importance[..., None] * delta**2).sum(axis=-2)
        better = error < best[1]
        return jax.tree.map(functools.partial(jnp.where, better), (grid, error), best)

    whole = of_range(low, high, recipe)
    return jax.lax.fori_loop(0, _SHRINKS, attempt, (whole, jnp.full_like(high, jnp.inf)))[0]


def ends(rows: Float[Array, "*groups group n"]) -> tuple[Float[Array, "*groups n"], Float[Array, "*groups n"]]:
    """(low, high) of the range of each group, which zero is always in."""
    return jnp.minimum(rows.min(axis=-2), 0), jnp.maximum(rows.max(axis=-2), 0)


def of_range(
    low: Float[Array, "*groups"], high: Float[Array, "*groups"], recipe: Recipe
) -> tuple[Float[Array, "*groups"], Float[Array, "*groups"], Float[Array, "*groups"]]:
    """What `fit` gives, of a range that is chosen already."""
    last = recipe.last
    scale = jnp.maximum(high, -low) * (2 / last) if recipe.symmetric else high / last - low / last
    scale = jnp.where(scale == 0, 1.0, scale)
    # Not by casts there and back, which XLA takes out where it may keep excess precision, as it may on a GPU.
    stored = jnp.finfo(recipe.scale_dtype)
    step = jax.lax.reduce_precision(scale, stored.nexp, stored.nmant)
    step = jnp.where(step == 0, 1.0, step)  # too small to be stored, which is refused outside of jit
    zero = jnp.full_like(step, recipe.symmetric_zero)
    return step, zero if recipe.symmetric else jnp.clip(jnp.round(-low / step), 0, last), scale


def make_codes(
    codes: Num[Array, "k n"],
    scales: Float[Array, "groups n"],
    zeros: Float[Array, "groups n"],
    recipe: Recipe,
    order: Int[Array, " k"] | None = None,
) -> Codes:
    """Codes and grids, whole numbers and stored scales already, in the dtypes of a `Codes`."""
    return Codes(
        codes=codes.astype(jnp.uint8),
        scales=scales.astype(recipe.scale_dtype),
        zeros=None if recipe.symmetric else zeros.astype(jnp.uint8),
        order=None if order is None else order.astype(jnp.int32),
        group=recipe.group,
        bits=recipe.bits,
    )


def nearest(
    weight: Float[Array, "k n"],
    recipe: Recipe,
    order: Int[Array, " k"] | None = None,
) -> tuple[Codes, Float[Array, "groups n"]]:
    """(every weight's nearest code, the scales before they were stored), in groups of the rows in this order."""
    K, N = weight.shape
    rows = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    rows = grouped(rows if order is None else rows[order], recipe.group_rows(K))
    scale, zero, exact = fit(rows, recipe)
    codes = encode(rows, scale[:, None], zero[:, None], recipe).reshape(-1, N)[:K]
    return make_codes(codes, scale, zero, recipe, order), exact
