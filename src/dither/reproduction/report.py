"""One self-contained page: a section a paper, each figure beside its claims."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from dither.reproduction.figures import PAPERS
from dither.reproduction.judging import FAILS, HOLDS, INCONCLUSIVE, NOT_JUDGED

if TYPE_CHECKING:
    from dither.reproduction.running import Result

ORDER = (HOLDS, FAILS, INCONCLUSIVE, NOT_JUDGED)
_CLASS = {HOLDS: "holds", FAILS: "fails", INCONCLUSIVE: "open", NOT_JUDGED: "mute"}


def page(result: Result) -> str:
    """The report as HTML; pictures are inside it."""
    style = files("dither.reproduction").joinpath("report.css").read_text(encoding="utf-8")
    papers = [paper for paper in PAPERS if any(entry["paper"] == paper for entry in result.figures)]
    links = "".join(f'<a href="#{paper}">{escape(PAPERS[paper][0])}</a>' for paper in papers)
    body = [_head(result), _summary(result)]
    for paper in papers:
        entries = [entry for entry in result.figures if entry["paper"] == paper]
        body.append(f'<section id="{paper}"><h2>{escape(PAPERS[paper][0])}</h2>')
        body += [_figure(entry) for entry in entries]
        body.append("</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Dither: {len(result.figures)} figures reproduced, scale {escape(result.scale)}</title>"
        f"<style>{style}</style></head><body>"
        f'<nav><strong>Dither</strong><a href="#claims">Claims</a>{links}</nav><main>{"".join(body)}</main>'
        "</body></html>\n"
    )


def counts(claims: Iterable[Mapping[str, Any]], which: str = "printed") -> dict[str, int]:
    """How many of the criteria (their variants apart) have each status."""
    found = Counter(claim[which]["status"] for claim in claims if claim[which] and not claim["variant"])
    return {status: found[status] for status in ORDER if found[status]}


def disagreements(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Claims that one report says hold and another says fail; undecided ones disagree with nobody."""
    known = {(claim["id"], claim["variant"]): claim for claim in theirs}
    words = []
    for claim in ours:
        other = known.get((claim["id"], claim["variant"]))
        for which in ("printed", "proven"):
            if other is None or not claim[which] or not other[which]:
                continue
            a, b = claim[which]["status"], other[which]["status"]
            if {a, b} == {HOLDS, FAILS}:
                name = f"{claim['id']}{' (' + claim['variant'] + ')' if claim['variant'] else ''}"
                words.append(f"{name}, {which}: {a} here, {b} there")
    return words


def _head(result: Result) -> str:
    figures, claims = result.figures, result.claims
    devices: Counter[str] = Counter()
    for entry in figures:
        devices.update(entry["devices"])
    versions = ", ".join(f"{name} {value}" for name, value in result.made["versions"].items())
    tally = ", ".join(f"{number} {status}" for status, number in counts(claims).items())
    proven = ", ".join(f"{number} {status}" for status, number in counts(claims, "proven").items())
    rows = [
        ("scale", result.scale),
        ("command", result.made["command"]),
        ("criteria as printed", tally),
        ("criteria at equal proven ε", proven or "none at this scale"),
        ("runs", f"{result.made['runs']:,} in {result.made['seconds'] / 60:.1f} minutes"),
        ("device", ", ".join(devices)),
        ("drawn", f"{result.made['when']}, {versions}"),
    ]
    return (
        f"<header><h1>{len(figures)} figures of five papers, and what they claim</h1>"
        "<p>Every figure is drawn from runs of this code. A criterion is a statistical statement over seeds: it "
        "<b>holds</b>, it <b>fails</b>, the seeds are <b>inconclusive</b>, or this scale cannot judge it. The "
        "second column asks the same at equal <em>proven</em> ε, with noise that an accountant has set.</p>"
        f"{_definitions(rows)}</header>"
    )


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f"<dl>{inner}</dl>"


