"""Pipeline schedules over the mesh axis `stage`, for any model given as functions.

Time is counted in ticks. In each, every stage runs one chunk of layers forward on one microbatch and one backward on
another, hands its results on round the ring of stages, and keeps what the backward needs of each layer: what the
layer's own rematerialisation leaves, less the parameters. Which microbatch and chunk it is follows from the tick and
the stage (`Schedule`); GPipe, 1F1B and interleaved 1F1B differ in two numbers.

The loop is one `lax.scan` in one `shard_map` that is manual over `stage` alone: other axes stay with the partitioner,
inside the layers too. Hence no branch ever depends on the stage, or the collectives that the partitioner puts into a
branch would wait for stages that took the other one. What a stage has no work for is computed and thrown away by
`where`; branches depend on the tick, so that whatever no stage needs is skipped. Gradients are pulled back by hand, a
layer at a time: nothing is differentiated through `where`, and what bubbles compute, NaN included, goes nowhere. What
is kept and what is summed up is carried by the loops, which write a layer's part in place: derivatives of a loop over
a chunk's layers would clear a stack of both for every microbatch and copy it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from sharding.chunks import STAGE
from sharding.schedule import Schedule, Slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """A model as a pipeline sees it. `shared` are the parameters that are no layer's; `rows` is one microbatch.

    embed: (shared, rows) -> what enters the first layer, an array x.
    place: parameters of a layer, or their gradients, laid out as they are stored.
    layer: (parameters of a layer, x, rows) -> x after it.
    parts: x -> (S, ...), what each of the S stages needs of it for its part of the head.
    head: (shared, part of x, rows, part) -> (sum, count), the loss of part `part` of S of the microbatch. Every stage
      takes a part, so that the head costs no stage more than another; the parts add up to the whole.
    n_layers: how many layers there are. Zeros stand for those that the last chunks lack; x passes them by.
    """

    embed: Callable[[Any, Any], Array]
    place: Callable[[Any], Any]
    layer: Callable[[Any, Array, Any], Array]
    parts: Callable[[Array], Array]
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
            y, _ = jax.lax.scan(lambda x, i: (at.layer(at.parameters(slot, i), x, slot, i), None), x, at.layers)
            y = jnp.where(slot.valid, y, 0)
            last = schedule.forward_slot(t, schedule.stages - 1)

            def add(sums):
                return _plus(sums, at.head(at.shared, y, last.microbatch))

            present = last.valid & (last.chunk == schedule.chunks - 1)
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

        def tick(carry, t):
            ahead, back = carry
            # Of the tick, not of the stage: all take the same branch.
            ahead = jax.lax.cond(t < schedule.forward_ticks, at.forward, lambda _, c: c, t, ahead)
            back = jax.lax.cond(t >= schedule.delay, at.backward, lambda _, __, c: c, t, ahead.kept, back)
            return (ahead, back), None

        x = jnp.zeros(at.x.shape, at.x.dtype)
        pulls = _room(jax.tree.leaves(at.pull), schedule.stash, len(at.layers))
        ahead = _Ahead(x, (_room(at.x, schedule.stash), pulls))
        back = _Back(x, _zeros(at.chunks), _zeros(at.shared), (jnp.zeros(()), jnp.zeros(())))
        (_, back), _ = jax.lax.scan(tick, _varying((ahead, back)), jnp.arange(schedule.ticks))
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
class _Ahead:
    """What the forward half carries: x received; and kept for the backward half, the x that left each chunk under way
    and the pullback of each of its layers."""

    received: Any
    kept: Any


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
        self.x = jax.eval_shape(model.embed, shared, _at(batch, 0))
        self.layers = jnp.arange(schedule.capacity(model.n_layers))
        # Of a pullback, what is no array is the same for every layer and microbatch.
        nothing = _varying(jnp.zeros(self.x.shape, self.x.dtype))
        first = schedule.forward_slot(0, self.index)
        self.pull = jax.eval_shape(lambda x: self.pullback(x, first, jnp.int32(0))[1], nothing)

    def parameters(self, slot: Slot, i: Int[Array, ""]) -> PyTree:
        return self.model.place(_at(self.chunks, slot.chunk, i))

    def layer(self, params: PyTree, x: Array, slot: Slot, i: Int[Array, ""]) -> Array:
        s, n_layers = self.schedule, self.model.n_layers
        y = self.model.layer(params, x, _at(self.batch, slot.microbatch))
        if s.stages * s.chunks * len(self.layers) == n_layers:
            return y
        return jnp.where((slot.chunk * s.stages + self.index) * len(self.layers) + i < n_layers, y, x)

    def pullback(self, x: Array, slot: Slot, i: Int[Array, ""]) -> tuple[Array, Any]:
        """x after a layer, and the pullback of that, a pytree.

        It is without the parameters, which do not change in a step and which `backward` puts in their place.
        """
        params = self.parameters(slot, i)
        return jax.vjp(lambda p, x: self.layer(p, x, slot, i), params, x, saveable_args=(False, True))

    def head(self, shared: PyTree, y: Array, microbatch: Int[Array, ""]) -> Any:
        """The loss of this stage's part of what left the last layer."""
        return self.model.head(shared, self.from_last(self.model.parts(y)), _at(self.batch, microbatch), self.index)

    def entering(self, t: Int[Array, ""], received: Array) -> tuple[Array, Slot]:
        """What enters the chunk of this tick's forward half, and which that is."""
        first = self.schedule.forward_slot(t, 0)

        def embed(_):
            return _varying(self.model.embed(self.shared, _at(self.batch, first.microbatch)))

        embedded = jax.lax.cond(first.valid & (first.chunk == 0), embed, lambda x: x, received)
        slot = self.schedule.forward_slot(t, self.index)
        return jnp.where((self.index == 0) & (slot.chunk == 0), embedded, received), slot

    def forward(self, t: Int[Array, ""], ahead: _Ahead) -> _Ahead:
        x, slot = self.entering(t, ahead.received)
        left, pulls = ahead.kept

        def one(carry, i):
            x, pulls = carry
            y, pull = self.pullback(x, slot, i)
            return (y, _put(pulls, jax.tree.leaves(pull), slot.entry, i)), None

        (y, pulls), _ = jax.lax.scan(one, (x, pulls), self.layers)
        y = jnp.where(slot.valid, y, 0)
        return _Ahead(self.send_on(y), (_put(left, y, slot.entry), pulls))

    def backward(self, t: Int[Array, ""], kept: tuple[Array, list[Array]], back: _Back) -> _Back:
        s, shared, (left, pulls) = self.schedule, self.shared, kept
        slot, end, begin = (s.backward_slot(t, stage) for stage in (self.index, s.stages - 1, 0))
        y = _at(left, slot.entry)

        def pull_head(grads, sums):
            sum_, pull, count = jax.vjp(lambda shared, y: self.head(shared, y, end.microbatch), shared, y, has_aux=True)
            by_shared, dy = pull(_varying(jnp.ones((), sum_.dtype)))
            return _plus(grads, by_shared), _plus(sums, (sum_, count)), dy

        grads, sums, dy = jax.lax.cond(
            end.valid & (end.chunk == s.chunks - 1),
            pull_head,
            lambda grads, sums: (grads, sums, jnp.zeros_like(y)),
            back.shared,
            back.sums,
        )

        def one(carry, i):
            dy, chunks = carry
            pull = jax.tree.unflatten(jax.tree.structure(self.pull), _at(pulls, slot.entry, i))
            pull.args_res = (self.parameters(slot, i), pull.args_res[1])
            by_layer, dx = pull(dy)
            by_layer = jax.tree.map(lambda g: jnp.where(slot.valid, g, 0), self.model.place(by_layer))
            return (dx, _put(chunks, _plus(_at(chunks, slot.chunk, i), by_layer), slot.chunk, i)), None

        dy = jnp.where((self.index == s.stages - 1) & (slot.chunk == s.chunks - 1), dy, back.received)
        (dx, chunks), _ = jax.lax.scan(one, (dy, back.chunks), self.layers, reverse=True)
        dx = jnp.where(slot.valid, dx, 0)

        def pull_embed(grads):
            rows = _at(self.batch, begin.microbatch)
            _, pull = jax.vjp(lambda shared: _varying(self.model.embed(shared, rows)), shared)
            return _plus(grads, pull(jnp.where(self.index == 0, dx, 0))[0])

        grads = jax.lax.cond(begin.valid & (begin.chunk == 0), pull_embed, lambda grads: grads, grads)
        return _Back(self.send_back(dx), chunks, grads, sums)

    def from_last(self, parts: Array) -> Array:
        """On every stage its part of the last stage's array (S, ...)."""
        last = self.schedule.stages - 1
        own = jnp.where(self.index == last, parts[last], 0)
        for stage in range(last):  # others than `stage` receive zeros
            own = own + jax.lax.ppermute(parts[stage], STAGE, [(last, stage)])
        return own

    def send_on(self, y: Array) -> Array:
        stages = self.schedule.stages
        return jax.lax.ppermute(y, STAGE, [(i, (i + 1) % stages) for i in range(stages)])

    def send_back(self, dx: Array) -> Array:
        stages = self.schedule.stages
        return jax.lax.ppermute(dx, STAGE, [(i, (i - 1) % stages) for i in range(stages)])


