"""Weights corrected, before they are quantised, for the error of the layers before: QEP (2504.09629, section 4).

A dense layer that reads d + x, where the quantised layers before it now make x of it, is to be matched on x:

    E(Q) = sum |(x + a d) W - x Q|^2 + c |W - Q|^2 = tr((V - Q)^T (H + c) (V - Q)) + what no Q changes,
    V = W + a (H + c)^-1 C W,    H = sum x x^T,    C = sum x d^T

in rows x and d over all tokens, by completing the square: its derivative, at V, is 0. The ridge c keeps V near W in
directions that were hardly seen. So E is what any method makes small that makes small what V's outputs on x lose; GPTQ
does so for H + c itself, its damping. a = 1 asks for all of the error to be made up for, and fits the noise in C too.

GPTAQ (2504.02692) adds the same term to its steps instead: what input i lost is then taken up by rows after i alone,
for a solution that is held to more than E asks for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from quant.feedback import cholesky, normalised
from quant.observe import Statistics
from quant.rtn import check_weight

_OP = "propagated"


def propagated(
    weight: ArrayLike, statistics: Statistics, *, share: float, damping: float = 0.05
) -> Float[Array, "k n"]:
    """The weight to quantise in `weight`'s place, where the layers before it are quantised already.

        V = W + share (H + c)^-1 C W,    H = statistics.gram,    C = statistics.drift

    Time and memory beside W: a product and a solve of (K, K) by (K, N) each, and a Cholesky factor.

    Args:
      weight: floating (K, N).
      statistics: `observe` of the layer's inputs, with the dense model's beside them.
      share: from 0, which gives W, to 1; the paper's is 0.5.
      damping: c as a share of the mean diagonal of H, as in `quant.gptq`: 10 times more until a factor exists. Where
        none does, and in inputs that were always 0, the weight stays as it is.

    Returns:
      V, in float32 (float64 of float64 statistics).

    Raises:
      ValueError: statistics of another size or without `drift`, a share outside of [0, 1], a negative damping.
    """
    weight = jnp.asarray(weight)
    check_weight(_OP, weight)
    K = weight.shape[0]
    if weight.ndim > 2:
        raise ValueError(f"{_OP}: got a stack of weights {weight.shape} - must be one, (K, N). Use jax.vmap.")
    if statistics.drift is None:
        raise ValueError(f"{_OP}: statistics without drift - the dense inputs are not known. Give them to observe.")
    if statistics.drift.shape != (K, K):
        raise ValueError(
            f"{_OP}: got a drift of shape {statistics.drift.shape} for a weight of shape {weight.shape} - must be "
            f"{(K, K)}. Observe the inputs of this layer."
        )
    check_share(_OP, "share", share)
    if not isinstance(damping, Tracer) and not 0 <= damping < float("inf"):
        raise ValueError(f"{_OP}: damping={damping} - must be finite and not negative. The default is 0.05.")
    return _propagated(weight, statistics, share, damping)


def check_share(op: str, name: str, share: Any) -> None:
    """Raises ValueError, in the name of `op`, for what is no share of an error."""
    if not isinstance(share, Tracer) and not 0 <= share <= 1:
        raise ValueError(f"{op}: {name}={share} - must be from 0, which is off, to 1. The paper's is 0.5.")


@jax.jit
def _propagated(weight: Float[Array, "k n"], statistics: Statistics, share: Any, damping: Any) -> Float[Array, "k n"]:
    dtype = jnp.result_type(weight, statistics.gram, jnp.float32)
    multiply = functools.partial(jnp.matmul, precision="highest")
    weight = weight.astype(dtype)
    hessian, mean, _ = normalised(statistics.gram.astype(dtype))
    factor, used = cholesky(hessian, jnp.asarray(damping, dtype))
    lost = multiply(statistics.drift.astype(dtype) / mean, weight)
    halfway = solve_triangular(factor, lost, lower=False)
    correction = solve_triangular(factor, halfway, lower=False, trans=1)
    return weight + jnp.where(jnp.isfinite(used), share * correction, 0)
