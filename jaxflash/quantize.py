"""Quantises a model: the weights of its blocks, each for the inputs that the blocks before it make, quantised already.

    for each block:  [AWQ: statistics of all its linears -> scales -> folded into what comes before]
                     for each stage of linears that share inputs:
                         statistics, through whatever is quantised so far
                         [weights corrected for what their inputs lost] -> codes -> the weight's place in the block
                     [AWQ: again without the scales of a stage, where a linear of it came out worse than nearest codes]
                     hidden states through the finished block

Embedding table, head, norms (but for folded scales) and biases stay as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jaxflash.block_store import BlockStore, digest
from jaxflash.calibration import STAGES, BlockParams, Calibration, Stage, block_params
from jaxflash.config import ModelConfig
from jaxflash.data import Batch
from jaxflash.language_model import LanguageModel
from jaxflash.quantize_report import gain
from quant.awq import awq_codes, awq_scales
from quant.fold import fold_scale, head_sources
from quant.fp8 import Fp8Tensor, quantize_fp8
from quant.gptq import ORDERS, gptq_codes
from quant.grid import Codes
from quant.lora import LoraTensor
from quant.observe import Statistics
from quant.propagation import check_share, propagated
from quant.recipe import STORED_BITS, Fp8Recipe, Recipe
from quant.report import Report, measure, objective, relative_error
from quant.rtn import nearest_codes, nearest_stored
from quant.tensor import Int4Tensor
from sharding.names import did_you_mean

_OP = "quantize"

type Scales = Mapping[Stage, Float[Array, " k"]]
type Solve = Callable[[Array, Statistics], tuple[Codes, Report]]
type Correct = Callable[[Array, Statistics], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What is done to a weight: inputs scaled, and ranges searched or errors fed back; else rounded to nearest."""

    scale: bool = False
    ranges: bool = False
    feedback: bool = False


METHODS = {
    "rtn": Method(),
    "gptq": Method(feedback=True),
    "awq": Method(scale=True, ranges=True),
    "awq+gptq": Method(scale=True, feedback=True),
}


def quantize(
    model: LanguageModel,
    recipe: Recipe | Fp8Recipe | None = None,
    batches: Iterable[Batch] | None = None,
    *,
    method: str | None = None,
    order: str = "static",
    damping: float = 0.05,
    mse: bool = True,
    propagate_error: float = 0.0,
    folder: str | Path | None = None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    quiet: bool = False,
) -> LanguageModel:
    """The model with its blocks' weights in 4 bits, or FP8. `generate` and `evaluate` take it as they took the model.

    Gradients by what is still dense, or by adapters, flow through the packed weights. No linear's objective, reported,
    is above that of its nearest codes. Other bits than 4 are simulated: the weights are dense, and all is float32.

    Args:
      model: dense, or with some linears packed already (not for AWQ), which keep their codes; it stays as it is.
      recipe: None is `Recipe()`, 4 bits in symmetric groups of 128 rows; an Fp8Recipe rounds to nearest Fp8Tensors.
      batches: text to calibrate with, as `jaxflash.data` packs it. Every token whose `loss_mask` is set counts.
      method: "rtn" (rounded to nearest; needs no batches), "gptq" (2210.17323), "awq" (2306.00978), or "awq+gptq": the
        codes of GPTQ for weights scaled by AWQ. None: "rtn" without batches, else "gptq".
      order, damping, mse: of GPTQ, see `quant.gptq`; the paper's are "none" or "activation", 0.01 and False.
      propagate_error: the share of what its inputs lost in the layers before that each weight is corrected for, before
        any method, see `quant.propagation`; objectives are then those of the corrected weights. The dense model's
        hidden states come along: twice the memory for them and for statistics, and twice the passes. 0: off.
      folder: where finished blocks are kept. A later call with the same arguments goes on from there, to the same bits.
      on_record: called for every linear with its block, its name, its shape, and its `quant.report.Report` as a dict,
        or, of FP8, the error |W - Q| / |W|. Not without batches in 4 bits.
      quiet: no progress bar.

    Returns:
      The model, its blocks on the default device. Beside it, the dense one and the hidden states of all batches, one
      block and the statistics of its linears are alive at a time.

    Raises:
      ValueError: before any work: an unknown method or order, a method or propagation that lacks batches, too few
        tokens, weights that are all packed already, have adapters, are not finite or, with batches, lie on several
        devices, a folder of another quantisation. Later: hidden states that are not finite.
    """
    if isinstance(recipe, Fp8Recipe):
        if method not in (None, "rtn") or batches is not None or propagate_error:
            raise ValueError(
                f"{_OP}: {method=}, {propagate_error=} of FP8 - weights are rounded to nearest. Leave method, "
                "batches and propagate_error out."
            )
        dense = flatten_dict(model.params["blocks"], sep="/")
        _check_dense(dense, Method(scale=True))  # all are, or none
        blocks = _rounded(dense, functools.partial(quantize_fp8, scaling=recipe.scaling))
        for record in _errors(dense, blocks) if on_record is not None else ():
            on_record(record)  # pyright: ignore[reportOptionalCall]
        return _with_blocks(model, blocks)
    recipe = Recipe() if recipe is None else recipe
    method = check_method(method, order, damping, propagate_error, batches is not None)
    dense = flatten_dict(model.params["blocks"], sep="/")
    _check_dense(dense, METHODS[method])
    if batches is None:
        return _with_blocks(model, _rounded(dense, functools.partial(nearest_stored, recipe=recipe)), recipe.bits)
    _check_weights(dense)
    solve = functools.partial(gptq_codes, recipe=recipe, order=order, damping=damping, mse=mse)
    correct = functools.partial(propagated, share=propagate_error, damping=damping) if propagate_error else None
    calibration = Calibration(model.config, model.params, batches, reference=correct is not None)
    store = None
    if folder is not None:
        settings = {"method": method, "order": order, "damping": damping, "mse": mse}
        settings |= {
            "propagate_error": propagate_error,
            "recipe": dataclasses.asdict(recipe),
            "model": dataclasses.asdict(model.config),
            "calibration": calibration.fingerprint,
        }
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
                done = quantize_block(block, calibration, model.config, METHODS[method], recipe, solve, correct, layer)
                if store is not None:
                    store.write(layer, block, *done)
            for record in done[1]:
                bar.update(task, text=f"{record['linear']}: {gain(record):.0%} of the error of nearest codes")
                if on_record is not None:
                    on_record(record)
            if layer + 1 < model.config.n_layers:
                calibration.advance(done[0], block if correct is not None else None)
            finished.append(jax.device_get(done[0]))
            bar.advance(task)
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *finished)
    return _with_blocks(model, stacked, recipe.bits)


