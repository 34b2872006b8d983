"""The command line. It parses, calls the library, prints; nothing imports it.

Exit codes: 0 done, 1 something failed, 2 a value given is wrong, 3 the privacy budget is spent,
130 interrupted (the run can be resumed).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dither
from dither.errors import BudgetExhausted, DitherError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from dither.api import Run, Task

app = typer.Typer(
    name="dither",
    help="Differentially private federated learning that reports claimed, proven and attacked ε.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    help="Data sets: list, get, describe; draft a schema for your own table.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
budget_app = typer.Typer(
    help="Privacy budgets: what was spent on which data, and how much may be.", no_args_is_help=True
)
app.add_typer(budget_app, name="budget")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with local copies of the data sets (or set $DITHER_DATA)."),
]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger", help="Ledger to charge (default: your own data to the user's ledger, others to none)."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the spec, e.g. privacy.epsilon=1."),
]


def main() -> None:
    """Entry point: errors raised on purpose become one line and an exit code."""
    try:
        app()
    except DitherError as error:
        _errors().print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `dither ... | head`
        sys.stderr.close()
        sys.exit(0)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(dither.__version__)
        raise typer.Exit


# Runs


@app.command()
def run(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[PRESET | SPEC.toml]", help="What to run (default: adult)."),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Seed of partition, model, cohorts, batches and noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to make (default: runs/METHOD-DATA-TIME).")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue an interrupted run folder.")] = None,
    data_dir: DataDir = None,
    ledger: LedgerFile = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Least seconds between checkpoints; 0: one at each evaluation.")
    ] = 5.0,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Train: a preset, or a spec of your own. Leaves a run folder with model, metrics and plot."""
    spec = _spec(what, resume, settings, seed)
    if resume is not None and out is not None:
        raise SpecError("--out and --resume exclude each other: a resumed run stays in its folder")
    from dither import api

    view = _Progress(silent=quiet or as_json)
    try:
        with view:
            result = api.run(
                spec,
                out=out,
                resume=resume,
                data_dir=data_dir,
                ledger=ledger,
                checkpoint_seconds=checkpoint_seconds,
                on_start=view.start,
                on_evaluation=view.update,
            )
    except KeyboardInterrupt:
        if view.folder is not None:
            _errors().print(
                f"interrupted; continue with: [bold]dither run --resume {_escape(str(view.folder))}[/]",
                soft_wrap=True,
            )
        sys.exit(130)
    if as_json:
        from dither.runs import to_json

        typer.echo(to_json({"folder": str(result.folder), **result.summary}, indent=2))
    elif not quiet:
        _print_summary(result)
    if "stopped" in result.summary:
        _errors().print(
            f"[bold yellow]stopped:[/] {_escape(result.summary['stopped'])}; model and metrics are kept",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(BudgetExhausted.exit_code)


@app.command()
def account(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a preset or spec to account for.")
    ],
    settings: Settings = None,
    data_dir: DataDir = None,
    every_recipe: Annotated[
        bool, typer.Option("--every-recipe", help="Also list each bound that was tried, and why one was refused.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Claimed and proven ε of a run (or of a spec before it is run), for every adversary, and why they differ."""
    from dither import api
    from dither.runs import RunFolder, to_json

    finished = RunFolder(run_folder).summary() if (run_folder / "spec.toml").is_file() else None
    if finished is not None and not settings and not every_recipe:
        report = {"method": finished["method"], "why": finished["why"], **finished["epsilon"]}
    else:
        source = run_folder / "spec.toml" if (run_folder / "spec.toml").is_file() else str(run_folder)
        spec = _spec(str(source), None, settings, None)
        report = api.accounted(spec, data_dir=data_dir, every_recipe=every_recipe)
    if as_json:
        typer.echo(to_json(report, indent=2))
        return
    claim = report["claimed"]
    rows = [
        {
            "": "claimed",
            "ε": _epsilon(claim["value"]),
            "unit": claim["unit"],
            "seen": "",
            "neighbours": claim["adjacency"],
            "by": claim["source"],
        }
    ]
    for row in _worth_showing(report["proven"]):
        rows.append(
            {
                "": "assumed" if row["assumed"] else "proven",
                "ε": _epsilon(row["value"]),
                "unit": row["unit"],
                "seen": _SEEN[row["view"]],
                "neighbours": row["adjacency"],
                "by": row["recipe"],
            }
        )
    _table(rows, title=f"{report['method']}: claimed and proven ε at δ = {claim['delta']:g}")
    for row in _worth_showing(report["proven"]):
        clients = row.get("clients")
        if clients and clients["min"] != clients["max"] and row["view"] in ("upload", "sum"):
            spread = [f"{which} {_epsilon(clients[which])}" for which in ("min", "median", "max")]
            typer.echo(f"over clients, {_SEEN[row['view']]} seen, {row['adjacency']}: {', '.join(spread)}")
        if row.get("no_credit"):
            typer.echo(f"sums of uploads, {row['adjacency']}: no credit for the others' noise: {row['no_credit']}")
    if "tried" in report:
        rows = [
            {
                "ε": _epsilon(row["value"]),
                "seen": _SEEN[row["view"]],
                "neighbours": row["adjacency"],
                "by": row["recipe"],
                "detail": row["detail"],
            }
            for row in report["tried"]
        ]
        _table(rows, title="Every bound that was tried, for the client that reveals most")
    for condition in claim["conditions"]:
        if not condition["holds"]:
            typer.echo(f"condition of the claim fails: {condition['condition']}")
    if report["why"]:
        typer.echo(f"why they differ: {report['why']}")
    for what in dict.fromkeys(each for row in report["proven"] for each in row["not_covered"]):
        typer.echo(f"not covered: {what}")


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset as TOML.")] = None,
    as_json: Json = False,
) -> None:
    """List the presets, or print one as TOML to start a spec of your own from."""
    from dither import spec

    if name is not None:
        typer.echo(spec.preset_text(name), nl=False)
        return
    rows = [{"preset": each, "what": spec.preset_title(each)} for each in spec.preset_names()]
    _table(rows, as_json=as_json, title="Presets", footer="dither run PRESET; dither presets PRESET prints it")


@app.command()
def keys(
    method: Annotated[str | None, typer.Argument(help="A method: list its own constants too.")] = None,
    as_json: Json = False,
) -> None:
    """Every key of a spec, with its default and what it means."""
    from dither import spec

    rows = [
        {"key": key, "default": _short(default), "what": what} for key, default, what in spec.describe_keys(method)
    ]
    _table(rows, as_json=as_json, title="Keys of a spec", footer="in TOML, or with --set key=value")


@app.command()
def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, typer.Option("--data", help="File with labels: CSV, Parquet or npz.")],
    as_json: Json = False,
) -> None:
    """Accuracy and loss of a trained run on a file."""
    from dither import api

    scores = api.load(run_folder).evaluate(data)
    if as_json:
        typer.echo(json.dumps(scores))
    else:
        _table(
            [
                {
                    "records": scores["records"],
                    "accuracy": f"{scores['accuracy']:.4f}",
                    "loss": f"{scores['loss']:.4f}",
                }
            ]
        )


