"""dither run, sweep, start, evaluate, predict, presets, keys."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dither.cli import common
from dither.cli.privacy import print_split
from dither.errors import BudgetExhausted, SpecError
from dither.types import ADVERSARIES, epsilon_text

if TYPE_CHECKING:
    import numpy as np

    from dither.experiment.start import Project
    from dither.experiment.sweep import Sweep

DIVERGED_EXIT_CODE = 7  # the model is worthless, as public records or the model itself show; its files are kept


# reason: one parameter an option, as Typer has it
def run(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        Argument(
            metavar="[PRESET | SPEC.toml | TABLES...]",
            help="What to run (default: adult). TABLES: your own table, several (one for each institution), or a "
            "folder of them.",
            autocompletion=common.presets,
        ),
    ] = None,
    settings: common.Settings = None,
    label: Annotated[str, Option(metavar="COLUMN", help="Label column of TABLES.")] = "",
    seed: Annotated[int | None, Option(help="Seed for the partition, model, cohorts, batches and noise.")] = None,
    out: Annotated[Path | None, Option(help="Run folder to create (default: runs/METHOD-DATA-TIME).")] = None,
    resume: Annotated[Path | None, Option(metavar="DIR", help="Continue an interrupted run folder.")] = None,
    data_dir: common.DataDir = None,
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
    checkpoint_seconds: Annotated[
        float, Option(min=0, help="Minimum seconds between checkpoints; 0 writes one at every evaluation.")
    ] = 5.0,
    processes: common.Processes = None,
    process: common.Process = None,
    coordinator: common.Coordinator = None,
) -> None:
    """Train a preset or your own spec, and write a run folder with the model, metrics and a plot."""
    if resume is not None and out is not None:
        raise SpecError("--out and --resume cannot be combined: a resumed run stays in its folder")
    source = _source(what or [])
    if process:
        from dither.experiment import train

        with common.several(processes, process, coordinator):
            train.run(source or "adult", data_dir=data_dir)  # the spec of process 0 counts; exits after the rounds
    if label:
        settings = [*(settings or []), f"data.label={label}"]
    spec = common.source_from(source, resume, settings, seed)  # refuses mistakes before JAX is imported
    from dither.experiment import train

    view = common.RunProgress()

    def advice() -> str:
        return _how_to_resume(view.folder or resume or out)

    with common.on_interrupt(advice), common.several(processes, process, coordinator, advice=advice), view:
        result = train.run(
            spec, out=out, resume=resume, data_dir=data_dir, ledger=ledger, new_ledger=new_ledger,
            checkpoint_seconds=checkpoint_seconds, on_start=view.start, on_evaluation=view.update,
            keep_programs=context.obj == common.OWN_PROCESS,
        )  # fmt: skip
    if common.emit({"folder": str(result.folder), **result.to_dict()}):
        common.print_report(result)
        if resume is not None and view.folder is None:
            typer.echo(f"{resume} was finished before: nothing was trained")
    from dither.experiment.metrics import DIVERGED

    if result.stopped:
        common.say(f"{result.stopped}; model and metrics are kept", "stopped:", "bold yellow")
        sys.exit(BudgetExhausted.exit_code)
    if any(each.kind == DIVERGED for each in result.advice):
        sys.exit(DIVERGED_EXIT_CODE)


def _source(given: list[str]) -> str | dict[str, list[str]] | None:
    """What to run: one name or file, or several tables."""
    if "" in given:
        raise SpecError("the name of what to run is empty")
    if len(given) < 2:
        return given[0] if given else None
    others = [each for each in given if Path(each).suffix.lower() not in (".csv", ".tsv", ".parquet")]
    if others:
        raise SpecError(
            f"{others[0]!r} is not a table (.csv, .tsv, .parquet); only tables may be given several at a time"
        )
    return {"data.path": given}


def _how_to_resume(folder: Path | None) -> str:
    if folder is None or not (folder / "spec.toml").is_file():
        return "no round was finished; run the same command to start again"
    return f"continue with: dither run --resume {shlex.quote(str(folder))}"


def presets(
    name: Annotated[str | None, Argument(help="Print this preset as TOML.", autocompletion=common.presets)] = None,
) -> None:
    """List the presets, or print one as TOML to start your own spec from."""
    from dither import spec

    if name is not None:
        if common.emit(spec.Spec.from_preset(name).to_dict()):
            typer.echo(spec.preset_text(name), nl=False)
        return
    rows = [{"preset": each, "what": spec.preset_title(each)} for each in spec.preset_names()]
    footer = "dither run PRESET; dither presets PRESET prints it"
    common.print_table(rows, title="Presets", footer=footer)


def keys(method: Annotated[str | None, Argument(help="Also list the options of this method.")] = None) -> None:
    """List every key of a spec, with its default and its meaning."""
    from dither import spec

    rows = [
        {"key": key, "default": common.short(default), "what": what}
        for key, default, what in spec.describe_keys(method)
    ]
    footer = "in TOML, or with --set key=value"
    common.print_table(rows, title="Keys of a spec", footer=footer)


def evaluate(
    run_folder: Annotated[Path, Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[
        list[Path],
        Option("--data", help="Records with labels: CSV, Parquet, npz or a folder; with --epsilon also several."),
    ],
    epsilon: Annotated[
        float | None, Option(help="Score privately with this ε, one file for each institution.")
    ] = None,
    delta: common.Delta = 1e-5,
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
) -> None:
    """Score a trained run on a file, next to a constant prediction.

    Without --epsilon the scores are exact: do not publish them.
    """
    from dither.experiment.metrics import NAMES
    from dither.experiment.report import load

    trained = load(run_folder)
    if epsilon is not None:
        from dither.experiment.evaluation import evaluate_privately

        with common.on_interrupt(common.CHARGED):
            result = evaluate_privately(
                trained, common.tables_in(data), epsilon=epsilon, delta=delta, ledger=ledger, new_ledger=new_ledger
            )
        if common.emit(result):
            common.print_table(
                result.rows(), title=f"{result.records:,} records", footer=common.counts_guarantee(epsilon, delta)
            )
            for note in result.not_covered:
                common.tell(note)
        return
    if len(data) > 1:
        raise SpecError(
            f"--data was given {len(data)} times; exact scores need one file, private scores need --epsilon"
        )
    with common.cells_named():
        evaluated = trained.evaluate(data[0])
    if not common.emit({**evaluated.to_dict(), "local": True}):
        return
    scores = evaluated.scores
    rows = [
        {"": who, **{NAMES[name]: f"{values[name]:.4f}" for name in scores.model if name in values}}
        for who, values in (("the model", scores.model), (scores.trivial_predictor, scores.trivial))
    ]
    common.print_table(rows, title=f"{scores.records} records, loss {evaluated.loss:.4f}")
    if scores.confusion and len(scores.confusion) <= 10:
        counts = [
            {
                "true class": name,
                **{f"predicted {other}": count for other, count in zip(trained.classes, row, strict=True)},
            }
            for name, row in zip(trained.classes, scores.confusion, strict=True)
        ]
        common.print_table(counts)
    common.tell(f"{common.LOCAL}: exact scores of {data[0].name}; no ε covers them")


def predict(
    run_folder: Annotated[Path, Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, Option("--data", help="Records: CSV, Parquet, npz or a folder.")],
    out: Annotated[
        str, Option("--out", metavar="PATH", help="A new CSV, with classes and probabilities; - prints it.")
    ],
    ids: Annotated[
        list[str] | None,
        Option("--id", metavar="COLUMN", help="Copy this column (for example a record number) into the CSV."),
    ] = None,
) -> None:
    """Predict the class (or the number) of each record of a file with a trained run."""
    from dither.data.schema import text_column
    from dither.data.tables import existing_file, read_table
    from dither.errors import DataError, did_you_mean
    from dither.experiment.folder import write_text
    from dither.experiment.report import load

    trained, file = load(run_folder), Path(out)
    if out != "-":
        common.check_new(file)
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
    with common.cells_named():
        values = (trained.predict_proba if trained.classes else trained.predict)(table if ids else data)
    if trained.classes:
        best = [trained.classes[number] for number in values.argmax(axis=1)]
        rows = [[name, *(f"{p:.6f}" for p in row)] for name, row in zip(best, values, strict=True)]
    else:
        rows = [[f"{value:.6g}"] for value in values]
    lines.writerows([*before, *row] for *before, row in zip(*columns.values(), rows, strict=True))
    if out == "-":
        typer.echo(text.getvalue(), nl=False)
        return
    write_text(file, text.getvalue())
    if common.emit({"predictions": len(rows), "file": out}):
        order = "" if ids else ", in the order of the records (--id COLUMN copies a column)"
        typer.echo(f"{len(rows)} predictions in {out}{order}")


# From raw tables to an evaluated model


# reason: one parameter an option, as Typer has it
def start(
    tables: Annotated[
        list[str],
        Argument(
            metavar="TABLES...",
            help="Your own table (CSV, Parquet), several (one for each institution), or a folder of them.",
        ),
    ],
    label: Annotated[str, Option(metavar="COLUMN", help="Label column (default: proposed from the header).")] = "",
    epsilon: Annotated[float, Option(help="The ε that covers everything.")] = 1.0,
    delta: Annotated[float, Option(help="δ of that ε (default: by the record count).", show_default=False)] = 0.0,
    split: Annotated[
        str, Option(help="Percentages of the budget (μ²) for schema, training and evaluation.")
    ] = "5,85,10",
    task: common.Task = "auto",
    classes: common.Classes = "",
    drop: common.Drop = None,
    keep: common.Keep = None,
    settings: common.Settings = None,
    out: Annotated[Path | None, Option(help="Folder to create (default: runs/start-TIME).")] = None,
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Go from raw tables to an evaluated private model, with one ε for schema, training and evaluation."""
    from dither.experiment import start as project
    from dither.experiment.private_schema import Wanted

    asks = common.asks(yes)
    path = tables if len(tables) > 1 else tables[0]
    if not label:
        proposed, header = project.propose_label(path)
        label = typer.prompt(f"Label column ({', '.join(header)})", default=proposed) if asks else proposed
    try:
        shares = [float(part) / 100 for part in split.split(",")]
        project.check_shares(shares)
    except (ValueError, SpecError):
        raise SpecError(
            f"--split {split!r} must be three numbers above 0 that add up to 100, such as 5,85,10"
        ) from None
    wanted = Wanted(label, task, common.names_in(classes), tuple(drop or ()), tuple(keep or ()))
    plan = project.plan_project(path, wanted, epsilon=epsilon, delta=delta, shares=shares)

    view, folder, agreed = common.RunProgress(), out or project.free_folder(), False

    def agree() -> None:
        nonlocal agreed
        if common.output().text:
            common.say_lines(plan.lines())
        if asks and not typer.confirm("No values have been read yet. Spend this?", default=True, err=True):
            common.say("nothing was spent", style="default")
            raise typer.Exit
        agreed = True

    def advice() -> str:
        if not agreed and not folder.exists():
            return "nothing was spent"
        if (folder / project.BEGUN).is_file():
            return f"continue with: {common.command_again(out=folder, label=label)}"
        return "what was charged stays charged; `dither budget show` lists it"

    def step(line: str) -> None:
        if common.output().text:
            common.say(f"{line} ...")

    with common.on_interrupt(advice), view:
        done = project.start_project(
            plan, out=folder, ledger=ledger, new_ledger=new_ledger, on_checked=agree, on_step=step,
            values=common.values_of(settings), on_start=view.start, on_evaluation=view.update,
        )  # fmt: skip
    if common.emit(done):
        _print_project(done)


