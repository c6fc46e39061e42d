"""The interpreter's additions, each in a kernel of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from tests.mosaic.interpreter import Deadlock, interpreted, run_interpreted
from tests.mosaic.small import (
    REF,
    SPLAT,
    bar,
    f32,
    i32,
    inline,
    kernel,
    load,
    plgpu,
    store,
    struct,
    values,
    writers,
)


def test_accumulators():
    """A start value, A from registers, a store between two products."""

    def body(a_g, b_g, c_g, o_g, a, b, loaded):
        load((a_g, a), (b_g, b), barrier=loaded)

        def products(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(acc, a[...] * 2, b)
            once = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            acc[...] = once * 10
            plgpu.wgmma(acc, a, b)

        start = plgpu.load(c_g, layout=plgpu.Layout.WGMMA)
        o_g[lax.axis_index("cta")] = pl.run_state(products)(plgpu.ACC.init(start))

    a, b, c = values(64, 32).astype("bfloat16"), values(32, 16, seed=1).astype("bfloat16"), values(64, 16, seed=2)
    scratch = plgpu.SMEM(a.shape, a.dtype), plgpu.SMEM(b.shape, b.dtype), plgpu.Barrier(num_arrivals=2)
    out = run_interpreted(kernel(body, struct(2, 64, 16), *scratch, grid=2), a, b, c)
    product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_array_equal(out, np.stack([10 * (np.asarray(c) + 3 * product) + product] * 2))


def test_run_state_passes_refs_and_closed_over_values():
    def body(x_g, o_g, x, loaded):
        load((x_g, x), barrier=loaded)
        row = x[0]

        def add(acc):
            acc[...] = acc[...] + x[...] + row[None, :]

        o_g[...] = pl.run_state(add)(plgpu.ACC.init(jnp.ones((64, 16), f32)))

    x = values(64, 16)
    run = kernel(body, struct(64, 16), plgpu.SMEM((64, 16), f32), plgpu.Barrier())
    np.testing.assert_array_equal(run_interpreted(run, x), 1 + x + x[0][None])


def test_predicated_copies():
    def body(x_g, o_g, x, loaded):
        x[...] = jnp.zeros((64, 16), f32)
        plgpu.commit_smem()
        cta = lax.axis_index("cta")
        plgpu.copy_gmem_to_smem(x_g, x, loaded, predicate=cta != 1)
        plgpu.barrier_wait(loaded)
        store(x, o_g.at[cta], predicate=cta != 2)

    x = values(64, 16)

    def run(x):
        target = jax.new_ref(jnp.full((3, 64, 16), 7.0))
        kernel(body, (), plgpu.SMEM((64, 16), f32), plgpu.Barrier(), grid=3)(x, target)
        return target[...]

    np.testing.assert_array_equal(run_interpreted(run, x), np.stack([x, np.zeros((64, 16)), np.full((64, 16), 7.0)]))


@pytest.mark.parametrize("operation", ["add", "max", "min"])
def test_reducing_copies(operation):
    """Two warpgroups of three CTAs into one place, which ends inside the tile."""

    def body(x_g, o_g, x, loaded):
        wg = lax.axis_index("wg")
        load((x_g.at[lax.axis_index("cta"), wg], x.at[wg]), barrier=loaded.at[wg])
        start = 0 * wg  # jax 0.12 refuses constant slices that leave the array
        store(x.at[wg], o_g.at[pl.ds(start, 64)], reduction_op=operation)

    x = values(3, 2, 64, 16)
    scratch = plgpu.SMEM((2, 64, 16), f32), plgpu.Barrier(num_barriers=2)

    def run(x):
        target = jax.new_ref(jnp.ones((48, 16), f32))
        kernel(body, (), *scratch, grid=3, warpgroups=2)(x, target)
        return target[...]

    reduce = {"add": np.sum, "max": np.max, "min": np.min}[operation]
    expected = reduce(np.concatenate([x.reshape(6, 64, 16)[:, :48], np.ones((1, 48, 16))]), axis=0)
    np.testing.assert_array_equal(run_interpreted(run, x), expected)
    np.testing.assert_array_equal(run_interpreted(run, x, together=True), expected)


def test_atomics():
    def body(x_g, o_g):
        plgpu.atomic_add(o_g.at[0], x_g[lax.axis_index("wg")])
        plgpu.atomic_max(o_g.at[1], x_g[lax.axis_index("wg")])

    def run(x):
        target = jax.new_ref(jnp.zeros((2, 128), f32))
        kernel(body, (), grid=2, warpgroups=2)(x, target)
        return target[...]

    x = values(2, 128)
    np.testing.assert_array_equal(run_interpreted(run, x), np.stack([2 * x.sum(0), np.maximum(x.max(0), 0)]))


def test_inline_function_of_values():
    scaled = inline(
        lambda x, n: x * n, plgpu.Layout.WGMMA, SPLAT, returns=plgpu.ShapeDtypeStruct((64, 16), f32, plgpu.Layout.WGMMA)
    )

    def body(x_g, o_g):
        o_g[...] = scaled(x_g[...], jnp.float32(3))

    x = values(64, 16)
    np.testing.assert_array_equal(run_interpreted(kernel(body, struct(64, 16)), x), 3 * x)


def test_inline_function_of_refs():
    """Reads one ref, changes a part of another, and has a result."""
    scalar = plgpu.ShapeDtypeStruct((), f32, SPLAT)
    add_row = inline(lambda x, row, n: (x.sum(), {1: row + n * x[:1]}), REF, REF, SPLAT, returns=scalar, refs=True)

    def body(x_g, o_g, sum_g, x):
        x[...] = x_g[...]
        total = add_row(x, x.at[pl.ds(2, 1)], jnp.float32(10))
        sum_g[...] = jnp.broadcast_to(total, (128,))
        o_g[...] = x[...]

    x = values(64, 16)
    changed, total = run_interpreted(kernel(body, (struct(64, 16), struct(128)), plgpu.SMEM((64, 16), f32)), x)
    np.testing.assert_array_equal(changed, np.asarray(x.at[2].add(10 * x[0])))
    np.testing.assert_array_equal(total, np.full(128, x.sum()))


def test_an_inline_function_without_a_stand_in_is_refused():
    with pytest.raises(ValueError, match="inline_mgpu"):
        run_interpreted(kernel(lambda o_g: plgpu.inline_mgpu()(lambda _: None)(), struct(128)))


def check_writers(run, x, **options):
    total, turns = run_interpreted(run, x, **options)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(turns, np.full(x.shape[1], x.shape[0]))


def test_named_barriers_and_turns():
    check_writers(*writers())
    check_writers(*writers(), together=True)


def test_turns_of_later_ctas_need_them_to_run_together():
    run, x = writers(order=lambda cta, ctas: ctas - 1 - cta)
    check_writers(run, x, together=True)
    with pytest.raises(Deadlock, match=r"element 0 of turns >= 2 in CTA \(0,\)"):
        run_interpreted(run, x, idle=1.0)


def test_named_barriers_whose_syncing_warpgroups_change():
    """jax's own would want the same threads to see every phase."""

    def body(o_g, x):
        wg = lax.axis_index("wg")

        @pl.loop(0, 4)
        def _(step):
            mine = (step + wg) % 2 == 0

            @pl.when(mine)
            def _():
                x[...] = jnp.full((128,), 1.0 * step, f32)
                bar("arrive", 256)(i32(3))

            @pl.when(jnp.logical_not(mine))
            def _():
                bar("sync", 256)(i32(3))
                o_g[step] = x[...]

            inline(("bar.sync", 256, 2))()

    run = kernel(body, struct(4, 128), plgpu.SMEM((128,), f32), warpgroups=2)
    np.testing.assert_array_equal(run_interpreted(run)[:, 0], np.arange(4))


def test_a_deadlock_is_an_error_that_names_the_waiting_and_the_next_run_works():
    def body(x_g, o_g, barrier, *, stuck):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            if not stuck:
                plgpu.barrier_arrive(barrier)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(barrier)
            o_g[...] = x_g[...]

    def run(stuck):
        return kernel(lambda *refs: body(*refs, stuck=stuck), struct(128), plgpu.Barrier(), warpgroups=2)

    x = values(128)
    with pytest.raises(Deadlock, match=r"warpgroup_id=1.*num_arrivals=1.*test_interpreter.py"):
        run_interpreted(run(True), x, idle=1.0)
    np.testing.assert_array_equal(run_interpreted(run(False), x), x)
    with interpreted():
        np.testing.assert_array_equal(run(False)(x), x)


def test_more_threads_than_the_pool_are_refused():
    with pytest.raises(ValueError, match="NPROC"):
        run_interpreted(kernel(lambda o_g: None, struct(128), grid=10_000), together=True)
