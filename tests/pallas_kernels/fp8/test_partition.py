"""Kernels on every device's part: a stand-in for the kernel, which must see whole blocks and add up what is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp8 import partition, reference, tile
from pallas_kernels.fp8.cases import Case
from pallas_kernels.fp8.spec import E4M3
from sharding.mesh import make_mesh
from tests.pallas_kernels.fp8.test_product import exact_and_plain
from tests.tolerance import assert_close


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["block", "row", "tensor"])
def test_a_product_over_columns_rows_and_batch(scaling):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    case = Case(M=64, K=512, N=512, dtype="bfloat16", scaling=scaling)
    seen = []

    def kernel(spec, *operands):
        seen.append((spec.M, spec.K, spec.N))
        return reference.matmul(spec, *operands)

    arrays = [jnp.asarray(a) for a in case.operands()]
    exact, plain = exact_and_plain(case)
    product = jax.jit(lambda *a: partition.product(kernel)(case.spec(), *a))
    with jax.set_mesh(mesh):
        by_columns = [P("data", None), P(), P(("fsdp", "tensor"), None), P()]
        by_rows = [P("data", "tensor"), P(), P("fsdp", "tensor"), P()]
        for places in (by_columns, by_rows):
            placed = [jax.device_put(a, NamedSharding(mesh, place)) for a, place in zip(arrays, places, strict=True)]
            assert_close(product(*placed), exact, plain)
    assert (32, 512, 128) in seen and (32, 256, 256) in seen


@pytest.mark.slow
def test_rounding_over_a_mesh_and_under_vmap():
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (4, 256))
    want = tile.quantize(x, (1, 128), E4M3)
    rounding = partition.rounding(lambda x: tile.quantize(x, (1, 128), E4M3))
    with jax.set_mesh(mesh):
        got = jax.jit(rounding)(jax.device_put(x, NamedSharding(mesh, P("data", "tensor"))))
    mapped = jax.vmap(rounding)(jnp.stack([x, x]))
    for a, b, c in zip(got, want, mapped, strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype("float32"), np.asarray(b).astype("float32"))
        np.testing.assert_array_equal(np.asarray(c[1]).astype("float32"), np.asarray(b).astype("float32"))
