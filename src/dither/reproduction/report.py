"""One self-contained page: a section for each paper, each figure beside its criteria."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.reproduction.figure import PAPERS
from dither.reproduction.judging import FAILS, HOLDS, INCONCLUSIVE, NOT_JUDGED

if TYPE_CHECKING:
    from dither.reproduction.running import Reproduction

_CLASS = {HOLDS: "holds", FAILS: "fails", INCONCLUSIVE: "open", NOT_JUDGED: "mute"}
_VIEWS = {"printed": "as printed", "proven": "at equal proven ε"}


def page(result: Reproduction, folder: Path) -> str:
    """The report as HTML, with the pictures of the folder inside it."""
    style = files("dither.reproduction").joinpath("report.css").read_text(encoding="utf-8")
    sections, links = [], []
    for paper, (title, _) in PAPERS.items():
        articles = "".join(_figure(entry, folder) for entry in result.figures if entry["paper"] == paper)
        if articles:
            links.append(f'<a href="#{paper}">{escape(title)}</a>')
            sections.append(f'<section id="{paper}"><h2>{escape(title)}</h2>{articles}</section>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Dither: {len(result.figures)} figures reproduced, scale {escape(result.scale)}</title>"
        f"<style>{style}</style></head><body>"
        f'<nav><strong>Dither</strong><a href="#claims">Criteria</a>{"".join(links)}</nav>'
        f"<main>{_head(result)}{_summary(result)}{''.join(sections)}</main></body></html>\n"
    )


def counts(claims: Iterable[Mapping[str, Any]], which: str = "printed") -> dict[str, int]:
    """How many of the criteria (without their variants) have each status."""
    tally = Counter(claim[which]["status"] for claim in claims if claim[which] and not claim["variant"])
    return {status: tally[status] for status in _CLASS if tally[status]}


def disagreements(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Criteria that hold in one report and fail in another. An undecided one disagrees with nothing."""
    others = {(claim["id"], claim["variant"]): claim for claim in theirs}
    lines = []
    for claim in ours:
        other = others.get((claim["id"], claim["variant"]))
        for which in _VIEWS:
            if other is None or not claim[which] or not other[which]:
                continue
            here, there = claim[which]["status"], other[which]["status"]
            if {here, there} == {HOLDS, FAILS}:
                name = claim["id"] + (f" ({claim['variant']})" if claim["variant"] else "")
                lines.append(f"{name}, {which}: {here} here, {there} there")
    return lines


def _head(result: Reproduction) -> str:
    devices = dict.fromkeys(name for entry in result.figures for name in entry["devices"])
    versions = ", ".join(f"{name} {value}" for name, value in result.provenance["versions"].items())
    printed, proven = (
        ", ".join(f"{number} {status}" for status, number in counts(result.claims, which).items())
        for which in _VIEWS
    )
    rows = [
        ("scale", result.scale),
        ("command", result.provenance["command"]),
        ("criteria as printed", printed),
        ("criteria at equal proven ε", proven or "none at this scale"),
        ("runs", f"{result.provenance['runs']:,} in {result.provenance['seconds'] / 60:.1f} minutes"),
        ("device", ", ".join(devices)),
        ("drawn", f"{result.provenance['when']}, {versions}"),
    ]
    return (
        f"<header><h1>{len(result.figures)} figures of five papers, and what they show</h1>"
        "<p>Every figure is drawn from runs of this code. A criterion is a statistical statement over seeds: it "
        "<b>holds</b>, it <b>fails</b>, the seeds are <b>inconclusive</b>, or this scale cannot judge it. The "
        "second column judges the same criterion at equal <em>proven</em> ε, with noise set by the accountant.</p>"
        f"{_definitions(rows)}</header>"
    )


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f"<dl>{inner}</dl>"


