"""Attention in e4m3: rounding, scales, rotation; the public call against the float64 oracle on what it multiplies."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import accuracy_attention_fp8
from pallas_kernels.attention import api, fp8
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.spec import DESCALED_ROWS, make_spec
from pallas_kernels.device import H200, current_device
from pallas_kernels.dispatch import Unsupported
from sharding.mesh import make_mesh
from tests.oracle import attention
from tests.tolerance import assert_close

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def facts_of(arguments: dict[str, Any]) -> dict[str, Any]:
    ids = arguments.get("segment_ids") or (None, None)
    lengths = {
        name: arguments.get(long)
        for name, long in (("query_lengths", "query_seq_lengths"), ("kv_lengths", "key_value_seq_lengths"))
    }
    return lengths | {"query_segments": ids[0], "kv_segments": ids[1]}


def test_cast_is_that_of_the_format():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(20_000) * 10 ** rng.uniform(-6, 2.6, 20_000)
    x = np.concatenate([x, np.arange(-448, 448, 0.125), [0.0, -0.0, 1e30, -1e30, 449.0]]).astype(np.float32)
    want = np.clip(x, -448, 448).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(jax.jit(fp8.cast)(x)).view(np.uint8), want.view(np.uint8))
    # Rounded even where XLA leaves out a cast to a narrow type and back.
    back = jax.jit(lambda x: fp8.cast(x).astype(jnp.float32))(x)
    np.testing.assert_array_equal(back, want.astype(np.float32))
    assert np.isnan(np.asarray(fp8.cast(jnp.array([np.nan, np.inf, -np.inf])), np.float32)).all()


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_the_rotation_is_orthogonal(dim):
    matrix = fp8.rotation(dim, fp8.STANDARD).astype(np.float64)
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(dim) * round(fp8.norm(dim) ** -2))
    np.testing.assert_array_equal(matrix, fp8.rotation(dim, fp8.STANDARD))  # the same in every process
    assert (matrix != fp8.rotation(dim, fp8.Recipe(seed=1))).any()


def test_scales_are_the_least_powers_of_two_that_fit():
    x = (
        np.random.default_rng(0).standard_normal((3, 128, 8)).astype(np.float32)
        * np.array([1e-3, 1, 1e4])[:, None, None]
    )
    x[1, 5, 3] = np.inf
    x[2, 64:] = 0.0
    scale = np.asarray(fp8.scales(jnp.asarray(x, jnp.float32), 64, fp8.STANDARD))
    size = np.where(np.isfinite(x).all(-1, keepdims=True), abs(x), 0).reshape(3, 2, -1).max(-1)
    some = size > 0
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (size <= 448 * scale).all() and (size[some] > 224 * scale[some]).all()


@pytest.fixture(scope="module")
def operands() -> tuple[Any, ...]:
    case = Case(B=2, T=70, S=300, H=40, H_v=72, dtype="bfloat16", kv_lengths=(300, 150), query_lengths=(70, 30))
    arguments = case.arguments()
    spec = case.spec()
    return spec, [arguments[name] for name in ("query", "key", "value")], facts_of(arguments)


def test_operands_give_back_what_went_in(operands):
    spec, arrays, facts = operands
    q, k, v = jax.jit(functools.partial(fp8.rounded, spec))(*arrays, **facts)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (64, 64, 72)
    back = [np.asarray(x, np.float64) for x in (q, k)]
    matrix = fp8.rotation(64, fp8.STANDARD).astype(np.float64) * fp8.norm(64)
    for x, length, got in zip(
        arrays, (30, 150, 150), [*(b @ matrix for b in back), np.asarray(v, np.float64)], strict=True
    ):
        want = np.pad(np.asarray(x, np.float64), [(0, 0)] * 3 + [(0, got.shape[-1] - x.shape[-1])])
        want[1, length:] = 0.0  # what lengths exclude
        # 3 bits of mantissa: half of 2^-3 of the largest entry of a row bounds each, rotated or not.
        rows = np.sqrt((want**2).sum(-1))
        error = np.sqrt(((got - want) ** 2).sum(-1))
        assert (error <= rows / 16 + 2.0**-9 * rows).all()
    for x in (q, k, v):  # so that 16-bit kernels multiply the same
        np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32))


def test_blocks_of_other_magnitudes_keep_their_bits():
    spec = Case(B=1, T=64, S=448, N=1, K=1, H=128, H_v=128).spec()
    block = fp8.kv_block(spec)
    x = np.random.default_rng(0).standard_normal((1, 448, 1, 128)).astype(np.float32)
    x[:, block:] *= 2.0**-26
    errors = {}
    for whole in (False, True):
        quantised = fp8.quantise(
            spec,
            jnp.asarray(x[:, :64]),
            jnp.asarray(x),
            jnp.asarray(x),
            recipe=fp8.Recipe(transform=False, whole=whole),
        )
        values = np.asarray(fp8.dequantised(quantised)[2])[0, 0, :448]
        errors[whole] = [abs(values[rows] / x[0, rows, 0] - 1).max() for rows in (slice(block), slice(block, 448))]
    # A 16th is half a unit of 3 bits; numbers below 2^-15 of the block's largest have fewer.
    assert errors[False][0] == errors[True][0] and errors[False][1] < 0.5 <= errors[True][1]


def test_what_lengths_exclude_changes_nothing_and_nan_reaches_its_readers(operands):
    spec, arrays, facts = operands
    hostile = [np.array(x.astype(jnp.float32)) for x in arrays]
    hostile[1][1, 150:], hostile[2][1, 150:], hostile[0][1, 30:] = 1e30, np.nan, np.inf
    hostile[2][0, 7, 0, 3], hostile[1][0, 9, 1, 2] = np.inf, np.nan
    quantise = jax.jit(functools.partial(fp8.quantise, spec))
    clean, dirty = (quantise(*(jnp.asarray(x, jnp.bfloat16) for x in xs), **facts) for xs in (arrays, hostile))
    for name in fp8.Operands._fields:
        one, other = (np.asarray(getattr(x, name).astype(jnp.float32)) for x in (clean, dirty))
        np.testing.assert_array_equal(one[1], other[1], err_msg=name)
    bad = np.isnan(np.asarray(dirty.key.astype(jnp.float32)))
    assert bad[0, 7, 0].all() and bad[0, 9, 1].all() and bad.sum() == 2 * bad.shape[-1]
    assert np.isfinite(np.asarray(dirty.value.astype(jnp.float32))).all()


CALLS = {
    "causal": Case(
        B=2, T=70, S=150, H=64, H_v=64, is_causal=True, causal_alignment="bottom_right", dtype="bfloat16"
    ),
    "one_key": Case(T=19, S=1),
    "documents": CASES["segments_cross"],
    "lengths": CASES["lengths_causal_bottom_right"],
    "window": dataclasses.replace(CASES["window"], H=72, H_v=8),
}  # fmt: skip


@pytest.mark.parametrize("name", ["causal", *(pytest.param(x, marks=pytest.mark.slow) for x in list(CALLS)[1:])])
def test_values_and_gradients_of_what_is_multiplied(name):
    against_oracle(CALLS[name], "xla_fp8")


@pytest.mark.parametrize("name", CASES)
def test_the_contract_on_hopper(name):
    case = dataclasses.replace(CASES[name], dtype="bfloat16")
    spec = dataclasses.replace(case.spec(), precision="fp8")
    if reason := api.HOPPER_FP8.why_not(spec, current_device()):
        pytest.skip(reason)
    against_oracle(case, "hopper_fp8")


def lost_by_tensor_cores(query: Any, key: Any) -> np.ndarray:
    """(B, N, T, S): what Hopper's 8-bit products miss of q . k.

    They align 32 products and the sum so far to the largest of them, and drop what lies below 2^-13 of it.
    """
    q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    total = np.zeros((*q.shape[:3], k.shape[2]))
    for first in range(0, q.shape[3], 32):
        terms = [q[..., :, None, first : first + 32] * k[..., None, :, first : first + 32], total[..., None]]
        terms = np.concatenate(terms, axis=-1)
        size = abs(terms).max(-1, keepdims=True)
        quantum = 2.0 ** (np.floor(np.log2(np.where(size > 0, size, 1.0))) - 13)
        total = (np.trunc(terms / quantum) * quantum).sum(-1)
    return total - q @ k.swapaxes(2, 3)


def against_oracle(case: Case, implementation: str) -> None:
    """On the rounded operands; the same-precision reference rounds weights to e4m3, and sums as the hardware does."""
    arguments = {key: x for key, x in case.arguments().items() if x is not None}
    spec, facts = case.spec(), facts_of(arguments)
    arrays = [arguments.pop(key) for key in ("query", "key", "value")]
    rng = np.random.default_rng(1)
    dout = jnp.asarray(rng.standard_normal((*arrays[0].shape[:3], case.H_v)), case.dtype)
    dlse = jnp.asarray(rng.standard_normal(arrays[0].shape[:3]), jnp.float32)

    def call(q, k, v):
        return api.dot_product_attention(
            q, k, v, **arguments, precision="fp8", implementation=implementation, return_lse=True
        )

    (out, lse), pull = jax.vjp(call, *arrays)
    gradients = pull((dout, dlse))
    hats = fp8.rounded(spec, *arrays, **facts)
    arguments.setdefault("scale", spec.default_scale)
    lost = lost_by_tensor_cores(*hats[:2]) * arguments["scale"] if implementation == "hopper_fp8" else None
    cotangents: dict[str, Any] = {"dout": dout, "dlse": dlse}
    oracle = attention(*hats, **arguments, **cotangents)
    plain = attention(*hats, **arguments, **cotangents, bias=lost, precision=E4M3)
    assert_close(out, oracle.out, plain.out, "out")
    assert_close(lse, oracle.lse, plain.lse, "lse")
    matrix = fp8.rotation(fp8.head_dims(spec)[0], fp8.STANDARD).astype(np.float64) * fp8.norm(fp8.head_dims(spec)[0])
    for got, short in zip(gradients, ("dq", "dk", "dv"), strict=True):
        want, rough = (getattr(x, short).astype(np.float64) for x in (oracle, plain))
        if short != "dv":
            want, rough = ((x @ matrix)[..., : case.H] for x in (want, rough))
        assert got.dtype == arrays[0].dtype
        assert_close(got, want, rough, short)


def test_it_is_never_chosen_silently():
    spec = Case(dtype="bfloat16").spec()
    for device in (H200, current_device()):
        assert "fp8" not in str(api.explain(spec, device=device).chosen)
        asked = api.explain(dataclasses.replace(spec, precision="fp8"), device=device)
        assert asked.chosen == ("hopper_fp8" if device == H200 else "xla_fp8")
        assert "precision=fp8" in str(asked)
    assert "sums in float32" in str(asked := api.explain(dataclasses.replace(spec, precision="fp8"), device=H200)), (
        asked
    )


@pytest.mark.parametrize(
    "changes, reason",
    [({"bias": "bnts"}, "no bias"), ({"mask": "b11s"}, "no boolean mask")],
    ids=str,
)
def test_what_it_refuses(changes, reason):
    arguments = Case(dtype="bfloat16", **changes).arguments()
    with pytest.raises(Unsupported, match=reason):
        api.dot_product_attention(**arguments, precision="fp8")
    with pytest.raises(Unsupported, match="precision='input'"):
        api.dot_product_attention(**arguments, precision="fp8", implementation="xla")


def codes(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that gives e4m3 numbers and descales, one a head; `changes` among them."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 70, 4, 40), "key": (2, 150, 2, 40), "value": (2, 150, 2, 72)}
    arrays = {name: jnp.asarray(50 * rng.standard_normal(shape), E4M3) for name, shape in shapes.items()}
    scales = (0.01, descale(rng, 2, 2), jnp.float32(0.02))
    return arrays | {"precision": "fp8", "descales": scales, "is_causal": True} | changes


def descale(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.uniform(0.01, 0.03, shape), jnp.float32)


@pytest.mark.parametrize("by_block", [False, True])
def test_codes_with_descales(by_block):
    """Against the oracle on what they stand for; one block of values has the descale 0."""
    rng = np.random.default_rng(1)
    arguments = codes()
    if by_block:
        key, value = descale(rng, 2, 2, 2), descale(rng, 2, 2, 2).at[0, 1, 0].set(0.0)
        arguments["descales"] = (descale(rng, 2, 4, 2), key, value)
    out, lse = api.dot_product_attention(**arguments, return_lse=True)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    wide = {}
    for name, scale, block in zip(("query", "key", "value"), arguments["descales"], DESCALED_ROWS, strict=True):
        x, scale = np.asarray(arguments[name].astype(jnp.float32)), np.asarray(scale)
        if scale.ndim == 3:
            scale = np.repeat(scale, block, axis=2)[:, :, : x.shape[1]].swapaxes(1, 2)
        wide[name] = x * (
            scale if scale.ndim == 0 else scale[..., None] if scale.ndim == 3 else scale[:, None, :, None]
        )
    oracle, plain = (attention(**wide, is_causal=True, scale=40**-0.5, precision=p) for p in (None, E4M3))
    assert_close(out, oracle.out, plain.out, "out")
    assert_close(lse, oracle.lse, plain.lse, "lse")


def test_codes_have_no_derivative():
    arguments = codes()
    value = arguments.pop("value")
    with pytest.raises(Unsupported, match="derivative .* Multiply them into bfloat16"):
        jax.grad(lambda x: api.dot_product_attention(value=x, **arguments).astype(jnp.float32).sum())(value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"descales": None}, "needs descales and precision='fp8'"),
        ({"precision": "input"}, "they go with precision='fp8'"),
        ({"zigzag": 5}, "sequences in their own order"),
        ({"descales": (1.0, 1.0)}, "must be three"),
        ({"descales": (1.0, np.ones((2, 3), np.float32), 1.0)}, r"descale of the key of shape=\(2, 3\)"),
        ({"descales": (1.0, 1.0, np.ones((2, 2, 3), np.float32))}, "one for every 128 rows"),
        ({"descales": (np.ones(()), 1.0, 1.0)}, "dtype='float64'"),
        ({"query": jax.ShapeDtypeStruct((2, 70, 4, 40), "bfloat16")}, "must be float8_e4m3fn"),
    ],
    ids=str,
)
def test_descales_that_mean_nothing(changes, words):
    with pytest.raises(ValueError, match=words):
        make_spec(**codes(**changes))


def test_an_unknown_precision_is_told():
    with pytest.raises(ValueError, match="unknown precision='int8'"):
        make_spec(**Case().arguments(), precision="int8")


def test_the_papers_experiment_in_small():
    rows = {row["method"]: row["rmse"] for row in accuracy_attention_fp8.table(512, 3, current_device())}
    assert rows["full"] < rows["no transform"] and rows["full"] < rows["baseline"] and rows["full"] <= rows["whole"]
    assert rows["full"] <= 9.5e-3  # the paper's 9.1e-3 is of one draw
    assert rows["float16"] < rows["bfloat16"] < rows["full"]


@pytest.mark.slow
def test_vmap_and_a_mesh_change_nothing():
    case = Case(B=4, T=130, S=130, N=4, K=2, H=64, H_v=64, is_causal=True, dtype="bfloat16")
    arguments = case.arguments()
    arrays = [arguments[name] for name in ("query", "key", "value")]

    def gradients(q, k, v):
        return jax.grad(
            lambda *x: api.dot_product_attention(*x, is_causal=True, precision="fp8").astype(jnp.float32).sum(),
            (0, 1, 2),
        )(q, k, v)

    want = jax.jit(gradients)(*arrays)
    mapped = jax.jit(jax.vmap(gradients))(*(x[:, None] for x in arrays))
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P(("data",), None, "tensor"))) for x in arrays]
        sharded = jax.jit(gradients)(*split)
    for one, by_vmap, by_mesh in zip(want, mapped, sharded, strict=True):
        np.testing.assert_array_equal(one, by_vmap[:, 0])
        assert_close(by_mesh, one, one)  # to an ulp: XLA adds in another order


@pytest.mark.slow
def test_codes_over_a_mesh_and_under_vmap():
    arguments = codes(descales=(jnp.full((2, 4, 2), 0.01), jnp.full((2, 2), 0.02), 0.03))
    names = ("query", "key", "value")
    arrays, rest = [arguments[name] for name in names], {n: x for n, x in arguments.items() if n not in names}

    def attend(*arrays, **rest):
        return api.dot_product_attention(**dict(zip(names, arrays, strict=True)), **rest)

    want = jax.jit(functools.partial(attend, **rest))(*arrays)
    whole = rest | {"descales": (0.01, jnp.full((1, 2), 0.02), 0.03)}
    mapped = jax.jit(jax.vmap(functools.partial(attend, **whole)))(*(x[:, None] for x in arrays))
    np.testing.assert_array_equal(want, mapped[:, 0])
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    for axes in (("data",), None, "tensor"), ():
        split = [jax.device_put(x, NamedSharding(mesh, P(*axes))) for x in arrays]
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(want, jax.jit(functools.partial(attend, **rest))(*split))
        np.testing.assert_array_equal(want, jax.jit(functools.partial(attend, **rest))(*split))


@pytest.mark.slow
def test_forward_mode_is_that_of_reverse_mode():
    case = Case(B=1, T=40, S=50, N=2, K=1, H=64, H_v=64)
    arguments = case.arguments()
    arrays = [arguments[name] for name in ("query", "key", "value")]

    def call(*arrays):
        return api.dot_product_attention(*arrays, precision="fp8").sum()

    tangents = [jnp.asarray(np.random.default_rng(n).standard_normal(x.shape), x.dtype) for n, x in enumerate(arrays)]
    _, forward = jax.jvp(call, arrays, tangents)
    reverse = sum(float((g * t).sum()) for g, t in zip(jax.grad(call, (0, 1, 2))(*arrays), tangents, strict=True))
    # They differ by the rounding of the weights, which only the output that reverse mode reads has.
    size = sum(float(jnp.abs(g * t).sum()) for g, t in zip(jax.grad(call, (0, 1, 2))(*arrays), tangents, strict=True))
    assert abs(float(forward) - reverse) <= size / 16
