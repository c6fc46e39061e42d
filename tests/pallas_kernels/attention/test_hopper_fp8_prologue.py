"""The kernel that rounds attention's operands: interpreted on a CPU, bit for bit the plain path; and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import fp8, hopper_fp8_prologue
from pallas_kernels.attention.cases import Case
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.pallas_kernels.attention.test_fp8 import facts_of

HOSTILE = Case(B=2, T=70, S=150, N=2, K=1, H=40, H_v=72, dtype="bfloat16", query_lengths=(70, 3), kv_lengths=(150, 30))
CASES = {
    "hostile_96": (HOSTILE, 96),
    "hostile_128": (HOSTILE, 128),
    "wide_16": (Case(B=1, T=64, S=70, N=1, K=1, H=256, H_v=64, dtype="float16"), 128),
    "three_chunks": (Case(B=1, T=9, S=300, N=2, K=1, H=192, H_v=128, dtype="bfloat16"), 64),
    "documents": (
        Case(B=2, T=130, S=130, query_runs=((0, 50), (-1, 20), (1, 60)), H=128, H_v=128, dtype="bfloat16"), 224,
    ),
}  # fmt: skip


def arrays_of(case: Case) -> list[np.ndarray]:
    """Multiples of 2^-8, whose sums float32 holds exactly in any order; the hostile ones with what is not finite."""
    arguments = case.arguments()
    arrays = [np.round(np.asarray(arguments[name], np.float32) * 256) / 256 for name in ("query", "key", "value")]
    if case is HOSTILE:
        q, k, v = arrays
        q[1, 3:], k[1, 30:], v[1, 30:] = np.inf, 1e30, np.nan  # what lengths hide
        v[0, 7, 0, 3], v[0, 8, 0, 0], k[0, 9, 0, 2], q[0, 2, 0, 5] = np.inf, 1e20, np.nan, np.inf
        v[0, 20] *= 2.0**-30
    return arrays


@pytest.mark.parametrize("name", ["hostile_96", *(pytest.param(x, marks=pytest.mark.slow) for x in list(CASES)[1:])])
def test_rounded_as_by_the_plain_path(name):
    case, block = CASES[name]
    spec, facts = case.spec(), facts_of(case.arguments())
    arrays = [jnp.asarray(x, case.dtype) for x in arrays_of(case)]
    got = run_interpreted(lambda *x: hopper_fp8_prologue.quantise(spec, *x, block=block, **facts), *arrays)
    want = jax.jit(lambda *x: fp8.quantise(spec, *x, block=block, **facts))(*arrays)
    for field, one, other in zip(fp8.Operands._fields, got, want, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32), err_msg=field)


LOWERED = [((40, 72), 96, {"kv_lengths": (70,)}), ((64, 64), 128, {}), ((256, 256), 128, {})]


@pytest.mark.parametrize(
    "dims, block, facts", [LOWERED[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in LOWERED[1:])], ids=str
)
def test_lowers(dims, block, facts):
    case = Case(B=1, T=100, S=70, N=2, K=1, H=dims[0], H_v=dims[1], dtype="bfloat16", **facts)
    arguments = case.arguments()
    arrays = [arguments[name] for name in ("query", "key", "value")]
    lowered = lower_for_cuda(
        lambda *x: hopper_fp8_prologue.quantise(case.spec(), *x, block=block, **facts_of(arguments)), *arrays
    )
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2
