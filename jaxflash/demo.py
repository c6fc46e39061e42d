"""The two-minute demo: a transformer learns Shakespeare, is stopped, and goes on from disk."""

import dataclasses
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from jaxflash.config import Sampling, TrainConfig, train_preset
from jaxflash.data import ngram_entropy, open_dataset
from jaxflash.generate import generate
from jaxflash.language_model import LanguageModel
from jaxflash.model import count_parameters, init_params
from jaxflash.plot import loss_curve
from jaxflash.tokenizer import load_tokenizer
from jaxflash.train import train

RESUME_STEPS = 20
_PROMPT = "KING. "


def demo_config(out: Path, *, steps: int, **changes: object) -> TrainConfig:
    """The tiny preset on the shipped corpus; the learning rate already knows of the steps after the resume."""
    settings: dict[str, object] = dict(
        out=str(out), steps=steps, schedule_steps=steps + RESUME_STEPS, eval_every=max(steps // 5, 1), eval_batches=16
    )
    return train_preset("tiny", **(settings | changes))


def demo(config: TrainConfig, console: Console | None = None) -> Path:
    """Trains `config` (see `demo_config`), samples, stops, resumes for 20 steps; returns the path of the curve's PNG.

    Raises:
      RuntimeError: the validation loss did not fall below the corpus's bigram entropy.
    """
    console = Console() if console is None else console
    out = Path(config.out or "")
    tokenizer = load_tokenizer(config.tokenizer)
    data = open_dataset(
        config.data,
        tokenizer,
        seq_len=config.seq_len,
        packing=config.packing,
        vocab_size=config.model.vocab_size,
        validation_fraction=config.validation_fraction,
    )
    levels = {
        f"{name} entropy": ngram_entropy(data.validation, order) for name, order in (("unigram", 1), ("bigram", 2))
    }
    console.print(
        f"[bold]{count_parameters(config.model):,} parameters[/] on {jax.devices()[0].device_kind}, "
        f"{data.train.targets:,} training tokens in {len(data.train)} rows of {config.seq_len}, into {out}/"
    )
    fresh = LanguageModel(config.model, init_params(config.model, config.seed), tokenizer)
    _show(console, "before training", fresh)

    start = time.perf_counter()
    run = train(config)
    if run.stopped:
        console.print(
            f"Stopped by {run.stopped} after step {int(run.state.step)}; the same command goes on from there."
        )
        return out
    console.print(f"trained to step {int(run.state.step)} in {time.perf_counter() - start:.0f} s")
    _show(console, f"after step {int(run.state.step)}", run.model)

    stopped_at = int(run.state.step)
    resumed = train(dataclasses.replace(config, steps=config.steps + RESUME_STEPS))
    path = out / "loss.png"
    loss_curve(resumed.records, levels=levels, resumed_at=config.steps, title="jaxflash demo").savefig(path, dpi=120)

    steps, losses = resumed.curve("loss")
    around = [(s, x) for s, x in zip(steps, losses, strict=True) if abs(s - config.steps) <= 3]
    console.print(
        f"resumed from {out}/checkpoints/{stopped_at} and took {RESUME_STEPS} more steps; the curve goes on: "
        + ", ".join(
            f"{'[bold]' if s > config.steps else ''}{s}: {x:.3f}{'[/]' if s > config.steps else ''}" for s, x in around
        )
    )
    final = resumed.curve("validation_loss")[1][-1]
    table = Table("", "nats a token", title="validation split")
    for name, level in levels.items():
        table.add_row(name, f"{level:.3f}")
    table.add_row("[bold]the trained model[/]", f"[bold]{final:.3f}[/]")
    console.print(table)
    console.print(f"loss curve: {path}")
    bigram = levels["bigram entropy"]
    if final >= bigram:
        raise RuntimeError(f"demo: validation loss {final:.3f} is not below the bigram entropy {bigram:.3f}.")
    return path


def _show(console: Console, title: str, model: LanguageModel) -> None:
    sampling = Sampling(max_new_tokens=160, temperature=0.8, top_p=0.95)
    console.print(Panel(_PROMPT + generate(model, _PROMPT, sampling), title=title))
