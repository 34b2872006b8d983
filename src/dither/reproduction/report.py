"""One self-contained page: a section for each paper, each figure beside its criteria."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.reproduction.figure import AXIS_LABELS, PAPERS, VIEW_TITLES, Table, paper
from dither.reproduction.judging import FAILS, HOLDS, INCONCLUSIVE, NOT_JUDGED, JudgedCriterion, Verdict, counted

if TYPE_CHECKING:
    from dither.reproduction.running import Reproduction

_LONG = 130  # characters of a verdict that are shown at once
_WIDE = 60  # characters of a row for which a phone has no room
_CODE = re.compile("`([^`]+)`")
_CLASS = {HOLDS: "holds", FAILS: "fails", INCONCLUSIVE: "open", NOT_JUDGED: "mute"}


@dataclass(frozen=True)
class FigureResult:
    """One figure, judged."""

    id: str
    paper: str
    number: str
    title: str
    shows: str
    data: str  # "" where nothing is trained
    scale: str
    seeds: int
    reduced: tuple[str, ...]  # what this scale leaves out
    settings: str
    proven_note: str
    notes: tuple[str, ...]
    open: tuple[dict[str, str], ...]  # what the paper leaves open
    refused: str  # why it could not be computed
    tables: tuple[Table, ...]
    epsilons: tuple[dict[str, str], ...]  # claimed and proven ε of each setting, in words
    runs: int
    seconds: float
    devices: dict[str, int]
    versions: tuple[str, ...]
    claims: tuple[JudgedCriterion, ...]
    files: tuple[str, ...] = ()  # those that were drawn

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as report.json has them."""
        return {name: value for name, value in asdict(self).items() if name != "files" or value}


def page(result: Reproduction, folder: Path) -> str:
    """The report as HTML, with the pictures of the folder inside it."""
    here = files("dither.reproduction")
    template, style = (here.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    sections, links = "", ""
    for name in PAPERS:
        articles = "".join(_figure(figure, folder) for figure in result.figures if figure.paper == name)
        if articles:
            title = escape(paper(name).title)
            links += f'<a href="#{name}">{title}</a>'
            sections += f'<section id="{name}"><h2>{title}</h2>{articles}</section>'
    number = len({claim.id for claim in result.claims})
    return template.format(
        style=style,
        links=links,
        sections=sections,
        scale=escape(result.scale),
        figures=counted(len(result.figures), "figure"),
        papers=counted(len({figure.paper for figure in result.figures}), "paper"),
        facts=_facts(result),
        criteria="1 criterion" if number == 1 else f"{number} criteria",
        views="".join(f"<th>{name}</th>" for name in VIEW_TITLES.values()),
        claims="".join(_row(figure, claim) for figure in result.figures for claim in figure.claims),
    )


def counts(claims: Iterable[JudgedCriterion], which: str = "printed") -> str:
    """ "21 hold, 14 fail, 1 is inconclusive": the criteria (without their variants) by status."""
    verdicts = (getattr(claim, which) for claim in claims if not claim.variant)
    tally = Counter(verdict.status for verdict in verdicts if verdict)
    words = {HOLDS: ("holds", "hold"), FAILS: ("fails", "fail")}
    phrases = ((tally[status], words.get(status, (f"is {status}", f"are {status}"))) for status in _CLASS)
    return ", ".join(f"{number} {one if number == 1 else several}" for number, (one, several) in phrases if number)


def disagreements(ours: Sequence[JudgedCriterion], theirs: Sequence[JudgedCriterion]) -> list[str]:
    """Criteria that hold in one report and fail in another. An undecided one disagrees with nothing."""
    others = {claim.name: claim for claim in theirs}
    lines = []
    for claim in ours:
        for which in VIEW_TITLES:
            here, there = getattr(claim, which), getattr(others.get(claim.name), which, None)
            if here and there and {here.status, there.status} == {HOLDS, FAILS}:
                lines.append(f"{claim.name}, {which}: {here.status} here, {there.status} there")
    return lines


def _facts(result: Reproduction) -> str:
    made, devices = result.provenance, dict.fromkeys(name for figure in result.figures for name in figure.devices)
    versions = ", ".join(f"{name} {value}" for name, value in made["versions"].items())
    rows = [
        ("scale", result.scale),
        ("command", made["command"]),
        *((f"criteria {title}", counts(result.claims, which)) for which, title in VIEW_TITLES.items()),
        ("computed", f"{counted(made['runs'], 'run')}, together {made['seconds'] / 60:.1f} minutes"),
        ("device", _names(devices)),
        ("drawn", f"{made['when']}, {versions}"),
        ("note", made.get("note", "")),
    ]
    return _definitions(rows)


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    values = ((name, _CODE.sub(r"<code>\1</code>", escape(value))) for name, value in rows if value)
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in values)
    return f"<dl>{inner}</dl>"


def _row(figure: FigureResult, claim: JudgedCriterion) -> str:
    """A criterion in the table of all."""
    name = claim.id + (f"<small>{escape(claim.variant)}</small>" if claim.variant else "")
    views = "".join(
        f'<td data-label="{title}">{_badge(getattr(claim, which))}</td>' for which, title in VIEW_TITLES.items()
    )
    return (
        f'<tr class="{"variant" if claim.variant else ""}"><th scope="row">{name}</th>'
        f"<td>{escape(claim.claim)}</td>{views}"
        f'<td data-label="with open settings changed">{escape(claim.robust_text)}</td>'
        f'<td data-label="figure"><a href="#{_anchor(figure)}">{escape(figure.id)}</a></td></tr>'
    )


