"""The one tolerance: a result may be at most twice as wrong as plain arithmetic in its precision, plus one ulp."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def assert_close(result: Any, oracle: Any, reference: Any, name: str = "result", through: float = 0.0) -> None:
    """max|result - oracle| <= 2 * max|reference - oracle| + ulp, and the same infinities in the same places.

    `oracle` is the exact value, `reference` the same computation done plainly in the result's precision. The ulp is
    that of the result's dtype at the largest magnitude of the oracle, or at `through`, where a method is known to go
    through numbers so large. Source: the factor of 2 against a same-precision
    reference is the rule of FlashAttention's own tests (Dao-AILab/flash-attention, tests/test_flash_attn.py).
    """
    epsilon = float(jnp.finfo(jnp.asarray(result).dtype).eps)
    got, want, plain = (np.asarray(x).astype(np.float64) for x in (result, oracle, reference))
    assert got.shape == want.shape, f"{name}: shape {got.shape}, oracle's is {want.shape}"
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name}: infinities")
    assert np.isfinite(got[~infinite]).all(), f"{name}: {(~np.isfinite(got[~infinite])).sum()} values are not finite"
    if infinite.all():
        return
    got, want, plain = (x[~infinite] for x in (got, want, plain))
    plain_error = np.abs(plain - want).max()
    allowed = 2 * plain_error + epsilon * max(np.abs(want).max(), through)
    error = np.abs(got - want).max()
    assert error <= allowed, f"{name}: {error=:.3e} > {allowed=:.3e} ({plain_error=:.3e})"