@app.command()
def predict(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    data: Annotated[Path, typer.Option("--data", help="File of records: CSV, Parquet or npz.")],
    out: Annotated[Path, typer.Option("--out", help="CSV to write: the class and its probabilities.")],
) -> None:
    """Predict each record's class with a trained run."""
    from dither import api
    from dither.runs import write_text

    trained = api.load(run_folder)
    probabilities = trained.predict_proba(data)
    best = probabilities.argmax(axis=1)
    lines = [",".join(["prediction", *(f"p({name})" for name in trained.classes)])]
    for number, row in zip(best, probabilities, strict=True):
        lines.append(",".join([trained.classes[number], *(f"{p:.6f}" for p in row)]))
    write_text(out, "\n".join(lines) + "\n")
    typer.echo(f"{len(best)} predictions in {out}")


# Budgets


Data = Annotated[str, typer.Argument(metavar="DATA", help="Your own file, or the name of a data set.")]


@budget_app.command("show")
def budget_show(
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="Your own file, or a data set's name.")
    ] = None,
    ledger: LedgerFile = None,
    delta: Annotated[float, typer.Option(help="δ for accounts without a budget.")] = 1e-5,
    as_json: Json = False,
) -> None:
    """What has been spent, per data set and client."""
    book = _ledger(ledger)
    rows = []
    for dataset in [_data_id(book, data)] if data else book.datasets():
        for spent in book.spent(dataset, delta=delta):
            budget = spent.budget
            rows.append(
                {
                    "data": data or dataset[:8],
                    "client": spent.client,
                    "spent": _epsilon(spent.epsilon),
                    "budget": _epsilon(budget.epsilon) if budget else "none",
                    "δ": f"{spent.delta:g}",
                    "view": spent.view,
                    "neighbours": spent.adjacency,
                    "runs": len(spent.runs),
                }
            )
    if not rows and not as_json:
        typer.echo(f"nothing has been charged to {book.path}")
        return
    _table(rows, as_json=as_json, title=f"Proven ε spent, by {book.path}")


