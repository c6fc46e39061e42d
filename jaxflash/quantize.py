"""Quantises a model: the weights of its blocks, each for the inputs that the blocks before it make, quantised already.

    for each block:  [AWQ: statistics of all its linears -> scales -> folded into what comes before]
                     for each stage of linears that share inputs:
                         statistics, through whatever is quantised so far -> codes -> the weight's place in the block
                     hidden states through the finished block

Embedding table, head, norms (but for folded scales) and biases stay as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jaxflash.block_store import BlockStore, digest
from jaxflash.calibration import STAGES, BlockParams, Calibration, Stage, block_params
from jaxflash.config import ModelConfig
from jaxflash.data import Batch
from jaxflash.language_model import LanguageModel
from jaxflash.quantize_report import gain
from quant.awq import awq_clip, awq_scales
from quant.fold import fold_scale, head_sources
from quant.fp8 import Fp8Tensor, quantize_fp8
from quant.gptq import ORDERS, gptq
from quant.lora import LoraTensor
from quant.observe import Statistics
from quant.recipe import Fp8Recipe, Recipe
from quant.report import Report, column_objectives, measure, objective
from quant.rtn import round_to_nearest
from quant.tensor import Int4Tensor
from sharding.names import did_you_mean

_OP = "quantize"
# Their outputs are multiplied by one another: an error of one is not what its objective says. AWQ leaves them, too.
_UNCLIPPED = ("attention/q", "attention/k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What is done to a weight: inputs scaled, ranges of groups searched, errors fed back; else rounded to nearest."""

    scale: bool = False
    clip: bool = False
    feedback: bool = False


METHODS = {
    "rtn": Method(),
    "gptq": Method(feedback=True),
    "awq": Method(scale=True, clip=True),
    "awq+gptq": Method(scale=True, clip=True, feedback=True),
}


def quantize(
    model: LanguageModel,
    recipe: Recipe | Fp8Recipe | None = None,
    batches: Iterable[Batch] | None = None,
    *,
    method: str | None = None,
    order: str = "static",
    damping: float = 0.01,
    folder: str | Path | None = None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    quiet: bool = False,
) -> LanguageModel:
    """The model with its blocks' weights in 4 bits, or FP8. `generate` and `evaluate` take it as they took the model.

    Gradients by what is still dense, or by adapters, flow through the packed weights.

    Args:
      model: dense, or with some linears packed already (not for AWQ), which keep their codes; it stays as it is.
      recipe: None is `Recipe()`, symmetric groups of 128 rows. An Fp8Recipe makes Fp8Tensors, rounded to nearest.
      batches: text to calibrate with, as `jaxflash.data` packs it. Every token whose `loss_mask` is set counts.
      method: "rtn" (rounded to nearest; needs no batches), "gptq" (2210.17323), "awq" (2306.00978), or "awq+gptq": the
        codes of GPTQ for weights scaled by AWQ. None: "rtn" without batches, else "gptq".
      order, damping: of GPTQ, see `quant.gptq`.
      folder: where finished blocks are kept. A later call with the same arguments goes on from there, to the same bits.
      on_record: called for every linear with its block, its name, and its `quant.report.Report` as a dict.
      quiet: no progress bar.

    Returns:
      The model, its blocks on the default device. Beside it, the dense one and the hidden states of all batches, one
      block and the statistics of its linears are alive at a time.

    Raises:
      ValueError: before any work: an unknown method or order, a method that lacks batches, too few tokens, weights that
        are all packed already, have adapters, are not finite or, with batches, lie on several devices, a folder of
        another quantisation. Later: hidden states that are not finite.
    """
    if isinstance(recipe, Fp8Recipe):
        if method not in (None, "rtn") or batches is not None:
            raise ValueError(f"{_OP}: {method=} of FP8 - weights are rounded to nearest. Leave method and batches out.")
        dense = flatten_dict(model.params["blocks"], sep="/")
        _check_dense(dense, Method(scale=True))  # all are, or none
        return _with_blocks(model, _rounded(dense, functools.partial(quantize_fp8, scaling=recipe.scaling)))
    recipe = Recipe() if recipe is None else recipe
    recipe.check_stored(_OP)
    method = check_method(method, order, damping, batches is not None)
    dense = flatten_dict(model.params["blocks"], sep="/")
    _check_dense(dense, METHODS[method])
    if batches is None:
        return _with_blocks(model, _rounded(dense, functools.partial(round_to_nearest, recipe=recipe)))
    _check_weights(dense)
    solve = functools.partial(gptq, recipe=recipe, order=order, damping=damping)
    calibration = Calibration(model.config, model.params, batches)
    store = None
    if folder is not None:
        settings = {"method": method, "order": order, "damping": damping, "recipe": dataclasses.asdict(recipe)}
        settings |= {"model": dataclasses.asdict(model.config), "calibration": calibration.fingerprint}
        store = BlockStore(Path(folder).expanduser(), settings | {"table": digest({"table": model.params["table"]})})
    finished: list[BlockParams] = []
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    bar = Bar(TextColumn("block"), *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)
    with bar:
        task = bar.add_task(method, total=model.config.n_layers, text="")
        for layer in range(model.config.n_layers):
            block = block_params(model.params["blocks"], layer)
            done = None if store is None else store.read(layer, block)
            if done is None:
                done = quantize_block(block, calibration, model.config, METHODS[method], recipe, solve, layer)
                if store is not None:
                    store.write(layer, block, *done)
            for record in done[1]:
                bar.update(task, text=f"{record['linear']}: {gain(record):.0%} of the error of nearest codes")
                if on_record is not None:
                    on_record(record)
            if layer + 1 < model.config.n_layers:
                calibration.advance(done[0])
            finished.append(jax.device_get(done[0]))
            bar.advance(task)
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *finished)
    return _with_blocks(model, stacked)


