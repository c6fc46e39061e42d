"""The Hopper kernels of FP8: interpreted on a CPU against a float64 product, with races; and lowered for CUDA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, Device
from pallas_kernels.fp8 import hopper, hopper_config, hopper_quantize, tile
from pallas_kernels.fp8.cases import CASES, Case
from pallas_kernels.fp8.hopper_config import Config
from pallas_kernels.fp8.spec import E4M3, E5M2, Fp8Spec, scale_shape, w_block, x_block
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.pallas_kernels.fp8.test_product import exact_and_plain
from tests.tolerance import assert_close

SERVED = [name for name, case in CASES.items() if hopper.why_not(case.spec(), H200) is None]


def check(case: Case, config: Config | None, *, cores: int | None, **options: Any) -> None:
    device = dataclasses.replace(H200, num_cores=cores)

    def function(*arrays):
        return hopper.matmul(case.spec(), *arrays, config=config, device=device)

    y = run_interpreted(function, *map(jnp.asarray, case.operands()), **options)
    assert y.shape == (case.M, case.N) and y.dtype == jnp.bfloat16
    exact, plain = exact_and_plain(case)
    assert_close(y, exact, plain, "y")


def quick(first: int, *rows: Any) -> list[Any]:
    """The first ones within the suite's time, the others with the long tests."""
    return [pytest.param(*row, marks=[pytest.mark.slow] * (i >= first)) for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", quick(0, *[(name,) for name in SERVED]))
def test_cases(name):
    """By the default, but for runs that wait for each other, which the interpreter would have to run side by side."""
    check(CASES[name], None, cores=None)


@pytest.mark.parametrize(
    "case, config, cores",
    quick(
        1,
        (Case(M=20, K=300, N=200), Config(swapped=True, columns=32, blocks=1), 1),
        (Case(M=270, K=300, N=200), Config(), 1),
        (Case(M=270, K=700, N=400), Config(stages=2), 3),
        (Case(M=130, K=300, N=400, scaling="row"), Config(blocks=1, stages=2), 2),
        (Case(M=150, K=300, N=300), Config(swapped=True), 2),
        (Case(M=20, K=2000, N=200), Config(swapped=True, columns=16, stages=3), 1),
    ),
    ids=str,
)
def test_schedules(case, config, cores):
    """Tiles that are not full, more tiles than CTAs, steps that do not fill the ring or go round in it."""
    check(case, config, cores=cores)


@pytest.mark.parametrize(
    "case, config, cores",
    quick(
        1,
        (Case(M=9, K=640, N=256), Config(swapped=True, columns=16, blocks=1, even=True), 3),
        (Case(M=9, K=1300, N=100), Config(swapped=True, columns=16, blocks=1, even=True), 4),
        (Case(M=140, K=400, N=130), Config(blocks=1, even=True), 3),
        (Case(M=40, K=600, N=600), Config(swapped=True, columns=64, even=True), 4),
        (Case(M=270, K=256, N=200, scaling="row"), Config(even=True), 3),
    ),
    ids=str,
)
def test_even_runs(case, config, cores):
    """Runs that end within a tile, a tile of many runs, runs of several tiles; all CTAs run together."""
    check(case, config, cores=cores, together=True)


@pytest.mark.parametrize(
    "case, config",
    quick(
        1,
        (Case(M=13, K=300, N=100), Config(swapped=True, columns=16, blocks=1, split=2)),
        (Case(M=13, K=700, N=130), Config(swapped=True, columns=16, blocks=1, split=2)),
        (Case(M=40, K=300, N=300), Config(swapped=True, columns=64, blocks=2, split=4, stages=2)),
        (Case(M=70, K=130, N=100, scaling="row"), Config(swapped=True, columns=64, blocks=1, split=4)),
    ),
    ids=str,
)
def test_clusters(case, config):
    """CTAs with fewer steps than others, or none; several blocks, several tiles, scales in the epilogue."""
    check(case, config, cores=None)


@pytest.mark.parametrize("shape", quick(1, ((70, 300),), ((1, 1),), ((64, 1024),)), ids=str)
def test_activations_are_rounded_as_by_the_plain_path(shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape) * np.exp(5 * rng.standard_normal(shape)), jnp.bfloat16)
    x = x.at[0].set(0).at[-1, -1].set(3e38)
    codes, scales = run_interpreted(lambda x: hopper_quantize.quantize(x, E4M3), x)
    want = jax.jit(tile.quantize, static_argnums=(1, 2))(x, (1, 128), E4M3)
    for got, right in zip((codes, scales), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(right).astype(np.float32))


