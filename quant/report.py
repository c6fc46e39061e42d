"""How well a quantised weight does what the weight did: the objective of every method, and a record a layer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from quant.fp8 import Fp8Tensor
from quant.grid import Codes, as_codes
from quant.observe import Statistics
from quant.tensor import Int4Tensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of one layer. Scalars, or arrays where layers were stacked.

    objective: tr(dW^T H dW) of the result, dW = W - Q, H = the sum of x x^T over the `tokens` seen: the squared change
      of the layer's output, summed over tokens and columns. W is the weight that was quantised: of one that was
      corrected (`quant.propagation`) the corrected one.
    rtn: the same of the nearest codes. No method returns a larger objective.
    fallback: columns that kept their nearest codes, which were as good or better.
    clipped: share of weights beyond the grid of their group, by more than half a step and the rounding of its scale.
    damping: what was added to the diagonal of H, in units of its mean; infinite where none helped, and the layer was
      rounded to nearest. condition: at least this is the condition number of what was solved: largest entry
      of its diagonal by smallest pivot.
    residual: how far sum e^2 = tr(dW^T (H + damping) dW), exact for the codes that error feedback chose, is from
      holding, relative: rounding errors of the solve.
    The last three are NaN where no system was solved.
    """

    objective: Any
    rtn: Any
    fallback: Any
    clipped: Any
    tokens: Any
    damping: Any
    condition: Any
    residual: Any

    def as_dict(self) -> dict[str, Any]:
        """Numbers, or lists of them, ready for JSON: what is NaN or infinite is None."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(v) for v in value]
            return value if math.isfinite(value) else None

        return {f.name: plain(np.asarray(getattr(self, f.name)).tolist()) for f in dataclasses.fields(self)}


def column_objectives(delta: Float[Array, "k n"], gram: Float[Array, "k k"]) -> Float[Array, " n"]:
    """d^T H d of every column d of dW, which no rounding makes negative."""
    return jnp.maximum((delta * jnp.matmul(gram, delta, precision="highest")).sum(axis=0), 0)


def objective(weight: ArrayLike, quantised: ArrayLike | Int4Tensor | Codes, statistics: Statistics) -> Float[Array, ""]:
    """tr(dW^T H dW) of dW = weight - quantised, both (K, N): the squared change of the output, summed over tokens."""
    value = quantised.dequantize() if isinstance(quantised, Int4Tensor | Codes) else jnp.asarray(quantised)
    dtype = jnp.result_type(jnp.asarray(weight), statistics.gram)
    delta = jnp.asarray(weight, dtype) - value.astype(dtype)
    return column_objectives(delta, statistics.gram.astype(dtype)).sum()


@jax.jit
def relative_error(weights: Float[Array, "layers k n"], quantised: Fp8Tensor) -> Float[Array, " layers"]:
    """|W - Q| / |W| of every weight of a stack, norms of Frobenius in float32; 0 of one that is all 0."""

    def one(pair: tuple[Array, Fp8Tensor]) -> Array:
        weight, value = pair[0].astype(jnp.float32), pair[1].dequantize()
        largest = jnp.abs(weight).max()  # squares of tiny weights would be 0, and of huge ones infinite
        unit = jnp.where(largest > 0, largest, 1)
        error, size = (jnp.sqrt(jnp.sum(jnp.square(a / unit))) for a in (weight - value, weight))
        return jnp.where(largest > 0, error / jnp.where(size > 0, size, 1), 0)

    return jax.lax.map(one, (weights, quantised))


def measure(
    weight: ArrayLike, quantised: Int4Tensor | Codes, statistics: Statistics, rtn: ArrayLike | None = None
) -> Report:
    """The report of a weight that was quantised without solving anything.

    Where a scale was folded into the layer, weight and statistics are the scaled ones, which leave the objective as it
    is; `rtn` then is the objective of rounding the weight as it was. None: `quantised` is the nearest codes itself.
    """
    weight, value = jnp.asarray(weight), objective(weight, quantised, statistics)
    unsolved = jnp.full_like(value, jnp.nan)
    return Report(
        objective=value,
        rtn=value if rtn is None else jnp.asarray(rtn, value.dtype),
        fallback=jnp.zeros((), jnp.int32),
        clipped=as_codes(quantised).clipped(weight),
        tokens=statistics.count,
        damping=unsolved,
        condition=unsolved,
        residual=unsolved,
    )
