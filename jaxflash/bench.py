"""One measured row of training: `python -m jaxflash.bench --implementation cudnn` times the trainer from outside.

    step 1 .. warm_up | warm_up + 1 .. steps                         | steps + 1 | steps + 2, + 3, + 4
         left out     | median and mean; peak memory at the last one | left out  | traced, with --profile

Text, packing, reading ahead, clipping, donation and metrics are those of `jaxflash.train`; nothing is saved, and
evaluated only at the end. A step's time is what its record says: from the metrics of the step before to its own.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxflash.config import TrainConfig, train_preset
from jaxflash.flags import assignments
from jaxflash.model import count_parameters, flops_per_token
from jaxflash.train import train
from pallas_kernels.attention.api import explain
from pallas_kernels.device import current_device
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.timing import commit, versions
from sharding.mesh import make_mesh, parse_mesh

PROFILED_STEPS = 3
# As Llama 3 began (2407.21783, section 3.4.1): the steps of a row are the first of a long run. With 100, the loss of
# "1b" jumps from step 15 on, at a third and a sixth of the rate too, and from there on rounding decides what it is.
_WARM_UP_STEPS = 8000
_TOP = 10
_NAME_LENGTH = 120  # the template arguments of a library's kernel can fill a page


def measure(config: TrainConfig, *, warm_up: int = 5, trace: str | Path | None = None) -> dict[str, Any]:
    """Trains `config` for its steps and gives what was measured, with the facts that the numbers depend on.

    warm_up: steps at the start that do not count. trace: a folder for a profile of `PROFILED_STEPS` further steps,
    whose heaviest kernels become `kernels` (see `top_kernels`; [] where the trace holds none). step_s, tokens_per_s and
    mfu are medians, tokens_per_s_total is a mean. Tokens are targets, not padding, and `filled` their share of all
    places; the mfu of packed documents takes attention over full rows.

    Raises:
      ValueError: warm_up leaves no step to time, or what `jaxflash.train` refuses.
      Unsupported: the attention that `config` names cannot serve it.
      InterruptedError: a signal ended the run.
    """
    if not 1 <= warm_up < config.steps:
        raise ValueError(
            f"bench: {warm_up=} with steps={config.steps} - must be at least 1 (a first step is not like the others) "
            "and leave a step to time. Raise steps."
        )
    mesh = make_mesh(config.mesh)
    plan = dataclasses.replace(
        config,
        steps=config.steps if trace is None else config.steps + 1 + PROFILED_STEPS,
        schedule_steps=config.decay_steps,
        out=None,
        eval_every=0,
        eval_batches=1,
        checkpoint_every=0,
    )
    with contextlib.ExitStack() as tracing:
        watch = _Watch(config.steps, None if trace is None else Path(trace), tracing)
        run = train(plan, on_record=watch, quiet=True)
    if run.stopped is not None:
        raise InterruptedError(f"bench: {run.stopped} after step {int(run.state.step)} - a row needs all its steps.")

    timed = watch.records[warm_up : config.steps]
    seconds = sum(r["seconds"] for r in timed)
    tokens = sum(r["tokens_per_s"] * r["seconds"] for r in timed)
    row = {
        **_training(config),
        "accumulate": config.accumulate,
        "implementation": config.model.attention,
        "attention": _attention(config),
        "remat": config.model.remat,
        "loss_chunk": config.loss_chunk,
        "warm_up": warm_up,
        "step_s": round(statistics.median(r["seconds"] for r in timed), 5),
        "step_s_range": [round(f(r["seconds"] for r in timed), 5) for f in (min, max)],
        "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in timed)),
        "tokens_per_s_total": round(tokens / seconds),
        "filled": round(tokens / (len(timed) * config.batch_size * config.seq_len), 4),
        "mfu": round(statistics.median(r["mfu"] for r in timed), 4) if "mfu" in timed[0] else None,
        "flops_per_token": flops_per_token(config.model, config.seq_len),
        "peak_gib": None if watch.peak_bytes is None else round(watch.peak_bytes / 2**30, 2),
        "first_step_s": round(watch.first_step_s, 1),
        "loss_first": round(watch.records[0]["loss"], 4),
        "loss_last": round(watch.records[config.steps - 1]["loss"], 4),
        "losses": [round(r["loss"], 4) for r in watch.records[: config.steps]],
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "devices": mesh.size,
        "device": current_device().kind,
        "versions": versions(),
    }
    if trace is not None:
        row |= {"profiled_steps": PROFILED_STEPS} | top_kernels(Path(trace), steps=PROFILED_STEPS)
    return row


def _training(config: TrainConfig) -> dict[str, Any]:
    """What the losses depend on, but for rounding: not on the mesh, nor on what is computed in parts or again."""
    return {
        "parameters": count_parameters(config.model),
        "data": "shipped" if config.data is None else list(config.data),
        "tokenizer": config.tokenizer,
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "packing": config.packing,
        "compute_dtype": config.model.compute_dtype,
        "param_dtype": config.model.param_dtype,
        "learning_rate": config.learning_rate,
        "warmup_steps": config.warmup_steps,
        "seed": config.seed,
        "steps": config.steps,
    }


def losses_on_one_device(config: TrainConfig, rows: str | Path) -> list[float]:
    """The losses of the newest row in the .jsonl `rows` that trained as `config` does, on one device.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has no such row.
    """
    wanted = _training(config)
    for line in reversed(Path(rows).read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        if row.get("devices") == 1 and all(row.get(name) == value for name, value in wanted.items()):
            return row["losses"]
    raise ValueError(f"bench: {str(rows)!r} has no row of one device with {wanted}. Measure it first, with --out.")


@dataclasses.dataclass
class _Watch:
    """The `on_record` of a measured run."""

    steps: int
    trace: Path | None
    tracing: contextlib.ExitStack  # closed by whoever waits for the run, if the run ends early

    def __post_init__(self):
        self.records: list[dict[str, Any]] = []
        self.peak_bytes: int | None = None
        self.first_step_s = math.nan
        self._start = time.perf_counter()

    def __call__(self, record: dict[str, Any]) -> None:
        if "loss" not in record:
            return
        self.records.append(record)
        if record["step"] == 1:
            self.first_step_s = time.perf_counter() - self._start
        if record["step"] == self.steps:
            stats = [s for d in jax.local_devices() if (s := d.memory_stats())]
            self.peak_bytes = max((s["peak_bytes_in_use"] for s in stats), default=None)
        if self.trace is None:
            return
        # The step after this record's is on the device already. Drained before and after, the trace holds whole steps.
        if record["step"] == self.steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            _drain()
            self.tracing.enter_context(jax.profiler.trace(self.trace, profiler_options=options))
        elif record["step"] == self.steps + PROFILED_STEPS:
            _drain()
            self.tracing.close()


def _drain() -> None:
    jax.block_until_ready(jax.live_arrays())


def top_kernels(trace: Path, *, steps: int) -> dict[str, Any]:
    """What ran longest on a device in the newest profile under `trace`, by name, for each of its `steps`.

    kernels: the ten heaviest as {"name", "ms", "share", "calls"}: milliseconds and calls a step (the mean over devices)
    and share of all kernels' time. kernel_ms: that time a step. Copies count; the time of an event inside another does
    not count twice. Without a device in the trace (a CPU), XLA's operations on the host.

    Raises:
      FileNotFoundError: there is no profile.
    """
    files = sorted(trace.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"bench: no *.xplane.pb under {str(trace)!r} - the profiler wrote nothing.")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    # Beside its streams a device has lines that tell the same time again, by operation, module and step.
    streams = {p.name: [s for s in p.lines if s.name.startswith("Stream")] for p in planes if "/device:" in p.name}
    devices = sum(bool(lines) for lines in streams.values())
    if devices:
        events = [list(line.events) for lines in streams.values() for line in lines]
    else:
        host = [line for plane in planes if plane.name == "/host:CPU" for line in plane.lines]
        events = [[e for e in line.events if any(name == "hlo_op" for name, _ in e.stats)] for line in host]
    nanoseconds, calls = Counter(), Counter()
    for line in events:
        for name, own in _own_times(line):
            nanoseconds[name] += round(own)
            calls[name] += 1
    total, each = nanoseconds.total(), steps * max(devices, 1)
    kernels = [
        {
            "name": name[:_NAME_LENGTH],
            "ms": round(own / each / 1e6, 3),
            "share": round(own / total, 4),
            "calls": round(calls[name] / each, 2),
        }
        for name, own in nanoseconds.most_common(_TOP)
    ]
    return {"kernel_ms": round(total / each / 1e6, 3), "kernels": kernels}


def _own_times(events: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Name and duration in ns of each event of one line, less what the events inside it take."""
    stack: list[list[Any]] = []  # name, end, own time of the events that are open
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        while stack and stack[-1][1] <= event.start_ns:
            name, _, own = stack.pop()
            yield name, own
        if stack:
            stack[-1][2] -= event.duration_ns
        stack.append([event.name, event.start_ns + event.duration_ns, event.duration_ns])
    yield from ((name, own) for name, _, own in stack)


