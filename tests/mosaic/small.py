"""What the interpreter's own tests build small kernels from."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu
SPLAT = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()
f32, i32 = jnp.float32, jnp.int32


def inline(means, *arg_types, returns=None, refs=False):
    """An inline function that only the interpreter can run."""

    def emit(*_):
        raise AssertionError("lowered")

    vars(emit)["interpret_refs" if refs else "interpret"] = means
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=returns)(emit)


fence = inline(("fence",))
turn_wait = inline(("turn.wait",), REF, SPLAT, SPLAT)
turn_add = inline(("turn.add",), REF, SPLAT)


def bar(operation, threads):
    return inline((f"bar.{operation}", threads), SPLAT)


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel(body, out, *scratch, grid=1, warpgroups=1, **clusters):
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        **clusters,
    )


def values(*shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(f32)


def load(*pairs, barrier):
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def store(source, target, **options):
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target, **options)
    plgpu.wait_smem_to_gmem(0)


def writers(*, fenced=True, waits=True, order=lambda cta, ctas: cta, ctas=3, steps=4, drain=True):
    """Backward's dQ in small: a warpgroup hands tiles to a warp, which adds them to global memory in turn."""

    def body(x_g, o_g, turns_g, tile):
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        empty, full = i32(4), i32(5)

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, steps)
            def _(step):
                bar("sync", 160)(empty)
                tile[...] = x_g[cta, step]
                if fenced:
                    fence()
                bar("arrive", 160)(full)

            if drain:
                bar("sync", 160)(empty)

        @pl.when(wg == 1)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 1)
                def _():
                    bar("arrive", 160)(empty)

                    @pl.loop(0, steps)
                    def _(step):
                        turn_wait(turns_g, step, order(cta, ctas))
                        bar("sync", 160)(full)
                        plgpu.copy_smem_to_gmem(tile, o_g.at[step], reduction_op="add")
                        plgpu.wait_smem_to_gmem(0, wait_read_only=not waits)
                        turn_add(turns_g, step)
                        bar("arrive", 160)(empty)

    def run(x):
        target, turns = jax.new_ref(jnp.zeros((steps, 64, 16), f32)), jax.new_ref(jnp.zeros((steps,), i32))
        kernel(body, (), plgpu.SMEM((64, 16), f32), grid=ctas, warpgroups=2)(x, target, turns)
        return target[...], turns[...]

    return run, values(ctas, steps, 64, 16)


def product(*, wait=True, commit=True):
    """Two products: TMA fills B's slot again while wgmma may still read it; A is copied by the warpgroup itself."""

    def body(a_g, b_g, o_g, a, b, loaded, read):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, 2)
            def _(step):
                plgpu.copy_gmem_to_smem(b_g.at[step], b, loaded)
                plgpu.barrier_wait(read)

        @pl.when(wg == 0)
        def _():
            a[...] = a_g[...]
            if commit:
                plgpu.commit_smem()

            def products(acc):
                for last in (False, True):
                    plgpu.barrier_wait(loaded)
                    plgpu.wgmma(acc, a, b)
                    if wait or last:
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(read)
                return acc[...]

            o_g[...] = pl.run_scoped(products, plgpu.ACC((64, 16), f32))

    a, b = values(64, 32).astype("bfloat16"), values(2, 32, 16).astype("bfloat16")
    scratch = plgpu.SMEM((64, 32), a.dtype), plgpu.SMEM((32, 16), b.dtype), plgpu.Barrier(), plgpu.Barrier()
    return kernel(body, struct(64, 16), *scratch, warpgroups=2), a, b
