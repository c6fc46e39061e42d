"""Stand-in kernels made differentiable: derivatives of every order and mode, vmap and remat."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash.model import REMAT_POLICIES
from pallas_kernels.attention import derivative, reference
from pallas_kernels.attention.cases import CASES, Case
from tests.oracle import attention as oracle
from tests.pallas_kernels.attention.check import jit
from tests.pallas_kernels.attention.stand_in import (
    OPTIONAL,
    against_oracle,
    attend,
    attend_chunked,
    call,
    calls,
    cotangents,
    operands,
    pullback,
)
from tests.tolerance import assert_close

# ---- first order

BOTH = (
    "value_dim_larger", "cross_causal_bottom_right", "window_cross_bottom_right", "lengths_causal_bottom_right",
    "segments_cross", "lengths_zero", "bfloat16",
)  # fmt: skip
ONE = ("group_of_3", "lengths_zero", "bfloat16")


@pytest.mark.parametrize("name, used", [(n, "both") for n in BOTH] + [(n, one) for n in ONE for one in ("out", "lse")])
def test_gradients(name, used):
    arguments = CASES[name].arguments()
    (qkv, optional), (dout, dlse) = operands(arguments), cotangents(arguments)
    lowered = jax.jit(pullback(arguments, used)).lower(*qkv, dout, dlse, **optional)
    text = lowered.as_text()
    assert calls(text) == (1, 1)
    assert ("backward_kernel_with_dlse" in text) == (used != "out")
    results = lowered.compile()(*qkv, dout, dlse, **optional)
    unused = jnp.zeros_like(dout) if used == "lse" else dout, jnp.zeros_like(dlse) if used == "out" else dlse
    against_oracle(results, arguments, *unused)


def test_eager_and_one_gradient_at_a_time():
    arguments = Case(T=5, S=7, N=4, K=2, H=4, H_v=3).arguments()
    (qkv, _), (dout, dlse) = operands(arguments), cotangents(arguments)
    every = pullback(arguments)(*qkv, dout, dlse)
    against_oracle(every, arguments, dout, dlse)
    attended = call(arguments)
    for i in range(3):
        _, pull = jax.vjp(lambda x, i=i: attended(*qkv[:i], x, *qkv[i + 1 :]), qkv[i])
        np.testing.assert_array_equal(pull((dout, dlse))[0], every[2 + i])


# ---- vmap

SMALL = Case(
    B=2, T=5, S=6, N=4, K=2, H=4, H_v=3, is_causal=True, causal_alignment="bottom_right", query_lengths=(5, 4),
    kv_lengths=(3, 6), query_runs=((0, 3), (1, 2)), kv_runs=((0, 4), (1, 2)),
)  # fmt: skip


def examples(mapped: set[str], count: int) -> list[dict[str, Any]]:
    """Calls that differ in the mapped arguments alone."""
    base = SMALL.arguments(0)
    rng = np.random.default_rng(0)

    def other(name: str, i: int) -> Any:
        if name in OPTIONAL:
            # Other lengths, other segments: as many, turned.
            return jax.tree.map(lambda x: jnp.asarray(np.roll(x, i if x.ndim == 1 else (i, i))), base[name])
        return jnp.asarray(rng.standard_normal(base[name].shape), jnp.float32)

    return [{**base, **{name: other(name, i) for name in mapped}} for i in range(count)]


ALL = ("query", "key", "value", *OPTIONAL)


@pytest.mark.parametrize("mapped", [*ALL, "dout", " ".join(ALL)])
def test_vmap_of_gradients(mapped):
    mapped = set(mapped.split())
    every = examples(mapped - {"dout"}, 3)
    pulled = [cotangents(arguments, seed) for seed, arguments in enumerate(every)]
    qkv, optional = operands(every[0])
    names = ("query", "key", "value")
    inputs = [jnp.stack([e[n] for e in every], axis=2) if n in mapped else x for n, x in zip(names, qkv, strict=True)]
    in_axes = [2 if n in mapped else None for n in names]
    if "dout" in mapped:
        dout, dlse = (jnp.stack(x) for x in zip(*pulled, strict=True))
    else:
        pulled = [pulled[0]] * 3
        dout, dlse = pulled[0]
    axes = (*in_axes, *[0 if "dout" in mapped else None] * 2, {n: 0 if n in mapped else None for n in optional})
    optional = {
        n: jax.tree.map(lambda *x: jnp.stack(x), *[e[n] for e in every]) if n in mapped else x
        for n, x in optional.items()
    }
    function = pullback(every[0])
    results = jit(jax.vmap(lambda q, k, v, a, b, o: function(q, k, v, a, b, **o), axes))(*inputs, dout, dlse, optional)
    for i, (arguments, pair) in enumerate(zip(every, pulled, strict=True)):
        against_oracle([x[i] for x in results], arguments, *pair)


def test_nested_vmap_and_gradient_of_vmap():
    every = [examples({"query"}, 2), examples({"query"}, 2)]
    for i in range(2):
        every[1][i]["key"] = every[0][i]["key"] = examples({"key"}, 2)[i]["key"]
        every[1][i]["query"] *= 0.5
    (_, optional), (dout, dlse) = operands(every[0][0]), cotangents(every[0][0])
    q = jnp.stack([jnp.stack([e["query"] for e in row]) for row in every])
    k, v = jnp.stack([e["key"] for e in every[0]]), every[0][0]["value"]

    def loss(q, k, v):
        attended = functools.partial(call(every[0][0]), **optional)
        out, lse = jax.vmap(jax.vmap(attended, (0, 0, None)), (0, None, None))(q, k, v)
        return (out * dout).sum() + jnp.where(jnp.isinf(lse), 0, lse * dlse).sum()

    with jax.numpy_rank_promotion("allow"):
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v)
    assert calls(lowered.as_text()) == (1, 1)
    dq, dk, dv = lowered.compile()(q, k, v)
    want, plain = (
        [[oracle(**e, dout=dout, dlse=dlse, precision=dtype) for e in row] for row in every]
        for dtype in (None, q.dtype)
    )

    def over(results: Any, name: str) -> np.ndarray:
        return np.array([[getattr(result, name) for result in row] for row in results])

    assert_close(dq, over(want, "dq"), over(plain, "dq"), "dq")
    assert_close(dk, over(want, "dk").sum(0), over(plain, "dk").sum(0), "dk")
    assert_close(dv, over(want, "dv").sum((0, 1)), over(plain, "dv").sum((0, 1)), "dv")


# ---- other modes and orders


def scalar(q):
    """Probe P21: one query, keys (1, 0), values (1, 0), scale 1: the output is 1 / (1 + exp(-q))."""
    arguments = Case(B=1, T=1, S=2, N=1, K=1, H=1, H_v=1, scale=1.0).arguments()
    pair = jnp.asarray([1.0, 0.0], q.dtype).reshape(1, 2, 1, 1)
    return call(arguments)(q.reshape(1, 1, 1, 1), pair, pair)[0].reshape(())


def forward_mode(function: Callable) -> Callable:
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize(
    "modes", ["", "r", "f", "rr", "rf", "fr", "ff", "rrr", "frf", "fff", " r", " rr", "f r", "r f"]
)
def test_three_derivatives_of_a_scalar(modes):
    """r and f are reverse and forward mode, the innermost first; a blank is jit and remat."""
    want = (0.668188, 0.221713, -0.0745788, -0.0732267)[len(modes.replace(" ", ""))]
    function = scalar
    for mode in modes:
        function = {"r": jax.grad, "f": forward_mode, " ": lambda f: jax.checkpoint(jax.jit(f))}[mode](function)
    np.testing.assert_allclose(jit(function)(jnp.float32(0.7)), want, rtol=3e-6)
    if modes in ("f", "r"):
        np.testing.assert_allclose(function(jnp.float32(0.7)), want, rtol=3e-6)


def hessian_product(f: Callable, x: Any, t: Any) -> Any:
    return jax.jvp(jax.grad(f, (0, 1, 2)), x, t)[1]


# All of them the product of the Hessian and the tangents.
PRODUCTS: dict[str, Callable] = {
    "forward over reverse": hessian_product,
    "reverse over forward": lambda f, x, t: jax.grad(lambda *x: jax.jvp(f, x, t)[1], (0, 1, 2))(*x),
    "reverse over reverse": lambda f, x, t: jax.vjp(jax.grad(f, (0, 1, 2)), *x)[1](t),
    "linearized": lambda f, x, t: jax.linearize(jax.grad(f, (0, 1, 2)), *x)[1](*t),
    "vmap": lambda f, x, t: jax.tree.map(
        lambda x: x[1], jax.vmap(lambda t: hessian_product(f, x, t))(jax.tree.map(lambda x: jnp.stack([0 * x, x]), t))
    ),
    "remat": lambda f, x, t: hessian_product(jax.checkpoint(f, policy=REMAT_POLICIES["attention"]), x, t),
    "scan": lambda f, x, t: hessian_product(
        lambda *x: jax.lax.scan(lambda c, a: (c + a * f(*x), None), 0.0 * x[0].sum(), jnp.arange(2.0))[0], x, t
    ),
}


def derive(product: Callable, function: Callable, dtype: Any = jnp.float32) -> list[np.ndarray]:
    """The product of a loss of both results of attention."""
    arguments = {n: x.astype(dtype) if n in ("query", "key", "value") else x for n, x in SMALL.arguments().items()}
    (qkv, optional), (dout, dlse) = operands(arguments), cotangents(arguments)

    def loss(q, k, v):
        out, lse = call(arguments, function)(q, k, v, **optional)
        return (jnp.sin(out) * dout).sum() + (jnp.where(jnp.isinf(lse), 0, lse) ** 2 * dlse.astype(dtype)).sum()

    results = jit(lambda x, t: product(loss, x, t))(qkv, tuple(jnp.cos(x) for x in qkv))
    return [np.asarray(x) for x in jax.tree.leaves(results)]


@functools.cache
def truth(product: Callable) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By the reference, differentiated by jax: in float64, and as the same computation in float32."""
    with jax.enable_x64(True):
        exact = derive(product, reference.attend, jnp.float64)
    return exact, derive(product, reference.attend)


