"""GPTQ: the codes that change a layer's outputs least, never worse than the nearest ones (2210.17323)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from quant import grid
from quant.feedback import cholesky, normalised, round_rows
from quant.grid import Codes
from quant.observe import Statistics
from quant.recipe import Recipe
from quant.report import Report, column_objectives
from quant.rtn import check_weight
from quant.tensor import Int4Tensor, check_storable

_OP = "gptq"
ORDERS = ("none", "static", "activation")


def gptq(
    weight: ArrayLike,
    statistics: Statistics,
    recipe: Recipe,
    *,
    order: str = "static",
    block: int = 128,
    damping: float = 0.05,
    mse: bool = True,
) -> tuple[Int4Tensor, Report]:
    """The weight in codes that change the layer's outputs least, found row by row with feedback of errors.

        min tr(dW^T H dW),   dW = W - Q,   H = statistics.gram

    A column that feedback made no better than `round_to_nearest(weight, recipe)` keeps those codes, so no result is
    worse. Inputs that were always 0 are rounded to nearest. One compilation for a shape, its time independent of K;
    `jax.vmap` runs equal layers or experts side by side; the gram may be sharded.

    The paper's own settings are damping=0.01, mse=False and order="none" or "activation"; the defaults measured better.

    Args:
      weight: floating (K, N).
      statistics: `observe` of the layer's inputs.
      recipe: group, symmetry, scales. bits must be 4; `gptq_codes` takes others.
      order: the order in which rows are rounded. "none": as they are, each group's scales from the weights as corrected
        when it is reached. "static": largest diagonal of H first, groups and scales those of the original weight.
        "activation": that order, groups formed and scaled in it, which leaves a `permutation` (GPTQ's g_idx).
      block: rows in a slab, rounded up to whole groups where scales are refitted. Changes speed only.
      damping: share of the mean diagonal of H that is added to it, at least; 10 times more until a Cholesky factor
        exists. More of it fits the tokens seen less closely, and others better where these were few.
      mse: a group's range is the share of the whole, 1, .99, ... .21, that has the least sum of u^2 (w - its value)^2,
        u being the row's pivot: what rounding costs once the rows after it make up for it. False: the whole range.

    Returns:
      (the weight packed, a Report of scalars).

    Raises:
      ValueError: arguments that do not go together; outside of jit also weights or statistics that are not finite, and
        scales that `scale_dtype` cannot hold.
    """
    recipe.check_stored(_OP)
    codes, report = gptq_codes(weight, statistics, recipe, order=order, block=block, damping=damping, mse=mse)
    return codes.pack(), report


def gptq_codes(
    weight: ArrayLike,
    statistics: Statistics,
    recipe: Recipe,
    *,
    order: str = "static",
    block: int = 128,
    damping: float = 0.05,
    mse: bool = True,
) -> tuple[Codes, Report]:
    """`gptq` for 2, 3, 4 and 8 bits, as codes that are not packed: `dequantize()` gives the weight they stand for."""
    weight = jnp.asarray(weight)
    check_weight(_OP, weight)
    if weight.ndim > 2:
        raise ValueError(f"{_OP}: got a stack of weights {weight.shape} - must be one, (K, N). Use jax.vmap.")
    K = weight.shape[0]
    if statistics.gram.shape != (K, K):
        raise ValueError(
            f"{_OP}: got a gram of shape {statistics.gram.shape} for a weight of shape {weight.shape} - must be "
            f"{(K, K)}. Observe the inputs of this layer."
        )
    if order not in ORDERS:
        raise ValueError(f"{_OP}: order={order!r} - must be one of {', '.join(ORDERS)}.")
    if block < 1:
        raise ValueError(f"{_OP}: block={block} - a slab has at least one row. The default is 128.")
    if not isinstance(damping, Tracer) and not 0 <= damping < float("inf"):
        raise ValueError(f"{_OP}: damping={damping} - must be finite and not negative. The default is 0.05.")
    for name, values in (("the weight", weight), ("the gram", statistics.gram)):
        if not isinstance(values, Tracer) and not bool(jnp.isfinite(values).all()):
            raise ValueError(f"{_OP}: {name} has NaN or infinite entries - no code is near. Find where they come from.")
    check_storable(_nearest_scales(weight, recipe), recipe.scale_dtype, _OP)
    group, slab = recipe.group_rows(K), min(block, K)
    if _refits(order, -(-K // group)):
        slab = group * -(-slab // group)
    return _quantise(weight, statistics, damping, recipe=recipe, order=order, slab=slab, mse=mse)


@functools.partial(jax.jit, static_argnames="recipe")
def _nearest_scales(weight: Float[Array, "k n"], recipe: Recipe) -> Float[Array, "groups n"]:
    """What rounding to nearest has to store, and in the worst case so does every method."""
    return grid.nearest(weight, recipe)[1]


def _refits(order: str, groups: int) -> bool:
    """Whether groups are fitted as they are reached; a single one is before there is anything to correct."""
    return order != "static" and groups > 1


class _Solution(NamedTuple):
    """Codes by feedback, and figures of the system that was solved, in units of `mean`."""

    codes: Codes
    mean: Array
    damping: Array
    condition: Array
    squares: Array  # sum e^2
    damped: Array  # tr(dW^T (what was added to H) dW)


@functools.partial(jax.jit, static_argnames=("recipe", "order", "slab", "mse"))
def _quantise(
    weight: Float[Array, "k n"],
    statistics: Statistics,
    damping: Any,
    *,
    recipe: Recipe,
    order: str,
    slab: int,
    mse: bool,
) -> tuple[Codes, Report]:
    dtype = jnp.result_type(weight.dtype, statistics.gram.dtype, jnp.float32)
    weight, gram = weight.astype(dtype), statistics.gram.astype(dtype)
    solved = _solve(weight, gram, jnp.asarray(damping, dtype), recipe=recipe, order=order, slab=slab, mse=mse)

    def costs(candidate: Codes) -> Float[Array, " n"]:
        return column_objectives((weight - candidate.dequantize().astype(dtype)) / jnp.sqrt(solved.mean), gram)

    codes, cost = solved.codes, costs(solved.codes)
    total = cost.sum() + solved.damped
    residual = jnp.abs(solved.squares - total) / jnp.where(total == 0, 1, total)
    plain, _ = grid.nearest(weight, recipe)
    plain_cost = costs(plain)
    # Columns are independent but for the groups' rows, which they share.
    here, here_cost = plain, plain_cost
    if codes.order is not None:
        here, _ = grid.nearest(weight, recipe, order=codes.order)
        here_cost = costs(here)
    solvable = jnp.isfinite(solved.damping)
    kept = solvable & (cost < here_cost)  # false for NaN, which feedback that overflowed leaves
    codes, cost = grid.where(kept, codes, here), jnp.where(kept, cost, here_cost)
    if codes.order is not None:
        better = solvable & (cost.sum() < plain_cost.sum())
        plain = dataclasses.replace(plain, order=jnp.arange(len(weight), dtype=jnp.int32))
        codes, cost, kept = grid.where(better, codes, plain), jnp.where(better, cost, plain_cost), kept & better
    report = Report(
        objective=cost.sum() * solved.mean,
        rtn=plain_cost.sum() * solved.mean,
        fallback=(~kept).sum(),
        clipped=codes.clipped(weight),
        tokens=statistics.count,
        damping=solved.damping,
        condition=solved.condition,
        residual=jnp.where(solvable, residual, jnp.nan),
    )
    return codes, report


def _solve(
    weight: Float[Array, "k n"],
    gram: Float[Array, "k k"],
    damping: Float[Array, ""],
    *,
    recipe: Recipe,
    order: str,
    slab: int,
    mse: bool,
) -> _Solution:
    K, N = weight.shape
    group, groups = recipe.group_rows(K), -(-K // recipe.group_rows(K))
    size = slab * -(-K // slab)
    refit = _refits(order, groups)

    # The last slab is filled with inputs that were always 0, which come last in every order.
    hessian, mean, dead = normalised(jnp.pad(gram, (0, size - K)))
    sequence = jnp.arange(size)
    if order != "none":
        sequence = jnp.argsort(jnp.where(dead, 0, -jnp.diagonal(hessian)), stable=True)
        hessian, dead = hessian[sequence[:, None], sequence[None, :]], dead[sequence]
    factor, damping = cholesky(hessian, damping)
    pivots = jnp.diagonal(factor)
    fitted = None
    if not refit:
        importance = jnp.zeros((size, 1), weight.dtype).at[sequence].set(pivots[:, None] ** 2)[:K]
        importance = grid.grouped(importance, group)[..., 0] if mse else None
        fitted = grid.fit(grid.grouped(weight, group), recipe, importance)[:2]
    codes, (scales, zeros), delta, squares = round_rows(
        jnp.pad(weight, ((0, size - K), (0, 0)))[sequence],
        factor,
        recipe,
        slab=slab,
        group=group,
        fitted=fitted,
        index=jnp.minimum(sequence // group, groups - 1),
        mse=mse,
    )
    permuted = order == "activation" and refit
    codes = codes[:K] if permuted else codes[jnp.argsort(sequence)[:K]]
    live = jnp.isfinite(damping) & ~dead
    largest = jnp.where(live, jnp.diagonal(hessian) + damping, 0).max()
    smallest = jnp.where(live, pivots**2, jnp.inf).min()
    return _Solution(
        codes=grid.make_codes(codes, scales[:groups], zeros[:groups], recipe, sequence[:K] if permuted else None),
        mean=mean,
        damping=damping,
        condition=jnp.where(live.any(), largest / smallest, jnp.nan),
        squares=squares,
        damped=((damping + dead)[:, None] * delta**2).sum(),
    )
