"""Adapters on a model: added, merged into its weights, saved; and the settings of a run that begins with a model."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash.adapters import adapted, freeze, init_adapters, join
from jaxflash.config import TrainConfig, override
from jaxflash.hf.adapter import write_adapter
from jaxflash.hf.place import OnTensor
from jaxflash.language_model import LanguageModel, open_model
from quant.lora import LoraConfig, LoraTensor

# The rates of the papers that fit small models: QLoRA (2305.14314, B.2) for adapters, a tenth of it for all weights.
_LORA_DEFAULTS: dict[str, Any] = dict(learning_rate=2e-4, weight_decay=0.0)
_DENSE_DEFAULTS: dict[str, Any] = dict(learning_rate=2e-5)


def add_adapters(model: LanguageModel, lora: LoraConfig | None = None, *, seed: int = 0) -> LanguageModel:
    """The model with a low-rank adapter on each target; its outputs are the same, for B is 0 (LoRA, 2106.09685).

        y = x W + scale * (x A) B        A (K, r) random, B (r, N) zero, both float32

    The weights themselves, dense or of 4 bits (QLoRA, 2305.14314), get no gradient any more.

    Args:
      lora: None is `LoraConfig()`: rank 16 on every linear of the blocks.
      seed: of A.

    Raises:
      ValueError: targets that name no linear, or a model that has adapters already.
    """
    lora = LoraConfig() if lora is None else lora
    frozen = freeze(model.config, model.params, lora)
    made = jax.jit(functools.partial(init_adapters, model.config, lora), static_argnums=0)(seed)
    return dataclasses.replace(model, params=join(frozen, made))


def merge(model: LanguageModel) -> LanguageModel:
    """The model with W + scale * A B in the place of each weight with an adapter: dense, in the parameters' own dtype.

    The sum is taken in float32 and rounded once. Weights without an adapter stay as they are, packed ones too. For 4
    bits again, `quantize` the result with calibration text: GPTQ is solved for the merged weights, and its records say
    what error they have of it.

    Raises:
      ValueError: the model has no adapters.
    """
    found = dict(adapted(model.params))
    if not found:
        raise ValueError("merge: the model has no adapters - there is nothing to merge. Load or add one first.")
    blocks = flatten_dict(model.params["blocks"], sep="/")
    for name, weight in found.items():
        dense = _dense(model.config.param_dtype, _layout(weight))
        blocks[f"{name}/weight"] = dense(weight)
    return dataclasses.replace(model, params={**model.params, "blocks": unflatten_dict(blocks, sep="/")})


def save_adapter(
    model: LanguageModel, path: str | Path, *, base: str | None = None, on_tensor: OnTensor | None = None
) -> None:
    """Writes the model's adapters, and nothing else of it, as peft does: `load(..., adapter=path)` and peft read them.

    base: the name or folder of the model that they are of, which peft looks for. on_tensor: told of each tensor.

    Raises:
      ValueError: the model has no adapters.
      FileExistsError, OSError: `path` exists and is not an empty folder; too little free space.
    """
    write_adapter(model.config, model.params, Path(path).expanduser(), base=base, on_tensor=on_tensor)


def finetune_preset(model: str | Path, **changes: Any) -> TrainConfig:
    """The TrainConfig of a run that begins with `model`, what `load` takes, with fields changed, dotted ones too.

    With `lora`, the weights keep their dtype; without, all of them are trained, in float32. Reads no weights.

    Raises:
      FileNotFoundError, ValueError, Unsupported: as `load`; an unknown field.
    """
    path = Path(model).expanduser().resolve()
    config, _ = open_model(path)
    defaults = _DENSE_DEFAULTS if changes.get("lora") is None else _LORA_DEFAULTS
    if changes.get("lora") is None:
        config = dataclasses.replace(config, param_dtype="float32")
    config = dataclasses.replace(config, remat="dots_and_attention")
    start = TrainConfig(
        model=config,
        init_from=str(path),
        tokenizer="model",
        seq_len=min(config.context, 1024),
        batch_size=8,
        **defaults,
    )
    return override(start, changes)


def _layout(weight: LoraTensor) -> NamedSharding | None:
    """Where W lies, of which A has the rows and B the columns; None on one device."""
    a, b = weight.a.sharding, weight.b.sharding
    if not isinstance(a, NamedSharding) or not isinstance(b, NamedSharding):
        return None
    rows, columns = (tuple(s.spec) + (None,) * (3 - len(s.spec)) for s in (a, b))
    return NamedSharding(a.mesh, P(rows[0], rows[1], columns[2]))


@functools.lru_cache(maxsize=16)
def _dense(dtype: str, layout: NamedSharding | None) -> Any:
    return jax.jit(jax.vmap(lambda weight: weight.dequantize(dtype)), out_shardings=layout)
