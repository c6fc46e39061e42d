"""AWQ: inputs that are large get a finer grid, by a scale that the weights before them take back (2306.00978).

    x W = (x / s) (s W)    and    Q(s W) / s is closer to W where s is large

The scale and the ranges of groups are searched for by what they do to the layer's output, from the second moment H of
its inputs alone: tr(dW^T H dW) is the squared change of the output over all tokens that were seen. No block is run
again.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from quant import grid
from quant.observe import Statistics
from quant.recipe import Recipe
from quant.report import column_objectives

# The paper's grids: exponents 0, 1/20, ... 19/20; ranges of 1, 19/20, ... 11/20 of a group's own.
_STEPS, _SHRINKS = 20, 10


def awq_scales(
    weights: Sequence[ArrayLike], statistics: Statistics, recipe: Recipe, source: ArrayLike | None = None
) -> Float[Array, " k"]:
    """The scale (K,) of the inputs that all of `weights` read, under which their nearest codes do least harm.

        s = x^r  or  x^r / w^(1-r),   r = 0, 1/20, ... 19/20,   normalised to sqrt(max s min s) = 1
        the s of least  sum over weights of tr(dW^T H dW),   dW = W - Q(s W) / s

    x: mean |x| of an input; w: mean over columns of |w| as a share of the largest in its group. s = 1, which is
    rounding to nearest, is among them, so that no result is worse. Inputs that were always 0 keep 1.

    Args:
      weights: floating (K, N), all that share the inputs: query, key and value; gate and up.
      statistics: `observe` of those inputs.
      recipe: what the weights are to be quantised to.
      source: integers (K,); inputs with the same one get the same scale (`quant.fold.head_sources`).

    Returns:
      s, positive. `quant.fold.fold_scale` puts it into the model; `statistics.divided(s)` are those of the new inputs.

    Raises ValueError for weights or statistics of other sizes.
    """
    arrays = tuple(jnp.asarray(w) for w in weights)
    K = statistics.gram.shape[-1]
    if not arrays or any(w.ndim != 2 or w.shape[0] != K or not jnp.issubdtype(w.dtype, jnp.floating) for w in arrays):
        raise ValueError(
            f"awq_scales: got weights of shapes {[w.shape for w in arrays]} for statistics of {K} inputs - must be "
            f"floating ({K}, N), at least one. Give the weights that read these inputs."
        )
    index = None if source is None else jnp.asarray(source)
    if index is not None and (index.shape != (K,) or not jnp.issubdtype(index.dtype, jnp.integer)):
        raise ValueError(
            f"awq_scales: got source of shape {index.shape} and dtype {index.dtype} - must be integers {(K,)}."
        )
    return _scales(arrays, statistics, index, recipe)


@functools.partial(jax.jit, static_argnames="recipe")
def _scales(
    weights: tuple[Float[Array, "k _"], ...], statistics: Statistics, source: Int[Array, " k"] | None, recipe: Recipe
) -> Float[Array, " k"]:
    dtype = jnp.result_type(*weights, statistics.gram)
    wide = [w.astype(dtype) for w in weights]
    gram, x = statistics.gram.astype(dtype), statistics.abs_sum.astype(dtype)
    live = x > 0
    w = jnp.concatenate([_share_of_group(a, recipe) for a in wide], axis=1).mean(axis=1)
    x, w, live = (a if source is None else _mean_by(a, source) for a in (x, w, live.astype(dtype)))
    log_x, log_w = (jnp.log(jnp.where(a > 0, a, 1)) for a in (x, w))

    def candidate(exponents: Float[Array, " 2"]) -> Float[Array, " k"]:
        log = exponents[0] * log_x - exponents[1] * log_w
        middle = (jnp.where(live > 0, log, -jnp.inf).max() + jnp.where(live > 0, log, jnp.inf).min()) / 2
        # Within what a division in float32 and the weights before can take.
        return jnp.where(live > 0, jnp.exp(jnp.clip(log - middle, -9.0, 9.0)), 1)

    mean = jnp.maximum(jnp.diagonal(gram).mean(), jnp.finfo(dtype).tiny)

    def loss(exponents: Float[Array, " 2"]) -> Float[Array, ""]:
        s = candidate(exponents)[:, None]
        deltas = [a - grid.nearest(a * s, recipe)[0].dequantize().astype(dtype) / s for a in wide]
        return sum((column_objectives(d / jnp.sqrt(mean), gram).sum() for d in deltas), jnp.zeros((), dtype))

    ratio = jnp.arange(_STEPS, dtype=dtype) / _STEPS
    exponents = jnp.concatenate(
        [jnp.stack([ratio, jnp.zeros_like(ratio)], axis=1), jnp.stack([ratio, 1 - ratio], axis=1)]
    )
    losses = jax.lax.map(loss, exponents)
    best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
    return candidate(exponents[best])


def _share_of_group(weight: Float[Array, "k n"], recipe: Recipe) -> Float[Array, "k n"]:
    """|w| by the largest of its group."""
    rows = grid.grouped(jnp.abs(weight), recipe.group_rows(len(weight)))
    top = rows.max(axis=1, keepdims=True)
    return (rows / jnp.where(top == 0, 1, top)).reshape(-1, weight.shape[1])[: len(weight)]


def _mean_by(values: Float[Array, " k"], source: Int[Array, " k"]) -> Float[Array, " k"]:
    """The mean over all entries with the same source, at each of them."""
    sums, counts = (jnp.zeros_like(values).at[source].add(a) for a in (values, jnp.ones_like(values)))
    return sums[source] / counts[source]


def awq_clip(weight: ArrayLike, statistics: Statistics, recipe: Recipe) -> Float[Array, "groups n"]:
    """Limits of |w| (groups, N), one a group: the range, of the group's own down to 11/20 of it, that does least harm.

        m = p max|w|,   p = 1, 19/20, ... 11/20,   of least  d^T H_g d

    d: the error of the group's nearest codes within +-m; H_g: the block of the second moment of the group's inputs.
    For `clip` of `round_to_nearest` and of `gptq`. The reference leaves query and key as they are.

    Raises ValueError for statistics of another size.
    """
    weight = jnp.asarray(weight)
    K = statistics.gram.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != K or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"awq_clip: got a weight of shape {weight.shape} and dtype {weight.dtype} for statistics of {K} inputs - "
            f"must be floating ({K}, N). Give the weight that reads these inputs."
        )
    return _clip(weight, statistics.gram, recipe)


@functools.partial(jax.jit, static_argnames="recipe")
def _clip(weight: Float[Array, "k n"], gram: Float[Array, "k k"], recipe: Recipe) -> Float[Array, "groups n"]:
    dtype = jnp.result_type(weight, gram)
    K, group = len(weight), recipe.group_rows(len(weight))
    rows = grid.grouped(weight.astype(dtype), group)
    size = len(rows) * group
    padded = jnp.pad(gram.astype(dtype), (0, size - K)).reshape(len(rows), group, len(rows), group)
    numbers = jnp.arange(len(rows))
    blocks = padded[numbers, :, numbers, :]
    mean = jnp.maximum(jnp.diagonal(gram).mean(), jnp.finfo(dtype).tiny)
    top = jnp.abs(rows).max(axis=1)

    def attempt(i, best):
        limit = top * (1 - i / _STEPS)
        scale, zero = (a[:, None, :] for a in grid.fit(rows, recipe, limit)[:2])
        delta = (rows - grid.decode(grid.encode(rows, scale, zero, recipe), scale, zero)) / jnp.sqrt(mean)
        loss = jax.vmap(column_objectives)(delta, blocks)
        better = loss < best[1]
        return jnp.where(better, limit, best[0]), jnp.where(better, loss, best[1])

    return jax.lax.fori_loop(0, _SHRINKS, attempt, (top, jnp.full_like(top, jnp.inf)))[0]
