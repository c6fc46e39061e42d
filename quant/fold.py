"""What a weight wants done to its inputs, done to the weights that make them: the model computes what it did.

Inputs in another order (`fold_permutation`), or each divided by a scale (`fold_scale`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from quant.tensor import Int4Tensor


def permute_columns(weight: Any, order: Any) -> Any:
    """Columns of a weight (K, N), packed or plain, or entries of a bias (N,), in this order: new n is old order[n]."""
    if not isinstance(weight, Int4Tensor):
        return jnp.take(jnp.asarray(weight), order, axis=-1)
    codes, scales, zeros = (None if a is None else a[:, order] for a in weight.codes())
    plain = Int4Tensor.from_codes(codes, scales, zeros, group=weight.group)
    return dataclasses.replace(plain, permutation=weight.permutation, group=weight.group)


def fold_permutation(weight: Int4Tensor, producers: Any) -> tuple[Int4Tensor, Any]:
    """(`weight` in plain order, `producers` in its order): y stays what it was, and no input is permuted any more.

    producers: a pytree of all weights (K_in, K) and biases (K,) whose columns are the features that `weight` reads, one
    to one: gate and up before down; not the value projection before an attention's output, which heads share.

    Raises ValueError for stacked weights, and where a producer has another number of columns than `weight` has rows.
    """
    if weight.permutation is None:
        return weight, producers
    K, order = weight.shape[0], weight.permutation
    if order.ndim != 1:
        raise ValueError(
            f"fold_permutation: a permutation of shape {tuple(order.shape)} - must be that of one weight, {(K,)}. Use "
            "jax.vmap for stacked ones."
        )

    def fold(producer: Any) -> Any:
        if producer.shape[-1] != K:
            raise ValueError(
                f"fold_permutation: a producer of shape {tuple(producer.shape)} before a weight of shape "
                f"{weight.shape} - its columns must be the {K} rows. Keep the permutation on the weight."
            )
        return permute_columns(producer, order)

    folded = jax.tree.map(fold, producers, is_leaf=lambda a: isinstance(a, Int4Tensor))
    return dataclasses.replace(weight, permutation=None), folded


def fold_scale(
    scale: Float[Array, " k"], producers: PyTree, consumers: PyTree, source: Int[Array | np.ndarray, " k"] | None = None
) -> tuple[PyTree, PyTree]:
    """(producers / s, s consumers): before any rounding the model computes what it did.

        consumer: W[k, n] s[k]        producer: its feature source[k] divided by s[k]

    Args:
      scale: (K,), positive: `quant.awq.awq_scales` of the consumers.
      producers: a pytree of everything that makes the inputs linearly: weights (K_in, M), biases (M,), scales of norms
        (M,). Of a gated MLP that is `up`, before `down`, and not `gate`.
      consumers: a pytree of all weights (K, N) that read those inputs; a bias is added after them, and stays.
      source: (K,), which of the M features each input is, where several inputs are one feature, whose scales then must
        be equal: `head_sources` of the value projection before an attention's output. None: M = K, one to one.

    Both come back in their own dtypes.

    Raises ValueError for dense arrays of other sizes, and for packed ones, which cannot be scaled any more.
    """
    K = len(scale)
    for kind, tree in (("producer", producers), ("consumer", consumers)):
        for leaf in jax.tree.leaves(tree, is_leaf=lambda a: isinstance(a, Int4Tensor)):
            if isinstance(leaf, Int4Tensor):
                raise ValueError(f"fold_scale: a {kind} is packed already - its codes are chosen. Fold before it is.")
            features = leaf.shape[-1] if kind == "producer" else leaf.shape[0]
            if (source is None or kind == "consumer") and features != K:
                raise ValueError(
                    f"fold_scale: a {kind} of shape {tuple(leaf.shape)} for a scale of {K} inputs - must have one "
                    f"{'column' if kind == 'producer' else 'row'} for each. Give source where they share features."
                )

    def produce(a: Array) -> Array:
        features = a.shape[-1]
        by_feature = scale if source is None else jnp.ones(features, scale.dtype).at[source].set(scale)
        return (a / jnp.broadcast_to(by_feature, a.shape)).astype(a.dtype)

    def consume(a: Array) -> Array:
        return (a * scale[:, None]).astype(a.dtype)

    return jax.tree.map(produce, producers), jax.tree.map(consume, consumers)


def head_sources(n_heads: int, n_kv_heads: int, head_dim: int) -> Int[np.ndarray, " k"]:
    """For each input (head, h) of an attention's output projection the feature of the value projection that it is."""
    if n_heads % n_kv_heads:
        raise ValueError(
            f"head_sources: {n_heads=} of {n_kv_heads=} - every key/value head must serve as many query heads."
        )
    kv_head = np.arange(n_heads) // (n_heads // n_kv_heads)
    return (kv_head[:, None] * head_dim + np.arange(head_dim)[None, :]).reshape(-1)
