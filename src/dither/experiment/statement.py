"""What a run guarantees, for a data protection officer: the questions of NIST SP 800-226, answered in plain words.

statement = dither.statement("runs/first")
statement.save("statement.pdf")              # or .md, .html, .json
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dither.accounting import ProvenRow
from dither.errors import DamagedFile, SpecError, extra
from dither.experiment.folder import to_json, write_bytes
from dither.experiment.report import Report, decode, html_table, load, uncovered
from dither.types import ADVERSARIES, SHORT_VIEWS, __version__, epsilon_text

if TYPE_CHECKING:
    from dither.experiment.evaluation import PrivateScores

_FALSE_ALARMS = (0.001, 0.01, 0.1)
_NEIGHBOURS = {
    "zero-out": "whether a record was used or left blank (zero-out; how many records there are is public)",
    "replace-one": "which of two possible contents a record has (replace-one)",
    "add/remove": "whether a record was there at all (add/remove)",
}
_GUESSES = {
    "zero-out": "was it used, or left blank?",
    "replace-one": "which of two possible contents does it have?",
    "add/remove": "is it there?",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{padding:.3rem .8rem .3rem 0;border-bottom:1px solid #ddd;vertical-align:top}"
    "h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
    "caption{display:none}ul{margin:.3rem 0}h1,code{overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#16191c}td,th{border-color:#444}}"
)
_BESIDE = 35.0  # mm of what follows a heading that must fit onto its page


# An attacker's odds


def guesses_right(epsilon: float, delta: float) -> float:
    """The largest share of right guesses between two neighbours that are equally likely beforehand."""
    return 1.0 if epsilon > 700 else min(1.0, (math.exp(epsilon) + delta) / (1.0 + math.exp(epsilon)))


def true_positives(epsilon: float, delta: float, false_positives: float) -> float:
    """The largest true-positive rate of a test with that false-positive rate (Kairouz, Oh and Viswanath, 2015)."""
    if epsilon > 700:
        return 1.0
    first = math.exp(epsilon) * false_positives + delta
    second = 1.0 - math.exp(-epsilon) * (1.0 - delta - false_positives)
    return min(1.0, first, second)


# The statement

_SCALES = {
    "proven": "scaled by the proof",
    "paper": "scaled by the paper's formula",
    "given": "with a given scale",
    "none": "left out",
}
_SOURCES = {"os": "the operating system", "seeded": "a seed"}


@dataclass(frozen=True)
class Section:
    """A question, its answer in sentences, and a table (its first row is the head)."""

    question: str
    answer: tuple[str, ...]
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Statement:
    """What one run guarantees, in sections."""

    title: str
    sections: tuple[Section, ...]

    def to_markdown(self) -> str:
        lines = [f"# {self.title}", ""]
        for section in self.sections:
            lines += [f"## {section.question}", ""]
            for sentence in section.answer:
                lines += [sentence, ""]
            if section.table:
                head, *rows = ([text.replace("|", "\\|") for text in row] for row in section.table)
                lines += [" | ".join(["", *row, ""]).strip() for row in (head, ["---"] * len(head), *rows)] + [""]
        return "\n".join(lines)

    def to_html(self) -> str:
        """A page by itself: no script, nothing loaded from elsewhere."""
        title = html.escape(self.title)
        parts = [f"<h1>{title}</h1>"]
        for section in self.sections:
            parts.append(f"<h2>{html.escape(section.question)}</h2>")
            parts += [_html(sentence) for sentence in section.answer]
            if section.table:
                parts.append(html_table(section.question, section.table[0], section.table[1:]))
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        body = "\n".join(parts)
        head = f'<html lang="en"><head>{head}<style>{_STYLE}</style></head>'
        return f"<!doctype html>{head}<body>{body}</body></html>\n"

    def to_json(self) -> str:
        return to_json(self, indent=2)

    def to_pdf(self) -> bytes:
        try:
            import fpdf
        except ImportError:
            raise SpecError(f"a PDF needs the package fpdf2: {extra('pdf')}, or write .html") from None
        import matplotlib

        fonts = Path(matplotlib.get_data_path()) / "fonts/ttf"  # with the letters ε and δ
        page = fpdf.FPDF(format="A4")
        page.set_title(self.title)
        page.add_font("text", "", fonts / "DejaVuSans.ttf")
        page.add_font("text", "B", fonts / "DejaVuSans-Bold.ttf")
        page.set_margin(20)
        page.add_page()

        def write(text: str, size: float, style: str = "") -> None:
            page.set_font("text", style, size)
            page.multi_cell(0, size * 0.55, text, align="L", new_x="LMARGIN", new_y="NEXT")
            page.ln(2)

        write(self.title, 15, "B")
        for section in self.sections:
            page.ln(2)
            if page.will_page_break(_BESIDE):
                page.add_page()
            write(section.question, 11, "B")
            for sentence in section.answer:
                write(re.sub("^- ", "• ", sentence.replace("`", "")), 9)
            if section.table:
                page.set_font("text", "", 8)
                widths = [min(max(map(len, column)), 34) + 3 for column in zip(*section.table, strict=True)]
                with page.table(section.table, text_align="LEFT", line_height=5, padding=1, col_widths=widths):
                    pass
                page.ln(2)
        return bytes(page.output())

    def save(self, path: str | Path) -> Path:
        """Write the statement to a new file; its ending (.md, .html, .pdf, .json) says in which format."""
        path = Path(path)
        writers: dict[str, Callable[[], str | bytes]] = {
            ".md": self.to_markdown,
            ".html": self.to_html,
            ".pdf": self.to_pdf,
            ".json": self.to_json,
        }
        if path.suffix.lower() not in writers:
            raise SpecError(f"{str(path)!r} must end in one of {', '.join(writers)}")
        if path.exists():
            raise SpecError(f"{str(path)!r} exists; nothing is overwritten, choose another name")
        if not path.parent.is_dir():
            raise SpecError(f"the folder {str(path.parent)!r} does not exist; create it first")
        content = writers[path.suffix.lower()]()
        write_bytes(path, content if isinstance(content, bytes) else content.encode())
        return path


def _html(sentence: str) -> str:
    """A paragraph, or an item of a list; what stands in backticks is code."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(sentence))
    return f"<ul><li>{text[2:]}</li></ul>" if text.startswith("- ") else f"<p>{text}</p>"


