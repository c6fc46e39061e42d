"""The spec: a value, read off shapes; counts of pairs and FLOPs; refusal of calls without meaning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.spec import make_spec
from tests.oracle import visible


def shape(*size, dtype="float32"):
    return jax.ShapeDtypeStruct(size, dtype)


Q = shape(2, 8, 4, 16)
KV = shape(2, 12, 2, 16)


def test_spec_of_shapes_is_hashable_and_equal():
    spec = make_spec(Q, KV, shape(2, 12, 2, 24), is_causal=True, local_window_size=3, bias=shape(8, 12))
    assert (spec.B, spec.T, spec.S, spec.N, spec.K, spec.H, spec.H_v, spec.G) == (2, 8, 12, 4, 2, 16, 24, 2)
    assert spec.window == (3, 3) and spec.bounds == (3, 0) and spec.bias == ((1, 1, 8, 12), "float32")
    assert hash(spec) == hash(replace(spec)) and spec == replace(spec)
    assert "B=2 T=8 S=12 N=4 K=2 H=16 H_v=24 float32" in str(spec)


def test_shift():
    spec = make_spec(Q, KV, KV, is_causal=True)
    assert spec.shift == 0
    assert replace(spec, causal_alignment="bottom_right").shift == 4
    assert replace(spec, causal_alignment="bottom_right", kv_lengths=True).shift is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not (case.query_lengths or case.kv_lengths)])
def test_live_pairs_are_counted_exactly(name):
    case = replace(CASES[name], query_runs=None, kv_runs=None)
    seen = visible(
        0, case.T, case.S, is_causal=case.is_causal, query_seq_lengths=None, key_value_seq_lengths=None,
        local_window_size=case.window, causal_alignment=case.causal_alignment, segment_ids=None,
    )  # fmt: skip
    assert case.spec().live_pairs() == seen.sum()


def test_flops_follow_the_papers():
    """FlashAttention-3, section 4.1: 4 * S^2 * d * heads, half of it if causal, 2.5 times it backward."""
    spec = make_spec(*(shape(2, 1024, 16, 128, dtype="bfloat16"),) * 3)
    assert spec.flops() == 2 * 4 * 1024**2 * 128 * 16
    assert spec.flops(backward=True) == 5 * spec.flops() // 2
    assert replace(spec, is_causal=True).flops() == spec.flops() // 2
    windowed = replace(spec, window=(0, 0))
    assert windowed.flops() == spec.flops() and windowed.flops(live=True) == spec.flops() // 1024
    with pytest.raises(ValueError, match="live pairs are not static"):
        replace(spec, is_causal=True, causal_alignment="bottom_right", kv_lengths=True).live_pairs()


@pytest.mark.parametrize("case", CASES)
def test_cases_are_distinct_calls(case):
    specs = [(other, repr(CASES[other])) for other in CASES]
    assert [other for other, text in specs if text == repr(CASES[case])] == [case]
    arguments = Case.arguments(CASES[case])
    assert jnp.isfinite(arguments["query"]).all()
    np.testing.assert_array_equal(arguments["key"], CASES[case].arguments()["key"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"query": shape(4, 16)}, "query of shape .* must be .batch, length, heads, head dim"),
        ({"query": shape(1, 2, 8, 4, 16)}, "query of shape"),
        ({"query": shape(2, 8, 4, 16, dtype="int8")}, "dtype must be one of"),
        ({"query": shape(2, 8, 4, 16, dtype="bfloat16")}, "Cast the three to one dtype"),
        ({"query": shape(2, 8, 4, 8)}, "key of shape"),
        ({"query": shape(3, 8, 4, 16)}, "key of shape"),
        ({"query": shape(2, 8, 3, 16)}, "3 heads must be a multiple of the 2"),
        ({"query": shape(2, 8, 4, 0), "key": shape(2, 12, 2, 0)}, "head dim must be at least 1"),
        ({"key": shape(2, 11, 2, 16)}, "key of shape"),
        ({"mask": shape(2, 4, 8, 12)}, "mask .* dtype must be bool"),
        ({"mask": shape(2, 2, 8, 12, dtype="bool")}, "mask .* must broadcast to"),
        ({"bias": shape(2, 4, 8, 12, dtype="bool")}, "bias .* dtype must be floating"),
        ({"bias": shape(2, 4, 8, 13)}, "bias .* must broadcast to"),
        ({"bias": shape(1, 2, 4, 8, 12)}, "bias .* must broadcast to"),
        ({"query_seq_lengths": shape(2, 1, dtype="int32")}, "query_seq_lengths .* one length per batch entry"),
        ({"key_value_seq_lengths": shape(2)}, "key_value_seq_lengths .* must be integers"),
        ({"segment_ids": shape(2, 8, dtype="int32")}, r"segment_ids .* integers of shape \(2, 12\)"),
        ({"segment_ids": (shape(2, 8, dtype="int32"),) * 3}, "must be one array or a pair"),
        ({"local_window_size": (-1, 0)}, "negative local_window_size"),
        ({"causal_alignment": "bottom"}, "unknown causal_alignment='bottom'"),
        ({"scale": shape(2)}, "must be a scalar"),
        ({"return_residual": True, "return_lse": True}, "two forms of one result"),
    ],
)
def test_calls_without_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^dot_product_attention: .*{message}"):
        make_spec(**({"query": Q, "key": KV, "value": KV} | arguments))