@budget_app.command("set")
def budget_set(
    data: Data,
    epsilon: Annotated[float, typer.Option(help="Most proven ε of everything ever released.")],
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    view: Annotated[
        str, typer.Option(help="What the adversary sees: upload, sum, broadcast or final.")
    ] = "upload",
    adjacency: Annotated[str, typer.Option(help="add/remove or replace-one.")] = "add/remove",
    client: Annotated[str | None, typer.Option(help="One client of a column partition (default: all).")] = None,
    ledger: LedgerFile = None,
) -> None:
    """Set a budget: a run that would exceed it stops at the last round it can pay."""
    from dither.spending import Budget

    book = _ledger(ledger)
    limit = Budget(epsilon, delta, view, adjacency)
    book.set_budget(_data_id(book, data), limit, client)
    typer.echo(f"budget of {data}{f', client {client}' if client else ''}: {limit}")


@budget_app.command("history")
def budget_history(
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="Your own file, or a data set's name.")
    ] = None,
    ledger: LedgerFile = None,
    as_json: Json = False,
) -> None:
    """Every charge and every change of a budget, oldest first; checks that nothing was edited."""
    book = _ledger(ledger)
    rows = [_history_row(entry) for entry in book.history(_data_id(book, data) if data else None)]
    if not rows and not as_json:
        typer.echo(f"nothing has been charged to {book.path}")
        return
    _table(rows, as_json=as_json, title=f"History of {book.path}")


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
    if not Path(data).is_file():
        raise SpecError(f"{data!r} is neither a file nor a data set of `dither data list`")
    return data_id(book, path=data)


# Data


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """The data sets Dither knows."""
    from dither import data

    rows = [
        {
            "name": entry.name,
            "records (train + test)": entry.records,
            "what": entry.summary,
            "fetched": "no" if entry.remote is None else "yes",
        }
        for entry in data.entries().values()
    ]
    _table(
        rows,
        as_json=as_json,
        title="Data sets",
        footer="your own: dither run ... --set data.path=FILE --set data.label=COLUMN",
    )


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set of `dither data list`.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fetch a data set, verify it, and keep it in the cache."""
    from dither import data

    files = data.get(name, data_dir=data_dir)
    if as_json:
        typer.echo(json.dumps({"name": name, "files": [str(path) for path in files]}))
        return
    for path in files:
        typer.echo(str(path))
    if not files:
        typer.echo(f"{name} ships inside scikit-learn: nothing to fetch")


@data_app.command("describe")
def data_describe(
    name: Annotated[str, typer.Argument(help="A data set's name, or your own file.")],
    label: Annotated[str, typer.Option(help="Label column of your own file.")] = "",
    schema: Annotated[str, typer.Option(help="schema.toml of your own file.")] = "",
    partition: Annotated[str, typer.Option(help="iid, one-class, similarity, dirichlet or column.")] = "iid",
    num_clients: Annotated[int, typer.Option("--clients", help="How many clients.")] = 10,
    similarity: Annotated[float, typer.Option(help="Percent of i.i.d. records (partition=similarity).")] = 0.0,
    alpha: Annotated[float, typer.Option(help="Concentration (partition=dirichlet).")] = 0.5,
    column: Annotated[str, typer.Option(help="Column that names the client (partition=column).")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Where to save the picture (default: NAME-PARTITION.png).")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Records, classes and features; who would hold what, as a table and a picture."""
    from dither import data

    own = Path(name).suffix in (".csv", ".parquet", ".npz")
    dataset = data.load(
        "" if own else name,
        path=name if own else "",
        label=label,
        schema=schema,
        data_dir=data_dir,
        group_column=column if partition == "column" else "",
    )
    federation = data.partition(
        dataset,
        kind=partition,
        num_clients=0 if partition == "column" else num_clients,
        seed=seed,
        similarity=similarity,
        alpha=alpha,
        groups=dataset.groups,
    )
    facts = data.describe(dataset)
    path = picture or Path(f"{Path(name).stem}-{partition}.png")
    data.draw_partition(dataset, federation, path)
    table = data.partition_table(dataset, federation)
    if as_json:
        rows = [{"client": row.client, "records": row.records, "classes": row.counts} for row in table]
        from dither.runs import to_json

        typer.echo(to_json({**facts, "clients": rows, "picture": str(path)}, indent=2))
        return
    _table(
        [{"": key, "value": _short(value)} for key, value in facts.items() if key != "notes"],
        title=dataset.name,
    )
    shown = table[:20]
    _table(
        [{"client": row.client, "records": row.records, "classes": row.mix} for row in shown],
        title=f"{partition} over {len(table)} clients",
    )
    if len(table) > len(shown):
        typer.echo(f"... and {len(table) - len(shown)} more clients, all in the picture")
    for note in dataset.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"picture: {path}")


