"""Pipeline schedules over the mesh axis `stage`, for any model given as functions.

Time is counted in ticks. In each, every stage runs one chunk of layers forward on one microbatch and one backward on
another, hands its results on round the ring of stages, and keeps what the backward needs of a chunk: what the layers'
own rematerialisation leaves, less the parameters. Which microbatch and chunk it is follows from the tick and the stage
(`Schedule`); GPipe, 1F1B and interleaved 1F1B differ in two numbers.

The loop is one `lax.scan` in one `shard_map` that is manual over `stage` alone: other axes stay with the partitioner,
inside the layers too. Hence no branch ever depends on the stage, or the collectives that the partitioner puts into a
branch would wait for stages that took the other one. What a stage has no work for is computed and thrown away by
`where`; branches depend on the tick, so that whatever no stage needs is skipped. Gradients are pulled back by hand,
a chunk at a time: nothing is differentiated through `where`, and what bubbles compute, NaN included, goes nowhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from sharding.chunks import STAGE
from sharding.schedule import Schedule, Slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """A model as a pipeline sees it. `shared` are the parameters that are no layer's; `rows` is one microbatch.

    embed: (shared, rows) -> what enters the first layer, an array x.
    place: parameters of a chunk, or their gradients, laid out as they are stored.
    layers: (parameters of a chunk, live, x, rows) -> x after the layers of the chunk; `live` (n,) is False for those
      that fill it up, which must pass x on. Their parameters are zeros.
    head: (shared, x, rows, part) -> (sum, count), the loss of part `part` of S of the microbatch. Every stage takes a
      part, so that the head costs no stage more than another; the parts add up to the whole.
    n_layers: how many layers there are, those that fill up not counted.
    """

    embed: Callable[[Any, Any], Array]
    place: Callable[[Any], Any]
    layers: Callable[[Any, Bool[Array, " n"], Array, Any], Array]
    head: Callable[[Any, Array, Any, Int[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]]
    n_layers: int


def loss_sum(
    schedule: Schedule, model: Stages, chunks: PyTree, shared: PyTree, batch: PyTree
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, count) of the loss over all microbatches; the forward half of `gradients`. Not for differentiation."""

    def stage_loss(chunks: PyTree, shared: PyTree, batch: PyTree) -> Any:
        at = _Stage(schedule, model, chunks, shared, batch)

        def tick(carry, t):
            received, sums = carry
            x, slot = at.entering(t, received)
            y = jnp.where(slot.valid, at.run(at.chunk(slot), x, slot), 0)
            last = schedule.forward_slot(t, schedule.stages - 1)
            present = last.valid & (last.chunk == schedule.chunks - 1)

            def add(sums):
                whole, rows = at.from_last(y), _take(batch, last.microbatch)
                return _plus(sums, model.head(at.shared, whole, rows, at.index))

            return (at.send_on(y), jax.lax.cond(present, add, lambda sums: sums, sums)), None

        start = _varying((jnp.zeros(at.x.shape, at.x.dtype), (jnp.zeros(()), jnp.zeros(()))))
        (_, sums), _ = jax.lax.scan(tick, start, jnp.arange(schedule.forward_ticks))
        return jax.lax.psum(sums, STAGE)

    run = jax.shard_map(stage_loss, in_specs=(P(None, STAGE), P(), P()), out_specs=P(), axis_names={STAGE})
    return run(chunks, shared, batch)


