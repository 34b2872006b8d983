"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only; the exit code tells the outcome.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with local copies of the data sets (or set $DITHER_DATA)."),
]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger", help="Ledger to charge (default: your user ledger for your own data, none for public sets)."
    ),
]
NewLedger = Annotated[
    bool,
    typer.Option(
        "--new-ledger", help="Allow a second account for records that another ledger of yours already has."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the spec, e.g. privacy.epsilon=1. May be repeated."
    ),
]


def presets(incomplete: str) -> list[str]:
    """Presets that begin so, for the shell's completion; where none does, the shell offers files."""
    from importlib.resources import files

    names = (file.name for file in files("dither").joinpath("spec", "presets").iterdir())
    return sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml") and n.startswith(incomplete))


def spec_from(what: str | None, resume: Path | None, settings: list[str] | None, seed: int | None) -> Any:
    from dither.experiment.folder import RunFolder
    from dither.spec import Spec, parse_setting

    own = resume is not None and what is None
    spec = RunFolder.open(resume).spec() if own and resume else Spec.from_any(what or "adult")
    values = dict(parse_setting(each) for each in settings or [])
    if seed is not None:
        values["seed"] = seed
    return spec.with_values(values)
