"""A kernel over packed weights that are split by columns, rows or both: each device runs it on its own part."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import mosaic_turns
from pallas_kernels.w4a16 import reference
from pallas_kernels.w4a16.cases import COLUMN, Case
from pallas_kernels.w4a16.derivative import differentiable
from pallas_kernels.w4a16.partition import partitioned
from tests.quant import oracle
from tests.tolerance import assert_close

AXES = ("data", "fsdp", "tensor")
CASE = Case(M=8, K=512, N=256, group=128, zeros=True)
seen: list = []


def kernel(spec, x, words, scales, zeros):
    """The exact path in a kernel's place, with a counter as kernels have. Remembers what it was given."""
    seen.append(((spec.M, spec.K, spec.N), words.shape[:2], scales.shape[:2]))
    assert x.shape == (spec.M, spec.K)

    def launch(counter):
        counter[...] += 1
        return [reference.matmul(spec, x, words, scales, zeros)]

    return mosaic_turns.with_zeros(1, launch, [jax.ShapeDtypeStruct((spec.M, spec.N), spec.dtype)])[0]


product = differentiable(partitioned(kernel), exact=reference.matmul)


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


def put(a, *place):
    return jax.device_put(a, NamedSharding(mesh(), P(*place)))


def spread(case, batch, columns, rows):
    x, words, scales, zeros = case.packed()
    by_group = rows if scales.shape[1] > 1 else None
    features = rows if case.K % 128 == 0 and not axes(batch) & axes(rows) else None
    packed = [put(words, columns, rows), put(scales, columns, by_group)]
    if zeros is not None:
        packed.append(put(zeros, columns, by_group))
    return put(x, batch, features), *packed


def axes(entry):
    return {entry} if isinstance(entry, str) else set(entry or ())


def check(case, y, dx, dy):
    x, codes, scales, zeros = case.operands()
    w = oracle.weight(codes, scales, zeros, case.group)
    assert_close(y, oracle.product(x, w), oracle.product(x, w, x.dtype), "y")
    assert_close(dx, oracle.product(dy, w.T), oracle.product(dy, w.T, x.dtype), "dx")


def run(case, batch, columns, rows):
    dy = np.random.default_rng(1).standard_normal((case.M, case.N)).astype(jnp.dtype(case.dtype))

    @jax.jit
    def both(x, *packed):
        packed = packed if case.zeros else (*packed, None)
        y, pull = jax.vjp(lambda x: product(case.spec(), x, *packed), x)
        return y, pull(jnp.asarray(dy))[0]

    seen.clear()
    compiled = both.lower(*(arrays := spread(case, batch, columns, rows))).compile()
    y, dx = compiled(*arrays)
    check(case, y, dx, dy)
    return y, seen[-1], str(compiled.as_text())


@pytest.mark.parametrize(
    "inside, columns, rows, local",
    [
        (False, "tensor", None, (4, 512, 128)),
        (True, "tensor", "fsdp", (4, 256, 128)),
        pytest.param(True, None, "tensor", (4, 256, 256), marks=pytest.mark.slow),
        pytest.param(False, "tensor", "fsdp", (4, 256, 128), marks=pytest.mark.slow),
        (False, None, ("fsdp", "tensor"), (4, 128, 256)),
    ],
)
def test_every_device_multiplies_its_part(inside, columns, rows, local):
    if inside:
        with jax.set_mesh(mesh()):
            y, (sizes, tiles, groups), text = run(CASE, "data", columns, rows)
    else:
        y, (sizes, tiles, groups), text = run(CASE, "data", columns, rows)
    assert sizes == local and tiles == (local[2] // 64, local[1] // 64) and groups == (local[2] // 64, local[1] // 128)
    assert y.sharding.spec == P("data", columns) or (columns is None and y.sharding.spec == P("data"))
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("M, local", [(64, (32, 256, 128)), (72, (18, 512, 128))])
def test_an_axis_of_both_batch_and_rows_moves_the_fewer_bytes(M, local):
    """Few rows of x: y is summed over it, in 4 bytes; many: the weight is gathered, in half a byte."""
    _, (sizes, _, _), _ = run(dataclasses.replace(CASE, M=M), ("data", "fsdp"), "tensor", "fsdp")
    assert sizes == local


@pytest.mark.parametrize(
    "case, columns, rows, local",
    [
        (Case(M=3, K=500, N=250, group=128), "tensor", "fsdp", (3, 256, 128)),  # tails on the last devices only
        (Case(M=5, K=256, N=128, group=COLUMN), None, ("fsdp", "tensor"), (5, 64, 128)),  # one group for all rows
        (Case(M=5, K=192, N=64, group=32), None, None, (5, 192, 64)),
    ],
)
def test_tails_and_whole_columns(case, columns, rows, local):
    _, (sizes, _, _), _ = run(case, None, columns, rows)
    assert sizes == local


def test_a_weight_that_cannot_be_cut_so_is_brought_together():
    """Nine tiles of rows in groups of two: the words split in three, the groups do not."""
    case = Case(M=2, K=576, N=128, group=128)
    x, words, scales, _ = case.packed()
    three = jax.make_mesh((3,), ("tensor",), devices=jax.devices()[:3], axis_types=(AxisType.Auto,))
    words = jax.device_put(words, NamedSharding(three, P(None, "tensor")))
    rest = (jax.device_put(a, NamedSharding(three, P())) for a in (x, scales))
    x, scales = rest
    seen.clear()
    y = jax.jit(functools.partial(product, case.spec()))(x, words, scales, None)
    assert seen[-1][0] == (2, 576, 128)
    _, codes, plain, _ = case.operands()
    w = oracle.weight(codes, plain, None, 128)
    assert_close(y, oracle.product(case.operands()[0], w), oracle.product(case.operands()[0], w, y.dtype))


def test_vmap_over_activations_makes_them_longer_and_over_weights_repeats():
    case = Case(M=3, K=100, N=70, group=32, zeros=True)
    x, *packed = case.packed()
    xs = jnp.stack([x, 2 * x])
    seen.clear()
    y = jax.jit(jax.vmap(lambda x: product(case.spec(), x, *packed)))(xs)
    assert seen[-1][0][0] == 6 and len(seen) > 1  # traced for 3 rows, run for 6
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), packed)
    z = jax.jit(jax.vmap(lambda x, *packed: product(case.spec(), x, *packed)))(xs, *stacked)
    _, codes, scales, zeros = case.operands()
    w = oracle.weight(codes, scales, zeros, 32)
    for i in range(2):
        rows = np.asarray(xs[i])
        for got in (y[i], z[i]):
            assert_close(got, oracle.product(rows, w), oracle.product(rows, w, rows.dtype))


