"""dither sweep."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dither.cli import crews
from dither.cli.bars import Bar
from dither.cli.options import DataDir, Json, Settings, spec_from
from dither.cli.printing import SEEN, epsilon_text, error_terminal, escape, print_table, short, terminal


def sweep(
    what: Annotated[str, typer.Argument(metavar="PRESET | SPEC.toml", help="What every run starts from.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Values a key takes: privacy.epsilon=0.1,1 or seed=0:5 (0 to 4). Give it once a key.",
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to make, or to continue (default: sweeps/METHOD-DATA-TIME)."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="What runs that train side by side may take, e.g. 4GB."),
    ] = None,
    data_dir: DataDir = None,
    processes: crews.Processes = None,
    process: crews.Process = None,
    coordinator: crews.Coordinator = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Train every combination of the varied values, as few compiled programs; leaves tables and a picture."""
    if process:
        crews.follow(processes, process, coordinator, data_dir, silent=quiet)
    from dither.experiment.sweep.run import parse_vary, product
    from dither.spec import parse_setting

    spec = spec_from(what, None, None, None)
    values = dict(parse_setting(each) for each in settings or [])
    grid = parse_vary(vary or [])
    product(spec, grid, values)  # refuses what is wrong before anything heavy is loaded
    from dither import api
    from dither.experiment.sweep import default_folder

    folder = out or default_folder(spec.with_values(values))
    bar = Bar(silent=quiet or as_json)

    def again() -> str:
        words = sys.argv[1:] if out is not None else [*sys.argv[1:], "--out", str(folder)]
        return f"finished batches are kept, continue with: {shlex.join(['dither', *words])}"

    try:
        with crews.crew(processes, process, coordinator, again, silent=quiet), bar:
            found = api.sweep(
                spec, grid, values=values, out=folder, max_memory=max_memory, data_dir=data_dir,
                on_progress=bar.update,
            )  # fmt: skip
    except KeyboardInterrupt:
        error_terminal().print(
            f"interrupted; {escape(again())}",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(130)
    if as_json:
        from dither.experiment.folder import to_json
        from dither.experiment.sweep.result import SweepFolder

        typer.echo(to_json({"folder": str(folder), **(SweepFolder(folder).summary() or {})}, indent=2))
    elif not quiet:
        _print(found, folder)


def _print(found: Any, folder: Path) -> None:
    rows = found.table()
    spec = found.specs[0]
    assumed = any(row.get("assumed") for row in rows)
    shown = [
        {
            **{key: short(value) for key, value in row.items() if key in found.keys},
            "runs": row["runs"],
            "test accuracy": _with_error(row["test_accuracy"], row["test_accuracy_error"]),
            "loss": _with_error(row["loss"], row["loss_error"]),
            "claimed ε": f"{epsilon_text(row['claimed_epsilon'])} per {row['claimed_unit']}",
            (
                "assumed ε" if assumed else "proven ε"
            ): f"{epsilon_text(row['proven_epsilon'])} per {row['proven_unit']}",
        }
        for row in rows
    ]
    seeds = "mean ± standard error over seeds; " if any(row["runs"] > 1 for row in rows) else ""
    print_table(
        shown,
        title=f"{spec.method} on {spec.data.name}: {len(found)} runs",
        footer=f"{seeds}proven {_against(found)}: the largest over seeds",
    )
    for line in found.warnings():
        typer.echo(f"note: {line}")
    for line in found.not_covered():
        typer.echo(f"not covered: {line.removeprefix('not covered: ')}")
    spent = found.timing
    others = sum(seconds for name, seconds in spent.items() if name not in ("compile", "rounds", "evaluation"))
    terminal().print(
        f"compiling {spent['compile']:.1f} s, rounds {spent.get('rounds', 0):.1f} s, evaluation "
        f"{spent.get('evaluation', 0):.1f} s, the rest {others:.1f} s",
        highlight=False,
    )
    typer.echo(f"tables, curves and picture: {folder}")


def _against(found: Any) -> str:
    """Whom the proven ε is for."""
    if {"privacy.adjacency", "privacy.view", "privacy.delta"} & set(found.keys):
        return "for each setting's own view, neighbours and δ"
    privacy = found.specs[0].privacy
    return f"for {found.specs[0].adjacency} neighbours, {SEEN[privacy.view]} seen, δ = {privacy.delta:g}"


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(sweep)
