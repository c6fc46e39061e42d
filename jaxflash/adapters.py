"""Adapters of a model's parameters: which weights have one, taken out as a tree of their own, and put back.

params with LoraTensors  =  join(frozen, adapters)

frozen    params; weights with an adapter as LoraTensors without their two matrices
adapters  {"attention": {"q": {"lora_a": (L, K, r), "lora_b": (L, r, N)}, ...}, ...}: all that is trained and saved
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Key

from jaxflash.config import ModelConfig
from jaxflash.model import abstract, axis_units
from quant import split
from quant.lora import LoraConfig, LoraTensor, init_factors, with_key
from sharding import rules
from sharding.names import did_you_mean


def targets(config: ModelConfig, lora: LoraConfig) -> list[str]:
    """The linears of a block that have an adapter, by name, sorted.

    Raises ValueError where there are none.
    """
    names = [name.removesuffix("/weight") for name in _blocks(abstract(config)[1]) if name.endswith("/weight")]
    found = sorted(filter(lora.matches, names))
    if not found:
        raise ValueError(
            f"lora: targets={lora.targets!r} matches the whole name of no linear. {did_you_mean(lora.targets, names)}"
        )
    return found


def init_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> dict:
    """Fresh adapters, whose products are 0; call it under `jit` with `out_shardings` and nothing is ever unsharded."""
    shapes, key, made = _blocks(abstract(config)[1]), jax.random.key(seed), {}
    for i, name in enumerate(targets(config, lora)):
        a, b = init_factors(jax.random.fold_in(key, i), shapes[f"{name}/weight"].shape, lora.rank)
        made[name] = {"lora_a": a, "lora_b": b}
    return unflatten_dict(made, sep="/")


def freeze(config: ModelConfig, params: dict, lora: LoraConfig) -> dict:
    """`params` with a place for an adapter in each target: what `join` takes as frozen.

    Raises ValueError for parameters that have adapters already.
    """
    blocks = _blocks(params)
    if has_adapters(params):
        raise ValueError("lora: the model has adapters already - a weight takes one. Use jaxflash.merge first.")
    for name in targets(config, lora):
        blocks[f"{name}/weight"] = LoraTensor(base=blocks[f"{name}/weight"], a=None, b=None, config=lora)
    return _with_blocks(params, blocks)


def take(params: dict) -> dict:
    """The adapters of `params`, or of a tree of shapes, names or layouts alike; empty where there are none."""
    found = {name: {"lora_a": weight.a, "lora_b": weight.b} for name, weight in adapted(params)}
    return unflatten_dict(found, sep="/")


def join(frozen: dict, adapters: dict, key: Key[Array, ""] | None = None) -> dict:
    """`frozen` with `adapters` in their places. key: of one training step, for dropout; None leaves nothing out."""
    blocks, factors = _blocks(frozen), flatten_dict(adapters, sep="/")
    for i, (name, weight) in enumerate(adapted(frozen)):
        whole = dataclasses.replace(weight, a=factors[f"{name}/lora_a"], b=factors[f"{name}/lora_b"])
        blocks[f"{name}/weight"] = whole if key is None else with_key(whole, jax.random.fold_in(key, i))
    return _with_blocks(frozen, blocks)


def adapted(params: dict) -> Iterator[tuple[str, LoraTensor]]:
    """(name, weight) of each linear with an adapter, sorted by name."""
    for name, leaf in sorted(_blocks(params).items()):
        if isinstance(leaf, LoraTensor):
            yield name.removesuffix("/weight"), leaf


def has_adapters(params: dict) -> bool:
    """Whether any weight has an adapter."""
    return next(adapted(params), None) is not None


def adapter_axes(config: ModelConfig, lora: LoraConfig) -> dict:
    """The logical axes of every array of the adapters: those of the weight's rows and columns."""
    _, shapes, axes = abstract(config)
    whole = join(freeze(config, shapes, lora), abstract_adapters(config, lora))
    return take(split.axes_of_arrays(whole, axes))


def abstract_adapters(config: ModelConfig, lora: LoraConfig) -> dict:
    """The shapes of the adapters."""
    return jax.eval_shape(lambda: init_adapters(config, lora, 0))


def adapter_layout(config: ModelConfig, lora: LoraConfig, mesh: Mesh) -> tuple[dict, dict]:
    """(shapes, shardings) of the adapters by rule on `mesh`; ValueError for a mesh they do not divide over."""
    units = axis_units(config)
    shapes, axes, table = abstract_adapters(config, lora), adapter_axes(config, lora), rules.fitted(mesh, units)
    rules.check(shapes, axes, mesh, units, table)
    return shapes, rules.shardings(axes, mesh, table)


def _blocks(params: dict) -> dict[str, Any]:
    return flatten_dict(params["blocks"], sep="/")


def _with_blocks(params: dict, blocks: dict[str, Any]) -> dict:
    return {**params, "blocks": unflatten_dict(blocks, sep="/")}
