"""Compare the verdicts of two complete reproductions, finding by finding and view by view.

python tools/compare_reports.py results/report.json OTHER/report.json

Prints how many verdicts are the same, and a table of those that are not. Exit code 1: a verdict of one report is
missing in the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from dither.experiment.report import decode
from dither.reproduction.figure import VIEW_TITLES
from dither.reproduction.judging import NOT_COMPUTED, JudgedCriterion, Verdict

_NONE = Verdict(NOT_COMPUTED, "")


class Compared(NamedTuple):
    """One verdict of two reports."""

    finding: str
    view: str
    first: Verdict
    second: Verdict


def verdicts(report: dict) -> dict[tuple[str, str], Verdict]:
    """Every verdict of a report, by finding (with its variant) and view."""
    claims = [decode(JudgedCriterion, claim) for figure in report["figures"] for claim in figure["claims"]]
    found = {(claim.name, view): getattr(claim, view) for claim in claims for view in VIEW_TITLES}
    return {place: verdict for place, verdict in found.items() if verdict is not None}


def compared(first: dict, second: dict) -> list[Compared]:
    """All verdicts that either report has."""
    ours, theirs = verdicts(first), verdicts(second)
    places = dict.fromkeys([*ours, *theirs])
    return [Compared(*place, ours.get(place, _NONE), theirs.get(place, _NONE)) for place in places]


def main(first: Path, second: Path) -> int:
    rows = compared(*(json.loads(path.read_text(encoding="utf-8")) for path in (first, second)))
    differing = [row for row in rows if row.first.status != row.second.status]
    print(f"{len(rows) - len(differing)} of {len(rows)} verdicts are the same")
    if differing:
        print("\n| finding | view | first | second |\n|---|---|---|---|")
    for row in differing:
        cells = [f"{verdict.status}: {verdict.text}" for verdict in (row.first, row.second)]
        print(f"| {row.finding} | {VIEW_TITLES[row.view]} | {' | '.join(cells)} |")
    return int(any(NOT_COMPUTED in (row.first.status, row.second.status) for row in differing))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
