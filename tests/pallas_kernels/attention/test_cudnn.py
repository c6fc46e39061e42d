"""cuDNN without a GPU: each limit of `why_not`, and that what passes it lowers for CUDA and keeps our semantics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels.attention import cudnn
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.reference import XLA
from pallas_kernels.attention.spec import make_spec
from pallas_kernels.device import H200, Device

A100 = Device(platform="gpu", kind="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), num_cores=108)
HALF = functools.partial(Case, dtype="bfloat16")

FITS = {
    "plain": HALF(),
    "causal": HALF(T=20, is_causal=True),
    "window": HALF(window=(5, 5), is_causal=True),
    "window_left": HALF(window=(5, 0)),
    "lengths": HALF(query_lengths=(48, 9), kv_lengths=(20, 0)),
    "lengths_causal": HALF(query_lengths=(48, 0), kv_lengths=(20, 48), is_causal=True),
    "bottom_right_square": HALF(is_causal=True, causal_alignment="bottom_right"),
    "odd": HALF(T=47, S=47),
    "odd_causal": HALF(T=51, S=47, is_causal=True),
    "odd_lengths": HALF(T=47, S=33, query_lengths=(47, 9), kv_lengths=(33, 12), is_causal=True),
    "odd_queries_window": HALF(T=41, window=(5, 5), is_causal=True),
    "one_query": HALF(T=1, kv_lengths=(11, 48)),
}


@pytest.mark.parametrize(
    "case, device, reason",
    [
        (HALF(), Device(platform="cpu", kind="cpu"), "needs a CUDA device of compute capability 8.0 or more, not cpu"),
        (
            HALF(),
            Device(platform="gpu", kind="Tesla V100", compute_capability=(7, 0)),
            "compute capability 8.0 or more",
        ),
        (HALF(), Device(platform="gpu", kind="AMD MI300X"), "needs a CUDA device"),
        (Case(), H200, "takes float16 and bfloat16, not float32"),
        (HALF(H=20, H_v=20), H200, "multiple of 8 up to 256 on this device, not 20"),
        (HALF(H=264, H_v=264), H200, "up to 256 on this device, not 264"),
        (HALF(H=136, H_v=136), A100, "up to 128 on this device, not 136"),
        (HALF(H_v=8), H200, "the head dims are 8 and 16"),
        (HALF(query_runs=((0, 48),)), H200, "no segment ids"),
        (HALF(mask="b11s"), H200, "bias of T x S numbers"),
        (HALF(bias="bnts"), H200, "all -inf would be NaN"),
        (HALF(T=20, is_causal=True, causal_alignment="bottom_right"), H200, "top-left"),
        (HALF(kv_lengths=(1, 2), is_causal=True, causal_alignment="bottom_right"), H200, "top-left"),
        (HALF(window=(3, 2)), H200, "only up to the query itself, not 2 keys further"),
        (HALF(T=48, S=20, window=(3, 0)), H200, "leave no row without keys"),
        (HALF(kv_lengths=(1, 2), window=(3, 0)), H200, "leave no row without keys"),
        (HALF(T=47, S=47, window=(3, 0)), H200, "even number of keys, not 47"),
    ],
)
def test_why_not_states_the_limit(case, device, reason):
    assert reason in (cudnn.why_not(case.spec(), device) or "")


def test_why_not_of_lse_traced_scale_and_half():
    assert cudnn.why_not(HALF(dtype="float16").spec(), A100) is None
    assert "without gradient" in (cudnn.why_not(HALF().spec(return_lse=True), H200) or "")
    q = jax.ShapeDtypeStruct((1, 8, 1, 16), jnp.bfloat16)
    assert "Python number" in (
        cudnn.why_not(make_spec(q, q, q, scale=jax.ShapeDtypeStruct((), jnp.float32)), H200) or ""
    )


def call_of(case):
    """(function of query, key, value; the three) with the case's other facts bound."""
    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    operands = [arguments[name] for name in ("query", "key", "value")]
    lengths = {
        "query_lengths": arguments.get("query_seq_lengths"),
        "kv_lengths": arguments.get("key_value_seq_lengths"),
    }
    spec = case.spec()

    def call(implementation, *operands):
        return implementation.forward(spec, *operands, scale=spec.default_scale, **lengths)[0]

    return call, operands


@pytest.mark.parametrize("case", FITS)
def test_what_fits_lowers_for_cuda(monkeypatch, case):
    assert cudnn.why_not(FITS[case].spec(), H200) is None
    # jax asks the host for the library's version before it lowers; the answer changes nothing here.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    call, operands = call_of(FITS[case])

    def gradients(*operands):
        return jax.grad(lambda *a: call(cudnn.IMPLEMENTATION, *a).astype(jnp.float32).sum(), (0, 1, 2))(*operands)

    text = jax.jit(gradients).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text and "__cudnn$fmhaSoftmaxBackward" in text


@pytest.mark.parametrize("case", FITS)
def test_the_adapter_keeps_our_semantics(monkeypatch, case):
    """With jax.nn's own XLA path standing in for the kernel, and NaN in every dead and in one seen place."""
    kernel = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **b: kernel(*a, **b))
    call, operands = call_of(FITS[case])
    q, k, v = operands
    if (lengths := FITS[case].kv_lengths) is not None:
        dead = jnp.arange(k.shape[1])[None, :, None, None] >= jnp.array(lengths)[:, None, None, None]
        k, v = (jnp.where(dead, jnp.nan, x) for x in (k, v))
    k = k.at[0, 10, 0, 0].set(jnp.nan)

    def both(implementation):
        def loss(*operands):
            out = call(implementation, *operands)
            # Rows above the bad key must keep finite gradients; the others are NaN and stay out of the loss.
            return (jnp.where(jnp.isnan(out), 0, out).astype(jnp.float32) ** 2).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    ((_, got), got_gradients), ((_, want), want_gradients) = both(cudnn.IMPLEMENTATION), both(XLA)
    assert np.isnan(np.float32(want)).any()
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2.0**-6, atol=2.0**-6)
    finite = ~np.isnan(np.float32(want)).any(axis=-1)
    got_dq, want_dq = (np.float32(gradients[0])[finite] for gradients in (got_gradients, want_gradients))
    np.testing.assert_allclose(got_dq, want_dq, rtol=2.0**-5, atol=2.0**-5)
