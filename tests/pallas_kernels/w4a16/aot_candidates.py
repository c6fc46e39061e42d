"""The kernels of W4A16 for `make aot`: every kind of weight at its default configuration, and configurations beside it.

.aot/bin/python -m tests.mosaic.aot tests/pallas_kernels/w4a16/aot_candidates.py:candidates
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import H200
from pallas_kernels.w4a16 import hopper, hopper_large
from pallas_kernels.w4a16.cases import COLUMN
from pallas_kernels.w4a16.spec import W4A16Spec
from tests.mosaic.aot import Candidate

SHAPES = {"70b_gate_up": (8192, 57344), "8b_gate_up": (4096, 28672), "8b_down": (14336, 4096), "8b_o": (4096, 4096)}
KINDS: dict[str, dict[str, Any]] = {
    "asymmetric": {"zeros": True},
    "32": {"group": 32, "zeros": True},
    "64": {"group": 64},
    "column": {"group": COLUMN, "zeros": True},
    "float16": {"dtype": "float16", "scale_dtype": "float16", "zeros": True},
    "float16_scales": {"scale_dtype": "float16"},
}


def candidates() -> list[Candidate]:
    found = [of_default(shape, M) for shape, M in itertools.product(SHAPES, (1, 16, 32, 48, 64, 256, 4096))]
    found += [of_default("8b_gate_up", M, kind) for kind, M in itertools.product(KINDS, (16, 64))]
    for shape, M in itertools.product(("8b_gate_up", "8b_down"), (16, 64, 256)):
        implementation, spec = serving(shape, M)
        spare = implementation.candidates(spec, H200)
        found += [candidate(f"{shape}-{M}-{n}", implementation, spec, spare[n]) for n in range(0, len(spare), 4)]
    return found


def serving(shape: str, M: int, kind: str = "") -> tuple[Any, W4A16Spec]:
    K, N = SHAPES[shape]
    facts: dict[str, Any] = {"group": 128, "zeros": False, "dtype": "bfloat16", "scale_dtype": "bfloat16"}
    spec = W4A16Spec(M=M, K=K, N=N, **facts | KINDS.get(kind, {}))
    return (hopper if hopper.why_not(spec, H200) is None else hopper_large), spec


def of_default(shape: str, M: int, kind: str = "") -> Candidate:
    return candidate("-".join(filter(None, (shape, str(M), kind))), *serving(shape, M, kind), None)


def candidate(name: str, implementation: Any, spec: W4A16Spec, config: Any) -> Candidate:
    tiles = spec.padded_N // 64
    shapes = [
        ((spec.M, spec.K), spec.dtype),
        ((tiles, spec.padded_K // 64, 8, 64), jnp.int32),
        ((tiles, spec.groups, 64), spec.scale_dtype),
    ]
    shapes += [((tiles, spec.groups, 64), jnp.uint8)] * spec.zeros
    matmul = functools.partial(implementation.matmul, spec, config=config)

    def call(x, words, scales, zeros=None):
        return matmul(x, words, scales, zeros)

    allowed: dict[str, Any] = {}
    if name == "8b_gate_up-32":
        allowed = {"spill_bytes": 4, "reason": "one number, read after the loop over rows of W (SASS, 2026-11)"}
    args = tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
    return Candidate(name=f"w4a16-{name}", function=call, args=args, **allowed)