@data_app.command("schema")
def data_schema(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV or Parquet table.")],
    label: Annotated[str, typer.Option(help="Label column.")],
    out: Annotated[Path, typer.Option(help="Schema to write.")] = Path("schema.toml"),
) -> None:
    """Draft a schema for your own table, marking every value that was read from the data."""
    from dither import data

    if out.exists():
        raise SpecError(f"{str(out)!r} already exists; give another --out")
    schema = data.draft_schema(file, label)
    schema.save(out)
    read = schema.read_from_data
    typer.echo(f"{out}: {len(schema.columns)} columns, label {label!r}")
    if read:
        typer.echo(
            f"{len(read)} values were read from the data "
            f"({', '.join(read[:4])}{', ...' if len(read) > 4 else ''}).\n"
            "Reading them from private records is itself a leak: replace them by public knowledge and mark them "
            "'public', or every ε will carry the note 'preprocessing not covered'."
        )


# Printing

_SEEN = {
    "upload": "every upload",
    "sum": "sums of uploads",
    "broadcast": "broadcasts",
    "final": "final model",
}


def _worth_showing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Proven rows; of those without a proof one a adjacency, so that its absence is seen too."""
    shown = []
    for adjacency in dict.fromkeys(row["adjacency"] for row in rows):
        some = [row for row in rows if row["adjacency"] == adjacency]
        proven = [row for row in some if row["value"] not in ("inf", float("inf"))]
        shown += proven or some[:1]
    return sorted(shown, key=lambda row: row["value"] in ("inf", float("inf")))


class _Progress:
    """A live bar on a terminal, a line now and then elsewhere, nothing when silent."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.folder: Path | None = None
        self._bar: Any = None
        self._total = 0
        self._printed = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, task: Task, folder: Path, done: int) -> None:
        from dither.api import planned_rounds

        self.folder, self._total, self._printed = folder, planned_rounds(task), done
        if self.silent:
            return
        console = _console()
        claim = task.prepared.claim
        epsilon = _epsilon(claim.value)
        unit = f"/{claim.unit}" if claim.unit != "run" else ""
        self._claimed = f"claimed ε {epsilon}{unit}"
        self._epsilon = self._claimed
        self._task_at_hand, self._accounting = task, 0.0
        if done:
            console.print(f"resuming {_escape(str(folder))} after round {done}", highlight=False)
        if not console.is_terminal:
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("accuracy {task.fields[accuracy]}  loss {task.fields[loss]}  {task.fields[epsilon]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(
            "", total=self._total, completed=done, accuracy="-", loss="-", epsilon=self._epsilon
        )
        self._bar.start()

    def update(self, row: dict[str, Any]) -> None:
        if self.silent:
            return
        accuracy, loss = f"{row['test_accuracy']:.4f}", f"{row['loss']:.4f}"
        self._account(row)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=row["round"], accuracy=accuracy, loss=loss, epsilon=self._epsilon
            )
        elif row["round"] - self._printed >= self._total / 10 or row["round"] == self._total:
            self._printed = row["round"]
            typer.echo(f"round {row['round']}/{self._total}  accuracy {accuracy}  loss {loss}  {self._epsilon}")

    def _account(self, row: dict[str, Any]) -> None:
        """Bring the proven ε so far up to date, as long as that takes less than a tenth of the run."""
        from time import perf_counter

        from dither.api import proven_so_far

        if self._accounting > 0.1 * (row["seconds"] + 3) and row["round"] < self._total:
            return
        began = perf_counter()
        value = proven_so_far(self._task_at_hand, row["round"])
        self._accounting += perf_counter() - began
        self._epsilon = f"proven ε {_epsilon(value)} at round {row['round']}, {self._claimed}"


