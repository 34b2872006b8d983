"""The runs of a folder as rows of a table: read again only where a file changed, and pushed to open pages.

A row is plain values: what the folder's files say, nothing computed. `RunIndex.refresh` looks at the time and size
of five files of each run; a thousand runs take a few hundredths of a second when nothing changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.concurrency import run_in_threadpool

from dither.accounting import ProvenRow
from dither.errors import DitherError
from dither.experiment.folder import to_json
from dither.experiment.report import TOGETHER, Epsilon, LedgerCharge, Report, SpentPart
from dither.types import SHORT_VIEWS
from dither.web.files import (
    PROJECT,
    SPEC,
    RunFiles,
    SafeFolder,
    entries,
    fields,
    number,
    privacy_of,
    read_run,
    section,
    text_of,
)

_STAMPED = (SPEC, "metrics.jsonl", "summary.json", "audit.json", PROJECT)
_SPARK_POINTS = 32  # of the little curve
_QUIET = 120.0  # seconds without news after which a run without a summary no longer counts as running
_HEARTBEAT = 15.0  # seconds after which a silent connection gets a sign of life

Row = dict[str, Any]
Stamp = tuple[tuple[int, int] | None, ...]


class Changes(NamedTuple):
    """Ids of runs that are new or changed, and of those that are gone."""

    changed: list[str]
    removed: list[str]


class RunIndex:
    """The rows of all runs under a folder. Safe for threads.

    Every look that finds something new has a number. Any number of pages can ask what changed `since` a number,
    whichever of them looked first.
    """

    def __init__(self, folder: SafeFolder) -> None:
        self.folder = folder
        self._rows: dict[str, Row] = {}
        self._stamps: dict[str, Stamp] = {}
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()
        self._epoch, self._look = secrets.token_hex(4), 0
        self._changed_at: dict[str, int] = {}
        self._removed_at: dict[str, int] = {}

    @property
    def position(self) -> str:
        """Where this index is now, for `since`."""
        return f"{self._epoch}-{self._look}"

    def since(self, position: str) -> tuple[str, Changes | None]:
        """The position now and what changed after another one; None if that one is of another index (the
        program was started again): then everything may have changed."""
        epoch, _, look = position.partition("-")
        with self._lock:
            if epoch != self._epoch or not (look.isascii() and look.isdigit()):
                return self.position, None
            changed = [run for run, at in self._changed_at.items() if at > int(look)]
            removed = [run for run, at in self._removed_at.items() if at > int(look)]
            return self.position, Changes(changed, removed)

    def refresh(self) -> Changes:
        """Look at the folder again. A run whose state changed by the clock alone counts as changed, too."""
        with self._lock:
            present = set(self.folder.runs())
            changed = []
            for run in present:
                stamp = _stamp(self.folder, run)
                is_new = self._stamps.get(run) != stamp
                if is_new:
                    self._rows[run], self._stamps[run] = read_row(self.folder, run, stamp), stamp
                state = state_of(self._rows[run], time.time())[0]
                if is_new or self._states.get(run) != state:
                    self._states[run] = state
                    changed.append(run)
            removed = [run for run in self._rows if run not in present]
            for run in removed:
                del self._rows[run], self._stamps[run], self._states[run], self._changed_at[run]
            if changed or removed:
                self._look += 1
                self._changed_at |= dict.fromkeys(changed, self._look)
                self._removed_at |= dict.fromkeys(removed, self._look)
                for run in changed:
                    self._removed_at.pop(run, None)
            return Changes(changed, removed)

    def rows(self, only: Iterable[str] | None = None) -> list[Row]:
        """Rows as the page gets them, newest first."""
        now = time.time()
        with self._lock:
            wanted = self._rows if only is None else [run for run in only if run in self._rows]
            rows = [{**self._rows[run]} for run in wanted]
        for row in rows:
            row["state"], row["state_reason"] = state_of(row, now)
        return sorted(rows, key=lambda row: (row["last_write"], row["id"]), reverse=True)

    def row(self, run: str) -> Row | None:
        """One row, or None for an id that is not a run of this folder."""
        return next(iter(self.rows([run])), None)


class Watcher:
    """Server-sent events with the rows that changed. One task looks at the folder for all open pages, and stops
    when no page is open."""

    def __init__(self, index: RunIndex, seconds: float, public: Callable[[Row], Row]) -> None:
        self.index, self.seconds, self.public = index, seconds, public
        self._pages = 0
        self._looked = asyncio.Event()  # a new one each time the folder was looked at
        self._task: asyncio.Task[None] | None = None

    async def events(self, since: str = "") -> AsyncIterator[str]:
        """The stream of one page, from the position it is at. Each event carries the position after it, which a
        browser that lost the connection sends back."""
        position = since or self.index.position
        self._pages += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\nevent: hello\ndata: {}\n\n"
            while True:
                looked = self._looked
                # In a thread: the index may be held by a look at the folder.
                position, changes = await run_in_threadpool(self.index.since, position)
                if changes is None or changes.changed or changes.removed:
                    yield await run_in_threadpool(self._event, position, changes)
                    continue
                try:
                    await asyncio.wait_for(looked.wait(), _HEARTBEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._pages -= 1

    async def _watch(self) -> None:
        while self._pages:
            await run_in_threadpool(self.index.refresh)
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(self.seconds)

    def _event(self, position: str, changes: Changes | None) -> str:
        rows = self.index.rows(None if changes is None else changes.changed)
        removed = [] if changes is None else changes.removed
        news = {"rows": [self.public(row) for row in rows], "removed": removed, "all": changes is None}
        return f"id: {position}\nevent: runs\ndata: {to_json(news)}\n\n"  # one line: JSON has no raw line break


class LedgerReader:
    """What is left of each data set's budget in one ledger, read again when the ledger's file changes.

    A run's summary names a ledger file. That name is compared with this ledger's and never opened.
    """

    def __init__(self, ledger: str | Path | None) -> None:
        self.path = Path(ledger).resolve() if ledger is not None else None
        self._stamp: tuple[int, ...] = ()
        self._budgets: dict[str, dict[str, Any] | None] = {}
        self._lock = threading.Lock()

    def left(self, charge: LedgerCharge | None) -> dict[str, Any] | None:
        """The budget of the data set that a run was charged to, of several the one with the least left; None if
        there is no such budget."""
        if self.path is None or charge is None or not self.path.is_file():
            return None
        try:
            if Path(text_of(charge.file)).resolve() != self.path:
                return None
        except (OSError, ValueError, RuntimeError):
            return None
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        datasets = text_of(charge.dataset, 1 << 16).split(", ")
        with self._lock:
            stamp = tuple(path.stat().st_mtime_ns for path in files if path.is_file())
            if stamp != self._stamp:
                self._stamp, self._budgets = stamp, {}
            if charge.dataset not in self._budgets:
                self._budgets[charge.dataset] = _budget(self.path, datasets)
            return self._budgets[charge.dataset]


def _budget(path: Path, datasets: list[str]) -> dict[str, Any] | None:
    """The budget with the least left, and whose it is."""
    from dither.accounting.ledger.runs import EVERY_RECORD, Ledger

    budgets: list[dict[str, Any]] = []
    try:
        ledger = Ledger(path)
        for dataset in datasets:
            if (budget := ledger.budget(dataset)) is not None:
                (spent,) = ledger.spent(dataset, EVERY_RECORD)
                left = max(budget.epsilon - spent.epsilon, 0.0)
                name = ledger.called(dataset) if len(datasets) > 1 else "this data set"
                name += f"; not covered: {spent.not_covered}" * bool(spent.not_covered)
                budgets.append({"budget": budget.epsilon, "spent": spent.epsilon, "left": left, "data": name})
    except DitherError as error:
        return {"problem": str(error)}
    return min(budgets, key=lambda each: each["left"], default=None)


# One row


def _stamp(folder: SafeFolder, run: str) -> Stamp:
    stamps: list[tuple[int, int] | None] = []
    for name in _STAMPED:
        try:
            status = os.stat(folder.root / run / name)
            stamps.append((status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def read_row(folder: SafeFolder, run: str, stamp: Stamp) -> Row:
    """A run's row, from its files. Whatever they hold, one folder must not take the others off the page."""
    name = run if run != "." else folder.root.name
    times = [pair[0] for pair in stamp if pair is not None]
    row = {"id": run, "name": name, "last_write": max(times) / 1e9 if times else 0.0}
    try:
        return row | _row(read_run(folder, run))
    except Exception as error:
        return row | _row(RunFiles({}, None, {}, [], f"its files cannot be read: {type(error).__name__}"))


