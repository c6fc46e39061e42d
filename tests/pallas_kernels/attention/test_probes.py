"""Closed forms: small calls whose exact answer is known without an oracle, most of them once wrong in some library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import reference
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.cases import Case
from tests.pallas_kernels.attention.check import against_oracle, jit, run


@pytest.fixture(params=["xla", "xla_chunked"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(reference, "chunk_sizes", lambda spec: (min(spec.T, 16), min(spec.S, 24)))
    return request.param


def uniform_over_seen(T, S, implementation, **arguments):
    """Weights of a call whose logits are all 0, read off by one-hot values: (T, S)."""
    q, k = jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1))
    v = jnp.eye(S)[None, :, None]
    return jit(lambda *a: dot_product_attention(*a, implementation=implementation, **arguments))(q, k, v)[0, :, 0]


@pytest.mark.parametrize("length", [1, 63, 65, 191])
def test_lengths_that_no_block_divides(length, monkeypatch):
    """jax#27224: kernels that read past the last block return garbage that differs from run to run."""
    implementation = "xla_chunked"
    monkeypatch.setattr(reference, "chunk_sizes", lambda spec: (min(spec.T, 64), min(spec.S, 64)))
    arguments = Case(B=1, N=2, K=2, H=8, H_v=8, T=length, S=length, dtype="float16").arguments()
    first, again = (run(arguments, implementation) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    against_oracle(arguments, implementation)


def test_top_left_and_bottom_right(implementation):
    top_left = uniform_over_seen(2, 5, implementation, is_causal=True)
    np.testing.assert_allclose(top_left, [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]], rtol=1e-6)
    bottom_right = uniform_over_seen(2, 5, implementation, is_causal=True, causal_alignment="bottom_right")
    np.testing.assert_allclose(bottom_right, [[0.25] * 4 + [0], [0.2] * 5], rtol=1e-6)


def test_bottom_right_aligns_the_ends_of_the_lengths(implementation):
    """The last real query is level with the last real key: 2 queries, 3 keys of 5 filled."""
    weights = uniform_over_seen(
        2, 5, implementation, is_causal=True, causal_alignment="bottom_right", key_value_seq_lengths=jnp.array([3])
    )
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0, 0, 0], [1 / 3] * 3 + [0, 0]], rtol=1e-6)


def test_leading_rows_without_keys(implementation):
    arguments = Case(B=1, T=5, S=2, is_causal=True, causal_alignment="bottom_right").arguments()
    out, lse, gradients, _ = run(arguments, implementation)
    np.testing.assert_array_equal(out[:, :3], np.zeros_like(out[:, :3]))
    assert (np.asarray(lse[:, :3]) == -np.inf).all() and np.isfinite(lse[:, 3:]).all()
    np.testing.assert_allclose(out[0, 3], np.repeat(arguments["value"][0, 0], 2, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(gradients["query"][:, :3], np.zeros_like(out[:, :3]))
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_key_lengths(implementation):
    arguments = Case(T=70, S=70, N=2, H_v=64, kv_lengths=(70, 1)).arguments()
    out, _, gradients, _ = run(arguments, implementation)
    np.testing.assert_allclose(out[1], np.broadcast_to(arguments["value"][1, :1], out[1].shape), rtol=1e-6)
    np.testing.assert_array_equal(gradients["value"][1, 1:], np.zeros_like(gradients["value"][1, 1:]))


def test_key_length_of_zero(implementation):
    arguments = Case(T=4, S=4, kv_lengths=(0, 3)).arguments()
    out, lse, gradients, _ = run(arguments, implementation)
    np.testing.assert_array_equal(out[0], np.zeros_like(out[0]))
    assert (np.asarray(lse[0]) == -np.inf).all()
    for name in ("key", "value"):
        np.testing.assert_array_equal(gradients[name][0], np.zeros_like(gradients[name][0]))
        np.testing.assert_array_equal(gradients[name][1, 3:], np.zeros_like(gradients[name][1, 3:]))


def test_windows(implementation):
    weights = uniform_over_seen(5, 5, implementation, local_window_size=(1, 0))
    np.testing.assert_allclose(
        weights, np.eye(5) / 2 + np.eye(5, k=-1) / 2 + np.eye(5, 5) * [0.5, 0, 0, 0, 0], rtol=1e-6
    )
    np.testing.assert_array_equal(uniform_over_seen(8, 8, implementation, local_window_size=(0, 0)), np.eye(8))
    causal = uniform_over_seen(8, 8, implementation, is_causal=True)
    np.testing.assert_array_equal(uniform_over_seen(8, 8, implementation, local_window_size=(7, 0)), causal)
    both = uniform_over_seen(8, 8, implementation, is_causal=True, local_window_size=3)
    np.testing.assert_array_equal(both, uniform_over_seen(8, 8, implementation, local_window_size=(3, 0)))
    shifted = uniform_over_seen(2, 5, implementation, local_window_size=(0, 0), causal_alignment="bottom_right")
    np.testing.assert_array_equal(shifted, np.eye(5)[3:])


def test_float32_bias_shared_by_the_batch(implementation):
    """jax#32242, jax#30593: dbias of bfloat16 operands was NaN, and wrong for more than one batch entry."""
    arguments = Case(B=3, T=40, S=40, H=32, dtype="bfloat16", bias="1nts").arguments()
    against_oracle(arguments, implementation)


def test_a_row_whose_bias_is_all_minus_infinity(implementation):
    arguments = Case(B=1, T=4, S=4, bias="11ts").arguments()
    arguments["bias"] = arguments["bias"].at[0, 0, 1, :].set(-jnp.inf)
    out, lse, gradients, _ = run(arguments, implementation)
    np.testing.assert_array_equal(out[:, 1], np.zeros_like(out[:, 1]))
    assert (np.asarray(lse[:, 1]) == -np.inf).all()
    np.testing.assert_array_equal(gradients["bias"][0, 0, 1], np.zeros(4))
    against_oracle(arguments, implementation)


@pytest.mark.parametrize("H, H_v", [(80, 80), (192, 128), (64, 256)])
def test_head_dims_that_kernels_pad(implementation, H, H_v):
    """The scale is 1 / sqrt of the head dim as given, not as padded."""
    against_oracle(Case(B=1, T=5, S=7, N=2, K=1, H=H, H_v=H_v).arguments(), implementation)


def test_derivatives_of_the_scalar_call(implementation):
    """Two keys, one dim: o(q) = sigmoid(q); the first three derivatives at 0.7, forward over forward over forward."""

    def out(q):
        k = v = jnp.array([1.0, 0.0]).reshape(1, 2, 1, 1)
        return dot_product_attention(q.reshape(1, 1, 1, 1), k, v, scale=1.0, implementation=implementation).sum()

    def derivative(f):
        return lambda q: jax.jvp(f, (q,), (jnp.ones_like(q),))[1]

    functions, want = [out], [0.668188, 0.221713, -0.0745788, -0.0732267]
    for _ in range(3):
        functions.append(derivative(functions[-1]))
    np.testing.assert_allclose(jit(lambda q: [f(q) for f in functions])(jnp.float32(0.7)), want, rtol=1e-5)
    reverse = jit(jax.grad(jax.grad(jax.grad(out))))
    np.testing.assert_allclose(reverse(jnp.float32(0.7)), want[3], rtol=1e-5)


def test_segments_equal_separate_calls(implementation):
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2]])
    arguments = Case(B=1, T=8, S=8, is_causal=True).arguments()
    packed, _, _, _ = run(arguments | {"segment_ids": ids}, implementation)
    for start, stop in ((0, 3), (3, 7), (7, 8)):
        part = arguments | {name: arguments[name][:, start:stop] for name in ("query", "key", "value")}
        np.testing.assert_allclose(packed[:, start:stop], run(part, implementation)[0], rtol=1e-5, atol=1e-6)


