"""The exact path: what it keeps for the backward pass, and derivatives of every kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import Precision

from pallas_kernels.w4a16 import api, layout, reference, tile
from pallas_kernels.w4a16.cases import CASES, COLUMN, Case
from pallas_kernels.w4a16.derivative import differentiable
from tests.equations import equations
from tests.quant import oracle
from tests.tolerance import assert_close

CASE = Case(M=3, K=200, N=70, group=32, zeros=True, dtype="float32")
SPEC = CASE.spec()


def run(x, words, scales, zeros=None):
    return api.matmul(SPEC, x, words, scales, zeros)


@pytest.mark.parametrize(
    "name, scale_dtype, dtype",
    [
        ("group_32_asymmetric", "bfloat16", "bfloat16"),
        ("group_128", "float16", "bfloat16"),
        ("column_asymmetric", "float16", "float16"),
        ("k_tail", "float16", "float32"),
        ("empty_groups", "bfloat16", "float16"),
    ],
)
def test_weight_is_the_formula_rounded_once(name, scale_dtype, dtype):
    case = dataclasses.replace(CASES[name], scale_dtype=scale_dtype)
    _, codes, scales, zeros = case.operands()
    points = None if zeros is None else jnp.asarray(zeros)
    w = tile.dequantize(jnp.asarray(codes), jnp.asarray(scales), points, group=case.group, dtype=dtype)
    truth = oracle.weight(codes, scales, zeros, case.group)
    np.testing.assert_array_equal(w, truth.astype(np.float32).astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(truth.astype(np.float32), truth)  # float32 holds every weight: nothing else rounds


def test_products_with_all_16_codes_in_all_positions_of_a_tile():
    """x is the identity: y is W."""
    first = np.random.default_rng(0).integers(0, 16, (64, 64), dtype=np.uint8)
    codes = np.concatenate([(first + shift) % 16 for shift in range(16)])
    x = np.eye(1024, dtype=np.float32)
    case = Case(M=1024, K=1024, N=64, group=128, dtype="float32")
    scales = case.operands()[2]
    packed = (layout.pack(jnp.asarray(codes)), layout.pack_columns(jnp.asarray(scales)))
    y = api.matmul(case.spec(), jnp.asarray(x), *packed)
    np.testing.assert_array_equal(y, oracle.weight(codes, scales, None, 128).astype(np.float32))


def test_the_backward_pass_keeps_the_packed_weight_only():
    x, *packed = CASE.packed()
    dense = SPEC.K * SPEC.N
    for function in (run, jax.jit(run), jax.checkpoint(run)):
        _, pull = jax.vjp(lambda x, function=function: function(x, *packed), x)
        kept = jax.tree.leaves(pull)
        assert kept and max(leaf.size for leaf in kept) < dense
        assert {leaf.dtype for leaf in kept if leaf.size > 64} <= {a.dtype for a in packed}


def test_the_backward_pass_multiplies_in_the_operands_dtype():
    case = dataclasses.replace(CASE, dtype="bfloat16")
    spec, (x, *packed) = case.spec(), case.packed()
    _, pull = jax.vjp(lambda x: api.matmul(spec, x, *packed), x)
    products = list(equations(jax.make_jaxpr(pull)(jnp.ones((3, 70), "bfloat16")).jaxpr, "dot_general"))
    assert products and all(v.aval.dtype == jnp.bfloat16 for eqn in products for v in eqn.invars)


@pytest.mark.parametrize(
    "dtype, scale_dtype", [("float16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_float32_operands_are_multiplied_as_such(dtype, scale_dtype):
    """Not in TF32, whose 11 bits are fewer than those of a code times a scale."""
    case = dataclasses.replace(CASE, dtype=dtype, scale_dtype=scale_dtype)
    spec, (x, *packed) = case.spec(), case.packed()
    full = (Precision.HIGHEST, Precision.HIGHEST)
    function = jax.make_jaxpr(jax.value_and_grad(lambda x: api.matmul(spec, x, *packed).sum()))
    products = list(equations(function(x).jaxpr, "dot_general"))
    assert len(products) >= 2
    for eqn in products:
        assert {v.aval.dtype for v in eqn.invars} == {jnp.dtype(spec.operand_dtype)}
        assert (eqn.params["precision"] == full) == (spec.operand_dtype == "float32")


def test_gradients_of_scales():
    """dscale[r, n] = sum over the group's rows of (code - zero) (x^T dy)[k, n]; words and zeros have none."""
    x, codes, scales, zeros = CASE.operands()
    dy = np.random.default_rng(3).standard_normal((CASE.M, CASE.N)).astype(np.float32)
    _, *packed = CASE.packed()

    def loss(x, scales):
        return (run(x, packed[0], scales, packed[2]) * dy).sum()

    dx, ds = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(x), packed[1])
    w = oracle.weight(codes, scales, zeros, CASE.group)
    assert_close(dx, oracle.product(dy, w.T), oracle.product(dy, w.T, np.float32))
    steps = oracle.weight(codes, np.ones_like(scales), zeros, CASE.group)
    full = steps * (x.astype(np.float64).T @ dy)
    truth = np.stack([full[r : r + 32].sum(0) for r in range(0, 200, 32)])
    plain = np.add.reduceat((steps * (x.T @ dy)).astype(np.float32), np.arange(0, 200, 32)).astype(scales.dtype)
    # One group of the packed scales is padding.
    assert_close(layout.unpack_columns(ds, CASE.N)[: len(truth)], truth, plain)
    assert not np.asarray(layout.unpack_columns(ds, CASE.N)[len(truth) :]).any()