def quantize_block(
    block: BlockParams,
    calibration: Calibration,
    config: ModelConfig,
    method: Method,
    recipe: Recipe,
    solve: Solve,
    correct: Correct | None,
    layer: int,
) -> tuple[BlockParams, list[dict[str, Any]]]:
    """(the block quantised, a record of every linear) where the calibration's hidden states have come to it.

    solve: `quant.gptq.gptq_codes` with its settings, where the method feeds errors back. correct:
    `quant.propagation.propagated` with its own, where errors are propagated.
    """
    scales = input_scales(block, calibration, config, recipe, layer) if method.scale else {}
    while True:
        folded = fold_scales(block, scales, config)
        done, reports = _quantised(folded, calibration, scales, method, recipe, solve, correct, layer)
        # A stage's scale was chosen by what the dense block reads. Without one no method does worse than nearest codes.
        worse = [stage for stage in scales if any(reports[n].objective > reports[n].rtn for n in stage.linears)]
        if not worse:
            break
        scales = {stage: scale for stage, scale in scales.items() if stage not in worse}
    shapes = {name: list(block[f"{name}/weight"].shape) for name in reports}
    records = [{"block": layer, "linear": n, "shape": shapes[n], **report.as_dict()} for n, report in reports.items()]
    return done, records


def _quantised(
    block: BlockParams,
    calibration: Calibration,
    scales: Scales,
    method: Method,
    recipe: Recipe,
    solve: Solve,
    correct: Correct | None,
    layer: int,
) -> tuple[BlockParams, dict[str, Report]]:
    """(the block, in which `scales` are folded, in codes; the reports of its linears in the order of STAGES)."""
    reports, before = {}, block if correct is not None else None
    for stage in STAGES:
        dense = [name for name in stage.linears if not isinstance(block[f"{name}/weight"], Int4Tensor)]
        if not dense:
            continue
        first = dense[0]
        seen = calibration.statistics(block, (first,), before)
        _check_seen(seen, layer)
        for name in dense:
            weight, scale = block[f"{name}/weight"], scales.get(stage)
            weight = weight if correct is None else correct(weight, seen[first])
            codes, reports[name] = _codes(weight, seen[first], scale, method, recipe, solve)
            block = {**block, f"{name}/weight": codes.stored()}
    return block, reports


