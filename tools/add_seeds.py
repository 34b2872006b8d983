"""Give the undecided verdicts of a report more seeds, up to 30, and judge settings that it does not have yet.

python tools/add_seeds.py results/report.json --cache CACHE [--minutes M] [FIGURE ...]

What the report has decided stays as it is. Each other verdict is computed look by look (5, 10, 20 and 30 seeds)
until it is decided, cheapest first, and put into the report as soon as it is known. Finished runs are kept in
CACHE, so the same call continues. `--views` takes the undecided verdicts of the three views, at the report's
scale, in place of those with open settings changed. `--list` prints what is undecided, with its seeds. After M
minutes, settings that the report lacks are put into it as not computed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dither.experiment.folder import to_json, write_text
from dither.experiment.sweep import batches
from dither.reproduction.cache import Accounts, Cache
from dither.reproduction.figure import Change, Criterion, Figure, MissingRun, View, select
from dither.reproduction.judging import FAILS, HOLDS, LOOKS, NOT_COMPUTED, Verdict, counted
from dither.reproduction.running import Work, changed_row, changed_views, judged_criteria, judged_in, settled

ROBUST = "robust"


class Open(NamedTuple):
    """A verdict that a report lacks or has not decided."""

    criterion: Criterion
    view: View
    change: Change | None  # None: the reference at the report's scale
    seeds: int  # so far
    new: bool = False  # the report does not have this setting yet

    @property
    def name(self) -> str:
        variant = f" ({self.criterion.variant})" if self.criterion.variant else ""
        return f"{self.criterion.id}{variant}, {self.change.label if self.change else self.view.kind}"

    def seconds(self) -> float:
        """About how long the next look takes."""
        needed = self.criterion.needs(self.view.like(more_seeds=LOOKS[1]))
        return sum(batches.estimated_seconds(spec, "cpu") for spec in needed.values())


def undecided(report: dict[str, Any], figures: list[Figure], runs: Cache, accounts: Accounts) -> list[Open]:
    """What is open with settings changed."""
    found = []
    for figure in figures:
        for change, view in changed_views(figure, ROBUST, runs, accounts):
            for criterion in judged_criteria(figure):
                robustness = _claim(report, figure, criterion)["robustness"]
                row = _row(robustness["verdicts"], change.label) if robustness else None
                seeds = row.get("seeds", 0) if row else 0
                if row is None or (row["verdict"] not in (HOLDS, FAILS) and seeds < view.scale.max_seeds):
                    found.append(Open(criterion, unseen(view, seeds), change, seeds, row is None))
    return found


def undecided_views(report: dict[str, Any], figures: list[Figure], runs: Cache, accounts: Accounts) -> list[Open]:
    """What is open in the three views, with fewer seeds than the limit."""
    found = []
    for figure in figures:
        for view in figure.views(report["scale"], runs, accounts):
            for criterion in judged_in(view):
                stored = _claim(report, figure, criterion)[view.kind]
                seeds = Verdict("", "", tuple(stored["numbers"])).seeds if stored else 0
                decided = stored is not None and stored["status"] in (HOLDS, FAILS)
                if not decided and seeds < view.scale.max_seeds:
                    found.append(Open(criterion, unseen(view, seeds), None, seeds))
    return found


def _claim(report: dict[str, Any], figure: Figure, criterion: Criterion) -> dict[str, Any]:
    claims = next(stored["claims"] for stored in report["figures"] if stored["id"] == figure.id)
    return next(c for c in claims if (c["id"], c["variant"]) == (criterion.id, criterion.variant))


def _row(rows: list[dict[str, Any]], setting: str) -> dict[str, Any] | None:
    return next((row for row in rows if row["setting"] == setting), None)


def unseen(view: View, seeds: int) -> View:
    """The view from its next look on: a look that was undecided is not taken again with other runs."""
    return view.like(more_seeds=next((look for look in LOOKS if look > seeds), 0)) if seeds else view


def put(path: Path, item: Open) -> str:
    """Judge with the runs that are there and put the verdict into the report; returns it in words."""
    figure, criterion, change = item.view.figure, item.criterion, item.change
    if change is None:
        verdict = settled(criterion, item.view)
        judged, status, seeds = asdict(verdict), verdict.status, verdict.seeds
    else:
        judged = changed_row(criterion, change, item.view)
        status, seeds = judged["verdict"], judged["seeds"]
        if status == NOT_COMPUTED and not item.new:
            return "as before"
    with path.with_suffix(".lock").open("w") as lock:  # several of these commands may share a report
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = json.loads(path.read_text(encoding="utf-8"))
        stored = next(stored for stored in report["figures"] if stored["id"] == figure.id)
        stored["open"] = [setting.row() for setting in figure.open]
        claim = _claim(report, figure, criterion)
        if change is None:
            claim[item.view.kind] = judged
        else:
            rows = {row["setting"]: row for row in (claim["robustness"] or {"verdicts": []})["verdicts"]}
            rows[change.label] = judged
            order = ["reference", *(each.label for each in figure.changes())]
            claim["robustness"] = {"scale": ROBUST, "verdicts": [rows[label] for label in order if label in rows]}
        write_text(path, to_json(report) + "\n")
    return f"{status} with {counted(seeds, 'seed')}"


def settle(path: Path, item: Open, cache: Cache, deadline: float) -> None:
    """Compute look by look what one verdict needs."""
    began = time.time()
    work = Work(cache, [(item.view, [item.criterion])])
    refused, computed = work.compute(data_dir=None, on_progress=None, deadline=deadline)
    said = "; ".join(refused.values())
    if not said:
        with suppress(MissingRun):
            said = put(path, item)
    print(f"{item.name}: {said}; {computed} runs in {time.time() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("figures", nargs="*", help="papers or figures; all of them if none is given")
    parser.add_argument("--cache", help="folder of finished runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further batch after this")
    parser.add_argument("--views", action="store_true", help="the three views in place of changed settings")
    parser.add_argument("--list", action="store_true", help="only print what is undecided")
    options = parser.parse_intermixed_args()
    cache, deadline = Cache(options.cache), time.time() + 60 * options.minutes
    accounts = Accounts(cache)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    found = (undecided_views if options.views else undecided)(report, select(options.figures), cache, accounts)
    for item in found if options.list else sorted(found, key=Open.seconds):
        if options.list:
            print(f"{item.name}: {counted(item.seeds, 'seed')}, next look about {item.seconds():.0f} s")
        elif item.new or time.time() < deadline:
            settle(options.report, item, cache, deadline)


if __name__ == "__main__":
    main()
