"""Mistakes that would pass on a CPU, or hang or corrupt on a GPU, and that the interpreter must find."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from tests.mosaic.interpreter import Race, run_interpreted
from tests.mosaic.small import bar, f32, i32, kernel, load, plgpu, product, struct, values, writers


def test_a_turn_passed_on_before_its_adds_are_done():
    with pytest.raises(ValueError, match="adds may be in flight"):
        run_interpreted(*writers(waits=False))


def test_a_missing_fence_is_a_race():
    with pytest.raises(Race):
        run_interpreted(*writers(fenced=False))


def test_a_named_barrier_that_is_left_half_full():
    with pytest.raises(ValueError, match="named barrier 4 of block 0 ends with 32 threads arrived"):
        run_interpreted(*writers(drain=False))


def test_a_named_barrier_of_too_few_threads():
    def body(o_g):
        bar("arrive", 160)(i32(4))
        bar("arrive", 160)(i32(4))

    with pytest.raises(ValueError, match="256 threads arrived at a named barrier of 160"):
        run_interpreted(kernel(body, struct(128)))


def test_wgmma_reads_its_operands_until_it_is_waited_for():
    run, a, b = product()
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64).sum(0)
    np.testing.assert_array_equal(run_interpreted(run, a, b), expected)
    with pytest.raises(Race):
        run_interpreted(*product(wait=False))


def test_wgmma_does_not_see_writes_without_a_fence():
    with pytest.raises(Race):
        run_interpreted(*product(commit=False))


@pytest.mark.parametrize("waits", [True, False])
def test_stores_into_another_cta_s_shared_memory_are_read_after_a_wait(waits):
    def body(o_g, x, came):
        rank = lax.axis_index("rank")
        mine = jnp.full(x.shape, rank, f32)
        plgpu.async_store_smem(mine, x, came, cluster_idx=1 - rank, cluster_dim="rank")
        if waits:
            plgpu.barrier_wait(came)
        o_g[rank] = x[...]

    run = kernel(body, struct(2, 64), plgpu.SMEM((64,), f32), plgpu.Barrier(), cluster=(2,), cluster_names=("rank",))
    if waits:
        np.testing.assert_array_equal(run_interpreted(run), np.repeat([[1.0], [0.0]], 64, 1))
        return
    with pytest.raises((Race, ValueError), match="RACE|has ended|races"):
        run_interpreted(run)


def test_a_wgmma_that_nothing_waits_for():
    def body(a_g, b_g, o_g, a, b, loaded):
        load((a_g, a), (b_g, b), barrier=loaded)
        pl.run_scoped(lambda acc: plgpu.wgmma(acc, a, b), plgpu.ACC((64, 16), f32))

    a, b = values(64, 32).astype("bfloat16"), values(32, 16).astype("bfloat16")
    scratch = plgpu.SMEM(a.shape, a.dtype), plgpu.SMEM(b.shape, b.dtype), plgpu.Barrier(num_arrivals=2)
    with pytest.raises(ValueError, match="without waiting for its last wgmma"):
        run_interpreted(kernel(body, struct(64, 16), *scratch), a, b)


def test_a_copy_that_a_warp_leaves_unfinished():
    def body(x_g, o_g, x, loaded):
        load((x_g, x), barrier=loaded)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 2)
            def _():
                plgpu.copy_smem_to_gmem(x, o_g)

    with pytest.raises(ValueError, match="warp_id=2.*unfinished"):
        run_interpreted(kernel(body, struct(64, 16), plgpu.SMEM((64, 16), f32), plgpu.Barrier()), values(64, 16))


def test_atomics_race_with_plain_accesses():
    def body(x_g, o_g):
        plgpu.atomic_add(o_g.at[0], x_g[0])

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            o_g[0] = x_g[1]

    with pytest.raises(Race):
        run_interpreted(kernel(body, struct(1, 128), warpgroups=2), values(2, 128))


def test_races_between_ctas_are_seen_when_they_run_together():
    def body(x_g, o_g):
        o_g[...] = x_g[lax.axis_index("cta")]

    with pytest.raises(Race):
        run_interpreted(kernel(body, struct(128), grid=2), values(2, 128), together=True)


def test_races_of_every_kernel_count():
    def racing(o_g):
        o_g[...] = jnp.full((128,), 1.0, f32)

    def clean(x_g, o_g):
        o_g[...] = x_g[...] + 1

    def run():
        return kernel(clean, struct(128))(kernel(racing, struct(128), warpgroups=2)())

    np.testing.assert_array_equal(run_interpreted(run, detect_races=False), np.full(128, 2.0))
    with pytest.raises(Race):
        run_interpreted(run)
