"""Quantises a model: its blocks' weights, the other parameters as they are."""

import dataclasses
from typing import Any

import jax

from jaxflash.language_model import LanguageModel
from quant.recipe import Recipe
from quant.rtn import round_to_nearest
from quant.tensor import Int4Tensor


def quantize(model: LanguageModel, recipe: Recipe | None = None) -> LanguageModel:
    """The model with the weights of its blocks in 4 bits, each rounded to nearest: no data is needed.

    Norms, biases, the embedding table and the head stay as they are. `generate` takes the result as it took the model;
    its gradients by what is still dense, or by adapters, flow through the packed weights.

    recipe: None is `Recipe()`, symmetric groups of 128 rows.

    Raises:
      ValueError: the model is quantised already, or what `round_to_nearest` refuses, with the weight's name.
    """
    recipe = Recipe() if recipe is None else recipe

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Int4Tensor):
            raise ValueError(f"quantize: blocks/{name} is quantised already - take the dense model.")
        if path[-1].key != "weight":
            return leaf
        try:
            return round_to_nearest(leaf, recipe)
        except ValueError as error:
            raise ValueError(f"quantize: blocks/{name}: {error}") from error

    blocks = jax.tree_util.tree_map_with_path(
        one, model.params["blocks"], is_leaf=lambda leaf: isinstance(leaf, Int4Tensor)
    )
    return dataclasses.replace(model, params={**model.params, "blocks": blocks})
