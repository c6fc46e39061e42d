"""The two-minute demo: a transformer learns Shakespeare, is stopped, and goes on from disk."""

import dataclasses
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxflash.checkpoint import saved_steps
from jaxflash.config import Sampling, TrainConfig, train_preset
from jaxflash.data import ngram_entropy
from jaxflash.generate import generate
from jaxflash.language_model import LanguageModel
from jaxflash.model import count_parameters, init_params
from jaxflash.plot import loss_curve
from jaxflash.train import open_data, train
from pallas_kernels.device import current_device

RESUME_STEPS = 20
_PROMPT = "KING. "


class DemoError(RuntimeError):
    """The demo did not show what it promises."""


def demo_config(out: str | Path, *, steps: int, **changes: object) -> TrainConfig:
    """The tiny preset on the shipped corpus; the learning rate already knows of the steps after the resume."""
    settings: dict[str, object] = dict(
        out=str(out),
        steps=steps,
        schedule_steps=steps + RESUME_STEPS,
        batch_size=16,
        eval_every=max(steps // 5, 1),
        eval_batches=16,
    )
    return train_preset("tiny", **(settings | changes))


def demo(config: TrainConfig, console: Console | None = None) -> Path | None:
    """Trains `config` (see `demo_config`), samples, stops, resumes for 20 steps; returns the path of the curve's PNG.

    Interrupted, it returns None and goes on from there when called again.

    Raises:
      ValueError: `config.out` holds a demo that is past `config.steps`, or another run.
      DemoError: the validation loss did not fall below the corpus's bigram entropy.
    """
    console = Console() if console is None else console
    if config.out is None:
        raise ValueError("demo: out=None - a folder is required, to resume from. Set out.")
    out = Path(config.out)
    if (saved := saved_steps(out)) and saved[-1] > config.steps:
        raise ValueError(
            f"demo: {str(out)!r} holds a demo at step {saved[-1]} already. Remove it, or give another --out."
        )
    data = open_data(config)
    orders = {"unigram entropy": 1, "bigram entropy": 2}
    levels = {name: ngram_entropy(data.validation, order) for name, order in orders.items()}
    console.print(
        f"{count_parameters(config.model):,} parameters on {current_device()}, {data.train.targets:,} training tokens "
        f"in {len(data.train)} rows of {config.seq_len}, into {out}/"
    )
    fresh = LanguageModel(config.model, init_params(config.model, config.seed), data.tokenizer)
    _show(console, "before training", fresh)

    start = time.perf_counter()
    run = train(config)
    if run.stopped is None:
        console.print(f"trained to step {config.steps} in {time.perf_counter() - start:.0f} s")
        _show(console, f"after step {config.steps}", run.model)
        run = train(dataclasses.replace(config, steps=config.steps + RESUME_STEPS))
    if run.stopped is not None:
        console.print(f"{run.stopped} after step {int(run.state.step)}: saved, the same command goes on from there")
        return None

    path = out / "loss.png"
    loss_curve(run.records, levels=levels, resumed_at=config.steps, title="jaxflash demo").savefig(path, dpi=120)
    around = [(s, x) for s, x in zip(*run.curve("loss"), strict=True) if abs(s - config.steps) <= 3]
    console.print(
        f"resumed from {out}/checkpoints/{config.steps} for {RESUME_STEPS} more steps; the curve goes on: "
        + ", ".join(f"step {s} {x:.3f}" for s, x in around)
    )
    final, bigram = run.curve("validation_loss")[1][-1], levels["bigram entropy"]
    table = Table("", "nats a token", title="validation split")
    for name, level in {**levels, "the trained model": final}.items():
        table.add_row(name, f"{level:.3f}")
    console.print(table)
    console.print(f"loss curve: {path}")
    if final >= bigram:
        raise DemoError(
            f"demo: validation loss {final:.3f} is not below the bigram entropy {bigram:.3f}. Train longer."
        )
    return path


def _show(console: Console, title: str, model: LanguageModel) -> None:
    sampling = Sampling(max_new_tokens=160, temperature=0.8, top_p=0.95)
    console.print(Panel(Text(_PROMPT + generate(model, _PROMPT, sampling)), title=title))
