"""dither data list, get, describe, schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dither.cli import common
from dither.errors import SpecError

if TYPE_CHECKING:
    import pandas as pd

    from dither.data import Draft, Schema

app = common.Commands(
    help="List, download and describe data sets; draft a schema for your own table.", no_args_is_help=True
)


@app.command("list")
def data_list() -> None:
    """List the data sets that can be used by name."""
    from dither import data

    rows = [
        {
            "name": entry.name,
            "records (train + test)": entry.records,
            "what": entry.summary,
            "download": "no" if entry.download is None else "yes",
        }
        for entry in data.entries().values()
    ]
    footer = "your own: dither run ... --set data.path=FILE --set data.label=COLUMN"
    common.print_table(rows, title="Data sets", footer=footer)


@app.command("get")
def data_get(
    name: Annotated[str, Argument(help="A data set of `dither data list`.")], data_dir: common.DataDir = None
) -> None:
    """Download a data set, verify it, and keep it in the cache."""
    from dither import data

    with common.on_interrupt("complete files are kept; run the same command to continue"):
        files = data.get(name, data_dir=data_dir, progress=None if not common.output().text else common.say)
    if not common.emit({"name": name, "files": [str(path) for path in files]}):
        return
    for path in files:
        typer.echo(str(path))
    if not files:
        typer.echo(f"{name} comes with scikit-learn: nothing to download")


# reason: one parameter an option, as Typer has it
@app.command("describe")
def data_describe(
    name: Annotated[str, Argument(help="A data set's name, your own file, or a folder of files.")],
    label: Annotated[str, Option(help="Label column of your own file.")] = "",
    schema: Annotated[str, Option(help="schema.toml of your own file.")] = "",
    partition: Annotated[str, Option(help="iid, one-class, similarity, dirichlet, column or files.")] = "iid",
    num_clients: Annotated[int, Option("--clients", help="Number of clients.")] = 10,
    similarity: Annotated[float, Option(help="Percent of i.i.d. records (partition=similarity).")] = 0.0,
    alpha: Annotated[float, Option(help="Concentration (partition=dirichlet).")] = 0.5,
    column: Annotated[str, Option(help="Column that names the client (partition=column).")] = "",
    seed: Annotated[int, Option(help="Seed of the partition.")] = 0,
    picture: Annotated[
        Path | None, Option(help="Where to save the picture (default: NAME-PARTITION.png).")
    ] = None,
    data_dir: common.DataDir = None,
) -> None:
    """Describe a data set and how it would be split among clients, as a table and a picture."""
    from dither import data
    from dither.data.tables import TABLE_SUFFIXES

    files = data.table_files(name)
    own = bool(files) or Path(name).suffix in (*TABLE_SUFFIXES, ".npz") or Path(name).expanduser().is_dir()
    if files and partition == "iid":
        partition = "files"
    path = picture or Path(f"{Path(name).stem}-{partition}.png")
    common.check_picture(path, Path(name), *files)
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
        num_clients=0 if partition in ("column", "files") else num_clients,
        seed=seed,
        similarity=similarity,
        alpha=alpha,
        groups=dataset.groups,
    )
    facts = data.describe(dataset)
    data.draw_partition(dataset, federation, path)
    table = data.partition_table(dataset, federation)
    rows = [{"client": row.client, "records": row.records, "classes": row.counts} for row in table]
    local = {"local": True} if own else {}
    if not common.emit({**facts, "clients": rows, "picture": str(path), **local}):
        return
    hidden = ("name", "notes", "covered")
    known = {key.replace("_", " "): value for key, value in facts.items() if key not in hidden and value}
    common.print_table(
        [{"": key, "value": common.short(value)} for key, value in known.items()], title=dataset.name
    )
    shown = table[:20]
    common.print_table(
        [{"client": row.client, "records": row.records, "classes": row.mix} for row in shown],
        title=f"{partition} over {len(table)} clients",
    )
    if len(table) > len(shown):
        typer.echo(f"... and {len(table) - len(shown)} more clients, all in the picture")
    for note in dataset.notes:
        common.tell(f"note: {note}")
    typer.echo(f"picture: {path}")
    if own:
        common.tell(f"{common.LOCAL}: exact counts of {Path(name).name}, also in the picture; no ε covers them")


# reason: one parameter an option, as Typer has it
@app.command("schema")
def data_schema(
    tables: Annotated[
        list[str],
        Argument(
            metavar="TABLES...", help="A table (CSV, Parquet), several, or a folder or 'pattern' of such files."
        ),
    ],
    label: Annotated[str, Option(help="Label column.")],
    out: Annotated[Path, Option(help="Schema to write.")] = Path("schema.toml"),
    task: common.Task = "auto",
    drop: common.Drop = None,
    keep: common.Keep = None,
    public: Annotated[
        bool, Option("--public", help="Declare the records public, and everything read from them.")
    ] = False,
    private: Annotated[
        bool, Option("--private", help="Estimate the schema privately with --epsilon; only the header is public.")
    ] = False,
    epsilon: Annotated[float | None, Option(help="ε of a private schema.")] = None,
    delta: common.Delta = 1e-5,
    classes: common.Classes = "",
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
) -> None:
    """Write a schema for your own tables: a draft read from the records, for you to confirm, or, with --private, a
    schema that an ε covers."""
    from dither import data
    from dither.experiment.private_schema import Wanted, private_schema

    if out.exists():
        raise SpecError(f"{str(out)!r} already exists; give another --out")
    if task not in ("auto", "classification", "regression"):
        raise SpecError(f"--task {task!r} is not one of 'auto', 'classification', 'regression'")
    if private != (epsilon is not None) or (private and public):
        raise SpecError("--private needs --epsilon, which is for private schemas alone; --public excludes both")
    path = tables if len(tables) > 1 else tables[0]
    if private and epsilon is not None:
        wanted = Wanted(label, task, common.names_in(classes), drop or (), keep or ())
        files = data.table_files(path) or [Path(tables[0])]
        with common.on_interrupt(common.CHARGED):
            drafted = private_schema(
                files, wanted, epsilon=epsilon, delta=delta, ledger=ledger, new_ledger=new_ledger
            )
    else:
        check = _refuse_charged if public else None
        drafted = data.draft(path, label, drop=drop or (), keep=keep or (), task=task, on_read=check)
    schema = drafted.schema.as_public() if public else drafted.schema
    schema.save(out, comments=drafted.lines(counts=False))
    facts = {
        "file": str(out),
        "columns": len(schema.columns),
        "label": label,
        "task": "classification" if schema.label.bounds is None else "regression",
        "read_from_data": schema.read_from_data,
        "left_out": drafted.excluded,
        **({} if schema.privacy is None else {"privacy": schema.privacy._asdict()}),
    }
    if common.emit(facts):
        print_draft(drafted, schema, out, asked=task != "auto")


def _refuse_charged(file: Path, table: pd.DataFrame) -> None:
    """The records as they were read: another file may be at their path a moment later."""
    from dither.data import hash_table
    from dither.experiment import build

    build.refuse_charged(str(file), hash_table(table))


def print_draft(drafted: Draft, schema: Schema, out: Path, *, asked: bool) -> None:
    count = len(schema.columns)
    lines = [f"{out}: {count} column{'s' * (count != 1)}, label {schema.label.column!r}", *drafted.lines()]
    common.tell("\n".join(lines))
    if not asked and schema.label.bounds is not None:
        low, high = schema.label.bounds
        common.tell(
            f"The label has many different numbers, within {low:g} to {high:g}: this is a draft for regression. "
            "If they are names of classes, draft again with --task classification."
        )
    if schema.read_from_data:
        common.tell(
            "Its bounds and categories were read from the records, which no ε covers. Replace what you would not "
            'have written without the records, then set origin = "public" at the top of the file. Until then, '
            "every ε carries 'not covered: preprocessing'."
        )
    if schema.privacy is not None:
        common.tell(
            f"Its bounds and categories were estimated with noise: ε = {schema.privacy.epsilon:.15g} at δ = "
            f"{schema.privacy.delta:g}, charged to the ledger for every file. It adds to the ε of each run."
        )
