"""Attention over a sequence that is cut over the devices of a mesh axis: in a ring, or with the keys gathered whole.

    device   step 0   step 1   step 2     Keys and values move on while the queries of a device meet those at hand. In
      0      q0 x k0  q0 x k2  q0 x k1    the backward pass the sums of dk and dv move along, one addition a step, and
      1      q1 x k1  q1 x k0  q1 x k2    so in one order at every call.
      2      q2 x k2  q2 x k1  q2 x k0

Under a causal mask the shards of a sequence in its own order have unequal work. In zigzag order of C devices, device i
holds chunks i and 2C-1-i of 2C: it attends to its own shard causally, and at every other step two pairs of chunks are
seen whole and two not at all, on every device.

These are pure functions for the inside of a `shard_map`. Nothing here knows attention: what is done with a shard of
queries and one of keys comes as an argument, and so does what is seen.

Sources: arXiv 2310.01889 (ring); arXiv 2407.21783, section 3.3.2 (2C chunks, keys gathered).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Shaped

# "none": every query sees every key. "level": two shards of one place, under the caller's own mask. "placed": under the
# caller's mask, by the positions that a Places gives.
Mask = Literal["none", "level", "placed"]


class Places(NamedTuple):
    """The position in the whole sequence of the first query and of the first key of each batch entry, (B,) each."""

    query: Any
    key: Any


# (rows, cols, mask, places) -> result. rows and cols are pytrees of what belongs to queries and to keys, (B, length,
# ...) each; places is None unless the mask is "placed".
Local = Callable[[Any, Any, Mask, Places | None], Any]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A sequence in equal shards over the devices of mesh axes, in its own order or in zigzag order."""

    axes: tuple[str, ...]
    ways: int
    zigzag: bool = False

    @property
    def parts(self) -> int:
        """Chunks a device."""
        return 2 if self.zigzag else 1

    @property
    def chunks(self) -> Int[np.ndarray, "ways parts"]:
        """The chunks of each device, by their places in the sequence."""
        device = np.arange(self.ways)
        sides = (device, 2 * self.ways - 1 - device) if self.zigzag else (device,)
        return np.stack(sides, axis=1)


class Step(NamedTuple):
    """One step of the ring: the shard of queries meets the keys of `hop` devices before.

    pairs: (ways, n, 2), the part of the queries and the part of the keys in each of n pairs that a device computes;
    None: the shards whole. chunks: (ways, n, 2), the places of those in the sequence.
    """

    hop: int
    mask: Mask
    pairs: Any = None
    chunks: Any = None


