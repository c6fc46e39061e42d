"""Choosing one implementation of an operation: a pure function of the call's facts and the device, and its printout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from pallas_kernels.device import Device
from sharding.names import did_you_mean


@runtime_checkable
class Spec(Protocol):
    """The frozen facts of one call. `op` is the public name that errors begin with."""

    op: ClassVar[str]


class Unsupported(NotImplementedError):
    """No implementation that was allowed can serve the call; `rejected` holds (implementation, reason) pairs."""

    def __init__(self, message: str, rejected: Sequence[tuple[str, str]]):
        super().__init__(message)
        self.rejected = tuple(rejected)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an operation.

    `why_not(spec, device)` is None where it applies and otherwise the first reason against it, as one clause.
    `forward(spec, ...)` takes arrays and returns arrays; jax differentiates it as it stands, so an implementation
    with a derivative rule of its own attaches the rule inside `forward`. `describe(spec, device)`, where there is
    something to say, tells how it would run the call: tile sizes and schedule.
    """

    name: str
    why_not: Callable[[Any, Device], str | None]
    forward: Callable[..., Any]
    describe: Callable[[Any, Device], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call would run on a device, and the reason against every other implementation. Prints as a table."""

    spec: Spec
    device: Device
    chosen: str | None
    verdicts: tuple[tuple[str, str], ...]

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """The (implementation, reason) pairs of all that was not chosen."""
        return tuple((name, verdict) for name, verdict in self.verdicts if name != self.chosen)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.verdicts), default=0)
        rows = [f"{'>' if name == self.chosen else ' '} {name:<{width}}  {verdict}" for name, verdict in self.verdicts]
        return "\n".join([f"{self.spec.op} on {self.device}", f"  {self.spec}", *rows])


def find(implementations: Sequence[Implementation], op: str, name: str) -> Implementation:
    """The implementation of that name. Raises ValueError, with the nearest name, if there is none."""
    names = [implementation.name for implementation in implementations]
    if name in names:
        return implementations[names.index(name)]
    raise ValueError(f"{op}: unknown {name=} of an implementation. {did_you_mean(name, names)}")


def choose(
    implementations: Sequence[Implementation], spec: Spec, device: Device, name: str | None = None
) -> Implementation:
    """The implementation asked for by `name`, or the first in order of preference that applies.

    Raises ValueError for an unknown name and Unsupported where the named one, or every one, refuses the call.
    """
    candidates = implementations if name is None else (find(implementations, spec.op, name),)
    rejected = []
    for candidate in candidates:
        reason = candidate.why_not(spec, device)
        if reason is None:
            return candidate
        rejected.append((candidate.name, reason))
    reasons = "; ".join(f"{candidate!r}: {reason}" for candidate, reason in rejected)
    remedy = " Pass implementation=None to let another one serve it." if name is not None else ""
    raise Unsupported(f"{spec.op}: cannot run on {device} - {reasons}.{remedy}", rejected)


def explain(
    implementations: Sequence[Implementation], spec: Spec, device: Device, name: str | None = None
) -> Explanation:
    """The same decision as `choose`, kept with the reason against each implementation instead of raising."""
    if name is not None:
        find(implementations, spec.op, name)
    chosen = None
    verdicts = []
    for candidate in implementations:
        reason = candidate.why_not(spec, device)
        if reason is None and name is not None and candidate.name != name:
            reason = f"applies, but {name!r} was asked for"
        elif reason is None and chosen is not None:
            reason = f"applies, but {chosen!r} is preferred"
        if reason is None:
            chosen = candidate.name
        verdict = "chosen" if reason is None else reason
        if reason is None and candidate.describe:
            verdict += f": {candidate.describe(spec, device)}"
        verdicts.append((candidate.name, verdict))
    return Explanation(spec=spec, device=device, chosen=chosen, verdicts=tuple(verdicts))
