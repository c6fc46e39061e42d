"""A weight with an adapter against float64: values, gradients, dropout, the merged weight, names of its dims."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from quant import split
from quant.fp8 import quantize_fp8
from quant.lora import LoraConfig, LoraTensor, init_factors, with_key
from quant.matmul import matmul
from quant.tensor import Int4Tensor
from sharding import rules
from sharding.mesh import make_mesh
from tests.quant import oracle
from tests.tolerance import assert_close

RNG = np.random.default_rng(0)
K, N, R, GROUP = 96, 70, 4, 32
CODES = RNG.integers(0, 16, (K, N), dtype=np.uint8)
SCALES = RNG.uniform(0.01, 0.02, (K // GROUP, N)).astype(jnp.bfloat16)
ZEROS = RNG.integers(0, 16, SCALES.shape, dtype=np.uint8)
W = oracle.weight(CODES, SCALES, ZEROS, GROUP)
PACKED = Int4Tensor.from_codes(CODES, SCALES, ZEROS, group=GROUP)
FP8 = quantize_fp8(jnp.asarray(W, jnp.float32))  # one block
W8 = np.asarray(FP8.codes, float).T * np.asarray(FP8.scales, float)
BASES = {"packed": (PACKED, W), "dense": (jnp.asarray(W, jnp.float32), W), "fp8": (FP8, W8)}
A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((K, R), (R, N)))
BIAS = RNG.standard_normal(N).astype(np.float32)
CONFIG = LoraConfig(rank=R, alpha=6.0)
SCALE = 1.5


@jax.jit
def outcome(x, weight, bias, dy):
    """y, and the gradients of <y, dy> by x, the weight's floating arrays, and the bias."""
    y, pull = jax.vjp(matmul, x, weight, bias)
    return y, pull(dy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", BASES)
def test_values_and_gradients(base, dtype):
    """x is whole eighths up to 14, which FP8's e4m3 holds too: over such a base, x is rounded to 8 bits."""
    base, W = BASES[base]
    x = (RNG.integers(-14, 15, (6, K)) / 8).astype(jnp.dtype(dtype))
    x[:, 0] = 14 / 8  # 448 steps of 2^-8, the scale
    dy = RNG.standard_normal((6, N)).astype(jnp.dtype(dtype))
    weight = LoraTensor(base=base, a=jnp.asarray(A), b=jnp.asarray(B), config=CONFIG)
    y, (dx, dweight, dbias) = outcome(x, weight, jnp.asarray(BIAS), dy)

    def formulas(t):
        """y, dx, dA, dB, every product rounded to `t`."""
        x_, dy_, w, a, b, bias = (np.asarray(v).astype(dtype).astype(t) for v in (x, dy, W, SCALE * A, B, BIAS))
        hidden, dhidden = (x_ @ a).astype(t), (dy_ @ b.T).astype(t)
        y = (x_ @ w).astype(t) + (hidden @ b).astype(t) + bias
        dx = (dy_ @ w.T).astype(t) + (dhidden @ a.T).astype(t)
        return y, dx, SCALE * (x_.T @ dhidden).astype(t).astype(float), (hidden.T @ dy_).astype(t)

    def exact():
        x_, dy_, a, b = (np.asarray(v).astype(float) for v in (x, dy, A, B))
        dhidden = dy_ @ b.T * SCALE
        return x_ @ W + x_ @ a * SCALE @ b + BIAS, dy_ @ W.T + dhidden @ a.T, x_.T @ dhidden, (x_ @ a * SCALE).T @ dy_

    truth, plain = exact(), formulas(jnp.dtype(dtype).type)
    for name, got, want, rounded in zip(
        ("y", "dx", "dA", "dB"), (y, dx, dweight.a, dweight.b), truth, plain, strict=True
    ):
        assert_close(got, want, rounded, name)
    assert y.dtype == dtype and dweight.a.dtype == dweight.b.dtype == jnp.float32
    assert_close(dbias, dy.astype(float).sum(0), dy.sum(0), "bias")
    for leaf in jax.tree.leaves(dweight.base):  # codes have none at all
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf, np.float32).any()


@pytest.mark.parametrize("base", BASES)
def test_a_fresh_adapter_changes_no_bit(base):
    base, _ = BASES[base]
    a, b = init_factors(jax.random.key(1), (K, N), R)
    x = RNG.standard_normal((5, K)).astype(np.float32)
    weight = LoraTensor(base=base, a=a, b=b, config=CONFIG)
    np.testing.assert_array_equal(jax.jit(matmul)(x, weight), jax.jit(matmul)(x, base))