def zigzag[A: (Array, np.ndarray)](x: A, ways: int, axis: int = 1) -> A:
    """The array with an axis put into zigzag order of so many devices: a length that 2 ways divides, any for one.

    >>> zigzag(np.arange(8), 2, axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _reorder(x, Cut(axes=(), ways=ways, zigzag=True).chunks.ravel(), axis)


def unzigzag[A: (Array, np.ndarray)](x: A, ways: int, axis: int = 1) -> A:
    """Undoes `zigzag`."""
    return _reorder(x, np.argsort(Cut(axes=(), ways=ways, zigzag=True).chunks.ravel()), axis)


def plan(
    cut: Cut, live: Bool[np.ndarray, "chunks chunks"], full: Bool[np.ndarray, "chunks chunks"], *, level: bool
) -> tuple[Step, ...]:
    """The steps of the ring that have work on any device.

    live, full: whether a query chunk sees anything of a key chunk, and whether all of it sees all. level: whether the
    caller's mask, read off a device's own two shards as they are stored, is the right one.
    """
    steps = []
    for hop in range(cut.ways):
        key_chunks = np.roll(cut.chunks, hop, axis=0)
        pairs = cut.chunks[:, :, None], key_chunks[:, None, :]
        alive, whole = (table[pairs].reshape(cut.ways, -1) for table in (live, full))
        if whole.all():
            steps.append(Step(hop, "none"))
        elif hop == 0 and level:
            steps.append(Step(hop, "level"))
        elif count := alive.sum(axis=1).max():
            # A device with fewer computes pairs in which positions hide everything.
            order = np.argsort(~alive, axis=1, kind="stable")[:, :count]
            parts = np.stack(np.divmod(order, cut.parts), axis=-1)
            chunks = [np.take_along_axis(table, parts[..., i], 1) for i, table in enumerate((cut.chunks, key_chunks))]
            mask: Mask = "none" if np.take_along_axis(whole, order, 1).all() else "placed"
            steps.append(Step(hop, mask, parts, np.stack(chunks, axis=-1)))
    return tuple(steps)


def ring_forward(
    forward: Local,
    merge: Callable[..., Any],
    cut: Cut,
    steps: tuple[Step, ...],
    rows: PyTree,
    cols: PyTree,
    start: tuple[Shaped[Array, "B T ..."], ...],
) -> tuple[Shaped[Array, "B T ..."], ...]:
    """The results of `forward` over all shards of keys, merged into `start`.

    merge(*total, *result): the total over one more set of keys. `start` is the total over none, and sets the dtypes.
    """
    total = start
    for step, following in _in_turn(steps):
        cols = _sent(cols, step.hop, cut) if step is steps[0] else cols
        # Sent before the work begins, and needed only after it: XLA lets the two overlap.
        ahead = _sent(cols, following.hop - step.hop, cut)
        some_rows, some_cols, places = _chosen(cut, step, rows, cols)
        result = forward(some_rows, some_cols, step.mask, places)
        total = _folded(lambda old, new: merge(*old, *new), total, result, cut, step, side=0)
        cols = ahead
    return total


def ring_backward(
    backward: Local,
    cut: Cut,
    steps: tuple[Step, ...],
    rows: PyTree,
    cols: PyTree,
    start: tuple[PyTree, PyTree],
) -> tuple[PyTree, PyTree]:
    """(gradients of rows, gradients of cols): the sums of what `backward` gives for each shard of keys.

    `start` is zeros of both, and sets the dtypes of the sums. Those of cols travel with them, and home at the end.
    """
    row_sums, col_sums = start
    for step, following in _in_turn(steps):
        if step is steps[0]:
            cols, col_sums = _sent((cols, col_sums), step.hop, cut)
        ahead = _sent(cols, following.hop - step.hop, cut)
        some_rows, some_cols, places = _chosen(cut, step, rows, cols)
        row_part, col_part = backward(some_rows, some_cols, step.mask, places)
        row_sums = _folded(_added, row_sums, row_part, cut, step, side=0)
        col_sums = _folded(_added, col_sums, col_part, cut, step, side=1)
        # The sums arrive while the next step computes, which adds to them at its end; the last ones arrive at home.
        home = cut.ways if following is step else following.hop
        cols, col_sums = ahead, _sent(col_sums, home - step.hop, cut)
    return row_sums, col_sums


def gathered_forward(forward: Local, cut: Cut, *, full: bool, rows: PyTree, cols: PyTree) -> Any:
    """The results of `forward` for a device's queries and the keys of all devices, gathered in the sequence's order.

    full: whether every query sees every key.
    """
    cols = _gathered(cols, cut)
    if full:
        return forward(rows, cols, "none", None)
    results = [forward(*part) for part in _against_all(cut, rows, cols)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def gathered_backward(
    backward: Local, cut: Cut, *, full: bool, rows: PyTree, cols: PyTree, dtype: Any
) -> tuple[PyTree, PyTree]:
    """(gradients of rows, gradients of cols); those of cols are summed over devices in `dtype`."""
    cols = _gathered(cols, cut)
    if full:
        row_part, col_part = backward(rows, cols, "none", None)
        col_sums = jax.tree.map(lambda x: x.astype(dtype), col_part)
    else:
        results = [backward(*part) for part in _against_all(cut, rows, cols)]
        row_part = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *(r[0] for r in results))
        col_sums = jax.tree.map(lambda *parts: sum(x.astype(dtype) for x in parts), *(r[1] for r in results))

    def home(x: Array) -> Array:
        x = zigzag(x, cut.ways) if cut.zigzag else x
        return lax.psum_scatter(x, cut.axes, scatter_dimension=1, tiled=True)

    return row_part, jax.tree.map(home, col_sums)


def _in_turn(steps: tuple[Step, ...]) -> Iterator[tuple[Step, Step]]:
    """Each step with the one after it, the last with itself."""
    return zip(steps, (*steps[1:], *steps[-1:]), strict=True)


def _sent(tree: PyTree, hops: int, cut: Cut) -> PyTree:
    """Every device's arrays to the device so many places after it."""
    if hops % cut.ways == 0:
        return tree
    route = [(device, (device + hops) % cut.ways) for device in range(cut.ways)]
    return jax.tree.map(lambda x: lax.ppermute(x, cut.axes, route), tree)


