"""A plan drawn: bound or accuracy against each knob with the choice marked, and the ε-accuracy frontier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from dither.experiment import plots
from dither.experiment.plan.knobs import NAMES, WHOLE, clip_key
from dither.experiment.plan.planner import Plan, by_knob

_FAR = 20.0  # bounds so many times above the initial gap are drawn without it


def draw_plan(made: Plan, path: Path) -> None:
    """One panel a knob that was varied; with measurements, the frontier too."""
    theory = made.mode == "theory"
    if theory and made.bounds is not None:
        points = [price.point for price in made.prices]
        scores, label = made.bounds.total, "bound"
    else:
        trials = made.search.trials if made.search else []
        points = [trial.price.point for trial in trials]
        scores, label = np.array([trial.mean_accuracy for trial in trials]), "accuracy on the proxy"
    keys = [*WHOLE, clip_key(made.spec.method), *([] if theory else ["client_lr"])]
    panels = [(key, by_knob(points, scores, key, smaller=theory)) for key in keys]
    panels = [(key, curve) for key, curve in panels if len(curve) > 1]
    count = len(panels) + bool(made.frontier)
    columns = 2 if count in (2, 4) else min(3, max(1, count))
    rows = math.ceil(max(1, count) / columns)
    figure, axes = plots.new_figure(rows, columns, width=3.4 * columns, height=2.7 * rows + 0.4)
    flat = list(axes.flat)
    for axis, (key, curve) in zip(flat, panels, strict=False):
        _knob(axis, key, curve, float(made.price.point[key]), label)
        if theory and made.bounds is not None:
            axis.set_yscale("log")
            if made.score > _FAR * made.bounds.trivial:
                continue  # a line so far below would flatten the curves: the title says where it is
            axis.axhline(made.bounds.trivial, color=plots.GREY, linestyle=":", linewidth=1)
            axis.annotate(
                "initial gap", (0.98, made.bounds.trivial), xycoords=("axes fraction", "data"), ha="right",
                va="bottom", fontsize=7, color=plots.GREY,
            )  # fmt: skip
    if made.frontier:
        _frontier(flat[len(panels)], made)
    for axis in flat[count:]:
        axis.set_visible(False)
    privacy = made.spec.privacy
    what = f"{made.search.runs} measured runs" if made.search else ""
    if theory and made.bounds is not None:
        what = f"{made.bounds.source}, initial gap {made.bounds.trivial:.3g}"
    figure.suptitle(
        f"Plan for {made.spec.method}: proven ε ≤ {privacy.epsilon:g}, δ = {privacy.delta:g}, "
        f"{made.spec.num_clients} clients ({what})",
        fontsize=10, fontweight="bold", x=0.02, ha="left",
    )  # fmt: skip
    plots.save(figure, path)


def _knob(axis: Any, key: str, curve: list[tuple[float, float]], chosen: float, label: str) -> None:
    values, best = zip(*curve, strict=True)
    axis.plot(values, best, color=plots.BLUE, marker="o", markersize=3.5, linewidth=1.4)
    at = min(range(len(values)), key=lambda i: abs(math.log(values[i] / chosen)))
    axis.plot(values[at], best[at], marker="*", markersize=13, color=plots.VERMILION, linestyle="none", zorder=3)
    axis.set_xscale("log")
    axis.set_xlabel(NAMES[key], fontsize=9)
    axis.set_ylabel(f"best {label}", fontsize=9)
    if len(values) <= 6:
        axis.set_xticks(values, [f"{value:,.4g}" for value in values])
        axis.minorticks_off()
    axis.tick_params(labelsize=8)


def _frontier(axis: Any, made: Plan) -> None:
    measured = [*([made.search.best] if made.search else []), *made.frontier]
    colours = (plots.BLUE, plots.ORANGE, plots.GREEN)
    names = list(dict.fromkeys(_name(trial) for trial in measured))
    for name, colour in zip(names, colours, strict=False):
        line = sorted((t.epsilon, t.mean_accuracy) for t in measured if _name(t) == name)
        axis.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=3.5, linewidth=1.2, label=name)
    best = max((t for t in measured if t.epsilon == made.spec.privacy.epsilon), key=lambda t: t.mean_accuracy)
    axis.plot(best.epsilon, best.mean_accuracy, marker="*", markersize=13, color=plots.VERMILION, zorder=3)
    axis.set_xscale("log")
    ticks = sorted({trial.epsilon for trial in measured})
    axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("proven ε", fontsize=9)
    axis.set_ylabel("accuracy on the proxy", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(frameon=False, fontsize=7, title="sent and received", title_fontsize=7)


def _name(trial: Any) -> str:
    return f"{bytes_text(trial.price.bytes_per_client)} a client"


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
