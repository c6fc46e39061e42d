"""Rounding with feedback of errors: rows still to come make up for what those before them lost (GPTQ, 2210.17323).

The papers write W as (out, in) and speak of columns; here W is (K, N) and the same things are its rows. H = R R^T with
R upper triangular, D = W - Q. The paper's Cholesky factor of H^-1 is U = R^-1, and its weights once rows < t are
rounded are

    W'[t:] = W[t:] + U[t:, t:]^T R[:t, t:]^T D[:t]

which needs no inverse of H, only those of R's blocks on the diagonal. So one matmul corrects a slab of rows for all
before it, and the paper's steps do so inside the slab:

    e = (W'[j] - Q[j]) / U[j, j],    W'[j+1:] -= U[j, j+1:]^T e,    and in the end    sum e^2 = tr(D^T H D).
"""

import functools

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int, UInt8

from quant.grid import decode, encode, fit
from quant.recipe import Recipe

_MATMUL = functools.partial(jnp.matmul, precision="highest")  # not TF32: errors are fed back K times
# What is tried after a damping that gave no factor: 10 times it, at least the first of these, at most the second.
_FIRST_RETRY, _LAST_RETRY = 1e-4, 1e4

Grids = tuple[Float[Array, "groups n"], Float[Array, "groups n"]]


def normalised(gram: Float[Array, "k k"]) -> tuple[Float[Array, "k k"], Float[Array, ""], Bool[Array, " k"]]:
    """(H in units of the mean of its diagonal over live inputs, that mean, which inputs are dead).

    A dead input was always 0. It gets a 1 on the diagonal, which nothing couples to: its weights are rounded to nearest
    and no other row learns of it.
    """
    diagonal = jnp.diagonal(gram)
    dead = ~(diagonal > 0)
    alive = jnp.where(dead, 0, diagonal)
    top = jnp.where(dead.all(), 1, alive.max())  # the sum of the diagonal itself could overflow
    mean = jnp.where(dead.all(), 1, top * ((alive / top).sum() / jnp.maximum((~dead).sum(), 1)))
    isolated = dead[:, None] | dead[None, :]
    return jnp.where(isolated, jnp.eye(len(gram), dtype=gram.dtype), gram / mean), mean, dead


def cholesky(hessian: Float[Array, "k k"], damping: Float[Array, ""]) -> tuple[Float[Array, "k k"], Float[Array, ""]]:
    """(R, the damping that gave it): H + damping = R R^T, R upper triangular, by more damping until there is one.

    Where none gives a finite factor, as for statistics that no inputs have, R is the identity, which feeds nothing
    back, and the damping infinite.
    """
    backwards = hessian[::-1, ::-1]  # whose lower factor, turned round again, is upper
    eye = jnp.eye(len(hessian), dtype=hessian.dtype)
    last = jnp.maximum(damping, _LAST_RETRY)

    def unsolved(state):
        following, _, _, found = state
        return ~found & (following <= last)

    def attempt(state):
        tried = state[0]
        lower = jnp.linalg.cholesky(backwards + tried * eye, symmetrize_input=False)
        return jnp.maximum(10 * tried, _FIRST_RETRY), tried, lower, jnp.isfinite(lower).all()

    start = (damping, damping, jnp.zeros_like(hessian), jnp.zeros((), bool))
    _, used, lower, found = jax.lax.while_loop(unsolved, attempt, start)
    return jnp.where(found, lower[::-1, ::-1], eye), jnp.where(found, used, jnp.inf)


def round_rows(
    rows: Float[Array, "k n"],
    factor: Float[Array, "k k"],
    recipe: Recipe,
    *,
    slab: int,
    group: int,
    fitted: Grids | None = None,
    index: Int[Array, " k"],
    mse: bool = False,
) -> tuple[UInt8[Array, "k n"], Grids, Float[Array, "k n"], Float[Array, ""]]:
    """(codes, grids, D, sum e^2) of rows in the order in which they are rounded, a whole number of slabs of them.

    fitted: (scales, zeros) of all groups, of which row i takes that of group index[i]; None: every `group` rows of a
    slab are fitted when they are reached, as they have been corrected by then, with `mse` by least squares.
    """
    (K, N), dtype, slabs = rows.shape, rows.dtype, len(rows) // slab
    per_slab = slab // group

    def one(delta, xs):
        start, original, index = xs
        ahead = jax.lax.dynamic_slice_in_dim(factor, start, slab, axis=1)
        triangle = jax.lax.dynamic_slice_in_dim(ahead, start, slab, axis=0)
        pivots = jnp.diagonal(triangle)
        inverse = solve_triangular(triangle, jnp.eye(slab, dtype=dtype), lower=False)
        share = jnp.triu(inverse, 1) * pivots[:, None]  # U[j, j+1:] / U[j, j], zeros before
        values = original + _MATMUL(inverse.T, _MATMUL(ahead.T, delta))

        def row(j, values, scale, zero):
            value, s, z = values[j], scale[j], zero[j]
            lost = value - decode(encode(value, s, z, recipe), s, z)
            return values - share[j][:, None] * lost[None, :]

        def refitted(number, state):
            values, scale, zero = state
            first = number * group
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=group)
            fresh = fit(cut(values), recipe, cut(pivots) ** 2 if mse else None)[:2]
            scale, zero = (
                jax.lax.dynamic_update_slice_in_dim(all_rows, jnp.broadcast_to(a, (group, N)), first, axis=0)
                for all_rows, a in zip((scale, zero), fresh, strict=True)
            )
            values = jax.lax.fori_loop(0, group, lambda i, values: row(first + i, values, scale, zero), values)
            return values, scale, zero

        if fitted is None:
            blank = jnp.ones((slab, N), dtype)
            values, scale, zero = jax.lax.fori_loop(0, per_slab, refitted, (values, blank, blank))
            refits = (scale[::group], zero[::group])
        else:
            scale, zero = (a[index] for a in fitted)
            values = jax.lax.fori_loop(0, slab, lambda j, values: row(j, values, scale, zero), values)
            refits = ()
        # Row j was not changed any more after it had been rounded, so this gives the codes that the loop chose.
        codes = encode(values, scale, zero, recipe)
        value = decode(codes, scale, zero)
        errors = (values - value) * pivots[:, None]
        delta = jax.lax.dynamic_update_slice_in_dim(delta, original - value, start, axis=0)
        return delta, (codes.astype(jnp.uint8), refits, (errors**2).sum())

    xs = (jnp.arange(slabs) * slab, rows.reshape(slabs, slab, N), index.reshape(slabs, slab))
    delta, (codes, refits, squares) = jax.lax.scan(one, jnp.zeros_like(rows), xs)
    scales, zeros = (a.reshape(-1, N) for a in refits) if fitted is None else fitted
    return codes.reshape(K, N), (scales, zeros), delta, squares.sum()
