"""dither account, audit, check, statement, budget: claimed, proven and attacked ε, and what was spent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dither.cli import common
from dither.errors import ConfigError, DataError, SpecError
from dither.types import SHORT_VIEWS, epsilon_text

if TYPE_CHECKING:
    from dither.accounting import ProvenRow
    from dither.auditing.report import Audit, AuditRow
    from dither.data import RecordHashes
    from dither.experiment.account import PrivacyReport
    from dither.experiment.report import AttackedRow, SpentPart

budget = common.Commands(
    help="Show and set privacy budgets: what was spent on which data, and how much may be spent.",
    no_args_is_help=True,
)
Data = Annotated[str, Argument(metavar="DATA", help="Your own file, or the name of a data set.")]
Known = Annotated[str, Argument(metavar="KNOWN", help="A data set of the ledger: its id, name or file.")]
VIOLATION = 5  # exit code


def account(
    run_folder: Annotated[
        Path, Argument(metavar="RUN", help="A run folder, a preset or a spec file.", autocompletion=common.presets)
    ],
    settings: common.Settings = None,
    data_dir: common.DataDir = None,
    ledger: common.LedgerFile = None,
    every_recipe: Annotated[
        bool,
        Option("--every-recipe", help="Also list every bound that was tried, with the reason for each refusal."),
    ] = False,
    ex_ante: Annotated[
        bool, Option("--ex-ante", help="Also list the bounds that hold before the cohorts are drawn at random.")
    ] = False,
) -> None:
    """Print the claimed and the proven ε of a run or a spec, for every adversary, and why they differ."""
    from dither.experiment.account import account as accounted

    what = run_folder if run_folder.exists() else str(run_folder)
    report = accounted(
        what, values=common.values_of(settings), every_recipe=every_recipe, ex_ante=ex_ante, data_dir=data_dir,
        ledger=ledger,
    )  # fmt: skip
    if common.emit(report):
        _print_account(report)


def _print_account(report: PrivacyReport) -> None:
    from dither.experiment.report import sampler_text, uncovered

    epsilon, claim = report.epsilon, report.epsilon.claimed
    rows = [
        {
            "": "claimed",
            "ε": epsilon_text(claim.value, "nearest"),
            "per": claim.unit,
            "adversary": "",
            "neighbouring data": claim.adjacency,
            "source": claim.source,
        }
    ]
    for row in epsilon.notable:
        kind = "assumed" if row.assumed else "proven"
        rows.append({"": kind, "ε": epsilon_text(row.value), "per": row.unit, **_seen(row), "source": row.recipe})
    for shown in epsilon.attacked:
        value, form = f">= {epsilon_text(shown.value, 'down')}", shown.form.split(":")[0]
        kind = f"attacked ({common.LOCAL})" if shown.local else "attacked"
        rows.append({"": kind, "ε": value, "per": shown.unit, **_seen(shown), "source": form})
    common.print_table(rows, title=f"{report.method}: claimed and proven ε at δ = {claim.delta:g}")
    for line in _remarks(epsilon.notable):
        common.tell(line)
    targets = [
        {"target ε": f"{row.target:.15g}", "proven ε": epsilon_text(row.proven),
         "claimed ε": epsilon_text(row.claimed, "nearest"), "weight": f"{row.weight:.3g}", "clients": who}
        for who, row in epsilon.by_target()
    ]  # fmt: skip
    if targets:
        common.print_table(
            targets, title=f"Each client's own target: {SHORT_VIEWS[epsilon.view]}, {epsilon.adjacency}"
        )
    for bounds, title in (
        (report.tried, "Every bound that was tried, for the client with the largest ε"),
        (report.ex_ante, "The same bounds before the cohorts are drawn (R4)"),
    ):
        if bounds:
            rows = [
                {"ε": epsilon_text(row.value), **_seen(row), "source": row.recipe, "detail": row.detail}
                for row in _distinct(bounds)
            ]
            common.print_table(rows, title=title)
    for condition in epsilon.failing_conditions:
        common.tell(f"a condition of the claim does not hold: {condition}")
    if report.why:
        common.tell(f"why they differ: {report.why}")
    for text in sampler_text(epsilon.table):
        common.tell(f"noise: {text}")
    for text in uncovered(epsilon.table):
        common.tell(f"not covered: {text}")
    print_split(report.split)


def _remarks(rows: Sequence[ProvenRow]) -> Iterator[str]:
    """The range over clients, whom a proof relies on, and why no credit is given."""
    for row in rows:
        where = f"{SHORT_VIEWS[row.view]}, {row.adjacency}"
        if row.clients is not None and row.view in ("upload", "sum"):
            spread = [epsilon_text(each) for each in (row.clients.min, row.clients.median, row.clients.max)]
            if len(set(spread)) > 1:
                yield f"{where}: over the clients min {spread[0]}, median {spread[1]}, max {spread[2]}"
        if row.against:
            yield f"{where}: the proof holds {row.against}"
        if row.no_credit:
            yield f"{where}: no credit for the other clients' noise: {row.no_credit}"


def print_split(split: Sequence[SpentPart]) -> None:
    """What was spent on the same records, part by part, and together."""
    if len(split) > 2:
        rows = [
            {"": part.what, "proven ε": epsilon_text(part.epsilon), "δ": f"{part.delta:.5g}"} for part in split
        ]
        title, last = "Spent on these records (with several files: on the one that spent most)", split[-1]
        footer = [last.terms, *(f"not covered: {gap}" for gap in last.not_covered)]
        common.print_table(rows, title=title, footer="\n".join(filter(None, footer)))


def _seen(row: ProvenRow | AttackedRow) -> dict[str, str]:
    return {"adversary": SHORT_VIEWS[row.view], "neighbouring data": row.adjacency}


def _distinct(rows: Sequence[ProvenRow]) -> list[ProvenRow]:
    """Each bound once, at the strongest adversary it holds for."""
    first: dict[tuple[str, float, str, str], ProvenRow] = {}
    for row in rows:
        first.setdefault((row.adjacency, row.value, row.recipe, row.detail), row)
    return list(first.values())


# reason: one parameter an option, as Typer has it
def audit(
    what: Annotated[
        str | None,
        Argument(
            metavar="METHOD | SPEC.toml | RUN",
            help="A preset, a spec or a run folder to attack.",
            autocompletion=common.presets,
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        list[str] | None,
        Option("--view", help="What the adversary sees: upload, sum, broadcast, final (default: all)."),
    ] = None,
    trials: Annotated[int, Option(help="Trials with the record, and as many without.")] = 10_000,
    confidence: Annotated[float, Option(help="Probability with which all attacked ε hold together.")] = 0.95,
    canaries: Annotated[int, Option(min=0, help="Also audit one run with this many canaries.")] = 0,
    rounds: Annotated[
        int | None,
        Option(min=1, help="Attack only the target's first rounds (default: as many as fit into a minute)."),
    ] = None,
    settings: common.Settings = None,
    seed: Annotated[int, Option(help="Seed of the trials, or of the first random spec.")] = 0,
    fuzz: Annotated[int | None, Option(metavar="N", help="Attack N random specs instead of a given one.")] = None,
    out: Annotated[
        Path | None, Option(help="Folder for audit.json and pictures (default: the run's own).")
    ] = None,
    data_dir: common.DataDir = None,
) -> None:
    """Attack a method, a spec or a run: a lower bound on ε for each adversary, measured on the running code.

    The exit code is 5 if an attacked ε exceeds the proven one: a bug in the method, its noise or the proof.
    """
    if fuzz is not None:
        if what is not None or settings:
            raise SpecError("--fuzz draws its own specs: give it no spec and no settings")
        _fuzz(fuzz, seed)
        return
    if what is None:
        raise SpecError("nothing to attack: give a method, a spec or a run folder, or --fuzz N")
    from dither import auditing
    from dither.auditing import report as pictures
    from dither.experiment.folder import RunFolder, cache_folder

    common.check_folder(out or Path())
    folder = Path(what)
    is_run = (folder / "spec.toml").is_file()
    if is_run and not (out or settings or (folder / "local").is_dir()) and RunFolder(folder).spec().data.path:
        raise SpecError(
            f"{str(folder)!r} is a copy without local/, where what is found in own records belongs; give --out"
        )

    def say(row: AuditRow) -> None:
        attacked = epsilon_text(row.attacked.value, "down")
        common.say(f"{SHORT_VIEWS[row.view]}, {row.unit}: attacked ε {attacked}")

    with common.on_interrupt("finished rows are kept; run the same command to continue"):
        outcome = auditing.audit(
            folder if is_run else common.spec_from(what, settings), values=common.values_of(settings),
            views=tuple(view) if view else auditing.VIEWS, trials=trials, confidence=confidence,
            canaries=canaries, rounds=rounds, seed=seed, data_dir=data_dir,
            on_row=None if not common.output().text else say, keep=cache_folder("unfinished"),
        )  # fmt: skip
    # With other settings it is another run that was audited.
    target = out or (folder if is_run and not settings else None)
    if target is not None and out is None and outcome.spec.data.path:
        target = target / "local"  # what an attack finds with the records at hand, no ε covers
    written = pictures.save(outcome, target) if target is not None else []
    if common.emit(outcome):
        _print_audit(outcome, written)
    _exit_on_violation(
        f"{SHORT_VIEWS[row.view]} ({row.unit}): at least {epsilon_text(row.attacked.value, 'down')} was shown at "
        f"{row.attacked.confidence:.4g} confidence ({row.attacked.form}), at most "
        f"{epsilon_text(row.proven)} was proved ({row.recipe}): the method, its noise or the proof is wrong"
        for row in outcome.violations
    )


def _exit_on_violation(lines: Iterable[str]) -> None:
    """Exit code 5 if an attack shows more than was proved."""
    violations = list(lines)
    for line in violations:
        common.say(line, "VIOLATION:", "bold red")
    if violations:
        sys.exit(VIOLATION)


def _fuzz(count: int, seed: int) -> None:
    """Attack random specs, print a row for each, and end with exit code 5 if one leaks more than is proved."""
    from dither.auditing.fuzz import FuzzOutcome, fuzz

    def progress(outcome: FuzzOutcome) -> None:
        done = outcome.seed - seed + 1
        if outcome.violated or done % 10 == 0:
            common.say(f"{done}/{count} specs{f', a violation: {outcome.command}' if outcome.violated else ''}")

    outcomes = fuzz(count, seed=seed, on_outcome=progress)
    if common.emit(outcomes):
        rows = [
            {
                "seed": outcome.seed,
                "method": Path(outcome.drawn.values["method"]).name,
                "model": outcome.drawn.values.get("model.name", ""),
                "batches": outcome.drawn.values.get("batch_sampling", ""),
                "view": outcome.drawn.view,
                "proof": outcome.recipe,
                "proven ε": epsilon_text(outcome.proven),
                "attacked ε": f"{epsilon_text(outcome.attacked, 'down')}{' !' if outcome.violated else ''}",
                "attack": outcome.attack,
            }
            for outcome in outcomes
        ]
        common.print_table(rows, title=f"{count} random specs")
    _exit_on_violation(
        f"at least {epsilon_text(outcome.attacked, 'down')} was shown ({outcome.attack}), at most "
        f"{epsilon_text(outcome.proven)} was proved ({outcome.recipe}); reproduce it with: "
        f"{outcome.command}"
        for outcome in outcomes
        if outcome.violated
    )


def _print_audit(outcome: Audit, written: list[Path]) -> None:
    rows = [
        {
            "adversary": _adversary(row),
            "per": row.unit,
            "claimed ε": "" if row.claimed is None else epsilon_text(row.claimed, "nearest"),
            "proven ε": epsilon_text(row.proven),
            "attacked ε": f"{epsilon_text(row.attacked.value, 'down')}{' !' if row.refutes_claim else ''}",
            "bound": row.attacked.form.split(":")[0],
            "rounds": row.rounds,
            "trials": row.attacked.trials,
        }
        for row in outcome.rows
    ]
    first = outcome.rows[0]
    common.print_table(
        rows,
        title=f"{outcome.spec.method}: at δ = {first.delta:g}, {first.adjacency}, "
        f"all attacked ε with {outcome.confidence:.4g} confidence",
        footer="! larger than the claim: the paper's guarantee does not hold" if outcome.refuted else "",
    )
    for row in outcome.rows:
        for bound in row.bounds:
            value, detail = epsilon_text(bound.value, "down"), f"{bound.detail}; {row.design}"
            common.tell(f"{_adversary(row)}, {row.unit}: {value} by {bound.form} ({detail})")
    for what in dict.fromkeys(text for row in outcome.rows for text in row.not_covered):
        common.tell(f"not covered by the proof: {what.removeprefix('not covered: ')}")
    for note in outcome.notes:
        common.tell(f"note: {note}")
    for path in written:
        typer.echo(f"written: {path}")


def _adversary(row: AuditRow) -> str:
    return "server sees one upload" if row.unit == "message" else SHORT_VIEWS[row.view]


# Budgets


@budget.command("show")
def budget_show(
    data: Annotated[
        str | None, Argument(metavar="DATA", help="Your own file, or a data set's name.")
    ] = None,
    ledger_file: common.LedgerFile = None,
    delta: Annotated[float, Option(help="δ for data sets without a budget.")] = 1e-5,
    federation: Annotated[
        Path | None,
        Option("--federation", metavar="DIR", help="A party's folder: take δ, view and neighbours from its "
        "approved agreement if no budget is set."),
    ] = None,
) -> None:  # fmt: skip
    """Show what has been spent, by data set and client."""

    ledger = _ledger(ledger_file)
    terms: dict[str, Any] = {"delta": delta}
    if federation is not None:
        from dither.federation.party import approved_privacy

        agreed = approved_privacy(federation)
        if agreed is None:
            raise ConfigError(
                f"{str(federation)!r} has no approved agreement; `dither join` shows one and asks for approval"
            )
        terms = {key: agreed[key] for key in ("delta", "view", "adjacency")}
    rows: list[dict[str, Any]] = []
    gaps: dict[str, None] = {}
    named = {_data_id(ledger, file): file for file in _files(data)} if data else {}
    by_file = sorted(ledger.datasets(), key=lambda dataset: ledger.called(dataset).partition("(")[::-1])
    for dataset in named or by_file:
        spent_here = ledger.spent(dataset, **terms)
        records = _own_records(named[dataset]) if named and not spent_here else None
        if records and (known := ledger.known_as(dataset, records(), file=Path(named[dataset]).name)):
            common.say(known, "note:", "bold yellow")
        for spent in spent_here:
            budget, not_covered = spent.budget, [gap for gap in (*spent.numbers, spent.not_covered) if gap]
            gaps |= dict.fromkeys(not_covered)
            rows.append(
                {
                    "data": named.get(dataset) or ledger.called(dataset),
                    "client": spent.client,
                    "spent": epsilon_text(spent.epsilon),
                    "budget": f"{budget.epsilon:.15g}" if budget else "none",
                    "δ": f"{spent.delta:.4g}",
                    "view": spent.view,
                    "neighbouring data": spent.adjacency,
                    "runs": len(spent.runs),
                    **({"not covered": "; ".join(not_covered)} if common.output().json else {}),
                }
            )
    footer = "\n".join(f"not covered: {gap}" for gap in gaps)
    _print_charges(ledger, rows, f"Proven ε spent, by {ledger.path}", footer, data)


def _print_charges(
    ledger: Any, rows: list[dict[str, Any]], title: str, footer: str = "", data: str | None = None
) -> None:
    from dither.accounting.ledger.entries import EVERY_RECORD

    if common.output().text and all(row.get("client") == EVERY_RECORD for row in rows):
        rows = [{name: value for name, value in row.items() if name != "client"} for row in rows]
    if rows or not common.output().text:
        common.print_table(rows, title=title, footer=footer)
    else:
        typer.echo(f"nothing has been charged to {ledger.path}{f' for {data}' if data else ''}")


# reason: one parameter an option, as Typer has it
@budget.command("set")
def budget_set(
    data: Data,
    epsilon: Annotated[float, Option(help="Largest proven ε of everything ever released.")],
    delta: common.Delta = 1e-5,
    view: Annotated[str, Option(help="What the adversary sees: upload, sum, broadcast or final.")] = "upload",
    adjacency: Annotated[str, Option(help="zero-out, replace-one or add/remove.")] = "zero-out",
    client: Annotated[
        str | None, Option(help="One client of a column partition, as site=north (default: all).")
    ] = None,
    id: Annotated[str, Option(help="Your name for these records: files with one name are charged together.")] = "",
    ledger_file: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
    yes: Annotated[bool, Option("--yes", help="Raise a budget without confirmation.")] = False,
) -> None:
    """Set a budget. A run stops at the last round it can afford. Raising a budget asks for confirmation."""
    from dither.accounting.ledger.runs import Budget

    ledger = _ledger(ledger_file)
    limit = Budget(epsilon, delta, view, adjacency).check()
    files = _files(data)
    datasets = {file: _data_id(ledger, file) for file in files}
    for file, dataset in datasets.items():  # whose records it is for: it holds for them in another file, too
        name = f"{id}/{Path(file).stem}" if id and len(files) > 1 else id
        rows = _own_records(file)
        ledger.identify(dataset, rows, file=Path(file).name if rows else "", name=name, new_ledger=new_ledger)
    for file, dataset in datasets.items():
        client = ledger.client(dataset, client) if client else None
        was, raising = ledger.budget(dataset, client), yes
        if was is not None and not limit.within(was) and common.asks(yes):
            raising = typer.confirm(f"Raise the budget of {file} from {was} to {limit}?", err=True)
        ledger.set_budget(dataset, limit, client, raising=raising)
    if common.emit([{"data": file, "client": client, **limit._asdict()} for file in files]):
        for file in files:
            typer.echo(f"budget of {file}{f', client {client}' if client else ''}: {limit}")


@budget.command("same")
def budget_same(data: Data, known: Known, ledger_file: common.LedgerFile = None) -> None:
    """Declare that a file holds records of a known data set: the two are charged together from now on."""
    ledger = _ledger(ledger_file)
    dataset = _data_id(ledger, data)
    ledger.identify(dataset, file=Path(data).name, name=_known(ledger, known))
    with suppress(DataError):  # where it is also like others, on which its owner has not decided
        ledger.identify(dataset, _own_records(data))
    _recorded(f"{data} is charged together with {ledger.called(_known(ledger, known))}")


@budget.command("other")
def budget_other(
    data: Data,
    known: Known,
    ledger_file: common.LedgerFile = None,
    yes: Annotated[bool, Option("--yes", help="Declare it without confirmation.")] = False,
) -> None:
    """Declare that a file holds different people's records than a data set with which it shares rows."""
    ledger = _ledger(ledger_file)
    dataset, than = _data_id(ledger, data), _known(ledger, known)
    if common.asks(yes):
        yes = typer.confirm(
            f"Does {data} contain no person from {ledger.called(than)}? Records in both will be charged twice.",
            err=True,
        )
    if not yes:
        raise SpecError(
            f"{data!r} shares rows with a known data set; confirm with --yes that it holds other people's records"
        )
    ledger.declare_other(dataset, than)
    _recorded(f"{data} holds other records than {ledger.called(than)}")


