"""The Hopper kernels of W4A16: interpreted on a CPU against a float64 product, with races; and lowered for CUDA."""

import dataclasses
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, Device
from pallas_kernels.w4a16 import hopper, hopper_large
from pallas_kernels.w4a16.cases import CASES, COLUMN, Case
from pallas_kernels.w4a16.spec import W4A16Spec
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.pallas_kernels.w4a16.padding import hostile_padding
from tests.tolerance import assert_close

Few, Many = hopper.Config, hopper_large.Config
Config = hopper.Config | hopper_large.Config
CPU = Device(platform="cpu", kind="cpu")


def module(config: Config) -> Any:
    return hopper if isinstance(config, Few) else hopper_large


def products(case: Case, rounded: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(float64 product of the exact weight, the same in float32 of the weight rounded to `rounded`)."""
    x, codes, scales, zeros = case.operands()
    group = np.minimum(np.arange(case.K) // case.group, len(scales) - 1)
    zero = 8.0 if zeros is None else zeros.astype(np.float64)[group]
    weight = (codes - zero) * scales.astype(np.float64)[group]
    plain = weight.astype(np.float32) if rounded is None else weight.astype(jnp.dtype(rounded)).astype(np.float32)
    exact = x.astype(np.float64) @ weight
    return exact, (x.astype(np.float32) @ plain).astype(jnp.dtype(case.dtype))


def call(
    case: Case, config: Config | None, cores: int | None, implementation: Any = None
) -> tuple[Any, tuple[Any, ...]]:
    """(function of arrays, arrays) of the kernel's call."""
    if implementation is None:
        assert config is not None
        implementation = module(config)
    x, words, scales, zeros = case.packed()
    device = dataclasses.replace(H200, num_cores=cores)

    def function(x, words, scales, *zeros):
        zero = zeros[0] if zeros else None
        return implementation.matmul(case.spec(), x, words, scales, zero, config=config, device=device)

    return function, (x, words, scales, *([] if zeros is None else [zeros]))


def check(case: Case, config: Config | None, *, cores: int = 1, implementation: Any = None, **options: Any) -> None:
    function, arrays = call(case, config, cores, implementation)
    y = run_interpreted(function, *arrays, **options)
    exact, plain = products(case, case.spec().operand_dtype)
    assert y.shape == (case.M, case.N) and y.dtype == jnp.dtype(case.dtype)
    assert_close(y, exact, plain, "y")


def some_slow(rows: Any, keep: int) -> list[Any]:
    """Every keep-th within the suite's time, the others with the long tests."""
    every = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=[pytest.mark.slow] * (i % keep > 0)) for i, row in enumerate(every)]


SERVED = {name: case for name, case in CASES.items() if case.dtype != "float32"}
SERVED_FEW = [name for name, case in SERVED.items() if hopper.why_not(case.spec(), H200) is None]
SERVED_MANY = [name for name, case in SERVED.items() if hopper_large.why_not(case.spec(), H200) is None]


@pytest.mark.parametrize("name", some_slow(SERVED_FEW, 12))
def test_few_rows(name):
    check(SERVED[name], None, implementation=hopper)


@pytest.mark.parametrize("name", some_slow(SERVED_MANY, 14))
def test_many_rows(name):
    check(SERVED[name], None, implementation=hopper_large)


FEW_CONFIGS = [
    Few(columns=columns, warpgroups=warpgroups, split=split, depth=depth)
    for (columns, warpgroups, split), depth in zip(
        [(64, 4, 1), (64, 4, 2), (64, 4, 4), (64, 2, 1), (64, 2, 2), (32, 4, 1), (32, 4, 2), (32, 4, 4), (32, 2, 2)]
        + [(16, 4, 1), (16, 4, 2), (16, 4, 4), (16, 2, 1)],
        itertools.cycle((1, 2)),
        strict=False,
    )
]
FEW_CONFIGS[7:7] = [Few(warpgroups=2, blocks=4), Few(blocks=2, depth=2), Few(columns=32, warpgroups=2, blocks=2)]