def _gathered(tree: PyTree, cut: Cut) -> PyTree:
    def whole(x: Array) -> Array:
        x = lax.all_gather(x, cut.axes, axis=1, tiled=True)
        return unzigzag(x, cut.ways) if cut.zigzag else x

    return jax.tree.map(whole, tree)


def _against_all(cut: Cut, rows: PyTree, cols: PyTree) -> list[tuple[PyTree, PyTree, Mask, Places]]:
    """The operands of a Local for each chunk of a device's queries against all keys."""
    B, T = jax.tree.leaves(rows)[0].shape[:2]
    first = jnp.asarray(cut.chunks * (T // cut.parts))[lax.axis_index(cut.axes)]
    nothing = jnp.zeros(B, first.dtype)
    return [
        (_picked(rows, np.array([part]), cut), cols, "placed", Places(nothing + first[part], nothing))
        for part in range(cut.parts)
    ]


def _mine(table: Int[np.ndarray, "ways ..."], cut: Cut) -> Any:
    """This device's entry; static where all have the same."""
    return table[0] if (table == table[:1]).all() else jnp.asarray(table)[lax.axis_index(cut.axes)]


def _chosen(cut: Cut, step: Step, rows: PyTree, cols: PyTree) -> tuple[PyTree, PyTree, Places | None]:
    """The operands of a step: the shards, or their chunks in pairs side by side in the batch."""
    if step.pairs is None:
        return rows, cols, None
    chosen = [_picked(tree, _mine(step.pairs[..., i], cut), cut) for i, tree in enumerate((rows, cols))]
    if step.mask != "placed":
        return *chosen, None
    first = []
    for i, tree in enumerate((rows, cols)):
        B, length = jax.tree.leaves(tree)[0].shape[:2]
        chunk = jnp.asarray(_mine(step.chunks[..., i], cut), jnp.int32)
        first.append(jnp.tile(chunk * (length // cut.parts), B))
    return *chosen, Places(*first)


def _picked(tree: PyTree, parts: Int[Any, " n"], cut: Cut) -> PyTree:
    """(B, length, ...) -> (B n, length / parts of a device, ...): the parts named, of each batch entry in turn."""

    def one(x: Array) -> Array:
        x = x.reshape(x.shape[0], cut.parts, -1, *x.shape[2:]).take(parts, axis=1, mode="clip")
        return x.reshape(-1, *x.shape[2:])

    return jax.tree.map(one, tree)


def _folded(
    update: Callable[[Any, Any], Any], total: PyTree, result: PyTree, cut: Cut, step: Step, *, side: int
) -> PyTree:
    """The total (B, length, ...) with update(old, new) where the results of a step belong, one pair after the other."""
    result = jax.tree.map(lambda new, old: new.astype(old.dtype), result, total)
    if step.pairs is None:
        return update(total, result)
    total = jax.tree.map(lambda x: x.reshape(x.shape[0], cut.parts, -1, *x.shape[2:]), total)
    count = step.pairs.shape[1]
    for n, part in enumerate(_mine(step.pairs[..., side], cut)):
        old = jax.tree.map(functools.partial(lax.dynamic_index_in_dim, index=part, axis=1, keepdims=False), total)
        new = update(old, jax.tree.map(lambda x, n=n: x[n::count], result))
        put = functools.partial(lax.dynamic_update_index_in_dim, index=part, axis=1)
        total = jax.tree.map(put, total, new)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), total)


def _added(old: PyTree, new: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, old, new)


def _reorder[A: (Array, np.ndarray)](x: A, order: Int[np.ndarray, " chunks"], axis: int) -> A:
    if (order[1:] > order[:-1]).all():
        return x
    axis %= x.ndim
    chunks = x.reshape(*x.shape[:axis], len(order), -1, *x.shape[axis + 1 :])
    return chunks.take(order, axis=axis).reshape(x.shape)
