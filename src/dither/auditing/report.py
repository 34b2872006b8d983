"""Pictures of an audit: the attacker's ROC on log axes, and attacked ε against trials."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dither.auditing.attack import Audit
from dither.auditing.rows import Row
from dither.experiment import folder as runs
from dither.experiment import plots

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION, plots.GREY)


def save(report: Audit, folder: Path) -> list[Path]:
    """audit.json, roc.png and trials.png; returns what was written."""
    paths = [folder / "audit.json", folder / "audit-roc.png", folder / "audit-trials.png"]
    runs.write_text(paths[0], runs.to_json(report.to_dict(), indent=2) + "\n")
    draw_roc(report, paths[1])
    drawn = draw_trials(report, paths[2])
    return paths if drawn else paths[:2]


def draw_roc(report: Audit, path: Path) -> None:
    """True against false positive rate of each view, with the most that the claim and the proof allow."""
    figure, axes = plots.new_figure(1, 1, width=5.2, height=4.4)
    axis = axes[0][0]
    fewest = min(len(row.scores_in) for row in report.found)
    floor = 1 / (2 * max(len(row.scores_in) for row in report.found))
    grid = np.geomspace(floor, 1.0, 400)
    for row, colour in zip(report.found, COLOURS, strict=False):
        false, true = roc(row.scores_in, row.scores_out)
        # Between two points of the curve lies a straight line, which log axes would bend.
        axis.plot(grid, np.interp(grid, false, true), color=colour, linewidth=1.6, label=_name(row))
    axis.plot(grid, grid, color=plots.GREY, linewidth=0.8, linestyle=":", label="a guess")
    # One line a distinct limit: (ε, δ)-DP allows TPR <= e^ε FPR + δ.
    for which, style in (("claimed", "--"), ("proven", "-.")):
        values = {(row[which], row["delta"]) for row in report.rows if row[which] is not None}
        for value, delta in sorted(values)[:2]:
            if math.isfinite(float(value)) and float(value) < 200:
                limit = np.minimum(1.0, math.exp(float(value)) * grid + delta)
                axis.plot(
                    grid,
                    limit,
                    color="black",
                    linewidth=1.0,
                    linestyle=style,
                    label=f"{which} ε = {float(value):.3g}",
                )
    axis.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1.1))
    axis.set_xlabel("false positive rate")
    axis.set_ylabel("true positive rate")
    axis.legend(frameon=False, fontsize=7.5, loc="lower right")
    axis.set_title(f"{report.spec.method}: {fewest:,} trials a world", fontsize=10, loc="left")
    plots.save(figure, path)


def draw_trials(report: Audit, path: Path) -> bool:
    """Attacked ε against trials, with claim and proof. False where no view has a curve."""
    curves = [(row, plain) for row, plain in zip(report.found, report.rows, strict=True) if plain["reached"]]
    if not curves:
        return False
    figure, axes = plots.new_figure(1, 1, width=5.2, height=4.0)
    axis = axes[0][0]
    top = 0.0
    for (row, plain), colour in zip(curves, COLOURS, strict=False):
        trials = [step["trials"] for step in plain["reached"]]
        for form, style, words in (("counts", "-", "counts"), ("mu", "--", "mu-GDP form")):
            if form in plain["reached"][-1]:
                values = [step[form] for step in plain["reached"]]
                top = max(top, *values)
                axis.plot(
                    trials, values, style, color=colour, marker="o", markersize=3, label=f"{_name(row)}, {words}"
                )
    for which, style in (("claimed", "--"), ("proven", "-.")):
        for value in sorted({float(r[which]) for r in report.rows if r[which] is not None})[:2]:
            if value <= 4 * max(top, 0.25):
                axis.axhline(
                    value, color="black", linewidth=1.0, linestyle=style, label=f"{which} ε = {value:.3g}"
                )
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("trials in each world")
    axis.set_ylabel(f"attacked ε, {report.confidence:.0%} confidence")
    axis.legend(frameon=False, fontsize=7.5)
    axis.set_title(f"{report.spec.method}: what so many trials show", fontsize=10, loc="left")
    plots.save(figure, path)
    return True


def roc(scores_in: np.ndarray, scores_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(false positive rates, true positive rates) as the threshold falls, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([scores_in, scores_out]))[::-1]
    if len(thresholds) > 4000:
        thresholds = thresholds[np.unique(np.geomspace(1, len(thresholds), 4000).astype(int) - 1)]
    false = 1 - np.searchsorted(np.sort(scores_out), thresholds, side="left") / len(scores_out)
    true = 1 - np.searchsorted(np.sort(scores_in), thresholds, side="left") / len(scores_in)
    return np.concatenate([[0.0], false, [1.0]]), np.concatenate([[0.0], true, [1.0]])


def _name(row: Row) -> str:
    words = {"upload": "every upload", "sum": "sums", "broadcast": "broadcasts", "final": "final model"}
    seen = "one upload" if row.unit == "message" else words[row.view]
    return f"{seen} ({row.design})" if row.unit == "one run" else seen
