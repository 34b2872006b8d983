"""One run as its folder tells it: metrics, the privacy table in words, spec, provenance, files."""

from __future__ import annotations

import math
import shlex
from typing import Any

from dither.web import words
from dither.web.folders import Folder
from dither.web.index import Row, entries, number, privacy_of, read_json, read_metrics, read_spec, section, text_of

# What a page may download: the files a run folder holds, by name, and nothing else.
DOWNLOADS = {
    "spec.toml": "the complete spec: the same file runs again",
    "summary.json": "accuracy, loss, the three ε",
    "metrics.jsonl": "one line an evaluation, scored on public test records",
    "model.npz": "the model's parameters",
    "schema.toml": "how a table becomes features",
    "provenance.json": "versions, device",
    "audit.json": "what attacks have shown",
    "plot.png": "accuracy and loss against rounds",
}
_MOST_NOTES = 50
_LONG = 2000
_SPREAD = ("min", "median", "max")


def details(folder: Folder, row: Row) -> dict[str, Any]:
    """All that the page of one run shows at once."""
    run = row["id"]
    spec, _ = read_spec(folder, run)
    summary, _ = read_json(folder, run, "summary.json")
    provenance, _ = read_json(folder, run, "provenance.json")
    summary = summary or {}
    claim = section(section(summary, "epsilon"), "claimed")
    return {
        "row": row,
        "metrics": columns(read_metrics(folder, run)),
        "local": columns(read_metrics(folder, run, "local/metrics.jsonl") or read_metrics(folder, run)),
        "bytes": upload_bytes(spec, summary),
        "claimed": claim_in_words(claim),
        "proven": proven_in_words(entries(section(summary, "epsilon"), "proven"), privacy_of(spec)),
        "attacked": attacks(read_json(folder, run, "audit.json")[0]),
        "why": text_of(summary["why"], _LONG) if summary.get("why") else "",
        "errata": words.errata_in(_texts(summary)),
        "notes": _listed(summary.get("notes"))[:_MOST_NOTES],
        "facts": _facts(spec, summary),
        "traffic": {key: number(value) for key, value in section(summary, "traffic").items()},
        "spec": folder.text(run, "spec.toml") or "",
        "provenance": {key: text_of(value) for key, value in (provenance or {}).items()},
        "files": files(folder, run),
        "resume": f"dither run --resume {shlex.quote(str(folder.root / run))}",
    }


def by_a_federation(folder: Folder, run: str) -> bool:
    """True for a run of `dither serve`: who held what, and who was missing, is not in its spec."""
    provenance, _ = read_json(folder, run, "provenance.json")
    summary, _ = read_json(folder, run, "summary.json")
    return "versions" in (provenance or {}) or "federation" in (summary or {})


def repeated(folder: Folder, run: str) -> bool:
    """True for a run of which rounds were begun that are not among those it has made, or twice among them."""
    digests, _ = read_json(folder, run, "digests.json")
    summary, _ = read_json(folder, run, "summary.json")
    begun = (digests or {}).get("begun") or ()
    return not isinstance(begun, list | tuple) or len(begun) > 1 or "repeated_rounds" in (summary or {})


