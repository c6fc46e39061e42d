"""Who works on what in a pipeline: the schedules of `sharding.pipeline` as arithmetic on ticks."""

import dataclasses
from typing import Any, Literal, get_args

from jaxtyping import Array, Int

from sharding.names import did_you_mean

Name = Literal["gpipe", "1f1b", "interleaved"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which microbatch and chunk each of S stages works on, M microbatches in all, `chunks` v of layers on a stage.

    Chunk c of S v, in the order of the layers, lies on stage c mod S. A stage takes S microbatches through its first
    chunk, then the same through its second, so what one stage sends the next needs a tick later (Megatron-LM's
    interleaved schedule, 2104.04473, section 2.2). delay: ticks before the last chunk's first backward.
    """

    stages: int
    microbatches: int
    chunks: int
    delay: int

    @property
    def slots(self) -> int:
        """Ticks between a stage's first and last chunk of work in one direction, both counted."""
        full, rest = divmod(self.microbatches - 1, self.stages)
        return full * self.stages * self.chunks + (self.chunks - 1) * self.stages + rest + 1

    @property
    def forward_ticks(self) -> int:
        """Ticks in which any stage runs forward; as many run backward."""
        return self.slots + self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of the loop. Those before `delay` run forward only, those after `forward_ticks` backward only."""
        return self.forward_ticks + self.delay

    @property
    def stash(self) -> int:
        """Inputs of chunks that a stage keeps: of those that may be under way, however many microbatches there are."""
        return min(self.delay + self.chunks * self.stages, self.forward_ticks)

    def capacity(self, n_layers: int) -> int:
        """Layers in a chunk; the last chunks are filled up with layers that do nothing."""
        return -(-n_layers // (self.stages * self.chunks))

    def bubble(self, n_layers: int) -> float:
        """The part of the stages' time that no layer of the model is at work: (S-1)/(v M+S-1) where all divides.

        Filling up by layers that do nothing counts as idle, and so does a last group of fewer than S microbatches.
        """
        spent = self.stages * self.capacity(n_layers) * self.forward_ticks
        return 1.0 - n_layers * self.microbatches / spent

    def forward_slot(self, tick: Int[Array, ""] | int, stage: Int[Array, ""] | int) -> "Slot":
        """The work of a stage in the forward half of a tick."""
        order = tick - stage
        group, chunk, place = self._parts(order)
        return self._slot(order, group, chunk, place)

    def backward_slot(self, tick: Int[Array, ""] | int, stage: Int[Array, ""] | int) -> "Slot":
        """The work of a stage in the backward half of a tick: forward order, with the chunks from last to first."""
        order = tick - self.delay - (self.stages - 1 - stage)
        group, turn, place = self._parts(order)
        return self._slot(order, group, self.chunks - 1 - turn, place)

    def _parts(self, order):
        group, rest = divmod(order, self.stages * self.chunks)
        return group, *divmod(rest, self.stages)

    def _slot(self, order, group, chunk, place) -> "Slot":
        microbatch = group * self.stages + place
        valid = (order >= 0) & (order < self.slots) & (microbatch < self.microbatches)
        entry = (group * self.chunks + chunk) * self.stages + place  # counts the stage's forward slots
        return Slot(microbatch % self.microbatches, chunk, valid, entry % self.stash)  # in bounds even where not valid


@dataclasses.dataclass(frozen=True)
class Slot:
    """A microbatch, a chunk of the stage, whether there is such work, and where the chunk's input is kept: integers."""

    microbatch: Any
    chunk: Any
    valid: Any
    entry: Any


def make_schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The `Schedule` called "gpipe" (1811.06965), "1f1b" (PipeDream-flush, 2006.09503) or "interleaved" (2104.04473).

    gpipe runs all forward before the first backward, and has room for M + S - 1 inputs a stage. The others begin a
    microbatch's backward as soon as its forward is through, and have for 2 v S - 1. chunks: above 1 for "interleaved".

    Raises:
        ValueError: an unknown name, sizes below 1, or chunks that the schedule does not have.

    >>> round(make_schedule("1f1b", stages=4, microbatches=8).bubble(n_layers=12), 4)  # 3 / 11
    0.2727
    """
    if name not in get_args(Name):
        raise ValueError(f"make_schedule: unknown {name=}. {did_you_mean(name, get_args(Name))}")
    for what, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ValueError(f"make_schedule: {what}={size} - must be at least 1.")
    if (name == "interleaved") != (chunks > 1):
        raise ValueError(
            f"make_schedule: {name=} with {chunks=} - a stage has one chunk of layers, or several under 'interleaved'. "
            "Change the name or the chunks."
        )
    schedule = Schedule(stages=stages, microbatches=microbatches, chunks=chunks, delay=chunks * stages - 1)
    return dataclasses.replace(schedule, delay=schedule.forward_ticks) if name == "gpipe" else schedule