def _row(files: RunFiles) -> Row:
    spec, report, metrics = files.spec, files.report, files.metrics
    data, privacy = section(spec, "data"), privacy_of(spec)
    last = metrics[-1] if metrics else {}
    return {
        "problem": files.problem,
        "complete": report is not None,
        "stopped": text_of(report.stopped) if report else "",
        "method": text_of(spec.get("method", report.method if report else "?")),
        "data": _file_names(data.get("path")) or text_of(data.get("name") or (report.data if report else "?")),
        "own_data": bool(data.get("path")),
        "model": text_of(section(spec, "model").get("name", "?")),
        "seed": spec.get("seed", 0),
        "group": _group(spec),
        "num_rounds": number(spec.get("num_rounds")),
        "round": number(last.get("round")) or 0,
        "score": "R²" if "test_r2" in last else "accuracy",
        "accuracy": number(last.get("test_r2", last.get("test_accuracy"))),
        "loss": number(last.get("loss")),
        "seconds": number(last.get("seconds")),
        "spark": _spark([number(line.get("test_r2", line.get("test_accuracy"))) for line in metrics]),
        "target": number(privacy.get("epsilon")),
        "delta": number(privacy.get("delta")),
        "noise": text_of(privacy.get("noise", "")),
        "claimed": _claimed(report.epsilon) if report else None,
        "proven": _proven(report, files) if report else None,
        "attacked": _attacked(entries(files.audit, "rows"), privacy),
        "ledger": report.ledger if report else None,
        "interval": _interval(metrics),
    }