def quantize_block(
    block: BlockParams,
    calibration: Calibration,
    config: ModelConfig,
    method: Method,
    recipe: Recipe,
    solve: Callable[..., tuple[Int4Tensor, Report]],
    layer: int,
) -> tuple[BlockParams, list[dict[str, Any]]]:
    """(the block quantised, a record of every linear) where the calibration's hidden states have come to it.

    solve: `quant.gptq.gptq` with its settings, where the method feeds errors back.
    """
    scales: dict[Stage, Float[Array, " k"]] = {}
    if method.scale:
        scales, block = fold_scales(block, calibration, config, recipe, layer)
    records = []
    for stage in STAGES:
        dense = [name for name in stage.linears if not isinstance(block[f"{name}/weight"], Int4Tensor)]
        if not dense:
            continue
        first = dense[0]
        seen = calibration.statistics(block, (first,))
        _check_seen(seen, layer)
        for name in dense:
            weight = block[f"{name}/weight"]
            clip = _clip(weight, seen[first], recipe) if method.clip and name not in _UNCLIPPED else None
            packed, report = _codes(weight, seen[first], scales.get(stage), clip, method, recipe, solve)
            block = {**block, f"{name}/weight": packed}
            records.append({"block": layer, "linear": name, "shape": list(weight.shape), **report.as_dict()})
    return block, records


def fold_scales(
    block: BlockParams, calibration: Calibration, config: ModelConfig, recipe: Recipe, layer: int
) -> tuple[dict[Stage, Float[Array, " k"]], BlockParams]:
    """AWQ's scale of every stage's inputs, and the dense block that computes what it did, with them folded in."""
    # All at once, of the dense block: a value projection could not be scaled any more once it is packed.
    seen = calibration.statistics(block, tuple(stage.linears[0] for stage in STAGES))
    _check_seen(seen, layer)
    scales: dict[Stage, Float[Array, " k"]] = {}
    for stage in STAGES:
        scales[stage], block = _scaled(block, stage, seen[stage.linears[0]], config, recipe)
    return scales, block


def _scaled(
    block: BlockParams, stage: Stage, seen: Statistics, config: ModelConfig, recipe: Recipe
) -> tuple[Float[Array, " k"], BlockParams]:
    shared = "attention/out" in stage.linears  # by the query heads that read one value head
    source = jnp.asarray(head_sources(config.n_heads, config.n_kv_heads, config.head_dim)) if shared else None
    consumers = {f"{name}/weight": block[f"{name}/weight"] for name in stage.linears}
    producers = {name: leaf for name, leaf in block.items() if name.rpartition("/")[0] == stage.producer}
    scale = awq_scales(list(consumers.values()), seen, recipe, source)
    producers, consumers = fold_scale(scale, producers, consumers, source)
    return scale, {**block, **producers, **consumers}


def _clip(weight: Float[Array, "k n"], seen: Statistics, recipe: Recipe) -> Float[Array, "groups n"]:
    """AWQ's ranges of the groups of those columns that they help: a group's are chosen as if it stood alone."""
    clip = awq_clip(weight, seen, recipe)
    costs = (
        column_objectives(weight - round_to_nearest(weight, recipe, limits).dequantize(), seen.gram)
        for limits in (clip, None)
    )
    return jnp.where(jnp.less(*costs)[None, :], clip, jnp.inf)


