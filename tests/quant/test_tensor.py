"""Int4Tensor: construction, its invariant, and what transformations and checkpoints do to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from quant.tensor import Int4Tensor
from tests.quant import oracle


def parts(K, N, group, *, zeros=True, scale_dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    groups = -(-K // (K if group is None else group))
    codes = rng.integers(0, 16, (K, N), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (groups, N)).astype(jnp.dtype(scale_dtype))
    return codes, scales, rng.integers(0, 16, (groups, N), dtype=np.uint8) if zeros else None


def tensor(K=200, N=70, group: int | None = 64, **arguments):
    return Int4Tensor.from_codes(*parts(K, N, group, **arguments), group=group)


@pytest.mark.parametrize(
    "K, N, group, scale_dtype, zeros",
    [
        (256, 64, 64, "bfloat16", False),
        (100, 70, 32, "bfloat16", True),
        (200, 130, 128, "float16", True),
        (200, 130, 128, "bfloat16", False),
        (40, 1, 128, "float16", False),
        (129, 65, None, "bfloat16", True),
        (1, 1, None, "float16", True),
    ],
)
def test_a_weight_comes_back_whole(K, N, group, scale_dtype, zeros):
    codes, scales, points = parts(K, N, group, zeros=zeros, scale_dtype=scale_dtype)
    w = Int4Tensor.from_codes(codes, scales, points, group=group).validate()
    assert w.shape == (K, N) and w.scales.dtype == scale_dtype and (w.zeros is not None) == zeros
    for got, want in zip(w.codes(), (codes, scales, points), strict=True):
        np.testing.assert_array_equal(got, want)
    truth = oracle.weight(codes, scales, points, K if group is None else group)
    np.testing.assert_array_equal(w.dequantize(), truth)
    np.testing.assert_array_equal(w.dequantize("bfloat16"), truth.astype(np.float32).astype(jnp.bfloat16))


def test_padding_has_value_zero():
    for w in (tensor(100, 70, 32), tensor(100, 70, 64, zeros=False), tensor(70, 3, 128), tensor(65, 3, None)):
        K, N = (64 * w.words.shape[1], 64 * w.words.shape[0])
        whole = dataclasses.replace(w, shape=(K, N)).dequantize()
        assert not np.asarray(whole[w.shape[0] :]).any() and not np.asarray(whole[:, w.shape[1] :]).any()


@pytest.mark.parametrize("group", [32, 64])
def test_activation_order(group):
    K, N = 200, 70
    g_idx = np.random.default_rng(2).permutation(np.arange(K) // group)
    codes, scales, zeros = parts(K, N, group)
    w = Int4Tensor.from_codes(codes, scales, zeros, group=group, g_idx=g_idx).validate()
    truth = np.empty((K, N))
    for k in range(K):
        r = g_idx[k]
        assert zeros is not None
        truth[k] = (codes[k].astype(float) - zeros[r]) * scales[r].astype(float)
    np.testing.assert_array_equal(w.dequantize(), truth)
    np.testing.assert_array_equal(g_idx[w.permutation], np.arange(K) // group)


def test_a_g_idx_in_order_is_none():
    w = Int4Tensor.from_codes(*parts(200, 3, 64), group=64, g_idx=np.arange(200) // 64)
    assert w.permutation is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"codes": np.zeros((4, 3, 2), np.uint8)}, r"codes of shape \(4, 3, 2\)"),
        ({"codes": np.zeros((0, 3), np.uint8)}, r"codes of shape \(0, 3\)"),
        ({"codes": np.zeros((64, 3), np.float32)}, "dtype float32 - must be integers"),
        ({"codes": np.full((64, 3), 16, np.uint8)}, r"codes of dtype uint8 - must be integers 0\.\.15"),
        ({"codes": np.full((64, 3), -1, np.int8)}, r"codes of dtype int8 - must be integers 0\.\.15"),
        ({"scales": np.ones((3, 3), np.float16)}, r"scales of shape \(3, 3\) - codes of shape \(64, 3\) .* \(2, 3\)"),
        ({"scales": np.ones((2, 3), np.int32)}, "int32 scales"),
        ({"scales": np.ones((2, 3), np.float32)}, "must be one of bfloat16, float16. Give scale_dtype"),
        ({"scales": np.full((2, 3), np.nan, np.float16)}, "not all finite"),
        ({"scales": np.full((2, 3), np.inf, np.float16)}, "not all finite"),
        ({"zeros": np.zeros((2, 4), np.uint8)}, r"zeros of shape \(2, 4\)"),
        ({"zeros": np.full((2, 3), 16, np.uint8)}, r"zeros of dtype uint8 - must be integers 0\.\.15"),
        ({"group": 48}, "group=48"),
        ({"g_idx": np.zeros(64, np.int32)}, "0 of 64 rows have g_idx=1 - all groups but the last must have group=32"),
        ({"g_idx": np.arange(64) // 32 + 1}, "0 of 64 rows have g_idx=0"),
        ({"g_idx": np.zeros(63, np.int32)}, r"g_idx of shape \(63,\)"),
        ({"g_idx": np.zeros(64)}, "dtype float64"),
    ],
)
def test_what_is_no_weight_is_refused(changes, message):
    call = {"codes": np.zeros((64, 3), np.uint8), "scales": np.ones((2, 3), np.float16), "group": 32}
    Int4Tensor.from_codes(**call)
    with pytest.raises(ValueError, match=f"^Int4Tensor: .*{message}"):
        Int4Tensor.from_codes(**(call | changes))


@pytest.mark.parametrize("size, holds", [(1e-8, False), (1e-6, False), (1e-3, True), (6e4, True), (7e4, False)])
def test_float16_scales_hold_what_they_can(size, holds):
    scales = np.full((2, 3), size, np.float32)
    codes = np.full((64, 3), 9, np.uint8)
    w = Int4Tensor.from_codes(codes, scales, group=32, scale_dtype="bfloat16")
    np.testing.assert_array_equal(w.dequantize(), np.float32(jnp.bfloat16(size)))
    if holds:
        w = Int4Tensor.from_codes(codes, scales, group=32, scale_dtype="float16")
        np.testing.assert_array_equal(w.dequantize(), np.float32(np.float16(size)))
    else:
        with pytest.raises(ValueError, match="scales between .* in float16 .* Use bfloat16 scales"):
            Int4Tensor.from_codes(codes, scales, group=32, scale_dtype="float16")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"shape": (300, 70)},
            r"words of shape \(2, 4, 8, 64\) .* shape \(2, 5, 8, 64\) .* weight of shape \(300, 70\)",
        ),
        ({"group": 32}, r"scales of shape \(2, 4, 64\) and dtype bfloat16 - must have shape \(2, 8, 64\)"),
        ({"scales": jnp.full((2, 4, 64), jnp.inf, "bfloat16")}, "scales are not all finite"),
        ({"zeros": jnp.full((2, 4, 64), 16, "uint8")}, "zeros of dtype uint8"),
        ({"zeros": jnp.zeros((2, 3, 64), "uint8")}, r"zeros of shape \(2, 3, 64\)"),
        ({"permutation": jnp.zeros(200, "int32")}, "does not name each of the 200 rows once"),
        ({"permutation": jnp.arange(100)}, r"permutation of shape \(100,\) .* needs int32 \(200,\)"),
    ],
)
def test_validate(changes, message):
    with pytest.raises(ValueError, match=f"^Int4Tensor: .*{message}"):
        dataclasses.replace(tensor().validate(), **changes).validate()


def test_shapes_alone_can_be_validated():
    assert jax.eval_shape(lambda: tensor().validate()).validate().shape == (200, 70)
    assert jax.jit(lambda w: w.validate().dequantize())(tensor()).shape == (200, 70)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_it_is_a_pytree_of_its_arrays():
    w = tensor()
    assert len(jax.tree.leaves(w)) == 3 and len(jax.tree.leaves(tensor(zeros=False))) == 2
    names = jax.tree.map(lambda a: a.shape, w)
    assert names.words == (2, 4, 8, 64) and names.shape == (200, 70)
    equal(jax.tree.map(lambda a: a, w), w)
    assert jax.tree.structure(w) != jax.tree.structure(dataclasses.replace(w, group=32))


def test_stacked_layers_are_sliced_by_scan_and_vmap():
    layers = [tensor(seed=seed) for seed in range(3)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    assert stack.shape == (200, 70) and stack.words.shape == (3, 2, 4, 8, 64)
    _, each = jax.lax.scan(lambda carry, w: (carry, w.validate().dequantize()), None, stack)
    np.testing.assert_array_equal(each, jnp.stack([w.dequantize() for w in layers]))
    np.testing.assert_array_equal(jax.vmap(Int4Tensor.dequantize)(stack), each)


def test_a_parameter_holds_it():
    class Holder(nnx.Module):
        def __init__(self, weight):
            self.weight = nnx.Param(weight, axes=("embed", "mlp"))

    w = tensor()
    graph, state = nnx.split(Holder(jnp.zeros((200, 70))), nnx.Param)
    pure = nnx.to_pure_dict(state)
    held = nnx.merge(graph, {**pure, "weight": w}).weight.get_value()
    equal(held, w)


def test_orbax_saves_and_restores_it(tmp_path):
    params = {"blocks": {"gate": {"weight": tensor()}, "up": {"weight": tensor(zeros=False)}, "bias": jnp.ones(3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(lambda: params))
    equal(restored, params)
