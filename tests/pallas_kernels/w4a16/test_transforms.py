"""The kernels under jit, loops, vmap, a shard_map and a mesh: they lower, and are chosen by the sizes of one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.device import H200
from pallas_kernels.w4a16 import api, hopper, hopper_large, partition, reference
from pallas_kernels.w4a16.cases import Case
from tests.mosaic.lowering import lower_for_cuda
from tests.quant import oracle
from tests.tolerance import assert_close

# Each of these is traced for an H200 and never for the CPU: jit keeps traces by the spec alone.
FEW, MANY = Case(M=8, K=4096, N=4096), Case(M=64, K=4096, N=4096)


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    monkeypatch.setattr(api, "current_device", lambda: H200)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(partition, "alone", lambda: True)


@pytest.fixture
def seen(monkeypatch):
    """The exact path in the kernels' places; a list of (name, M, N) of what ran."""
    calls = []

    def stand_in(name, module):
        def matmul(spec, *operands, config, device):
            assert device == H200 and config in module.candidates(spec, device)
            calls.append((name, spec.M, spec.N))
            return reference.matmul(spec, *operands)

        return matmul

    for name, module in (("hopper", hopper), ("hopper_large", hopper_large)):
        monkeypatch.setattr(module, "matmul", stand_in(name, module))
    return calls


def structs(case: Case, *leading: int) -> list[Any]:
    spec = case.spec()
    tiles = spec.padded_N // 64
    x = jax.ShapeDtypeStruct((*leading, spec.M, spec.K), spec.dtype)
    words = jax.ShapeDtypeStruct((*leading, tiles, spec.padded_K // 64, 8, 64), jnp.int32)
    return [x, words, jax.ShapeDtypeStruct((*leading, tiles, spec.groups, 64), spec.scale_dtype)]


def through_jit(f, x, words, scales):
    return jax.jit(f)(x[0], words[0], scales[0])


def through_scan(f, x, words, scales):
    return jax.lax.scan(lambda carry, packed: (f(carry, *packed), None), x[0], (words, scales))[0]


def through_while(f, x, words, scales):
    return jax.lax.while_loop(lambda y: y.sum() < 0, lambda y: f(y, words[0], scales[0]), x[0])


def through_vmap(f, x, words, scales):
    return jax.vmap(f)(x, words, scales)


def through_checkpointed_gradient(f, x, words, scales):
    return jax.grad(lambda x: (jax.checkpoint(f)(x, words[0], scales[0]) ** 2).sum())(x[0])


@pytest.mark.parametrize(
    "transform", [through_jit, through_scan, through_while, through_vmap, through_checkpointed_gradient]
)
@pytest.mark.parametrize(
    "case, implementation",
    [pytest.param(FEW, api.HOPPER, marks=pytest.mark.slow), (MANY, api.HOPPER_LARGE)],
    ids=["few", "many"],
)
def test_lowers_through_transformations(transform, case, implementation, alone):
    spec = case.spec()
    assert hopper_large.default(MANY.spec(), H200).parts > 1  # the kind that counts in memory

    def function(*arrays):
        return transform(lambda x, words, scales: implementation.forward(spec, x, words, scales, None), *arrays)

    assert lower_for_cuda(function, *structs(case, 3)).as_text().count("custom_call @mosaic_gpu") == 1


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("case", [FEW, MANY], ids=["few", "many"])
def test_lowers_inside_a_shard_map_that_checks_how_values_vary(case):
    spec = case.spec()

    def body(x, words, scales):
        return jax.vjp(lambda x: api.matmul(spec, x, words, scales), x)[1](x)[0] + api.matmul(spec, x, words, scales)

    x, *packed = structs(case)
    whole = jax.ShapeDtypeStruct((8 * spec.M, spec.K), x.dtype)
    split = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(P("data"), P(), P()), out_specs=P("data")))
    text = split.trace(whole, *packed).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_vmap_and_scan_inside_such_a_shard_map(seen):
    """Three batches through two layers on each of 8 devices."""
    case = Case(M=48, K=128, N=128)
    x, *packed = case.packed()
    spec = dataclasses.replace(case.spec(), M=2)

    def body(x, *stack):
        def layer(x, packed):
            return jax.vmap(lambda x: api.matmul(spec, x, *packed))(x), None

        return jax.lax.scan(layer, x.reshape(3, 2, 128), stack)[0].reshape(6, 128)

    stack = [jnp.stack([a, a]) for a in packed[:2]]
    split = jax.shard_map(body, mesh=mesh(), in_specs=(P("data"), P(), P()), out_specs=P("data"))
    y = jax.jit(split)(x, *stack)
    assert seen[-1] == ("hopper", 6, 128)
    check(case, api.matmul(case.spec(), x, *packed, implementation="xla"), y)


def check(case: Case, xs: Any, ys: Any) -> None:
    _, codes, scales, zeros = case.operands()
    w = oracle.weight(codes, scales, zeros, case.group)
    rows = np.asarray(xs).reshape(-1, case.K)
    assert_close(ys.reshape(-1, case.N), oracle.product(rows, w), oracle.product(rows, w, rows.dtype))


def mapped(case: Case, size: int, implementation: str | None) -> tuple[Any, Any]:
    xs = dataclasses.replace(case, M=size * case.M).packed()[0].reshape(size, case.M, case.K)
    _, *packed = case.packed()
    f = jax.jit(jax.vmap(lambda x: api.matmul(case.spec(), x, *packed, implementation=implementation)))
    return xs, f(xs)


@pytest.mark.parametrize(
    "M, size, implementation, ran",
    [
        (1, 256, None, ("hopper_large", 256)),
        (3, 5, None, ("hopper", 15)),
        (40, 2, None, ("hopper_large", 80)),
        (2, 20, "hopper", ("hopper", 2)),  # more than it takes at once
        (2, 16, "hopper", ("hopper", 32)),
        (2, 20, "hopper_large", ("hopper_large", 40)),
    ],
)
def test_vmap_over_activations(M, size, implementation, ran, seen):
    case = Case(M=M, K=130, N=66, group=32, zeros=True)
    xs, ys = mapped(case, size, implementation)
    check(case, xs, ys)
    assert seen[-1][:2] == ran


@pytest.mark.parametrize("implementation", [None, "hopper", "hopper_large"])
def test_vmap_over_nothing(implementation, seen):
    xs, ys = mapped(Case(M=4, K=128, N=66), 0, implementation)
    assert xs.shape == (0, 4, 128) and ys.shape == (0, 4, 66) and ys.dtype == jnp.bfloat16


@pytest.mark.parametrize("M, ran", [(64, ("hopper", 8, 192)), (512, ("hopper_large", 64, 192))])
def test_over_a_mesh_by_the_rows_of_one_device(M, ran, seen):
    case = Case(M=M, K=128, N=192)
    x, words, scales, _ = case.packed()
    x = jax.device_put(x, NamedSharding(mesh(), P("data")))
    words, scales = jax.device_put((words, scales), NamedSharding(mesh(), P()))
    y = jax.jit(lambda *arrays: api.matmul(case.spec(), *arrays))(x, words, scales)
    check(case, x, y)
    assert seen[-1] == ran