def _codes(
    weight: Float[Array, "k n"],
    seen: Statistics,
    scale: Float[Array, " k"] | None,
    clip: Float[Array, "groups n"] | None,
    method: Method,
    recipe: Recipe,
    solve: Callable[..., tuple[Int4Tensor, Report]],
) -> tuple[Int4Tensor, Report]:
    """The weight in codes. scale: what its rows are multiplied by and its inputs divided by; the report knows both."""
    rtn = None
    if scale is not None:
        plain = weight / scale[:, None]
        rtn = objective(plain, round_to_nearest(plain, recipe), seen.divided(1 / scale))
    if not method.feedback:
        packed = round_to_nearest(weight, recipe, clip)
        return packed, measure(weight, packed, seen, rtn)
    packed, report = solve(weight, seen, clip=clip)
    return packed, report if rtn is None else dataclasses.replace(report, rtn=rtn)


def _rounded(dense: BlockParams, one_stack: Callable[[Any], Any]) -> BlockParams:
    """Every stack of weights rounded to nearest, without looking at activations."""

    def one(name: str, leaf: Any) -> Any:
        if not name.endswith("/weight") or isinstance(leaf, Int4Tensor):
            return leaf
        try:
            return one_stack(leaf)
        except ValueError as error:
            raise ValueError(f"{_OP}: blocks/{name}: {error}") from error

    return {name: one(name, leaf) for name, leaf in dense.items()}


def _with_blocks(model: LanguageModel, blocks: BlockParams) -> LanguageModel:
    return dataclasses.replace(model, params={**model.params, "blocks": unflatten_dict(blocks, sep="/")})


def check_method(method: str | None, order: str, damping: float, calibrated: bool) -> str:
    """The method's name, `None` being what `quantize` says; raises ValueError for what it refuses."""
    method = ("gptq" if calibrated else "rtn") if method is None else method
    if method not in METHODS:
        raise ValueError(f"{_OP}: unknown {method=}. {did_you_mean(method, METHODS)}")
    if order not in ORDERS:
        raise ValueError(f"{_OP}: unknown {order=}. {did_you_mean(order, ORDERS)}")
    if not 0 <= damping < float("inf"):
        raise ValueError(f"{_OP}: {damping=} - must be finite and not negative. The paper's is 0.01.")
    if not calibrated and METHODS[method] != Method():
        raise ValueError(f"{_OP}: {method=} without batches - it looks at activations. Give calibration text.")
    return method


def _check_dense(blocks: BlockParams, method: Method) -> None:
    """Something is left to quantise; and of linears that share a scale all are, where scales are looked for."""
    weights = {name: leaf for name, leaf in blocks.items() if name.endswith("/weight")}
    for name, leaf in weights.items():
        if isinstance(leaf, LoraTensor):
            raise ValueError(f"{_OP}: blocks/{name} has an adapter - use jaxflash.merge first.")
        if isinstance(leaf, Fp8Tensor):
            raise ValueError(f"{_OP}: blocks/{name} is quantised already - take the dense model.")
    packed = [name for name, leaf in weights.items() if isinstance(leaf, Int4Tensor)]
    if packed and (method.scale or len(packed) == len(weights)):
        raise ValueError(f"{_OP}: blocks/{packed[0]} is quantised already - take the dense model.")


def _check_weights(blocks: BlockParams) -> None:
    for name, leaf in blocks.items():
        if isinstance(leaf, Int4Tensor):
            continue
        spread = len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1
        if spread > 1:
            raise ValueError(
                f"{_OP}: blocks/{name} lies on {spread} devices - blocks are calibrated on one. Load without a mesh, "
                "and place the result."
            )
        if not bool(jnp.isfinite(leaf).all()):
            raise ValueError(
                f"{_OP}: blocks/{name} has NaN or infinite entries - no code is near. Repair the checkpoint."
            )


def _check_seen(seen: dict[str, Statistics], layer: int) -> None:
    for name, statistics in seen.items():
        if not bool(jnp.isfinite(jnp.diagonal(statistics.gram)).all()):
            raise ValueError(
                f"{_OP}: the inputs of blocks/{name} in block {layer} are not finite - they overflowed or met NaN. "
                "Compute in bfloat16 or float32, and look at the model."
            )