def _print_project(done: Project) -> None:
    from dither.experiment.report import uncovered

    for column, why in done.excluded.items():
        common.tell(f"left out: {column!r} {why}")
    title = f"Private scores on {done.scores.records:,} records that training left out"
    common.print_table(done.scores.rows(), title=title, footer="95% intervals include noise and ties")
    for mark, given in (("", done.report.advice), (f", {common.LOCAL}", done.report.local.advice)):
        for advised in given:
            common.tell(f"warning{mark}: {advised.text}")
    if done.doubt:
        common.tell(done.doubt)
    print_split(done.split)
    gaps = list(dict.fromkeys([*uncovered(done.report.epsilon.main), *done.epsilon.not_covered]))
    covers = "covers all of it" if not gaps else "covers all of it, except the following"
    common.tell(f"one ε = {epsilon_text(done.epsilon.epsilon, digits=4)} at δ = {done.epsilon.delta:.5g} {covers}")
    for text in gaps:
        common.tell(f"not covered: {text}")
    typer.echo(f"in {done.folder}: schema.toml, run/ (the model), federation.toml, project.json")
    typer.echo(f"next: dither account {done.folder / 'run'}; dither statement {done.folder / 'run'}")
    served = done.folder / "federation.toml"
    typer.echo(f"to leave each table with its owner: dither serve {served} (docs/deployment.md)")


