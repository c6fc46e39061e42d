"""The loss curve as a figure. Figures are made without pyplot, so no backend and no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_curve(
    records: Sequence[Mapping[str, Any]],
    *,
    levels: Mapping[str, float] | None = None,
    resumed_at: int | None = None,
    title: str = "",
) -> "Figure":
    """Training and validation loss over steps, in nats a token. `figure.savefig(path)` writes it; a notebook
    shows it after `%matplotlib inline`.

    records: as `Run.records` holds them. levels: named horizontal lines (entropies to beat). resumed_at: the step after
    which the run was taken up again from disk, marked by a vertical line.
    """
    from matplotlib.figure import Figure  # two seconds of import that only a plot should pay for

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a token", title=title)
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = [(r["step"], r[name]) for r in records if name in r]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    for i, (label, level) in enumerate((levels or {}).items()):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{2 + i}", label=f"{label} {level:.2f}")
    if resumed_at is not None:
        axes.axvline(resumed_at, linestyle=":", linewidth=1, color="black", label=f"resumed after step {resumed_at}")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
