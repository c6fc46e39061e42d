"""Which meshes a run fits on, how long its step would take there, and why the others are out; touches no device."""

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from jax.sharding import AbstractMesh

from jaxflash import stages
from jaxflash.config import Remat, TrainConfig
from jaxflash.cost import Machine, Memory, Step, parameter_shapes
from jaxflash.model import axis_units
from jaxflash.step import check_rows
from sharding import rules
from sharding.mesh import AXES, factorisations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The fastest way to train on one mesh, of those that fit, or the smallest if none does.

    memory: bytes of a device; sent: bytes it sends along each axis in a step; seconds: of a step, predicted.
    """

    config: TrainConfig
    memory: Memory
    bubble: float
    sent: dict[str, float]
    seconds: float

    @property
    def mesh(self) -> str:
        """For `--mesh`.

        >>> from jaxflash.config import train_preset
        >>> plan(train_preset("tiny"), devices=1).fits[0].mesh
        'data=1'
        """
        return ",".join(f"{axis}={size}" for axis, size in self.config.mesh.items()) or "data=1"

    @property
    def tokens_per_s(self) -> float:
        """Over the whole mesh."""
        return self.config.batch_size * self.config.seq_len / self.seconds

    def flags(self) -> list[str]:
        """Of `jaxflash train`, beside its preset."""
        c = self.config
        found = ["--mesh", self.mesh, "--batch-size", str(c.batch_size), "--seq-len", str(c.seq_len)]
        found += ["--accumulate", str(c.accumulate), "--set", f"model.remat={c.model.remat}"]
        if c.mesh.get("fsdp", 1) > 1:
            found += ["--zero", str(c.zero)]
        if c.mesh.get("stage", 1) > 1:
            found += ["--schedule", c.schedule]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` found. fits: fastest first. too_large: least memory first. impossible: meshes and their reasons."""

    machine: Machine
    fits: list[Candidate]
    too_large: list[Candidate]
    impossible: list[tuple[str, str, str]]  # mesh, what is wrong in a word or two, and the whole reason

    def to_json(self) -> str:
        def row(candidate: Candidate) -> dict[str, Any]:
            c = candidate.config
            names = ("mesh", "zero", "schedule", "accumulate", "batch_size", "seq_len")
            held = dataclasses.asdict(candidate.memory) | {"total": candidate.memory.total}
            return {name: getattr(c, name) for name in names} | {
                "remat": c.model.remat,
                "memory_bytes": held,
                "bubble": candidate.bubble,
                "sent_bytes": candidate.sent,
                "step_s": candidate.seconds,
                "tokens_per_s": candidate.tokens_per_s,
                "flags": shlex.join(candidate.flags()),
            }

        facts = {"machine": dataclasses.asdict(self.machine), "fits": [row(c) for c in self.fits]}
        facts["too_large"] = [row(c) for c in self.too_large]
        facts["impossible"] = [dict(zip(("mesh", "what", "reason"), entry, strict=True)) for entry in self.impossible]
        return json.dumps(facts)

    def table(self, top: int) -> str:
        """The `top` fastest meshes, and the reasons of those that are out, grouped."""
        room = self.machine.memory * self.machine.usable
        lines = [f"{room / 1e9:.1f} GB of {self.machine.memory / 1e9:g} GB a device. Memory in GB, sent in GB a step."]
        head = ("mesh", "zero", "acc", "remat", "schedule")
        head += ("total", "params", "optim", "grads", "activ", "buffers", "bubble", *AXES, "step s", "tokens/s")
        rows = [head, *map(_cells, self.fits[:top])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = 5  # columns of words, not of numbers
        for row in rows if self.fits else ():
            aligned = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            lines.append("  ".join(aligned).rstrip())
        if len(self.fits) > top:
            lines.append(f"and {len(self.fits) - top} slower ones that fit")
        lines += [] if self.fits else ["No mesh fits."]
        if self.too_large:
            least = self.too_large[0]
            lines.append(
                f"{len(self.too_large)} too large, whatever is accumulated or computed again; the least is "
                f"{least.memory.total / 1e9:.1f} GB: {shlex.join(least.flags())}"
            )
        for what, entries in itertools.groupby(sorted(self.impossible, key=lambda e: e[1]), key=lambda e: e[1]):
            meshes = [(mesh, reason) for mesh, _, reason in entries]
            lines.append(f"{len(meshes)} out for their {what}; {meshes[0][0]}: {meshes[0][1]}")
        return "\n".join(lines)


def plan(
    config: TrainConfig, *, devices: int, machine: Machine | None = None, remats: Sequence[Remat] = get_args(Remat)
) -> Plan:
    """Every mesh over `devices` with its fastest way to train `config`, of its zero, schedule, accumulation and remat.

    Args:
        config: model, batch_size, seq_len, packing and what else does not follow from the mesh.
        devices: how many; a mesh has them all.
        machine: what each of them gives; an H200 by default.
        remats: what may be computed again.

    Raises:
        ValueError: devices is not positive, or no remat.
    """
    if devices < 1 or not remats:
        raise ValueError(f"plan: {devices=} with {remats=} - needs a device, and a policy of remat. Give them.")
    machine = machine or Machine()
    fits, too_large, impossible = [], [], []
    for sizes in factorisations(devices, len(AXES)):
        mesh = AbstractMesh(sizes, AXES)
        named = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
        start = dataclasses.replace(config, mesh=named, accumulate=1)
        if wrong := _impossible(start, mesh):
            impossible.append((",".join(f"{axis}={size}" for axis, size in named.items()), *wrong))
            continue
        found = [_candidate(c, mesh, machine) for c in _ways(start, mesh, remats)]
        room = machine.memory * machine.usable
        if small := [c for c in found if c.memory.total <= room]:
            fits.append(min(small, key=lambda c: (c.seconds, c.memory.total)))
        else:
            too_large.append(min(found, key=lambda c: c.memory.total))
    return Plan(
        machine=machine,
        fits=sorted(fits, key=lambda c: c.seconds),
        too_large=sorted(too_large, key=lambda c: c.memory.total),
        impossible=impossible,
    )


def _impossible(config: TrainConfig, mesh: AbstractMesh) -> tuple[str, str] | None:
    """What is wrong with a mesh, in a word and in a line: the reasons for which `train` would refuse it."""
    shapes, axes = parameter_shapes(config.model)
    units = axis_units(config.model)
    checks = {
        "rows": lambda: check_rows(config, mesh),
        "stages": lambda: stages.check(config, mesh),
        "parameters": lambda: rules.check(shapes, axes, mesh, units, stages.layout_rules(config, mesh)),
    }
    for what, check in checks.items():
        try:
            check()
        except ValueError as error:
            return what, str(error).splitlines()[-1].strip()
    return None


def _ways(config: TrainConfig, mesh: AbstractMesh, remats: Iterable[Remat]) -> Iterator[TrainConfig]:
    rows = config.batch_size // rules.ways("batch", mesh)
    parts = [n for n in range(1, rows + 1) if rows % n == 0]
    zeros = (3, 1) if mesh.shape["fsdp"] > 1 else (3,)
    schedules = ("1f1b", "interleaved") if mesh.shape["stage"] > 1 else (config.schedule,)
    models = [dataclasses.replace(config.model, remat=remat) for remat in remats]
    for schedule in schedules:
        way = dataclasses.replace(config, schedule=schedule)
        if schedule == "interleaved" and _impossible(way, mesh):
            continue
        for zero, accumulate, model in itertools.product(zeros, parts, models):
            yield dataclasses.replace(way, model=model, zero=zero, accumulate=accumulate)


def _candidate(config: TrainConfig, mesh: AbstractMesh, machine: Machine) -> Candidate:
    step = Step(config, mesh)
    return Candidate(
        config=config, memory=step.memory, bubble=step.bubble, sent=step.sent, seconds=step.seconds(machine)
    )


def _cells(candidate: Candidate) -> tuple[str, ...]:
    c, held = candidate.config, candidate.memory
    sizes = held.total, held.parameters, held.optimizer, held.gradients, held.activations, held.buffers + held.inputs
    return (
        candidate.mesh,
        str(c.zero) if c.mesh.get("fsdp", 1) > 1 else "-",
        str(c.accumulate),
        c.model.remat,
        c.schedule if c.mesh.get("stage", 1) > 1 else "-",
        *(f"{size / 1e9:.1f}" for size in sizes),
        f"{candidate.bubble:.1%}",
        *(f"{candidate.sent[axis] / 1e9:.1f}" for axis in AXES),
        f"{candidate.seconds:.3f}",
        f"{candidate.tokens_per_s:,.0f}",
    )