def statement(run: Report | str | Path, *, party: str = "", ledger: str | Path | None = None) -> Statement:
    """The statement of a finished run; `party` names one institution of a federation."""
    report = run if isinstance(run, Report) else load(run)
    # Of the run, also if the spec asks about one message: all messages reveal more than one.
    rows = [row for row in report.epsilon.main if not row.unit.startswith("message")]
    row = rows[0] if rows else report.epsilon.proven()
    composition, everything = _composition(report, row, ledger)
    sections = (
        _in_short(report, row, everything),
        _protected(report, row, party),
        _adversaries(report),
        *_targets(report, party),
        _strength(row),
        composition,
        _mechanism(report),
        _usefulness(report),
        _not_covered(report, row),
        _evidence(report, row),
    )
    who = f", {party}" if party else ""
    names = ", ".join(Path(each).name for each in report.data.split(", "))
    return Statement(f"Privacy statement: {report.method} on {names}{who}", sections)


def _is_client(row: ProvenRow) -> bool:
    return row.unit.endswith("whole client")


def _in_short(report: Report, row: ProvenRow, everything: str) -> Section:
    unit = "institution" if _is_client(row) else "record"
    if not math.isfinite(row.value):
        answer = [f"No guarantee is proven for this run: {row.detail or 'it adds no noise'}. Do not publish it."]
    else:
        odds = 100 * guesses_right(row.value, row.delta)
        answer = [
            f"Suppose {ADVERSARIES[row.view]} guesses about one {unit}: {_GUESSES[row.adjacency]} If both answers "
            f"are equally likely beforehand, the guess is right in at most {epsilon_text(odds)}% of cases (50% is "
            f"chance). This is differential privacy with ε = {epsilon_text(row.value)} and δ = {row.delta:g} "
            f"({'assumed, not proven' if row.assumed else 'proven'})."
        ]
        answer += [everything] if everything else []
    if report.randomness == "seeded":
        answer.append(
            "This was a research run: its noise comes from a seed, and anyone who knows the seed can subtract it. "
            "The statement holds only for those who do not; for records that must be protected, train with "
            "randomness = 'os'."
        )
    return Section("What does this run guarantee, in short?", tuple(answer))


