"""A computing warpgroup's way through the rings of keys and values of one tile, and its turns at the tensor cores."""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_walk import Seen, Walk

i32 = jnp.int32


@dataclass(frozen=True)
class Reader:
    """That of a `warpgroup`; `count` blocks came before. `values`: the barriers that say that values are there."""

    walk: Walk
    smem: dict[str, Any]
    seen: Seen
    warpgroup: Any
    count: Any
    values: str = "v_ready"

    def slot(self, n: Any) -> Any:
        """Of the tile's n-th block."""
        return lax.rem(self.count + n, i32(self.walk.config.stages))

    def visible(self, s: Any, n: Any) -> Any:
        """The n-th block's scores, -inf where hidden; its keys are given back."""
        segments, free = self.walk.spec.segments, self.smem["k_free"].at[self.slot(n)]
        if not segments:  # whose ids lie beside the keys
            plgpu.barrier_arrive(free)
        if self.walk.masked:
            s = lax.cond(self.seen.tile.partial(n), lambda s: self.seen.hide(s, n, self.slot(n)), lambda s: s, s)
        if segments:
            plgpu.barrier_arrive(free)
        return s

    def leave_keys(self, blocks: Any) -> None:
        """Gives back so many blocks of keys, unread."""
        if blocks is not None:

            @pl.loop(0, blocks)
            def _(n):
                plgpu.barrier_wait(self.smem["k_ready"].at[self.slot(n)])
                plgpu.barrier_arrive(self.smem["k_free"].at[self.slot(n)])

    def leave_values(self, blocks: Any) -> None:
        """And of values, each with a turn."""
        if blocks is not None:

            @pl.loop(0, blocks)
            def _(n):
                plgpu.barrier_wait(self.smem[self.values].at[self.slot(n)])
                plgpu.barrier_arrive(self.smem["v_free"].at[self.slot(n)])
                self.wait_turn()
                self.pass_turn()

    def begin_turns(self) -> None:
        """The last warpgroup gives the first one its first turn of the tile."""
        if self.walk.config.turns:
            pl.when(self.warpgroup == self.walk.config.warpgroups - 1)(
                lambda: plgpu.barrier_arrive(self.smem["turn"].at[0])
            )

    def wait_turn(self) -> None:
        if self.walk.config.turns:
            plgpu.barrier_wait(self.smem["turn"].at[self.warpgroup])

    def pass_turn(self) -> None:
        if self.walk.config.turns:
            after = lax.rem(self.warpgroup + 1, i32(self.walk.config.warpgroups))
            plgpu.barrier_arrive(self.smem["turn"].at[after])

    def end_turns(self) -> None:
        """The first warpgroup takes the turn that is left: a barrier's last phase may not pass unseen."""
        if self.walk.config.turns:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(self.smem["turn"].at[0]))
