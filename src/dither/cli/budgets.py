"""dither budget show, set, same, other, history."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dither.cli.options import Json, LedgerFile, Quiet
from dither.cli.printing import epsilon_text, print_table
from dither.errors import SpecError

app = typer.Typer(help="Privacy budgets: what was spent on which data, and how much may be.", no_args_is_help=True)
Data = Annotated[str, typer.Argument(metavar="DATA", help="Your own file, or the name of a data set.")]
Known = Annotated[str, typer.Argument(metavar="KNOWN", help="A data set of the ledger: its id, name or file.")]
_CHOSEN = "settings of sampled runs that were chosen after looking at earlier results"


@app.command("show")
def budget_show(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="Your own file, or a data set's name.")
    ] = None,
    ledger: LedgerFile = None,
    delta: Annotated[float, typer.Option(help="δ for accounts without a budget.")] = 1e-5,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What has been spent, per data set and client."""
    from dither.accounting import FLOAT_NOISE

    book = _ledger(ledger)
    rows, gaps = [], {FLOAT_NOISE: None}
    for dataset in [_data_id(book, data)] if data else book.datasets():
        for spent in book.spent(dataset, delta=delta):
            budget, more = spent.budget, [_CHOSEN] if len(spent.runs) > 1 else []
            gaps |= dict.fromkeys(more)
            rows.append(
                {
                    "data": data or book.called(dataset),
                    "client": spent.client,
                    "spent": epsilon_text(spent.epsilon),
                    "budget": epsilon_text(budget.epsilon) if budget else "none",
                    "δ": f"{spent.delta:g}",
                    "view": spent.view,
                    "neighbours": spent.adjacency,
                    "runs": len(spent.runs),
                    **({"not covered": "; ".join([FLOAT_NOISE, *more])} if as_json else {}),
                }
            )
    if not rows and not as_json and not quiet:
        typer.echo(f"nothing has been charged to {book.path}")
        return
    print_table(
        rows,
        as_json=as_json,
        quiet=quiet,
        title=f"Proven ε spent, by {book.path}",
        footer="\n".join(f"not covered: {gap}" for gap in gaps),
    )


@app.command("set")
def budget_set(
    data: Data,
    epsilon: Annotated[float, typer.Option(help="Most proven ε of everything ever released.")],
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    view: Annotated[
        str, typer.Option(help="What the adversary sees: upload, sum, broadcast or final.")
    ] = "upload",
    adjacency: Annotated[str, typer.Option(help="zero-out, replace-one or add/remove.")] = "zero-out",
    client: Annotated[str | None, typer.Option(help="One client of a column partition (default: all).")] = None,
    id: Annotated[
        str, typer.Option(help="Your name for these records: files with one name are charged together.")
    ] = "",
    ledger: LedgerFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Raise a budget without asking.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Set a budget: a run that would exceed it stops at the last round it can pay. Raising one asks first."""
    from dither.accounting.ledger.runs import Budget

    book = _ledger(ledger)
    limit = Budget(epsilon, delta, view, adjacency).check()
    dataset = _data_id(book, data)
    if id:
        book.identify(dataset, file=Path(data).name, name=id)
    was = book.budget(dataset, client)
    if was is not None and not limit.within(was) and not yes and not as_json and sys.stdin.isatty():
        yes = typer.confirm(f"Raise the budget of {data} from {was} to {limit}?", err=True)
    book.set_budget(dataset, limit, client, raising=yes)
    if as_json:
        print_table([{"data": data, "client": client, **limit._asdict()}], as_json=True)
    elif not quiet:
        typer.echo(f"budget of {data}{f', client {client}' if client else ''}: {limit}")


@app.command("same")
def budget_same(
    data: Data,
    known: Known,
    ledger: LedgerFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say that a file holds records of a data set that is known: from now on they are charged together."""
    book = _ledger(ledger)
    book.identify(_data_id(book, data), file=Path(data).name, name=_known(book, known))
    _said(f"{data} is charged together with {book.called(_known(book, known))}", as_json, quiet)


@app.command("other")
def budget_other(
    data: Data,
    known: Known,
    ledger: LedgerFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Say so without being asked.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say that a file holds other people's records than a data set it shares rows with."""
    book = _ledger(ledger)
    dataset, than = _data_id(book, data), _known(book, known)
    if not yes and not as_json and sys.stdin.isatty():
        yes = typer.confirm(
            f"Is nobody of {book.called(than)} in {data}? Records in both will be spent twice.", err=True
        )
    if not yes:
        raise SpecError(f"nobody has confirmed that {data!r} holds other people's records: confirm it with --yes")
    book.declare_other(dataset, than)
    _said(f"{data} holds other records than {book.called(than)}", as_json, quiet)


@app.command("history")
def budget_history(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="Your own file, or a data set's name.")
    ] = None,
    ledger: LedgerFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Every charge and every change of a budget, oldest first; checks that nothing was edited."""
    book = _ledger(ledger)
    rows = [_history_row(entry) for entry in book.history(_data_id(book, data) if data else None)]
    if not rows and not as_json and not quiet:
        typer.echo(f"nothing has been charged to {book.path}")
        return
    print_table(rows, as_json=as_json, quiet=quiet, title=f"History of {book.path}")


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
        what = f"rounds {entry.rounds[0]} to {entry.rounds[1] - 1}, {max(counts)} participations at most"
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
        *(f"known to ledger {each[:8]} too" for each in about.besides),
    ]
    return "data: " + ", ".join(said or ["a sketch of its records"])


def _said(text: str, as_json: bool, quiet: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"recorded": text}, ensure_ascii=False))
    elif not quiet:
        typer.echo(text)


def _known(book: Any, name: str) -> str:
    """The id of a data set of the ledger, by what somebody calls it."""
    found = book.find(name)
    return found if found is not None else _data_id(book, name)


def _ledger(path: Path | None) -> Any:
    from dither.accounting.ledger.runs import Ledger

    return Ledger(path or Ledger.default_path())


def _data_id(book: Any, data: str) -> str:
    from dither.accounting.ledger.runs import data_id
    from dither.data import entries

    if data in entries():
        return data_id(book, name=data)
    if Path(data).expanduser().exists():
        return data_id(book, path=data)
    if (known := book.find(data)) is not None:
        return str(known)
    raise SpecError(
        f"{data!r} is neither a file (or folder), nor a data set of `dither data list` or of {book.path}"
    )