def _anchor(figure: FigureResult) -> str:
    return figure.id.replace("/", "-")


def _badge(verdict: Verdict | None) -> str:
    if verdict is None:
        return '<span class="none">–</span>'
    return f'<span class="badge {_CLASS[verdict.status]}">{verdict.status}</span>'


def _names(devices: Iterable[str]) -> str:
    return ", ".join(" ".join(dict.fromkeys(name.split(": "))) for name in devices)  # "cpu: cpu" is "cpu"


def _figure(figure: FigureResult, folder: Path) -> str:
    pictures = f'<p class="refused">Not computed: {escape(figure.refused)}</p>' if figure.refused else ""
    alt = escape(f"{figure.title}. {figure.shows}")
    for name in (name for name in figure.files if name.endswith(".png")):
        drawn = base64.b64encode((folder / name).read_bytes()).decode()
        pictures += f'<img alt="{alt}" src="data:image/png;base64,{drawn}">'
    compute = f"{counted(figure.runs, 'run')}, {figure.seconds:.0f} s on {_names(figure.devices)}; "
    rows = [
        ("data", figure.data),
        ("seeds", _seeds(figure)),
        ("settings", figure.settings),
        ("reduced here", "; ".join(figure.reduced)),
        ("at equal proven ε", figure.proven_note),
        ("compute", compute + "; ".join(figure.versions) if figure.runs else "none"),
        ("files", ", ".join(figure.files)),
    ]
    tables = "".join(
        f'<div class="table"><h4>{escape(table.title)}</h4>{_rows(table.rows)}'
        f'<p class="small">{escape(table.note)}</p></div>'
        for table in figure.tables
    )
    spent = f"claimed and proven ε of {counted(len(figure.epsilons), 'setting')}"
    return (
        f'<article id="{_anchor(figure)}"><h3>Fig. {figure.number}: {escape(figure.title)}</h3>'
        f"<figure>{pictures}<figcaption>{escape(' '.join([figure.shows, *figure.notes]))}</figcaption></figure>"
        f'<div class="beside">{"".join(_claim(claim) for claim in figure.claims)}</div>'
        f"{tables}{_details('what the paper leaves open', figure.open)}"
        f"{_details(spent, figure.epsilons)}"
        f"{_definitions(rows)}</article>"
    )


def _claim(claim: JudgedCriterion) -> str:
    variant = f" <small>{escape(claim.variant)}</small>" if claim.variant else ""
    parts = [f"<h4>{claim.id}{variant}</h4><p>{escape(claim.claim)}</p>"]
    numbers, judged = [], False
    for which, name in VIEW_TITLES.items():
        verdict = getattr(claim, which)
        if verdict is not None:
            text = _verdict_text(verdict.text)
            parts.append(f'<div class="verdict">{_badge(verdict)} <b>{name}</b> {text}</div>')
            numbers += [{"view": which, **_number(row)} for row in verdict.numbers]
            judged |= verdict.status != NOT_JUDGED
    why = [claim.note if judged else "", f"errata: {', '.join(claim.errata)}" if claim.errata else ""]
    if any(why):
        parts.append(f'<p class="why">{escape("; ".join(filter(None, why)))}</p>')
    robust = claim.robustness
    if robust:
        parts.append(
            f"<p>With open settings changed: {escape(claim.robust_text)} (scale {escape(robust.scale)})</p>"
        )
    changed = [
        {"setting": row["setting"], "verdict": row["verdict"], "seeds": row.get("seeds", "")}
        for row in (robust.verdicts if robust else ())
    ]
    tables = _details("numbers", numbers) + _details("open settings", changed)
    return f'<div class="claim">{"".join(parts)}{tables}</div>'


def _number(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a verdict's numbers, with its error beside its mean; a formula has none."""
    error = f" ± {row['standard error']:.2g}" if row["seeds"] else ""
    return {"setting": row["setting"], "mean ± standard error": f"{row['mean']:.5g}{error}", "seeds": row["seeds"]}


def _seeds(figure: FigureResult) -> str:
    """How many seeds each line has, and how many an undecided criterion was given."""
    verdicts = [getattr(claim, view) for claim in figure.claims for view in VIEW_TITLES]
    most = max((verdict.seeds for verdict in verdicts if verdict), default=0)
    more = f"; up to {most} where a criterion was undecided" if most > figure.seeds else ""
    return f"{figure.seeds}{more}" if figure.seeds else ""


def _verdict_text(text: str) -> str:
    """The text of a verdict, with metrics in words; a long one is folded after its first words."""
    for metric, words in AXIS_LABELS.items():
        text = text.replace(metric, words)
    text = re.sub(r"(?<=[ =])-(?=\d)", "−", text)
    if len(text) <= _LONG:
        return f"<span class='text'>{escape(text)}</span>"
    first = text[: text.rfind("; ", 0, _LONG) + 1 or text.rindex(" ", 0, _LONG)]
    rest = text.removeprefix(first)
    return f"<details class='text'><summary>{escape(first)} …</summary>…{escape(rest)}</details>"


def _details(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"<details><summary>{title}</summary>{_rows(rows)}</details>" if rows else ""


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; one that is too wide for a phone is stacked there, each cell with its label."""

    def cell(name: str, value: Any) -> str:
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        return f'<td data-label="{escape(name)}">{escape(text)}</td>'

    names = dict.fromkeys(name for row in rows for name in row)
    wide = max(sum(len(str(value)) for value in row.values()) for row in rows) > _WIDE
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(cell(name, row.get(name, '')) for name in names)}</tr>" for row in rows)
    table = f'<table class="{"stack" if wide else ""}">'
    return f'<div class="scroll">{table}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