def _protected(report: Report, row: ProvenRow, party: str) -> Section:
    unit = "all records of one institution together" if _is_client(row) else "one record (one row of a table)"
    answer = [f"Unit of privacy: {unit}.", f"What stays uncertain: {_NEIGHBOURS[row.adjacency]}."]
    if not _is_client(row):
        answer.append(
            "A person with k records is protected less: ε grows to at most k times the value, and δ to at most "
            "k·exp((k − 1)ε)·δ."
        )
    if report.federation is not None:
        parties = report.federation.parties
        if party and party not in parties:
            raise SpecError(f"party={party!r} is not in this run; its parties are {', '.join(sorted(parties))}")
        answer.append("The guarantee is for the most exposed institution, so it holds for all of them.")
        named = {name: parties[name] for name in ([party] if party else sorted(parties))}
        table = [("institution", "records", "rounds that counted", "rounds missed")]
        table += [(name, f"{one.records:,}", str(one.counted), str(one.missing)) for name, one in named.items()]
        return Section("What is protected?", tuple(answer), tuple(table))
    if party:
        raise SpecError(f"party={party!r}: this run was simulated, its clients have no names")
    return Section("What is protected?", tuple(answer))


def _adversaries(report: Report) -> Section:
    rows = [row for row in report.epsilon.table if row.adjacency == report.epsilon.adjacency]
    head = ("who", "sees", "proven ε", "relies on")
    table = [
        (
            ADVERSARIES[row.view],
            "one message" if row.unit.startswith("message") else "the whole run",
            epsilon_text(row.value) + (" (assumed)" if row.assumed else ""),
            row.against or "nobody else",
        )
        for row in rows
    ]
    if any(math.isfinite(row.value) for row in rows if row.view == "upload"):
        trust = (
            "Each institution clips and adds noise before it sends: no central party is trusted with its records."
        )
    elif any(math.isfinite(row.value) for row in rows):
        trust = "The server adds the noise: it sees the uploads without it, and must be trusted with them."
    else:
        trust = "No noise protects these records against anyone."
    known = "The adversary may know everything else, including all other records."
    return Section("Against whom?", (trust, known), (head, *table))


def _targets(report: Report, party: str) -> list[Section]:
    """What each institution asked for and got, where they have targets of their own."""
    epsilon = report.epsilon
    rows = [row for row in epsilon.clients if party in ("", row.client)]
    if not rows:
        return []
    head = ("institution", "its target ε", "proven ε", "claimed ε", "weight in the model")
    table = [
        (
            row.client,
            f"{row.target:.15g}",
            epsilon_text(row.proven),
            epsilon_text(row.claimed, "nearest"),
            f"{row.weight:.3g}",
        )
        for row in rows
    ]
    answer = (
        f"Each institution set its own target ε, against {ADVERSARIES[epsilon.view]}. A smaller target means more "
        "noise on the institution's contribution and less weight in the model (1 is the mean weight).",
    )
    return [Section("What does each institution get?", answer, (head, *table))]


def _strength(row: ProvenRow) -> Section:
    if not math.isfinite(row.value):
        return Section("How strong is it?", ("Nothing is proven: an attacker may be certain.",))
    chance = f"1 in {1 / row.delta:,.0f}" if row.delta else "0"
    head = ("false-positive rate of an attack", "its true-positive rate is at most")
    table = [
        (f"{100 * rate:g}%", f"{epsilon_text(100 * true_positives(row.value, row.delta, rate))}%")
        for rate in _FALSE_ALARMS
    ]
    return Section(
        "How strong is it?",
        (
            f"Any output is at most exp(ε) = {epsilon_text(math.exp(min(row.value, 700)))} times as likely in one "
            f"case as in the other, up to a probability of δ ({chance}). This limits every attack:",
        ),
        (head, *table),
    )