def _file_names(path: Any) -> str:
    """What own records are called in a row: their files, without folders."""
    first, *others = [Path(each).name or each for each in text_of(path or "").splitlines()] or [""]
    return f"{first} and {len(others)} more" if others else first


def state_of(row: Mapping[str, Any], now: float) -> tuple[str, str]:
    """ "finished", "stopped", "running" or "broken", and why."""
    if row["problem"]:
        return "broken", row["problem"]
    if row["stopped"]:
        return "stopped", row["stopped"]
    if row["complete"]:
        return "finished", ""
    silent = now - row["last_write"]
    if silent <= max(_QUIET, 10.0 * row["interval"]):
        return "running", ""
    return "stopped", f"no news for {_duration(silent)}; continue with: dither run --resume"


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _group(spec: Mapping[str, Any]) -> str:
    """The same for specs that differ in their seed alone."""
    rest = {key: value for key, value in spec.items() if key != "seed"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _spark(values: list[float | None]) -> list[float | None]:
    if len(values) <= _SPARK_POINTS:
        return values
    step = (len(values) - 1) / (_SPARK_POINTS - 1)
    return [values[round(i * step)] for i in range(_SPARK_POINTS)]


def _interval(metrics: list[dict[str, Any]]) -> float:
    """Seconds between the last two evaluations."""
    if len(metrics) < 2:
        return 0.0
    before, last = (number(row.get("seconds")) or 0.0 for row in metrics[-2:])
    return max(last - before, 0.0)


def _claimed(epsilon: Epsilon) -> Row:
    claim = epsilon.claimed
    return {"value": number(claim.value), "unit": text_of(claim.unit), "failing": len(epsilon.failing_conditions)}


def _proven(report: Report, files: RunFiles) -> Row | None:
    """The proven ε of the run for the spec's view and adjacency, or the nearest that there is. Where the same
    records were also counted, by a federation, a project or for a schema: of all together, and of each part."""
    epsilon = report.epsilon
    rows = [row for row in epsilon.table if row.view == epsilon.view] or epsilon.table
    rows = [row for row in rows if not row.unit.startswith("message")] or rows
    if not rows:
        return None
    best = min(rows, key=lambda row: row.adjacency != epsilon.adjacency)
    shown = fields(vars(best), texts="unit view adjacency", numbers="value delta") | {"assumed": best.assumed}
    split = report.federation.split if report.federation else _of_project(best, files.project)
    split = split or _with_schema(best, files.counted)
    *parts, all_of_it = [fields(part._asdict(), texts="what", numbers="epsilon delta") for part in split] or [{}]
    together = {"value": all_of_it["epsilon"], "delta": all_of_it["delta"]} if parts else {}
    return shown | together | {"parts": parts}


def _of_project(row: ProvenRow, split: Sequence[Any]) -> tuple[SpentPart, ...]:
    """What `dither start` saved of what it spent, if it is about this run and for the same adversary."""
    parts = tuple(
        SpentPart(
            text_of(part.get("what")), number(part.get("epsilon")) or math.inf, number(part.get("delta")) or 1.0
        )
        for part in split
    )
    same = ("training", row.value) in [(part.what, part.epsilon) for part in parts]
    terms = f"{SHORT_VIEWS.get(row.view)}, {row.adjacency}"
    return parts if same and text_of(split[-1].get("terms")) == terms else ()


def _with_schema(row: ProvenRow, schema: Mapping[str, Any]) -> tuple[SpentPart, ...]:
    """A private schema, the training, and both: their sum, as a folder does not say what was released."""
    epsilon, delta = number(schema.get("epsilon")), number(schema.get("delta"))
    if epsilon is None or delta is None:
        return ()
    if row.adjacency != "zero-out":  # which its ε is for; a record is replaced by way of a blank
        delta *= 1 + math.exp(min(epsilon, 700.0))
        epsilon *= 2 if row.adjacency == "replace-one" else math.inf
    both = SpentPart(TOGETHER, epsilon + row.value, delta + row.delta)
    return SpentPart("schema", epsilon, delta), SpentPart("training", row.value, row.delta), both


def _attacked(rows: list[Row], privacy: Mapping[str, Any]) -> Row | None:
    """The largest attacked ε, of the spec's view if that was attacked."""
    rows = [row for row in rows if row.get("view") == privacy.get("view")] or rows
    values = [(number(section(row, "attacked").get("value")), row) for row in rows]
    attacked = [(value, row) for value, row in values if value is not None]
    if not attacked:
        return None
    value, row = max(attacked, key=lambda pair: pair[0])
    return fields(row, texts="unit view verdict") | {"value": value}