# Lowering finds what the interpreter cannot: layouts, and shared memory.


def lower(spec: Fp8Spec, config: Config | None) -> None:
    x, w = (spec.M, spec.K), (spec.N, spec.K)
    shapes = [
        (x, spec.x_dtype),
        (scale_shape(x, x_block(spec.scaling, x)), "float32"),
        (w, spec.w_dtype),
        (scale_shape(w, w_block(spec.scaling, w)), "float32"),
    ]
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    lowered = lower_for_cuda(lambda *a: hopper.matmul(spec, *a, config=config), *arrays)
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("M, K, N", quick(0, (300, 300, 200), (1, 7168, 4096), (64, 1536, 24576), (4096, 7168, 2112)))
def test_every_candidate_lowers(M, K, N):
    spec = Fp8Spec(M=M, K=K, N=N, scaling="block", dtype="bfloat16")
    chosen = hopper_config.candidates(spec, H200)
    assert hopper_config.default(spec, H200) == chosen[0] and len(chosen) >= 3
    for config in chosen:
        lower(spec, config)
    lower(dataclasses.replace(spec, scaling="row", x_dtype=E5M2), None)


def test_some_candidates_lower():
    spec = Fp8Spec(M=300, K=300, N=200, scaling="block", dtype="bfloat16")
    lower(spec, Config())
    lower(spec, Config(swapped=True, columns=16, blocks=1, even=True))
    lower(spec, Config(swapped=True, columns=16, blocks=1, split=2))


def test_rounding_lowers():
    x = jax.ShapeDtypeStruct((100, 7168), jnp.bfloat16)
    assert "mosaic_gpu" in lower_for_cuda(lambda x: hopper_quantize.quantize(x, E4M3), x).as_text()


@pytest.mark.parametrize("M", [1, 16, 33, 64, 256, 257, 5000])
def test_defaults_fit(M):
    for K, N in ((1, 1), (4096, 28672), (16384, 7168)):
        spec = Fp8Spec(M=M, K=K, N=N, scaling="block", dtype="bfloat16")
        for device in (H200, dataclasses.replace(H200, num_cores=None)):
            config = hopper_config.default(spec, device)
            assert config in hopper_config.candidates(spec, device)
            assert hopper_config.smem_bytes(spec, config) <= hopper_config.SMEM_LIMIT - 8192
            assert device is H200 or not config.even


def test_what_cannot_run_is_told_before_any_work():
    arrays = [jnp.asarray(a) for a in Case().operands()]
    calls: list[tuple[Config, Device, str]] = [
        (Config(stages=9), H200, "bytes of shared memory"),
        (Config(even=True), dataclasses.replace(H200, num_cores=None), "wait for each other.*not known"),
    ]
    for config, device, reason in calls:
        with pytest.raises(ValueError, match=reason):
            hopper.matmul(Case().spec(), *arrays, config=config, device=device)


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"blocks": 3}, "blocks"),
        ({"columns": 64}, "columns"),
        ({"columns": 256, "swapped": True}, "columns"),
        ({"split": 2}, "split"),
        ({"split": 2, "swapped": True, "even": True}, "split"),
        ({"split": 4, "swapped": True, "columns": 16}, "columns"),
        ({"stages": 1}, "stages"),
        ({"stages": 17}, "stages"),
    ],
)
def test_configurations_that_the_hardware_refuses(wrong, name):
    with pytest.raises(ValueError, match=name):
        Config(**wrong)


def test_why_not():
    assert hopper.why_not(Case().spec(), H200) is None
    assert "Hopper" in str(hopper.why_not(Case().spec(), Device(platform="cpu", kind="cpu")))
    assert "float32" in str(hopper.why_not(Case(dtype="float32").spec(), H200))
    assert "bfloat16" in str(hopper_quantize.why_not(jnp.zeros((2, 2)), H200))
    assert hopper_quantize.why_not(jnp.zeros((2, 2), jnp.bfloat16), H200) is None