# Many runs


# reason: one parameter per option of the command
def sweep(
    what: Annotated[str, Argument(metavar="PRESET | SPEC.toml", help="What every run starts from.")],
    vary: Annotated[
        list[str] | None,
        Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Values of a key: privacy.epsilon=0.1,1 or seed=0:5 (0 to 4). May be repeated.",
        ),
    ] = None,
    settings: common.Settings = None,
    out: Annotated[
        Path | None, Option(help="Folder to create or to continue (default: sweeps/METHOD-DATA-TIME).")
    ] = None,
    max_memory: Annotated[
        str | None, Option(metavar="BYTES", help="Memory limit for runs that train in parallel, e.g. 4GB.")
    ] = None,
    data_dir: common.DataDir = None,
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
    processes: common.Processes = None,
    process: common.Process = None,
    coordinator: common.Coordinator = None,
) -> None:
    """Train every combination of the varied values and write tables and a picture."""
    if process:
        from dither.experiment.sweep import sweep as run_sweep

        with common.several(processes, process, coordinator):
            run_sweep(what, data_dir=data_dir)  # the specs of process 0 count; exits after the batches
    from dither.experiment.sweep import sweep as run_sweep
    from dither.experiment.sweep.run import parse_vary, product
    from dither.experiment.train import free_path

    spec, values, grid = common.spec_from(what, settings), common.values_of(settings), parse_vary(vary or [])
    product(spec, grid, values)  # refuses mistakes before other processes start
    folder = out or free_path("sweeps", spec.with_values(values))

    def how_to_continue() -> str:
        return f"finished batches are kept; continue with: {common.command_again(out=folder)}"

    with (
        common.on_interrupt(how_to_continue),
        common.several(processes, process, coordinator, advice=how_to_continue),
        common.Bar() as bar,
    ):
        result = run_sweep(
            spec, grid, values=values, out=folder, max_memory=max_memory, data_dir=data_dir,
            on_progress=bar.update, ledger=ledger, new_ledger=new_ledger,
        )  # fmt: skip
    from dither.experiment.sweep.result import SweepFolder

    if common.emit({"folder": str(folder), **(SweepFolder(folder).summary() or {})}):
        _print_sweep(result, folder)