def gradients(
    schedule: Schedule, model: Stages, chunks: PyTree, shared: PyTree, batch: PyTree
) -> tuple[PyTree, PyTree, tuple[Float[Array, ""], Float[Array, ""]]]:
    """Gradients of the summed loss by `chunks` and by `shared`, in float32 at least, and its (sum, count).

    Args:
        schedule: whose stages are the size of the axis `stage` of the mesh in force.
        chunks: the layers' parameters, a pytree of (v, S, capacity, ...) arrays (`sharding.chunks.deal`).
        shared: pytree of the other parameters; the gradients that stages find for one are added up, so that a tied
            table stays one.
        batch: pytree of (M, ...) arrays.
    """

    def stage_gradients(chunks: PyTree, shared: PyTree, batch: PyTree) -> Any:
        at = _Stage(schedule, model, chunks, shared, batch)

        def forward(t, carry):
            received, stash = carry
            y, pull, slot = at.forward(t, received)
            kept = [y, *jax.tree.leaves(pull)]
            stash = [jax.lax.dynamic_update_index_in_dim(a, b, slot.entry, 0) for a, b in zip(stash, kept, strict=True)]
            return at.send_on(y), stash

        def tick(carry, t):
            ahead, back = carry
            # Of the tick, not of the stage: all take the same branch.
            ahead = jax.lax.cond(t < schedule.forward_ticks, forward, lambda _, c: c, t, ahead)
            back = jax.lax.cond(t >= schedule.delay, at.backward, lambda _, __, c: c, t, ahead[1], back)
            return (ahead, back), None

        x = jnp.zeros(at.x.shape, at.x.dtype)
        stash = [jnp.zeros((schedule.stash, *a.shape), a.dtype) for a in (at.x, *jax.tree.leaves(at.pull))]
        back = _Back(x, _zeros(at.chunks), _zeros(at.shared), (jnp.zeros(()), jnp.zeros(())))
        (_, back), _ = jax.lax.scan(tick, _varying(((x, stash), back)), jnp.arange(schedule.ticks))
        return jax.tree.map(lambda g: g[:, None], back.chunks), *jax.lax.psum((back.shared, back.sums), STAGE)

    run = jax.shard_map(
        stage_gradients,
        in_specs=(P(None, STAGE), P(), P()),
        out_specs=(P(None, STAGE), P(), P()),
        axis_names={STAGE},
    )
    return run(chunks, shared, batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Back:
    """What the backward half carries: the gradient received, those of the parameters, and the loss's sums."""

    received: Any
    chunks: Any
    shared: Any
    sums: Any


class _Stage:
    """One stage, inside the shard_map."""

    def __init__(self, schedule: Schedule, model: Stages, chunks: PyTree, shared: PyTree, batch: PyTree):
        self.schedule, self.model, self.batch = schedule, model, batch
        self.index = jax.lax.axis_index(STAGE)
        self.chunks = jax.tree.map(lambda p: p.squeeze(1), chunks)
        # As if each stage had its own, so that their gradients are added up over the stages once, at the end.
        self.shared = _varying(shared)
        self.x = jax.eval_shape(model.embed, shared, _take(batch, 0))
        # Of a pullback, what is no array is the same for every chunk and microbatch.
        nothing = _varying(jnp.zeros(self.x.shape, self.x.dtype))
        self.pull = jax.eval_shape(lambda t, x: self.forward(t, x)[1], jnp.int32(0), nothing)

    def chunk(self, slot: Slot) -> PyTree:
        return self.model.place(_take(self.chunks, slot.chunk))

    def run(self, params: PyTree, x: Array, slot: Slot) -> Array:
        s = self.schedule
        size = s.capacity(self.model.n_layers)
        live = (slot.chunk * s.stages + self.index) * size + jnp.arange(size) < self.model.n_layers
        return self.model.layers(params, live, x, _take(self.batch, slot.microbatch))

    def entering(self, t: Int[Array, ""], received: Array) -> tuple[Array, Slot]:
        """What enters the chunk of this tick's forward half, and which that is."""
        first = self.schedule.forward_slot(t, 0)

        def embed(_):
            return _varying(self.model.embed(self.shared, _take(self.batch, first.microbatch)))

        embedded = jax.lax.cond(first.valid & (first.chunk == 0), embed, lambda x: x, received)
        slot = self.schedule.forward_slot(t, self.index)
        return jnp.where((self.index == 0) & (slot.chunk == 0), embedded, received), slot

    def forward(self, t: Int[Array, ""], received: Array) -> tuple[Array, Any, Slot]:
        """What leaves the chunk of this tick, zeros where there is no work; and its pullback, a pytree.

        It is without the parameters, which do not change in a step and which `backward` puts in their place.
        """
        x, slot = self.entering(t, received)
        y, pull = jax.vjp(lambda p, x: self.run(p, x, slot), self.chunk(slot), x, saveable_args=(False, True))
        return jnp.where(slot.valid, y, 0), pull, slot

    def backward(self, t: Int[Array, ""], stash: list[Array], back: _Back) -> _Back:
        s, model, shared = self.schedule, self.model, self.shared
        slot = s.backward_slot(t, self.index)
        y, *residuals = _take(stash, slot.entry)
        pull = jax.tree.unflatten(jax.tree.structure(self.pull), residuals)
        pull.args_res = (self.chunk(slot), pull.args_res[1])
        end = s.backward_slot(t, s.stages - 1)

        def pull_head(grads, sums):
            rows = _take(self.batch, end.microbatch)
            sum_, pull, count = jax.vjp(
                lambda shared, x: model.head(shared, x, rows, self.index), shared, self.from_last(y), has_aux=True
            )
            by_shared, dx = pull(_varying(jnp.ones((), sum_.dtype)))
            return _plus(grads, by_shared), _plus(sums, (sum_, count)), _add_up(dx)

        grads, sums, dy = jax.lax.cond(
            end.valid & (end.chunk == s.chunks - 1),
            pull_head,
            lambda grads, sums: (grads, sums, jnp.zeros_like(y)),
            back.shared,
            back.sums,
        )
        by_chunk, dx = pull(jnp.where((self.index == s.stages - 1) & (slot.chunk == s.chunks - 1), dy, back.received))
        by_chunk = jax.tree.map(lambda g: jnp.where(slot.valid, g, 0), self.model.place(by_chunk))
        dx = jnp.where(slot.valid, dx, 0)
        begin = s.backward_slot(t, 0)

        def pull_embed(grads):
            rows = _take(self.batch, begin.microbatch)
            _, pull = jax.vjp(lambda shared: _varying(model.embed(shared, rows)), shared)
            return _plus(grads, pull(jnp.where(self.index == 0, dx, 0))[0])

        grads = jax.lax.cond(begin.valid & (begin.chunk == 0), pull_embed, lambda grads: grads, grads)
        return _Back(self.send_back(dx), _add_at(back.chunks, by_chunk, slot.chunk), grads, sums)

    def from_last(self, y: Array) -> Array:
        """The last stage's array on every stage."""
        return _add_up(jnp.where(self.index == self.schedule.stages - 1, y, 0))

    def send_on(self, y: Array) -> Array:
        stages = self.schedule.stages
        return jax.lax.ppermute(y, STAGE, [(i, (i + 1) % stages) for i in range(stages)])

    def send_back(self, dx: Array) -> Array:
        stages = self.schedule.stages
        return jax.lax.ppermute(dx, STAGE, [(i, (i - 1) % stages) for i in range(stages)])


def _take(tree: PyTree, index: Any) -> PyTree:
    # The only one is no copy: of a stage's parameters, 4 % of a step.
    return jax.tree.map(
        lambda x: x[0] if len(x) == 1 else jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree
    )


def _add_at(sums: PyTree, terms: PyTree, index: Any) -> PyTree:
    def add(a: Array, g: Array) -> Array:
        g = g.astype(a.dtype)
        return a + g[None] if len(a) == 1 else a.at[index].add(g)

    return jax.tree.map(add, sums, terms)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x)), tree)


def _plus(sums: PyTree, terms: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, terms)


def _add_up(x: Array) -> Array:
    """The sum over stages, on each. Float32 on the way: a psum of bfloat16 aborts XLA's CPU compiler (0.11.2)."""
    return _varying(jax.lax.psum(x.astype(_wide(x)), STAGE)).astype(x.dtype)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _varying(tree: PyTree) -> PyTree:
    """Marked as differing between stages, and over the axes of a `shard_map` around this one (`sharding.once`)."""
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def one(x: Array) -> Array:
        missing = set(axes) - set(jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(one, tree)
