"""The FP8 product for `make aot`: every scaling at the default configuration, and all configurations beside it.

.aot/bin/python -m tests.mosaic.aot tests/pallas_kernels/fp8/aot_candidates.py:candidates
"""

import functools
from typing import Any

import jax

from pallas_kernels.device import H200
from pallas_kernels.fp8 import hopper, hopper_config, hopper_quantize
from pallas_kernels.fp8.hopper_config import Config
from pallas_kernels.fp8.spec import E4M3, E5M2, Fp8Spec, scale_shape, w_block, x_block
from tests.mosaic.aot import Candidate

K, N = 7168, 2112
ROWS = (16, 32, 64, 100, 512, 4096)


def candidates() -> list[Candidate]:
    found = []
    for M in ROWS:
        spec = Fp8Spec(M=M, K=K, N=N, scaling="block", dtype="bfloat16")
        found += [candidate(f"{M}-{n}", spec, config) for n, config in enumerate(hopper_config.candidates(spec, H200))]
    kinds: list[dict[str, Any]] = [{"scaling": "row"}, {"scaling": "tensor"}, {"scaling": "row", "x_dtype": E5M2}]
    for n, kind in enumerate(kinds):
        for M in (64, 4096):
            found.append(candidate(f"{M}-{kind['scaling']}-{n}", Fp8Spec(M=M, K=K, N=N, dtype="bfloat16", **kind)))
    rounding = Candidate(
        name="fp8-quantize",
        function=functools.partial(hopper_quantize.quantize, dtype=E4M3),
        args=(jax.ShapeDtypeStruct((4096, K), "bfloat16"),),
    )
    return [*found, rounding]


def candidate(name: str, spec: Fp8Spec, config: Config | None = None) -> Candidate:
    x, w = (spec.M, spec.K), (spec.N, spec.K)
    shapes = [
        (x, spec.x_dtype),
        (scale_shape(x, x_block(spec.scaling, x)), "float32"),
        (w, spec.w_dtype),
        (scale_shape(w, w_block(spec.scaling, w)), "float32"),
    ]
    function = functools.partial(hopper.matmul, spec, config=config)
    return Candidate(name=f"fp8-{name}", function=function, args=tuple(jax.ShapeDtypeStruct(*s) for s in shapes))
