"""Adapters as peft keeps them: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight    (r, K)
    base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight    (N, r)

Format: huggingface/peft, docs/source/developer_guides/checkpoint.md.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Float

from jaxflash.adapters import adapted, adapter_layout
from jaxflash.config import ModelConfig
from jaxflash.hf import safetensors
from jaxflash.hf.documents import MAX_CONFIG_BYTES, get_flag, get_positive, get_size, read_object
from jaxflash.hf.folder import first_process, new_folder, write_json
from jaxflash.hf.names import Place, places, some
from jaxflash.hf.pieces import Piece, fetch_dense
from jaxflash.hf.place import OnTensor
from jaxflash.hf.tensors import StoredTensor
from pallas_kernels.dispatch import Unsupported
from quant.lora import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = ("float32", "float16", "bfloat16")
# Keys that change no number of an adapter whose tensors are all here, whatever they hold, and those served below.
_NEUTRAL = frozenset(
    "auto_mapping base_model_name_or_path ensure_weight_tying exclude_modules inference_mode layers_pattern lora_alpha "
    "lora_dropout loftq_config megatron_core peft_type peft_version qalora_group_size r revision runtime_config "
    "target_modules task_type use_rslora".split()
)
# Values of others that mean what is served, besides null, false and what is empty. An adapter that begins otherwise
# ("pissa", "olora", ...) changes the weights it is added to as well.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


def write_adapter(
    config: ModelConfig, params: dict, path: Path, *, base: str | None = None, on_tensor: OnTensor | None = None
) -> None:
    """Writes the adapters of `params`, float32, into a new folder, which appears whole or not at all. All call it.

    base: what peft is told that they belong to. on_tensor: told of each tensor.

    Raises:
      ValueError: no weight has an adapter.
      FileExistsError, OSError: as `jaxflash.hf.folder.new_folder`.
    """
    weights = dict(adapted(params))
    if not weights:
        raise ValueError("save_adapter: the model has no adapters. Use add_adapters, train with lora, or save.")
    lora = next(iter(weights.values())).config
    modules = _modules(config)
    chosen = [(module, name, layer) for module, (name, layer, _, _) in modules.items() if name in weights]
    values = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,  # peft's is an integer
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted({module.rpartition(".")[2] for module, _, _ in chosen}),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rank_stabilized,
    }
    pieces = [
        _piece(f"{_PREFIX}{module}.lora_{letter}.weight", array, layer)
        for module, name, layer in chosen
        for letter, array in (("A", weights[name].a), ("B", weights[name].b))
    ]
    with new_folder(path, sum(sum(piece.sizes().values()) for piece in pieces)) as folder:
        with first_process(f"write {CONFIG!r}"):
            if folder is not None:
                write_json(folder / CONFIG, values)
                header = ((name, *tensor) for piece in pieces for name, tensor in piece.tensors.items())
                (folder / WEIGHTS).write_bytes(safetensors.encode_header(header))
        for piece in pieces:
            fetched = piece.encode(piece.fetch())
            with first_process(f"write {WEIGHTS!r}"):
                if folder is not None:
                    with (folder / WEIGHTS).open("ab") as file:
                        file.writelines(array.tobytes() for array in fetched.values())
            for name, size in piece.sizes().items() if on_tensor is not None else ():
                on_tensor(name, size)  # pyright: ignore[reportOptionalCall]


def read_adapter(folder: Path, config: ModelConfig, mesh: Mesh) -> tuple[LoraConfig, dict]:
    """(what they are, the adapters of a peft folder laid out by rule on `mesh`), float32.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a broken file, or one of another model: targets that are no linears of its blocks, layers that are
        missing, shapes or ranks that are not those of model and configuration.
      Unsupported: another kind of adapter than LoRA, or a switch of it that is not served.
    """
    lora = _lora_config(read_object(folder / CONFIG, limit=MAX_CONFIG_BYTES))
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"load: {str(folder)!r} holds no {WEIGHTS} - only safetensors are read. Save it as one."
        )
    stored = safetensors.open_file(folder / WEIGHTS)
    modules = _modules(config)
    names = _check_names(stored, modules)
    lora = dataclasses.replace(lora, targets="|".join(map(re.escape, names)))
    _check_tensors(stored, modules, names, lora)
    shapes, shardings = (dict[str, Any](flatten_dict(tree, sep="/")) for tree in adapter_layout(config, lora, mesh))
    made = {}
    for path, shape in shapes.items():
        name, _, matrix = path.rpartition("/")
        letter = matrix.removeprefix("lora_").upper()
        layers = [f"{_PREFIX}{module}.lora_{letter}.weight" for module, (n, *_) in modules.items() if n == name]
        whole = np.stack([_read(stored[key]).T for key in layers])
        made[path] = jax.make_array_from_callback(shape.shape, shardings[path], lambda part, whole=whole: whole[part])
    return lora, unflatten_dict(made, sep="/")


def _modules(config: ModelConfig) -> dict[str, tuple[str, int, int, int]]:
    """Each linear of the blocks as the Hub names it -> (our name, layer, K, N), layer by layer."""
    return {
        tensor.removesuffix(".weight"): ("/".join(place.path[1:-1]), place.layer, place.shape[1], place.shape[0])
        for tensor, place in places(config).items()
        if place.layer is not None and place.transposed
    }


def _piece(name: str, stack: Any, layer: int) -> Piece:
    _, rows, columns = stack.shape
    place = Place(("weight",), layer, (columns, rows))
    return Piece(
        tensors={name: ("F32", place.shape)},
        fetch=functools.partial(fetch_dense, stack, place, "float32", name),
        encode=lambda values: {name: values},
    )


def _read(tensor: StoredTensor) -> Float[np.ndarray, "o i"]:
    return tensor.read((slice(None),) * 2).astype(np.float32)


def _lora_config(values: Mapping[str, Any]) -> LoraConfig:
    if values.get("peft_type") != "LORA":
        kind = values.get("peft_type")
        raise Unsupported(f"load: adapter of peft_type={kind!r} - LORA is served.", [(str(kind), "is no LoRA")])
    problems = [
        f"{key}={value!r}"
        for key, value in sorted(values.items())
        if key not in _NEUTRAL and value and value not in _SERVED.get(key, ())
    ]
    if problems:
        raise Unsupported(
            f"load: {CONFIG} with {', '.join(problems)} - plain LoRA of one rank is served. Merge it with peft first.",
            [("lora", problem) for problem in problems],
        )
    dropout = values.get("lora_dropout") or 0.0
    if type(dropout) not in (int, float):
        raise ValueError(f"load: {CONFIG} has lora_dropout={dropout!r} - must be a number.")
    return LoraConfig(
        rank=get_size(values, "r", what=CONFIG),
        alpha=get_positive(values, "lora_alpha", 8.0, what=CONFIG),
        dropout=float(dropout),
        rank_stabilized=get_flag(values, "use_rslora", False, what=CONFIG),
    )


def _check_names(stored: Mapping[str, StoredTensor], modules: Mapping[str, Any]) -> list[str]:
    """The linears that the file has adapters of, each in every layer and with both of its matrices."""
    known = {f"{_PREFIX}{module}.lora_{letter}.weight" for module in modules for letter in "AB"}
    unknown = sorted(stored.keys() - known)
    if unknown:
        raise ValueError(
            f"load: {WEIGHTS} has {len(unknown)} tensors that are of no linear of this model's blocks: {some(unknown)} "
            f"- names are {_PREFIX}{next(iter(modules))}.lora_A.weight and so on. Is it an adapter of another model?"
        )
    names = sorted({modules[key.removeprefix(_PREFIX).rsplit(".", 2)[0]][0] for key in stored})
    if not names:
        raise ValueError(f"load: {WEIGHTS} holds no tensors. Fetch it again.")
    wanted = [key for key in sorted(known) if modules[key.removeprefix(_PREFIX).rsplit(".", 2)[0]][0] in names]
    missing = [key for key in wanted if key not in stored]
    if missing:
        raise ValueError(
            f"load: {WEIGHTS} lacks {len(missing)} of {len(wanted)} tensors: {some(missing)} - a linear has an adapter "
            "in every layer, or in none. Merge it with peft first, or fetch it again."
        )
    return names


def _check_tensors(
    stored: Mapping[str, StoredTensor], modules: Mapping[str, Any], names: list[str], lora: LoraConfig
) -> None:
    for module, (name, _, K, N) in modules.items():
        for letter, shape in (("A", (lora.rank, K)), ("B", (N, lora.rank))) if name in names else ():
            tensor = stored[f"{_PREFIX}{module}.lora_{letter}.weight"]
            if tensor.shape != shape:
                raise ValueError(
                    f"load: {tensor.name!r} has shape={tensor.shape} - r={lora.rank} and a weight of K={K} inputs and "
                    f"N={N} outputs make it {shape}. Is it an adapter of another model?"
                )
            if tensor.dtype.name not in _FLOATS:
                raise ValueError(f"load: {tensor.name!r} has dtype={tensor.stored_as!r} - must be a float.")
