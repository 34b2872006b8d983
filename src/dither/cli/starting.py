"""dither start: from raw tables to an evaluated model with one ε."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli.common import (
    Json,
    LedgerFile,
    NewLedger,
    Quiet,
    RunProgress,
    Settings,
    error_terminal,
    on_interrupt,
    print_table,
)
from dither.cli.privacy import print_split
from dither.errors import SpecError

if TYPE_CHECKING:
    from dither.experiment.start import Project


# reason: one parameter an option, as Typer has it
def start(
    tables: Annotated[
        list[str],
        typer.Argument(
            metavar="TABLES...",
            help="Your own table (CSV, Parquet), several (one for each institution), or a folder of them.",
        ),
    ],
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="Label column (default: proposed from the header).")
    ] = "",
    epsilon: Annotated[float, typer.Option(help="The ε that covers everything.")] = 1.0,
    delta: Annotated[
        float, typer.Option(help="δ of that ε (default: from the record count).", show_default=False)
    ] = 0.0,
    split: Annotated[
        str, typer.Option(help="Percentages of the budget (μ²) for schema, training and evaluation.")
    ] = "5,85,10",
    task: Annotated[
        str, typer.Option(help="classification, regression, or auto (from the label's values).")
    ] = "auto",
    classes: Annotated[str, typer.Option(help="Public classes of the label, separated by commas.")] = "",
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Keep this column, whatever it looks like.")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder to create (default: runs/start-TIME).")] = None,
    ledger: LedgerFile = None,
    new_ledger: NewLedger = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go from raw tables to an evaluated private model, with one ε for schema, training and evaluation."""
    from dither.experiment import start as project
    from dither.experiment.folder import to_json
    from dither.experiment.private_schema import Wanted
    from dither.spec import parse_setting

    asks = not yes and not as_json and sys.stdin.isatty()
    path = tables if len(tables) > 1 else tables[0]
    if not label:
        proposed, header = project.propose_label(path)
        label = typer.prompt(f"Label column ({', '.join(header)})", default=proposed) if asks else proposed
    try:
        shares = [float(part) / 100 for part in split.split(",")]
    except ValueError:
        raise SpecError(f"--split {split!r} must be three numbers, such as 5,85,10") from None
    wanted = Wanted(label, task, _names(classes), tuple(drop or ()), tuple(keep or ()))
    plan = project.plan_project(path, wanted, epsilon=epsilon, delta=delta, shares=shares)
    console = error_terminal()
    if not quiet and not as_json:
        for what, value in plan.lines():
            console.print(f"{what:<11} {value}", highlight=False, markup=False, soft_wrap=True)
    if asks and not typer.confirm("Nothing has been looked at yet. Spend this?", default=True, err=True):
        return
    view = RunProgress(silent=quiet or as_json)
    advice = "what was charged stays charged; `dither budget show` lists it"

    def step(line: str) -> None:
        if not quiet and not as_json:
            console.print(f"{line} ...", style="dim", highlight=False)

    with on_interrupt(advice), view:
        done = project.start_project(
            plan, out=out, ledger=ledger, new_ledger=new_ledger, on_step=step,
            values=dict(parse_setting(each) for each in settings or []),
            on_start=view.start, on_evaluation=view.update,
        )  # fmt: skip
    if as_json:
        typer.echo(to_json(done.to_dict(), indent=2))
    elif not quiet:
        _print(done)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print(done: Project) -> None:
    from dither.experiment.report import uncovered

    for column, why in done.excluded.items():
        typer.echo(f"left out: {column!r} {why}")
    title = f"Private scores on {done.scores.records:,} records that training left out"
    print_table(done.scores.rows(), title=title, footer="intervals of 95% include the noise")
    print_split(done.split)
    gaps = uncovered(done.report.epsilon.main)
    covers = "covers all of it" if not gaps else "covers all of it but what follows"
    typer.echo(f"one ε = {done.epsilon.epsilon:.4g} at δ = {done.epsilon.delta:.5g} {covers}")
    for text in gaps:
        typer.echo(f"not covered: {text}")
    typer.echo(f"in {done.folder}: schema.toml, spec.toml, run/ (the model), federation.toml, project.json")
    typer.echo(f"next: dither account {done.folder / 'run'}; dither statement {done.folder / 'run'}")
    served = done.folder / "federation.toml"
    typer.echo(f"the same with each table at its owner's: dither serve {served} (docs/deployment.md)")
