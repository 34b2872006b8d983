"""`dither serve`: the transport's server and the coordinator inside it, watched from here. That is Flower's
SuperLink behind a gate, with the coordinator as its ServerApp, or NVIDIA FLARE's server, with the coordinator as a
job.

This process does not start JAX. The coordinator runs in the ServerApp that Flower starts and writes its progress
to progress.jsonl in the run folder, which is read here. A coordinator or a SuperLink that dies is restarted, and
the run continues after the last completed round; so does a server that is restarted with the same run folder.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dither.errors import ConfigError, DitherError, FederationError, RunExists, did_you_mean
from dither.experiment.folder import is_free, lock, write_text
from dither.experiment.report import Report
from dither.federation import keys
from dither.federation.health import new_events
from dither.federation.local import Event, TransportServer
from dither.spec import Spec

_WATCHED = "DITHER_SERVE_PROCESS"  # tells the coordinator whose end is its end
_FOLDER = "DITHER_SERVE_FOLDER"  # and where paths of the spec begin: NVIDIA FLARE works in a folder of its own
_STARTS = 4  # of the coordinator in a row, without a completed round between them
_UNLOCK_SECONDS = 60.0  # for the coordinator before to end
# For a coordinator to say its first word. Flower gives a ServerApp 30 s to start. Where a machine is too busy for
# that, it refuses the token of the one that comes late, and starts another.
_QUIET_SECONDS = 300.0


# reason: one parameter for each option of the command
def serve(
    spec: Spec,
    *,
    keys_folder: Path,
    run_folder: Path,
    host: str,
    port: int,
    without: tuple[str, ...] = (),
    wait_seconds: float = 3600.0,
    data_dir: Path | None = None,
    on_event: Event = lambda event, facts: None,
) -> Report:
    """Run a federation to its end; returns the report. The run folder may hold the beginning of this very run."""
    from dither.federation import flower, nvflare

    keys_folder, run_folder = keys_folder.resolve(), run_folder.resolve()
    keyring = keys.Keyring.load(keys_folder)
    over_flare = nvflare.is_used(keys_folder)
    (nvflare if over_flare else flower).require()
    if not (keys_folder / "server.pem").is_file():
        raise ConfigError(f"{str(keys_folder)!r} is not a server's folder: it has no server.pem")
    names = [party.name for party in keyring.parties]
    for name in without:
        if name not in names:
            raise ConfigError(f"--without {name!r} is not a party of this federation{did_you_mean(name, names)}")
    ends = keys.expiry(keys_folder / "server.pem")
    if ends < datetime.now(UTC):
        raise FederationError(
            f"the server's certificate expired on {ends:%Y-%m-%d}; issue a new one with `dither federation renew`"
        )
    keys.check_server(keys_folder)
    _check_spec(spec, len(names) - len(without), begun=(run_folder / "spec.toml").is_file())
    with alone(run_folder):
        _ask(run_folder, spec)
        (run_folder / "progress.jsonl").touch()
        environment = {_WATCHED: str(os.getpid()), _FOLDER: os.getcwd()}
        if data_dir is not None:
            environment["DITHER_DATA"] = str(data_dir)
        config = {
            "keys": str(keys_folder),
            "run": str(run_folder),
            "without": ",".join(without),
            "wait": f"{wait_seconds:g}",
        }
        system: TransportServer
        if over_flare:
            from dither.federation.nvflare.system import FlareServer

            system = FlareServer(run_folder, keys_folder, (host, port), environment)
        else:
            from dither.federation.flower.superlink import FlowerServer

            system = FlowerServer(run_folder, keys_folder, (host, port), environment)
        with system:
            on_event("listening", {"address": system.address, "parties": names})
            _watch(system, config, on_event)
        report = Report.read(run_folder)
        if report is None:
            raise FederationError(f"{str(run_folder)!r} is done and has no summary: start the server again")
        return report


@contextmanager
def alone(run_folder: Path) -> Iterator[None]:
    """Keep a second server out of a run folder; one that was killed lets go by itself."""
    path = run_folder / "serve.lock"
    handle = lock(path)
    if handle is None:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise RunExists(f"a `dither serve` is already running in {str(run_folder)!r}: {holder}")
    with handle:
        handle.truncate(0)
        since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        handle.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        handle.flush()
        yield


def _check_spec(spec: Spec, parties: int, *, begun: bool) -> None:
    """What would otherwise be noticed when all parties have come."""
    for key in ("schema", "test_path"):
        path = getattr(spec.data, key)
        if path and not Path(path).is_file():
            raise ConfigError(f"data.{key}={path!r}: there is no such file")
    chosen = begun or spec.privacy.project_epsilon  # by the agreement, or later by Dither
    if not chosen and spec.num_clients not in (0, parties):
        raise ConfigError(f"num_clients={spec.num_clients}, but {parties} parties take part: set it to {parties}")


def _ask(run_folder: Path, spec: Spec) -> None:
    """Leave the spec for the coordinator, or check that it is the spec of the run to continue."""
    asked = run_folder / "asked.toml"
    if (run_folder / "signature.json").is_file() and (run_folder / "releases.json").is_file():  # and parties know
        raise RunExists(f"the run in {str(run_folder)!r} is complete; give another --out")
    if asked.is_file():
        if Spec.from_any(asked).digest() != spec.digest():
            raise RunExists(f"{str(run_folder)!r} holds a run of another spec; give another --out")
        return
    if any(path.name != "serve.lock" for path in run_folder.iterdir()):
        raise RunExists(f"{str(run_folder)!r} already exists and is not a run of a federation; give another --out")
    write_text(asked, spec.to_toml())


def _watch(system: TransportServer, config: Mapping[str, str], on_event: Event) -> None:
    """Start the coordinator, pass on its events, and restart it if it dies, until it is done."""
    coordinators: list[int] = []  # processes, which the transport starts out of our reach
    try:
        _keep_running(system, config, on_event, coordinators)
    finally:
        for process in coordinators:
            _end(process, system.folder / "lock")


def _keep_running(
    system: TransportServer, config: Mapping[str, str], on_event: Event, coordinators: list[int]
) -> None:
    progress, journal_lock = system.folder / "progress.jsonl", system.folder / "lock"
    at = progress.stat().st_size
    starts, why = 0, ""
    while starts < _STARTS:
        starts += 1
        try:
            system.revive()
            system.submit(config, on_event)
        except FederationError as error:
            if system.alive():
                raise
            why = str(error)
            continue
        heard, up = time.monotonic(), False
        while True:
            at, lines = new_events(progress, at)
            for facts in lines:
                heard = time.monotonic()
                event = facts.pop("event")
                if event == "up":
                    up = True
                    coordinators.append(int(facts["process"]))
                elif event == "failed" and facts.get("final", True):
                    raise _error(facts)
                elif event == "failed":
                    why = facts["error"]
                else:
                    starts = 0 if event == "round" else starts
                    system.hear(facts)
                    on_event(event, facts)
                    if event == "done":
                        return
            if not system.watch():
                on_event("restart", {"what": system.name})
                for process in coordinators:
                    _end(process, journal_lock)
                break
            if not up and time.monotonic() - heard > _QUIET_SECONDS:
                raise FederationError(f"the coordinator did not start; see {system.folder / system.log}")
            if up and not lines and is_free(journal_lock) and not new_events(progress, at)[1]:
                on_event("restart", {"what": "the coordinator"})
                break
            time.sleep(0.1)
    said = f" ({why})" if why else ""
    raise FederationError(
        f"the coordinator died {_STARTS} times and completed no round{said}; see {system.folder / system.log}"
    )


def _end(process: int, lock: Path) -> None:
    """End a coordinator that still holds its journal."""
    if not is_free(lock):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)  # every file of its is whole at any moment


def _error(facts: Mapping[str, Any]) -> DitherError:
    error = FederationError(str(facts["error"]))
    error.exit_code = int(facts.get("exit_code", 1))
    return error


# Inside the ServerApp


def _end_with(process: str) -> None:
    """Leave when `dither serve` is gone: Flower would let this process wait for its SuperLink for ever, and the
    next server needs the journal it holds."""
    if not process:
        return

    def watch() -> None:
        while _exists(int(process)):
            time.sleep(0.5)
        os._exit(1)  # every file of ours is whole at any moment

    threading.Thread(target=watch, daemon=True).start()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def coordinate(transport: Any, config: Mapping[str, Any], after_round: Callable[[], None] = lambda: None) -> None:
    """The coordinator, inside the transport. `after_round` may raise `TransportRestart`."""
    from dither.federation import messages, server
    from dither.federation.state import Journal

    if not config.get("keys") or not config.get("run"):
        raise ConfigError('the run configuration needs keys="FOLDER" and run="FOLDER" (see docs/deployment.md)')
    run = Path(str(config["run"]))
    journal = Journal(run)
    _end_with(os.environ.get(_WATCHED, ""))
    os.chdir(os.environ.get(_FOLDER, "."))

    def tell(event: str, facts: dict[str, Any]) -> None:
        journal.progress(event, **facts)
        if event == "round":
            after_round()

    try:
        journal.lock(_UNLOCK_SECONDS)
        journal.progress("up", process=os.getpid())
        spec = Spec.from_any(run / "asked.toml")
        coordinator = server.Coordinator(
            transport,
            Path(str(config["keys"])),
            spec,
            journal,
            server.load_evaluation_data(spec),
            without=tuple(name for name in str(config.get("without", "")).split(",") if name),
            wait_seconds=float(str(config.get("wait") or 3600)),
            on_event=tell,
        )
        try:
            coordinator.run()
        except DitherError as error:
            coordinator.tell_failure(str(error))
            raise
    except messages.TransportRestart as error:
        journal.progress("failed", error=str(error), exit_code=1, final=False)
    except DitherError as error:
        journal.progress("failed", error=str(error), exit_code=error.exit_code)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        journal.progress("failed", error=said, exit_code=1, final=False)  # `dither serve` tries again
        raise