def _composition(report: Report, row: ProvenRow, ledger: str | Path | None) -> tuple[Section, str]:
    """What was charged for these records, at the terms of their budgets; and a sentence on what one file of them
    has spent in all, at the terms of the run's own row, if that is more than the run."""
    question = "How does it combine with other releases?"
    from dither.accounting.ledger import Budget
    from dither.accounting.ledger.runs import EVERY_RECORD
    from dither.experiment.account import charged_accounts, charged_ledger

    book = charged_ledger(report, ledger)
    if book is None:
        return _known_parts(report, row, question, ledger)
    accounts = charged_accounts(report, book)
    table = [
        (
            book.called(dataset),
            str(len(spent.runs)),
            epsilon_text(spent.epsilon),
            f"{spent.budget.epsilon:.15g}" if spent.budget else "none set",
            epsilon_text(max(spent.budget.epsilon - spent.epsilon, 0.0), "down") if spent.budget else "–",
            f"{spent.delta:.4g}",
            SHORT_VIEWS[spent.view],
            spent.adjacency,
        )
        for dataset, spent in accounts
    ]
    answer = [
        "All runs on these records that were charged to this ledger, including this one. Other releases add to it."
    ]
    gaps = dict.fromkeys(gap for _, spent in accounts for gap in (*spent.numbers, spent.not_covered) if gap)
    answer += [f"- Not covered by the spent ε: {gap}." for gap in gaps]
    head = ("records", "runs", "spent ε", "budget", "left", "δ", "adversary", "neighbouring data")
    terms = Budget(0.0, row.delta, row.view, row.adjacency)
    total = max((book.total(dataset, EVERY_RECORD, terms) for dataset, _ in accounts), default=(0.0, 0.0))
    return Section(question, tuple(answer), (head, *table)), _in_all("the ledger", *total, row)


def _known_parts(report: Report, row: ProvenRow, question: str, ledger: str | Path | None) -> tuple[Section, str]:
    """The same without a ledger: what else of these records the folder knows."""
    from dither.experiment.account import spent_parts

    parts = spent_parts(report, ledger)
    listed = [(part.what, epsilon_text(part.epsilon), f"{part.delta:.4g}") for part in parts]
    table = (("what", "ε", "δ"), *listed) if parts else ()
    if report.federation is not None and parts:
        rest = "The server also had these records counted. An institution's own ledger may know of more."
        return Section(question, (rest,), table), _in_all("the server", parts[-1].epsilon, parts[-1].delta, row)
    if report.ledger is None:
        rest = (
            "This run was not charged to a ledger. Any other release about the same records, by Dither or "
            "otherwise, adds to its ε."
        )
    else:
        path = Path(ledger or report.ledger.file)
        lacks = "has no charge for this run" if path.is_file() else "is not here"
        rest = f"The ledger {path.name} {lacks}; `--ledger FILE` names the one that was charged."
    both = parts[-1] if parts else None
    said = both and f"With its private schema it is ε = {epsilon_text(both.epsilon)} at δ = {both.delta:.4g}."
    return Section(question, (rest,), table), said or ""


def _in_all(who: str, total: float, delta: float, row: ProvenRow) -> str:
    if not total > row.value:
        return ""
    return (
        f"Everything that {who} knows about these records comes to ε = {epsilon_text(total)} at δ = {delta:.4g} "
        "for the same guess and adversary."
    )


