"""Every implementation on every case, values and gradient against the oracle; and what the public call refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, Device, current_device
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.w4a16 import api
from pallas_kernels.w4a16.cases import CASES, Case
from tests.pallas_kernels.w4a16.padding import hostile_padding
from tests.quant import oracle
from tests.tolerance import assert_close


@functools.cache
def compiled(spec, implementation):
    def both(x, dy, *packed):
        y, pull = jax.vjp(lambda x: api.matmul(spec, x, *packed, implementation=implementation), x)
        return y, pull(dy)[0]

    return jax.jit(both)


def against_oracle(case: Case, implementation: str | None, seed: int = 0) -> None:
    """Asserts that y and dx are as right as the case's precision allows."""
    spec, (x, codes, scales, zeros) = case.spec(), case.operands(seed)
    dy = np.random.default_rng(seed + 1).standard_normal((case.M, case.N)).astype(x.dtype)
    _, *packed = case.packed(seed)
    y, dx = compiled(spec, implementation)(jnp.asarray(x), jnp.asarray(dy), *packed)
    assert y.dtype == dx.dtype == x.dtype
    w = oracle.weight(codes, scales, zeros, case.group)
    assert_close(y, oracle.product(x, w), oracle.product(x, w, x.dtype), "y")
    assert_close(dx, oracle.product(dy, w.T), oracle.product(dy, w.T, x.dtype), "dx")


# Whose every property another case has too.
SLOW = {"one_row", "rows_17", "k_below_a_group", "k_tail_column", "n_tail", "empty_groups", "bfloat16_float16_scales"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
@pytest.mark.parametrize("implementation", api.IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def test_values_and_gradients(implementation, case):
    reason = implementation.why_not(CASES[case].spec(), current_device())
    if reason is not None:
        pytest.skip(reason)
    against_oracle(CASES[case], implementation.name)


@pytest.mark.parametrize(
    "M", [*(pytest.param(M, marks=pytest.mark.slow) for M in (1, 2, 3, 8, 9, 16, 31, 32, 64, 65, 127, 129)), 33]
)
def test_rows(M):
    against_oracle(Case(M=M, K=192, N=72, group=32, zeros=True), None, seed=M)


def test_no_rows():
    case = Case(M=0)
    spec, (x, *packed) = case.spec(), case.packed()
    y, dx = compiled(spec, None)(x, jnp.zeros((0, case.N), x.dtype), *packed)
    assert y.shape == (0, case.N) and dx.shape == x.shape and y.dtype == dx.dtype == x.dtype


def test_padding_is_never_seen():
    """Codes, zero points and scales beyond K and N may be any finite weights."""
    case = Case(K=70, N=70, group=32, zeros=True)
    spec, (x, *packed) = case.spec(), case.packed()
    f = jax.jit(functools.partial(api.matmul, spec))
    np.testing.assert_array_equal(f(x, *hostile_padding(case)), f(x, *packed))


def test_nan_and_infinity_in_one_row_stay_there():
    case = Case(M=4, dtype="float32")
    spec, (x, *packed) = case.spec(), case.packed()
    f = jax.jit(functools.partial(api.matmul, spec))
    y = np.asarray(f(x.at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf), *packed))
    assert np.isnan(y[1]).all() and not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(y[[0, 3]], np.asarray(f(x, *packed))[[0, 3]])


def test_the_same_bits_every_time():
    spec, (x, *packed) = CASES["tails"].spec(), CASES["tails"].packed()
    dy = jnp.ones((spec.M, spec.N), x.dtype)
    first = jax.tree.map(np.asarray, compiled(spec, None)(x, dy, *packed))
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, compiled(spec, None)(x, dy, *packed), first)


def test_arrays_of_another_spec_are_refused():
    spec, arrays = CASES["plain"].spec(), CASES["plain"].packed()
    with pytest.raises(ValueError, match="^w4a16_matmul: the arrays are of M=5 .* not of spec=M=6"):
        api.matmul(dataclasses.replace(spec, M=6), *arrays)
    with pytest.raises(ValueError, match="asymmetric"):
        api.matmul(dataclasses.replace(spec, zeros=True), *arrays)
    with pytest.raises(ValueError, match="words of shape"):
        api.matmul(dataclasses.replace(spec, N=spec.N + 64), *arrays)


def test_an_implementation_by_name_or_an_error():
    spec, arrays = CASES["plain"].spec(), CASES["plain"].packed()
    with pytest.raises(ValueError, match="w4a16_matmul: unknown name='xl'.*xla"):
        api.matmul(spec, *arrays, implementation="xl")
    for implementation in api.IMPLEMENTATIONS:
        if (reason := implementation.why_not(spec, current_device())) is not None:
            with pytest.raises(Unsupported) as error:
                api.matmul(spec, *arrays, implementation=implementation.name)
            assert error.value.rejected == ((implementation.name, reason),)


def test_explain_names_every_implementation():
    cpu = Device(platform="cpu", kind="cpu")
    for device in (cpu, H200):
        explanation = api.explain(CASES["plain"].spec(), device=device)
        assert [name for name, _ in explanation.verdicts] == [i.name for i in api.IMPLEMENTATIONS]
        assert explanation.chosen is not None
    assert api.explain(CASES["plain"].spec(), device=cpu).chosen == "xla"
    assert api.explain(CASES["plain"].spec(), device=H200, implementation="xla").chosen == "xla"


@pytest.mark.parametrize("M", [0, 1, 32, 33, 100_000])
@pytest.mark.parametrize("implementation", [None, *(implementation.name for implementation in api.IMPLEMENTATIONS)])
def test_explain_any_number_of_rows(implementation, M):
    spec = dataclasses.replace(CASES["plain"].spec(), M=M)
    limits = {"hopper": 32, "hopper_large": 1 << 30, "xla": 1 << 30}
    serving = [name for name, most in limits.items() if most >= M and implementation in (None, name)]
    explanation = api.explain(spec, device=H200, implementation=implementation)
    assert explanation.chosen == (serving[0] if serving else None) and str(explanation)
