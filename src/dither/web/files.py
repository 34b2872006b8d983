"""Files that anybody may have written: read by fixed names inside one folder, and only as plain values."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dither.errors import DitherError
from dither.experiment.folder import RunFolder
from dither.experiment.report import Report
from dither.spec import Spec

SPEC, PROJECT = "spec.toml", "../project.json"
MAX_DEPTH = 4  # folders below the root in which a run or a report may lie
_MAX_FOLDERS = 20_000
_DEFAULTS = Spec()
_MAX_BYTES = 256 * 2**20  # of a text that is read


class SafeFolder:
    """A folder of which files may be read. Links are followed only while they stay inside."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()

    def file(self, *parts: str) -> Path | None:
        """The file at that place under the root; None if there is none or it lies outside."""
        try:
            path = self.root.joinpath(*parts).resolve()
            inside = path.is_relative_to(self.root) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # a name with a null byte, a link to itself
            return None
        return path if inside else None

    def text(self, *parts: str) -> str | None:
        """The file's text, or None."""
        path = self.file(*parts)
        try:
            if path is None or path.stat().st_size > _MAX_BYTES:
                return None
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def runs(self) -> Iterator[str]:
        """Run folders as paths relative to the root ("." if the root is a run folder itself)."""
        if (self.root / SPEC).is_file():
            yield "."
            return
        visited = 0
        waiting = [("", 0)]
        while waiting:
            where, depth = waiting.pop()
            try:
                with os.scandir(self.root / where) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            for name in names:
                visited += 1
                if name.startswith(".") or visited > _MAX_FOLDERS:
                    continue
                inner = f"{where}/{name}" if where else name
                if os.path.lexists(self.root / inner / SPEC):
                    yield inner
                elif depth < MAX_DEPTH:
                    waiting.append((inner, depth + 1))

    def damage(self, run: str) -> str:
        """Which file of a run is not what was written, in one line; empty if all are."""
        checked = ("digests.json", "provenance.json", SPEC, "summary.json", "metrics.jsonl")
        for name in checked:
            path = self.file(run, name)
            missing = path is None and not os.path.lexists(self.root / run / name)
            if not missing and (path is None or path.stat().st_size > _MAX_BYTES):
                return ""  # such a file is not read: `RunFiles.problem` says so
        try:
            for name in checked:
                RunFolder(self.root / run).read(name)
        except DitherError as error:
            return str(error)
        return ""


class RunFiles(NamedTuple):
    """What the files of a run say; empty if there is no such file, or it is not what was written."""

    spec: dict[str, Any]
    report: Report | None
    audit: dict[str, Any]
    metrics: list[dict[str, Any]]
    problem: str  # what is wrong with the files
    counted: Mapping[str, Any] = MappingProxyType({})  # what a private schema has spent: ε and δ
    project: Sequence[Any] = ()  # what `dither start` has spent, part by part, and together


def read_run(folder: SafeFolder, run: str) -> RunFiles:
    """The files of a run that the table and its own page show."""
    spec, problem = read_spec(folder, run)
    summary, summary_problem = _read_object(folder, run, "summary.json")
    metrics, audit = read_metrics(folder, run), read_json(folder, run, "audit.json")
    if damage := folder.damage(run):  # nothing is shown that may not be what was written
        return RunFiles(spec, None, audit, [], damage)
    report = None
    if summary:
        try:
            report = Report.from_json(summary, folder.root / run, _outline(spec), metrics)
        except (AttributeError, KeyError, TypeError, ValueError, DitherError) as error:
            summary_problem = f"summary.json is not the summary of a run: {text_of(error)}"
    project = _read_object(folder, run, PROJECT)[0]
    counted = _schema_privacy(folder, run), entries(project, "split")
    return RunFiles(spec, report, audit, metrics, problem or summary_problem, *counted)


def _schema_privacy(folder: SafeFolder, run: str) -> dict[str, Any]:
    """The section on privacy of a run's schema; empty if there is none."""
    with suppress(ValueError, RecursionError):
        return section(tomllib.loads(folder.text(run, "schema.toml") or ""), "privacy")
    return {}


def _outline(spec: Mapping[str, Any]) -> Spec:
    """The view and adjacency of a spec, which a report needs. All of it would import a method's Python file."""
    privacy = privacy_of(spec)
    chosen = {name: privacy[name] for name in ("view", "adjacency") if name in privacy}
    return replace(_DEFAULTS, privacy=replace(_DEFAULTS.privacy, **chosen))


def read_spec(folder: SafeFolder, run: str) -> tuple[dict[str, Any], str]:
    """spec.toml as plain values, and what is wrong with it."""
    text = folder.text(run, SPEC)
    if text is None:
        return {}, f"{SPEC} cannot be read"
    try:
        return tomllib.loads(text), ""
    except (ValueError, RecursionError) as error:
        return {}, f"{SPEC} is not valid TOML: {error}"


def read_json(folder: SafeFolder, run: str, name: str) -> dict[str, Any]:
    """A JSON object of the run; empty if there is none."""
    return _read_object(folder, run, name)[0]


def _read_object(folder: SafeFolder, run: str, name: str) -> tuple[dict[str, Any], str]:
    """A JSON object, and what is wrong with it."""
    text = folder.text(run, name)
    if text is None:
        return {}, ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"{name} is not valid JSON: {error}"
    return (value, "") if isinstance(value, dict) else ({}, f"{name} is not an object")


def read_metrics(folder: SafeFolder, run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The evaluations so far; a line that is being written is left out."""
    lines = (folder.text(run, name) or "").splitlines()
    try:
        rows = json.loads(f"[{','.join(lines)}]")  # all at once is several times faster
    except (ValueError, RecursionError):
        rows = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and finite(row.get("round")) is not None]


# Plain values, whatever a file holds


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of a spec or summary; empty if it is missing or something else."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def entries(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables in a list of a summary; empty if it is missing or something else."""
    value = values.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


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


def finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    parsed = number(value)
    return parsed if parsed is not None and math.isfinite(parsed) else None


def text_of(value: Any, limit: int = 300) -> str:
    """Any value as text, cut if it is too long."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fields(values: Mapping[str, Any], *, texts: str = "", numbers: str = "") -> dict[str, Any]:
    """Some entries of a table by their names, as texts and as numbers."""
    shown: dict[str, Any] = {name: text_of(values.get(name, "")) for name in texts.split()}
    return shown | {name: number(values.get(name)) for name in numbers.split()}


def privacy_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The section on privacy, with the adjacency that "auto" stands for (`Spec.adjacency`)."""
    privacy = section(spec, "privacy")
    if privacy.get("adjacency") != "auto":
        return privacy
    return {**privacy, "adjacency": "zero-out" if section(spec, "data").get("path") else "replace-one"}
