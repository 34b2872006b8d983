"""Pictures of a run, in one readable style. Matplotlib is imported when a picture is drawn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def save(figure: Any, path: Path) -> None:
    """Save a figure whole or not at all."""
    import io

    from dither.experiment.folder import write_bytes

    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".") or "png")
    write_bytes(path, buffer.getvalue())


def draw_run(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, subtitle: str) -> None:
    """Accuracy (or R²) and loss on the test records, against rounds."""
    figure, axes = new_figure(1, 2)
    rounds = [row["round"] for row in rows]
    accuracy, loss = axes[0]
    marker = "o" if len(rows) <= 25 else None
    line = {"marker": marker, "markersize": 3, "linewidth": 1.6}
    classes = "test_accuracy" in rows[-1]
    scores = [row["test_accuracy" if classes else "test_r2"] for row in rows]
    accuracy.plot(rounds, scores, color=BLUE, **line)
    accuracy.set_ylabel("test accuracy" if classes else "test R²")
    accuracy.annotate(
        f"{scores[-1]:.3f}",
        (rounds[-1], scores[-1]),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
        fontsize=9,
    )
    loss.plot(rounds, [row["loss"] for row in rows], color=VERMILION, **line)
    loss.set_ylabel("test loss (cross-entropy)" if classes else "test loss")
    for axis in (accuracy, loss):
        axis.set_xlabel("communication round")
        axis.margins(x=0.06)
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
    accuracy.set_title(subtitle, fontsize=8.5, loc="left", color=GREY)
    save(figure, path)


def bytes_text(count: float) -> str:
    """1234 -> 1.23 kB."""
    power = next((power for power in (0, 1, 2) if count < 1000 ** (power + 1)), 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
