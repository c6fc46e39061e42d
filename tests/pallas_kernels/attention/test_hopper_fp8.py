"""The FP8 forward kernel: interpreted on a CPU against the float64 oracle on the operands it is given; and lowered."""

import dataclasses
import itertools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels.attention import fp8, hopper_fp8, hopper_fp8_config
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.hopper_fp8_config import Fp8Config
from pallas_kernels.attention.spec import AttentionSpec, make_spec
from pallas_kernels.device import H200, Device
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.oracle import attention
from tests.pallas_kernels.attention.test_fp8 import E4M3, codes, facts_of
from tests.pallas_kernels.attention.test_hopper import LOWERED_MASKS, ONE_CORE, case
from tests.tolerance import assert_close

CONFIGS = {
    "2x64": Fp8Config(kv_block=64),
    "2x64_both": Fp8Config(kv_block=64, promote=2, lazy=True, uncleared=True),
    "2x224": Fp8Config(kv_block=224, promote=8),
    "2x96_turns_alone": Fp8Config(kv_block=96, turns=True, persistent=False, lazy=True),
    "3x64_stages": Fp8Config(warpgroups=3, kv_block=64, stages=3, promote=1, uncleared=True),
    "2x128_promote": Fp8Config(kv_block=128, promote=2),
}


def call(case: Case, config: Fp8Config | None, device: Device = ONE_CORE) -> tuple[Any, tuple[Any, ...]]:
    """(function of operands and facts, these)."""
    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    spec, facts = case.spec(), facts_of(arguments)
    config = config or hopper_fp8_config.default(spec)
    arrays = (arguments[name] for name in ("query", "key", "value"))
    operands = fp8.quantise(spec, *arrays, block=config.kv_block, **facts)

    def attend(operands, facts):
        return hopper_fp8.attend_operands(
            spec, operands, scale=spec.default_scale, config=config, device=device, **facts
        )

    return attend, (operands, facts)


def check(case: Case, config: Fp8Config) -> None:
    function, (operands, facts) = call(case, config)
    out, lse = run_interpreted(function, operands, facts)
    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    hats = zip(fp8.dequantised(operands), ("query", "key", "value"), strict=True)
    arguments |= {name: x.swapaxes(1, 2)[:, : arguments[name].shape[1]] for x, name in hats}
    arguments["value"] = arguments["value"][..., : case.H_v]
    arguments["scale"] = case.spec().default_scale
    oracle, plain = (attention(**arguments, precision=precision) for precision in (None, E4M3))
    assert out.dtype == jnp.dtype(case.dtype) and lse.dtype == jnp.float32
    assert_close(out, oracle.out, plain.out, "out")
    assert_close(lse, oracle.lse, plain.lse, "lse")


INTERPRETED = {
    "whole": (case(T=64, S=230), "2x64_both"),
    "causal": (case(T=150, S=230, N=2, is_causal=True, causal_alignment="bottom_right", H=128, H_v=128), "2x224"),
    "segments": (case(B=2, T=130, S=130, query_runs=((0, 50), (-1, 20), (1, 60)), H=40, H_v=72), "3x64_stages"),
    "lengths": (
        case(B=3, T=130, S=200, query_lengths=(130, 0, 7), kv_lengths=(0, 200, 65), is_causal=True), "2x96_turns_alone",
    ),
    "wide": (case(T=65, S=140, H=256, H_v=256, window=(60, 5)), "2x64"),
    "promote": (case(T=130, S=300, N=3, H=128, H_v=128), "2x128_promote"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["whole", *(pytest.param(x, marks=pytest.mark.slow) for x in list(INTERPRETED)[1:])])
def test_interpreted(name):
    case, config = INTERPRETED[name]
    check(case, CONFIGS[config])


@pytest.mark.slow
def test_float32_sums_hold_what_short_ones_lose(monkeypatch):
    """Accumulators of 6 bits, as Hopper's of some 14 are on longer sums: every two blocks their sum is safe.

    Of zero queries and keys, whose scales' product is none, with a key hidden at the end.
    """

    class Short:
        __array_ufunc__ = None

        def __init__(self, product):
            self.product = product

        def __radd__(self, sum):
            fraction, exponent = np.frexp(sum + self.product)
            return np.ldexp(np.trunc(fraction * 64) / 64, exponent)

    numpy = types.SimpleNamespace(**vars(np) | {"matmul": lambda *args, **options: Short(np.matmul(*args, **options))})
    monkeypatch.setattr(gpu_callbacks, "np", numpy)
    spec = case(B=1, T=64, S=1270, N=1, K=1).spec()
    values = 1 + np.random.default_rng(0).integers(8, size=(1, spec.S, 1, 64)) / 8
    query, key = (jnp.zeros((1, length, 1, 64), spec.dtype) for length in (spec.T, spec.S))
    operands = fp8.quantise(spec, query, key, jnp.asarray(values, spec.dtype), block=64)
    errors = []
    for promote in (2, 0):
        config = Fp8Config(kv_block=64, promote=promote)
        out, _ = run_interpreted(lambda x, c=config: hopper_fp8.attend_operands(spec, x, scale=1.0, config=c), operands)
        errors.append(np.abs(np.asarray(out[0, :, 0], np.float32) / values.mean((0, 1, 2)) - 1).max())
    # Each of two additions loses at most a 32nd of the sum.
    assert errors[0] <= 2 / 32 < errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["2x64", "2x64_both"])
