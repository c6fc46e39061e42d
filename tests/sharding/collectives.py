"""What a compiled program sends over which axes of a mesh, and whether it does so inside a loop: its HLO, read."""

import math
import re
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_OPERATION = re.compile(rf"= (?P<shape>.+?) (?P<kind>{_KINDS})(-start)?\(")
_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "f64": 8, "s64": 8}


@dataclass(frozen=True)
class Collective:
    """kind: HLO's name; axes: of the mesh, along which its groups of devices extend; bytes: of its result on a device;
    loops: how many loops it is in."""

    kind: str
    axes: frozenset[str]
    bytes: int
    loops: int


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """All of a compiled program's, by its text (`Compiled.as_text()`)."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    callers = {
        callee: (name, "while(" in line)
        for name, lines in bodies.items()
        for line in lines
        for callee in re.findall(r"(?:body|condition|to_apply|calls|_computation|computations)=\{?%?([\w.\-]+)", line)
    } | {
        callee.strip(" %"): (name, False)
        for name, lines in bodies.items()
        for line in lines
        for group in re.findall(r"branch_computations=\{(.+?)\}", line)
        for callee in group.split(",")
    }

    def depth(name: str) -> int:
        count = 0
        while name in callers:
            name, loop = callers[name]
            count += loop
        return count

    found = []
    for name, lines in bodies.items():
        for line in lines:
            if match := _OPERATION.search(line):
                axes = _axes(line, mesh)
                size = sum(
                    _BYTES[kind] * int(np.prod([int(n) for n in dims.split(",") if n]))
                    for kind, dims in re.findall(r"\b([a-z]\w+)\[([\d,]*)\]", match["shape"])
                )
                found.append(Collective(match["kind"], axes, size, depth(name)))
    return found


def _axes(line: str, mesh: Mesh) -> frozenset[str]:
    """The axes of the mesh along which the devices of a group differ."""
    places = [np.array(np.unravel_index(group, mesh.devices.shape)) for group in _groups(line)]
    differ = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return frozenset(axis for axis, differs in zip(mesh.axis_names, differ, strict=True) if differs)


def _groups(line: str) -> list[list[int]]:
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):  # XLA's names, often the mesh's own
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        devices = np.moveaxis(np.arange(math.prod(sizes.values())).reshape([*sizes.values()]), along, range(len(along)))
        return devices.reshape(math.prod(devices.shape[: len(along)]), -1).T.tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, line
    shape, dims = ([int(n) for n in part.split(",")] for part in iota.groups()[:2])
    order = [int(n) for n in iota[3].split(",")] if iota[3] else range(len(dims))
    return np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
