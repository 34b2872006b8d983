"""dither budget show, set, history."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dither.cli.options import Json, LedgerFile, Quiet
from dither.cli.printing import epsilon_text, print_table
from dither.errors import SpecError

app = typer.Typer(help="Privacy budgets: what was spent on which data, and how much may be.", no_args_is_help=True)
Data = Annotated[str, typer.Argument(metavar="DATA", help="Your own file, or the name of a data set.")]


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
    from dither.privacy.accounting import FLOAT_NOISE

    book = _ledger(ledger)
    rows = []
    for dataset in [_data_id(book, data)] if data else book.datasets():
        for spent in book.spent(dataset, delta=delta):
            budget = spent.budget
            rows.append(
                {
                    "data": data or dataset[:8],
                    "client": spent.client,
                    "spent": epsilon_text(spent.epsilon),
                    "budget": epsilon_text(budget.epsilon) if budget else "none",
                    "δ": f"{spent.delta:g}",
                    "view": spent.view,
                    "neighbours": spent.adjacency,
                    "runs": len(spent.runs),
                    **({"not covered": FLOAT_NOISE} if as_json else {}),
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
        footer=f"not covered: {FLOAT_NOISE}",
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
    ledger: LedgerFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Set a budget: a run that would exceed it stops at the last round it can pay."""
    from dither.spending import Budget

    book = _ledger(ledger)
    limit = Budget(epsilon, delta, view, adjacency)
    book.set_budget(_data_id(book, data), limit, client)
    if as_json:
        print_table([{"data": data, "client": client, **limit._asdict()}], as_json=True)
    elif not quiet:
        typer.echo(f"budget of {data}{f', client {client}' if client else ''}: {limit}")


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
    if entry.kind == "budget":
        what = f"budget {entry.budget}" if entry.budget else "budget removed"
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


def _ledger(path: Path | None) -> Any:
    from dither.spending import Ledger

    return Ledger(path or Ledger.default_path())


def _data_id(book: Any, data: str) -> str:
    from dither.data import entries
    from dither.spending import data_id

    if data in entries():
        return data_id(book, name=data)
    if not Path(data).expanduser().exists():
        raise SpecError(f"{data!r} is neither a file (or folder) nor a data set of `dither data list`")
    return data_id(book, path=data)
