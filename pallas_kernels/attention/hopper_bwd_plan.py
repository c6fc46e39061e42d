"""What the two backward kernels share: what they are specialised to, which CTA does which steps, numbers of a query."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import blocks
from pallas_kernels.attention.hopper_config import BackwardConfig, backward_default, kv_heads_side_by_side
from pallas_kernels.attention.spec import AttentionSpec

_I32, _F32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that a kernel is specialised to. T and S are padded, `keys` is the number of real keys, D of queries."""

    B: int
    T: int
    S: int
    N: int
    K: int
    D: int
    H_v: int
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


class Tiles(NamedTuple):
    """A backward kernel's head dims, of Q and K and of V, and its step: queries and keys."""

    D: int
    H_v: int
    q_block: int
    kv_block: int


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


def _row_numbers(
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


def _mask_sides(spec: AttentionSpec, plan: Plan) -> int:
    """Whether steps with a mask lie on one side of those without, the low one, or on both."""
    if isinstance(plan.steps, np.ndarray):
        return 1 + bool((plan.steps[..., 2] < plan.steps[..., 3]).any())
    return 1 + (spec.window is not None or spec.query_lengths or spec.segments)


def differentiate(
    spec: AttentionSpec,
    tiles: Tiles,
    launch: Callable[[Call, dict[str, Any]], tuple[Array, Array, Array]],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H_v"],
    out: Float[Array, "B T N H_v"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H_v"],
    dlse: Float[Array, "B T N"] | None,
    *,
    scale: float,
    config: BackwardConfig | None,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    shifts: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H_v"]]:
    """(dq, dk, dv) in the input dtypes, the same bits at every call: what goes into a kernel, and what comes of it.

    launch(call, operands): (dq in float32 and not scaled, dk, dv), padded to whole blocks. `lse` is -inf for queries
    that see no key, and NaN for those that see a key or a value that is not finite.
    """
    arrays: dict[str, Any] = dict(
        query_lengths=query_lengths, kv_lengths=kv_lengths, query_segments=query_segments, kv_segments=kv_segments,
        shifts=shifts,
    )  # fmt: skip
    if abs(scale) < 1e-30:
        # -lse/scale would overflow. All logits are 0, and nothing comes back through them.
        rest = (key, value, out, lse, dout, dlse)
        zeros = jnp.zeros_like(query)
        dq, dk, dv = differentiate(spec, tiles, launch, zeros, *rest, scale=1.0, config=config, **arrays)
        return dq * 0, dk * 0, dv
    T, S = spec.T, spec.S
    # Rows past S are zeros, but P' of a zero key may overflow, and inf * 0 is NaN: they are masked.
    live, full = blocks.overlaps(spec, tiles.q_block, tiles.kv_block, hide_tail=True, **arrays)
    length: Any = S
    shift: Any = spec.shift
    if query_lengths is not None or kv_lengths is not None or shifts is not None:
        facts = blocks.facts(spec, query_lengths, kv_lengths, shifts)
        length, shift = facts[:, 1:2], facts[:, 2:3]
    plan = make_plan(live, full, shift, length)
    call = Call(
        B=spec.B,
        T=8 * -(-T // 8),
        S=8 * -(-S // 8),
        N=spec.N,
        K=spec.K,
        **tiles._asdict(),
        dtype=spec.dtype,
        keys=S,
        scale=scale,
        bounds=spec.bounds,
        shift=spec.shift,
        kv_lengths=spec.kv_lengths,
        segments=spec.segments,
        masked=_masked(plan),
        sides=_mask_sides(spec, plan),
        heads=kv_heads_side_by_side(spec, config or backward_default(spec)),
    )
    operands = {
        "q": blocks.aligned(query, call.D),
        "k": blocks.aligned(key, call.D),
        "v": blocks.aligned(value, call.H_v),
        "do": blocks.aligned(dout, call.H_v),
        "rows": _row_numbers(call, out, lse, dout, dlse),
        "plan": jnp.asarray(plan.steps),
        "first": jnp.asarray(plan.first),
    }
    if query_segments is not None and kv_segments is not None:
        operands["q_ids"] = blocks.segment_blocks(query_segments, call.q_block, -1).reshape(spec.B, -1)
        operands["kv_ids"] = blocks.segment_blocks(kv_segments, call.kv_block, -2).reshape(spec.B, -1)
    dq, dk, dv = launch(call, operands)
    dq = dq[:, :T, :, : spec.H]
    if isinstance(plan.first, jax.Array) or (plan.first == call.nkv).any():
        visited = jnp.repeat(jnp.asarray(plan.first < call.nkv), call.q_block, axis=1)[:, :T, None, None]
        dq = jnp.where(visited, dq, 0.0)
    return (dq * scale).astype(spec.dtype), dk[:, :S, :, : spec.H], dv[:, :S, :, : spec.H_v]


def _masked(plan: Plan) -> bool:
    """Whether any step may need a mask: full blocks do not, and plans known only at run time do not say so."""
    start, full_start, full_stop, stop = (plan.steps[..., k] for k in range(4))
    return isinstance(plan.steps, jax.Array) or bool(((start < full_start) | (full_stop < stop)).any())
