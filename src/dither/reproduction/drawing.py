"""Pictures of figures, in one style: a row of panels for each view, mean lines with bands, legends outside."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dither.experiment.plots import GREY, new_canvas, tidy
from dither.reproduction.figure import AXIS_LABELS, VIEW_TITLES, Figure, Line, Panel, View

# Okabe-Ito without its yellow, which is lost on white; then the same colours with other marks.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
BAND = 2.0  # standard errors
LEAST_RANGE = 0.02  # of an axis of accuracies: what differs by less does not look like a climb


class Series(NamedTuple):
    """A line's numbers: x, and a row of values a seed (a single row for a formula)."""

    x: np.ndarray
    values: np.ndarray
    seeds: list[int]

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def error(self) -> np.ndarray:
        """Standard error of the mean; 0 where there is one seed, which has no spread to show."""
        count = len(self.values)
        if count < 2:
            return np.zeros(self.values.shape[1])
        return np.asarray(self.values.std(axis=0, ddof=1) / np.sqrt(count))


def series(view: View, panel: Panel, line: Line) -> Series:
    """A line's numbers, from where the panel begins."""
    points = _series(view, panel, line)
    shown = points.x >= panel.first
    return Series(points.x[shown], points.values[:, shown], points.seeds)


def _series(view: View, panel: Panel, line: Line) -> Series:
    if line.formula is not None:
        x, y = (np.asarray(each, float) for each in line.formula(view))
        shown = x <= (np.inf if line.until is None else line.until(view, 0))
        return Series(x[shown], y[None, shown], [])
    if panel.axis is None:
        rounds, values = view.curve(line.values, panel.metric, line.until)
        scale = panel.per_round(view, line.values) if panel.per_round else 1.0
        return Series(scale * np.asarray(rounds, float), values, view.seeds)
    finals = [view.final({**line.values, **more}, panel.metric, line.until) for _, more in panel.axis.points]
    places = np.array([x for x, _ in panel.axis.points], float)
    order = np.argsort(places)
    return Series(places[order], np.stack(finals, axis=1)[:, order], view.seeds)


def draw(figure: Figure, views: Sequence[View]) -> Any:
    """The figure as a matplotlib figure: rows of panels for each view."""
    rows = [
        (view, [panel for panel in panels if panel.row == number])
        for view in views
        for panels in [figure.panels(view)]
        for number in sorted({panel.row for panel in panels})
    ]
    columns = max(len(panels) for _, panels in rows)
    canvas = new_canvas(width=max(3.25 * columns + 2.5, 8.6), height=2.75 * len(rows) + 0.55)
    styles: dict[str, int] = {}
    seeds = views[0].seeds
    parts = canvas.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for (view, panels), part in zip(rows, parts, strict=True):
        axes = part.subplots(1, len(panels), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, panels, strict=False):
            _draw_panel(axis, view, panel, styles, handles)
        _share_scale(axes, panels)
        part.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=8.5)
        if len(views) > 1 and panels[0].row == 0:
            title = VIEW_TITLES[view.kind] + (
                "" if len(view.seeds) == len(seeds) else f" ({len(view.seeds)} seeds)"
            )
            part.suptitle(title, x=0.012, ha="left", fontsize=9.5, color=GREY, fontweight="bold")
    spread = f"mean and ±{BAND:g} standard errors over {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    if not seeds:
        spread = "formulas, no runs"
    name = f"{figure.id}   {figure.title}"
    canvas.suptitle(f"{name}\n", x=0.012, ha="left", fontsize=11, fontweight="bold")
    canvas.text(
        0.012, 1 - 0.36 / canvas.get_figheight(), f"{spread}; scale: {views[0].scale_name}", fontsize=8, color=GREY
    )
    return canvas


