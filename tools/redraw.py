"""Draw the pictures of `results/` again, from its numbers: no runs are needed.

python tools/redraw.py [results] [report.html]

The pictures are written as PNG, compressed SVG and PDF. With a second argument it also writes the report, with the
pictures inside.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from pack_results import pack_pictures

from dither.experiment.report import decode
from dither.reproduction import drawing, report
from dither.reproduction.drawing import Series
from dither.reproduction.figure import Figure, Line, Panel, Table, View, select
from dither.reproduction.judging import JudgedCriterion
from dither.reproduction.report import FigureResult
from dither.reproduction.running import Reproduction, draw_figure


class Stored:
    """The numbers of a figure by view, panel and line, as its CSV lists them."""

    def __init__(self, figure: Figure, path: Path) -> None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        blocks = [list(block) for _, block in groupby(rows, lambda row: [*row.values()][:4])]
        self.seeds = {row["view"]: 0 for row in rows}
        for row in rows:
            if row["seed"]:
                self.seeds[row["view"]] = max(self.seeds[row["view"]], int(row["seed"]) + 1)
        self.views = [each for each in figure.views("full") if each.kind in self.seeds]
        for view in self.views:
            view.seeds = list(range(self.seeds[view.kind]))
        places = [(view.kind, *place) for view in self.views for place in _places(view)]
        self._places = [(*place, _numbers(block)) for place, block in zip(places, blocks, strict=True)]

    def series(self, view: View, panel: Panel, line: Line) -> Series:
        """What `drawing.series` finds in runs. A panel that begins later shows the end of another's lines."""
        for kind, drawn, stored, points in self._places:
            same = drawn.row == panel.row and drawn.title == panel.title
            if panel.first:
                same = stored.values == line.values
            if same and (kind, drawn.metric, stored.label) == (view.kind, panel.metric, line.label):
                shown = points.x >= panel.first
                return Series(points.x[shown], points.values[:, shown], points.seeds)
        raise KeyError(f"{view.kind}: {panel.title}, {line.label}")


def _places(view: View) -> list[tuple[Panel, Line]]:
    panels = [panel for panel in view.figure.panels(view) if not panel.first]
    return [(panel, line) for panel in panels for line in panel.lines]


def _numbers(block: list[dict[str, str]]) -> Series:
    by_seed = [list(rows) for _, rows in groupby(block, lambda row: row["seed"])]
    x = np.array([float(row["x"]) for row in by_seed[0]])
    values = np.array([[float(row["value"]) for row in rows] for rows in by_seed])
    return Series(x, values, [int(rows[0]["seed"]) for rows in by_seed if rows[0]["seed"]])


def _typed(judged: dict[str, Any]) -> dict[str, Any]:
    return {
        "claims": tuple(decode(JudgedCriterion, claim) for claim in judged["claims"]),
        "tables": tuple(Table(**table) for table in judged["tables"]),
    }


def main(results: Path, page: Path | None = None) -> None:
    content = json.loads((results / "report.json").read_text(encoding="utf-8"))
    figures = []
    for figure, judged in zip(select(), content["figures"], strict=True):
        stored = Stored(figure, results / f"{figure.id.replace('/', '-')}.csv.gz")
        drawing.series = stored.series
        files = draw_figure(figure, stored.views, results)
        figures.append(FigureResult(**{**judged, **_typed(judged), "files": files}))
    if page is not None:
        result = Reproduction(content["scale"], tuple(figures), content["made"], page)
        page.write_text(report.page(result, results), encoding="utf-8")
    pack_pictures(results, results)
    for drawn in [*results.glob("*.svg"), *results.glob("*.csv")]:
        drawn.unlink()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:] or ["results"]))
