"""Stand-in kernels made differentiable: derivatives of every order and mode, vmap, remat and sharding."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash.model import REMAT_POLICIES
from pallas_kernels import mosaic
from pallas_kernels.attention import derivative, reference, tile
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.spec import AttentionSpec, make_spec
from sharding.mesh import make_mesh
from tests.oracle import attention as oracle
from tests.pallas_kernels.attention.check import jit
from tests.tolerance import assert_close

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
OPTIONAL = ("query_seq_lengths", "key_value_seq_lengths", "segment_ids")


def counting(results):
    """The results, by way of a counter as the kernels have it in global memory: some transformations refuse a ref."""

    def launch(counter):
        counter[0] += 1
        return results

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    return tuple(mosaic.with_zeros(1, launch, out_type))


def forward(spec: AttentionSpec, q, k, v, *, scale, **optional):
    def forward_kernel(q, k, v, optional):
        return counting(reference.attend(spec, q, k, v, scale=scale, **optional))

    return jax.jit(forward_kernel)(q, k, v, optional)


def backward(spec: AttentionSpec, q, k, v, out, lse, dout, dlse, *, scale, **optional):
    """The formulas of arXiv 2205.14135, algorithm 4, with all pairs at once."""
    assert (spec.B, spec.T, spec.N, spec.H) == q.shape and (spec.B, spec.S, spec.K, spec.H_v) == v.shape

    def backward_kernel(q, k, v, out, lse, dout, dlse, optional):
        def grouped(x):
            return x.astype(jnp.float32).reshape(*x.shape[:2], spec.K, spec.G, *x.shape[3:])

        einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        q_, dout_, delta = grouped(q), grouped(dout), (grouped(out) * grouped(dout)).sum(-1)
        k_, v_ = k.astype(jnp.float32), v.astype(jnp.float32)
        lse_ = grouped(lse)
        if dlse is not None:
            delta -= grouped(dlse)
        logits = scale * einsum("btkgh,bskh->bkgts", q_, k_)
        seen = _visible(spec, **optional)
        lse_ = lse_.transpose(0, 2, 3, 1)[..., None]
        dead = jnp.isinf(lse_)
        weights = jnp.where(dead | ~seen, 0, jnp.exp(logits - jnp.where(dead, 0, lse_)))
        # The LSE's own rounding is not at test here: divided out where it is rounding, NaN where it is another row's.
        total = jnp.where(dead, 1, weights.sum(-1, keepdims=True))
        weights = weights / jnp.where(abs(total - 1) < 1e-4, total, jnp.nan)
        dweights = einsum("btkgh,bskh->bkgts", dout_, v_)
        dlogits = scale * weights * (dweights - delta.transpose(0, 2, 3, 1)[..., None])
        dq = einsum("bkgts,bskh->btkgh", dlogits, k_).reshape(q.shape)
        dk = einsum("bkgts,btkgh->bskh", dlogits, q_)
        dv = einsum("bkgts,btkgh->bskh", weights, dout_)
        return counting((dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)))

    backward_kernel.__name__ += "_with_dlse" * (dlse is not None)
    return jax.jit(backward_kernel)(q, k, v, out, lse, dout, dlse, optional)


def _visible(spec: AttentionSpec, *, query_lengths, kv_lengths, query_segments, kv_segments):
    lengths = [None if x is None else x.reshape(-1, 1, 1, 1, 1) for x in (query_lengths, kv_lengths)]
    shift = spec.shift
    if shift is None:
        shift = (spec.S if lengths[1] is None else lengths[1]) - (spec.T if lengths[0] is None else lengths[0])
    seen = tile.visible(
        jnp.arange(spec.T).reshape(1, 1, 1, -1, 1),
        jnp.arange(spec.S).reshape(1, 1, 1, 1, -1),
        shift=shift,
        bounds=spec.bounds,
        query_length=lengths[0],
        kv_length=lengths[1],
        query_segment=None if query_segments is None else query_segments[:, None, None, :, None],
        kv_segment=None if kv_segments is None else kv_segments[:, None, None, None, :],
    )
    return jnp.bool_(True) if seen is None else seen


attend = derivative.differentiable(forward, backward, exact=reference.attend)
attend_chunked = derivative.differentiable(forward, backward, exact=functools.partial(reference.attend, chunks=(3, 4)))


def call(arguments: dict[str, Any], function: Callable = attend) -> Callable:
    """The function of (q, k, v) and, by keyword, of what is optional; spec and scale are those of the arguments."""
    spec, scale = make_spec(**arguments), arguments.get("scale")
    scale = spec.default_scale if scale is None else scale

    def attended(q, k, v, query_seq_lengths=None, key_value_seq_lengths=None, segment_ids=None):
        query_segments, kv_segments = (None, None) if segment_ids is None else segment_ids
        return function(
            spec, q, k, v, scale=scale, query_lengths=query_seq_lengths, kv_lengths=key_value_seq_lengths,
            query_segments=query_segments, kv_segments=kv_segments,
        )  # fmt: skip

    return attended


def operands(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    qkv = tuple(arguments[name] for name in ("query", "key", "value"))
    return qkv, {name: arguments[name] for name in OPTIONAL if name in arguments}


def cotangents(arguments: dict[str, Any], seed: int = 1) -> tuple[Any, Any]:
    q, v = arguments["query"], arguments["value"]
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((*q.shape[:-1], v.shape[-1])), q.dtype)
    return dout, jnp.asarray(rng.standard_normal(q.shape[:-1]), jnp.float32)


def pullback(arguments: dict[str, Any], used: str = "both", function: Callable = attend) -> Callable:
    """(q, k, v, dout, dlse, **optional) -> (out, lse, dq, dk, dv); `used` is which results the loss depends on."""

    def both(q, k, v, dout, dlse, **optional):
        attended = call(arguments, function)

        def loss(q, k, v):
            out, lse = attended(q, k, v, **optional)
            total = jnp.zeros((), jnp.float32)
            if used != "lse":
                total += (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum()
            if used != "out":
                total += jnp.where(jnp.isinf(lse), 0, lse * dlse).sum()
            return total, (out, lse)

        gradients, (out, lse) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, lse, *gradients

    return both


def against_oracle(results: Any, arguments: dict[str, Any], dout: Any, dlse: Any) -> None:
    # A call without cotangents has no gradients; zeros stand for the result that the loss does not use.
    want = oracle(**arguments, dout=dout, dlse=dlse)
    plain = oracle(**arguments, dout=dout, dlse=dlse, precision=arguments["query"].dtype)
    for result, name in zip(results, ("out", "lse", "dq", "dk", "dv"), strict=True):
        assert_close(result, getattr(want, name), getattr(plain, name), name)


def calls(lowered: str) -> tuple[int, int]:
    """How often a lowered function calls (the forward kernel, the backward kernel)."""
    return len(re.findall("call @forward_kernel", lowered)), len(re.findall("call @backward_kernel", lowered))


def collectives(compiled: Any) -> list[str]:
    return re.findall(COLLECTIVES, compiled.as_text())


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


# ---- sharding

MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}]
WIDE = Case(
    B=8, T=4, S=4, N=8, K=4, H=4, H_v=3, is_causal=True, query_lengths=(4, 3, 4, 1, 0, 4, 2, 4),
    kv_lengths=(4, 4, 2, 4, 4, 1, 0, 3), query_runs=((0, 2), (1, 2)),
)  # fmt: skip


LAYOUT = P(("data", "fsdp"), None, "tensor")


def placed(mesh: Any, arguments: dict[str, Any], layout: P = LAYOUT) -> tuple[Any, Any]:
    """(operands and cotangents, the optional ones) in a layout; dims that do not divide are whole."""

    def place(x):
        entries = [layout[i] if i < len(layout) else None for i in range(x.ndim)]
        for i, entry in enumerate(entries):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            entries[i] = entry if x.shape[i] % int(np.prod([mesh.shape[axis] for axis in axes])) == 0 else None
        return jax.device_put(x, NamedSharding(mesh, P(*entries)))

    qkv, optional = operands(arguments)
    return jax.tree.map(place, ((*qkv, *cotangents(arguments)), optional))


def direct(arguments: dict[str, Any]) -> Callable:
    """As `pullback`, without the sums of a loss, which are collectives."""

    def both(q, k, v, dout, dlse, **optional):
        results, pull = jax.vjp(functools.partial(call(arguments), **optional), q, k, v)
        return *results, *pull((dout, dlse))

    return both


@pytest.mark.parametrize("in_force", [True, False], ids=["set_mesh", "no mesh"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_is_unsharded_without_collectives(axes, in_force):
    arguments = WIDE.arguments()
    mesh = make_mesh(axes)
    arrays, optional = placed(mesh, arguments)
    with jax.set_mesh(mesh) if in_force else jax.default_matmul_precision(None):
        compiled = jax.jit(direct(arguments)).lower(*arrays, **optional).compile()
    results = compiled(*arrays, **optional)
    assert collectives(compiled) == []
    for result in results:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, LAYOUT), result.ndim)
    against_oracle(results, arguments, *arrays[3:])


@pytest.mark.parametrize("in_force", [True, False], ids=["set_mesh", "no mesh"])
@pytest.mark.parametrize(
    "case, layout",
    [
        (Case(B=8, T=4, S=4, N=4, K=1, H=4, H_v=4), LAYOUT),
        (Case(B=8, T=4, S=4, N=6, K=3, H=4, H_v=4), LAYOUT),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P("data", None, "tensor")),
        (Case(B=3, T=4, S=4, N=4, K=2, H=4, H_v=4), P(None, None, "tensor")),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P("data", "fsdp", "tensor")),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P(None, None, None, "tensor")),
    ],
    ids=["one key head", "3 key heads", "batch of 2", "batch of 3", "sequence split", "head dim split"],
)
def test_what_does_not_divide_is_whole_on_every_device(case, layout, in_force):
    arguments = case.arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, _ = placed(mesh, arguments, layout)
    with jax.set_mesh(mesh) if in_force else jax.default_matmul_precision(None):
        results = jax.jit(direct(arguments))(*arrays)
    against_oracle(results, arguments, *arrays[3:])


def test_meshes_of_other_axes_are_followed():
    arguments = WIDE.arguments()
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    arrays, optional = placed(mesh, arguments, P("x", None, "y"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(direct(arguments)).lower(*arrays, **optional).compile()
    assert collectives(compiled) == []
    against_oracle(compiled(*arrays, **optional), arguments, *arrays[3:])


@pytest.mark.parametrize("manual, layout", [(("data", "fsdp", "tensor"), LAYOUT), (("data",), P("data"))], ids=str)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_axes_that_are_manual_already_are_left_alone(manual, layout, check_vma):
    arguments = WIDE.arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, optional = placed(mesh, arguments, layout)

    def local(arrays, optional):
        shard = {**arguments, **dict(zip(("query", "key", "value"), arrays, strict=False)), **optional}
        return direct(shard)(*arrays, **optional)

    with jax.set_mesh(mesh):
        function = jax.shard_map(
            local,
            in_specs=jax.tree.map(lambda x: x.sharding.spec, (arrays, optional)),
            out_specs=layout,
            axis_names=set(manual),
            check_vma=check_vma,
        )
        nested = str(jax.make_jaxpr(function)(arrays, optional)).count("shard_map[") - 1
        results = jax.jit(function)(arrays, optional)
    assert nested == (0 if len(manual) == 3 else 2)
    against_oracle(results, arguments, *arrays[3:])


def test_gradients_of_what_every_shard_reads_are_summed():
    """Keys and values whole on every device of a shard_map, queries split: dk and dv are sums over devices."""
    arguments = Case(B=1, T=8, S=4, N=2, K=2, H=4, H_v=4).arguments()
    (qkv, _), (dout, dlse) = operands(arguments), cotangents(arguments)
    local = {**arguments, "query": arguments["query"][:, :1]}
    rows = P(None, "fsdp")

    def loss(q, k, v, dout, dlse):
        out, lse = call(local)(q, k, v)
        return jax.lax.psum((out * dout).sum() + (lse * dlse).sum(), "fsdp")

    total = jax.shard_map(loss, mesh=make_mesh(), in_specs=(rows, P(), P(), rows, rows), out_specs=P())
    gradients = jit(jax.grad(total, argnums=(0, 1, 2)))(*qkv, dout, dlse)
    want, plain = (oracle(**arguments, dout=dout, dlse=dlse, precision=dtype) for dtype in (None, jnp.float32))
    for gradient, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
        assert_close(gradient, getattr(want, name), getattr(plain, name), name)


def test_vmap_and_higher_derivatives_keep_the_split():
    arguments = Case(B=4, T=4, S=4, N=4, K=2, H=4, H_v=4).arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, _ = placed(mesh, arguments)
    layout = NamedSharding(mesh, LAYOUT)
    with jax.set_mesh(mesh):
        # Batch and heads of the unmapped arrays are split; the mapped axis is whole.
        q = jax.device_put(jnp.stack([arrays[0], arrays[0] / 2], axis=3), layout)
        mapped = jax.jit(jax.vmap(direct(arguments), (3, None, None, None, None)))
        compiled = mapped.lower(q, *arrays[1:]).compile()
        assert collectives(compiled) == []
        results = compiled(q, *arrays[1:])
        second = jax.jit(lambda x, t: jax.jvp(lambda *x: direct(arguments)(*x, *arrays[3:]), x, t)[1])
        tangents = second(arrays[:3], arrays[:3])
    for i in range(2):
        scaled = {**arguments, "query": arguments["query"] / (1 + i)}
        against_oracle([x[i] for x in results], scaled, *arrays[3:])
    unsharded = [jnp.asarray(np.asarray(x)) for x in arrays]
    truth = jit(lambda x, t: jax.jvp(lambda *x: direct(arguments)(*x, *unsharded[3:]), x, t)[1])
    for ours, want in zip(tangents, truth(tuple(unsharded[:3]), tuple(unsharded[:3])), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def test_explicit_axes_are_refused():
    arguments = Case(B=2, T=4, S=4, N=2, K=2, H=4, H_v=4).arguments()
    mesh = jax.make_mesh((2, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Explicit axes.*make_mesh"):
        jax.eval_shape(call(arguments), *operands(arguments)[0])


def test_a_gpu_program_is_lowered_on_a_cpu():
    arguments = Case(B=2, T=4, S=4, N=2, K=2, H=4, H_v=4).arguments()
    arrays = (*operands(arguments)[0], *cotangents(arguments))
    exported = jax.export.export(jax.jit(direct(arguments)), platforms=("cuda",))(*arrays)
    assert exported.platforms == ("cuda",)
