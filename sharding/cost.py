"""What collectives over a mesh axis send, and over which links: arithmetic, no devices."""

import dataclasses
from collections.abc import Mapping

from sharding.mesh import AXES


def all_gather(size: int, ways: int) -> float:
    """Bytes that each of `ways` devices sends to make an array of `size` bytes whole; to reduce-scatter one as well.

    >>> all_gather(8, 4)
    6.0
    """
    return size * (ways - 1) / ways


def all_reduce(size: int, ways: int) -> float:
    """Bytes that each device sends to add up an array of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather(size, ways)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes a second that a device sends in a collective, inside a host and between hosts, of so many devices each."""

    within: float
    between: float
    per_host: int

    def bandwidth(self, mesh: Mapping[str, int], axis: str) -> float:
        """That of the slowest link of an axis, devices laid out with the last axis of AXES innermost (`make_mesh`).

        >>> links = Links(within=4.0, between=1.0, per_host=8)
        >>> [links.bandwidth({"data": 2, "fsdp": 2, "tensor": 4}, axis) for axis in ("data", "fsdp", "tensor")]
        [1.0, 4.0, 4.0]
        """
        span = 1
        for name in AXES[AXES.index(axis) :]:
            span *= mesh.get(name, 1)
        return self.within if span <= self.per_host else self.between