def test_heads_of_a_group_add_up(implementation):
    """Eight equal query heads over one key/value head: its gradients are eight times those of one."""
    arguments = Case(B=1, N=1, K=1, dtype="bfloat16", is_causal=True).arguments()
    many = arguments | {"query": jnp.repeat(arguments["query"], 8, axis=2)}

    def gradients(arguments):
        def loss(k, v):
            out = dot_product_attention(arguments["query"], k, v, is_causal=True, implementation=implementation)
            return out.astype(jnp.float32).sum()

        return jit(jax.grad(loss, (0, 1)))(arguments["key"], arguments["value"])

    for one, eight in zip(gradients(arguments), gradients(many), strict=True):
        # A factor of 8 is exact in bfloat16, so only the order of the float32 sum can differ, by one rounding.
        np.testing.assert_allclose(
            np.float32(eight), 8 * np.float32(one), rtol=2.0**-7, atol=1e-2 * np.abs(np.float32(one)).max()
        )


def test_one_key_is_the_identity(implementation):
    arguments = Case(B=1, T=6, S=1, N=2, K=2).arguments()
    out, lse, _, _ = run(arguments, implementation)
    np.testing.assert_allclose(out, np.broadcast_to(arguments["value"], out.shape), rtol=1e-6)
    logits = (np.asarray(arguments["query"]) * np.asarray(arguments["key"])).sum(-1) / 4
    np.testing.assert_allclose(lse, logits, rtol=1e-5, atol=1e-6)


def test_huge_logits_neither_overflow_nor_lose_the_winner(implementation):
    arguments = Case(B=1, T=3, S=3, N=1, K=1, H=1, H_v=1).arguments()
    arguments["query"] = jnp.full((1, 3, 1, 1), -1e7)
    arguments["key"] = jnp.array([3.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    out, lse, _, _ = run(arguments | {"scale": 1.0}, implementation)
    np.testing.assert_array_equal(out[0, :, 0], np.tile(arguments["value"][0, 1, 0], (3, 1)))
    np.testing.assert_array_equal(lse, np.full((1, 3, 1), -1e7))


@pytest.mark.parametrize("empty", [{"T": 0}, {"S": 0}, {"B": 0}, {"H_v": 0}])
def test_empty_calls(implementation, empty):
    arguments = Case(**({"B": 2, "T": 3, "S": 5} | empty)).arguments()
    out, lse, gradients, _ = run(arguments, implementation)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, np.zeros_like(arguments[name]))
