"""Pictures of a run, in one readable style. Matplotlib is imported when a picture is drawn."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dither.experiment.report import Report

# Okabe-Ito: told apart by people with any colour vision
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#595959"


def preload() -> None:
    """Import Matplotlib in a thread of its own, while compiled rounds run."""

    def load() -> None:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

    threading.Thread(target=load, name="imports").start()


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes with Dither's style; drawn off screen."""
    figure = new_canvas(width=width, height=height, dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        tidy(axis)
    return figure, axes


def new_canvas(*, width: float, height: float, dpi: int = 110) -> Any:
    """An empty figure, drawn off screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def tidy(axis: Any) -> None:
    """Dither's style for one pair of axes."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)


LEAST_RANGE = 0.1  # of an axis of scores: what differs by less does not look like a climb


def score_axis(axis: Any, scores: Iterable[float], references: Mapping[str, float]) -> None:
    """Limits that hold all scores and references and are at least `LEAST_RANGE` apart; references as lines."""
    values = [value for value in (*scores, *references.values()) if math.isfinite(value)]
    low, high = min(values), max(values)
    pad = max(0.05 * (high - low), (LEAST_RANGE - (high - low)) / 2)
    low, high = low - pad, min(high + pad, max(1.0, high))
    axis.set_ylim(min(low, high - LEAST_RANGE), high)
    for name, value in references.items():
        if math.isfinite(value):
            axis.axhline(value, color=GREY, linestyle=":", linewidth=1)
            axis.annotate(
                f"{name} {value:.3f}", (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, 2),
                textcoords="offset points", fontsize=7.5, color=GREY,
            )  # fmt: skip


def headline(figure: Any, title: str, line: str) -> None:
    """A title, and below it what was proven."""
    figure.suptitle(f"{title}\n", fontsize=11, fontweight="bold", x=0.02, ha="left")
    figure.text(0.02, 1 - 0.255 / figure.get_figheight(), line, fontsize=8.5, color=GREY, va="top")


def save(figure: Any, path: Path) -> None:
    """Save a figure whole or not at all; beside a PNG its drawing as SVG."""
    import io

    from matplotlib import rc_context

    from dither.experiment.folder import write_bytes

    kind = path.suffix.lower().lstrip(".") or "png"
    figure.draw_without_rendering()  # the layout is found once, not again for each format
    figure.set_layout_engine(None)  # "none" would draw once more for each format
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dither"}):
        for each, file in ((kind, path), ("svg", path.with_suffix(".svg"))):
            if each != kind and kind != "png":
                continue
            buffer = io.BytesIO()
            figure.savefig(buffer, format=each, metadata={"Date": None} if each == "svg" else None)
            write_bytes(file, buffer.getvalue())


def draw_run(report: Report, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy (or R²) and loss on the test records, against rounds, with what they compare with."""
    figure, axes = new_figure(1, 2)
    rounds = [row["round"] for row in rows]
    accuracy, loss = axes[0]
    line = {"marker": "o" if len(rows) <= 25 else None, "markersize": 3, "linewidth": 1.6}
    classes = "test_accuracy" in rows[-1]
    scores = [row["test_accuracy" if classes else "test_r2"] for row in rows]
    losses = [row["loss"] for row in rows]
    accuracy.plot(rounds, scores, color=BLUE, **line)
    score_axis(accuracy, scores, report.score_lines())
    loss.plot(rounds, losses, color=VERMILION, **line)
    if max(losses) > 0 and math.isfinite(max(losses)):
        loss.set_ylim(0, 1.08 * max(losses))
    for axis, values, name, colour in (
        (accuracy, scores, "test accuracy" if classes else "test R²", BLUE),
        (loss, losses, "test loss (cross-entropy)" if classes else "test loss", VERMILION),
    ):
        axis.annotate(
            f"{values[-1]:.3f}", (rounds[-1], values[-1]), xytext=(4, 0), textcoords="offset points",
            va="center", color=colour, fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        axis.set_ylabel(name)
        axis.set_xlabel("communication round")
        axis.margins(x=0.14)  # room for the last value
    headline(figure, report.title(), report.privacy_line())
    save(figure, path)
