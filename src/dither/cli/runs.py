"""dither run, account, presets, keys, evaluate, predict."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli import options
from dither.cli.options import DataDir, Json, LedgerFile, NewLedger, Quiet, Settings, spec_from
from dither.cli.printing import (
    LOCAL,
    SEEN,
    RunProgress,
    epsilon_text,
    error_terminal,
    escape,
    print_report,
    print_table,
    short,
)
from dither.cli.processes import Coordinator, Process, Processes, several
from dither.cli.stopping import going_on
from dither.errors import BudgetExhausted, SpecError

if TYPE_CHECKING:
    from dither.accounting import ProvenRow
    from dither.experiment.account import PrivacyReport
    from dither.experiment.report import AttackedRow


def run(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET | SPEC.toml", help="What to run (default: adult).", autocompletion=options.presets
        ),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Seed of partition, model, cohorts, batches and noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to make (default: runs/METHOD-DATA-TIME).")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue an interrupted run folder.")] = None,
    data_dir: DataDir = None,
    ledger: LedgerFile = None,
    new_ledger: NewLedger = False,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Least seconds between checkpoints; 0: one at each evaluation.")
    ] = 5.0,
    processes: Processes = None,
    process: Process = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train: a preset, or a spec of your own. Leaves a run folder with model, metrics and plot."""
    if resume is not None and out is not None:
        raise SpecError("--out and --resume exclude each other: a resumed run stays in its folder")
    if process:
        from dither.experiment import train

        with several(processes, process, coordinator, silent=quiet):
            train.run(what or "adult", data_dir=data_dir)  # the spec of process 0 counts; exits after the rounds
    spec = spec_from(what, resume, settings, seed)  # refuses mistakes before JAX is imported
    from dither.experiment import train

    view = RunProgress(silent=quiet or as_json)

    def how() -> str:
        return _how_to_resume(view.folder or resume or out)

    with going_on(how), several(processes, process, coordinator, silent=quiet, how=how), view:
        result = train.run(
            spec,
            out=out,
            resume=resume,
            data_dir=data_dir,
            ledger=ledger,
            new_ledger=new_ledger,
            checkpoint_seconds=checkpoint_seconds,
            on_start=view.start,
            on_evaluation=view.update,
        )
    if as_json:
        from dither.experiment.folder import to_json

        typer.echo(to_json({"folder": str(result.folder), **result.to_dict()}, indent=2))
    elif not quiet:
        print_report(result)
    if result.stopped:
        error_terminal().print(
            f"[bold yellow]stopped:[/] {escape(result.stopped)}; model and metrics are kept",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(BudgetExhausted.exit_code)


def _how_to_resume(folder: Path | None) -> str:
    if folder is None or not (folder / "spec.toml").is_file():
        return "no round was made: the same command begins again"
    return f"continue with: dither run --resume {shlex.quote(str(folder))}"


def account(
    run_folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, or a preset or spec to account for.", autocompletion=options.presets
        ),
    ],
    settings: Settings = None,
    data_dir: DataDir = None,
    every_recipe: Annotated[
        bool, typer.Option("--every-recipe", help="Also list each bound that was tried, and why one was refused.")
    ] = False,
    ex_ante: Annotated[
        bool,
        typer.Option("--ex-ante", help="Also list each bound before an honest party draws the cohorts."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Claimed and proven ε of a run (or of a spec before it is run), for every adversary, and why they differ."""
    from dither.experiment.account import account as accounted
    from dither.spec import parse_setting

    found = accounted(
        run_folder if run_folder.exists() else str(run_folder),
        values=dict(parse_setting(each) for each in settings or []),
        every_recipe=every_recipe,
        ex_ante=ex_ante,
        data_dir=data_dir,
    )
    if as_json:
        typer.echo(found.to_json())
    elif not quiet:
        _print_account(found)


def _print_account(found: PrivacyReport) -> None:
    from dither.experiment.report import uncovered

    epsilon, claim = found.epsilon, found.epsilon.claimed
    rows = [
        {
            "": "claimed",
            "ε": epsilon_text(claim.value),
            "unit": claim.unit,
            "seen": "",
            "neighbours": claim.adjacency,
            "by": claim.source,
        }
    ]
    for row in epsilon.notable:
        kind = "assumed" if row.assumed else "proven"
        rows.append({"": kind, "ε": epsilon_text(row.value), "unit": row.unit, **_seen(row), "by": row.recipe})
    for shown in epsilon.attacked:
        value, form = f">= {epsilon_text(shown.value)}", shown.form.split(":")[0]
        rows.append({"": "attacked", "ε": value, "unit": shown.unit, **_seen(shown), "by": form})
    print_table(rows, title=f"{found.method}: claimed and proven ε at δ = {claim.delta:g}")
    for row in epsilon.notable:
        where = f"{SEEN[row.view]}, {row.adjacency}"
        if row.clients is not None and row.view in ("upload", "sum"):
            spread = [epsilon_text(value) for value in (row.clients.min, row.clients.median, row.clients.max)]
            if len(set(spread)) > 1:
                typer.echo(f"over clients, {where}: min {spread[0]}, median {spread[1]}, max {spread[2]}")
        if row.against:
            typer.echo(f"{where}: proven {row.against}")
        if row.no_credit:
            typer.echo(f"{where}: no credit for the other clients' noise: {row.no_credit}")
    for bounds, title in (
        (found.tried, "Every bound that was tried, for the client that reveals most"),
        (found.ex_ante, "The same before the cohorts are drawn (R4)"),
    ):
        if bounds:
            print_table([_bound(row) for row in _distinct(bounds)], title=title)
    for condition in epsilon.failing_conditions:
        typer.echo(f"condition of the claim fails: {condition}")
    if found.why:
        typer.echo(f"why they differ: {found.why}")
    for text in uncovered(epsilon.table):
        typer.echo(f"not covered: {text}")


def _seen(row: ProvenRow | AttackedRow) -> dict[str, str]:
    return {"seen": SEEN[row.view], "neighbours": row.adjacency}


def _bound(row: ProvenRow) -> dict[str, str]:
    return {"ε": epsilon_text(row.value), **_seen(row), "by": row.recipe, "detail": row.detail}


def _distinct(rows: Sequence[ProvenRow]) -> list[ProvenRow]:
    """Each bound once, at the strongest adversary it holds for."""
    first: dict[tuple[str, float, str, str], ProvenRow] = {}
    for row in rows:
        first.setdefault((row.adjacency, row.value, row.recipe, row.detail), row)
    return list(first.values())


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Print this preset as TOML.", autocompletion=options.presets)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the presets, or print one as TOML to start a spec of your own from."""
    from dither import spec

    if name is not None:
        text = spec.preset_text(name)
        if as_json:
            typer.echo(json.dumps(spec.Spec.from_preset(name).to_dict(), indent=2, ensure_ascii=False))
        elif not quiet:
            typer.echo(text, nl=False)
        return
    rows = [{"preset": each, "what": spec.preset_title(each)} for each in spec.preset_names()]
    footer = "dither run PRESET; dither presets PRESET prints it"
    print_table(rows, as_json=as_json, quiet=quiet, title="Presets", footer=footer)


def keys(
    method: Annotated[str | None, typer.Argument(help="A method: list its own constants too.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Every key of a spec, with its default and what it means."""
    from dither import spec

    rows = [
        {"key": key, "default": short(default), "what": what} for key, default, what in spec.describe_keys(method)
    ]
    footer = "in TOML, or with --set key=value"
    print_table(rows, as_json=as_json, quiet=quiet, title="Keys of a spec", footer=footer)


def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, typer.Option("--data", help="Records with labels: CSV, Parquet, npz or a folder.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Accuracy and loss of a trained run on a file: exact figures, for your eyes alone."""
    from dither.experiment.report import load

    scores = load(run_folder).evaluate(data)
    if as_json:
        typer.echo(json.dumps({**scores, "local": True}))
        return
    accuracy, loss = f"{scores['accuracy']:.4f}", f"{scores['loss']:.4f}"
    print_table([{"records": scores["records"], "accuracy": accuracy, "loss": loss}], quiet=quiet)
    if not quiet:
        typer.echo(f"{LOCAL}: exact scores of {data.name}, which no ε covers")


def predict(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, typer.Option("--data", help="Records: CSV, Parquet, npz or a folder.")],
    out: Annotated[Path, typer.Option("--out", help="CSV to write: the class and its probabilities.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict each record's class with a trained run."""
    from dither.experiment.folder import write_text
    from dither.experiment.report import load

    trained = load(run_folder)
    probabilities = trained.predict_proba(data)
    best = probabilities.argmax(axis=1)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["prediction", *(f"p({name})" for name in trained.classes)])
    for number, row in zip(best, probabilities, strict=True):
        lines.writerow([trained.classes[number], *(f"{p:.6f}" for p in row)])
    write_text(out, text.getvalue())
    if as_json:
        typer.echo(json.dumps({"predictions": len(best), "file": str(out)}))
    elif not quiet:
        typer.echo(f"{len(best)} predictions in {out}")


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command in (run, account, presets, keys, evaluate, predict):
        app.command()(command)