def test_how_it_begins():
    """A is uniform within the bound of Kaiming with a = sqrt(5), stacks apart; B is zero."""
    a, b = init_factors(jax.random.key(0), (2, 400, 30), 50)
    bound = math.sqrt(6 / ((1 + 5) * 400))
    assert a.shape == (2, 400, 50) and b.shape == (2, 50, 30) and not b.any() and not jnp.array_equal(a[0], a[1])
    values = np.sort(np.asarray(a, float).ravel())
    ideal = bound * (2 * (np.arange(values.size) + 0.5) / values.size - 1)
    # Kolmogorov's distance to the uniform distribution: 1.63 / sqrt(n) is passed once in a hundred samples.
    assert np.abs(values - ideal).max() / (2 * bound) < 1.63 / math.sqrt(values.size)


def test_dropout_leaves_inputs_of_the_adapter_out():
    config = LoraConfig(rank=K, alpha=float(K), dropout=0.25)
    eye = jnp.eye(K)[None]
    stack = LoraTensor(base=jnp.zeros((2, K, K)), a=jnp.tile(eye, (2, 1, 1)), b=jnp.tile(eye, (2, 1, 1)), config=config)
    keyed = with_key(stack, jax.random.key(0))
    x = jnp.asarray(1 + RNG.random((500, K), np.float32))
    first, second = jax.jit(jax.vmap(matmul, (None, 0)))(x, keyed)
    for y in (first, second):
        kept = np.asarray(y) != 0
        np.testing.assert_array_equal(np.asarray(y)[kept], np.asarray(x / 0.75)[kept])
        assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / kept.size)
    assert not np.array_equal(first, second)  # every layer has a key of its own
    np.testing.assert_array_equal(jax.vmap(matmul, (None, 0))(x, stack)[0], x)
    assert with_key(dataclasses.replace(stack, config=LoraConfig(rank=K)), jax.random.key(0)).key is None


@pytest.mark.parametrize("base", BASES)
def test_the_merged_weight(base):
    base, W = BASES[base]
    weight = LoraTensor(base=base, a=jnp.asarray(A), b=jnp.asarray(B), config=CONFIG)
    truth = W + SCALE * A.astype(float) @ B.astype(float)
    for dtype in ("float32", "bfloat16"):
        assert_close(
            weight.dequantize(dtype), truth, (W.astype(np.float32) + np.float32(SCALE) * (A @ B)).astype(dtype)
        )


def test_scales_and_targets():
    assert (
        LoraConfig(rank=16, alpha=32.0).scale == 2 and LoraConfig(rank=16, alpha=32.0, rank_stabilized=True).scale == 8
    )
    lora = LoraConfig(targets="attention/(q|v)")
    assert [lora.matches(name) for name in ("attention/q", "attention/v", "attention/k", "xattention/q")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(rank=0), "rank=0 - must be at least 1"),
        (dict(alpha=0.0), "alpha=0.0 - must be positive"),
        (dict(alpha=math.inf), "alpha=inf - must be positive"),
        (dict(dropout=1.0), r"dropout=1.0 - must lie in \[0, 1\)"),
        (dict(targets="("), "is no regular expression: missing"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError, match=f"^LoraConfig: .*{message}"):
        LoraConfig(**wrong)


def test_over_a_mesh_it_is_cut_where_its_weight_is():
    K, N = 512, 256
    base = Int4Tensor.from_codes(
        RNG.integers(0, 16, (K, N), np.uint8), np.full((K // 64, N), 0.01, jnp.bfloat16), group=64
    )
    a, b = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((K, R), (R, N)))
    weight, names = LoraTensor(base=base, a=a, b=b, config=CONFIG), ("mlp", "embed")
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    split.check({"w": weight}, {"w": names}, mesh)
    axes = split.axes_of_arrays(weight, names)
    assert (axes.a, axes.b, axes.base.words) == (("mlp", None), (None, "embed"), ("embed", "mlp", None, None))
    spread = jax.device_put(weight, rules.shardings(axes, mesh))
    assert [m.addressable_shards[0].data.shape for m in (spread.a, spread.b)] == [(K // 4, R), (R, N // 2)]
    x = RNG.standard_normal((4, K)).astype(np.float32)
    with jax.set_mesh(mesh):
        together = jax.jit(matmul)(x, spread)
    w = np.asarray(base.dequantize(), float) + SCALE * np.asarray(a, float) @ np.asarray(b, float)
    assert_close(together, x.astype(float) @ w, matmul(jnp.asarray(x), weight))
    deep = AbstractMesh((1, 16), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="w: K=512 rows in tiles of 64 over 16 devices"):
        split.check({"w": weight}, {"w": names}, deep)