_SHOWN = ("auc", "f1", "rmse", "mae")  # the other metrics are in runs.csv


def _print_sweep(result: Sweep, folder: Path) -> None:
    from dither.experiment.metrics import NAMES

    table = result.table()
    proven = "assumed ε" if any(row.get("assumed") for row in table) else "proven ε"
    names = [key.rpartition(".")[2] for key in result.keys]
    short = dict(zip(result.keys, names if len({*names}) == len(names) else result.keys, strict=True))
    units = {row[f"{kind}_unit"] for row in table for kind in ("claimed", "proven")}
    each = "" if len(units) > 1 else f" per {min(units)}"  # in the head of the columns, or in every cell
    shown = [
        {
            **{short[key]: common.short(row[key]) for key in row if key in short},
            "runs": row["runs"],
            result.score_name: _with_error(row[result.score], row[f"{result.score}_error"]),
            "loss": _with_error(row["loss"], row["loss_error"]),
            **{NAMES[name]: _with_error(row[name], row[f"{name}_error"]) for name in _SHOWN if name in row},
            f"claimed ε{each}": epsilon_text(row["claimed_epsilon"], "nearest")
            + (not each) * f" per {row['claimed_unit']}",
            f"{proven}{each}": epsilon_text(row["proven_epsilon"]) + (not each) * f" per {row['proven_unit']}",
        }
        for row in table
    ]
    seeds = "mean ± standard error over seeds; " if any(row["runs"] > 1 for row in table) else ""
    footer = f"{seeds}{proven}: the largest over seeds, {_guarantee(result)}"
    common.print_table(shown, title=result.title(), footer=footer)
    for line in result.warnings():
        common.tell(f"note: {line}")
    for line in result.not_covered():
        common.tell(f"not covered: {line.removeprefix('not covered: ')}")
    timing = result.timing
    rest = sum(seconds for name, seconds in timing.items() if name not in ("compile", "rounds", "evaluation"))
    common.terminal().print(
        f"compiling {timing.get('compile', 0):.1f} s, rounds {timing.get('rounds', 0):.1f} s, evaluation "
        f"{timing.get('evaluation', 0):.1f} s, the rest {rest:.1f} s",
        highlight=False,
    )
    typer.echo(f"tables, curves and picture: {folder}")


def _guarantee(result: Sweep) -> str:
    """What the proven ε holds for."""
    if {"privacy.adjacency", "privacy.view", "privacy.delta"} & set(result.keys):
        return "for each setting's view, neighbours and δ"
    spec = result[0].spec
    adversary = ADVERSARIES[spec.privacy.view]
    return f"for {spec.adjacency} neighbours, against {adversary}, δ = {spec.privacy.delta:g}"


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"