def _at(tree: PyTree, *index: Any) -> PyTree:
    """x[index] of every array; one slice, since a loop would copy the outer of two."""

    def one(x: Array) -> Array:
        rest = x.shape[len(index) :]
        sizes = (*[1] * len(index), *rest)
        return jax.lax.dynamic_slice(x, _starts(index, x), sizes, allow_negative_indices=False).reshape(rest)

    return jax.tree.map(one, tree)


def _put(tree: PyTree, parts: PyTree, *index: Any) -> PyTree:
    """The arrays with x[index] replaced."""

    def one(x: Array, part: Array) -> Array:
        part = part.reshape(*[1] * len(index), *part.shape)
        return jax.lax.dynamic_update_slice(x, part, _starts(index, x), allow_negative_indices=False)

    return jax.tree.map(one, tree, parts)


def _starts(index: Sequence[Any], x: Array) -> list[Array]:
    return [jnp.asarray(i, jnp.int32) for i in (*index, *[0] * (x.ndim - len(index)))]


def _room(tree: PyTree, *size: int) -> PyTree:
    """Arrays for `size` of each of the tree's; zeros, since what is not initialised the partitioner does not split."""
    return jax.tree.map(lambda x: jnp.zeros((*size, *x.shape), x.dtype), tree)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x)), tree)


def _plus(sums: PyTree, terms: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, terms)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _varying(tree: PyTree) -> PyTree:
    """Marked as differing between stages, and over the axes of a `shard_map` around this one (`sharding.once`)."""
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def one(x: Array) -> Array:
        missing = set(axes) - set(jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(one, tree)