def _print_summary(result: Run) -> None:
    from rich.table import Table

    summary, spec = result.summary, result.spec
    claim = summary["epsilon"]["claimed"]
    table = Table(show_header=False, title=f"{spec.method} on {summary['data']}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("test accuracy", f"{summary['test_accuracy']:.4f}")
    table.add_row("loss", f"{summary['loss']:.4f}")
    table.add_row("rounds", f"{summary['rounds']} in {summary['seconds']:.1f} s")
    seen = summary["participation"]
    table.add_row(
        "clients",
        f"{summary['num_clients']}, each in {seen['min']} to {seen['max']} rounds (median {seen['median']:g})",
    )
    table.add_row(
        "claimed ε",
        f"{_epsilon(claim['value'])} per {claim['unit']}, δ = {claim['delta']:g} ({claim['source']})",
    )
    failing = sum(not condition["holds"] for condition in claim["conditions"])
    if failing:
        table.add_row(
            "", f"[yellow]{failing} of its conditions fail[/]: dither account {_escape(str(result.folder))}"
        )
    for row in _short_form(summary["epsilon"]["proven"], spec):
        table.add_row(
            "proven ε",
            f"[bold]{_epsilon(row['value'])}[/] per {row['unit']}, δ = {row['delta']:g}, {row['adjacency']}, "
            f"to one who sees {_SEEN[row['view']]} ({row['recipe']})",
        )
    if "test_accuracy_without_noise" in summary:
        table.add_row("without noise", f"test accuracy {summary['test_accuracy_without_noise']:.4f}")
    for note in summary["notes"]:
        table.add_row("note", _escape(note))
    table.add_row("plot", _escape(str(result.folder / "plot.png")))
    table.add_row("run folder", _escape(str(result.folder)))
    _console().print(table)


def _short_form(rows: list[dict[str, Any]], spec: Any) -> list[dict[str, Any]]:
    """The proven ε for the spec's own view under each adjacency that has one, the spec's first."""
    view = [row for row in rows if row["view"] == spec.privacy.view and not row["unit"].startswith("message")]
    if spec.privacy.unit == "message":
        view = [row for row in rows if row["unit"].startswith("message")] + view
    proven = [row for row in view if row["value"] not in ("inf", float("inf"))] or view[:1]
    return sorted(proven, key=lambda row: row["adjacency"] != spec.privacy.adjacency)


def _table(rows: list[dict[str, Any]], *, as_json: bool = False, title: str = "", footer: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", caption=footer or None, caption_justify="left")
    for name in rows[0]:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_escape(_short(row[name])) for name in row))
    _console().print(table)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_short(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_short(inner) for inner in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _epsilon(value: Any) -> str:
    return "∞" if value in (float("inf"), "inf") else f"{float(value):.3g}"


def _console() -> Console:
    from rich.console import Console

    return Console()


def _errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _spec(what: str | None, resume: Path | None, settings: list[str] | None, seed: int | None) -> Any:
    from dither.runs import RunFolder
    from dither.spec import Spec, parse_setting

    own = resume is not None and what is None
    spec = RunFolder.open(resume).spec() if own and resume else Spec.from_any(what or "adult")
    values = dict(parse_setting(each) for each in settings or [])
    if seed is not None:
        values["seed"] = seed
    return spec.with_values(values)


if __name__ == "__main__":
    main()
