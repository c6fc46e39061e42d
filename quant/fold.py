"""What a weight wants done to its inputs, done to the weights that make them: the model computes what it did."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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
