"""Attention over sequences that a mesh cuts: ring and gathered keys equal one device, gradients too."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.api import dot_product_attention, explain
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.spec import make_spec
from pallas_kernels.device import H200
from sharding.mesh import make_mesh
from sharding.ring import unzigzag, zigzag
from tests.oracle import attention as oracle
from tests.pallas_kernels.attention.check import jit
from tests.pallas_kernels.attention.stand_in import against_oracle, collectives, cotangents

ARRAYS = ("segment_ids", "query_seq_lengths", "key_value_seq_lengths", "bias", "mask")
CASES = {
    "none": Case(),
    "causal": Case(is_causal=True),
    "window": Case(window=(5, 2)),
    "window_causal": Case(window=(6, 6), is_causal=True),
    "segments": Case(is_causal=True, query_runs=((0, 5), (1, 8), (-1, 3))),
    "segments_out_of_order": Case(window=(9, 9), query_runs=((3, 3), (0, 4), (3, 6), (-1, 3))),
    "lengths": Case(is_causal=True, query_lengths=(16, 3), kv_lengths=(0, 9)),
    "cross": Case(S=32, is_causal=True, causal_alignment="bottom_right"),
    "everything": Case(
        S=32, is_causal=True, causal_alignment="bottom_right", kv_lengths=(20, 32), query_lengths=(7, 16),
        query_runs=((0, 9), (1, 7)), kv_runs=((0, 9), (1, 20), (-1, 3)), window=(12, 9),
    ),
}  # fmt: skip
CASES = {
    name: dataclasses.replace(case, B=2, T=16, S=max(case.S % 48, 16), N=4, K=2, H=4, H_v=3)
    for name, case in CASES.items()
}
MESHES = {2: {"context": 2, "fsdp": 2, "tensor": 2}, 4: {"context": 4, "tensor": 2}}


def stored(arguments: dict[str, Any], ways: int, change: Any) -> dict[str, Any]:
    """The arguments with what belongs to tokens put through `change` along each of its sequences."""
    axes = {"query": (1,), "key": (1,), "value": (1,), "segment_ids": (1,), "bias": (2, 3), "mask": (2, 3)}

    def one(x, axis):
        return x if x.shape[axis] == 1 else change(x, ways, axis)

    result = dict(arguments)
    for name in axes.keys() & arguments.keys():
        for axis in axes[name]:
            result[name] = jax.tree.map(functools.partial(one, axis=axis), result[name])
    return result


@functools.cache
def compiled(name: str, mesh_ways: int, order: int, how: str, implementation: str | None = None):
    """(q, k, v, dout, dlse, arrays) -> (out, lse, dq, dk, dv), all in zigzag order of `order` devices."""
    arguments = stored(CASES[name].arguments(), order, zigzag)
    static = {key: x for key, x in arguments.items() if key not in (*ARRAYS, "query", "key", "value")}
    static |= {"zigzag": order, "context_parallel": how, "implementation": implementation, "return_lse": True}

    def both(q, k, v, dout, dlse, arrays):
        results, pull = jax.vjp(lambda *qkv: dot_product_attention(*qkv, **arrays, **static), q, k, v)
        return *results, *pull((dout, dlse))

    operands = operands_of(arguments, order)
    with jax.set_mesh(make_mesh(MESHES[mesh_ways])) if mesh_ways > 1 else jax.default_matmul_precision(None):
        return jax.jit(both).lower(*operands).compile()


def operands_of(arguments: dict[str, Any], order: int) -> tuple[Any, ...]:
    """Of arguments in zigzag order, with the cotangents in it too."""
    natural = stored(arguments, order, unzigzag)
    dout, dlse = (zigzag(x, order) for x in cotangents(natural))
    qkv = (arguments[key] for key in ("query", "key", "value"))
    return *qkv, dout, dlse, {key: arguments[key] for key in ARRAYS if key in arguments}


def check(name: str, mesh_ways: int, order: int, how: str, implementation: str | None = None) -> Any:
    program = compiled(name, mesh_ways, order, how, implementation)
    arguments = CASES[name].arguments()
    results = program(*operands_of(stored(arguments, order, zigzag), order))
    in_order = [unzigzag(np.asarray(x), order) for x in results]
    against_oracle(in_order, arguments, *cotangents(arguments))
    return program


QUICK = [("causal", 4, 4, "ring"), ("segments", 2, 2, "ring"), ("window_causal", 4, 1, "all_gather")]
REST = [
    (name, ways, order, how)
    for name in CASES
    for ways, order, how in [(4, 4, "ring"), (4, 4, "all_gather")]
    if (name, ways, order, how) not in QUICK
] + [(name, 4, 1, "ring") for name in ("causal", "window", "everything")]


@pytest.mark.parametrize(
    ("name", "ways", "order", "how"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in REST)]
)
def test_shards_equal_the_whole(name, ways, order, how):
    program = check(name, ways, order, how)
    found = set(collectives(program))
    assert found == ({"collective-permute"} if how == "ring" else {"all-gather", "reduce-scatter"})


def test_keys_travel_while_queries_attend():
    """Keys and values are sent on as they came, whatever is computed meanwhile; dk and dv go round with them."""
    text = compiled("causal", 4, 4, "ring").as_text()
    sent = re.findall(r"(%[\w.-]+) = \S+ collective-permute\((%[\w.-]+)\)", str(text))
    names = {name for name, _ in sent}
    as_they_came = [source for _, source in sent if source in names or source.startswith("%param")]
    # Forward and backward share the three hops of k and v here; dk and dv need a fourth to be home.
    assert len(as_they_came) == 2 * 3 and len(sent) == 2 * 3 + 2 * 4


def test_the_same_bits_at_every_call():
    program = compiled("causal", 4, 4, "ring")
    operands = operands_of(stored(CASES["causal"].arguments(), 4, zigzag), 4)
    first, second = (jax.tree.map(np.asarray, program(*operands)) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "ways", "how"), [("causal", 4, "ring"), ("segments", 2, "ring")])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_hidden_contributes_nothing(name, ways, how, poison):
    """A bad key in one shard reaches the rows that see it, and what they give back, on every device; nothing else."""
    arguments = CASES[name].arguments()
    at = 14 if name == "causal" else 3  # a key that the last rows see; one of the first document
    clean = {key: np.array(arguments[key]) for key in ("query", "key", "value")}
    for key in ("key", "value"):
        arguments[key] = jnp.asarray(clean[key]).at[0, at].set(poison)
    program = compiled(name, ways, ways, how)
    results = program(*operands_of(stored(arguments, ways, zigzag), ways))
    out, lse, dq, dk, dv = (unzigzag(np.asarray(x), ways) for x in results)
    dout, dlse = cotangents(arguments)
    given: dict[str, Any] = arguments | clean
    want: Any = oracle(**given, dout=dout, dlse=dlse)
    rows = np.zeros((2, 16), bool)
    rows[0, at : 16 if name == "causal" else 5] = True
    met = np.zeros((2, 16), bool)  # by a row that met the bad key
    met[0, : 16 if name == "causal" else 5] = True
    own = (np.arange(2)[:, None] == 0) & (np.arange(16)[None] == at)  # whose gradients `xla_chunked` leaves 0
    for got, exact in ((out, want.out), (lse, want.lse), (dq, want.dq)):
        assert not np.isfinite(got[rows]).any()
        np.testing.assert_allclose(got[~rows], exact[~rows], rtol=1e-5, atol=1e-5)
    for got, exact in ((dk, want.dk), (dv, want.dv)):
        assert not np.isfinite(got[met & ~own]).any()
        np.testing.assert_allclose(got[~met], exact[~met], rtol=1e-5, atol=1e-5)


def test_zigzag_order_is_a_matter_of_order_alone():
    """Without a mesh, with everything that can be given, for an implementation that knows nothing of it."""
    case = dataclasses.replace(CASES["segments"], bias="1n1s", mask="b1ts", kv_lengths=(16, 11))
    arguments = case.arguments()
    call = jit(functools.partial(dot_product_attention, implementation="xla", is_causal=True, return_lse=True))
    arguments = {name: arguments[name] for name in ("query", "key", "value", *ARRAYS) if name in arguments}
    want = call(**arguments)
    call = jit(
        functools.partial(dot_product_attention, implementation="xla", is_causal=True, return_lse=True, zigzag=4)
    )
    have = call(**stored(arguments, 4, zigzag))
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(unzigzag(np.asarray(b), 4), np.asarray(a), rtol=1e-5, atol=1e-6)


def test_explain_says_over_how_many_devices():
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
    with jax.set_mesh(make_mesh(MESHES[4])):
        cut: Any = explain(q, q, q, is_causal=True, zigzag=4, device=H200)
        assert cut.chosen == "hopper" and cut.spec.context == 4
        assert "zigzag=4" in str(cut) and "context=4 (ring)" in str(cut)
        assert "merged" in dict(cut.verdicts)["cudnn"]
        # What does not divide, is in another order, or has a bias is whole on every device.
        odd = jax.ShapeDtypeStruct((2, 63, 4, 64), "bfloat16")
        bias = jax.ShapeDtypeStruct((1, 1, 64, 64), "bfloat16")
        whole = [explain(odd, odd, odd), explain(q, q, q, zigzag=2), explain(q, q, q, bias)]
    assert not any("context" in str(x.spec) for x in [*whole, explain(q, q, q, zigzag=4)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zigzag": 3}, "zigzag=3 with 16 queries and 16 keys - both must be multiples of twice"),
        ({"zigzag": 0}, "zigzag=0"),
        ({"context_parallel": "rings"}, "unknown context_parallel='rings' - must be one of .'ring', 'all_gather'."),
    ],
)
def test_refusals(arguments, message):
    q = jnp.zeros((1, 16, 1, 2))
    with pytest.raises(ValueError, match=message):
        make_spec(q, q, q, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 4])
def test_what_the_ring_does_not_serve_is_gathered(order):
    """A bias, another implementation, and an order of another number of devices than the mesh has."""
    arguments = dataclasses.replace(CASES["causal"], bias="bnts").arguments()
    for extra, name in (({"bias"}, None), (set(), "xla")):
        given = {key: x for key, x in arguments.items() if key in {"query", "key", "value"} | extra}
        call = functools.partial(dot_product_attention, is_causal=True, implementation=name)
        with jax.set_mesh(make_mesh(MESHES[4])):
            out = jit(functools.partial(call, zigzag=order))(**stored(given, order, zigzag))
        want = jit(call)(**given)
        np.testing.assert_allclose(unzigzag(np.asarray(out), order), np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_vmap_jvp_and_second_order_through_the_ring():
    arguments = CASES["causal"].arguments()
    qkv = tuple(arguments[key] for key in ("query", "key", "value"))

    def values(*qkv, zigzag=1):
        call = functools.partial(dot_product_attention, is_causal=True, return_lse=True, zigzag=zigzag)
        tangent = jax.jvp(call, qkv, qkv)[1]
        twice = jax.grad(lambda q: (jax.grad(lambda q: (call(q, *qkv[1:])[0] ** 2).sum())(q) ** 2).sum())(qkv[0])
        mapped = jax.vmap(lambda q: call(q, *qkv[1:])[0], 1, 1)(jnp.stack([qkv[0], qkv[0] / 2], 1))
        return *tangent, twice, mapped[:, 0], mapped[:, 1]

    want = jit(values)(*qkv)
    with jax.set_mesh(make_mesh(MESHES[2])):
        have = jit(functools.partial(values, zigzag=2))(*(zigzag(x, 2) for x in qkv))
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(unzigzag(np.asarray(b), 2), np.asarray(a), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_a_pullback_outside_the_mesh_is_of_the_whole():
    """The mesh of a call may be out of force when its gradient is taken."""
    arguments = CASES["causal"].arguments()
    qkv = tuple(zigzag(arguments[key], 2) for key in ("query", "key", "value"))
    call = functools.partial(dot_product_attention, is_causal=True, zigzag=2)
    with jax.set_mesh(make_mesh({"context": 2}, devices=jax.devices()[:2])):
        out, pull = jax.vjp(call, *qkv)
    gradients = pull(out)
    want_out, want_pull = jax.vjp(call, *qkv)
    for a, b in zip((want_out, *want_pull(want_out)), (out, *gradients), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5, atol=1e-5)
