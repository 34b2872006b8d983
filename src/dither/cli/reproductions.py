"""dither reproduce."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli.common import Bar, DataDir, Json, Quiet, escape, on_interrupt, print_table, terminal
from dither.errors import SpecError

if TYPE_CHECKING:
    from dither.reproduction.figure import Figure
    from dither.reproduction.judging import JudgedCriterion
    from dither.reproduction.report import FigureResult

_COLOURS = {"holds": "green", "fails": "red", "inconclusive": "yellow", "not judged": "dim"}


# reason: each parameter is an argument or option of the command
def reproduce(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="all | PAPER | PAPER/figN", help="What to reproduce (default: all 27 figures)."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="smoke (a minute, stand-in data), quick (within 20 minutes on 2 cores) or full."),
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for pictures, CSVs and report.html.")] = Path("reproduced"),
    listed: Annotated[bool, typer.Option("--list", help="List the figures and their criteria.")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of finished runs (default: $DITHER_CACHE or the platform's).")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything again and keep nothing.")
    ] = False,
    only_compute: Annotated[
        bool, typer.Option("--only-compute", help="Fill the cache and stop; draw the report later.")
    ] = False,
    robust: Annotated[
        str,
        typer.Option(
            "--robustness",
            metavar="SCALE",
            help="Also judge each finding with open settings changed, at this scale.",
        ),
    ] = "",
    minutes: Annotated[
        float, typer.Option(help="Start no further batch of runs after this many minutes; 0: no limit.")
    ] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the figures.")] = 1,
    against: Annotated[
        Path | None,
        typer.Option(metavar="REPORT.json", help="Also list criteria that another report decides differently."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw the papers' figures from runs of this code, and judge each of their findings."""
    from dither.reproduction.figure import select

    chosen = select(what or ["all"])
    if listed:
        _print_figures(chosen, as_json, quiet)
        return
    from dither.reproduction.report import disagreements
    from dither.reproduction.running import reproduce as run_figures

    other = _claims_of(against) if against else []
    bar = Bar(silent=as_json or quiet)
    if scale != "full":
        for figure in chosen:
            bar.say(f"{figure.id}: {'; '.join(figure.views(scale)[0].reductions()) or 'as at full scale'}")

    def drawn(figure: FigureResult) -> None:
        verdicts = ", ".join(f"{claim.id} {claim.printed.status}" for claim in figure.claims)
        bar.say(f"{figure.id}: {figure.refused or verdicts}")

    after_stop = "finished runs are kept: the same command continues"
    if no_cache:
        after_stop = "--no-cache keeps nothing: the same command starts again"
    with on_interrupt(after_stop), bar, tempfile.TemporaryDirectory(prefix="dither-reproduce-") as throwaway:
        result = run_figures(
            what or "all",
            scale=scale,
            out=None if only_compute else out,
            cache=throwaway if no_cache else cache,
            data_dir=data_dir,
            only_compute=only_compute,
            robust=robust,
            minutes=minutes,
            jobs=jobs,
            command=shlex.join(["dither", *sys.argv[1:]]),
            on_progress=bar.update,
            on_figure=drawn,
        )
    differing = disagreements(result.claims, other) if against else []
    if as_json:
        from dither.experiment.folder import to_json

        summary = {"report": str(result.report), **result.to_dict(), "disagreements": differing}
        typer.echo(to_json({key: value for key, value in summary.items() if key != "scale"}, indent=2))
    elif only_compute:
        bar.say(f"{result.provenance['computed']} runs computed and kept; {result.provenance['missing']} missing")
    elif not quiet:
        _print_claims(result.claims)
        for line in differing:
            typer.echo(f"differs from {against}: {line}")
        typer.echo(f"report: {result.report}")


def _print_figures(figures: Sequence[Figure], as_json: bool, quiet: bool) -> None:
    rows = [
        {
            "figure": figure.id,
            "shows": figure.title,
            "criteria": ", ".join(dict.fromkeys(criterion.id for criterion in figure.criteria)),
        }
        for figure in figures
    ]
    footer = "dither reproduce FIGURE --scale quick"
    print_table(rows, as_json=as_json, quiet=quiet, title="Figures", footer=footer)


def _claims_of(path: Path) -> list[JudgedCriterion]:
    from dither.experiment.report import decode
    from dither.reproduction.judging import JudgedCriterion

    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        return [decode(JudgedCriterion, claim) for figure in figures for claim in figure["claims"]]
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"--against {str(path)!r} is not a report.json of dither reproduce") from None


def _print_claims(claims: Sequence[JudgedCriterion]) -> None:
    from rich.table import Table

    from dither.reproduction.figure import VIEW_TITLES

    table = Table(title="Criteria", title_justify="left")
    for name in ("criterion", *VIEW_TITLES.values(), "with open settings changed", "what the paper finds"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        name = claim.id + (f"\n  {claim.variant}" if claim.variant else "")
        verdicts = [_coloured(claim.status(which)) for which in VIEW_TITLES]
        robust = claim.robust_text
        table.add_row(escape(name), *verdicts, escape(robust), escape(claim.claim))
    terminal().print(table)


def _coloured(status: str) -> str:
    colour = _COLOURS.get(status)
    return f"[{colour}]{status}[/]" if colour else status
