"""dither run, presets, keys, evaluate, predict."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli import common
from dither.cli.common import (
    LOCAL,
    OWN_PROCESS,
    Coordinator,
    DataDir,
    Json,
    LedgerFile,
    NewLedger,
    Process,
    Processes,
    Quiet,
    RunProgress,
    Settings,
    error_terminal,
    escape,
    on_interrupt,
    print_report,
    print_table,
    refuse_input,
    several,
    short,
    source_from,
)
from dither.errors import BudgetExhausted, SpecError

if TYPE_CHECKING:
    import numpy as np

    from dither.experiment.report import Report

DIVERGED_EXIT_CODE = (
    7  # of a run whose model is worthless, as public records or the model itself show; its files are kept
)


# reason: one parameter an option, as Typer has it
def run(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET | SPEC.toml | TABLES...]",
            help="What to run (default: adult). TABLES: your own table, several (one for each institution), or a "
            "folder of them.",
            autocompletion=common.presets,
        ),
    ] = None,
    settings: Settings = None,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Label column of TABLES.")] = "",
    seed: Annotated[
        int | None, typer.Option(help="Seed for the partition, model, cohorts, batches and noise.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to create (default: runs/METHOD-DATA-TIME).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue an interrupted run folder.")] = None,
    data_dir: DataDir = None,
    ledger: LedgerFile = None,
    new_ledger: NewLedger = False,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0, help="Minimum seconds between checkpoints; 0 writes one at every evaluation.")
    ] = 5.0,
    processes: Processes = None,
    process: Process = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a preset or your own spec, and write a run folder with the model, metrics and a plot."""
    if resume is not None and out is not None:
        raise SpecError("--out and --resume exclude each other: a resumed run stays in its folder")
    source = _source(what or [])
    if process:
        from dither.experiment import train

        with several(processes, process, coordinator, silent=quiet):
            train.run(source or "adult", data_dir=data_dir)  # the spec of process 0 counts; exits after the rounds
    if label:
        settings = [*(settings or []), f"data.label={label}"]
    spec = source_from(source, resume, settings, seed)  # refuses mistakes before JAX is imported
    from dither.experiment import train

    view = RunProgress(silent=quiet or as_json)

    def advice() -> str:
        return _how_to_resume(view.folder or resume or out)

    with on_interrupt(advice), several(processes, process, coordinator, silent=quiet, advice=advice), view:
        result = train.run(
            spec, out=out, resume=resume, data_dir=data_dir, ledger=ledger, new_ledger=new_ledger,
            checkpoint_seconds=checkpoint_seconds, on_start=view.start, on_evaluation=view.update,
            keep_programs=context.obj == OWN_PROCESS,
        )  # fmt: skip
    if as_json:
        from dither.experiment.folder import to_json

        typer.echo(to_json({"folder": str(result.folder), **result.to_dict()}, indent=2))
    elif not quiet:
        print_report(result)
        if resume is not None and view.folder is None:
            typer.echo(f"{resume} was finished before: nothing was trained")
    from dither.experiment.advice import DIVERGED

    if result.stopped:
        error_terminal().print(
            f"[bold yellow]stopped:[/] {escape(result.stopped)}; model and metrics are kept",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(BudgetExhausted.exit_code)
    if any(each.kind == DIVERGED for each in result.advice):
        sys.exit(DIVERGED_EXIT_CODE)


def _source(given: list[str]) -> str | dict[str, list[str]] | None:
    """What to run: one name or file, or several tables."""
    if len(given) < 2:
        return given[0] if given else None
    others = [each for each in given if Path(each).suffix.lower() not in (".csv", ".tsv", ".parquet")]
    if others:
        raise SpecError(f"{others[0]!r} is not a table (.csv, .tsv, .parquet); only tables can be several")
    return {"data.path": given}


def _how_to_resume(folder: Path | None) -> str:
    if folder is None or not (folder / "spec.toml").is_file():
        return "no round was finished; run the same command to start again"
    return f"continue with: dither run --resume {shlex.quote(str(folder))}"


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Print this preset as TOML.", autocompletion=common.presets)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the presets, or print one as TOML, as a start for your own spec."""
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
    method: Annotated[str | None, typer.Argument(help="Also list the constants of this method.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List every key of a spec, with its default and its meaning."""
    from dither import spec

    rows = [
        {"key": key, "default": short(default), "what": what} for key, default, what in spec.describe_keys(method)
    ]
    footer = "in TOML, or with --set key=value"
    print_table(rows, as_json=as_json, quiet=quiet, title="Keys of a spec", footer=footer)


def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data", help="Records with labels: CSV, Parquet, npz or a folder; with --epsilon also several."
        ),
    ],
    epsilon: Annotated[
        float | None, typer.Option(help="Score privately with this ε, one file for each institution.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    ledger: LedgerFile = None,
    new_ledger: NewLedger = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the scores of a trained run on a file, beside those of a constant. Without --epsilon they are exact:
    do not publish them."""
    from dither.experiment.metrics import NAMES
    from dither.experiment.report import load

    trained = load(run_folder)
    if epsilon is not None:
        _evaluate_privately(trained, data, (epsilon, delta), (ledger, new_ledger), as_json=as_json, quiet=quiet)
        return
    if len(data) > 1:
        raise SpecError(
            f"--data was given {len(data)} times; exact scores are of one file, private ones need --epsilon"
        )
    evaluated = trained.evaluate(data[0])
    if as_json:
        typer.echo(json.dumps({**evaluated.to_dict(), "local": True}))
        return
    scores = evaluated.scores
    rows = [
        {"": who, **{NAMES[name]: f"{values[name]:.4f}" for name in scores.model if name in values}}
        for who, values in (("the model", scores.model), (scores.trivial_predictor, scores.trivial))
    ]
    print_table(rows, quiet=quiet, title=f"{scores.records} records, loss {evaluated.loss:.4f}")
    if scores.confusion and len(scores.confusion) <= 10:
        counts = [
            {
                "true class": name,
                **{f"predicted {other}": count for other, count in zip(trained.classes, row, strict=True)},
            }
            for name, row in zip(trained.classes, scores.confusion, strict=True)
        ]
        print_table(counts, quiet=quiet)
    if not quiet:
        typer.echo(f"{LOCAL}: exact scores of {data[0].name}, which no ε covers")


# reason: one parameter an option, as Typer has it
def _evaluate_privately(
    trained: Report,
    data: list[Path],
    budget: tuple[float, float],
    ledger: tuple[Path | None, bool],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from dither.experiment.evaluation import evaluate_privately

    (epsilon, delta), (path, new_ledger) = budget, ledger
    result = evaluate_privately(trained, data, epsilon=epsilon, delta=delta, ledger=path, new_ledger=new_ledger)
    if as_json:
        typer.echo(result.to_json())
        return
    print_table(
        result.rows(),
        quiet=quiet,
        title=f"{result.records:,} records",
        footer=f"proven ε = {epsilon:g}, δ = {delta:g}, zero-out, against a server that sees every institution's "
        "counts; intervals of 95% include the noise",
    )


def predict(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, typer.Option("--data", help="Records: CSV, Parquet, npz or a folder.")],
    out: Annotated[
        Path, typer.Option("--out", help="CSV to write: the class and its probabilities; - prints it.")
    ],
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="COLUMN", help="Copy this column (a record's number, say) into the CSV."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the class (or the number) of each record of a file with a trained run."""
    from dither.data.tables import existing_file, read_table, text_column
    from dither.errors import DataError, did_you_mean
    from dither.experiment.folder import RunFolder, write_text
    from dither.experiment.report import load

    trained, printed = load(run_folder), str(out) == "-"
    refuse_input(out, data, *RunFolder(run_folder).path.rglob("*"))
    columns: dict[str, np.ndarray] = {}
    if ids:
        table = read_table(existing_file(data))
        for name in ids:
            if name not in table.columns:
                raise DataError(f"{data.name!r} has no column {name!r}{did_you_mean(name, table.columns)}")
            columns[name] = text_column(table[name], "")
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*columns, "prediction", *(f"p({name})" for name in trained.classes)])
    if trained.classes:
        probabilities = trained.predict_proba(data)
        best = [trained.classes[number] for number in probabilities.argmax(axis=1)]
        rows = [[name, *(f"{p:.6f}" for p in row)] for name, row in zip(best, probabilities, strict=True)]
    else:
        rows = [[f"{value:.6g}"] for value in trained.predict(data)]
    lines.writerows([*before, *row] for *before, row in zip(*columns.values(), rows, strict=True))
    if printed:
        typer.echo(text.getvalue(), nl=False)
        return
    write_text(out, text.getvalue())
    if as_json:
        typer.echo(json.dumps({"predictions": len(rows), "file": str(out)}))
    elif not quiet:
        order = "" if ids else ", in the order of the records (--id COLUMN copies a column)"
        typer.echo(f"{len(rows)} predictions in {out}{order}")