def _recorded(what: str) -> None:
    if common.emit({"recorded": what}):
        typer.echo(what)


@budget.command("history")
def budget_history(
    data: Annotated[str | None, Argument(metavar="DATA", help="Your own file, or a data set's name.")] = None,
    ledger_file: common.LedgerFile = None,
) -> None:
    """List every charge and every change of a budget, oldest first, and check that nothing was edited."""
    ledger = _ledger(ledger_file)
    rows = [_history_row(entry) for entry in ledger.history(_data_id(ledger, data) if data else None)]
    _print_charges(ledger, rows, f"History of {ledger.path}", data=data)


def _history_row(entry: Any) -> dict[str, Any]:
    if entry.kind == "data":
        what = _about(entry.about)
    elif entry.kind == "budget":
        what = f"budget {entry.budget}" if entry.budget else "budget removed"
        if entry.was is not None:
            raised = entry.budget is None or not entry.budget.within(entry.was)
            what = f"{what}, {'raised from' if raised else 'before:'} {entry.was}"
    else:
        counts = [sum(count for _, count in charge.participations) for charge in entry.charges]
        what = f"rounds {entry.rounds[0]} to {entry.rounds[1] - 1}, at most {max(counts)} participations"
    clients = entry.client or ", ".join(charge.client for charge in entry.charges[:3]) or "all"
    return {
        "": entry.position,
        "time": entry.time[:19].replace("T", " "),
        "data": entry.dataset[:8],
        "run": entry.run[:8],
        "client": clients + (f" and {len(entry.charges) - 3} more" if len(entry.charges) > 3 else ""),
        "what": what,
    }


