"""dither reproduce, web, doctor: look at figures, runs and this installation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Argument, Option

from dither.cli import common
from dither.errors import DitherError, SpecError, extra
from dither.types import __version__

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from dither.reproduction.figure import Figure
    from dither.reproduction.judging import JudgedCriterion
    from dither.reproduction.report import FigureResult

_COLOURS = {"holds": "green", "fails": "red", "inconclusive": "yellow", "not judged": "dim"}


# reason: each parameter is an argument or option of the command
def reproduce(
    what: Annotated[
        list[str] | None,
        Argument(metavar="all | PAPER | PAPER/figN", help="What to reproduce (default: all 27 figures)."),
    ] = None,
    scale: Annotated[
        str, Option(help="smoke (a minute, stand-in data), quick (11 minutes: fewer seeds and rounds) or full.")
    ] = "quick",
    out: Annotated[Path, Option(help="Folder for pictures, CSVs and report.html.")] = Path("reproduced"),
    listed: Annotated[bool, Option("--list", help="List the figures and their criteria.")] = False,
    cache: Annotated[
        Path | None, Option(help="Folder of finished runs (default: $DITHER_CACHE or the platform's).")
    ] = None,
    no_cache: Annotated[bool, Option("--no-cache", help="Compute everything again and keep nothing.")] = False,
    only_compute: Annotated[
        bool, Option("--only-compute", help="Fill the cache and stop; draw the report later.")
    ] = False,
    robust: Annotated[
        str,
        Option(
            "--robustness",
            metavar="SCALE",
            help="Also judge each finding with open settings changed, at this scale.",
        ),
    ] = "",
    minutes: Annotated[
        float, Option(help="Start no further batch of runs after this many minutes; 0: no limit.")
    ] = 0.0,
    jobs: Annotated[int, Option(min=1, help="Processes that share the figures.")] = 1,
    against: Annotated[
        Path | None,
        Option(metavar="REPORT.json", help="Also list criteria that another report decides differently."),
    ] = None,
    data_dir: common.DataDir = None,
) -> None:
    """Draw the papers' figures from runs of this code, and judge each of their findings."""
    from dither.reproduction.figure import select

    chosen = select(what or ["all"])
    if listed:
        _print_figures(chosen)
        return
    common.check_folder(out)
    from dither.reproduction.report import disagreements
    from dither.reproduction.running import reproduce as run_figures

    other = _claims_of(against) if against else []
    bar = common.Bar()
    if scale != "full":
        for figure in chosen:
            bar.say(f"{figure.id}: {'; '.join(figure.views(scale)[0].reductions()) or 'as at full scale'}")

    def drawn(figure: FigureResult) -> None:
        verdicts = ", ".join(f"{claim.id} {claim.printed.status}" for claim in figure.claims)
        bar.say(f"{figure.id}: {figure.refused or verdicts}")

    after_stop = "finished runs are kept; run the same command to continue"
    if no_cache:
        after_stop = "--no-cache keeps nothing; run the same command to start again"
    with (
        common.on_interrupt(after_stop),
        bar,
        tempfile.TemporaryDirectory(prefix="dither-reproduce-") as throwaway,
    ):
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
    summary = {"report": str(result.report), **result.to_dict(), "disagreements": differing}
    shown = common.emit({key: value for key, value in summary.items() if key != "scale"})
    if only_compute:
        bar.say(f"{result.provenance['computed']} runs computed and kept; {result.provenance['missing']} missing")
    elif shown:
        _print_claims(result.claims)
        for line in differing:
            typer.echo(f"differs from {against}: {line}")
        typer.echo(f"report: {result.report}")


def _print_figures(figures: Sequence[Figure]) -> None:
    rows = [
        {
            "figure": figure.id,
            "shows": figure.title,
            "criteria": ", ".join(dict.fromkeys(criterion.id for criterion in figure.criteria)),
        }
        for figure in figures
    ]
    footer = "dither reproduce FIGURE --scale quick"
    common.print_table(rows, title="Figures", footer=footer)


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
        table.add_row(common.escape(name), *verdicts, common.escape(robust), common.escape(claim.claim))
    common.terminal().print(table)


def _coloured(status: str) -> str:
    colour = _COLOURS.get(status)
    return f"[{colour}]{status}[/]" if colour else status


# The page


