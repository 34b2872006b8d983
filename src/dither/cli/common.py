"""What the commands share: options; what they print (tables, progress, reports, errors, advice on Ctrl-C); and
--processes, --process, --coordinator: several processes that make one simulation."""

from __future__ import annotations

import inspect
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, Self, TypeVar, cast

import typer
from typer import Option
from typer.core import TyperGroup

from dither.errors import DataWarning, DitherError, ProcessError, SpecError
from dither.types import __version__, epsilon_text

if TYPE_CHECKING:
    from rich.console import Console

    from dither.experiment.build import Experiment
    from dither.experiment.report import Report

F = TypeVar("F", bound=Callable[..., Any])

# Options

OWN_PROCESS = "own process"  # the context's object where a command has the process to itself

DataDir = Annotated[
    Path | None, Option("--data-dir", help="Folder with local copies of the data sets (default: $DITHER_DATA).")
]
LedgerFile = Annotated[
    Path | None,
    Option(
        "--ledger",
        help="The ledger (default: of a run the one it was charged to, of your own data your user ledger).",
    ),
]
NewLedger = Annotated[
    bool,
    Option("--new-ledger", help="Allow a second account for records that another of your ledgers already has."),
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the spec, e.g. privacy.epsilon=1. May be repeated."
    ),
]
Delta = Annotated[float, Option(help="δ of that ε.")]
Task = Annotated[str, Option(help="classification, regression, or auto (from the label's values).")]
Classes = Annotated[str, Option(help="Public classes of the label, separated by commas.")]
Drop = Annotated[list[str] | None, Option(metavar="COLUMN", help="Leave this column out.")]
Keep = Annotated[list[str] | None, Option(metavar="COLUMN", help="Keep this column, whatever it looks like.")]


class Output(NamedTuple):
    """How a command speaks: text, JSON (--json), or errors only (--quiet)."""

    json: bool = False
    quiet: bool = False

    @property
    def text(self) -> bool:
        return not (self.json or self.quiet)


_OUTPUT: ContextVar[Output] = ContextVar("output")


def output() -> Output:
    """What --json and --quiet of the current command ask for."""
    return _OUTPUT.get(Output())


def asks(yes: bool) -> bool:
    """Whether somebody is there to confirm what --yes has not confirmed."""
    return not yes and not output().json and sys.stdin.isatty()


QUIET = "Print errors only; the exit code tells the outcome."


class Commands(typer.Typer):
    """A group whose commands all have --json and --quiet; `output` says what they ask for."""

    def command(self, name: str | None = None, *, quiet: str = QUIET, **settings: Any) -> Callable[[F], F]:
        register = super().command(name, **settings)

        def add(function: F) -> F:
            register(_with_output(function, quiet))
            return function

        return add


def _with_output(function: F, quiet_help: str) -> F:
    """The function with two options more. Typer reads them from its signature."""

    @wraps(function)
    def command(*arguments: Any, json: bool, quiet: bool, **options: Any) -> Any:
        before = _OUTPUT.set(Output(json, quiet))
        try:
            if Path("-") in options.values():
                raise SpecError("'-' is not the name of a file or folder here; give a name")
            return function(*arguments, **options)
        finally:
            _OUTPUT.reset(before)

    flags = {
        "json": Annotated[bool, Option("--json", help="Print JSON instead of text.")],
        "quiet": Annotated[bool, Option("--quiet", "-q", help=quiet_help)],
    }
    signature = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in flags.items()
    ]
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, **flags}
    return cast(F, command)


def presets(incomplete: str) -> list[str]:
    """Presets with this prefix, for the shell's completion. If there is none, the shell offers files."""
    from dither.spec import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def values_of(settings: list[str] | None) -> dict[str, Any]:
    """The values that --set gives, by key."""
    from dither.spec import parse_setting

    return dict(parse_setting(each) for each in settings or [])


