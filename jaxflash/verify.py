"""Proof that no mesh changes the mathematics: training under every split of the devices beside training on one.

    combinations -> the step and the evaluation that `train` compiles, some steps of each
    -> loss, gradients and parameters, leaf by leaf, against one device: max |a - b| / max |b|

It runs on the CPU, which can be split into any number of devices, in processes of its own: one that XLA ends counts as
a failure, and the others go on.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxflash.combinations import SMALL, combinations, hostile_rows, meshes, on_one_device
from jaxflash.config import TrainConfig, override, to_json
from jaxflash.step import check_layout, compile_program
from jaxflash.workers import Lost, outcomes
from sharding.mesh import make_mesh, use_cpu_devices

WITHIN = 1e-5  # of one device, relative, in float32
_FLOAT32 = {"model.param_dtype": "float32", "model.compute_dtype": "float32"}
_TIMEOUT = 600.0  # seconds for one combination; XLA itself ends a process whose collectives wait in vain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One combination beside one device.

    refused: why the rules do not allow the mesh for this model. failed: why there is no result. Otherwise the largest
    relative deviation over all steps: of the loss (training, evaluation, norms of gradients, numbers of tokens), and by
    the path of a leaf of its gradient, and of the parameters at the end.
    """

    config: TrainConfig
    refused: str | None = None
    failed: str | None = None
    loss: float = math.inf
    gradients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest deviation, and of what it is."""
        found = [(self.loss, "loss")]
        for kind, leaves in (("gradient", self.gradients), ("parameter", self.parameters)):
            found += [(value, f"{kind} {path}") for path, value in leaves.items()]
        return max(found)

    @property
    def verdict(self) -> str:
        """One of "equal", "differs", "failed" and "refused"."""
        if self.refused is not None:
            return "refused"
        return "failed" if self.failed is not None else "equal" if self.worst[0] <= WITHIN else "differs"

    def __str__(self) -> str:
        c, m = self.config, self.config.model
        mesh = ",".join(f"{axis}={size}" for axis, size in c.mesh.items())
        how = [c.schedule] * ("stage" in c.mesh) + [m.context_parallel] * ("context" in c.mesh)
        how += [f"accumulate={c.accumulate}", f"zero={c.zero}", f"{m.n_layers} layers", c.packing, f"remat={m.remat}"]
        how += ["tied"] * m.tie_embeddings + ["window"] * (m.sliding_window is not None)
        how += ["loss in chunks"] * (c.loss_chunk < c.seq_len)
        why = self.refused or self.failed or f"{self.worst[0]:.1e} {self.worst[1]}"
        return f"{self.verdict:8} {mesh:32} {', '.join(how)}: {why}"


def verify(
    config: TrainConfig = SMALL,
    *,
    devices: int = 8,
    mesh: Mapping[str, int] | None = None,
    workers: int | None = None,
) -> Iterator[Finding]:
    """A `Finding` for each of the `combinations` of a training run, in float32, as they come.

    Args:
      devices: how many the CPU is split into; every way to give them to the axes of a mesh is tried.
      mesh: only this one, on as many devices as it has.
      workers: processes at a time; None: as many as there are cores, 8 at most.

    Raises:
      ValueError: a number that is not positive.
      RuntimeError: the run is refused, or fails, on one device; says why.
    """
    wanted = [dict(mesh)] if mesh is not None else meshes(devices) if devices > 0 else []
    sizes = [devices, 1 if workers is None else workers, *(size for axes in wanted for size in axes.values())]
    if min(sizes) < 1:
        raise ValueError(f"verify: {devices=}, {mesh=}, {workers=} - must be at least 1. Give every axis its size.")
    configs = combinations(override(config, _FLOAT32), wanted)
    return compared(configs, workers=workers or min(os.cpu_count() or 1, 8))


def compared(configs: Sequence[TrainConfig], *, workers: int) -> Iterator[Finding]:
    """A `Finding` for each configuration, on the mesh that it names, as they come."""
    alone = {to_json(plain): plain for plain in map(on_one_device, configs)}
    jobs = [*alone.values(), *configs]
    devices = max(math.prod(config.mesh.values()) for config in configs)
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    known: dict[str, Any] = {}
    early: list[tuple[TrainConfig, Any]] = []
    for number, result in outcomes(
        trace, jobs, begin=_begin, arguments=(devices, cache), workers=workers, timeout=_TIMEOUT
    ):
        if number >= len(alone):
            early.append((jobs[number], result))
        elif isinstance(result, Lost) or "refused" in result:
            raise RuntimeError(f"verify: training fails on one device, beside which all is compared - {result}.")
        else:
            known[list(alone)[number]] = result
        ready = [(config, have) for config, have in early if to_json(on_one_device(config)) in known]
        early = [(config, have) for config, have in early if to_json(on_one_device(config)) not in known]
        yield from (compare(config, have, known[to_json(on_one_device(config))]) for config, have in ready)


def trace(config: TrainConfig) -> dict[str, Any]:
    """What a run on the mesh of `config` computes: losses, each step's gradients and the parameters by their paths.

    {"refused": why} where the rules do not allow the mesh.
    """
    try:
        mesh = make_mesh(config.mesh)
        check_layout(config, mesh)
    except ValueError as error:
        return {"refused": str(error)}
    # Without an average, Adam's first moment is the step's gradient, clipped by the norm of all. Where a gradient is
    # nearly zero its division would make a whole step of rounding: an epsilon that is large beside most prevents it.
    config = dataclasses.replace(config, beta1=0.0, epsilon=1e-2)
    program = compile_program(config, mesh)
    parts = (config.accumulate, config.batch_size // config.accumulate, config.seq_len)
    rows, sums, gradients = {}, [], []
    with jax.set_mesh(mesh):
        state = program.init()
        for step in range(config.steps):
            rows = {name: x.reshape(parts) for name, x in hostile_rows(config, step).items()}
            state, metrics = program.step(state, program.put(rows))
            sums += [float(metrics[name]) for name in ("loss", "tokens", "grad_norm")]
            gradients.append(_leaves(optax.tree.get(state.opt_state, "mu")))
        evaluated = jax.device_put(np.zeros(2, np.float32), jax.NamedSharding(mesh, jax.P()))
        for part in range(config.accumulate):
            evaluated = program.evaluate(state.params, evaluated, program.put({k: x[part] for k, x in rows.items()}))
    parameters = _leaves(state.params)
    return {
        "loss": [*sums, *np.asarray(evaluated).tolist()],
        "gradients": {path: [step[path] for step in gradients] for path in parameters},
        "parameters": parameters,
    }


def compare(config: TrainConfig, have: Any, want: Mapping[str, Any]) -> Finding:
    """What `trace` gave, or a `Lost` in its place, beside that of one device."""
    if isinstance(have, Lost):
        return Finding(config=config, failed=have.reason)
    if "refused" in have:
        return Finding(config=config, refused=have["refused"])
    gradients = {path: _largest(have["gradients"][path], steps) for path, steps in want["gradients"].items()}
    parameters = {path: deviation(have["parameters"][path], leaf) for path, leaf in want["parameters"].items()}
    loss = _largest(have["loss"], want["loss"])
    return Finding(config=config, loss=loss, gradients=gradients, parameters=parameters)


def deviation(have: Any, want: Any) -> float:
    """max |have - want| / max |want|; infinite where a value is not finite, or where nothing but zeros is wanted."""
    have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
    largest = np.abs(want).max()
    relative = np.abs(have - want).max() / largest if largest > 0 else math.inf
    return float(relative) if np.isfinite(relative) else math.inf


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """How many combinations were equal to one device, and how far the worst of all was from it."""
    count = {
        verdict: sum(f.verdict == verdict for f in findings) for verdict in ("equal", "differs", "failed", "refused")
    }
    measured = [(f.worst, str(f.config.mesh)) for f in findings if f.verdict in ("equal", "differs")]
    (value, name), mesh = max(measured, default=((math.nan, "nothing"), "{}"))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in count.items() if n or verdict == "equal")
    return (
        f"{counts} of {len(findings)} combinations in {seconds:.0f} s; largest deviation {value:.1e} ({name}, {mesh})"
    )


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """All of it, as one JSON object. A deviation that is not finite is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [finite(dataclasses.asdict(finding) | {"verdict": finding.verdict}) for finding in findings]
    return json.dumps({"within": WITHIN, "seconds": round(seconds, 1), "combinations": rows})


def proven(findings: Sequence[Finding]) -> bool:
    """Whether some combination was compared, and every one that the rules allow is equal to one device."""
    verdicts = {finding.verdict for finding in findings}
    return "equal" in verdicts and verdicts <= {"equal", "refused"}


def _begin(devices: int, cache: str | None) -> None:
    """A worker. Optimisations change nothing but speed, and cost more than they give at such sizes."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", cache)
    use_cpu_devices(devices)


def _largest(have: Sequence[Any], want: Sequence[Any]) -> float:
    return max(deviation(a, b) for a, b in zip(have, want, strict=True))


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