def input_scales(
    block: BlockParams, calibration: Calibration, config: ModelConfig, recipe: Recipe, layer: int
) -> Scales:
    """AWQ's scale of every stage's inputs, all by what the dense block reads.

    Stage by stage would not do: once a value projection is packed, it takes no scale of what follows it.
    """
    seen = calibration.statistics(block, tuple(stage.linears[0] for stage in STAGES))
    _check_seen(seen, layer)
    scales = {}
    for stage in STAGES:
        weights = [block[f"{name}/weight"] for name in stage.linears]
        scales[stage] = awq_scales(weights, seen[stage.linears[0]], recipe, _source(stage, config))
    return scales


def fold_scales(block: BlockParams, scales: Scales, config: ModelConfig) -> BlockParams:
    """The dense block that computes what it did, with the scales of its stages' inputs folded in."""
    for stage, scale in scales.items():
        consumers = {f"{name}/weight": block[f"{name}/weight"] for name in stage.linears}
        producers = {name: leaf for name, leaf in block.items() if name.rpartition("/")[0] == stage.producer}
        producers, consumers = fold_scale(scale, producers, consumers, _source(stage, config))
        block = {**block, **producers, **consumers}
    return block


def _source(stage: Stage, config: ModelConfig) -> Int[Array, " k"] | None:
    """Which of a stage's inputs have one scale: those of query heads that read the same value head."""
    if "attention/out" not in stage.linears:
        return None
    return jnp.asarray(head_sources(config.n_heads, config.n_kv_heads, config.head_dim))


def _codes(
    weight: Float[Array, "k n"],
    seen: Statistics,
    scale: Float[Array, " k"] | None,
    method: Method,
    recipe: Recipe,
    solve: Solve,
) -> tuple[Codes, Report]:
    """The weight in codes. scale: what its rows are multiplied by and its inputs divided by; the report knows both."""
    if method.feedback:
        codes, report = solve(weight, seen)
    elif method.ranges:
        codes, report = awq_codes(weight, seen, recipe)
    else:
        codes = nearest_codes(weight, recipe)
        report = measure(weight, codes, seen)
    if scale is None:
        return codes, report
    plain = weight / scale[:, None]
    rtn = objective(plain, nearest_codes(plain, recipe), seen.divided(1 / scale))
    return codes, dataclasses.replace(report, rtn=rtn)


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


def _errors(dense: BlockParams, blocks: BlockParams) -> Iterator[dict[str, Any]]:
    """A record of every linear of every block: how far its FP8 weight is from the dense one."""
    names = [name for name, leaf in blocks.items() if isinstance(leaf, Fp8Tensor)]
    errors = {name: np.asarray(relative_error(dense[name], blocks[name])) for name in names}
    for layer in range(len(errors[names[0]])):
        for name in names:
            facts = {"shape": list(blocks[name].shape), "error": float(errors[name][layer])}
            yield {"block": layer, "linear": name.rpartition("/")[0], **facts}


def _with_blocks(model: LanguageModel, blocks: BlockParams, bits: int = STORED_BITS) -> LanguageModel:
    params, config = {**model.params, "blocks": unflatten_dict(blocks, sep="/")}, model.config
    if bits != STORED_BITS:  # a code times a scale has more digits than bfloat16
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        config = dataclasses.replace(config, param_dtype="float32")
    return dataclasses.replace(model, config=config, params=params)


def check_method(method: str | None, order: str, damping: float, propagate_error: float, calibrated: bool) -> str:
    """The method's name, `None` being what `quantize` says; raises ValueError for what it refuses."""
    method = ("gptq" if calibrated else "rtn") if method is None else method
    if method not in METHODS:
        raise ValueError(f"{_OP}: unknown {method=}. {did_you_mean(method, METHODS)}")
    if order not in ORDERS:
        raise ValueError(f"{_OP}: unknown {order=}. {did_you_mean(order, ORDERS)}")
    if not 0 <= damping < float("inf"):
        raise ValueError(f"{_OP}: {damping=} - must be finite and not negative. The default is 0.05.")
    check_share(_OP, "propagate_error", propagate_error)
    if not calibrated and propagate_error:
        raise ValueError(f"{_OP}: {propagate_error=} without batches - no error is seen. Give calibration text.")
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
        sums = (jnp.diagonal(statistics.gram), *(() if statistics.drift is None else (statistics.drift,)))
        if not all(bool(jnp.isfinite(each).all()) for each in sums):
            raise ValueError(
                f"{_OP}: the inputs of blocks/{name} in block {layer} are not finite - they overflowed or met NaN. "
                "Compute in bfloat16 or float32, and look at the model."
            )