def names_in(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def spec_from(what: str, settings: list[str] | None) -> Any:
    """The spec that a command names; for your own records without a method, what Dither chooses."""
    spec = source_from(what, None, settings, None)
    if isinstance(spec, dict):
        from dither.experiment.build import choose

        return choose(spec).spec
    return spec


def source_from(
    what: str | dict[str, list[str]] | None, resume: Path | None, settings: list[str] | None, seed: int | None
) -> Any:
    """A spec, or the values that are given where Dither chooses the others."""
    from dither.experiment.folder import RunFolder
    from dither.spec import Spec

    continued = resume is not None and what is None
    values = values_of(settings) | ({} if seed is None else {"seed": seed})
    given = None if continued else Spec.given(what or "adult")
    if given == {"data.path": what}:
        what = {**given, **values}  # a table
    if given is not None and (given := {**given, **values}).get("data.path") and "method" not in given:
        Spec.from_any({"num_clients": 0, "cohort_size": 1, **given})  # refuses mistakes before JAX is imported
        return given
    spec = RunFolder.open(resume).spec() if continued and resume else Spec.from_any(what or "adult")
    return spec.with_values(values)


def tables_in(given: Sequence[Path]) -> list[Path]:
    """The files, and the tables of those that are folders."""
    from dither.data import table_files

    return [file for each in given for file in table_files(each) or [each]]


def check_new(file: Path) -> None:
    """`SpecError`, before the work, where a file cannot be new. Pipes and devices may be there."""
    if file.is_file() or file.is_dir():
        raise SpecError(f"{str(file)!r} already exists; give another --out")
    _check_place(file)


def _check_place(file: Path) -> None:
    if not file.resolve().parent.is_dir():
        raise SpecError(f"the folder of {str(file)!r} does not exist")


def check_picture(file: Path, *inputs: Path) -> None:
    """`SpecError`, before the work, where a picture cannot be drawn into this file."""
    if file.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise SpecError(f"{str(file)!r} must end in .png, .pdf or .svg")
    if file.is_dir():
        raise SpecError(f"{str(file)!r} is a folder; give the name of a file")
    if file.is_file() and any(each.exists() and file.samefile(each) for each in inputs):
        raise SpecError(f"{str(file)!r} would replace a file that is read; give another name")
    _check_place(file)


def check_folder(folder: Path) -> None:
    """`SpecError`, before the work, where results cannot be put into this folder."""
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"--out {str(folder)!r} is a file; give the name of a folder")


# Printing