def columns(metrics: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Evaluations by name, one entry a line each."""
    names = dict.fromkeys(name for line in metrics for name, value in line.items() if number(value) is not None)
    return {text_of(name): [_plottable(line.get(name)) for line in metrics] for name in names}


def _plottable(value: Any) -> float | None:
    found = number(value)
    return None if found is None or found in (float("inf"), float("-inf")) else found


def upload_bytes(spec: dict[str, Any], summary: dict[str, Any]) -> float | None:
    """Bytes that all clients of a round upload together; None while a run has no summary."""
    each = number(section(summary, "traffic").get("upload_bytes"))
    cohort = number(spec.get("cohort_size"))
    return None if each is None or cohort is None else each * cohort


def claim_in_words(claim: dict[str, Any]) -> dict[str, Any] | None:
    if not claim:
        return None
    conditions = entries(claim, "conditions")
    return {
        "value": number(claim.get("value")),
        "unit": text_of(claim.get("unit", "")),
        "delta": number(claim.get("delta")),
        "source": text_of(claim.get("source", "")),
        "adjacency": text_of(claim.get("adjacency", "")),
        "words": words.odds(number(claim.get("value"))),
        "conditions": [
            {"text": text_of(each.get("condition", ""), _LONG), "holds": bool(each.get("holds"))}
            for each in conditions
        ],
    }


def proven_in_words(rows: list[Row], privacy: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of proven ε, the spec's own view and neighbours first."""
    shown = []
    for row in rows:
        value = number(row.get("value"))
        clients = section(row, "clients")
        own = row.get("view") == privacy.get("view") and row.get("adjacency") == privacy.get("adjacency")
        unit = text_of(row.get("unit", ""))
        shown.append(
            {
                "value": value,
                "unit": unit,
                "view": text_of(row.get("view", "")),
                "seen": words.VIEWS.get(str(row.get("view")), (text_of(row.get("view", "")), ""))[0],
                "adjacency": text_of(row.get("adjacency", "")),
                "delta": number(row.get("delta")),
                "recipe": text_of(row.get("recipe", "")),
                "recipe_words": words.recipe_words(text_of(row.get("recipe", ""))),
                "assumed": bool(row.get("assumed")),
                "detail": text_of("; ".join(filter(None, (row.get("detail"), row.get("against")))), _LONG),
                "no_credit": text_of(row.get("no_credit", ""), _LONG),
                "not_covered": _listed(row.get("not_covered")),
                "clients": {key: number(clients.get(key)) for key in _SPREAD} if clients else None,
                "words": words.explain(row, value),
                "own": own and not unit.startswith("message"),
            }
        )
    return sorted(shown, key=lambda row: (not row["own"], row["value"] in (None, math.inf)))


def attacks(audit: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What `dither audit` found, one entry a view."""
    shown = []
    for row in entries(audit or {}, "rows"):
        attacked = section(row, "attacked")
        shown.append(
            {
                "value": number(attacked.get("value")),
                "confidence": number(attacked.get("confidence")),
                "trials": number(attacked.get("trials")),
                "form": text_of(attacked.get("form", "")),
                "view": text_of(row.get("view", "")),
                "seen": words.VIEWS.get(str(row.get("view")), (text_of(row.get("view", "")), ""))[0],
                "adjacency": text_of(row.get("adjacency", "")),
                "unit": text_of(row.get("unit", "")),
                "verdict": text_of(row.get("verdict", "")),
                "refutes_claim": bool(row.get("refutes_claim")),
            }
        )
    return shown


def files(folder: Folder, run: str) -> list[dict[str, Any]]:
    """What can be downloaded of a run."""
    found = []
    for name, what in DOWNLOADS.items():
        path = folder.file(run, name)
        if path is not None:
            found.append({"name": name, "what": what, "bytes": path.stat().st_size})
    return found


def _listed(value: Any) -> list[str]:
    return [text_of(each, _LONG) for each in value] if isinstance(value, list) else []


def _texts(summary: dict[str, Any]) -> list[str]:
    """Texts of a summary that may name errata."""
    epsilon = section(summary, "epsilon")
    conditions = entries(section(epsilon, "claimed"), "conditions")
    texts = [summary.get("why", ""), *(condition.get("condition", "") for condition in conditions)]
    for row in entries(epsilon, "proven"):
        texts += [row.get("detail", ""), row.get("no_credit", ""), *_listed(row.get("not_covered"))]
    return [text for text in texts if isinstance(text, str)]


def _facts(spec: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The run in a few words."""
    privacy, model = section(spec, "privacy"), section(spec, "model")
    seen = section(summary, "participation")
    clients = spec.get("num_clients") or summary.get("num_clients", "?")  # 0: one for each value of a column
    facts = [
        ("clients", f"{clients}, {spec.get('cohort_size', '?')} a round"),
        ("local steps a round", spec.get("local_steps", "?")),
        ("records in a batch", spec.get("batch_size", "?")),
        ("batches", spec.get("batch_sampling", "?")),
        ("model", model.get("name", "?")),
        ("parameters", summary.get("num_params")),
        ("noise set by", privacy.get("noise", "?")),
        ("clip", f"{privacy.get('clip_norm', '?')} ({privacy.get('clip', '?')})"),
        ("randomness", summary.get("randomness")),
        ("seed", spec.get("seed", "?")),
    ]
    if seen:
        facts.append(("each client took part", f"{seen.get('min')} to {seen.get('max')} times"))
    without = number(summary.get("test_accuracy_without_noise"))
    if without is not None:
        facts.append(("accuracy without noise (not private)", f"{without:.4f}"))
    return [(name, text_of(value)) for name, value in facts if value is not None]
