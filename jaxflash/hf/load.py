"""A Hub folder as a ModelConfig, checked tensors, and parameters."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxflash.config import DType, ModelConfig
from jaxflash.hf import names, place
from jaxflash.hf.config import to_model_config
from jaxflash.hf.documents import MAX_CONFIG_BYTES, read_object
from jaxflash.hf.fp8 import dequantised
from jaxflash.hf.kept_fp8 import Stacks, take_fp8
from jaxflash.hf.kept_fp8 import abstract_stack as abstract_fp8
from jaxflash.hf.kept_fp8 import put_stack as put_fp8
from jaxflash.hf.linears import StoredLinear, survey, take_linears
from jaxflash.hf.place import OnTensor
from jaxflash.hf.place_packed import abstract_stack, put_stack
from jaxflash.hf.safetensors import open_folder
from jaxflash.hf.scheme import FP8, Scheme, read_scheme
from jaxflash.hf.tensors import StoredTensor


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A foreign checkpoint whose headers have been read and checked, and of whose weights none has.

    config: with the parameter dtype that holds every stored value as it is. stored: its tensors by their Hub names.
    second_head: of a tied model whose file holds the head all the same; `load_params` compares it with the table.
    scheme: of quantised weights. linears: those of 4 bits, by the names of their dense weights; FP8 ones are in
    `stored` as float32, or in `fp8`, by parameter, to be kept as they are. checks: what is looked at before
    anything is placed.
    """

    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    second_head: StoredTensor | None = None
    scheme: Scheme | None = None
    linears: Mapping[str, StoredLinear] = field(default_factory=dict)
    fp8: Stacks = field(default_factory=dict)
    checks: Sequence[Callable[[], None]] = ()


def is_hub_folder(path: Path) -> bool:
    """Whether `path` holds a config.json that describes a Hub model, not a run."""
    if not (path / "config.json").is_file():
        return False
    values = read_object(path / "config.json", limit=MAX_CONFIG_BYTES)
    return "model_type" in values or "architectures" in values


def open_checkpoint(folder: Path, *, keep_fp8: bool = False) -> Checkpoint:
    """The checkpoint in a Hub folder, without its weights. keep_fp8: see `jaxflash.load`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a broken file, or files that contradict each other (`names.match`, `safetensors.open_folder`).
      Unsupported: an architecture, or a switch of one, that the model does not have; a quantisation that is not served.
    """
    values = read_object(folder / "config.json", limit=MAX_CONFIG_BYTES)
    config, scheme, stored = to_model_config(values), read_scheme(folder, values), open_folder(folder)
    if scheme is None:
        return checked(config, stored)
    if scheme.format == FP8:
        kept, rest, finite = take_fp8(config, scheme, stored) if keep_fp8 else ({}, stored, [])
        dense, checks = dequantised(scheme, rest)
        found = checked(config, dense, _dense_names(kept))
        return dataclasses.replace(found, scheme=scheme, fp8=kept, checks=[*finite, *checks])
    linears, rest = take_linears(config, scheme, stored)
    rest, checks = _without_zero_biases(config, linears, rest)
    return dataclasses.replace(checked(config, rest, linears), scheme=scheme, linears=linears, checks=checks)


def _dense_names(kept: Stacks) -> list[str]:
    return [layer.weight.name for layers in kept.values() for layer in layers]


def _without_zero_biases(
    config: ModelConfig, linears: Mapping[str, StoredLinear], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[Callable[[], None]]]:
    """Quantisers have written biases for linears that have none: they are left out, once seen to be 0."""
    names_of = {f"{linear.name}.bias" for linear in linears.values()} - names.places(config).keys()
    checks = [functools.partial(_check_zero, stored[name]) for name in sorted(names_of & stored.keys())]
    return {name: tensor for name, tensor in stored.items() if name not in names_of}, checks


def _check_zero(bias: StoredTensor) -> None:
    if bias.read((slice(None),) * len(bias.shape)).astype(np.float32).any():
        raise ValueError(
            f"load: {bias.name!r} is not 0, and the configuration describes a model without it. Fetch both again."
        )


def checked(config: ModelConfig, stored: Mapping[str, StoredTensor], elsewhere: Collection[str] = ()) -> Checkpoint:
    """`stored` as the checkpoint of `config` but for `elsewhere`, or ValueError where they do not belong together."""
    pairs = names.match(config, stored, elsewhere)
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
      ValueError: a mesh that the model does not divide over, before any weight is read; a tied model's second head that
        is not its table; or quantised weights whose scales or groups are none (`linears.survey`).
    """
    config = checkpoint.config
    config = config if param_dtype is None else dataclasses.replace(config, param_dtype=param_dtype)
    for check in checkpoint.checks:
        check()
    linears, stacks = ({}, {}) if checkpoint.scheme is None else survey(checkpoint.linears, checkpoint.scheme)
    packed = {path: abstract_stack(facts, config.n_layers) for path, facts in stacks.items()}
    kept = {path: abstract_fp8(layers) for path, layers in checkpoint.fp8.items()}
    shapes, shardings = place.layout(config, mesh, packed | kept)
    if checkpoint.second_head is not None:
        _check_second_head(checkpoint.stored[names.TABLE], checkpoint.second_head)
    pairs = names.match(config, checkpoint.stored, [*linears, *_dense_names(checkpoint.fp8)])
    params = place.put_on_mesh(pairs, shapes, shardings, config.param_dtype, on_tensor)
    for path, facts in stacks.items():
        layers = [linear for linear in linears.values() if linear.place.path == path]
        _set(params, path, put_stack(layers, facts, place.at(shardings, path), on_tensor))
    for path, layers in checkpoint.fp8.items():
        _set(params, path, put_fp8(layers, place.at(shardings, path), on_tensor))
    return config, params


def _set(params: dict, path: tuple[str, ...], value: Any) -> None:
    functools.reduce(lambda node, key: node.setdefault(key, {}), path[:-1], params)[path[-1]] = value


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