def test_what_is_not_finite_reaches_those_who_see_it(config):
    """A key or a value with NaN or inf: NaN in all rows that see it, and no change in any other."""
    plain = case(B=3, T=100, S=130, is_causal=True)
    arguments = {name: x for name, x in plain.arguments().items() if x is not None}
    arrays = [np.array(jnp.broadcast_to(arguments[n][:1], arguments[n].shape)) for n in ("query", "key", "value")]
    arrays[1][1, 70, 0, 3], arrays[2][2, 70, 0, 5] = np.nan, np.inf
    spec, config = plain.spec(), CONFIGS[config]
    operands = fp8.quantise(spec, *map(jnp.asarray, arrays), block=64)
    out, lse = run_interpreted(
        lambda x: hopper_fp8.attend_operands(spec, x, scale=0.125, config=config, device=ONE_CORE), operands
    )
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    for entry in (1, 2):
        np.testing.assert_array_equal(out[entry, :70], out[0, :70])
        np.testing.assert_array_equal(lse[entry, :70], lse[0, :70])
        assert np.isnan(out[entry, 70:]).all() and np.isnan(lse[entry, 70:]).all()


def lower(mask: str, dims: tuple[int, int], config: Fp8Config | None) -> None:
    H, H_v = dims
    changed = dataclasses.replace(LOWERED_MASKS[mask], N=2, H=H, H_v=H_v)
    if config is not None and not hopper_fp8_config.fits(changed.spec(), config):
        config = None
    function, arguments = call(changed, config)
    assert lower_for_cuda(function, *arguments).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
def test_codes_with_descales_lower():
    spec = make_spec(**codes())
    scales = [jnp.ones((spec.B, heads, 1)) for heads in (spec.N, spec.K, spec.K)]
    arrays = [codes()[name] for name in ("query", "key", "value")]
    lowered = lower_for_cuda(lambda *x: hopper_fp8.attend_codes(spec, *x, scale=-0.1), *arrays, *scales)
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 200)]
COMBINATIONS = list(zip(LOWERED_MASKS, itertools.cycle([None, *CONFIGS]), itertools.cycle(DIMS), strict=False))


@pytest.mark.parametrize(
    "mask, config, dims",
    # What lies between these is compiled by `make aot`.
    [pytest.param(*x, marks=[pytest.mark.slow] * (i % 5 > 0)) for i, x in enumerate(COMBINATIONS) if i % 5 in (0, 2)],
    ids=str,
)
def test_lowers(mask, config, dims):
    lower(mask, dims, CONFIGS[config] if config else None)


def test_default_configurations_fit():
    for H, H_v, S in itertools.product(range(8, 257, 8), range(8, 257, 8), (1000, 100_000)):
        spec = AttentionSpec(B=1, T=1, S=S, N=1, K=1, H=H, H_v=H_v, dtype="bfloat16", precision="fp8")
        config = hopper_fp8_config.default(spec)
        reason = hopper_fp8_config.why_not(spec, H200)
        assert (reason is not None) == (S > hopper_fp8_config.UNPROMOTED_KEYS and H_v > 128)
        if reason is None:
            assert config.kv_block == fp8.kv_block(spec) and (config.promote > 0) == (H_v <= 128)
            assert hopper_fp8_config.fits(spec, config), (H, H_v, config)
            if (H, H_v) in DIMS:
                assert hopper_fp8_config.candidates(spec)[0] == config


@pytest.mark.parametrize(
    "wrong",
    [{"warpgroups": 4}, {"kv_block": 80}, {"kv_block": 288}, {"stages": 1}, {"l2_mib": 0}, {"promote": -1}],
    ids=str,
)
def test_configurations_that_the_hardware_refuses(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Fp8Config(**wrong)
