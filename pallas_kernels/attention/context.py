"""Sequences over several devices: a kernel of one device becomes one of shards, by `sharding.ring`; and zigzag order.

`over` and `backward_over` keep the signatures of a forward and a backward kernel. What they make runs inside the
shard_map of `derivative`, which cuts T and S; its spec holds the sizes of the whole sequences, its arrays those of a
device. A kernel is told which part it sees by `shifts`, the place of query 0 among the keys, one per batch entry.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float

from pallas_kernels.attention import blocks, tile
from pallas_kernels.attention.spec import AttentionSpec
from sharding import ring
from sharding.local import free_axes
from sharding.ring import Cut, Mask, Places
from sharding.rules import RULES


def ways(spec: AttentionSpec) -> int:
    """Over how many devices of the mesh in force the sequences of a call are cut; 1: whole on every device.

    Whole are those that do not divide, that are stored in the zigzag order of another number of devices, or lie on
    Explicit axes, and those of calls that only exact paths serve.
    """
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in free_axes("sequence", mesh))
    divides = spec.T % count == 0 and spec.S % count == 0
    served = spec.bias is None and spec.mask is None and not spec.traced_scale and not spec.empty and not spec.descaled
    served = served and AxisType.Explicit not in mesh.axis_types
    return count if divides and served and spec.zigzag in (1, count) else 1


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward or a backward that knows no zigzag order, for sequences that are stored so."""

    def ordered(spec: AttentionSpec, *arrays: Any, **operands: Any) -> tuple[Any, ...]:
        count, spec = spec.zigzag, dataclasses.replace(spec, zigzag=1, context=1)
        if count == 1:
            return function(spec, *arrays, **operands)
        axes = {"query_segments": (1,), "kv_segments": (1,), "bias": (2, 3), "mask": (2, 3)}
        for name, dims in axes.items():
            for dim in dims if operands.get(name) is not None else ():
                if operands[name].shape[dim] > 1:  # or it is broadcast
                    operands[name] = ring.unzigzag(operands[name], count, dim)
        results = function(spec, *(None if x is None else ring.unzigzag(x, count) for x in arrays), **operands)
        return tuple(None if x is None else ring.zigzag(x, count) for x in results)

    return ordered


