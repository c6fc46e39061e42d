"""The jax.numpy implementations under jax's transformations, at length, and under a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import reference
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.cases import CASES, Case
from tests.pallas_kernels.attention.check import against_oracle, jit, run


@pytest.fixture(params=["xla", "xla_chunked"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(reference, "chunk_sizes", lambda spec: (min(spec.T, 8), min(spec.S, 8)))
    return request.param


@pytest.fixture
def call(implementation):
    """A small call with everything that has a derivative, as a function of (query, key, value, bias, scale)."""
    small = Case(B=2, T=13, S=17, N=2, K=1, H=4, H_v=3, bias="b1ts", kv_lengths=(17, 9), is_causal=True)
    arguments = {name: x for name, x in small.arguments().items() if x is not None}
    arrays = [arguments.pop(name).astype(jnp.float32) for name in ("query", "key", "value", "bias")]

    def function(query, key, value, bias, scale):
        return dot_product_attention(
            query, key, value, bias, scale=scale, **arguments, implementation=implementation, return_lse=True
        )

    return function, (*arrays, jnp.float32(0.4))


def directions(arrays, seed):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in arrays)


def test_jvp_is_the_transpose_of_vjp(call):
    function, primals = call
    tangents = directions(primals, 0)

    @jit
    def both(primals, tangents):
        results, out_tangents = jax.jvp(function, primals, tangents)
        cotangents = directions(results, 1)
        gradients = jax.vjp(function, *primals)[1](cotangents)
        return [
            sum(jnp.vdot(a, b) for a, b in zip(*pair, strict=True))
            for pair in ((out_tangents, cotangents), (gradients, tangents))
        ]

    forward, reverse = both(primals, tangents)
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)
    assert abs(forward) > 0.1


def test_hessian_vector_products_agree(call):
    """Forward over reverse, reverse over reverse, and the difference quotient of the gradient."""
    function, primals = call
    tangents = directions(primals, 2)

    def loss(*primals):
        return sum((x**2).sum() for x in function(*primals))

    gradient = jax.grad(loss, range(5))

    @jit
    def products(primals, tangents):
        forward = jax.jvp(gradient, primals, tangents)[1]
        reverse = jax.vjp(gradient, *primals)[1](tangents)
        step = 1e-2
        ahead, behind = (gradient(*(x + s * t for x, t in zip(primals, tangents, strict=True))) for s in (step, -step))
        return forward, reverse, jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)

    forward, reverse, quotient = products(primals, tangents)
    for a, b, c in zip(forward, reverse, quotient, strict=True):
        scale = np.abs(a).max()
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * scale)
        np.testing.assert_allclose(a, c, rtol=0, atol=2e-2 * scale)


def test_vmap_over_any_operand_equals_the_loop(call):
    function, primals = call

    def gradient(*primals):
        return jax.grad(lambda *primals: sum(x.sum() for x in function(*primals)), range(5))(*primals)

    query, key, value, bias, scale = primals
    stacked = (jnp.stack([query, 2 * query]), key, jnp.stack([value, -value]), bias, jnp.stack([scale, 2 * scale]))
    axes = (0, None, 0, None, 0)

    def each(*stacked):
        loop = ([x[i] if axis == 0 else x for x, axis in zip(stacked, axes, strict=True)] for i in (0, 1))
        return jax.vmap(gradient, axes)(*stacked), *(gradient(*primals) for primals in loop)

    batched, first, second = jit(each)(*stacked)
    for whole, *parts in zip(batched, first, second, strict=True):
        np.testing.assert_allclose(whole, np.stack(parts), rtol=1e-4, atol=1e-5)


def test_jacobian(call):
    function, primals = call
    jacobian = jit(jax.jacrev(lambda scale: function(*primals[:4], scale)[0]))(primals[4])
    tangent = jit(lambda s: jax.jvp(lambda scale: function(*primals[:4], scale)[0], (s,), (jnp.ones_like(s),))[1])
    np.testing.assert_allclose(jacobian, tangent(primals[4]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["causal", "bias_over_heads", "everything"])
def test_default_chunks_cut_a_long_call(case):
    """The sizes that users get, at a length where both loops run and neither divides evenly."""
    long = replace(CASES[case], B=1, T=257, S=1500, N=1, K=1, H=4, H_v=4, query_lengths=None, kv_lengths=None)
    if case == "everything":
        long = replace(long, query_runs=((0, 100), (1, 157)), kv_runs=((0, 800), (1, 700)))
    queries, keys = reference.chunk_sizes(long.spec())
    assert queries < long.T and keys < long.S and long.T % queries
    against_oracle(long.arguments(), "xla_chunked")


def temporary_bytes(length, transform, **arguments):
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)

    def call(q, k, v):
        return dot_product_attention(q, k, v, implementation="xla_chunked", **arguments).astype(jnp.float32).sum()

    analysis = jit(transform(call)).lower(x, x, x).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: jax.grad(f, (0, 1, 2))], ids=["forward", "gradient"]
)  # fmt: skip
def test_memory_is_linear_in_length(transform, arguments):
    small, large = (temporary_bytes(length, transform, **arguments) for length in (4096, 16384))
    # Four times the length: linear memory grows by at most 4, the square by 16.
    assert large <= 4 * small
    logits = 2 * 16384**2 * 4
    assert large < logits / 20


def test_a_mask_of_keys_is_not_expanded():
    """jax#28974: a (B, 1, 1, S) mask; no buffer of T x S arises from it."""
    q = jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, 8192), jnp.bool_)
    call = jit(lambda q, mask: dot_product_attention(q, q, q, mask=mask, implementation="xla_chunked"))
    analysis = call.lower(q, mask).compile().memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 8192**2 / 4


