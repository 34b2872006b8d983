"""The page of one run: what its folder says, made ready to be shown, with ε explained in plain language.

Its texts are in texts.toml.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from dither.accounting import ProvenRow
from dither.errors import DitherError
from dither.experiment.metrics import NAMES, TestScores
from dither.experiment.report import Epsilon, Report, other_notes
from dither.types import ADVERSARIES, Claim, epsilon_text
from dither.web.files import (
    SafeFolder,
    entries,
    fields,
    finite,
    number,
    read_json,
    read_metrics,
    read_run,
    section,
    text_of,
)
from dither.web.index import Row

_TEXTS = tomllib.loads(files("dither.web").joinpath("texts.toml").read_text(encoding="utf-8"))
DOWNLOADS: dict[str, str] = _TEXTS["downloads"]  # nothing else is handed out
SEES: dict[str, str] = _TEXTS["sees"]
NEIGHBOURS: dict[str, str] = _TEXTS["neighbours"]
RECIPES: dict[str, str] = _TEXTS["recipes"]
ERRATA: dict[str, str] = _TEXTS["errata"]
_ERRATUM = re.compile(r"\b([GHENSCD]\d)[a-c]?\b")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_NOTES = 50
_MAX_TEXT = 2000


def details(folder: SafeFolder, row: Row) -> dict[str, Any]:
    """All that the page of one run shows at once."""
    run = row["id"]
    files = read_run(folder, run)
    return {
        "row": row,
        "metrics": columns(files.metrics),
        "local": columns(read_metrics(folder, run, "local/metrics.jsonl") or files.metrics),
        "local_advice": [
            text_of(each.get("text"), _MAX_TEXT)
            for each in entries(read_json(folder, run, "local/summary.json"), "advice")
        ],
        "attacked": [_attacked_row(each) for each in entries(files.audit, "rows")],
        "overview": _overview(files.spec, files.report),
        "spec": folder.text(run, "spec.toml") or "",
        "provenance": {
            key: " ".join(dict.fromkeys(text_of(value).split(": "))) if key == "device" else text_of(value)
            for key, value in read_json(folder, run, "provenance.json").items()  # "cpu: cpu" is "cpu"
        },
        "files": [
            {"name": name, "description": text, "bytes": path.stat().st_size}
            for name, text in DOWNLOADS.items()
            if (path := folder.file(run, name)) is not None
        ],
        "resume": f"dither run --resume {shlex.quote(str(folder.root / run))}",
        **_outcome(files.report, number(files.spec.get("cohort_size"))),
    }


def _outcome(report: Report | None, cohort: float | None) -> dict[str, Any]:
    """What is known of a run when it has ended."""
    if report is None:
        empty = {"proven": [], "why": "", "errata": {}, "notes": [], "advice": [], "references": []}
        return empty | dict.fromkeys(("claimed", "scores", "traffic", "bytes"))
    proven = [_proven_row(each, report.epsilon) for each in report.epsilon.table]
    traffic = report.traffic
    return {
        "claimed": _claim(report.epsilon.claimed),
        "proven": sorted(proven, key=lambda each: (not each["of_spec"], each["value"] in (None, math.inf))),
        "why": text_of(report.why, _MAX_TEXT),
        "errata": errata_in(_texts(report)),
        "notes": [text_of(note, _MAX_TEXT) for note in other_notes(report)[:_MAX_NOTES]],
        "advice": [text_of(each.text, _MAX_TEXT) for each in report.advice],
        "scores": report.scores and _scores(report.scores, report.classes),
        "references": [{"name": text_of(name), "value": value} for name, value in report.score_lines().items()],
        "traffic": traffic and fields(vars(traffic), numbers="upload_bytes download_bytes lost"),
        "bytes": traffic and cohort and traffic.upload_bytes * cohort,  # of all clients, each round
    }


def _scores(scores: TestScores, classes: Sequence[str]) -> dict[str, Any]:
    """Metrics beside those of the trivial predictor, the confusion matrix and the calibration curve."""
    names = [text_of(name) for name in classes]
    return {
        "records": scores.records,
        "trivial": text_of(scores.trivial_predictor),
        "rows": [
            [text, scores.model[name], scores.trivial.get(name)]
            for name, text in NAMES.items()
            if name in scores.model
        ],
        "confusion": {"classes": names, "counts": scores.confusion} if 0 < len(scores.confusion) <= 20 else None,
        "calibration": [[each.predicted, each.observed, each.records] for each in scores.calibration],
    }


class PageRefusal(DitherError):
    """The page does not compute this; the message says why, and what does."""


def check_computable(folder: SafeFolder, run: str, *, epsilon: bool) -> None:
    """`PageRefusal` if the spec of a run does not say what happened (`epsilon`: or how much it revealed)."""
    files = read_run(folder, run)
    if files.problem:
        raise PageRefusal(files.problem)
    if "versions" in read_json(folder, run, "provenance.json") or (files.report and files.report.federation):
        raise PageRefusal(
            "this run was made by a real federation: its spec does not say how many records each party held, "
            "nor who was "
            "missing; the proven ε of its summary counts both"
        )
    begun = read_json(folder, run, "digests.json").get("begun") or ()
    repeated = not isinstance(begun, list | tuple) or len(begun) > 1
    if epsilon and (repeated or (files.report and files.report.repeated_rounds)):
        raise PageRefusal(
            "rounds of this run were repeated with fresh noise after an interruption; `dither account` with this "
            "folder counts them, as the proven ε of its summary does"
        )


def columns(metrics: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Evaluations by name, one entry for each line."""
    names = dict.fromkeys(name for line in metrics for name, value in line.items() if number(value) is not None)
    return {text_of(name): [finite(line.get(name)) for line in metrics] for name in names}


