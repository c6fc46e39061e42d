"""One question for every kernel family: what would run, and why not the others."""

from typing import Any

from pallas_kernels import dispatch
from pallas_kernels.attention import api as attention
from pallas_kernels.device import Device
from pallas_kernels.fp8 import api as fp8
from pallas_kernels.fp8.spec import Fp8Spec
from pallas_kernels.w4a16 import api as w4a16
from pallas_kernels.w4a16.spec import W4A16Spec


def explain(spec_or_query: Any, *arrays: Any, device: Device | None = None, **arguments: Any) -> dispatch.Explanation:
    """What a call would run, with tile sizes, and the reason against every other implementation; prints as a table.

    Args:
      spec_or_query: an AttentionSpec, a W4A16Spec, an Fp8Spec, or the first argument of `dot_product_attention`.
      arrays, arguments: the rest of that call, arrays or `jax.ShapeDtypeStruct`s; `implementation` for each.
      device: None: the present one.

    Raises:
      ValueError: as the call would.

    >>> from pallas_kernels.device import H200
    >>> spec = W4A16Spec(M=1, K=4096, N=4096, group=128, zeros=False, dtype="bfloat16", scale_dtype="bfloat16")
    >>> explain(spec, device=H200).chosen
    'hopper'
    """
    if isinstance(spec_or_query, W4A16Spec):
        return w4a16.explain(spec_or_query, device=device, **arguments)
    if isinstance(spec_or_query, Fp8Spec):
        return fp8.explain(spec_or_query, device=device, **arguments)
    return attention.explain(spec_or_query, *arrays, device=device, **arguments)
