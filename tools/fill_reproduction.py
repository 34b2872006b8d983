"""Put the numbers of a report into docs/reproduction.md: what stands between <!--KEY--> and <!--/--> is replaced.

python tools/fill_reproduction.py [results/report.json]

Keys: `counts VIEW`, `status ID VIEW`, `text ID VIEW`, `value ID VIEW NUMBER` (one "difference ± error" of that
text), `robust ID`, `robust-counts`, `row FIGURE COLUMN NUMBER` (a cell of the figure's first table),
`findings-table`. VIEW is printed, deployed or proven.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dither.experiment.report import decode
from dither.reproduction.figure import VIEW_TITLES
from dither.reproduction.judging import HOLDS, JudgedCriterion
from dither.reproduction.report import counts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reproduction.md"
REPORT = ROOT / "results" / "report.json"
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_MARKED = re.compile(r"<!--(?P<key>[^/!][^>]*)-->.*?<!--/-->", re.DOTALL)


class Numbers:
    """What a report says, by key."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.figures = {figure["id"]: figure for figure in report["figures"]}
        decoded = [decode(JudgedCriterion, claim) for figure in report["figures"] for claim in figure["claims"]]
        self.findings = [claim for claim in decoded if not claim.variant]
        self._by_id = {claim.id: claim for claim in self.findings}

    def __call__(self, key: str) -> str:
        """The text of a key."""
        name, *arguments = key.split()
        return str(getattr(self, name.replace("-", "_"))(*arguments))

    def counts(self, view: str) -> str:
        return counts(self.findings, view)

    def status(self, criterion: str, view: str = "printed") -> str:
        return self._by_id[criterion].status(view)

    def text(self, criterion: str, view: str = "printed") -> str:
        verdict = getattr(self._by_id[criterion], view)
        return verdict.text if verdict else "–"

    def value(self, criterion: str, view: str, number: str) -> str:
        found = re.findall(r"[+-][\d.e-]+ ± [\d.e-]+", self.text(criterion, view))[int(number)]
        powers = re.sub(r"e-0?(\d+)", lambda match: "·10⁻" + match[1].translate(_RAISED), found)
        return powers.replace("-", "−")

    def robust(self, criterion: str) -> str:
        return self._by_id[criterion].robust_text

    def robust_counts(self) -> str:
        """How many findings keep their verdict wherever they were judged."""
        judged = [claim for claim in self.findings if claim.robustness and claim.robustness.computed]
        always = sum(all(row["verdict"] == HOLDS for row in claim.robustness.computed) for claim in judged)
        open_settings = sum(bool(claim.robustness.deciding(claim.printed.status)) for claim in judged)
        return f"{always} of {len(judged)} hold in every setting; {open_settings} depend on a setting that is open"

    def row(self, figure: str, column: str, number: str) -> str:
        return str(self.figures[figure]["tables"][0]["rows"][int(number)][column.replace("_", " ")])

    def findings_table(self) -> str:
        heads = ["finding", "what the paper finds", *VIEW_TITLES.values(), "with open settings changed"]
        lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for claim in self.findings:
            cells = [claim.id, claim.claim, *(claim.status(view) for view in VIEW_TITLES), self.robust(claim.id)]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n" + "\n".join(lines) + "\n"


def filled(page: str, report: dict[str, Any]) -> str:
    """The page with every marked place as the report has it."""
    numbers = Numbers(report)
    return _MARKED.sub(lambda match: f"<!--{match['key']}-->{numbers(match['key'])}<!--/-->", page)


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORT
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), json.loads(source.read_text(encoding="utf-8"))))
