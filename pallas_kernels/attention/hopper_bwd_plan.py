"""What the two backward kernels share: what they are specialised to, which CTA does which steps, numbers of a query."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import blocks
from pallas_kernels.attention.spec import AttentionSpec

_I32, _F32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that a kernel is specialised to. T and S are padded, `keys` is the number of real keys; D is of queries."""

    B: int
    T: int
    S: int
    N: int
    K: int
    D: int
    dtype: str
    keys: int
    scale: float
    bounds: tuple[int | None, int | None]
    shift: int | None
    kv_lengths: bool
    segments: bool
    masked: bool  # any step may need a mask
    sides: int  # 2 where steps with a mask lie on both sides of those without
    heads: int  # kv heads that the grid runs side by side
    q_block: int
    kv_block: int

    @property
    def nq(self) -> int:
        return -(-self.T // self.q_block)

    @property
    def nkv(self) -> int:
        return -(-self.S // self.kv_block)

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def limited(self) -> bool:
        """Whether blocks of keys may end early."""
        return self.kv_lengths or self.keys % self.kv_block > 0

    @property
    def hidden(self) -> float:
        """What exp2(scale * x) takes to 0."""
        return -math.inf if self.scale > 0 else math.inf


class Plan(NamedTuple):
    """What CTAs do, int32 arrays; b is B, or 1 where all batch entries are alike."""

    steps: Any  # (b, nkv, 6): q blocks start, full_start, full_stop, stop as in blocks.Ranges; shift; number of keys
    first: Any  # (b, nq): the first kv block that visits each q block, and nkv where none does


def make_plan(live: Any, full: Any, shift: Any, kv_length: Any) -> Plan:
    """The plan from the (b, nq, nkv) results of `blocks.overlaps`; numpy in, numpy out.

    Ranges of q blocks are widened until neither end ever goes back from one kv block to the next. Then the visitors of
    a q block are neighbours, and each knows its turn from the first one.
    """
    xp: Any = np if isinstance(live, np.ndarray) else jnp
    live, full = live.swapaxes(1, 2), full.swapaxes(1, 2)
    nkv, nq = live.shape[1:]
    found = blocks.ranges(live, full)
    needed = live.any(-1)
    start, stop = xp.where(needed, found.start, nq), xp.where(needed, found.stop, 0)
    if xp is np:
        start = np.minimum.accumulate(start[:, ::-1], axis=1)[:, ::-1]
        stop = np.maximum.accumulate(stop, axis=1)
    else:
        start, stop = lax.cummin(start, axis=1, reverse=True), lax.cummax(stop, axis=1)
    stop = xp.maximum(start, stop)
    # Where no block is full, all are on the low side: with one kind of mask, that is the side there is code for.
    some = found.full_stop > found.full_start
    full_start, full_stop = xp.where(some, found.full_start, stop), xp.where(some, found.full_stop, stop)
    index = xp.arange(nq, dtype=np.int32)[None, None]
    visits = (start[..., None] <= index) & (index < stop[..., None])
    first = xp.where(visits.any(1), visits.argmax(1), nkv)
    columns = (start, full_start, full_stop, stop, *(xp.broadcast_to(x, start.shape) for x in (shift, kv_length)))
    return Plan(steps=xp.stack(columns, -1).astype(np.int32), first=first.astype(np.int32))


class Place(NamedTuple):
    """Where a CTA stands: batch entry, kv head, kv block, row of the plan; and what it walks over, one head a step."""

    b: Any
    head: Any
    j: Any
    entry: Any
    group: int
    start: Any
    full_start: Any
    full_stop: Any
    stop: Any

    @property
    def steps(self) -> Any:
        return self.steps_from(self.start)

    def steps_from(self, q_block: Any) -> Any:
        """The number of steps for q blocks from `q_block` on, which come first."""
        return (self.stop - q_block) * self.group

    def step(self, i: Any) -> tuple[Any, Any]:
        """(q block, query head) of step i."""
        block, g = split(i, self.group)
        return self.stop - 1 - block, self.head * self.group + g


def place(c: Call, refs: SimpleNamespace) -> Place:
    pid = lax.axis_index("cta")
    group, rest = split(pid, c.heads * c.nkv)
    j, member = split(rest, c.heads)
    b, head = split(group * c.heads + member, c.K)
    entry = b if refs.plan.shape[0] > 1 else _I32(0)
    return Place(b, head, j, entry, c.group, *(refs.plan[entry, j, k] for k in range(4)))


def split(x: Any, n: int) -> tuple[Any, Any]:
    return lax.div(x, _I32(n)), lax.rem(x, _I32(n))


def row_count(c: Call) -> int:
    """float32 numbers that come with a query: -lse/scale, -delta; with masks, whether its block is to be scrubbed."""
    return 3 if c.masked else 2


def row_numbers(
    c: Call, out: Float[Array, "B T N H_v"], lse: Float[Array, "B T N"], dout: Float[Array, "B T N H_v"], dlse: Any
) -> Float[Array, "B N nq r q_block"]:
    """See `row_count`. Rows past T, and those that see no key, get what makes P' 0."""
    delta = jnp.sum(out.astype(_F32) * dout.astype(_F32), -1)
    if dlse is not None:
        delta = delta - dlse
    dead = lse == -jnp.inf
    wrong = ~(jnp.isfinite(lse) & jnp.isfinite(delta)) & ~dead
    start = jnp.where(wrong, jnp.nan, lse * (-1 / c.scale))
    numbers = [jnp.where(dead, c.hidden, start), jnp.where(dead, 0.0, jnp.where(wrong, jnp.nan, -delta))]
    rows = [(c.hidden, numbers[0]), (0.0, numbers[1])]
    if c.masked:
        rows.append((0.0, (dead | wrong).astype(_F32)))

    def by_block(fill: float, x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, c.nq * c.q_block - x.shape[1]), (0, 0)), constant_values=fill)
        return x.transpose(0, 2, 1).reshape(c.B, c.N, c.nq, c.q_block)

    stacked = [by_block(fill, x) for fill, x in rows]
    if c.masked:
        stacked[2] = jnp.broadcast_to(stacked[2].max(-1, keepdims=True), stacked[2].shape)
    return jnp.stack(stacked, axis=3)


def mask_sides(spec: AttentionSpec, plan: Plan) -> int:
    """Whether steps with a mask lie on one side of those without, the low one, or on both."""
    if isinstance(plan.steps, np.ndarray):
        return 1 + bool((plan.steps[..., 2] < plan.steps[..., 3]).any())
    return 1 + (spec.window is not None or spec.query_lengths or spec.segments)