@pytest.mark.parametrize("axes", [("data", None), ("data", "model")], ids=["batch", "batch_and_heads"])
def test_sharded_equals_unsharded_without_gathering(axes, implementation):
    batch, heads = axes
    mesh = jax.make_mesh((2, 4) if heads else (8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arguments = Case(B=8, T=20, S=20, N=8, K=4, H=8, H_v=8, is_causal=True, kv_lengths=(20, 9) * 4).arguments()
    lengths = arguments["key_value_seq_lengths"]
    operands = [arguments[name] for name in ("query", "key", "value")]

    def both(lengths, *operands):
        def loss(*operands):
            out = dot_product_attention(
                *operands, is_causal=True, key_value_seq_lengths=lengths, implementation=implementation
            )
            return (out**2).sum(), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*operands)

    want = jit(both)(lengths, *operands)
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, P(batch, None, heads))
        placed = [
            jax.device_put(lengths, NamedSharding(mesh, P(batch))),
            *(jax.device_put(x, spread) for x in operands),
        ]
        compiled = jit(both).lower(*placed).compile()
        got = compiled(*placed)
    text = compiled.as_text()
    assert text is not None
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for gradient in got[1]:
        assert gradient.sharding.is_equivalent_to(spread, 4)


def test_remat_and_jit_of_the_default_call():
    arguments = CASES["causal"].arguments()
    operands = [arguments[name] for name in ("query", "key", "value")]

    def loss(*operands):
        return (dot_product_attention(*operands, is_causal=True) ** 2).sum()

    plain = jit(jax.grad(loss))(*operands)
    remat = jit(jax.grad(jax.checkpoint(loss)))(*operands)
    np.testing.assert_allclose(plain, remat, rtol=1e-5, atol=1e-6)


def test_float64_is_kept():
    with jax.enable_x64(True):
        arguments = Case(dtype="float64", is_causal=True, bias="1n1s", bias_dtype="float64").arguments()
        out, lse, _, _ = run(arguments, "xla")
        assert out.dtype == lse.dtype == jnp.float64
        against_oracle(arguments, "xla_chunked")