def by_hand(case, axes, names, check_vma):
    """Columns over `axes` of a shard_map that is manual over `names`; its (y, dx), dx summed over the columns.

    One that checks how values vary, jax's default, adds that sum itself.
    """
    local = dataclasses.replace(case, N=case.N // 2 ** len(axes)).spec()

    def body(x, words, scales, zeros):
        y, pull = jax.vjp(lambda x: product(local, x, words, scales, zeros), x)
        assert jax.typeof(y).manual_axis_type.varying == (set(axes) if check_vma else set())
        dx = pull(jnp.ones_like(y))[0]
        return y, dx if check_vma else jax.lax.psum(dx, axes)

    columns = P(axes)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh(),
            in_specs=(P(), columns, columns, columns),
            out_specs=(P(None, axes), P()),
            axis_names=names,
            check_vma=check_vma,
        )
    )


# In float32: XLA's CPU backend aborts on 16-bit sums over the axes of a partly manual shard_map (jaxlib 0.11.2).
MANUAL = dataclasses.replace(CASE, dtype="float32")
ONES = np.ones((MANUAL.M, MANUAL.N), np.float32)


CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])


@CHECKS
def test_inside_a_fully_manual_shard_map(check_vma):
    seen.clear()
    y, dx = by_hand(MANUAL, ("fsdp", "tensor"), set(AXES), check_vma)(*MANUAL.packed())
    assert seen[-1][0] == (8, 512, 64)
    check(MANUAL, y, dx, ONES)


@pytest.mark.slow
@CHECKS
def test_inside_a_partly_manual_shard_map(check_vma):
    """Columns are split by hand, the rest by the partitioner."""
    y, dx = by_hand(MANUAL, ("tensor",), {"tensor"}, check_vma)(*spread(MANUAL, "data", "tensor", "fsdp"))
    check(MANUAL, y, dx, ONES)


@pytest.mark.parametrize("case", [CASE, dataclasses.replace(CASE, dtype="float32")], ids=lambda case: case.dtype)
def test_inside_a_shard_map_that_checks_how_values_vary(case):
    """jax's default. Rows of x are split by hand; the weight is the same everywhere, so dx needs no sum."""
    dy = np.random.default_rng(1).standard_normal((case.M, case.N)).astype(jnp.dtype(case.dtype))
    local = dataclasses.replace(case, M=1).spec()

    def body(x, dy, *packed):
        y, pull = jax.vjp(lambda x: product(local, x, *packed), x)
        assert jax.typeof(y).manual_axis_type.varying == set(AXES)
        return y, pull(dy)[0]

    x, *packed = case.packed()
    split = jax.shard_map(body, mesh=mesh(), in_specs=(P(AXES), P(AXES), P(), P(), P()), out_specs=P(AXES))
    seen.clear()
    y, dx = jax.jit(split)(x, jnp.asarray(dy), *packed)
    check(case, y, dx, dy)
    assert seen[-1][0] == (1, case.K, case.N)