def _claim(claim: Claim) -> dict[str, Any]:
    return fields(claim._asdict(), texts="unit source adjacency", numbers="value delta") | {
        "explanation": odds(number(claim.value)),
        "conditions": [{"text": text_of(text, _MAX_TEXT), "holds": holds} for text, holds in claim.conditions],
    }


def _proven_row(row: ProvenRow, epsilon: Epsilon) -> dict[str, Any]:
    """A row of the table of proven ε."""
    of_spec = (row.view, row.adjacency) == (epsilon.view, epsilon.adjacency) and not row.unit.startswith("message")
    return fields(vars(row), texts="unit view adjacency recipe", numbers="value delta") | {
        "sees": SEES.get(row.view, text_of(row.view)),
        "proof": proof(row.recipe),
        "assumed": row.assumed,
        "no_credit": text_of(row.no_credit or "", _MAX_TEXT),
        "not_covered": [text_of(text, _MAX_TEXT) for text in row.not_covered],
        "clients": row.clients and fields(vars(row.clients), numbers="min median max"),
        "explanation": explain(row),
        "of_spec": of_spec,
    }


def _attacked_row(row: Row) -> dict[str, Any]:
    """What `dither audit` has shown for one view."""
    attacked = fields(section(row, "attacked"), texts="form", numbers="value confidence trials")
    shown = fields(row, texts="view adjacency unit verdict") | attacked
    return shown | {
        "sees": SEES.get(shown["view"], shown["view"]),
        "refutes_claim": bool(row.get("refutes_claim")),
    }


def _texts(report: Report) -> Iterator[str]:
    """Texts of a report that may name errata."""
    yield report.why
    yield from (text for text, _ in report.epsilon.claimed.conditions)
    for row in report.epsilon.table:
        yield from (row.detail, row.no_credit or "", *row.not_covered)


def _overview(spec: dict[str, Any], report: Report | None) -> list[tuple[str, str]]:
    """The run in a few lines."""
    privacy, model = section(spec, "privacy"), section(spec, "model")
    # 0 clients: one for each value of a column
    clients = spec.get("num_clients") or (report.num_clients if report else "?")
    lines = [
        ("clients", f"{clients}, {spec.get('cohort_size', '?')} per round"),
        ("local steps per round", spec.get("local_steps", "?")),
        ("batch size", spec.get("batch_size", "?")),
        ("batch sampling", spec.get("batch_sampling", "?")),
        ("model", model.get("name", "?")),
        ("noise set by", privacy.get("noise", "?")),
        ("clip", f"{privacy.get('clip_norm', '?')} ({privacy.get('clip', '?')})"),
        ("seed", spec.get("seed", "?")),
    ]
    if report is not None:
        rounds = report.participation
        without = report.score_without_noise
        lines += [
            ("parameters", report.num_params),
            ("randomness", report.randomness),
            ("rounds per client", f"{rounds.min} to {rounds.max}"),
        ]
        if without is not None:
            score = "accuracy" if report.classes else "R²"
            lines.append((f"{score} without noise (not private)", f"{without:.4f}"))
    return [(name, text_of(value)) for name, value in lines]


# Explanations


def errata_in(texts: Iterable[str]) -> dict[str, str]:
    """The errata that texts name by their ids, with what they say."""
    names = dict.fromkeys(match for text in texts for match in _ERRATUM.findall(text))
    return {name: ERRATA[name] for name in names if name in ERRATA}


def odds(epsilon: float | None) -> str:
    """What an ε means: by how much it can change an adversary's odds."""
    if epsilon is None:
        return ""
    if math.isinf(epsilon):
        return "gives no bound: an adversary may be certain"
    if epsilon < 0.5:
        return f"changes an adversary's odds by at most {epsilon_text(100 * math.expm1(epsilon), digits=2)}%"
    factor = math.exp(min(epsilon, 700.0))
    if factor < 1000:
        return f"changes an adversary's odds by a factor of at most {epsilon_text(factor)}"
    power = str(math.ceil(epsilon / math.log(10))).translate(_SUPERSCRIPTS)
    return f"changes an adversary's odds by a factor of up to 10{power}: little protection by itself"


def explain(row: ProvenRow) -> str:
    """A proven row as a sentence."""
    adversary = ADVERSARIES.get(row.view, text_of(row.view))
    change = NEIGHBOURS.get(row.adjacency, text_of(row.adjacency))
    scope = "one message" if row.unit.startswith("message") else "the whole run"
    if not math.isfinite(row.value):
        return f"Against {adversary}, over {scope}: no theorem bounds what can be learned if {change}."
    return f"Against {adversary}, over {scope}: if {change}, that {odds(row.value)}."


def proof(recipe: str) -> str:
    """How a recipe proves its ε, by the ids in its name."""
    return " ".join(text for name, text in RECIPES.items() if name in recipe)