def _summary(result: Reproduction) -> str:
    lines = []
    for claim in result.claims:
        anchor = claim["figure"].replace("/", "-")
        name = claim["id"] + (f"<small>{escape(claim['variant'])}</small>" if claim["variant"] else "")
        lines.append(
            f'<tr class="{"variant" if claim["variant"] else ""}"><th scope="row">{name}</th>'
            f"<td>{escape(claim['claim'])}</td><td>{_badge(claim['printed'])}</td>"
            f'<td>{_badge(claim["proven"])}</td><td><a href="#{anchor}">{escape(claim["figure"])}</a></td></tr>'
        )
    criteria = len({claim["id"] for claim in result.claims})
    return (
        f'<section id="claims"><h2>{criteria} criteria</h2><div class="scroll"><table class="claims"><thead><tr>'
        "<th>criterion</th><th>what the paper finds</th><th>as printed</th><th>at equal proven ε</th>"
        f"<th>figure</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        "<p class='small'>An indented row tests the criterion above it under another reading or a correction. "
        "– : not judged, because noise plays no part or the proven noise leaves nothing to compare.</p></section>"
    )


def _badge(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return '<span class="none">–</span>'
    return f'<span class="badge {_CLASS[verdict["status"]]}">{verdict["status"]}</span>'


def _figure(entry: Mapping[str, Any], folder: Path) -> str:
    if entry["refused"]:
        picture = f'<p class="refused">Not computed: {escape(entry["refused"])}</p>'
    else:
        source = base64.b64encode((folder / entry["files"][0]).read_bytes()).decode()
        alt = escape(f"{entry['title']}. {entry['shows']}")
        picture = f'<img alt="{alt}" src="data:image/png;base64,{source}">'
    compute = f"{entry['runs']} runs, {entry['seconds']:.0f} s on {', '.join(entry['devices'])}; "
    epsilons = entry["epsilons"]
    facts = [
        ("data", entry["data"]),
        ("seeds", str(entry["seeds"] or "")),
        ("settings", entry["settings"]),
        ("reduced here", "; ".join(entry["reduced"])),
        ("at equal proven ε", entry["proven_note"]),
        ("compute", compute + "; ".join(entry["versions"]) if entry["runs"] else "none"),
        ("files", ", ".join(entry.get("files", ()))),
    ]
    tables = "".join(
        f'<div class="table"><h4>{escape(table["title"])}</h4>{_rows(table["rows"])}'
        f'<p class="small">{escape(table["note"])}</p></div>'
        for table in entry["tables"]
    )
    return (
        f'<article id="{entry["id"].replace("/", "-")}"><h3>Fig. {entry["number"]}: {escape(entry["title"])}</h3>'
        f"<figure>{picture}<figcaption>{escape(' '.join([entry['shows'], *entry['notes']]))}</figcaption></figure>"
        f'<div class="beside">{"".join(_claim(claim) for claim in entry["claims"])}</div>'
        f"{tables}{_details(f'claimed and proven ε of {len(epsilons)} settings', epsilons)}"
        f"{_definitions(facts)}</article>"
    )


def _claim(claim: Mapping[str, Any]) -> str:
    variant = f" <small>{escape(claim['variant'])}</small>" if claim["variant"] else ""
    parts = [f"<h4>{claim['id']}{variant}</h4><p>{escape(claim['claim'])}</p>"]
    numbers = []
    for which, name in _VIEWS.items():
        verdict = claim[which]
        if verdict is not None:
            text = f"<span class='text'>{escape(verdict['text'])}</span>"
            parts.append(f"<p>{_badge(verdict)} <b>{name}</b> {text}</p>")
            numbers += [{"view": which, **row} for row in verdict["numbers"]]
    why = " ".join((claim["note"], f"({', '.join(claim['errata'])})" if claim["errata"] else "")).strip()
    if why:
        parts.append(f'<p class="why">{escape(why)}</p>')
    return f'<div class="claim">{"".join(parts)}{_details("numbers", numbers)}</div>'


def _details(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"<details><summary>{title}</summary>{_rows(rows)}</details>" if rows else ""


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return f"<td>{escape(f'{value:.5g}' if isinstance(value, float) else str(value))}</td>"

    head = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(map(cell, row.values()))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