def _mechanism(report: Report) -> Section:
    spec, took_part = report.spec, report.participation
    full = spec.batch_sampling == "full"
    batch = "all records" if full else f"{spec.batch_size} records ({spec.batch_sampling})"
    source = _SOURCES.get(report.randomness, report.randomness)
    values = [
        ("method", report.method),
        ("clients", f"{report.num_clients}, at most {took_part.max} of {report.rounds} rounds each"),
        ("local steps per round", str(spec.local_steps)),
        ("batch", batch),
        ("clip", f"{spec.privacy.clip_norm:g} ({spec.privacy.clip})"),
        ("noise", f"Gaussian, {_SCALES[spec.privacy.noise]}, random numbers from {source}"),
        ("secure aggregation", spec.aggregation),
        ("model parameters", f"{report.num_params:,}"),
        ("software", f"Dither {__version__}"),
        ("spec", spec.digest()[:16]),
    ]
    sentence = "The influence of every record is limited (clip) and then hidden in Gaussian noise."
    return Section("How is it achieved?", (sentence,), (("parameter", "value"), *values))


def _usefulness(report: Report) -> Section:
    scores, table = _private_scores(Path(report.folder)), tuple[tuple[str, ...], ...]()
    gaps: list[str] = []
    if report.test_score is None and scores is not None:
        rows = scores.rows()
        table = (tuple(rows[0]), *(tuple(row.values()) for row in rows))
        gaps = [f"- Not covered by it: {gap}." for gap in scores.not_covered]
        answer = (
            f"On {scores.records:,} records that training left out, counted with noise (95% intervals include "
            f"it). This evaluation has an ε of its own, {epsilon_text(scores.epsilon)} at δ = {scores.delta:g}, "
            "which adds to that of the run."
        )
    elif report.test_score is None:
        answer = "Not stated: the test records are not public, and exact scores on them would not be covered by ε."
    else:
        score = f"{'Accuracy' if report.classes else 'R²'} {report.test_score:.4f}"
        answer = f"{score} on public test records, after {report.rounds} rounds."
    return Section("How useful is the result?", (answer, *gaps), table)


def _private_scores(run: Path) -> PrivateScores | None:
    """Those of a federation's own evaluation, or of the project that `dither start` made the run for."""
    from dither.experiment.evaluation import PrivateScores

    project = run.resolve().parent / "project.json"
    try:
        if (run / "scores.json").is_file():
            return PrivateScores.from_json((run / "scores.json").read_text(encoding="utf-8"))
        if run.resolve().name == "run" and project.is_file():
            return decode(PrivateScores, json.loads(project.read_text(encoding="utf-8"))["scores"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"the private scores of {str(run)!r} cannot be read ({error}); restore them") from None
    return None


def _not_covered(report: Report, row: ProvenRow) -> Section:
    texts = [
        *(f"{text[:1].upper()}{text[1:]}." for text in uncovered([row])),
        "Choices made after looking at the records outside this tool: bounds, columns, earlier models.",
        "Files under `local/` in the run folder: exact figures that stay with the owner of the records.",
        "What the model reveals about a population as a whole: a study that links smoking to a disease affects "
        "smokers who were not in it, too.",
        "Security of machines, keys and people, and side channels such as timing and memory.",
    ]
    return Section("What is not covered?", tuple(f"- {text}" for text in texts))


def _evidence(report: Report, row: ProvenRow) -> Section:
    claim = report.epsilon.claimed
    head = ("kind", "ε", "how it was obtained")
    table = [
        (
            "claimed",
            epsilon_text(claim.value, "nearest"),
            f"the paper's formula, {claim.source}, per {claim.unit}",
        ),
        ("proven", epsilon_text(row.value), f"this software's accountant: {row.recipe}"),
    ]
    released = [attack for attack in report.epsilon.attacked if not attack.local]
    for attack in released:
        how = f"measured, {100 * attack.confidence:.3g}% confidence"
        table.append(("attacked", f"at least {epsilon_text(attack.value, 'down')}", how))
    name = Path(report.folder).name
    commands = f"`dither account {name}` recomputes the proven value, and `dither audit {name}` attacks the run."
    failing = [f"The claim's condition fails: {text}." for text in report.epsilon.failing_conditions]
    if len(released) < len(report.epsilon.attacked):
        failing.append("The run was attacked. What that found is exact, and stays with the owner of the records.")
    return Section("How do we know?", (commands, *failing), (head, *table))
