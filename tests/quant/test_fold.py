"""Activation order folded into the weights before: the model computes what it did, without a permutation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant.fold import fold_permutation, permute_columns
from quant.matmul import matmul
from quant.tensor import Int4Tensor

RNG = np.random.default_rng(0)


def tensor(K, N, group, g_idx=None, zeros=True):
    groups = -(-K // (group or K))
    codes = RNG.integers(0, 16, (K, N), dtype=np.uint8)
    scales = RNG.uniform(0.01, 0.02, (groups, N)).astype(jnp.bfloat16)
    points = RNG.integers(0, 16, (groups, N), dtype=np.uint8) if zeros else None
    return Int4Tensor.from_codes(codes, scales, points, group=group, g_idx=g_idx)


@jax.jit
def mlp(x, gate, up, down, bias):
    return matmul(jax.nn.silu(matmul(x, gate, bias)) * matmul(x, up), down)


DOWN = tensor(100, 40, 32, g_idx=RNG.permutation(np.arange(100) // 32))
PRODUCERS = {
    "packed": {
        "gate": tensor(70, 100, 32, g_idx=RNG.permutation(np.arange(70) // 32)),
        "up": tensor(70, 100, None, zeros=False),
    },
    "dense": {
        "gate": jnp.asarray(RNG.standard_normal((70, 100)), jnp.float32),
        "up": jnp.asarray(RNG.standard_normal((70, 100)), jnp.float32),
    },
}


@pytest.mark.parametrize("producers", PRODUCERS)
def test_an_mlp_stays_what_it_was(producers):
    x = jnp.asarray(RNG.standard_normal((3, 70)), jnp.float32)
    bias = jnp.asarray(RNG.standard_normal(100), jnp.float32)
    before = {**PRODUCERS[producers], "bias": bias}
    down, after = fold_permutation(DOWN, before)
    assert down.permutation is None and DOWN.permutation is not None
    # Exactly: the same products in the same order of summation.
    np.testing.assert_array_equal(mlp(x, down=down, **after), mlp(x, down=DOWN, **before))


def test_stacked_layers_are_folded_by_vmap():
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), (DOWN, PRODUCERS["packed"]))
    down, after = jax.vmap(fold_permutation)(*stack)
    alone = fold_permutation(DOWN, PRODUCERS["packed"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a: a[1], (down, after)), alone)


def test_columns_in_another_order():
    w, order = tensor(100, 70, 32), RNG.permutation(70)
    np.testing.assert_array_equal(permute_columns(w, order).validate().dequantize(), w.dequantize()[:, order])


def test_without_a_permutation_nothing_changes():
    plain, producers = tensor(100, 40, 32), PRODUCERS["packed"]
    assert fold_permutation(plain, producers) == (plain, producers)


def test_producers_of_other_features_are_refused():
    with pytest.raises(ValueError, match=r"^fold_permutation: .* \(70, 90\) before a weight of shape \(100, 40\)"):
        fold_permutation(DOWN, {"gate": jnp.zeros((70, 90))})


def test_stacked_weights_are_refused():
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), (DOWN, PRODUCERS["packed"]))
    with pytest.raises(ValueError, match=r"^fold_permutation: .* shape \(2, 100\) - .* \(100,\)\. Use jax.vmap"):
        fold_permutation(*stack)
