"""Products of codes: every implementation against float64; what is refused, and in which words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, Device, current_device
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.fp8 import api, hopper, native, tile
from pallas_kernels.fp8.cases import CASES, Case
from pallas_kernels.fp8.derivative import SCALE
from pallas_kernels.fp8.spec import E4M3, E5M2, LARGEST, Fp8Spec, make_spec, scale_shape, w_block, x_block
from tests.pallas_kernels.fp8 import oracle
from tests.tolerance import assert_close

CPU = Device(platform="cpu", kind="cpu")


def exact_and_plain(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(float64 product, the same in float32 rounded to the result's dtype)."""
    x, x_scales, w, w_scales = case.operands()
    x_values = oracle.values(x, x_scales, x_block(case.scaling, (case.M, case.K)))
    w_values = oracle.values(w, w_scales, w_block(case.scaling, (case.N, case.K)))
    plain = x_values.astype(np.float32) @ w_values.astype(np.float32).T
    return x_values @ w_values.T, plain.astype(jnp.dtype(case.dtype))


@pytest.mark.parametrize("implementation", [i.name for i in api.IMPLEMENTATIONS])
@pytest.mark.parametrize("name", CASES)
def test_contract(name, implementation):
    case = CASES[name]
    chosen = next(i for i in api.IMPLEMENTATIONS if i.name == implementation)
    if (reason := chosen.why_not(case.spec(), current_device())) is not None:
        pytest.skip(reason)
    y = api.product(case.spec(), *map(jnp.asarray, case.operands()), implementation=implementation)
    assert y.shape == (case.M, case.N) and y.dtype == case.dtype
    exact, plain = exact_and_plain(case)
    assert_close(y, exact, plain, name)
    if case.empty_blocks:
        assert (np.asarray(y)[:, :128] == 0).all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_activations_are_rounded_and_multiplied(scaling):
    """`matmul` is `product` of what `tile.quantize` makes; its derivative is that of x W."""
    case = Case(M=9, K=200, N=130, scaling=scaling, dtype="float32")
    _, _, w, w_scales = map(jnp.asarray, case.operands())
    x = jax.random.normal(jax.random.key(0), (9, 200))
    y, pull = jax.vjp(lambda x: api.matmul(case.spec(), x, w, w_scales), x)
    codes = jax.jit(tile.quantize, static_argnums=(1, 2))(x, x_block(scaling, (9, 200)), E4M3)
    x8, x_scales = map(np.asarray, codes)
    x_values = oracle.values(x8, x_scales, x_block(scaling, (9, 200)))
    values = oracle.values(np.asarray(w), np.asarray(w_scales), w_block(scaling, (130, 200)))
    assert_close(y, x_values @ values.T, x_values.astype(np.float32) @ values.T.astype(np.float32), "y")
    dy = np.asarray(jax.random.normal(jax.random.key(1), y.shape))
    assert_close(pull(jnp.asarray(dy))[0], dy @ values, dy @ values.astype(np.float32), "dx")


def test_codes_and_scales_have_no_derivative():
    case = Case(dtype="float32")
    _, _, w, w_scales = map(jnp.asarray, case.operands())
    x = jnp.ones((case.M, case.K))
    with pytest.raises(ValueError, match="codes or scales.*dense weight"):
        jax.grad(lambda s: api.matmul(case.spec(), x, w, s).sum())(w_scales)


def test_no_rows():
    case = dataclasses.replace(CASES["block"], M=0)
    _, _, w, w_scales = map(jnp.asarray, CASES["block"].operands())
    assert api.matmul(case.spec(), jnp.zeros((0, case.K), "bfloat16"), w, w_scales).shape == (0, case.N)
    assert api.train_matmul(jnp.zeros((0, 4), "bfloat16"), jnp.ones((4, 6))).shape == (0, 6)


def test_training_products_are_of_operands_rounded_once():
    """y, dx and dw are float32 products of e4m3 and e5m2 codes, exactly those of the oracle's rounding."""
    x, w, dy = (
        np.asarray(jax.random.normal(jax.random.key(n), shape))
        for n, shape in enumerate([(20, 48), (48, 30), (20, 30)])
    )
    y, pull = jax.vjp(api.train_matmul, jnp.asarray(x), jnp.asarray(w))
    dx, dw = pull(jnp.asarray(dy))

    def rounded(values, dtype):
        codes, scale = tile.quantize(jnp.asarray(values), values.shape, dtype, power_of_two=True)
        assert np.log2(scale) % 1 == 0 and np.abs(np.asarray(codes).astype(np.float32)).max() > LARGEST[dtype] / 2
        return oracle.values(np.asarray(codes), np.asarray(scale), values.shape)

    x8, w8, dy8 = rounded(x, E4M3), rounded(w, E4M3), rounded(dy, E5M2)
    f32 = np.float32
    assert_close(y, x8 @ w8, x8.astype(f32) @ w8.astype(f32), "y")
    assert_close(dx, dy8 @ w8.T, dy8.astype(f32) @ w8.T.astype(f32), "dx")
    assert_close(dw, x8.T @ dy8, x8.T.astype(f32) @ dy8.astype(f32), "dw")


