"""A Hub folder as a ModelConfig, checked tensors, and parameters."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxflash.config import DType, ModelConfig
from jaxflash.hf import names, place
from jaxflash.hf.config import to_model_config
from jaxflash.hf.documents import MAX_CONFIG_BYTES, read_object
from jaxflash.hf.place import OnTensor
from jaxflash.hf.safetensors import open_folder
from jaxflash.hf.tensors import StoredTensor


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A foreign checkpoint whose headers have been read and checked, and of whose weights none has.

    config: with the parameter dtype that holds every stored value as it is. stored: its tensors by their Hub names.
    second_head: of a tied model whose file holds the head all the same; `load_params` compares it with the table.
    """

    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    second_head: StoredTensor | None = None


def is_hub_folder(path: Path) -> bool:
    """Whether `path` holds a config.json that describes a Hub model, not a run."""
    if not (path / "config.json").is_file():
        return False
    values = read_object(path / "config.json", limit=MAX_CONFIG_BYTES)
    return "model_type" in values or "architectures" in values


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a Hub folder, without its weights.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a broken file, or files that contradict each other (`names.match`, `safetensors.open_folder`).
      Unsupported: an architecture, or a switch of one, that the model does not have.
    """
    config = to_model_config(read_object(folder / "config.json", limit=MAX_CONFIG_BYTES))
    return checked(config, open_folder(folder))


def checked(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> Checkpoint:
    """`stored` as the checkpoint of `config`, or ValueError where names, shapes or dtypes are not its own."""
    pairs = names.match(config, stored)
    own = {name: tensor for name, (_, tensor) in pairs.items()}
    return Checkpoint(
        config=dataclasses.replace(config, param_dtype=place.exact_dtype(own)),
        stored=own,
        second_head=stored.get(names.HEAD) if config.tie_embeddings else None,
    )


def load_params(
    checkpoint: Checkpoint, mesh: Mesh, *, param_dtype: DType | None = None, on_tensor: OnTensor | None = None
) -> tuple[ModelConfig, dict]:
    """(config, parameters on `mesh`), the latter in `param_dtype` (None: as the checkpoint's config says).

    Raises:
      ValueError: a mesh that the model does not divide over, before anything is read; or a tied model's second head
        that is not its table.
    """
    config = checkpoint.config
    config = config if param_dtype is None else dataclasses.replace(config, param_dtype=param_dtype)
    place.layout(config, mesh)
    if checkpoint.second_head is not None:
        _check_second_head(checkpoint.stored[names.TABLE], checkpoint.second_head)
    return config, place.put_on_mesh(names.match(config, checkpoint.stored), config, mesh, on_tensor)


def _check_second_head(table: StoredTensor, head: StoredTensor) -> None:
    """A tied model's file may hold its head again, if it is the table. Each process reads its part; all know of all."""
    same = names.same_values(table, head, part=jax.process_index(), parts=jax.process_count())
    if jax.process_count() > 1:
        same = bool(multihost_utils.process_allgather(np.asarray(same)).all())
    if not same:
        raise ValueError(
            f"load: config.json has tie_word_embeddings=true, but {names.HEAD!r} is not the embedding table - which "
            "one is the head is not defined. Set tie_word_embeddings to false to use it."
        )
