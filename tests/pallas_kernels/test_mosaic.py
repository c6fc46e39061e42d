"""The inline functions of Hopper kernels: interpreted they mean what jax.numpy says, and they lower."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import mosaic, mosaic_turns
from tests.mosaic.interpreter import Race, run_interpreted
from tests.mosaic.lowering import lower_for_cuda

plgpu: Any = mosaic_gpu
f32, i32 = jnp.float32, jnp.int32


def kernel(body: Callable[..., None], out: jax.ShapeDtypeStruct, *scratch: Any) -> Callable[..., jax.Array]:
    """One CTA of one warpgroup, with Hopper kernels' own way to lower."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def run(function: Callable[..., jax.Array], *args: Any) -> np.ndarray:
    """Interpreted; what does not lower is refused as well."""
    lower_for_cuda(function, *args)
    return np.asarray(run_interpreted(function, *args))


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("bounds", [(), ("low",), ("high",), ("low", "high")], ids="-".join)
def test_keep_columns(bounds, columns):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, columns)), f32).at[3, 5].set(jnp.nan)
    # Also below 0, past the end, and low above high.
    limits = {name: jnp.asarray(rng.integers(-20, columns + 20, 64), i32) for name in bounds}

    def body(x_ref, *refs):
        given = {
            name: plgpu.load(ref, layout=mosaic.ROWS, optimized=False)
            for name, ref in zip(bounds, refs[:-1], strict=True)
        }
        kept = mosaic.keep_columns(
            plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False), given.get("low"), given.get("high"), -jnp.inf
        )
        refs[-1][...] = kept

    got = run(kernel(body, jax.ShapeDtypeStruct(x.shape, f32)), x, *limits.values())
    column = np.arange(columns)
    low, high = (np.asarray(limits.get(name, [default]))[:, None] for name, default in (("low", -99), ("high", 999)))
    np.testing.assert_array_equal(got, np.where((low <= column) & (column < high), x, -np.inf))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_zero_not_finite(dtype, bad):
    """Interpreted element by element; on the GPU the other 7 of a vector go too, which no caller may rely on."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 128)), dtype)
    x = x.at[0, 0].set(jnp.finfo(dtype).max).at[1, 1].set(jnp.finfo(dtype).tiny).at[2, 2].set(-0.0)
    if bad is not None:
        x = x.at[[0, 5, 63], [1, 77, 127]].set(bad)

    def body(x_ref, out_ref, tile, flag, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 1)
            def _():
                flag[0] = i32(0)
                mosaic.zero_not_finite(tile, flag.at[pl.ds(0, 1)])
                mosaic_turns.fence_async()

        mosaic_turns.named_barrier_sync(i32(4), 128)
        seen = plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(f32)
        out_ref[...] = seen + flag[0].astype(f32) * 1000

    scratch = mosaic.swizzled(x.shape, x.dtype), plgpu.SMEM((2,), i32), plgpu.Barrier()
    got = run(kernel(body, jax.ShapeDtypeStruct(x.shape, f32), *scratch), x)
    want = np.asarray(jnp.where(jnp.isfinite(x), x, 0).astype(f32))
    np.testing.assert_array_equal(got, want + np.float32(0 if bad is None else 1000))


def test_opaque_changes_nothing():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + mosaic.opaque(i32(3))

    x = jnp.arange(128, dtype=i32)
    np.testing.assert_array_equal(run(kernel(body, jax.ShapeDtypeStruct((128,), i32)), x), x + 3)


@pytest.mark.parametrize("early", [False, True])
def test_a_product_reads_its_operands_until_it_has_finished(early):
    """Sums of two products, the second of another b in the same memory: there too early, it is a race."""
    rng = np.random.default_rng(0)
    a, first, second = (jnp.asarray(rng.integers(-8, 8, (64, 128)), "float8_e4m3fn") for _ in range(3))

    def body(a_ref, *refs):
        *b_refs, out_ref, a, b, parked, loaded = refs

        def load(source, target):
            plgpu.copy_gmem_to_smem(source, target, loaded)
            plgpu.barrier_wait(loaded)

        load(a_ref, a)
        load(b_refs[0], b)
        running = mosaic.product(a, b)
        x = None if early else mosaic.finished(running, 0)
        load(b_refs[1], b)
        x = mosaic.finished(running, 0) if early else x
        mosaic.store_by_thread(x, parked)
        y = mosaic.finished(mosaic.product(a, b), 0)
        ones = plgpu.layout_cast(jnp.full((64,), 1, i32), mosaic.ROWS)
        odd = mosaic.any_of_warp(ones - ones) + 2 * mosaic.any_of_warp(ones)
        rows, below = ones.astype(f32), -1.0 - jnp.abs(y)
        some = jnp.where(y > 0, y, below)  # of all warps some row, but not of all rows
        even = 4 * mosaic.any_not_negative(below, -rows) + mosaic.any_not_negative(below, rows)
        even = even + mosaic.any_not_negative(some, -rows) - 2
        out_ref[...] = mosaic.load_by_thread(parked) + y * (odd + even).astype(f32)

    tile = mosaic.swizzled((64, 128), a.dtype)
    scratch = tile, tile, plgpu.SMEM((64, 64), f32), plgpu.Barrier()
    function = kernel(body, jax.ShapeDtypeStruct((64, 64), f32), *scratch)
    if early:
        with pytest.raises(Race):
            run_interpreted(function, a, first, second)
        return
    wide = [np.asarray(x.astype(f32)) for x in (a, first, second)]
    np.testing.assert_array_equal(run(function, a, first, second), wide[0] @ (wide[1] + 2 * wide[2]).T)
