"""Activations to e4m3 with a scale for every 128 of a row, in one pass, for Hopper in Pallas Mosaic GPU.

    x (64 rows, `blocks` times 128) -> shared memory -> registers: max|x| of a row, codes -> shared memory -> codes
                                                                   scales                                  -> scales

A CTA of one warpgroup has all its blocks on their way before it looks at the first; several CTAs share an SM. Written
because XLA reads x twice for this: once for the maxima, once for the codes.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.device import Device
from pallas_kernels.fp8 import tile
from pallas_kernels.fp8.spec import BLOCK

_ROWS = 64
_MOST_BLOCKS = 4  # of a CTA: 96 KiB of shared memory, so that two are resident
_LAYOUT = plgpu.Layout.WGMMA_8BIT  # a thread has 4 codes in a row, which it stores at once


def why_not(x: Any, device: Device) -> str | None:
    """The first limit of the kernel that activations of this shape and dtype exceed."""
    if device.compute_capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if x.ndim != 2 or 0 in x.shape or jnp.dtype(x.dtype).name != "bfloat16":
        return f"takes bfloat16 (M, K), both at least 1, not {jnp.dtype(x.dtype).name} {tuple(x.shape)}"
    return None


def quantize(x: Float[Array, "m k"], dtype: str) -> tuple[Float[Array, "m k"], Float[Array, "m blocks"]]:
    """`tile.quantize` of bfloat16 x in blocks of 1 x 128."""
    (M, K), k_blocks = x.shape, pl.cdiv(x.shape[1], BLOCK)
    pads = ((0, -M % 8), (0, -K % BLOCK))
    x = jnp.pad(x, pads) if any(map(any, pads)) else x  # TMA fills up with zeros, but Mosaic wants whole tiles
    blocks = min(_MOST_BLOCKS, k_blocks)
    row_tiles = pl.cdiv(M, _ROWS)
    codes, scales = plgpu.kernel(
        functools.partial(_body, dtype, k_blocks),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((k_blocks, row_tiles * _ROWS), jnp.float32),
        ),
        scratch_types=[
            mosaic.swizzled((blocks, _ROWS, BLOCK), jnp.bfloat16),
            mosaic.swizzled((blocks, _ROWS, BLOCK), jnp.dtype(dtype)),
            plgpu.Barrier(num_barriers=blocks),
        ],
        grid=(row_tiles, pl.cdiv(k_blocks, blocks)),
        grid_names=("rows", "columns"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )(x)
    return codes[:M, :K], scales.T[:M]


def _body(dtype: str, k_blocks: int, x_gmem, codes_gmem, scales_gmem, x_smem, codes_smem, loaded) -> None:
    blocks = x_smem.shape[0]
    first, row = lax.axis_index("columns") * blocks, lax.axis_index("rows") * _ROWS

    def block_of(ref, n):
        return ref.at[pl.ds(row, _ROWS), pl.ds((first + n) * BLOCK, BLOCK)]

    def each(one):
        for n in range(blocks):
            pl.when(first + n < k_blocks)(functools.partial(one, n))

    @each
    def _(n):
        plgpu.copy_gmem_to_smem(block_of(x_gmem, n), x_smem.at[n], loaded.at[n])

    @each
    def _(n):
        plgpu.barrier_wait(loaded.at[n])
        x = plgpu.load(x_smem.at[n], layout=_LAYOUT, optimized=False).astype(jnp.float32)
        scales = tile.scales_of(jnp.abs(x).max(axis=1), dtype)
        codes = tile.cast(x * lax.broadcast_in_dim(1.0 / scales, x.shape, (0,)), dtype)
        codes_smem[n] = codes
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(codes_smem.at[n], block_of(codes_gmem, n))
        scales_gmem.at[first + n, pl.ds(row, _ROWS)][...] = scales

    plgpu.wait_smem_to_gmem(0)