def _about(about: Any) -> str:
    said = [
        *([f"file {about.file}"] if about.file else []),
        *([f"called {about.name}"] if about.name else []),
        *(f"the same records as {each[:8]}" for each in about.same),
        *(f"other records than {each[:8]}" for each in about.other),
        *(f"also known to ledger {each[:8]}" for each in about.besides),
    ]
    return "data: " + ", ".join(said or ["a sketch of its records"])


def _known(ledger: Any, name: str) -> str:
    """The id of a data set of the ledger, by its id, name or file."""
    dataset = ledger.find(name)
    return dataset if dataset is not None else _data_id(ledger, name)


def _ledger(path: Path | None) -> Any:
    from dither.accounting.ledger.runs import Ledger

    return Ledger(path or Ledger.default_path())


def _files(data: str) -> list[str]:
    """The files of several institutions, each a data set of its own; otherwise the data itself."""
    from dither.data.tables import table_files

    return [str(file) for file in table_files(data)] or [data]


def _own_records(data: str) -> Callable[[], RecordHashes] | None:
    """What says which records a file holds; None for a set of the catalogue, or one of the ledger by its name."""
    from dither.data import entries, hash_records

    own = data not in entries() and Path(data).expanduser().exists()
    return partial(hash_records, data) if own else None


