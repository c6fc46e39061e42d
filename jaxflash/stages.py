"""The transformer as a pipeline: its functions for `sharding.pipeline`, and the loss and gradients over stages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from jaxflash.config import TrainConfig
from jaxflash.loss import chunked_cross_entropy
from jaxflash.model import abstract, axis_units, run_block
from sharding import pipeline, rules
from sharding.chunks import STAGE, collect, deal, dealt
from sharding.once import summed_once
from sharding.pipeline import Stages
from sharding.schedule import Schedule, make_schedule


def schedule_of(config: TrainConfig, mesh: Mesh | AbstractMesh) -> Schedule | None:
    """How the stages of `mesh` take turns at the microbatches of a step; None where there is one stage."""
    stages = mesh.shape[STAGE]
    if stages == 1:
        return None
    chunks = config.stage_chunks if config.schedule == "interleaved" else 1
    return make_schedule(config.schedule, stages=stages, microbatches=config.accumulate, chunks=chunks)


def check(config: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a pipeline in which some chunk would have no layer, or that has no way to store its layers evenly.

    Raises:
      ValueError: names the number of layers, the chunks, and what works.
    """
    schedule = schedule_of(config, mesh)
    if schedule is None:
        return
    if config.lora is not None:
        raise ValueError(
            f"train: lora with stage={schedule.stages} - adapters are not trained in a pipeline. Use fsdp for memory."
        )
    layers, width = config.model.n_layers, config.model.d_model
    if schedule.stages * schedule.chunks > layers:
        chunks = f" of {schedule.chunks} chunks each (stage_chunks)" if schedule.chunks > 1 else ""
        remedy = f"Use at most stage={layers // schedule.chunks}" if schedule.chunks <= layers else "Use fewer chunks"
        raise ValueError(
            f"train: {schedule.stages} stages{chunks} for n_layers={layers} - every one needs a layer. {remedy}."
        )
    pieces = mesh.shape["fsdp"] * schedule.stages
    if not layout_rules(config, mesh)["layer"] and width % pieces:
        alone = schedule.chunks == 1
        why = f"n_layers={layers} over stage={schedule.stages}" if alone else "interleaved"
        works = [
            ways
            for ways in range(1, layers // schedule.chunks + 1)
            if (alone and layers % ways == 0) or width % (mesh.shape["fsdp"] * ways) == 0
        ]
        raise ValueError(
            f"train: d_model={width} is not divisible by fsdp*stage={pieces} - along it layers are split that are not "
            f"split over stages one after the other ({why}). "
            f"Use stage={' or '.join(map(str, works))}, or another fsdp."
        )


def layout_rules(config: TrainConfig, mesh: Mesh | AbstractMesh) -> rules.Rules:
    """Where gradients and the optimizer's state lie, and parameters too where all of them are split (ZeRO-3)."""
    return rules.fitted(mesh, axis_units(config.model), dealt=config.schedule == "interleaved")


def parameter_rules(config: TrainConfig, mesh: Mesh | AbstractMesh) -> rules.Rules:
    """Where parameters lie between steps."""
    table = layout_rules(config, mesh)
    return table if config.zero == 3 else rules.whole_over("fsdp", table)


def once_axes(config: TrainConfig, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes over which gradients are added up once a step: those of the batch that split no parameter.

    Without accumulation there are none: XLA adds up a layer's gradients while those of the one before are computed.
    """
    axes = ("data", "fsdp") if config.zero == 1 else ("data",)
    return tuple(axis for axis in axes if mesh.shape[axis] > 1 and config.accumulate > 1)


class Pipeline:
    """Loss and gradients of a model over the stages of a mesh, as `step.loss_sum` and `step.gradients` on one."""

    def __init__(self, config: TrainConfig, mesh: Mesh, schedule: Schedule):
        self.schedule, self._ways = schedule, rules.ways("batch", mesh)
        self._model = _stages(config, mesh, schedule.stages)
        self._once = once_axes(config, mesh)
        axes = abstract(config.model)[2]
        self._specs, self._split = (
            rules.specs(axes, table) for table in (parameter_rules(config, mesh), layout_rules(config, mesh))
        )

    def gradients(self, params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        """Gradient of the mean loss over all tokens of an (M, b, T) batch in float32, the loss sum and token count."""
        shared, layers = _apart(params)
        shared_split, split = _apart(self._split)

        def sums(params: Any, batch: Any) -> Any:
            chunks, shared = params
            *grads, others = pipeline.gradients(self.schedule, self._model, chunks, shared, batch)
            return tuple(grads), others

        run = summed_once(sums, self._once, (jax.tree.map(dealt, split, is_leaf=_is_spec), shared_split))
        chunks = deal(self.schedule, layers, self._specs["blocks"])
        (chunks, by_shared), (total, count) = run((chunks, shared), batch)
        by_layers = collect(chunks, split, self._model.n_layers)
        scale = 1.0 / jnp.maximum(count, 1.0)
        return jax.tree.map(lambda g: g * scale, by_shared | {"blocks": by_layers}), total, count

    def loss_sum(self, params: Any, rows: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Summed loss of (b, T) rows and their tokens. They pass the stages a row a device at a time."""
        shared, layers = _apart(params)
        batch = {name: self._a_row_a_device(x) for name, x in rows.items()}
        count = next(iter(batch.values())).shape[0]
        schedule = dataclasses.replace(self.schedule, microbatches=count)  # its delay is of no matter here
        return pipeline.loss_sum(schedule, self._model, deal(schedule, layers, self._specs["blocks"]), shared, batch)

    def _a_row_a_device(self, x: Shaped[Array, "b t"]) -> Shaped[Array, "m w t"]:
        return x.reshape(self._ways, -1, x.shape[1]).swapaxes(0, 1)  # every device keeps its rows


def _apart(params: Any) -> tuple[dict, Any]:
    return {name: value for name, value in params.items() if name != "blocks"}, params["blocks"]


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _stages(config: TrainConfig, mesh: Mesh, stages: int) -> Stages:
    graph, shapes, axes = abstract(config.model)
    blocks = nnx.split(nnx.merge(graph, shapes).blocks)[0]
    table, shards = parameter_rules(config, mesh), rules.ways("sequence", mesh)
    of_a_layer = jax.tree.map(lambda names: names[1:], axes["blocks"], is_leaf=lambda names: isinstance(names, tuple))

    def laid_out(params: Any, names: Any) -> Any:
        """As they are stored, which their gradients are then too: sums over microbatches stay split."""
        return jax.tree.map(lambda p, n: rules.constrain(p, *n, rules=table), params, names)

    def model(shared: Any) -> Any:
        whole = laid_out(shared, _apart(axes)[0])
        return nnx.merge(graph, whole | {"blocks": shapes["blocks"]})  # only its other parts are used

    def embed(shared: Any, rows: Any) -> jax.Array:
        return model(shared).embed(rows["tokens"])

    def place(params: Any) -> Any:
        return laid_out(params, of_a_layer)

    def layer(params: Any, x: jax.Array, rows: Any) -> jax.Array:
        ids = rows.get("segment_ids")
        return run_block(config.model, nnx.merge(blocks, params), x, rows["positions"], ids, zigzag=shards)

    def parts(x: jax.Array) -> jax.Array:
        return _every_nth(x, stages, shards)

    def head(shared: Any, x: jax.Array, rows: Any, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = model(shared)
        targets, mask = (
            jax.lax.dynamic_index_in_dim(parts(rows[name]), part, keepdims=False) for name in ("targets", "loss_mask")
        )
        return chunked_cross_entropy(whole.logits, whole.norm(x), targets, mask, chunk=config.loss_chunk, shards=shards)

    n_layers = config.model.n_layers
    return Stages(embed=embed, place=place, layer=layer, parts=parts, head=head, n_layers=n_layers)


def _every_nth(x: Shaped[Array, "b t ..."], n: int, shards: int) -> Shaped[Array, "n b part ..."]:
    """For each i below n, the places i, i + n, ... of each of the `shards` of a row, filled up with zeros (masked
    places).

    Not runs of them: where the sequence is split over devices, each has its own part of these.
    """
    rest = x.shape[2:]
    x = x.reshape(x.shape[0], shards, -1, *rest)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % n)] + [(0, 0)] * len(rest))
    x = jnp.moveaxis(x.reshape(x.shape[0], shards, -1, n, *rest), 3, 0)
    return x.reshape(n, x.shape[1], -1, *rest)
