"""The runs of a folder as rows of a table, read again only where a file changed.

A row is plain values: what the folder's files say, nothing computed. `Index.refresh` looks at the time and size of
four files a run; a thousand runs take a few hundredths of a second when nothing changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from dither.errors import DitherError
from dither.experiment.folder import RunFolder
from dither.web.folders import Folder

_STAMPED = ("spec.toml", "metrics.jsonl", "summary.json", "audit.json")
_SPARK = 32  # points of the little curve
_QUIET = 120.0  # seconds without news after which a run without summary no longer counts as running

Row = dict[str, Any]
Stamp = tuple[tuple[int, int] | None, ...]


class Changes(NamedTuple):
    """Ids of runs that are new or changed, and of those that are gone."""

    changed: list[str]
    removed: list[str]


class Index:
    """The rows of all runs under a folder. Safe for threads.

    Every look that finds something new has a number; `since` a number, what has changed can be asked for by any
    number of pages, whoever of them looked first.
    """

    def __init__(self, folder: Folder) -> None:
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
        """The position now and what changed after another one; None where that one is of another index (the
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
            found = set(self.folder.runs())
            changed = []
            for run in found:
                stamp = _stamp(self.folder, run)
                if self._stamps.get(run) != stamp:
                    self._rows[run], self._stamps[run] = read_row(self.folder, run, stamp), stamp
                    changed.append(run)
                state = state_of(self._rows[run], time.time())[0]
                if self._states.get(run) != state:
                    self._states[run] = state
                    if run not in changed:
                        changed.append(run)
            removed = [run for run in self._rows if run not in found]
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
        """One row, or None for an id that is no run of this folder."""
        return next(iter(self.rows([run])), None)


def _stamp(folder: Folder, run: str) -> Stamp:
    found: list[tuple[int, int] | None] = []
    for name in _STAMPED:
        try:
            seen = os.stat(folder.root / run / name)
            found.append((seen.st_mtime_ns, seen.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def read_row(folder: Folder, run: str, stamp: Stamp) -> Row:
    """A run's row, from its files. Whatever they hold, one folder must not take the others off the page."""
    try:
        spec, problem = read_spec(folder, run)
        summary, summary_problem = read_json(folder, run, "summary.json")
        audit, _ = read_json(folder, run, "audit.json")
        metrics = read_metrics(folder, run)
        if damage := damage_of(folder, run):
            summary, metrics, problem = None, [], damage  # nothing is shown that may not be what was written
        return _row(folder, run, stamp, spec, metrics, summary or {}, audit or {}, problem or summary_problem)
    except Exception as error:
        problem = f"its files cannot be read: {type(error).__name__}"
        return _row(folder, run, stamp, {}, [], {}, {}, problem)


def _row(
    folder: Folder,
    run: str,
    stamp: Stamp,
    spec: dict[str, Any],
    metrics: list[dict[str, Any]],
    summary: dict[str, Any],
    audit: dict[str, Any],
    problem: str,
) -> Row:
    data, privacy, model = section(spec, "data"), privacy_of(spec), section(spec, "model")
    epsilon = section(summary, "epsilon")
    last = metrics[-1] if metrics else {}
    times = [pair[0] for pair in stamp if pair is not None]
    return {
        "id": run,
        "name": run if run != "." else folder.root.name,
        "problem": problem,
        "complete": bool(summary),
        "stopped": summary.get("stopped", ""),
        "method": text_of(spec.get("method", summary.get("method", "?"))),
        "data": text_of(data.get("path") or data.get("name") or summary.get("data", "?")),
        "own_data": bool(data.get("path")),
        "model": text_of(model.get("name", "?")),
        "seed": spec.get("seed", 0),
        "group": _group(spec),
        "num_rounds": number(spec.get("num_rounds")),
        "round": number(last.get("round")) or 0,
        "accuracy": number(last.get("test_accuracy")),
        "loss": number(last.get("loss")),
        "seconds": number(last.get("seconds")),
        "spark": _spark([number(line.get("test_accuracy")) for line in metrics]),
        "target": number(privacy.get("epsilon")),
        "delta": number(privacy.get("delta")),
        "noise": text_of(privacy.get("noise", "")),
        "claimed": _claimed(section(epsilon, "claimed")),
        "proven": proven_row(entries(epsilon, "proven"), privacy),
        "attacked": _attacked(audit, privacy),
        "ledger": section(summary, "ledger"),
        "last_write": max(times) / 1e9 if times else 0.0,
        "interval": _interval(metrics),
    }


def state_of(row: Mapping[str, Any], now: float) -> tuple[str, str]:
    """ "finished", "stopped", "running" or "broken", and why."""
    if row["problem"]:
        return "broken", row["problem"]
    if row["stopped"]:
        return "stopped", text_of(row["stopped"])
    if row["complete"]:
        return "finished", ""
    patience = max(_QUIET, 10.0 * row["interval"])
    silent = now - row["last_write"]
    if silent <= patience:
        return "running", ""
    return "stopped", f"no news for {_ago(silent)}; continue with: dither run --resume"


def _ago(seconds: float) -> str:
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} seconds"


# Reading files that anybody may have written


def read_spec(folder: Folder, run: str) -> tuple[dict[str, Any], str]:
    """spec.toml as plain values, and what is wrong with it."""
    text = folder.text(run, "spec.toml")
    if text is None:
        return {}, "spec.toml cannot be read"
    # Specs of a sweep differ in their seed alone: what is left is parsed once.
    seed = _SEED.match(text)
    rest = text if seed is None else f"{seed[1]}seed = 0\n{text[seed.end() :]}"
    try:
        return {**_parsed(rest), **({} if seed is None else {"seed": int(seed[2])})}, ""
    except (ValueError, RecursionError) as error:
        return {}, f"spec.toml is not valid TOML: {error}"


# `seed = 3` on a line of its own among the lines before the first table, as `Spec.to_toml` writes it
_SEED = re.compile(r"((?:[^\[\n=]+=[^\n\[\"']*(?:\"[^\"\\\n]*\")?\n)*?)seed = (\d{1,18})\n")


@lru_cache(maxsize=512)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def read_json(folder: Folder, run: str, name: str) -> tuple[dict[str, Any] | None, str]:
    """A JSON object of the run, None where there is none, and what is wrong with it."""
    text = folder.text(run, name)
    if text is None:
        return None, ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"{name} is not valid JSON: {error}"
    return (value, "") if isinstance(value, dict) else (None, f"{name} is not an object")


def damage_of(folder: Folder, run: str) -> str:
    """Which of the files that the page shows is not what was written, in one line; empty where all are."""
    shown = ("digests.json", "provenance.json", "spec.toml", "summary.json", "metrics.jsonl")
    if not all(folder.may_read(run, name) for name in shown):
        return ""  # whoever reads it says so
    try:
        for name in shown:
            RunFolder(folder.root / run).read(name)
    except DitherError as error:
        return str(error)
    return ""


def read_metrics(folder: Folder, run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The evaluations so far; a line that is being written is left out."""
    lines = (folder.text(run, name) or "").splitlines()
    try:
        rows = json.loads(f"[{','.join(lines)}]")  # all at once is several times faster
    except (ValueError, RecursionError):
        rows = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and _is_finite(row.get("round"))]


def _is_finite(value: Any) -> bool:
    found = number(value)
    return found is not None and math.isfinite(found)


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a spec or summary, empty where it is missing or no table."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def privacy_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The part on privacy, with the neighbours that "auto" stands for (`Spec.adjacency`)."""
    found = section(spec, "privacy")
    if found.get("adjacency") != "auto":
        return found
    return {**found, "adjacency": "zero-out" if section(spec, "data").get("path") else "replace-one"}


def number(value: Any) -> float | None:
    """A number, "inf" included; None for anything else, NaN too."""
    if value in ("inf", "-inf"):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    try:
        float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return value


def entries(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables in a list of a summary, empty where it is missing or no list."""
    found = values.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def text_of(value: Any, most: int = 300) -> str:
    """A text of whatever a file holds there, cut where somebody wrote a book."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


# Parts of a row


def _group(spec: Mapping[str, Any]) -> str:
    """The same for specs that differ in their seed alone."""
    rest = {key: value for key, value in spec.items() if key != "seed"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _spark(values: list[float | None]) -> list[float | None]:
    if len(values) <= _SPARK:
        return values
    step = (len(values) - 1) / (_SPARK - 1)
    return [values[round(i * step)] for i in range(_SPARK)]


def _interval(metrics: list[dict[str, Any]]) -> float:
    """Seconds between the last two evaluations."""
    if len(metrics) < 2:
        return 0.0
    before, last = (number(row.get("seconds")) or 0.0 for row in metrics[-2:])
    return max(last - before, 0.0)


def _claimed(claim: Mapping[str, Any]) -> Row | None:
    if not claim:
        return None
    failing = [condition for condition in entries(claim, "conditions") if not condition.get("holds")]
    return {
        "value": number(claim.get("value")),
        "unit": text_of(claim.get("unit", "")),
        "failing": len(failing),
    }


def proven_row(good: list[Row], privacy: Mapping[str, Any]) -> Row | None:
    """The proven ε of the run for the spec's own view and neighbours, or the nearest that there is."""
    own = [row for row in good if row.get("view") == privacy.get("view")] or good
    runs = [row for row in own if not text_of(row.get("unit", "")).startswith("message")] or own
    if not runs:
        return None
    wanted = privacy.get("adjacency")
    best = min(runs, key=lambda row: row.get("adjacency") != wanted)
    return {
        "value": number(best.get("value")),
        "unit": text_of(best.get("unit", "")),
        "view": text_of(best.get("view", "")),
        "adjacency": text_of(best.get("adjacency", "")),
        "assumed": bool(best.get("assumed")),
    }


def _attacked(audit: Mapping[str, Any], privacy: Mapping[str, Any]) -> Row | None:
    """The largest attacked ε, of the spec's own view where that was attacked."""
    rows = entries(audit, "rows")
    own = [row for row in rows if row.get("view") == privacy.get("view")] or rows
    found = [(number(section(row, "attacked").get("value")), row) for row in own]
    known = [(value, row) for value, row in found if value is not None]
    if not known:
        return None
    value, row = max(known, key=lambda pair: pair[0])
    return {
        "value": value,
        "unit": text_of(row.get("unit", "")),
        "view": text_of(row.get("view", "")),
        "verdict": text_of(row.get("verdict", "")),
    }