class Live:
    """A bar on a terminal that stops on the way out. Nothing is shown unless the command prints text."""

    _bar: Any = None
    _task: Any = None

    def __init__(self) -> None:
        self.silent = not output().text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self, before: str, after: str, console: Console, *, timed: bool = True, **task: Any) -> None:
        """Start a bar between two texts, followed by the time it took and the time left if `timed`."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        texts = TextColumn(before), BarColumn(bar_width=None), TextColumn(after)
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()) if timed else ()
        self._bar = Progress(*texts, *times, console=console)
        self._task = self._bar.add_task("", **task)
        self._bar.start()


_WIDE = 100  # columns of a terminal from which on the times fit beside the scores
ROUNDS = "round {task.completed}/{task.total}"


class RunProgress(Live):
    """A live bar on a terminal, a line now and then elsewhere, nothing when silent."""

    folder: Path | None = None
    _total = 0
    _printed = 0

    def start(self, experiment: Experiment, folder: Path, done: int) -> None:
        from dither.experiment.build import planned_rounds, sharing_note

        self.folder, self._total, self._printed = folder, planned_rounds(experiment), done
        if self.silent:
            return
        console = terminal()
        self._epsilon, self._known, self._task_at_hand, self._accounting = "", 0, experiment, 0.0
        if note := sharing_note(experiment):
            console.print(f"note: {escape(note)}", highlight=False)
        if done:
            console.print(f"resuming {escape(str(folder))} after round {done}", highlight=False)
        if console.is_terminal:
            after, wide = "{task.fields[scores]}  {task.fields[epsilon]}", console.width >= _WIDE
            task = {"total": self._total, "completed": done, "scores": "-", "epsilon": ""}
            self._start_bar(ROUNDS, after, console, timed=wide, **task)

    def update(self, row: dict[str, Any]) -> None:
        if self.silent:
            return
        scores = scores_text(row)
        self._account(row)
        by = f" by round {self._known}"
        if self._bar is not None:
            epsilon = self._epsilon + by * (self._known != row["round"])
            self._bar.update(self._task, completed=row["round"], scores=scores, epsilon=epsilon)
            if row["round"] == self._total:  # what is printed next comes below it
                self._bar.stop()
        elif row["round"] - self._printed >= self._total / 10 or row["round"] == self._total:
            self._printed = row["round"]
            typer.echo(f"round {row['round']}/{self._total}  {scores}  {self._epsilon}{by}")

    def _account(self, row: dict[str, Any]) -> None:
        """Bring the proven ε so far up to date, as long as that takes little of the run."""
        from dither.experiment.folder import RunFolder

        if self._accounting > 0.03 * (row["seconds"] + 3) and row["round"] < self._total:
            return
        began = time.perf_counter()
        begun = RunFolder(self.folder).begun() if self.folder else []
        value = self._task_at_hand.proven_epsilon(row["round"], begun)
        self._accounting += time.perf_counter() - began
        kind = "assumed" if self._task_at_hand.plan.assumed else "proven"
        self._epsilon, self._known = f"{kind} ε {epsilon_text(value)}", row["round"]


def print_lines(title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Pairs of (what, value), as a table without a head."""
    from rich.table import Table

    table = Table(show_header=False, title=escape(title), title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, text in lines:
        table.add_row(what, escape(text))
    terminal().print(table)


def print_report(report: Report) -> None:
    """The outcome of a run."""
    print_lines(report.title(), report.lines())


LOCAL = "local, not private"


def scores_text(row: dict[str, Any]) -> str:
    """Scores on public test records; where there are none the training loss, marked as what it is."""
    if row.get("test_r2") is not None:
        return f"R² {row['test_r2']:.4f}  loss {row['loss']:.4f}"
    if row.get("test_accuracy") is not None:
        return f"accuracy {row['test_accuracy']:.4f}  loss {row['loss']:.4f}"
    return f"training loss {row['local']['train_loss']:.4f} ({LOCAL})"


def print_event(event: str, **facts: Any) -> None:
    """A line of JSON: with --json, long-running commands print one for each event."""
    from dither.experiment.folder import to_json

    typer.echo(to_json({"event": event, **facts}))


def emit(value: Any) -> bool:
    """Print a value as JSON if --json asks for it. True: the command should print text instead."""
    if output().json:
        from dither.experiment.folder import to_json

        typer.echo(to_json(value, indent=2))
    return output().text


def print_table(rows: list[dict[str, Any]], *, title: str = "", footer: str = "") -> None:
    """Rows as a table, or as JSON."""
    if not emit(rows):
        return
    from rich.table import Table

    console, table = terminal(), Table()
    if title:  # of the table, it would be as narrow as its columns
        console.print(f"[italic]{escape(title)}[/]", highlight=False)
    columns = {name: [short(row[name]) for row in rows] for name in rows[0]}
    words = [" ".join((name, *texts)).split() for name, texts in columns.items()]
    fits = sum(3 + max(map(len, each), default=0) for each in words) < console.width  # without breaking a word
    for name, texts in columns.items():
        numeric = all(isinstance(row[name], int | float) for row in rows)
        whole = fits and not any(" " in text for text in (name, *texts))
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    console.print(table)
    if footer:
        console.print(f"[dim italic]{escape(footer)}[/]", highlight=False)


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {short(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(short(inner) for inner in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counts_guarantee(epsilon: float, delta: float) -> str:
    """What covers private counts."""
    return (
        f"proven ε = {epsilon:.15g}, δ = {delta:g}, zero-out, against a server that sees every institution's "
        "counts; 95% intervals include the noise"
    )


_PIPED = 120  # columns of what no terminal shows: rich would take 80 and break more lines


def terminal() -> Console:
    """Where results go: as wide as the terminal; in a pipe $COLUMNS wide, or wide enough for most tables."""
    from rich.console import Console

    console = Console(emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _PIPED
    return console


def error_terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True, emoji=False)


def tell(text: str) -> None:
    """A line of prose on standard output. A terminal breaks it between words, a pipe gets it whole."""
    console = terminal()
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)


def say(text: str, label: str = "", style: str = "dim") -> None:
    """A line on standard error; a label in a style may come first, otherwise the whole line has it."""
    line = f"[{style}]{label}[/] {escape(text)}" if label else f"[{style}]{escape(text)}[/]"
    error_terminal().print(line, soft_wrap=True, highlight=False)


@contextmanager
def cells_named() -> Iterator[None]:
    """A block that warns of cells in notes; other warnings stay silent."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        yield
    for each in caught:
        if issubclass(each.category, DataWarning):
            say(str(each.message), "note:", "bold yellow")


def say_lines(lines: Sequence[tuple[str, str]]) -> None:
    """Pairs of (what, value) on standard error."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for what, text in lines:
        table.add_row(what, escape(text))
    error_terminal().print(table, highlight=False)


def print_error(text: str) -> None:
    """An error as one line."""
    say(" ".join(text.split()), "error:", "bold red")


def file_error(error: OSError) -> str:
    """What the operating system refused, in words."""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{str(error.filename)!r}: {reason}" if error.filename is not None else reason


class _PatientFile(io.FileIO):
    """Standard output that survives its reader: later output is dropped, and the command continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """Let `dither run | head -1` train to the end."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None and stream.fileno() == number:
            patient = io.BufferedWriter(_PatientFile(number, "w", closefd=False))
            lines = stream.line_buffering or number == 2
            setattr(sys, name, io.TextIOWrapper(patient, stream.encoding, stream.errors, line_buffering=lines))


def escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


# Progress of many runs


class Bar(Live):
    """The progress of sweep, plan and reproduce. Work finished before the first update says nothing about today's
    speed, so the bar starts after it."""

    _before = 0.0
    _tenths = 0

    def update(self, done: float, total: float, text: str) -> None:
        """Show how much of the work is done."""
        if self.silent:
            return
        if self._bar is None and error_terminal().is_terminal:
            self._before, texts = done, ("{task.description:20}", "{task.percentage:3.0f}%")
            self._start_bar(*texts, error_terminal(), total=max(total - done, 1e-9))
        tenths = int(10 * done / max(total, 1e-9))
        if self._bar is not None:
            self._bar.update(self._task, completed=done - self._before, description=text)
        elif tenths > self._tenths:
            self._tenths = tenths
            self.say(f"{10 * tenths}%  {text}")

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        if not self.silent:
            console = self._bar.console if self._bar is not None else error_terminal()
            console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)


# Ctrl-C: every command ends with exit code 130 and says how to continue

INTERRUPTED = 130
_AGAIN = "no file is left half-written; run the same command to start again"
CHARGED = "its ε may be charged already (dither budget show FILE): the same command is charged once more"


Mistake: Any = typer.BadParameter.__mro__[2]  # ClickException: of click, or of the copy in later versions of Typer


class Program(TyperGroup):
    """The program. A command without advice of its own on Ctrl-C gets the general one."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """As Typer's, but a mistake on the command line is one line too."""
        try:
            outcome = super().main(*arguments, **{**options, "standalone_mode": False})
        except Mistake as error:
            if error.format_message():  # none: a command alone, whose help is printed by now
                print_error(_usage(error))
            sys.exit(error.exit_code)
        sys.exit(outcome if isinstance(outcome, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        with on_interrupt(_AGAIN):
            if ctx.obj == OWN_PROCESS:
                sys.unraisablehook = raise_again
            return super().invoke(ctx)


def run_program(app: typer.Typer) -> None:
    """Run the command line: a `DitherError` or a file error becomes one line and an exit code."""
    outlive_readers()
    try:
        app(prog_name="dither", obj=OWN_PROCESS)
    except DitherError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        print_error(file_error(error))
        sys.exit(2)


def top(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    """The options of `dither` itself."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _usage(error: Any) -> str:
    """What is wrong with a command line, and where to look: --set, where an option is called like a key."""
    from dither.spec import all_keys

    text, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    if context is None:
        return str(text)
    # pydantic's, in later versions of Typer, whose messages leave out the value
    cause: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if cause:
        text = text.replace("Input should", f"{cause[0].get('input')!r} should")
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    keys = [key for key in all_keys() if key.rpartition(".")[2] == option]
    if keys and any("--set" in each.opts for each in context.command.params):
        return f"no option {error.option_name!r}; use --set {keys[0]}=..."
    return f"{text}; see: {context.command_path} --help"


def raise_again(dropped: sys.UnraisableHookArgs) -> None:
    """What Python calls with an exception that it drops: one raised in a callback of the garbage collector (JAX
    has one), of a weak reference or in `__del__`. A Ctrl-C that comes there is sent again a moment later."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


@contextmanager
def on_interrupt(advice: str | Callable[[], str]) -> Iterator[None]:
    """A block whose interruption ends the program with advice on how to continue (asked for at that moment)."""
    try:
        yield
    except (KeyboardInterrupt, typer.Abort) as error:
        if isinstance(error, typer.Abort):  # at a question, whose line is not finished
            typer.echo(err=True)
        stop(advice() if callable(advice) else advice)


def command_again(**options: Any) -> str:
    """The command of this process, with the given options where it has them not."""
    given = sys.argv[1:]
    missing = {f"--{name}": str(value) for name, value in options.items()}
    for name in [name for name in missing if any(each.split("=")[0] == name for each in given)]:
        del missing[name]
    return shlex.join(["dither", *given, *(text for pair in missing.items() for text in pair)])


def stop(advice: str) -> NoReturn:
    """One line and the exit code of an interruption."""
    say(f"interrupted; {advice}", style="default")
    sys.exit(INTERRUPTED)


# Several processes

_process_option = partial(Option, rich_help_panel="Several processes (docs/performance.md)")
Processes = Annotated[
    int | None,
    _process_option(
        envvar="DITHER_PROCESSES",
        help="Share the simulation among this many processes. On its own, starts them all here.",
    ),
]
Process = Annotated[
    int | None,
    _process_option(
        envvar="DITHER_PROCESS", help="The number of this process, from 0. Process 0 writes and prints."
    ),
]
Coordinator = Annotated[
    str | None,
    _process_option(
        envvar="DITHER_COORDINATOR",
        metavar="HOST:PORT",
        help="Where process 0 listens; the same for all processes.",
    ),
]

_CHILD_SECONDS = 5.0  # for another process to exit after this one is done


@contextmanager
def several(
    processes: int | None, process: int | None, coordinator: str | None, *, advice: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Connect to the other processes, if there are any, and start them unless they are started elsewhere. `advice`
    says how to continue after one of them was lost."""
    count = _count(processes, process, coordinator)
    if count == 1:
        yield
        return
    number, silent = process or 0, output().quiet
    children: list[subprocess.Popen[bytes]] = []
    try:
        if coordinator is None:
            from dither.federation.local import free_port

            coordinator = f"127.0.0.1:{free_port()}"
            _start_others(children, count, coordinator)
        elif number == 0 and not silent:
            say(f"waiting for {count - 1} other processes at {coordinator}")
        _connect(coordinator, count, number, lambda: _check(children))
        if number and not silent:
            say(f"process {number} of {count} computes for process 0 at {coordinator}")
        yield
    except BaseException as error:
        _leave(error, advice, children)
        if number and isinstance(error, ProcessError) and error.exit_code == INTERRUPTED:
            say(str(error))  # an interruption is no error
            sys.exit(INTERRUPTED)
        raise
    from dither.simulation import distributed

    distributed.disconnect()
    _end(children)


def _count(processes: int | None, process: int | None, coordinator: str | None) -> int:
    if processes is None:
        if process is not None or coordinator is not None:
            raise SpecError("--process and --coordinator need --processes, the total number of processes")
        return 1
    if processes < 1:
        raise SpecError(f"--processes {processes}: give at least 1")
    if processes > 1 and (process is None) != (coordinator is None):
        raise SpecError("give --process and --coordinator together, or neither to start all processes here")
    if processes > 1 and process is not None and coordinator is not None:
        from dither.simulation.distributed import check

        check(coordinator, processes, process)
    return processes


def _connect(coordinator: str, count: int, process: int, on_wait: Callable[[], None]) -> None:
    # JAX's CPU collectives print to standard output, which is ours: what C++ writes there goes nowhere.
    sys.stdout.flush()
    ours = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
    from dither.simulation import devices

    devices.connect(coordinator, count=count, number=process, on_wait=on_wait)


def _start_others(children: list[subprocess.Popen[bytes]], count: int, coordinator: str) -> None:
    """Start processes 1 and up on this machine, with the same command, and add them to `children`, so that those
    that run are known where one cannot be started. Each gets its part of the cores, this one too: they would be
    in each other's way (B1 of the benchmarks takes up to twice the time)."""
    os.environ["DITHER_COORDINATOR"] = coordinator
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    parts = [cores[number::count] or cores for number in range(count)]
    for number in range(1, count):
        if cores:
            os.sched_setaffinity(0, parts[number])  # what is started here stays there
        environment = {**os.environ, "DITHER_PROCESS": str(number)}
        command = [sys.executable, "-m", "dither", *sys.argv[1:]]
        children.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        )
    if cores:
        os.sched_setaffinity(0, parts[0])


def _check(children: list[subprocess.Popen[bytes]]) -> None:
    for number, child in enumerate(children, 1):
        if child.poll() is not None:
            raise ProcessError(f"process {number} ended with exit code {child.returncode} before it connected")


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """The others end by themselves when process 0 does; one that hangs must not outlive it."""
    end = time.monotonic() + _CHILD_SECONDS
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _leave(error: BaseException, advice: Callable[[], str], children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Disconnect after an error. Where the others are lost, an ordinary exit would wait for them: exit at once,
    with the message of `run_program`."""
    from dither.simulation import distributed

    if not distributed.lost():
        distributed.disconnect()
        _end(children)
        return
    code = 1
    if isinstance(error, DitherError):
        print_error(str(error))
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    if advice():
        say(advice())
    sys.stdout.flush()
    sys.stderr.flush()
    for child in children:
        child.kill()
    os._exit(code)
