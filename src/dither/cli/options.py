"""Options that several commands share, and --processes, --process, --coordinator: several processes that make one
simulation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dither.cli.printing import INTERRUPTED, error_terminal, escape, print_error
from dither.errors import DitherError, ProcessError, SpecError

OWN_PROCESS = "own process"  # the context's object where a command has the process to itself

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


# Several processes

_process_option = partial(typer.Option, rich_help_panel="Several processes (docs/performance.md)")
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
        envvar="DITHER_PROCESS",
        help="The number of this process, from 0. Process 0 writes and prints.",
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
    processes: int | None,
    process: int | None,
    coordinator: str | None,
    *,
    silent: bool,
    how: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Connect to the other processes, if there are any; start them where nobody else does. `how` says how to
    continue after one of them was lost."""
    count = _count(processes, process, coordinator)
    if count == 1:
        yield
        return
    number = process or 0
    children: list[subprocess.Popen[bytes]] = []
    try:
        if coordinator is None:
            coordinator = f"127.0.0.1:{_free_port()}"
            _start_others(children, count, coordinator)
        elif number == 0 and not silent:
            _say(f"waiting for {count - 1} more at {coordinator}")
        _connect(coordinator, count, number, lambda: _check(children))
        if number and not silent:
            _say(f"process {number} of {count} computes for process 0 at {coordinator}")
        yield
    except BaseException as error:
        _leave(error, how, children)
        if number and isinstance(error, ProcessError) and error.exit_code == INTERRUPTED:
            _say(str(error))  # an interruption is no error
            sys.exit(INTERRUPTED)
        raise
    _disconnect()
    _end(children)


def _count(processes: int | None, process: int | None, coordinator: str | None) -> int:
    if processes is None:
        if process is not None or coordinator is not None:
            raise SpecError("--process and --coordinator need --processes: how many there are in all")
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
        _move_to(parts[number])  # what is started here stays there
        environment = {**os.environ, "DITHER_PROCESS": str(number)}
        command = [sys.executable, "-m", "dither", *sys.argv[1:]]
        children.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        )
    _move_to(parts[0])


def _move_to(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _check(children: list[subprocess.Popen[bytes]]) -> None:
    for number, child in enumerate(children, 1):
        if child.poll() is not None:
            raise ProcessError(f"process {number} ended with exit code {child.returncode} before it came")


def _disconnect() -> None:
    from dither.simulation import distributed

    distributed.disconnect()


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """The others end by themselves when process 0 does; one that hangs must not outlive it."""
    end = time.monotonic() + _CHILD_SECONDS
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _leave(error: BaseException, how: Callable[[], str], children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Disconnect after an error. Where the others are lost, an ordinary exit would wait for them: exit at once,
    with the message of `cli.main`."""
    from dither.simulation import distributed

    if not distributed.lost():
        _disconnect()
        _end(children)
        return
    code = 1
    if isinstance(error, DitherError):
        print_error(error)
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    if how():
        _say(how())
    sys.stdout.flush()
    sys.stderr.flush()
    for child in children:
        child.kill()
    os._exit(code)


def _say(text: str) -> None:
    error_terminal().print(escape(text), soft_wrap=True, highlight=False)
