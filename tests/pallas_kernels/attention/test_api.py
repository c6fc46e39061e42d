"""The public call: jax.nn's signature and, where the two agree on semantics, jax.nn's values."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import api
from pallas_kernels.attention.api import dot_product_attention, explain
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.device import H200, Device
from pallas_kernels.dispatch import Unsupported
from tests.pallas_kernels.attention.check import jit

CPU = Device(platform="cpu", kind="cpu")
# Cases in which every row sees a key and that jax.nn can express.
SHARED = ("causal", "group_of_3", "cross_causal_top_left", "window_causal", "bias")


def operands(case, drop=("causal_alignment",)):
    arguments = {name: x for name, x in case.arguments().items() if name not in drop}
    return [arguments.pop(name) for name in ("query", "key", "value")], arguments


def test_signature_is_that_of_jax_nn():
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [p.name for p in ours.values() if p.kind is positional] == [
        p.name for p in theirs.values() if p.kind is positional
    ]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    extra = [p for name, p in ours.items() if name not in theirs]
    assert extra and all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extra)


@pytest.mark.parametrize("name", SHARED)
def test_values_and_gradients_of_jax_nn(name):
    arrays, arguments = operands(CASES[name])

    def both(attention):
        return jit(jax.value_and_grad(lambda *a: (attention(*a, **arguments) ** 2).sum(), (0, 1, 2)))(*arrays)

    for a, b in zip(
        *map(jax.tree.leaves, (both(dot_product_attention), both(jax.nn.dot_product_attention))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_query_lengths_zero_rows_as_in_jax_nn():
    arrays, arguments = operands(Case(query_lengths=(48, 7), kv_lengths=(13, 48)))
    ours, theirs = (
        jit(lambda *a, f=f: f(*a, **arguments))(*arrays) for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours[1, 7:], np.zeros_like(ours[1, 7:]))


def test_without_batch():
    arrays, _ = operands(CASES["causal"])
    call = jit(lambda *operands: dot_product_attention(*operands, is_causal=True, return_lse=True))
    (whole, lse), (one, one_lse) = call(*arrays), call(*(x[1] for x in arrays))
    assert one.shape == whole.shape[1:] and one_lse.shape == lse.shape[1:]
    np.testing.assert_allclose(one, whole[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one_lse, lse[1], rtol=1e-5)
    biased = dot_product_attention(*(x[1] for x in arrays), bias=jnp.zeros((4, 48, 48)), is_causal=True)
    np.testing.assert_allclose(biased, one, rtol=1e-5, atol=1e-6)


def test_residual_is_that_of_jax_nn_and_has_no_gradient():
    arrays, _ = operands(CASES["bfloat16"])
    out, residual = dot_product_attention(*arrays, is_causal=True, return_residual=True)
    _, theirs = jax.nn.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    assert residual.dtype == theirs.dtype == jnp.bfloat16 and residual.shape == out.shape[:-1]
    np.testing.assert_allclose(np.float32(residual), np.float32(theirs), rtol=2.0**-7)
    gradient = jax.grad(
        lambda q: dot_product_attention(q, *arrays[1:], return_residual=True)[1].sum().astype("float32")
    )
    np.testing.assert_array_equal(gradient(arrays[0]), jnp.zeros_like(arrays[0]))


def test_numpy_operands_and_numbers():
    arrays, _ = operands(CASES["causal"])
    want = dot_product_attention(*arrays, is_causal=True, scale=0.5)
    got = dot_product_attention(*map(np.asarray, arrays), is_causal=True, scale=np.float32(0.5))
    np.testing.assert_array_equal(got, want)


def test_segment_ids_for_both_sides_or_one():
    arrays, arguments = operands(CASES["segments"])
    ids = arguments.pop("segment_ids")[0]
    one = dot_product_attention(*arrays, segment_ids=ids)
    np.testing.assert_array_equal(one, dot_product_attention(*arrays, segment_ids=(ids, ids)))
    np.testing.assert_array_equal(one, dot_product_attention(*arrays, segment_ids=(ids + 5, np.asarray(ids) + 5)))


def test_a_name_is_strict():
    arrays, _ = operands(CASES["plain"])
    with pytest.raises(ValueError, match="unknown name='xla_chunk' .* Did you mean 'xla_chunked'"):
        dot_product_attention(*arrays, implementation="xla_chunk")
    if jax.default_backend() == "cpu":
        with pytest.raises(
            Unsupported, match="'cudnn': needs a CUDA device of compute capability 8.0 or more, not cpu"
        ):
            dot_product_attention(*arrays, implementation="cudnn")


@pytest.mark.parametrize("case", CASES)
def test_every_call_is_served_on_every_device(case):
    for device in (CPU, H200, Device(platform="gpu", kind="NVIDIA V100", compute_capability=(7, 0))):
        assert explain(CASES[case].spec(return_lse=True), device=device).chosen is not None


def test_explain_takes_a_call_or_its_spec():
    q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
    explanation = explain(q, q, q, is_causal=True, device=H200)
    assert explanation.chosen == "hopper" and explanation == explain(explanation.spec, device=H200)
    on_cpu = explain(q, q, q, is_causal=True, device=CPU)
    assert on_cpu.chosen == "xla_chunked" and ("xla", "applies, but 'xla_chunked' is preferred") in on_cpu.rejected
    names = ["hopper", "cudnn", ">", "xla", "hopper_fp8", "xla_fp8"]
    assert [line.split()[0] for line in str(on_cpu).splitlines()[2:]] == names
    assert explain(q, q, q, implementation="xla", device=H200).chosen == "xla"


def test_doctests():
    assert doctest.testmod(api).failed == 0 and doctest.testmod(api).attempted >= 6