# reason: each parameter is an option of the command
def web(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8765,
    host: Annotated[
        str, Option(help="Address to listen on. Visitors need the token that the printed address holds.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
    reports: Annotated[Path, Option(help="Folder with reports of dither reproduce.")] = Path("reproduced"),
    ledger: Annotated[
        Path | None, Option("--ledger", help="Ledger to read budgets from (default: yours).")
    ] = None,
    data_dir: common.DataDir = None,
    own_data: Annotated[
        bool, Option("--own-data", help="Open the tables that runs name, to compute cohorts and ε by round.")
    ] = False,
) -> None:
    """Show runs, plans and privacy in a browser. Nothing is sent to any other host."""
    if not folder.is_dir():
        raise SpecError(f"no folder {str(folder)!r}; give the folder of your runs, or make a run with: dither run")
    try:
        import fastapi  # noqa: F401
        import plotly  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as missing:
        raise SpecError(f"dither web needs {missing.name}; install it with: {extra('web')}") from None
    from dither.accounting.ledger.runs import Ledger
    from dither.web.app import create_app
    from dither.web.guard import is_loopback, kept_token, new_token

    this_machine = is_loopback(host)
    token = kept_token() if this_machine else new_token()
    app = create_app(
        folder,
        reports_folder=reports,
        token=token,
        ledger=ledger or Ledger.default_path(),
        data_dir=str(data_dir) if data_dir else None,
        own_data=own_data,
    )
    listener, address = _listen(host, port)
    address += f"?token={token}"
    # Ctrl-C is the usual way to stop it, so not a failure. A handler, as KeyboardInterrupt may come while modules
    # are imported, and is lost there.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    if common.output().json:
        common.print_event("serving", folder=str(folder), address=address, token=token)
    else:
        typer.echo(address if common.output().quiet else f"dashboard of {folder}: {address}")
    if not (this_machine or common.output().quiet):
        only = f"Without --host {host} only this machine can reach it."
        common.say(
            f"the connection is not encrypted. {only}", "anyone with this address can see the page;", "yellow"
        )
    if common.output().text:
        common.terminal().print("stop with Ctrl-C", style="dim")
    _serve(app, listener, address if open_browser else "")
    _exit_at_once()


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its address: a taken port is one line, and port 0 becomes the real one."""
    import socket

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        raise SpecError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --port or --host"
        ) from None
    listener.listen(128)
    name = f"[{host.strip('[]')}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # noqa: S104
        name = socket.gethostname()
    return listener, f"http://{name}:{listener.getsockname()[1]}/"


def _serve(app: FastAPI, listener: socket.socket, browser_address: str) -> None:
    """Serve until Ctrl-C, and open a browser if an address is given."""
    import threading

    import uvicorn

    threading.Thread(target=app.state.warm, daemon=True).start()
    if browser_address:
        import webbrowser

        threading.Timer(0.5, webbrowser.open, [browser_address]).start()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


def _exit_at_once() -> None:
    """Exit without waiting for threads: nothing is left to write, and JAX must not be aborted halfway."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# What is installed, what is missing, and the command for it

_NEEDED = ("jax", "numpy", "scipy", "pandas", "scikit-learn", "matplotlib", "cryptography", "dp-accounting")
_EXTRAS = {"web": "fastapi", "deploy": "flwr", "nvflare": "nvflare", "pdf": "fpdf2", "torch": "torchax"}


class Diagnosis(NamedTuple):
    """One thing that was looked at: whether it is fine, what was seen, and the command that mends it."""

    what: str
    fine: bool
    seen: str
    fix: str = ""


def doctor(ledger: common.LedgerFile = None) -> None:
    """Check this installation: versions, devices, data, caches, the ledger (exit code 1: something is wrong)."""
    looks: tuple[Callable[[], list[Diagnosis]], ...] = (_software, _devices, _data, _disk, lambda: _ledger(ledger))
    findings = [finding for look in looks for finding in look()]
    extras = [finding for finding in findings if not finding.fine and finding.what.startswith("extra")]
    wrong = [finding for finding in findings if not finding.fine and finding not in extras]
    rows = [
        {
            "state": "ok" if each.fine else "missing" if each in extras else "wrong",
            "what": each.what,
            "seen": each.seen,
            "to fix": "" if each.fine else each.fix,
        }
        for each in findings
    ]
    footer = "all is well" if not wrong else f"{len(wrong)} of {len(findings)} need attention"
    footer += f"; {len(extras)} optional extras are not installed" if extras else ""
    common.print_table(rows, title=f"Dither {__version__}", footer=footer)
    if any(finding.what in ("python", "packages", "device", "ledger") for finding in wrong):
        sys.exit(1)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _software() -> list[Diagnosis]:
    python = Diagnosis(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer"
    )
    versions = {name: _version(name) for name in _NEEDED}
    missing = [name for name, version in versions.items() if not version]
    seen = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    packages = Diagnosis("packages", not missing, seen, f"pip install {' '.join(missing)}")
    extras = [
        Diagnosis(
            f"extra {named}",
            bool(_version(name)),
            f"{name} {_version(name)}".strip(),
            extra(named),
        )
        for named, name in _EXTRAS.items()
    ]
    return [python, packages, *extras]


def _devices() -> list[Diagnosis]:
    try:
        from dither.simulation import devices
    except Exception as error:  # a broken JAX must not end the look at the rest
        return [Diagnosis("device", False, str(error).splitlines()[0], "pip install --upgrade jax jaxlib")]
    name = " ".join(dict.fromkeys(devices.device().split(": ")))  # "cpu: cpu" is "cpu"
    return [Diagnosis("device", True, f"{name}, {devices.cores()} cores")]


def _data() -> list[Diagnosis]:
    folder = os.environ.get("DITHER_DATA", "")
    if folder and not Path(folder).is_dir():
        return [Diagnosis("data folder", False, f"DITHER_DATA={folder} is not a folder", "unset it, or create it")]
    from dither.data.downloads import cache_folder

    cache = cache_folder()
    kept = sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []
    seen = [f"DITHER_DATA={folder}"] if folder else []
    seen.append(f"downloaded: {', '.join(kept) or 'nothing yet'}")
    return [Diagnosis("data", True, "; ".join(seen))]


def _disk() -> list[Diagnosis]:
    from platformdirs import user_cache_path

    cache = user_cache_path("dither")
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.is_dir() else 0
    free = shutil.disk_usage(cache if cache.is_dir() else Path.home()).free
    return [
        Diagnosis("cache", free > 1e9, f"{cache}: {size / 1e6:,.0f} MB, {free / 1e9:,.0f} GB free", "make room")
    ]


def _ledger(path: Path | None) -> list[Diagnosis]:
    from dither.accounting.ledger import Ledger

    file = path or Ledger.default_path()
    if not file.exists():
        return [Diagnosis("ledger", True, f"{file}: nothing has been charged")]
    try:
        book = Ledger(file)
        book.verify()
        return [Diagnosis("ledger", True, f"{file}: data sets: {len(book.datasets())}, intact")]
    except DitherError as error:
        return [Diagnosis("ledger", False, str(error))]