def over(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel `forward` over shards of a sequence, where `spec.context` says that it is cut."""
    whole = in_order(forward)

    def attend(
        spec: AttentionSpec,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H_v"],
        *,
        scale: float,
        **optional: Any,
    ) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
        if spec.context == 1:
            return whole(spec, query, key, value, scale=scale, **optional)
        call = _Shards(spec, scale, optional)
        rows, cols = call.sides({"query": query}, {"key": key, "value": value})

        def local(rows: Any, cols: Any, mask: Mask, places: Places | None) -> tuple[Any, Any]:
            arrays = rows["query"], cols["key"], cols["value"]
            return forward(call.spec_of(rows, cols, mask), *arrays, **call.operands(rows, cols, mask, places))

        live, full = call.seen
        if spec.context_parallel == "all_gather":
            return ring.gathered_forward(local, call.cut, full=bool(full.all()), rows=rows, cols=cols)
        wide = spec.accumulation_dtype
        lse = jnp.full(query.shape[:3], -jnp.inf, wide)
        start = jnp.zeros((*query.shape[:3], spec.H_v), wide), lse
        steps = ring.plan(call.cut, live, full, level=call.level)
        out, lse = ring.ring_forward(local, tile.merge, call.cut, steps, rows, cols, start)
        return out.astype(spec.dtype), lse

    return attend


def backward_over(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel `backward` over shards of a sequence. Partial gradients are added in the accumulation dtype."""

    whole = in_order(backward)

    def differentiate(
        spec: AttentionSpec,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H_v"],
        out: Float[Array, "B T N H_v"],
        lse: Float[Array, "B T N"],
        dout: Float[Array, "B T N H_v"],
        dlse: Float[Array, "B T N"] | None,
        *,
        scale: float,
        **optional: Any,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H_v"]]:
        if spec.context == 1:
            return whole(spec, query, key, value, out, lse, dout, dlse, scale=scale, **optional)
        call = _Shards(spec, scale, optional)
        row_arrays = {"query": query, "out": out, "lse": lse, "dout": dout}
        rows, cols = call.sides(
            row_arrays if dlse is None else row_arrays | {"dlse": dlse}, {"key": key, "value": value}
        )

        def local(rows: Any, cols: Any, mask: Mask, places: Places | None) -> tuple[Any, tuple[Any, Any]]:
            arrays = rows["query"], cols["key"], cols["value"], *(rows[name] for name in ("out", "lse", "dout"))
            operands = call.operands(rows, cols, mask, places)
            dq, dk, dv = backward(call.spec_of(rows, cols, mask), *arrays, rows.get("dlse"), **operands)
            return dq, (dk, dv)

        live, full = call.seen
        wide = spec.accumulation_dtype
        if spec.context_parallel == "all_gather":
            dq, (dk, dv) = ring.gathered_backward(
                local, call.cut, full=bool(full.all()), rows=rows, cols=cols, dtype=wide
            )
        else:
            start = jnp.zeros(query.shape, wide), (jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide))
            steps = ring.plan(call.cut, live, full, level=call.level)
            dq, (dk, dv) = ring.ring_backward(local, call.cut, steps, rows, cols, start)
        return dq.astype(spec.dtype), dk.astype(spec.dtype), dv.astype(spec.dtype)

    return differentiate


def by_vjp(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward kernel made of a forward that jax differentiates; lse and out may be those of more keys than it sees.

    With w = exp(lse' - lse), where ' marks the forward's own results, out = sum w out' over disjoint sets of keys, and

        dout' = w dout      dlse' = w (dlse + dout . (out' - out))
    """

    def backward(
        spec: AttentionSpec, query: Any, key: Any, value: Any, out: Any, lse: Any, dout: Any, dlse: Any, **operands: Any
    ) -> tuple[Any, Any, Any]:
        wide = spec.accumulation_dtype
        # What a row gives back is a difference of numbers that nearly cancel: all of it in the accumulation dtype.
        spec = dataclasses.replace(spec, dtype=wide.name)
        query, key, value, out, dout = (x.astype(wide) for x in (query, key, value, out, dout))
        # A row that met NaN or inf, here or elsewhere: its query, not its cotangent, is made NaN, which reaches the
        # keys that it sees and no others.
        wrong = jnp.isnan(lse) | (lse == jnp.inf)
        query = jnp.where(wrong[..., None], jnp.nan, query)
        out = jnp.where(wrong[..., None], 0.0, out)
        (own, own_lse), pull = jax.vjp(lambda *qkv: forward(spec, *qkv, **operands), query, key, value)
        blind = wrong | (own_lse == -jnp.inf)
        weight = jnp.where(blind, 0.0, jnp.exp(jnp.where(blind, 0.0, own_lse) - jnp.where(blind, 0.0, lse)))
        dlogit = jnp.where(blind[..., None], 0.0, dout * (own - out)).sum(-1)
        dlogit = dlogit if dlse is None else dlogit + jnp.where(blind, 0.0, dlse)
        dq, dk, dv = pull((weight[..., None] * dout, weight * dlogit))
        return jnp.where(wrong[..., None], jnp.nan, dq), dk, dv

    return backward


@dataclasses.dataclass(frozen=True)
class _Shards:
    """A call on one device's part of sequences that are cut: what is seen, and the kernel's call on a part of that."""

    spec: AttentionSpec
    scale: float
    optional: dict[str, Any]  # lengths and segment ids, as a kernel takes them

    @property
    def cut(self) -> Cut:
        return Cut(axes=RULES["sequence"], ways=self.spec.context, zigzag=self.spec.zigzag > 1)

    @property
    def lengths(self) -> bool:
        return self.spec.query_lengths or self.spec.kv_lengths

    @property
    def level(self) -> bool:
        """Whether a device's own shards, as they are stored, stand to each other as the mask wants it.

        Zigzag order keeps what comes before what, but not the distances that a window measures.
        """
        near = self.spec.window is None or not self.cut.zigzag
        return near and self.spec.shift == 0 and self.spec.T == self.spec.S and not self.lengths

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """(live, full) of each pair of chunks, by positions alone."""
        spec, count = self.spec, self.cut.chunks.size
        if spec.shift is None:
            return np.ones((count, count), bool), np.zeros((count, count), bool)
        live, full = blocks.overlaps(spec, spec.T // count, spec.S // count)
        return live[0], full[0] & (not self.lengths)

    def sides(self, rows: dict[str, Any], cols: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """With the segment ids, each on its side."""
        if not self.spec.segments:
            return rows, cols
        ids = self.optional["query_segments"], self.optional["kv_segments"]
        return rows | {"segments": ids[0]}, cols | {"segments": ids[1]}

    def spec_of(self, rows: dict[str, Any], cols: dict[str, Any], mask: Mask) -> AttentionSpec:
        """The spec of a kernel's call on these."""
        (B, T), S = rows["query"].shape[:2], cols["key"].shape[1]
        spec = dataclasses.replace(self.spec, B=B, T=T, S=S, zigzag=1, context=1, shifted=mask == "placed")
        if mask != "none":
            return spec
        return dataclasses.replace(spec, is_causal=False, window=None, query_lengths=False, kv_lengths=False)

    def operands(self, rows: dict[str, Any], cols: dict[str, Any], mask: Mask, places: Places | None) -> dict[str, Any]:
        """What goes with the arrays: shifts and lengths for the part of the sequences that these are."""
        operands = {"scale": self.scale, "query_segments": rows.get("segments"), "kv_segments": cols.get("segments")}
        if places is None:
            return operands | {"query_lengths": None, "kv_lengths": None}
        whole: dict[str, Any] = {"query_lengths": self.spec.T, "kv_lengths": self.spec.S}
        for name, most in whole.items():
            lengths = self.optional.get(name)
            if lengths is not None:  # of each batch entry, which `places` has once for every pair of chunks
                whole[name] = jnp.repeat(lengths.clip(0, most), len(places.query) // len(lengths))
        query_length, kv_length = whole.values()
        shift = kv_length - query_length if self.spec.shift is None else self.spec.shift
        operands["shifts"] = places.query - places.key + shift
        operands["query_lengths"] = query_length - places.query if self.spec.query_lengths else None
        operands["kv_lengths"] = kv_length - places.key if self.spec.kv_lengths else None
        return operands
