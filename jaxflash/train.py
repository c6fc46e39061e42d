"""Training: a straight loop around a compiled step.

The state is donated. Metrics of a step are read after the next one is dispatched, so that the device never waits for
the host. Nothing is saved after a step whose loss or gradient was not finite.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash import checkpoint
from jaxflash.adapters import join
from jaxflash.checkpoint import Checkpoints, TrainState
from jaxflash.config import TrainConfig
from jaxflash.data import Batch, Dataset, batches, open_dataset, validation_batches
from jaxflash.language_model import LanguageModel, load, open_model
from jaxflash.model import flops_per_token
from jaxflash.progress import Progress, StopRequest, keep_records
from jaxflash.stages import schedule_of
from jaxflash.step import Program, check_layout, compile_program
from jaxflash.tokenizer import load_tokenizer
from pallas_kernels.device import current_device, peak_flops
from quant import split
from sharding.mesh import make_mesh

# What may differ from the model that a run begins with: how it is computed, not what.
_FREE = ("context", "param_dtype", "compute_dtype", "attention", "context_parallel", "remat", "init_std")


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` leaves behind: the configuration, every record it logged, and the trained state.

    frozen: of a run with adapters, what they belong to. stopped: None, or why the run ended before `config.steps` (a
    signal); it continues where it stopped.
    """

    config: TrainConfig
    path: Path | None
    records: list[dict[str, Any]]
    state: TrainState
    dataset: Dataset
    stopped: str | None
    frozen: Any = None

    @property
    def model(self) -> LanguageModel:
        """The trained model with its tokenizer, ready for `generate`."""
        params = self.state.params if self.frozen is None else join(self.frozen, self.state.params)
        return LanguageModel(self.config.model, params, self.dataset.tokenizer)

    def curve(self, name: str = "loss") -> tuple[list[int], list[float]]:
        """Steps and values of one logged quantity: "loss", "validation_loss", "grad_norm", ..."""
        rows = [r for r in self.records if name in r]
        return [r["step"] for r in rows], [r[name] for r in rows]


def open_data(config: TrainConfig) -> Dataset:
    """The corpus of a run, tokenised, split and packed as it says."""
    of_model = config.tokenizer == "model"
    return open_dataset(
        config.data,
        open_model(Path(str(config.init_from)).expanduser())[1] if of_model else load_tokenizer(config.tokenizer),
        seq_len=config.seq_len,
        packing=config.packing,
        vocab_size=config.model.vocab_size,
        validation_fraction=config.validation_fraction,
    )


def train(
    config: TrainConfig, *, on_record: Callable[[dict[str, Any]], None] | None = None, quiet: bool = False
) -> Run:
    """Trains, or continues, the run that `config` describes.

    It begins with fresh parameters, or with those of `config.init_from`; with `config.lora` these stay as they are, and
    the state, the optimizer and every checkpoint are of the adapters alone.

    With `config.out`, the folder holds configuration, metrics and checkpoints, and a later call continues it: from the
    newest checkpoint, with the batch after the last one seen, on any mesh; on the same mesh bit for bit. Without, the
    result lives in memory only. A first interrupt (Ctrl-C, SIGTERM) finishes the step, saves and returns.

    on_record: called with every logged record (a live chart in a notebook). quiet: no progress bar.

    Raises:
      ValueError, FileNotFoundError: bad configuration, data or folder, before anything is compiled.
      FloatingPointError: loss or gradient is not finite; names the step. A checkpoint that exists is from before it.
    """
    mesh = make_mesh(config.mesh)
    check_layout(config, mesh)
    _check_start(config)
    dataset = open_data(config)
    path = None if config.out is None else Path(config.out)
    start = _load_start(config, mesh, path)
    if path is not None:
        checkpoint.open_run(path, config)
        if jax.process_index() == 0:
            dataset.tokenizer.save(path)
    program = compile_program(config, mesh, start)
    with jax.set_mesh(mesh), StopRequest() as stop, _checkpoints(path, config) as saved:
        state, first = _start(program, saved, dataset)
        if path is not None:
            # Rows written after the checkpoint belong to steps that are about to be taken again.
            keep_records(path / "metrics.jsonl", up_to=first)
        report: dict[str, Any] = dict(
            on_record=on_record, quiet=quiet, mfu=_mfu(config, mesh), bubble=_bubble(config, mesh)
        )
        with Progress(config, path, first=first, **report) as progress:
            state = _loop(config, program, dataset, state, first, saved, progress, stop)
            return Run(config, path, progress.records, state, dataset, stop.reason, program.frozen)