def _summary(result: Result) -> str:
    lines = []
    for entry in result.figures:
        for claim in entry["claims"]:
            anchor = entry["id"].replace("/", "-")
            name = claim["id"] + (f"<small>{escape(claim['variant'])}</small>" if claim["variant"] else "")
            lines.append(
                f'<tr class="{"variant" if claim["variant"] else ""}"><th scope="row">{name}</th>'
                f"<td>{escape(claim['claim'])}</td><td>{_badge(claim['printed'])}</td>"
                f'<td>{_badge(claim["proven"])}</td><td><a href="#{anchor}">{escape(entry["id"])}</a></td></tr>'
            )
    criteria = len({claim["id"] for entry in result.figures for claim in entry["claims"]})
    return (
        f'<section id="claims"><h2>{criteria} criteria</h2><div class="scroll"><table class="claims"><thead><tr>'
        "<th>criterion</th><th>what the paper finds</th><th>as printed</th><th>at equal proven ε</th>"
        f"<th>figure</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        "<p class='small'>Indented rows test a criterion under another reading or a correction. "
        "– : not asked, because noise plays no part or the proven noise leaves nothing to compare.</p></section>"
    )


def _badge(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return '<span class="none">–</span>'
    return f'<span class="badge {_CLASS[verdict["status"]]}">{verdict["status"]}</span>'


def _figure(entry: Mapping[str, Any]) -> str:
    anchor = entry["id"].replace("/", "-")
    picture = ""
    if "png" in entry:
        source = base64.b64encode(entry["png"]).decode()
        alt = escape(f"{entry['title']}. {entry['shows']}")
        picture = f'<img alt="{alt}" src="data:image/png;base64,{source}">'
    if entry["refused"]:
        picture = f'<p class="refused">Not computed: {escape(entry["refused"])}</p>'
    caption = f"<figcaption>{escape(entry['shows'])} {escape(' '.join(entry['notes']))}</figcaption>"
    facts = [
        ("data", entry["data"]),
        ("seeds", str(entry["seeds"] or "")),
        ("settings", entry["settings"]),
        ("reduced here", "; ".join(entry["reduced"])),
        ("at equal proven ε", entry["proven_note"]),
        (
            "compute",
            f"{entry['runs']} runs, {entry['seconds']:.0f} s on {', '.join(entry['devices'])}; "
            f"{'; '.join(entry['versions'])}"
            if entry["runs"]
            else "none",
        ),
        ("files", ", ".join(entry.get("files", ()))),
    ]
    return (
        f'<article id="{anchor}"><h3>Fig. {entry["number"]}: {escape(entry["title"])}</h3>'
        f'<figure>{picture}{caption}</figure><div class="beside">'
        f"{''.join(_claim(claim) for claim in entry['claims'])}</div>"
        f"{''.join(_table(table['title'], table['rows'], table['note']) for table in entry['tables'])}"
        f"{_epsilons(entry['epsilons'])}{_definitions(facts)}</article>"
    )


def _claim(claim: Mapping[str, Any]) -> str:
    variant = f" <small>{escape(claim['variant'])}</small>" if claim["variant"] else ""
    parts = [f"<h4>{claim['id']}{variant}</h4><p>{escape(claim['claim'])}</p>"]
    for name, verdict in (("as printed", claim["printed"]), ("at equal proven ε", claim["proven"])):
        if verdict is None:
            continue
        parts.append(f"<p>{_badge(verdict)} <b>{name}</b> <span class='text'>{escape(verdict['text'])}</span></p>")
    why = " ".join((claim["note"], f"({', '.join(claim['errata'])})" if claim["errata"] else "")).strip()
    if why:
        parts.append(f'<p class="why">{escape(why)}</p>')
    numbers = [
        {"view": name, **row}
        for name, verdict in (("printed", claim["printed"]), ("proven", claim["proven"]))
        if verdict
        for row in verdict["numbers"]
    ]
    if numbers:
        shown = [{key: _number(value) for key, value in row.items()} for row in numbers]
        parts.append(f"<details><summary>numbers</summary>{_rows(shown)}</details>")
    return f'<div class="claim">{"".join(parts)}</div>'


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _epsilons(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    return f"<details><summary>claimed and proven ε of {len(rows)} settings</summary>{_rows(rows)}</details>"


def _table(title: str, rows: Sequence[Mapping[str, Any]], note: str) -> str:
    return f'<div class="table"><h4>{escape(title)}</h4>{_rows(rows)}<p class="small">{escape(note)}</p></div>'


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