def test_forward_mode_and_higher_orders_and_maps():
    x, codes, scales, zeros = CASE.operands()
    _, *packed = CASE.packed()
    w = oracle.weight(codes, scales, zeros, CASE.group)
    t = np.random.default_rng(5).standard_normal(x.shape).astype(x.dtype)
    xs = np.stack([x, t])

    def close(got, rows, *weights):
        truth = plain = rows
        for w in weights:
            truth, plain = oracle.product(truth, w), oracle.product(plain, w, np.float32)
        assert_close(got, truth, plain)

    def f(x):
        return run(x, *packed)

    # d/dx of |f(x)|^2 / 2 is x W W^T; its derivative along t is t W W^T.
    gradient = jax.grad(lambda x: (f(x) ** 2).sum() / 2)

    @jax.jit
    def everything(x, t, xs):
        return jax.jvp(f, (x,), (t,))[1], jax.vmap(f)(xs), jax.jvp(gradient, (x,), (t,))[1], jax.vmap(gradient)(xs)

    moved, mapped, second, gradients = everything(x, t, xs)
    close(moved, t, w)
    close(second, t, w, w.T)
    for i in range(2):
        close(mapped[i], xs[i], w)
        close(gradients[i], xs[i], w, w.T)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a[:, ::-1]]), packed)
    close(jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))(x, *stacked)[0], x, w)


def test_inside_a_scan_over_stacked_weights():
    cases = [CASE.packed(seed) for seed in (0, 1, 2)]
    x, stack = cases[0][0], jax.tree.map(lambda *a: jnp.stack(a), *(case[1:] for case in cases))

    def through(x):
        def step(total, packed):
            return total + run(x, *packed), None

        return jax.lax.scan(step, jnp.zeros((3, 70)), stack)[0]

    y, dx = jax.jit(lambda x: (through(x), jax.grad(lambda x: through(x).sum())(x)))(x)
    truth = [oracle.weight(*c.operands(s)[1:], 32) for s, c in enumerate([CASE] * 3)]
    assert_close(y, sum(oracle.product(x, w) for w in truth), sum(oracle.product(x, w, np.float32) for w in truth))
    ones = np.ones((3, 70), np.float32)
    plain = sum(oracle.product(ones, w.T, np.float32) for w in truth)
    assert_close(dx, sum(oracle.product(ones, w.T) for w in truth), plain)


def test_any_forward_takes_these_derivatives():
    """A forward that is no jax function of its operands, as a kernel is none."""
    case = Case(M=3, K=100, N=70, group=COLUMN, dtype="float32")
    spec, (x, *packed) = case.spec(), case.packed()

    def opaque(spec, x, words, scales, zeros):
        out = jax.ShapeDtypeStruct((spec.M, spec.N), x.dtype)
        return jax.pure_callback(lambda *a: np.full(out.shape, 7, out.dtype), out, x, words, scales)

    function = differentiable(opaque, exact=reference.matmul)
    y, dx = jax.value_and_grad(lambda x: function(spec, x, *packed).sum())(x)
    assert y == 7 * 3 * 70
    np.testing.assert_array_equal(dx, jax.grad(lambda x: api.matmul(spec, x, *packed).sum())(x))