def _draw_panel(axis: Any, view: View, panel: Panel, styles: dict[str, int], handles: dict[str, Any]) -> None:
    tidy(axis)
    positive, largest, smallest = True, 0.0, np.inf
    for line in panel.lines:
        points = series(view, panel, line)
        number = styles.setdefault(line.style or line.label, len(styles))
        colour = COLOURS[number % len(COLOURS)]
        marked = panel.axis is not None
        mean, error = points.mean, points.error
        with np.errstate(invalid="ignore"):
            (handle,) = axis.plot(
                points.x,
                mean,
                color=colour,
                linestyle="--" if line.dashed else "-",
                linewidth=1.7,
                marker=MARKS[number % len(MARKS)] if marked else None,
                markersize=4.5,
            )
            if len(points.values) > 1:
                low, high = mean - BAND * error, mean + BAND * error
                if panel.log:  # below 0 a logarithmic axis has nothing to show: the same factor down as up
                    low = np.where(low > 0, low, mean**2 / high)
                axis.fill_between(points.x, low, high, color=colour, alpha=0.16, linewidth=0)
        if line.until is not None and not marked:
            axis.plot(points.x[-1:], mean[-1:], color=colour, marker="o", markersize=5)
        handles.setdefault(line.label, handle)
        finite = mean[np.isfinite(mean)]
        if len(finite):
            positive &= bool((finite > 0).all())
            largest, smallest = max(largest, finite.max()), min(smallest, finite.min())
    # Lines that diverge would flatten the rest: where values span a thousandfold the axis is logarithmic.
    if positive and (panel.log or largest > 1000 * max(smallest, 1e-12)):
        axis.set_yscale("log")
    if panel.axis is not None and panel.axis.log:
        axis.set_xscale("log")
        ticks = sorted(x for x, _ in panel.axis.points)
        places = np.log(ticks) / max(np.ptp(np.log(ticks)), 1e-9)
        if np.min(np.diff(places), initial=1.0) > 0.12:  # room for a label at each point
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
    else:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(panel.axis.label if panel.axis is not None else panel.x_label, fontsize=9)
    axis.set_ylabel(panel.y_label or AXIS_LABELS[panel.metric], fontsize=9)
    axis.tick_params(labelsize=8)
    if panel.title:
        axis.set_title(panel.title, fontsize=9.5, loc="left")
    axis.margins(x=0.03)


def _share_scale(axes: Sequence[Any], panels: Sequence[Panel]) -> None:
    """Panels of a row that show the same metric have the same vertical axis, so that they can be compared."""
    kinds = [(panel.metric, panel.axis is None, panel.first) for panel in panels]
    for kind in set(kinds):
        alike = [axis for axis, other in zip(axes, kinds, strict=False) if other == kind]
        limits = [axis.get_ylim() for axis in alike]
        scale = "log" if any(axis.get_yscale() == "log" for axis in alike) else "linear"
        low, high = min(a for a, _ in limits), max(b for _, b in limits)
        if kind[0] == "test_accuracy" and high - low < LEAST_RANGE:
            low, high = (low + high - LEAST_RANGE) / 2, (low + high + LEAST_RANGE) / 2
        for axis in alike:
            if scale == "log" and low > 0:
                axis.set_yscale(scale)
            axis.set_ylim(low, high)
            if axis.get_yscale() == "log" and high / low < 50:
                _plain_ticks(axis.yaxis)


def _plain_ticks(axis: Any) -> None:
    """0.2, 0.5, 1 instead of powers of ten, on a logarithmic axis of few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def encoded(canvas: Any, kind: str) -> bytes:
    """A figure as PNG or SVG; the same figure gives the same bytes."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dither", "svg.fonttype": "none"}):
        canvas.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def to_csv(figure: Figure, views: Sequence[View]) -> str:
    """Every number that the figure shows, one a line; a panel that repeats the end of another adds none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["view", "panel", "line", "metric", "x", "seed", "value"])
    for view in views:
        name = view.kind
        for panel in (each for each in figure.panels(view) if not each.first):
            for line in panel.lines:
                points = series(view, panel, line)
                for seed, values in zip(points.seeds or ("",), points.values, strict=True):
                    start = [name, panel.title, line.label, panel.metric]
                    writer.writerows(
                        [*start, f"{x:g}", seed, f"{y:.6g}"] for x, y in zip(points.x, values, strict=True)
                    )
    return text.getvalue()
