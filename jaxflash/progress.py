"""What a run shows and writes down: a progress bar, JSONL records, and the wish to stop."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jaxflash.atomic import write_atomically
from jaxflash.config import TrainConfig


class Progress:
    """Takes every step's metrics in order: checks that they are finite, times, logs and shows them.

    mfu: model FLOP utilisation that one token a second would be, None where the device's peak is unknown (then it is
    neither shown nor recorded). Float32 runs are held against the bfloat16 peak too; packed documents count as full
    rows. bubble: the part of their time that pipeline stages have nothing to do, None without stages.
    """

    def __init__(
        self,
        config: TrainConfig,
        path: Path | None,
        *,
        first: int,
        on_record: Callable[[dict[str, Any]], None] | None,
        quiet: bool,
        mfu: float | None,
        bubble: float | None = None,
    ):
        self.records: list[dict[str, Any]] = []
        self._path = path / "metrics.jsonl" if path is not None and jax.process_index() == 0 else None
        if self._path is not None:
            self.records = read_records(self._path)
        self._on_record, self._mfu, self._bubble = on_record, mfu, bubble
        self._text, self._validation = "{}", ""  # what the bar shows, with a place for the validation loss
        self._speed: float | None = None
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet or jax.process_index() != 0,
        )
        self._task = self._bar.add_task("train", total=config.steps, completed=first, text="")

    def __enter__(self) -> "Progress":
        self._file = None if self._path is None else self._path.open("a")
        self._bar.start()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Waits for the metrics of `step`, then logs them.

        Raises:
          FloatingPointError: the loss or the gradient's norm is not finite.
        """
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise FloatingPointError(
                    f"train: {name}={values[name]} at step {step} - it must be finite. What was saved is from before "
                    "it; lower learning_rate or clip_norm (in another --out), or look at the batch of this step."
                )
        speed = values.pop("tokens") / seconds
        record = {"step": step, **values, "tokens_per_s": speed, "seconds": seconds}
        # The bar shows a running mean; a single step is mostly noise.
        self._speed = speed if self._speed is None else 0.9 * self._speed + 0.1 * speed
        self._text = f"loss {values['loss']:.3f}{{}}  {self._speed:,.0f} tokens/s"
        if self._mfu is not None:
            record["mfu"] = speed * self._mfu
            self._text += f"  MFU {self._speed * self._mfu:.1%}"
        if self._bubble is not None:
            record["bubble"] = self._bubble
            self._text += f"  bubble {self._bubble:.1%}"
        self._log(record)
        self._bar.update(self._task, completed=step, text=self._text.format(self._validation))

    def validation(self, step: int, loss: float) -> None:
        """Logs the validation loss after `step`; the time it took does not count as training."""
        self._validation = f" (validation {loss:.3f})"
        self._log({"step": step, "validation_loss": loss})
        self._bar.update(self._task, text=self._text.format(self._validation))
        self._clock = time.perf_counter()

    def _log(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._on_record is not None:
            self._on_record(record)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into `reason`, for the loop to see; a second one interrupts at once.

    Signals reach the main thread only; elsewhere (a worker thread) this does nothing.
    """

    def __init__(self):
        self.reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether to stop now: the same answer in every process, so that none is left alone in a collective."""
        mine = self.reason is not None
        if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(mine)).any():
            self.reason = self.reason or "a signal to another process"
            return True
        return mine

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line cut short by a kill is dropped."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def keep_records(path: Path, *, up_to: int) -> None:
    """Drops the records of later steps than `up_to`: a resumed run takes those steps again."""
    if jax.process_index() == 0 and path.exists():
        rows = [r for r in read_records(path) if r["step"] <= up_to]
        write_atomically(path, "".join(json.dumps(r) + "\n" for r in rows))
