"""dither sweep."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli.common import (
    Bar,
    Coordinator,
    DataDir,
    Json,
    LedgerFile,
    NewLedger,
    Process,
    Processes,
    Quiet,
    Settings,
    epsilon_text,
    on_interrupt,
    print_table,
    several,
    short,
    spec_from,
    terminal,
)

if TYPE_CHECKING:
    from dither.experiment.sweep import Sweep


# reason: one parameter per option of the command
def sweep(
    what: Annotated[str, typer.Argument(metavar="PRESET | SPEC.toml", help="What every run starts from.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Values of a key: privacy.epsilon=0.1,1 or seed=0:5 (0 to 4). May be repeated.",
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to create or to continue (default: sweeps/METHOD-DATA-TIME)."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory limit for runs that train in parallel, e.g. 4GB."),
    ] = None,
    data_dir: DataDir = None,
    ledger: LedgerFile = None,
    new_ledger: NewLedger = False,
    processes: Processes = None,
    process: Process = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train every combination of the varied values and write tables and a picture."""
    if process:
        from dither.experiment.sweep import sweep as run_sweep

        with several(processes, process, coordinator, silent=quiet):
            run_sweep(what, data_dir=data_dir)  # the specs of process 0 count; exits after the batches
    from dither.experiment.sweep.run import default_folder, parse_vary, product
    from dither.spec import parse_setting

    spec = spec_from(what, None, settings, None)
    values = dict(parse_setting(each) for each in settings or [])
    grid = parse_vary(vary or [])
    product(spec, grid, values)  # refuses mistakes before other processes start
    folder = out or default_folder(spec.with_values(values))
    from dither.experiment.sweep import sweep as run_sweep

    def how_to_continue() -> str:
        arguments = sys.argv[1:] if out is not None else [*sys.argv[1:], "--out", str(folder)]
        return f"finished batches are kept, continue with: {shlex.join(['dither', *arguments])}"

    with (
        on_interrupt(how_to_continue),
        several(processes, process, coordinator, silent=quiet, advice=how_to_continue),
        Bar(quiet or as_json) as bar,
    ):
        result = run_sweep(
            spec, grid, values=values, out=folder, max_memory=max_memory, data_dir=data_dir,
            on_progress=bar.update, ledger=ledger, new_ledger=new_ledger,
        )  # fmt: skip
    if as_json:
        from dither.experiment.folder import to_json
        from dither.experiment.sweep.result import SweepFolder

        typer.echo(to_json({"folder": str(folder), **(SweepFolder(folder).summary() or {})}, indent=2))
    elif not quiet:
        _print(result, folder)


_SHOWN = ("auc", "f1", "rmse", "mae")  # the other metrics are in runs.csv


def _print(result: Sweep, folder: Path) -> None:
    from dither.experiment.metrics import NAMES

    table = result.table()
    proven = "assumed ε" if any(row.get("assumed") for row in table) else "proven ε"
    shown = [
        {
            **{key: short(value) for key, value in row.items() if key in result.keys},
            "runs": row["runs"],
            result.score_name: _with_error(row[result.score], row[f"{result.score}_error"]),
            "loss": _with_error(row["loss"], row["loss_error"]),
            **{NAMES[name]: _with_error(row[name], row[f"{name}_error"]) for name in _SHOWN if name in row},
            "claimed ε": f"{epsilon_text(row['claimed_epsilon'])} per {row['claimed_unit']}",
            proven: f"{epsilon_text(row['proven_epsilon'])} per {row['proven_unit']}",
        }
        for row in table
    ]
    seeds = "mean ± standard error over seeds; " if any(row["runs"] > 1 for row in table) else ""
    print_table(
        shown,
        title=result.title(),
        footer=f"{seeds}{proven}: the largest over seeds, {_guarantee(result)}",
    )
    for line in result.warnings():
        typer.echo(f"note: {line}")
    for line in result.not_covered():
        typer.echo(f"not covered: {line.removeprefix('not covered: ')}")
    timing = result.timing
    rest = sum(seconds for name, seconds in timing.items() if name not in ("compile", "rounds", "evaluation"))
    terminal().print(
        f"compiling {timing.get('compile', 0):.1f} s, rounds {timing.get('rounds', 0):.1f} s, evaluation "
        f"{timing.get('evaluation', 0):.1f} s, the rest {rest:.1f} s",
        highlight=False,
    )
    typer.echo(f"tables, curves and picture: {folder}")


def _guarantee(result: Sweep) -> str:
    """What the proven ε holds for."""
    from dither.experiment.report import ADVERSARIES

    if {"privacy.adjacency", "privacy.view", "privacy.delta"} & set(result.keys):
        return "for each setting's view, neighbours and δ"
    spec = result.specs[0]
    adversary = ADVERSARIES[spec.privacy.view]
    return f"for {spec.adjacency} neighbours, against {adversary}, δ = {spec.privacy.delta:g}"


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"
