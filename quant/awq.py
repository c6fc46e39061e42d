"""AWQ: inputs that are large get a finer grid, by a scale that the weights before them take back (2306.00978).

    x W = (x / s) (s W)    and    Q(s W) / s is closer to W where s is large

Scales, and ranges of groups, are searched for by what they do to the layer's output, from the second moment H of
its inputs alone: tr(dW^T H dW) is the squared change of the output over all tokens that were seen. No block is run
again.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from quant import grid
from quant.grid import Codes
from quant.observe import Statistics
from quant.recipe import Recipe
from quant.report import Report, column_objectives
from quant.tensor import check_storable

# The paper's grids: exponents 0, 1/20, ... 19/20; ranges of 1, 19/20, ... 11/20 of a group's own.
_STEPS, _SHRINKS = 20, 10


def awq_scales(
    weights: Sequence[ArrayLike], statistics: Statistics, recipe: Recipe, source: ArrayLike | None = None
) -> Float[Array, " k"]:
    """The scale (K,) of the inputs that all of `weights` read, under which their nearest codes do least harm.

        s = x^r  or  x^r / w^(1-r),   r = 0, 1/20, ... 19/20,   normalised to sqrt(max s min s) = 1
        the s of least  sum over weights of tr(dW^T H dW),   dW = W - Q(s W) / s

    x: mean |x| of an input; w: mean over columns of |w| as a share of the largest in its group. Of those that make none
    of the weights worse than s = 1, which is rounding to nearest and among them. Inputs that were always 0 keep 1.

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

    def losses_of(exponents: Float[Array, " 2"]) -> Float[Array, " weights"]:
        s = candidate(exponents)[:, None]
        deltas = [a - grid.nearest(a * s, recipe)[0].dequantize().astype(dtype) / s for a in wide]
        return jnp.stack([column_objectives(d / jnp.sqrt(mean), gram).sum() for d in deltas])

    ratio = jnp.arange(_STEPS, dtype=dtype) / _STEPS
    exponents = jnp.concatenate(
        [jnp.stack([ratio, jnp.zeros_like(ratio)], axis=1), jnp.stack([ratio, 1 - ratio], axis=1)]
    )
    losses = jax.lax.map(losses_of, exponents)
    harmless = (losses <= losses[:1]).all(axis=1)  # false for NaN
    best = jnp.argmin(jnp.where(harmless, losses.sum(axis=1), jnp.inf))
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


def awq_codes(weight: ArrayLike, statistics: Statistics, recipe: Recipe) -> tuple[Codes, Report]:
    """The nearest codes on ranges of the groups that do the layer's output least harm.

        range (p low, q high),   p and q of 1, 19/20, ... 11/20,   of least  d^T H_g d

    low, high: the group's whole range, 0 included; d: the error of its nearest codes on that range; H_g: the block of
    the second moment of the group's inputs. Where symmetric p = q. A group's range is chosen as if it stood alone: a
    column that this makes worse than `round_to_nearest` keeps the nearest codes, so no result is worse. 2, 3, 4 and 8
    bits. The reference has p = q, clips both ends to the larger one's, and leaves query and key as they are.

    Raises:
      ValueError: statistics of another size; outside of jit also weights or statistics that are not finite, and scales
        that `scale_dtype` cannot hold.
    """
    weight = jnp.asarray(weight)
    K = statistics.gram.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != K or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"awq_codes: got a weight of shape {weight.shape} and dtype {weight.dtype} for statistics of {K} inputs - "
            f"must be floating ({K}, N). Give the weight that reads these inputs."
        )
    codes, report, exact, finite = _codes(weight, statistics, recipe)
    if not isinstance(finite, Tracer) and not bool(finite):
        raise ValueError("awq_codes: weight or gram have NaN or infinite entries - no code is near. Look where from.")
    check_storable(exact, recipe.scale_dtype, "awq_codes")
    return codes, report


@functools.partial(jax.jit, static_argnames="recipe")
def _codes(
    weight: Float[Array, "k n"], statistics: Statistics, recipe: Recipe
) -> tuple[Codes, Report, Float[Array, "groups n"], Bool[Array, ""]]:
    """(codes, report, the nearest codes' scales before they were stored, whether everything is finite)."""
    dtype = jnp.result_type(weight, statistics.gram, jnp.float32)
    weight, gram = weight.astype(dtype), statistics.gram.astype(dtype)
    (K, N), group = weight.shape, recipe.group_rows(len(weight))
    mean = jnp.maximum(jnp.diagonal(gram).mean(), jnp.finfo(dtype).tiny)
    rows, blocks = grid.grouped(weight, group), _blocks(gram, group)
    low, high = grid.ends(rows)

    def attempt(i, best):
        p, q = (i, i) if recipe.symmetric else (i // _SHRINKS, i % _SHRINKS)
        tried = grid.of_range(low * (1 - p / _STEPS), high * (1 - q / _STEPS), recipe)[:2]
        scale, zero = (a[:, None, :] for a in tried)
        delta = (rows - grid.decode(grid.encode(rows, scale, zero, recipe), scale, zero)) / jnp.sqrt(mean)
        loss = jax.vmap(column_objectives)(delta, blocks)
        return jax.tree.map(functools.partial(jnp.where, loss < best[1]), (tried, loss), best)

    start = ((jnp.ones_like(low), jnp.zeros_like(low)), jnp.full_like(low, jnp.inf))
    attempts = _SHRINKS if recipe.symmetric else _SHRINKS**2
    (scale, zero), _ = jax.lax.fori_loop(0, attempts, attempt, start)
    chosen = grid.encode(rows, scale[:, None], zero[:, None], recipe).reshape(-1, N)[:K]
    chosen = grid.make_codes(chosen, scale, zero, recipe)
    plain, exact = grid.nearest(weight, recipe)
    cost, before = (
        column_objectives((weight - c.dequantize().astype(dtype)) / jnp.sqrt(mean), gram) for c in (chosen, plain)
    )
    better = cost < before
    codes = grid.where(better, chosen, plain)
    unsolved = jnp.full((), jnp.nan, dtype)
    report = Report(
        objective=jnp.where(better, cost, before).sum() * mean,
        rtn=before.sum() * mean,
        fallback=(~better).sum(),
        clipped=codes.clipped(weight),
        tokens=statistics.count,
        damping=unsolved,
        condition=unsolved,
        residual=unsolved,
    )
    return codes, report, exact, jnp.isfinite(weight).all() & jnp.isfinite(gram).all()


def _blocks(gram: Float[Array, "k k"], group: int) -> Float[Array, "groups group group"]:
    """The second moments inside of each group, zeros past the last row."""
    groups = -(-len(gram) // group)
    padded = jnp.pad(gram, (0, groups * group - len(gram))).reshape(groups, group, groups, group)
    numbers = jnp.arange(groups)
    return padded[numbers, :, numbers, :]