def name_of(x: Any) -> str:
    return "-".join(map(str, dataclasses.astuple(x))) if isinstance(x, Config) else str(x)


@pytest.mark.parametrize(
    "config, group", some_slow(zip(FEW_CONFIGS, itertools.cycle((128, 32, COLUMN, 64))), 7), ids=name_of
)
def test_schedules_of_few_rows(config, group):
    """Steps, slices and turns that do not come out even: 5 tiles of rows, 7 of columns."""
    check(Case(M=3, K=300, N=420, group=group, zeros=True), config, cores=2)


@pytest.mark.parametrize("config", [Few(columns=16, depth=2), pytest.param(Few(columns=32), marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", [192, pytest.param(320, marks=pytest.mark.slow)])
def test_a_group_of_all_rows_that_a_step_exceeds(config, group):
    check(Case(M=2, K=192, N=64, group=group, zeros=True), config)


MANY_CONFIGS = [
    Many(warpgroups=4, tokens=64),
    Many(blocks=2, tokens=64),
    Many(tokens=64, stages=3),
    Many(blocks=2, tokens=128),
    Many(tokens=256),
    Many(blocks=4, tokens=64),
    Many(tokens=192),
    Many(blocks=4, tokens=32, depth=2, stages=3),
    Many(warpgroups=4, tokens=64, depth=2),
    Many(blocks=4, tokens=16),
    Many(tokens=48, depth=2),
]


@pytest.mark.parametrize(
    "config, group", some_slow(zip(MANY_CONFIGS, itertools.cycle((128, 32, COLUMN, 64))), 5), ids=name_of
)
def test_schedules_of_many_rows(config, group):
    """An odd number of steps, runs of columns that do not come out even, a tile of rows of x that is not full."""
    check(Case(M=config.tokens - 5, K=180, N=420, group=group, zeros=True), config, cores=2)


@pytest.mark.parametrize(
    "config, M, N",
    some_slow(
        [
            (Many(tokens=64, cluster=2, stages=3), 40, 300),
            (Many(blocks=2, tokens=64, cluster=2), 70, 400),
            (Many(warpgroups=4, tokens=64, cluster=2), 64, 580),
            (Many(tokens=256, cluster=2), 300, 64),
        ],
        4,
    ),
    ids=name_of,
)
def test_clusters_that_share_x(config, M, N):
    """Two clusters, runs of columns that leave less to one CTA, or nothing."""
    check(Case(M=M, K=320, N=N, group=32), config, cores=4)


@pytest.mark.parametrize("config", some_slow(MANY_CONFIGS, 14), ids=name_of)
def test_several_tiles_of_rows(config):
    check(Case(M=config.tokens + 9, K=100, N=300, zeros=True), config, cores=3)


@pytest.mark.parametrize(
    "config, M",
    some_slow(
        [
            (Many(tokens=64, parts=2), 40),
            (Many(blocks=2, tokens=64, parts=4), 60),
            (Many(tokens=128, parts=2), 200),
            (Many(warpgroups=4, tokens=64, parts=2), 33),
            (Many(blocks=2, tokens=128, parts=4), 100),
        ],
        3,
    ),
    ids=name_of,
)
def test_parts_of_the_rows_of_w(config, M):
    """CTAs that wait for each other, the last with fewer rows of W; all run together.

    jax's CPU client runs 32 computations at a time, and each warpgroup and warp is one: 4 CTAs of 3 warpgroups fit.
    """
    case = Case(M=M, K=64 * 15 + 8, N=100, group=128, zeros=True)
    check(case, config, cores=16, together=True)


@pytest.mark.parametrize("config", [Few(), Many(tokens=64)], ids=name_of)
def test_padding_is_never_seen(config):
    """Any finite weights past K and N."""
    case = Case(K=70, N=70, group=32, zeros=True)
    function, (x, *packed) = call(case, config, 1)
    clean, dirty = (np.asarray(run_interpreted(function, x, *arrays)) for arrays in (packed, hostile_padding(case)))
    np.testing.assert_array_equal(dirty, clean)


# Lowering finds what the interpreter cannot: layouts, and shared memory.

SHAPES = [(8192, 57344), (4096, 28672), (14336, 4096), (4096, 4096), (4096, 1024), (200, 100)]  # K, N
KINDS: list[dict[str, Any]] = [
    {"group": 128, "zeros": False},
    {"group": 32, "zeros": True},
    {"group": 64, "zeros": True, "dtype": "float16", "scale_dtype": "float16"},
    {"group": COLUMN, "zeros": True, "scale_dtype": "float16"},
]


def lower(spec: Any, config: Config | None, implementation: Any) -> None:
    struct = jax.ShapeDtypeStruct
    tiles, groups = spec.padded_N // 64, spec.groups
    arrays = [
        struct((spec.M, spec.K), spec.dtype),
        struct((tiles, spec.padded_K // 64, 8, 64), jnp.int32),
        struct((tiles, groups, 64), spec.scale_dtype),
    ]
    arrays += [struct((tiles, groups, 64), jnp.uint8)] * spec.zeros

    def function(x, words, scales, *zeros):
        return implementation.matmul(spec, x, words, scales, zeros[0] if zeros else None, config=config)

    assert lower_for_cuda(function, *arrays).as_text().count("custom_call @mosaic_gpu") == 1


def specs(rows: tuple[int, ...]) -> list[W4A16Spec]:
    """Every shape and every kind, each with some of the numbers of rows."""
    every = itertools.product(enumerate(SHAPES), enumerate(KINDS))
    default: dict[str, Any] = {"dtype": "bfloat16", "scale_dtype": "bfloat16"}
    return [W4A16Spec(M=rows[(i + j) % len(rows)], K=K, N=N, **default | kind) for (i, (K, N)), (j, kind) in every]


def lower_two(spec: W4A16Spec, implementation: Any) -> None:
    """The default and another candidate, for each spec a different one."""
    chosen, number = implementation.candidates(spec, H200), zlib.crc32(str(spec).encode())
    assert implementation.default(spec, H200) in chosen
    for config in (implementation.default(spec, H200), chosen[number % len(chosen)]):
        lower(spec, config, implementation)


@pytest.mark.parametrize("spec", some_slow(specs((1, 8, 16, 17, 32)), 11), ids=str)
def test_candidates_for_few_rows_lower(spec):
    lower_two(spec, hopper)


@pytest.mark.parametrize("spec", some_slow(specs((33, 64, 130, 256, 4096)), 11), ids=str)
def test_candidates_for_many_rows_lower(spec):
    lower_two(spec, hopper_large)


@pytest.mark.slow
@pytest.mark.parametrize("implementation, M", [(hopper, 16), (hopper_large, 64), (hopper_large, 1024)])
def test_every_candidate_lowers(implementation, M):
    spec = W4A16Spec(M=M, K=4096, N=4096, group=128, zeros=True, dtype="bfloat16", scale_dtype="bfloat16")
    configs = implementation.candidates(spec, H200)
    if M == 1024:  # M=64 has the others
        configs = [config for config in configs if config.tokens > 64]
    assert len(configs) > 10
    for config in configs:
        lower(spec, config, implementation)


@pytest.mark.parametrize("M", [1, 16, 32, 33, 64, 256, 5000])
def test_defaults_fit_into_shared_memory(M):
    sizes = itertools.product((64, 4096), (64, 28672), (32, 128), ("bfloat16", "float16"), (False, True))
    for K, N, group, dtype, zeros in sizes:
        spec = W4A16Spec(M=M, K=K, N=N, group=group, zeros=zeros, dtype=dtype, scale_dtype=dtype)
        for implementation in (hopper, hopper_large):
            if implementation.why_not(spec, H200) is None:
                config = implementation.default(spec, H200)
                assert implementation.smem_bytes(spec, config) <= implementation.SMEM_LIMIT - 8192


def test_too_many_stages_are_told_before_any_work():
    function, arrays = call(Case(group=128), Few(stages=32, depth=2), 1)
    with pytest.raises(ValueError, match="stages=32.*shared memory"):
        function(*arrays)
    function, arrays = call(Case(M=130), Many(stages=20), 1)
    with pytest.raises(ValueError, match="stages=20.*shared memory"):
        function(*arrays)


def test_a_cluster_needs_as_many_cores():
    function, arrays = call(Case(M=130), Many(tokens=64, cluster=2), 1)
    with pytest.raises(ValueError, match="1 SMs for a cluster of 2"):
        function(*arrays)


def test_parts_that_would_wait_for_ever_are_told():
    """All parts must run at once, and each needs rows of W of its own."""
    function, arrays = call(Case(M=130), Many(tokens=64, parts=2), 5)
    with pytest.raises(ValueError, match="6 CTAs.*5 fit"):
        function(*arrays)
    function, arrays = call(Case(M=33), Many(tokens=64, parts=4), 132)
    with pytest.raises(ValueError, match="256 rows of W for 4 parts"):
        function(*arrays)
    function, arrays = call(Case(M=33, K=4096), Many(tokens=64, parts=2), None)
    with pytest.raises(ValueError, match="CTAs wait for each other.*NVIDIA H200.*not known"):
        function(*arrays)


@pytest.mark.parametrize("M", [33, 64, 256])
def test_no_parts_where_the_sms_are_not_counted(M):
    spec = Case(M=M, K=4096, N=1024, group=128).spec()
    unknown = dataclasses.replace(H200, num_cores=None)
    chosen = hopper_large.candidates(spec, unknown)
    assert hopper_large.default(spec, H200).parts > 1
    assert chosen and all(config.parts == 1 for config in (*chosen, hopper_large.default(spec, unknown)))


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: Few(columns=48), "columns"),
        (lambda: Few(warpgroups=3), "warpgroups"),
        (lambda: Few(split=3), "split"),
        (lambda: Few(blocks=3), "blocks"),
        (lambda: Few(blocks=2, split=2), "blocks"),
        (lambda: Few(depth=8), "depth"),
        (lambda: Few(split=4, stages=6), "stages"),
        (lambda: Few(stages=33), "stages"),
        (lambda: Many(warpgroups=3), "warpgroups"),
        (lambda: Many(blocks=3), "blocks"),
        (lambda: Many(warpgroups=4, blocks=2, tokens=64), "blocks"),
        (lambda: Many(tokens=100), "tokens"),
        (lambda: Many(parts=3), "parts"),
        (lambda: Many(parts=4, tokens=16), "parts"),
        (lambda: Many(depth=4), "depth"),
        (lambda: Many(cluster=4), "cluster"),
        (lambda: Many(cluster=2, parts=2), "cluster"),
        (lambda: Many(blocks=2), "tokens"),
        (lambda: Many(stages=2), "stages"),
        (lambda: Many(stages=33), "stages"),
    ],
)
def test_configurations_that_the_hardware_refuses(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_why_not():
    case = Case(M=16)
    assert hopper.why_not(case.spec(), H200) is None and hopper_large.why_not(case.spec(), H200) is None
    for kernel in (hopper, hopper_large):
        assert "Hopper" in str(kernel.why_not(case.spec(), CPU))
        assert "float32" in str(kernel.why_not(dataclasses.replace(case, dtype="float32").spec(), H200))
    assert "33" in str(hopper.why_not(dataclasses.replace(case, M=33).spec(), H200))
    assert hopper_large.why_not(dataclasses.replace(case, M=1_000_000).spec(), H200) is None
    narrow = dataclasses.replace(case, dtype="float16")
    assert "range" in str(hopper_large.why_not(narrow.spec(), H200))
