"""The picture of a sweep: accuracy against rounds, one line a setting; final accuracy against a varied number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dither.experiment import plots
from dither.experiment.sweep.result import Sweep, mean_and_error

# Okabe and Ito's colours, told apart with any colour vision; when they are used up the dashes change.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*"
MOST_LINES = len(_COLOURS) * len(_DASHES)
_BANDS = 8  # settings up to which the spread is drawn as a band: more would cover each other


def draw(found: Sweep, path: Path) -> None:
    """Mean over seeds and its spread."""
    settings = found.settings()
    lines = settings[:MOST_LINES]
    rows = min(len(lines), 24)
    height = max(4.0, 0.24 * rows + 1.2)
    figure, axes = plots.new_figure(1, 2, width=11.0, height=height)
    curves, finals = axes[0]
    handles = []
    for number, (setting, runs) in enumerate(lines):
        handles.append(_curve(curves, found, runs, _name(setting), number, band=_shade(len(lines))))
    curves.set_xlabel("communication round")
    curves.set_ylabel("test accuracy")
    most = max(len(runs) for _, runs in settings)
    what = f"mean of {most} seeds" if most > 1 else "one seed each"
    band = ", band: ± one standard deviation" if most > 1 and len(lines) <= _BANDS else ""
    left_out = f"; {len(settings) - len(lines)} more settings in curves.csv" if len(settings) > len(lines) else ""
    curves.set_title(what + band + left_out, fontsize=8.5, loc="left", color=plots.GREY)
    _finals(finals, found, lines)
    spec = found.specs[0]
    title = f"{spec.method} on {spec.data.name}: {len(found)} runs"
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
    if any(setting for setting, _ in lines):
        keys = [key for key in found.keys if key != "seed"]
        figure.legend(
            handles=handles,
            loc="outside right upper",
            frameon=False,
            fontsize=8,
            title=", ".join(_short(key) for key in keys),
            title_fontsize=8,
            ncols=1 + (len(handles) - 1) // 24,
        )
    plots.save(figure, path)


def _curve(axis: Any, found: Sweep, runs: list[int], label: str, number: int, *, band: float) -> Any:
    rounds = [row["round"] for row in found[runs[0]].metrics]
    alike = [run for run in runs if [row["round"] for row in found[run].metrics] == rounds]
    values = np.array([[row["test_accuracy"] for row in found[run].metrics] for run in alike])
    mean = values.mean(axis=0)
    style = _style(number)
    (line,) = axis.plot(rounds, mean, label=label, linewidth=1.6, **style)
    if len(rounds) == 1:
        line.set_marker("o")
    if band and len(alike) > 1:
        spread = values.std(axis=0, ddof=1)
        axis.fill_between(rounds, mean - spread, mean + spread, color=style["color"], alpha=band, linewidth=0)
    return line


def _finals(axis: Any, found: Sweep, lines: list[tuple[dict[str, Any], list[int]]]) -> None:
    """Final accuracy against the first varied number, one line for each setting of the other keys."""
    key = next((key for key in found.keys if key != "seed" and _numeric([s[key] for s, _ in lines])), None)
    axis.set_ylabel("final test accuracy")
    if key is None:
        _bars(axis, found, lines)
        return
    groups: dict[str, list[tuple[float, float, float, int]]] = {}
    for number, (setting, runs) in enumerate(lines):
        others = _name({name: value for name, value in setting.items() if name != key})
        mean, error = mean_and_error([found[run].metrics[-1]["test_accuracy"] for run in runs])
        groups.setdefault(others, []).append((float(setting[key]), mean, error or 0.0, number))
    for at, (others, points) in enumerate(groups.items()):
        points.sort()
        x, y, errors, numbers = (np.array(column) for column in zip(*points, strict=True))
        axis.plot(x, y, color=plots.GREY, linewidth=1.0, linestyle=_DASHES[at % len(_DASHES)], zorder=1)
        marker = _MARKERS[at % len(_MARKERS)]
        for i, number in enumerate(numbers):
            axis.errorbar(
                x[i], y[i], errors[i], fmt=marker, color=_style(int(number))["color"], markersize=5, capsize=3
            )
        if len(groups) > 1:
            axis.annotate(
                others, (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7.5,
                color=plots.GREY,
            )  # fmt: skip
    values = [float(setting[key]) for setting, _ in lines]
    finite = [value for value in values if np.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) >= 10:
        axis.set_xscale("log")
        ticks = sorted(set(finite))
        if len(ticks) <= 8:
            from matplotlib.ticker import NullLocator

            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(key)
    axis.margins(x=0.08 if len(groups) == 1 else 0.2)
    if any(len(runs) > 1 for _, runs in lines):
        names = [_short(name) for name in found.keys if name not in (key, "seed")]
        labels = f", labels: {', '.join(names)}" if len(groups) > 1 else ""
        axis.set_title("mean ± standard error over seeds" + labels, fontsize=8.5, loc="left", color=plots.GREY)


def _bars(axis: Any, found: Sweep, lines: list[tuple[dict[str, Any], list[int]]]) -> None:
    """Nothing numeric varies: every run as a dot, side by side."""
    for number, (_, runs) in enumerate(lines):
        values = [found[run].metrics[-1]["test_accuracy"] for run in runs]
        axis.plot([number] * len(values), values, "o", markersize=4, color=_style(number)["color"], alpha=0.6)
        axis.plot([number - 0.25, number + 0.25], [np.mean(values)] * 2, color=_style(number)["color"])
    names = [_name(setting) or "all runs" for setting, _ in lines]
    axis.set_xticks(range(len(lines)), names, rotation=30 if sum(map(len, names)) > 40 else 0, fontsize=8)
    axis.set_xlim(-0.6, len(lines) - 0.4)
    axis.set_title("every seed, and their mean", fontsize=8.5, loc="left", color=plots.GREY)


def _shade(lines: int) -> float:
    """How dark a band is; 0: none."""
    return 0.15 if lines <= 4 else 0.07 if lines <= _BANDS else 0.0


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
    }


def _numeric(values: list[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and len(set(numbers)) > 1 and all(map(np.isfinite, numbers))


def _short(key: str) -> str:
    return key.removeprefix("method_options.")


def _name(setting: dict[str, Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in setting.values())
