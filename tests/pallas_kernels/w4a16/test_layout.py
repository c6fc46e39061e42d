"""The packed layout: every code in every position, exact inverses, tails."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.w4a16 import layout


def place(k, n):
    """(word of a tile, bit) of row k and column n, from the fragments of mma.m16n8k16 with A = W^T.

    Thread l of a warp holds A[l / 4 + 8 (r % 2), 2 (l % 4) + e + 8 (r / 2)] in half e of its register r; each warp of a
    warpgroup has 16 rows of A, and a step has 16 columns of A. Register r of a step is nibbles r and r + 4 of its word.
    """
    warp, row = divmod(n, 16)
    step, column = divmod(k, 16)
    register = row // 8 + 2 * (column // 8)
    lane = row % 8 * 4 + column % 8 // 2
    return (warp * 32 + lane) * 4 + step, 4 * register + 16 * (column % 2)


def test_every_code_in_every_position():
    """Sixteen tiles, in which each of the 4096 positions takes each of the 16 codes."""
    first = np.random.default_rng(0).integers(0, 16, (64, 64), dtype=np.uint8)
    tiles = [(first + shift) % 16 for shift in range(16)]
    codes = np.block([[tiles[4 * i + j] for j in range(4)] for i in range(4)])
    words = np.asarray(layout.pack(jnp.asarray(codes)))
    assert words.shape == (4, 4, 8, 64) and words.dtype == np.int32
    flat = words.view(np.uint32).reshape(4, 4, 512)
    for k, n in itertools.product(range(64), range(64)):
        word, bit = place(k, n)
        np.testing.assert_array_equal(flat[:, :, word] >> bit & 15, codes[k::64, n::64].T)
    np.testing.assert_array_equal(layout.unpack(jnp.asarray(words), (256, 256)), codes)


def test_places_are_a_bijection():
    assert len({place(k, n) for k in range(64) for n in range(64)}) == 64 * 64


def test_every_word_is_the_packing_of_its_codes():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 3, 8, 64), dtype=np.int64).astype(np.int32)
    codes = layout.unpack(jnp.asarray(words), (192, 128))
    np.testing.assert_array_equal(layout.pack(codes), words)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 130), st.integers(1, 130), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverses_for_any_size(K, N, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (K, N), dtype=np.uint8)
    words = jax.jit(layout.pack)(jnp.asarray(codes))
    assert words.shape == (-(-N // 64), -(-K // 64), 8, 64)
    np.testing.assert_array_equal(jax.jit(layout.unpack, static_argnums=1)(words, (K, N)), codes)
    whole = np.asarray(layout.unpack(words, (words.shape[1] * 64, words.shape[0] * 64)))
    assert not whole[K:].any() and not whole[:, N:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("groups, N", [(1, 1), (3, 64), (5, 100), (2, 257)])
def test_columns(groups, N, dtype):
    values = np.random.default_rng(groups).integers(0, 200, (groups, N)).astype(jnp.dtype(dtype))
    packed = np.asarray(layout.pack_columns(jnp.asarray(values)))
    assert packed.shape == (-(-N // 64), groups, 64) and packed.dtype == values.dtype
    for r, n in itertools.product(range(groups), range(N)):
        assert packed[n // 64, r, n % 64] == values[r, n]
    np.testing.assert_array_equal(layout.unpack_columns(jnp.asarray(packed), N), values)


@pytest.mark.parametrize("groups, N", [(1, 1), (3, 64), (2, 257)])
def test_zeros(groups, N):
    """The two columns of a thread, 8 apart, lie side by side."""
    zeros = np.random.default_rng(groups).integers(0, 17, (groups, N), dtype=np.uint8)
    packed = layout.pack_zeros(jnp.asarray(zeros))
    assert packed.shape == (-(-N // 64), groups, 64) and packed.dtype == jnp.uint8
    for r, n in itertools.product(range(groups), range(N)):
        assert packed[n // 64, r, n % 64 // 16 * 16 + n % 8 * 2 + n % 16 // 8] == zeros[r, n]
    np.testing.assert_array_equal(layout.unpack_zeros(packed, N), zeros)
    np.testing.assert_array_equal(layout.zeros_by_column(packed), layout.pack_columns(jnp.asarray(zeros)))
