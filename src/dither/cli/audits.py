"""dither audit: attack a method, a spec or a run, and print claimed, proven and attacked ε."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dither.cli import options
from dither.cli.options import DataDir, Json, Quiet, Settings, spec_from
from dither.cli.printing import SEEN, epsilon_text, error_terminal, print_table
from dither.cli.stopping import going_on

VIOLATION = 5  # exit code


def audit(
    what: Annotated[
        str,
        typer.Argument(
            metavar="METHOD | SPEC.toml | RUN",
            help="A preset, a spec or a run folder to attack.",
            autocompletion=options.presets,
        ),
    ],
    view: Annotated[
        list[str] | None,
        typer.Option("--view", help="What the adversary sees: upload, sum, broadcast, final (default: all)."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials with the record, and as many without.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="Probability with which each attacked ε holds.")] = 0.95,
    canaries: Annotated[int, typer.Option(help="Also one run with this many canaries; 0: none.")] = 0,
    rounds: Annotated[
        int | None, typer.Option(help="Look at the target's first rounds only (default: all that fit a minute).")
    ] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="Seed of the trials.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for audit.json and pictures (default: the run's own)."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack: a lower bound on ε for each adversary, measured on the code that runs.

    Ends with exit code 5 where the attacked ε exceeds the proven one: a bug in method, noise or proof.
    """
    from dither import auditing
    from dither.auditing import report as pictures
    from dither.experiment.folder import to_json
    from dither.experiment.partial import default_folder
    from dither.experiment.report import Report

    folder = Path(what)
    is_run = (folder / "spec.toml").is_file()
    spec = spec_from(str(folder / "spec.toml") if is_run else what, None, settings, None)
    console = error_terminal()

    def say(row: dict[str, Any]) -> None:
        seen = f"{SEEN[row['view']]}, {row['unit']}"
        console.print(f"{seen}: attacked ε {epsilon_text(row['attacked']['value'])}", style="dim", highlight=False)

    finished = Report.read(folder) if is_run else None
    with going_on("finished rows are kept: the same command goes on from there"):
        found = auditing.audit(
            spec,
            completed_rounds=finished.rounds if finished is not None and not settings else None,
            views=tuple(view) if view else auditing.VIEWS,
            trials=trials,
            confidence=confidence,
            canaries=canaries,
            rounds=rounds,
            seed=seed,
            data_dir=data_dir,
            on_row=None if as_json or quiet else say,
            keep=default_folder(),
        )
    # With other settings it is another run that was audited.
    target = out or (folder if is_run and not settings else None)
    if target is not None and out is None and spec.data.path:
        target = target / "local"  # what an attack finds with the records at hand, no ε covers
    written = pictures.save(found, target) if target is not None else []
    if as_json:
        typer.echo(to_json(found.to_dict(), indent=2))
    elif not quiet:
        _print(found, written)
    if found.violations:
        for row in found.violations:
            console.print(
                f"[bold red]VIOLATION:[/] {SEEN[row['view']]} ({row['unit']}): at least "
                f"{epsilon_text(row['attacked']['value'])} was shown at {row['attacked']['confidence']:.4g} "
                f"confidence ({row['attacked']['form']}), at most {epsilon_text(row['proven'])} was proved "
                f"({row['recipe']}): the method, its "
                "noise or the proof is wrong",
                soft_wrap=True,
                highlight=False,
            )
        sys.exit(VIOLATION)


def _print(found: Any, written: list[Path]) -> None:
    rows = []
    for row in found.rows:
        attacked = row["attacked"]
        rows.append(
            {
                "seen": "one upload" if row["unit"] == "message" else SEEN[row["view"]],
                "unit": row["unit"],
                "claimed ε": "" if row["claimed"] is None else epsilon_text(row["claimed"]),
                "proven ε": epsilon_text(row["proven"]),
                "attacked ε": f"{epsilon_text(attacked['value'])}{' !' if row['refutes_claim'] else ''}",
                "by": attacked["form"].split(":")[0],
                "rounds": row["rounds"],
                "trials": attacked["trials"],
            }
        )
    first = found.rows[0]
    print_table(
        rows,
        title=f"{found.spec.method}: at δ = {first['delta']:g}, {first['adjacency']}, "
        f"each attacked ε with {found.confidence:.4g} confidence",
        footer="! above the claim: the paper's guarantee does not hold" if found.refuted else "",
    )
    for row in found.rows:
        for bound in row["bounds"]:
            seen = "one upload" if row["unit"] == "message" else SEEN[row["view"]]
            value = epsilon_text(bound["value"])
            typer.echo(f"{seen}, {row['unit']}: {value} by {bound['form']} ({bound['detail']}; {row['design']})")
    for what in dict.fromkeys(text for row in found.rows for text in row["not_covered"]):
        typer.echo(f"not covered by the proof: {what.removeprefix('not covered: ')}")
    for note in found.notes:
        typer.echo(f"note: {note}")
    for path in written:
        typer.echo(f"written: {path}")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(audit)
