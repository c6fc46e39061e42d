"""What the inline functions emit, lane by lane, against the stand-ins that the interpreter runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_int4, mosaic_int4_plain, mosaic_int4_sums
from pallas_kernels.mosaic_int4_step import Step
from pallas_kernels.mosaic_int4_sums import PITCH
from pallas_kernels.w4a16 import layout
from tests.pallas_kernels.w4a16 import lanes

RNG = np.random.default_rng(0)


def step_of(rows: int, tokens: int, group: int, depth: int = 1, **changes: str) -> Step:
    facts = {"dtype": "bfloat16", "scale_dtype": "bfloat16"} | changes
    unit = Step(rows=rows, k=64, tokens=tokens, group=group, **facts).unit
    return Step(rows=rows, k=unit * (64 // rows) * depth, tokens=tokens, group=group, **facts)


@pytest.mark.parametrize(
    "rows, tokens, group, depth",
    [(64, 8, 32, 1), (64, 16, 128, 1), (64, 32, 32, 2), (32, 8, 128, 1), (32, 16, 64, 1), (32, 24, 1 << 30, 2)]
    + [(16, 8, 64, 1), (16, 16, 32, 1), (16, 8, 128, 1)],
)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float16", "float16")], ids=lambda x: x[0])
@pytest.mark.parametrize("blocks", [1, 3])
def test_products(rows, tokens, group, depth, zeros, dtypes, blocks):
    step = step_of(rows, tokens, group, depth, dtype=dtypes[0], scale_dtype=dtypes[1])
    # Whole numbers, so that sums are exact in any order; scales are powers of two.
    x = RNG.integers(-3, 4, (tokens, step.k)).astype(jnp.dtype(dtypes[0]))
    words = RNG.integers(-(2**31), 2**31, (blocks, step.k // 64, rows // 8, 64), dtype=np.int32)
    scales = (2.0 ** RNG.integers(-2, 3, (blocks, step.scale_rows, rows))).astype(jnp.dtype(dtypes[1]))
    zero = RNG.integers(0, 17, (blocks, step.scale_rows, rows), dtype=np.uint8) if zeros else [None] * blocks
    acc = RNG.integers(-9, 9, (blocks, 64, tokens)).astype(np.float32)
    memory = lanes.Memory()
    words_refs, scales_refs = ([memory.place(one) for one in every] for every in (words, scales))
    zeros_refs = [memory.place(one) for one in zero] if zeros else None
    x_ref = memory.place(x, swizzle=True)
    with lanes.warpgroup(memory):
        accs = [lanes.fragment(one) for one in acc]
        out = mosaic_int4.multiply_add(step, accs, words_refs, scales_refs, zeros_refs, x_ref)
    for n in range(blocks):
        plain = mosaic_int4_plain.multiply_add(step, acc[n], words[n], jnp.asarray(scales[n]), zero[n], jnp.asarray(x))
        np.testing.assert_array_equal(lanes.array(out[n], np.float32), plain)


@pytest.mark.parametrize("rows", [64, 32, 16])
@pytest.mark.parametrize("tokens", [1, 8, 11])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums(rows, tokens, dtype):
    """Three warpgroups' sums of a slice meet in global memory, of which only the slice is written."""
    step = step_of(rows, -(-tokens // 8) * 8, 64, dtype=dtype)
    partial = RNG.integers(-99, 99, (3, 64, step.tokens)).astype(np.float32)
    memory = lanes.Memory()
    sums = memory.place(np.zeros((3, step.tokens, PITCH), np.float32))
    out = memory.place(np.full((tokens, rows), 7, jnp.dtype(dtype)), row=2 * rows)
    with lanes.warpgroup(memory):
        for n, acc in enumerate(partial):
            one = lanes.types.SimpleNamespace(**vars(sums) | {"address": sums.address + n * sums.size // 3})
            mosaic_int4_sums.put_partial(lanes.fragment(acc), one)
        mosaic_int4_sums.store_sum(step, sums, out)
    np.testing.assert_array_equal(memory.read(sums)[:, :, :64], partial.swapaxes(1, 2))
    expected = partial.reshape(3, step.parts, rows, step.tokens).sum(axis=(0, 1)).T[:tokens]
    np.testing.assert_array_equal(memory.read(out), expected.astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float16")], ids="-".join)
def test_dequantized_tiles(group: int, zeros: bool, dtypes: tuple[str, str]):
    """Rounded once: the float32 product of exact factors, rounded."""
    step = Step(rows=64, k=64, tokens=8, group=group, dtype=dtypes[0], scale_dtype=dtypes[1])
    words = RNG.integers(-(2**31), 2**31, (8, 64), dtype=np.int32)
    scales = RNG.uniform(0.001, 0.1, (step.scale_rows, 64)).astype(jnp.dtype(dtypes[1]))
    zero = RNG.integers(0, 17, (step.scale_rows, 64), dtype=np.uint8) if zeros else None
    row = np.arange(64) * step.scale_rows // 64
    whole = np.asarray(mosaic_int4_plain.codes_by_column(step, words)) - (
        8 if zero is None else np.asarray(layout.zeros_by_column(jnp.asarray(zero)[None])[0]).astype(int)[row]
    )
    expected = (whole.astype(np.float32) * scales.astype(np.float32)[row]).astype(jnp.dtype(dtypes[0])).T
    memory = lanes.Memory()
    refs = [memory.place(words), memory.place(scales), None if zero is None else memory.place(zero)]
    with lanes.warpgroup(memory):
        tile = mosaic_int4.dequantize(*refs, group=group, dtype=dtypes[0])
    np.testing.assert_array_equal(lanes.array(tile, jnp.dtype(dtypes[0])), expected)