def _loop(config, program: Program, dataset: Dataset, state, first: int, saved, progress: Progress, stop) -> TrainState:
    pending = None
    rows = _microbatches(config, program, dataset, first)
    for step in range(first + 1, config.steps + 1):
        state, metrics = program.step(state, program.put(next(rows)))
        if pending is not None:
            progress.step(*pending)
        pending = (step, metrics)
        # Asked once a step: a signal that comes during what follows lets one more step pass, and is then saved.
        stopping = stop.asked()
        evaluates = step == config.steps or _due(config.eval_every, step)
        saves = step == config.steps or stopping or _due(config.checkpoint_every, step)
        if evaluates or saves:
            progress.step(*pending)  # also refuses to save what is not finite
            pending = None
        if evaluates and not stopping:  # who asks to stop may not have the time
            progress.validation(step, evaluate(config, program, dataset, state.params))
        if saves and saved is not None:
            saved.save(state, step, data=dataset.fingerprint)
        if stopping:
            break
    return state


def evaluate(config: TrainConfig, program: Program, dataset: Dataset, params: Any) -> float:
    """Mean next-token loss in nats over the validation split (its first `eval_batches` batches, if set)."""
    sums = jax.device_put(np.zeros(2, np.float32), NamedSharding(program.mesh, P()))
    size = config.batch_size // config.accumulate
    for i, batch in enumerate(validation_batches(dataset.validation, batch_size=size, own=program.own_rows)):
        if config.eval_batches and i == config.eval_batches:
            break
        sums = program.evaluate(params, sums, program.put(_arrays(batch)))
    total, count = np.asarray(sums)
    return float(total / count) if count else math.nan


def _check_start(config: TrainConfig) -> None:
    """Refuses, by its headers alone, a model to begin with that is not the one of the configuration."""
    if config.init_from is None:
        return
    there, _ = open_model(Path(config.init_from).expanduser())
    a, b = (dataclasses.asdict(model) for model in (there, config.model))
    listed = [f"{key}: {a[key]!r} there, {b[key]!r} here" for key in a if key not in _FREE and a[key] != b[key]]
    if listed:
        raise ValueError(
            f"train: init_from={config.init_from!r} is not of this model ({'; '.join(listed)}) - its parameters would "
            "not mean the same. Use finetune_preset (--model)."
        )


def _load_start(config: TrainConfig, mesh: Mesh, path: Path | None) -> Any:
    """The parameters to begin with; None where they are fresh, or all in a checkpoint."""
    resumed = path is not None and bool(checkpoint.saved_steps(path))
    if config.init_from is None or (config.lora is None and resumed):
        return None
    params = load(config.init_from, mesh=mesh, param_dtype=config.model.param_dtype).params
    if config.lora is None and any(map(split.is_weight, jax.tree.leaves(params, is_leaf=split.is_weight))):
        raise ValueError(
            f"train: init_from={config.init_from!r} has weights of 4 bits or with adapters - they are not trained. "
            "Set lora for 4 bits (--lora rank=16), and merge adapters first."
        )
    return params


def _start(program: Program, saved: Checkpoints | None, dataset: Dataset) -> tuple[TrainState, int]:
    """A fresh state, or the newest saved one; and how many steps it has taken."""
    if saved is None or saved.latest is None:
        return program.init(), 0
    step = saved.latest
    return saved.restore(program.state, step, data=dataset.fingerprint), step


def _checkpoints(path: Path | None, config: TrainConfig) -> contextlib.AbstractContextManager[Checkpoints | None]:
    return contextlib.nullcontext() if path is None else Checkpoints(path, keep=config.keep)


def _microbatches(config: TrainConfig, program: Program, dataset: Dataset, first: int) -> Iterator[dict[str, Any]]:
    """This process's rows of every batch from number `first` on, as (A, own, T), the order of rows kept."""
    own = program.own_rows + program.rows * np.arange(config.accumulate)[:, None]
    facts = {"batch_size": config.batch_size, "seed": config.seed, "start": first, "own": own.ravel()}
    for batch in batches(dataset.train, **facts):
        yield {name: array.reshape(*own.shape, config.seq_len) for name, array in _arrays(batch).items()}


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    return {name: array for name, array in batch._asdict().items() if array is not None}


def _mfu(config: TrainConfig, mesh: Mesh) -> float | None:
    """MFU of one token a second over the mesh; None where the device's peak, or what a token takes, is not known."""
    peak = peak_flops(current_device())
    return (
        None
        if peak is None or config.lora is not None
        else flops_per_token(config.model, config.seq_len) / (peak * mesh.size)
    )


def _bubble(config: TrainConfig, mesh: Mesh) -> float | None:
    schedule = schedule_of(config, mesh)
    return None if schedule is None else schedule.bubble(config.model.n_layers)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
