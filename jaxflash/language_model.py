"""A model with its parameters and its tokenizer: what `load` gives and `generate` takes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxflash import checkpoint
from jaxflash.config import ModelConfig
from jaxflash.model import Transformer, abstract, axis_units
from jaxflash.tokenizer import Tokenizer, load_tokenizer
from sharding import rules
from sharding.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """config, params (nested dict, as `jaxflash.model.abstract` shapes it) and tokenizer."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer

    @property
    def module(self) -> Transformer:
        """The Flax NNX module over these parameters."""
        return nnx.merge(abstract(self.config)[0], self.params)


def load(path: str | Path, *, step: int | None = None, mesh: Mesh | None = None) -> LanguageModel:
    """Loads the model of a run folder that `train` wrote.

    step: which checkpoint (None: the newest). mesh: where the parameters go by rule (None: the first device).

    Raises:
      FileNotFoundError: no run folder, or no such checkpoint.
      ValueError: the checkpoint is of another model, or does not divide over the mesh.
    """
    run = Path(path)
    config = checkpoint.read_config(run)
    mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
    _, shapes, axes = abstract(config.model)
    rules.check(shapes, axes, mesh, units=axis_units(config.model))
    laid_out = jax.tree.map(
        lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, rules.shardings(axes, mesh)
    )
    params, _ = checkpoint.load_params(run, laid_out, step)
    return LanguageModel(config.model, params, load_tokenizer(run if config.tokenizer != "byte" else None))
