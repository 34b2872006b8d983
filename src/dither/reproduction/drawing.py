"""Pictures of figures in one style, one for each view, as wide as a column of a paper or a phone."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from dither.experiment.plots import GREY, new_canvas, tidy
from dither.reproduction.figure import AXIS_LABELS, VIEW_TITLES, Figure, Line, Panel, View, paper

# Okabe-Ito without its yellow, which is lost on white; then the same colours with other marks.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
BAND = 2.0  # standard errors
WIDTH, HEIGHT = 3.45, 1.5  # inches: a column of a paper, or a phone; and a row of panels
DPI = 220
TITLE, TEXT, SMALL = 7.5, 7.0, 6.5  # points
LEAST_RATIO = 3.0  # of the values on a logarithmic axis
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


def draw(figure: Figure, view: View) -> Any:
    """A view as a matplotlib figure: two panels beside each other (three that are alike), and one legend for rows
    that share it."""
    panels = figure.panels(view)
    blocks: list[tuple[tuple[str, ...], list[list[Panel]]]] = []  # labels, and the rows of panels that have them
    for number in sorted({panel.row for panel in panels}):
        row = [panel for panel in panels if panel.row == number]
        labels = tuple(dict.fromkeys(line.label for panel in row for line in panel.lines if _in_legend(panel)))
        if not blocks or not set(labels) <= set(blocks[-1][0]):
            blocks.append((labels, []))
        columns = 3 if len(row) == 3 and len({_kind(panel) for panel in row}) == 1 else 2
        blocks[-1][1].extend(row[at : at + columns] for at in range(0, len(row), columns))
    keys = [-(-len(labels) // _legend_columns(labels)) for labels, _ in blocks]
    heights = [HEIGHT * len(rows) + 0.13 * lines + 0.08 for (_, rows), lines in zip(blocks, keys, strict=True)]
    title = fill(f"{paper(figure.paper).title} Fig. {figure.number}: {figure.title}", 52)
    head = 0.34 + 0.12 * title.count("\n")
    canvas = new_canvas(width=WIDTH, height=head + sum(heights), dpi=DPI)
    canvas.get_layout_engine().set(w_pad=0.02, h_pad=0.02)
    parts = canvas.subfigures(len(blocks) + 1, 1, height_ratios=[head, *heights], squeeze=False)[:, 0]
    parts[0].text(0.01, 1 - 0.04 / head, title, va="top", fontsize=TITLE, fontweight="bold", linespacing=1.1)
    parts[0].text(0.01, 0.0, _subtitle(view), va="bottom", fontsize=SMALL, color=GREY)
    styles: dict[str, int] = {}
    for (labels, rows), part in zip(blocks, parts[1:], strict=True):
        handles: dict[str, Any] = {}
        shown: list[tuple[Any, Panel]] = []
        for row, strip in zip(rows, part.subfigures(len(rows), 1, squeeze=False)[:, 0], strict=True):
            axes = strip.subplots(1, len(row), squeeze=False)[0]
            for axis, panel in zip(axes, row, strict=True):
                _draw_panel(axis, view, panel, styles, handles)
                shown.append((axis, panel))
                if axis is not axes[0] and _kind(panel) == _kind(row[0]):  # it has the axis of its neighbour
                    axis.set_ylabel("")
                    axis.tick_params(labelleft=False)
                if len(row) == 3 and axis is not axes[1]:  # no room for three labels
                    axis.set_xlabel("")
        _share_scale([axis for axis, _ in shown], [_kind(panel) for _, panel in shown])
        part.legend(
            handles.values(), handles.keys(), loc="outside lower center", frameon=False, fontsize=SMALL,
            ncols=_legend_columns(labels), handlelength=2.6, columnspacing=1.0, borderaxespad=0.0, borderpad=0.1,
        )  # fmt: skip
    return canvas


def _kind(panel: Panel) -> tuple[str, bool, float]:
    """Panels of a block with the same kind have the same vertical axis, so that they can be compared."""
    return panel.metric, panel.axis is None, panel.first


def _in_legend(panel: Panel) -> bool:
    """Where the vertical axis names the only line, a legend need not."""
    return len(panel.lines) > 1 or not panel.y_label


def _legend_columns(labels: Sequence[str]) -> int:
    """As many names beside each other as there is room for: a character takes about 0.046 inches, a line 0.42."""
    for columns in range(len(labels), 1, -1):
        parts = np.array_split(np.array([0.42 + 0.046 * len(label) for label in labels]), columns)
        if sum(part.max() for part in parts) <= WIDTH:
            return columns
    return 1


def _subtitle(view: View) -> str:
    seeds = len(view.seeds)
    spread = f"mean ± {BAND:g} standard errors, {seeds} seeds" if seeds > 1 else "one seed"
    scale = "" if view.scale_name == "full" else f"; scale {view.scale_name}"
    return f"{VIEW_TITLES[view.kind]}; {spread if seeds else 'formulas, no runs'}{scale}"


def _pretty(text: str) -> str:
    """Powers of ten and indices as in print."""
    return re.sub(r"1e-0?(\d+)", r"10$^{-\1}$", text).replace("R_th", r"$R_\mathrm{th}$")


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
                linestyle=(0, (4, 3)) if line.dashed else "-",
                linewidth=1.1,
                marker=MARKS[number % len(MARKS)] if marked else None,
                markersize=2.8,
            )
            if len(points.values) > 1:
                low, high = mean - BAND * error, mean + BAND * error
                if panel.log:  # below 0 a logarithmic axis has nothing to show: the same factor down as up
                    low = np.where(low > 0, low, mean**2 / high)
                axis.fill_between(points.x, low, high, color=colour, alpha=0.16, linewidth=0)
        if line.until is not None and not marked:
            axis.plot(points.x[-1:], mean[-1:], color=colour, marker="o", markersize=3)
        if _in_legend(panel):
            handles.setdefault(line.label, handle)
        finite = mean[np.isfinite(mean)]
        if len(finite):
            positive &= bool((finite > 0).all())
            largest, smallest = max(largest, finite.max()), min(smallest, finite.min())
    # Lines that diverge would flatten the rest: where values span a thousandfold the axis is logarithmic. Values
    # that are close together need no such axis.
    if positive and largest > (LEAST_RATIO if panel.log else 1000) * max(smallest, 1e-12):
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
    axis.set_xlabel(panel.axis.label if panel.axis is not None else panel.x_label, fontsize=TEXT, labelpad=1)
    y_label = fill(panel.y_label or AXIS_LABELS[panel.metric], 24, break_on_hyphens=False)
    axis.set_ylabel(y_label, fontsize=TEXT, labelpad=1)
    axis.tick_params(labelsize=SMALL, length=2, pad=1.5)
    if panel.title:
        axis.set_title(_pretty(panel.title), fontsize=TEXT, loc="left", pad=3)
    axis.margins(x=0.03)


def _share_scale(axes: Sequence[Any], kinds: Sequence[tuple[str, bool, float]]) -> None:
    """The same vertical axis for panels of the same kind."""
    for kind in set(kinds):
        alike = [axis for axis, other in zip(axes, kinds, strict=True) if other == kind]
        limits = [axis.get_ylim() for axis in alike]
        scale = "log" if any(axis.get_yscale() == "log" for axis in alike) else "linear"
        low, high = min(a for a, _ in limits), max(b for _, b in limits)
        if kind[0] == "test_accuracy":
            if kind[1:] == (True, 0.0):
                low, high = _without_the_start(alike, low, high)
            if high - low < LEAST_RANGE:
                low, high = (low + high - LEAST_RANGE) / 2, (low + high + LEAST_RANGE) / 2
        for axis in alike:
            if scale == "log" and low > 0:
                axis.set_yscale(scale)
            axis.set_ylim(low, high)
            if axis.get_yscale() == "log" and high / low < 50:
                _plain_ticks(axis.yaxis)


def _without_the_start(axes: Sequence[Any], low: float, high: float) -> tuple[float, float]:
    """The limits of an axis of accuracies. If round 0 lies so far below the rest that it would fill a third
    of the axis, each panel says in words where it starts."""
    curves = [np.asarray(line.get_ydata()) for axis in axes for line in axis.lines if len(line.get_ydata()) > 1]
    starts = [curve[0] for curve in curves]
    least, most = min(curve[1:].min() for curve in curves), max(curve.max() for curve in curves)
    if least - min(starts) < (most - least) / 2:
        return low, high
    start = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(starts), max(starts))))
    for axis in axes:
        axis.annotate(
            f"starts at {start}", (0, 0), (12, 2), xycoords="axes fraction", textcoords="offset points",
            fontsize=SMALL, color=GREY,
        )  # fmt: skip
    return float(least - 0.3 * (most - least)), float(most + 0.15 * (most - least))


def _plain_ticks(axis: Any) -> None:
    """0.2, 0.5, 1 instead of powers of ten, on a logarithmic axis of few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def encoded(canvas: Any, kind: str) -> bytes:
    """A figure as PNG, SVG or PDF; the same figure gives the same bytes."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    with mpl.rc_context({"svg.hashsalt": "dither", "svg.fonttype": "none", "pdf.fonttype": 42}):
        canvas.savefig(buffer, format=kind, metadata=undated[kind])
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