def test_which_products_accumulate_fast(monkeypatch):
    """XLA has cuBLASLt sum products of DEFAULT precision in the tensor core alone; the gradient of W wants float32."""
    monkeypatch.setattr(api, "current_device", lambda: H200)
    x, w = jax.ShapeDtypeStruct((64, 32), "bfloat16"), jax.ShapeDtypeStruct((32, 48), "float32")
    text = str(jax.make_jaxpr(lambda x, w: jax.vjp(api.train_matmul, x, w)[1](jnp.ones((64, 48), "bfloat16")))(x, w))
    products = [product.split("preferred_element_type")[0] for product in text.split("dot_general[")[1:]]
    assert ["HIGHEST" in product for product in products] == [False, False, True]


def test_a_policy_that_keeps_scales_changes_no_gradient():
    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(20, 48), (48, 30)]))

    @jax.jit
    def gradients(x, w):
        policies = None, jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.save_only_these_names(SCALE)
        products = [api.train_matmul if p is None else jax.checkpoint(api.train_matmul, policy=p) for p in policies]
        return [jax.grad(lambda x, w, f=f: (f(jnp.sin(x), w) ** 2).sum(), argnums=(0, 1))(x, w) for f in products]

    plain, *others = gradients(x, w)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_the_gradient_takes_the_weights_dtype():
    def gradients(x, w):
        return jax.grad(lambda x, w: api.train_matmul(x, w).astype("float32").sum(), argnums=(0, 1))(x, w)

    x, w = jax.ShapeDtypeStruct((4, 8), "bfloat16"), jax.ShapeDtypeStruct((8, 6), "float32")
    dx, dw = jax.eval_shape(gradients, x, w)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)


def test_choosing():
    block, row = (dataclasses.replace(CASES[name], dtype="bfloat16").spec() for name in ("block", "row"))
    assert api.explain(block, device=H200).chosen == "hopper"
    assert api.explain(row, device=H200).chosen == "xla_fp8"
    assert api.explain(block, device=CPU).chosen == "xla"
    assert "along K" in str(native.why_not(block, H200))
    assert "8-bit tensor cores" in str(native.why_not(row, CPU)) and "Hopper" in str(hopper.why_not(block, CPU))
    both = dataclasses.replace(row, x_dtype=E5M2, w_dtype=E5M2)
    assert "not for both" in str(native.why_not(both, H200))
    wide = dataclasses.replace(row, dtype="float32")
    assert "float32" in str(native.why_not(wide, H200)) and "float32" in str(hopper.why_not(wide, H200))
    with pytest.raises(Unsupported, match="'hopper': needs a Hopper GPU"):
        api.product(block, *map(jnp.asarray, CASES["block"].operands()), implementation="hopper")


@pytest.mark.parametrize(
    "change, name",
    [
        ({"M": -1}, "M=-1"),
        ({"K": 0}, "K=0"),
        ({"scaling": "group"}, "scaling='group'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"x_dtype": "int8"}, "x_dtype='int8'"),
        ({"w_dtype": "bfloat16"}, "w_dtype='bfloat16'"),
    ],
)
def test_specs_that_have_no_meaning(change, name):
    with pytest.raises(ValueError, match=f"fp8_matmul: .*{name}"):
        dataclasses.replace(CASES["block"].spec(), **change)


def test_operands_that_do_not_go_together():
    x, x_scales, w, w_scales = map(jnp.asarray, CASES["block"].operands())
    with pytest.raises(ValueError, match=r"x of shape \(37, 256\) and w of shape \(128, 128\)"):
        make_spec(x, x_scales, w[:, :128], w_scales, scaling="block", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"w_scales of shape \(1, 2\).*\(128, 1\).*Quantise"):
        make_spec(x, jnp.ones((37, 1)), w, w_scales, scaling="row", dtype="bfloat16")
    with pytest.raises(ValueError, match="x_scales.*bfloat16.*float32"):
        make_spec(x, x_scales.astype("bfloat16"), w, w_scales, scaling="block", dtype="bfloat16")
    with pytest.raises(ValueError, match="must agree"):
        api.product(CASES["row"].spec(), x, jnp.ones((37, 1)), w[:64], jnp.ones((64, 1)))


def test_counts():
    spec = Fp8Spec(M=64, K=256, N=384, scaling="block", dtype="bfloat16")
    assert spec.flops() == 2 * 64 * 256 * 384
    assert spec.weight_bytes() == 384 * 256 + 4 * 3 * 2
    assert spec.bytes() == spec.weight_bytes() + 64 * 256 + 4 * 64 * 2 + 2 * 64 * 384
    assert scale_shape((130, 300), (128, 128)) == (2, 3)
    assert "scales by block" in str(spec)
