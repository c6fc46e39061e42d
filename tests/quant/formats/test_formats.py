"""The 4-bit formats: worked examples, every code in every place, and the same bytes there and back."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.formats import gptq, nibbles
from quant.formats.api import FORMATS, WRITTEN
from quant.formats.awq import ORDER
from quant.formats.grid import Grid, LinearSpec, grid_of
from tests.quant.formats import statement

SEQUENCE = np.arange(8, dtype=np.uint8)
ZERO_FIRST = np.array([[0, 8, 8, 8, 8, 8, 8, 8]], np.uint8)


def word(value: int) -> np.ndarray:
    return np.array([[value]], np.uint32).view(np.int32)


def weight(spec: LinearSpec, *, seed=0, dtype: type = np.float16, zeros=True, ordered=False) -> tuple[np.ndarray, Grid]:
    """(codes, grid) at random; scales that float16 and bfloat16 hold both."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (spec.K, spec.N), np.uint8)
    scales = (rng.integers(1, 256, (spec.groups, spec.N)) / 1024).astype(dtype)
    points = rng.integers(1, 16, scales.shape, np.uint8) if zeros else None
    g_idx = rng.permutation(np.arange(spec.K, dtype=np.int32) // spec.group) if ordered else None
    return codes, grid_of(spec, scales, points, g_idx)


def written(name, codes, grid, spec):
    write = FORMATS[name].write
    assert write is not None
    return write(codes, grid, spec)


def by_statement(name, tensors, group):
    if name.startswith("gptq"):
        return statement.gptq(tensors, version=1 if name == "gptq" else 2)
    return (statement.awq if name == "awq" else statement.pack_quantized)(tensors, group=group)


def dense(codes, grid):
    g = grid.all_groups()
    return (codes.astype(np.float64) - grid.all_zeros()[g]) * grid.scales.astype(np.float64)[g]


# Worked examples.


def test_gptq_packs_rows():
    spec = LinearSpec(K=8, N=8, group=8)
    codes = np.repeat(SEQUENCE[:, None], 8, axis=1)
    tensors = written("gptq", codes, Grid(shape=(8, 8), group=8, scales=np.ones((1, 8), np.float16)), spec)
    assert tensors["qweight"].shape == (1, 8) and set(tensors["qweight"].flat) == {0x76543210} == {1985229328}
    assert tensors["qzeros"].tolist() == [[0x77777777]] == [[2004318071]]
    assert tensors["g_idx"].tolist() == [0] * 8


def test_gptq_v2_holds_true_zeros():
    assert nibbles.pack(np.full((1, 8), 8, np.uint8)).tolist() == [[-2004318072]]
    assert gptq.SYMMETRIC_WORDS == {"gptq": 2004318071, "gptq_v2": -2004318072}
    assert np.array_equal(nibbles.pack(ZERO_FIRST), word(0x88888880))


def test_a_zero_point_of_0_leaves_its_neighbours_alone():
    """Masked: 0 - 1 is 15 in its own four bits. Read back it is 0, and both versions convert without a carry."""
    spec = LinearSpec(K=8, N=8, group=8)
    grid = Grid(shape=(8, 8), group=8, scales=np.ones((1, 8), np.float16), zeros=ZERO_FIRST)
    codes = np.zeros((8, 8), np.uint8)
    v1, v2 = (written(name, codes, grid, spec) for name in ("gptq", "gptq_v2"))
    assert np.array_equal(v1["qzeros"], word(0x7777777F)) and np.array_equal(v2["qzeros"], word(0x88888880))
    for name, tensors in (("gptq", v1), ("gptq_v2", v2)):
        assert np.array_equal(FORMATS[name].read_grid(tensors, spec).zeros, ZERO_FIRST)
    assert FORMATS["gptq_v2"].faults(grid) == []
    assert FORMATS["gptq"].faults(grid) == [
        "a zero point of 0, which version 1 has no word for, in 1 of 8 groups, first group 0 of column 0"
    ]


def test_awq_interleaves_columns():
    assert np.array_equal(nibbles.pack(SEQUENCE[None], ORDER), word(0x75316420))
    assert int(nibbles.pack(SEQUENCE[None], ORDER)[0, 0]) == 1966171168
    assert nibbles.unpack(word(0x75316420), 8, ORDER).tolist() == [SEQUENCE.tolist()]


@pytest.mark.parametrize(
    "signed, packed, value",
    [
        (range(8), 0xFEDCBA98, -19088744),
        (range(-8, 0), 0x76543210, 1985229328),
        ([-8, 7, 0, 0, 0, 0, 0, 0], 0x888888F0, -2004317968),
    ],
)
def test_compressed_tensors_adds_8(signed, packed, value):
    spec = LinearSpec(K=8, N=1, group=8, zeros=False, ordered=False)
    codes = (np.array(list(signed)) + 8).astype(np.uint8)[:, None]
    tensors = written("compressed-tensors", codes, Grid(shape=(8, 1), group=8, scales=np.ones((1, 1))), spec)
    assert np.array_equal(tensors["weight_packed"], word(packed)) and tensors["weight_packed"][0, 0] == value
    assert tensors["weight_shape"].tolist() == [1, 8] and set(tensors) == {
        "weight_packed", "weight_scale", "weight_shape",
    }  # fmt: skip


def test_a_gptq_word_of_rows_is_compressed_tensors_word():
    """Between the two, four bits are the same bits: only the axis differs."""
    codes, grid = weight(spec := LinearSpec(K=16, N=8, group=8))
    a, b = (written(name, codes, grid, spec) for name in ("gptq", "compressed-tensors"))
    assert np.array_equal(a["qweight"], b["weight_packed"].T)


# Every code, every place, tails.


@pytest.mark.parametrize("order", [nibbles.NATURAL, ORDER], ids=["natural", "awq"])
def test_packing_is_a_bijection(order):
    for place in range(8):
        for code in range(16):
            codes = np.zeros((1, 8), np.uint8)
            codes[0, place] = code
            packed = nibbles.pack(codes, order)
            assert int(packed.view(np.uint32)[0, 0]) == code << 4 * order.index(place)
            assert np.array_equal(nibbles.unpack(packed, 8, order), codes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([nibbles.NATURAL, ORDER]), st.integers(0, 2**32 - 1))
def test_any_tail_comes_back_and_any_word_too(rows, n, order, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, n), np.uint8)
    packed = nibbles.pack(codes, order)
    assert packed.shape == (rows, -(-n // 8)) and packed.dtype == np.int32
    assert np.array_equal(nibbles.unpack(packed, n, order), codes)
    words = rng.integers(-(2**31), 2**31, (rows, n), dtype=np.int32)
    assert np.array_equal(nibbles.pack(nibbles.unpack(words, 8 * n, order), order), words)


def test_a_code_that_would_spill_is_refused():
    with pytest.raises(ValueError, match="a code is 16 - 4 bits hold 0..15"):
        nibbles.pack(np.array([[16]], np.uint8))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(WRITTEN),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([8, 16, 0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_there_and_back(name, eights, columns, group, zeros, ordered, seed):
    """Codes and grid come back; a file's bytes come back; the statement's own reader agrees on every weight."""
    K, N, known = 8 * eights, 8 * columns, FORMATS[name]
    spec = LinearSpec(K=K, N=N, group=min(group or K, K), zeros=zeros, ordered=ordered)
    codes, grid = weight(spec, seed=seed, zeros=zeros, ordered=ordered)
    if known.faults(grid):
        assert (ordered and name == "awq") or K % spec.group
        return
    tensors = written(name, codes, grid, spec)
    layout = known.layout(spec)
    assert {suffix: a.shape for suffix, a in tensors.items()} == {suffix: t.shape for suffix, t in layout.items()}
    assert all(tensors[suffix].dtype.name in t.dtypes for suffix, t in layout.items())
    again, grid_again = known.read_codes(tensors[known.codes], spec), known.read_grid(tensors, spec)
    assert np.array_equal(again, codes) and grid_again.same_as(grid)
    assert (grid_again.zeros is None, grid_again.g_idx is None) == (grid.zeros is None, grid.g_idx is None)
    same = written(name, again, grid_again, spec)
    assert all(same[suffix].tobytes() == a.tobytes() for suffix, a in tensors.items())
    assert np.array_equal(by_statement(name, tensors, spec.group), dense(codes, grid))


def test_ragged_sizes_where_a_format_has_them():
    """compressed-tensors fills up words; GPTQ has a last group of fewer rows. The others say that they do not."""
    odd = LinearSpec(K=21, N=5, group=21, ordered=False)
    codes, grid = weight(odd)
    tensors = written("compressed-tensors", codes, grid, odd)
    assert tensors["weight_packed"].shape == (5, 3) and tensors["weight_zero_point"].shape == (1, 1)
    assert np.array_equal(statement.pack_quantized(tensors, group=21), dense(codes, grid))
    assert FORMATS["gptq"].faults(grid) == ["K=21 is no multiple of 8", "N=5 is no multiple of 8"]
    assert FORMATS["awq"].faults(grid) == ["N=5 is no multiple of 8"]
    short = LinearSpec(K=40, N=8, group=32)
    codes, grid = weight(short)
    assert short.groups == 2 and FORMATS["gptq"].faults(grid) == []
    assert np.array_equal(by_statement("gptq", written("gptq", codes, grid, short), 32), dense(codes, grid))
    for name in ("awq", "compressed-tensors"):
        assert FORMATS[name].faults(grid) == ["K=40 is no multiple of group=32"]


@pytest.mark.parametrize("group, groups", [(32, 3), (64, 2), (128, 2), (128, 11)])
def test_gemv_is_read(group, groups):
    spec = LinearSpec(K=group * groups, N=3, group=group)
    codes, grid = weight(spec)
    tensors = statement.gemv_tensors(codes, grid.scales, grid.all_zeros(), group)
    known = FORMATS["awq_gemv"]
    assert {suffix: a.shape for suffix, a in tensors.items()} == {s: t.shape for s, t in known.layout(spec).items()}
    assert np.array_equal(known.read_codes(tensors["qweight"], spec), codes)
    assert known.read_grid(tensors, spec).same_as(grid) and known.write is None


def test_awq_scales_are_float16_or_refused():
    spec = LinearSpec(K=8, N=8, group=8)
    codes, grid = weight(spec, dtype=ml_dtypes.bfloat16)
    assert FORMATS["awq"].faults(grid) == []
    assert FORMATS["awq"].read_grid(written("awq", codes, grid, spec), spec).same_as(grid)
    for scale in (1e6, 1e-7, 1e-30):
        wide = grid.scales.copy()
        wide[0, 3] = scale
        assert FORMATS["awq"].faults(dataclasses.replace(grid, scales=wide)) == [
            "a bfloat16 scale that float16 does not hold in 1 of 8 groups, first group 0 of column 3"
        ]


def test_columns_are_a_weight_of_their_own():
    """What a device of a mesh reads: the codes tensor cut along its columns, and those columns of the grid."""
    spec = LinearSpec(K=16, N=32, group=8)
    codes, grid = weight(spec, ordered=True)
    part = slice(8, 24)
    for name in ("gptq", "compressed-tensors"):
        known = FORMATS[name]
        tensors = written(name, codes, grid, spec)
        dim, each = known.columns
        index = [slice(None), slice(None)]
        index[dim] = slice(part.start // each, part.stop // each)
        cut = known.read_codes(tensors[known.codes][tuple(index)], dataclasses.replace(spec, N=16))
        assert np.array_equal(cut, codes[:, part])
    piece = grid.columns(part)
    assert np.array_equal(dense(codes[:, part], piece), dense(codes, grid)[:, part])


# Hostile values.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(value):
    spec = LinearSpec(K=16, N=8, group=8)
    scales = np.ones((2, 8), np.float16)
    scales[1, 5] = value
    with pytest.raises(ValueError, match="1 of 16 scales are NaN or infinite, first that of group=1 column=5"):
        grid_of(spec, scales, None, None)


@pytest.mark.parametrize(
    "row, value, message",
    [
        (3, 2, r"g_idx\[3\]=2 - there are 2 groups"),
        (0, -1, r"g_idx\[0\]=-1"),
        (9, 0, "9 rows into group 0, which has 8"),
    ],
)
def test_groups_that_are_none(row, value, message):
    spec = LinearSpec(K=16, N=8, group=8)
    g_idx = np.arange(16, dtype=np.int32) // 8
    g_idx[row] = value
    with pytest.raises(ValueError, match=message):
        grid_of(spec, np.ones((2, 8), np.float16), None, g_idx)


def test_a_shape_that_is_another():
    spec = LinearSpec(K=16, N=8, group=8, zeros=False, ordered=False)
    codes, grid = weight(spec, zeros=False)
    tensors = written("compressed-tensors", codes, grid, spec) | {"weight_shape": np.array([16, 8])}
    with pytest.raises(ValueError, match=r"weight_shape holds \[16, 8\], the configuration makes it \[8, 16\]"):
        FORMATS["compressed-tensors"].read_grid(tensors, spec)


def test_the_version_of_symmetric_zeros():
    seven, eight = (np.array([[v] * 3], np.int32) for v in gptq.SYMMETRIC_WORDS.values())
    assert gptq.version_of_zeros(seven) == "gptq" and gptq.version_of_zeros(eight) == "gptq_v2"
    assert gptq.version_of_zeros(np.concatenate([seven, eight])) is None