def _attention(config: TrainConfig) -> str | None:
    """The implementation that the training step's attention runs."""
    model, rows = config.model, (config.batch_size // config.accumulate, config.seq_len)
    query = jax.ShapeDtypeStruct((*rows, model.n_heads, model.head_dim), model.compute_dtype)
    key = jax.ShapeDtypeStruct((*rows, model.n_kv_heads, model.head_dim), model.compute_dtype)
    segments = jax.ShapeDtypeStruct(rows, "int32") if config.packing == "documents" else None
    window = None if model.sliding_window is None else (model.sliding_window - 1, 0)
    facts: dict[str, Any] = dict(segment_ids=segments, local_window_size=window, implementation=model.attention)
    return explain(query, key, key, is_causal=True, **facts).chosen


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one row of JSON, and appends it to --out; a wrong call ends with exit status 2, as `jaxflash`'s do."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="jaxflash.bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--preset", default="1b", help="model and defaults (default 1b)")
    parser.add_argument("--implementation", default="none", help="of attention (default none: the dispatcher chooses)")
    parser.add_argument("--packing", help="stream or documents (default: the preset's)")
    parser.add_argument("--steps", type=int, default=30, help="steps, warm-up included (default 30)")
    parser.add_argument("--warm-up", type=int, default=5, metavar="N", help="steps left out at the start (default 5)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="model.remat=dots")
    parser.add_argument("--mesh", help="for instance fsdp=2 (default: the preset's)")
    parser.add_argument("--profile", action="store_true", help="trace 3 more steps and name the ten heaviest kernels")
    parser.add_argument("--trace", metavar="DIR", help="like --profile, and keep the trace there")
    parser.add_argument("--out", metavar="FILE", help="a .jsonl to append the row to")
    parser.add_argument(
        "--against", metavar="FILE", help="a .jsonl: the largest difference from its losses on 1 device"
    )
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    args = parser.parse_args(argv)
    changes: dict[str, Any] = {
        "steps": args.steps, "warmup_steps": _WARM_UP_STEPS, "model.attention": args.implementation
    }  # fmt: skip
    try:
        changes |= assignments(args.set, example="model.remat=dots")
        if args.packing is not None:
            changes["packing"] = args.packing
        if args.mesh is not None:
            changes["mesh"] = parse_mesh(args.mesh)
        config = train_preset(args.preset, **changes)
        alone = None if args.against is None else losses_on_one_device(config, args.against)
        if args.out is not None:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            trace = args.trace or (scratch if args.profile else None)
            measured = measure(config, warm_up=args.warm_up, trace=trace)
    except (ValueError, OSError, FloatingPointError, Unsupported) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    row = {"what": "training", "preset": args.preset, **measured}
    if alone is not None:
        apart = [abs(a - b) for a, b in zip(row["losses"], alone, strict=True)]
        row |= {"loss_difference": round(max(apart), 4), "loss_difference_step": apart.index(max(apart)) + 1}
    row |= {"commit": args.commit or commit(), "date": datetime.date.today().isoformat()}
    line = json.dumps(row | {"command": shlex.join(["python", "-m", "jaxflash.bench", *argv])})
    print(line, flush=True)
    if args.out is not None:
        with Path(args.out).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    if row.get("kernels") == []:
        print("error: bench: the trace holds no kernel - the profiler saw no device.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
