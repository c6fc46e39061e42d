"""The spec: read off shapes, counts of FLOPs and bytes, refusal of calls without meaning."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels.w4a16.cases import CASES, COLUMN
from pallas_kernels.w4a16.spec import W4A16Spec, make_spec

SPEC = W4A16Spec(M=16, K=8192, N=57344, group=128, zeros=False, dtype="bfloat16", scale_dtype="bfloat16")


def shape(*size, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(size, dtype)


def test_bytes_and_flops():
    """4 bits a code and 16 for 128 of them."""
    assert SPEC.weight_bytes() == 8192 * 57344 * 4.125 / 8
    assert SPEC.flops() == 2 * 16 * 8192 * 57344
    assert SPEC.bytes() == SPEC.weight_bytes() + 2 * 16 * (8192 + 57344)
    assert replace(SPEC, zeros=True).weight_bytes() - SPEC.weight_bytes() == 64 * 57344
    assert replace(SPEC, group=COLUMN).weight_bytes() == 8192 * 57344 / 2 + 2 * 57344


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_packed_as_its_spec_says(name):
    case = CASES[name]
    x, words, scales, zeros = case.packed()
    spec = make_spec(x, words, scales, zeros, shape=(case.K, case.N), group=case.group)
    assert spec == case.spec() and hash(spec) == hash(case.spec())
    assert words.nbytes + scales.nbytes + (0 if zeros is None else zeros.nbytes) == spec.weight_bytes()
    assert spec.groups == scales.shape[1] and spec.padded_K == 64 * words.shape[1]
    np.testing.assert_array_equal(words, case.packed()[1])


def test_cases_are_distinct_calls():
    assert len({repr(case) for case in CASES.values()}) == len(CASES)


def test_text():
    assert str(SPEC) == "M=16 K=8192 N=57344 bfloat16, symmetric group 128, bfloat16 scales"
    assert "asymmetric column" in str(replace(SPEC, group=COLUMN, zeros=True))


def test_float16_activations_meet_bfloat16_scales_in_float32():
    assert replace(SPEC, dtype="float16").operand_dtype == "float32"
    assert replace(SPEC, dtype="float16", scale_dtype="float16").operand_dtype == "float16"
    assert replace(SPEC, scale_dtype="float16").operand_dtype == "bfloat16"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"M": -1}, "at least one row"),
        ({"K": 0}, "at least one row"),
        ({"N": 0}, "at least one row"),
        ({"group": 96}, r"group=96 of K=8192 rows - must be one of \(32, 64, 128\), or 8192 or more"),
        ({"group": 0}, "group=0"),
        ({"K": 8100, "group": 8100}, "8128 or more"),
        ({"dtype": "int8"}, "dtype='int8' - must be one of .* Cast the activations"),
        ({"scale_dtype": "float32"}, "scale_dtype='float32' .* Cast the scales"),
    ],
)
def test_facts_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^w4a16_matmul: .*{message}"):
        replace(SPEC, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": shape(200)}, r"x of shape \(200,\) .* must have shape \(M, 200\)"),
        ({"x": shape(4, 199)}, r"x of shape \(4, 199\) .* must have shape \(M, 200\)"),
        ({"x": shape(4, 200, dtype="float8_e4m3fn")}, "dtype='float8_e4m3fn'"),
        ({"words": shape(2, 3, 8, 64, dtype="int32")}, r"words of shape \(2, 3, 8, 64\) .* shape \(2, 4, 8, 64\)"),
        ({"words": shape(2, 4, 8, 64, dtype="uint32")}, "words .* and dtype int32"),
        ({"scales": shape(2, 2, 64)}, r"scales of shape \(2, 2, 64\) .* shape \(2, 4, 64\)"),
        ({"scales": shape(2, 4, 64, dtype="float32")}, "scale_dtype='float32'"),
        ({"zeros": shape(2, 4, 64, dtype="int8")}, r"zeros .* and dtype uint8. Pack a weight of shape \(200, 100\)"),
        ({"zeros": shape(2, 1, 64, dtype="uint8")}, r"zeros of shape \(2, 1, 64\)"),
        ({"group": 48}, "group=48"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(changes, message):
    call = {
        "x": shape(4, 200), "words": shape(2, 4, 8, 64, dtype="int32"), "scales": shape(2, 4, 64),
        "zeros": shape(2, 4, 64, dtype="uint8"), "shape": (200, 100), "group": 64,
    }  # fmt: skip
    make_spec(**call)
    with pytest.raises(ValueError, match=f"^w4a16_matmul: .*{message}"):
        make_spec(**(call | changes))