@pytest.mark.parametrize("name, function", [*((name, attend) for name in PRODUCTS), ("linearized", attend_chunked)])
def test_hessian_products(name, function):
    for ours, want, plain in zip(derive(PRODUCTS[name], function), *truth(hessian_product), strict=True):
        assert_close(ours, want, plain, name)


@pytest.mark.parametrize("mode", [jax.jvp, lambda f, x, t: jax.linearize(f, *x)[1](*t)], ids=["jvp", "linearize"])
def test_forward_mode(mode):
    exact, plain = truth(jax.jvp)
    ours = derive(mode, attend)
    for i in range(1, len(ours) + 1):
        assert_close(ours[-i], exact[-i], plain[-i], "tangent" if i == 1 else "value")


# ---- remat


@pytest.mark.parametrize(
    "policy, forwards", [("none", 1), ("full", 2), ("dots", 2), ("attention", 1), ("dots_and_attention", 1)]
)
def test_the_forward_kernel_runs_once_where_the_policy_saves_its_names(policy, forwards, monkeypatch):
    # With several devices the kernel is a function of the program, which two calls share: its text counts once.
    monkeypatch.setattr(derivative, "alone", lambda: True)
    arguments = Case(T=8, S=8, N=4, K=4, H=4, H_v=4).arguments()
    qkv, _ = operands(arguments)
    attended = call(arguments)

    def loss(q, k, v, policy=policy):
        def block(x, _):
            return x + attended(jnp.sin(x), k, v)[0], None

        if policy != "none":
            block = jax.checkpoint(block, policy=REMAT_POLICIES[policy], prevent_cse=False)
        return jax.lax.scan(block, q, None, length=3)[0].sum()

    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*qkv)
    assert calls(lowered.as_text()) == (forwards, 1)
    kept = jax.value_and_grad(functools.partial(loss, policy="none"), argnums=(0, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, lowered.compile()(*qkv), jit(kept)(*qkv))