def _data_id(ledger: Any, data: str) -> str:
    from dither.accounting.ledger.runs import data_id
    from dither.data import entries

    if data in entries():
        return data_id(ledger, name=data)
    if (files := _files(data)) != [data]:
        raise SpecError(f"{data!r} matches {len(files)} files, each its own data set; give one of them")
    if Path(data).expanduser().exists():
        return data_id(ledger, path=data)
    if (dataset := ledger.find(data)) is not None:
        return str(dataset)
    raise SpecError(
        f"{data!r} is neither a file (or folder), nor a data set of `dither data list` or of {ledger.path}"
    )


def statement(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run.")],
    out: Annotated[
        Path | None, Option(help="A new file that ends in .md, .html, .pdf or .json (default: print it).")
    ] = None,
    party: Annotated[str, Option(help="One institution of a federation.")] = "",
    ledger: common.LedgerFile = None,
) -> None:
    """Write what a run guarantees, for a data protection officer: in plain words first, then the details."""
    from dither.experiment.statement import statement as stated

    document = stated(run, party=party, ledger=ledger)
    if out is not None:
        document.save(out)
    if common.emit(document):
        typer.echo(document.to_markdown() if out is None else f"wrote {out}")


def check(
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="A description (.toml), an Opacus accountant (.json), or an event's text."),
    ],
    settings: common.Settings = None,
) -> None:
    """Compare claimed and proven ε of training that Dither did not run (exit code 1: the claim has no proof)."""
    from dither.experiment.check import check as checked

    result = checked(file, common.values_of(settings))
    if common.emit(result):
        typer.echo(result.title())
        for what, value in result.overview():
            typer.echo(f"  {what:<12} {value}")
    if result.training.claimed_epsilon is not None and not result.supported:
        sys.exit(1)


def stats(
    files: Annotated[
        list[Path],
        Argument(metavar="FILE...", help="One table for each institution (CSV or Parquet), or folders of them."),
    ],
    epsilon: Annotated[float, Option(help="ε of all these statistics together.")],
    delta: common.Delta = 1e-5,
    columns: Annotated[str, Option(help="Names of columns, separated by commas (default: all).")] = "",
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
) -> None:
    """Print private statistics of tables: counts, means, quantiles and categories, with one ε for all of them."""
    from dither.experiment import statistics

    asked, files = common.names_in(columns), common.tables_in(files)
    with common.on_interrupt(common.CHARGED):
        result = statistics.statistics(
            files, epsilon=epsilon, delta=delta, columns=asked, ledger=ledger, new_ledger=new_ledger
        )
    if common.emit(result):
        title = f"Private statistics of {len(files)} {'table' if len(files) == 1 else 'tables'}"
        common.print_table(result.rows(), title=title, footer=common.counts_guarantee(epsilon, delta))
        for column, why in result.left_out.items():
            common.tell(f"left out: {column!r} {why}")
