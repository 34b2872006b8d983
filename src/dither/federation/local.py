"""This machine, for any transport: ports and processes, the socket of `dither join`, how long nothing was asked.

A transport with processes of its own at a party (a Flower SuperNode, an NVIDIA FLARE client) hands messages to
`dither join` over a Unix socket in the party's folder, which nobody else may enter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from dither.errors import ConfigError, DitherError, FederationError

Event = Callable[[str, dict[str, Any]], None]  # what happens, and facts about it

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 31
_ANSWER_SECONDS = 3600.0
_IDLE_SECONDS = 60.0  # without a question before that is reported; then twice as long, and so on


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def host_and_port(text: str, option: str, error: type[DitherError] = ConfigError) -> tuple[str, int]:
    """The parts of the address that an option of a command gives."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise error(f"{option} {text!r} is not of the form HOST:PORT")
    return host.strip("[]"), int(port)


def separate_process() -> dict[str, Any]:
    """Arguments of Popen: a group of its own, so that Ctrl-C reaches us alone, and an end when we end (Linux)."""
    return {"start_new_session": True, "preexec_fn": _die_with_parent if sys.platform == "linux" else None}


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(8.0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class TransportServer:
    """The server of a transport, as a process of ours that ends when we end; the coordinator runs inside it."""

    name: str  # in messages
    log: str  # file in the run folder
    address: str  # which parties connect to

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self._env = folder, env
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def revive(self) -> None:
        """Start the process if it is not running."""
        if not self.alive():
            self.end()
            try:
                self.start()
            except BaseException:
                self.end()
                raise

    def start(self) -> None:
        """Start the process, and return when it answers."""
        raise NotImplementedError

    def end(self) -> None:
        if self._process is not None:
            stop(self._process)
            self._process = None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self) -> bool:
        """Whether it runs; called all the time while a coordinator is at work."""
        return self.alive()

    def submit(self, config: Mapping[str, str], on_event: Event) -> None:
        """Start a coordinator in the server, which runs."""
        raise NotImplementedError

    def hear(self, facts: Mapping[str, Any]) -> None:
        """What the coordinator says of itself, as far as it concerns the transport."""

    def _launch(self, command: Sequence[str]) -> None:
        with open(self.folder / self.log, "ab") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, env=self._env, **streams, **separate_process())

    def _died(self, why: str = "") -> FederationError:
        return FederationError(f"{self.name} did not start{why}; see {self.folder / self.log}")


# The socket of `dither join`


def hand_over(path: Path, body: bytes) -> bytes:
    """One message through a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_ANSWER_SECONDS)
        line.connect(str(path))
        line.sendall(_LENGTH.pack(len(body)) + body)
        return _read(line)


def answers_at(path: Path) -> bool:
    """Whether somebody answers at the Unix socket, though it may be busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(1.0)
        try:
            line.connect(str(path))
        except (BlockingIOError, TimeoutError):  # others wait before us
            return True
        except OSError:
            return False
    return True


def answer_at(
    path: Path, answer: Callable[[bytes], bytes], *, until: Callable[[], bool], timer: IdleTimer | None = None
) -> None:
    """Serve `hand_over` at a Unix socket that its owner alone may use, until `until()`."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            said = f"no socket can be made at {str(path)!r} ({error.strerror or error})"
            raise FederationError(
                f"{said}: move the party's folder to a shorter path, which it may write to"
            ) from None
        path.chmod(0o600)
        listener.listen(8)
        listener.settimeout(0.2)
        try:
            while not until():
                if timer is not None:
                    timer.check()
                try:
                    line, _ = listener.accept()
                except TimeoutError:
                    continue
                with line:
                    line.settimeout(60.0)
                    try:
                        body = answer(_read(line))
                        line.sendall(_LENGTH.pack(len(body)) + body)
                        if timer is not None:
                            timer.reset()
                    except (OSError, ValueError):
                        continue  # whoever called has gone, or did not speak our language
        finally:
            path.unlink(missing_ok=True)


def _read(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise OSError("the line was closed")
        parts += part
    return bytes(parts)


class IdleTimer:
    """How long nothing has been asked: reported now and then, and ended with `FederationError` after `seconds`."""

    def __init__(self, where: str, seconds: float, say: Callable[[str], None]) -> None:
        self._where, self._seconds, self._say = where, seconds, say
        self.reset()

    def reset(self) -> None:
        """Something was asked, and answered."""
        self._since, self._next = time.monotonic(), _IDLE_SECONDS

    def check(self) -> None:
        idle = time.monotonic() - self._since
        if idle > self._seconds:
            raise FederationError(
                f"{self._where} has asked nothing for {self._seconds:.0f} s; this party gives up: start it again "
                "when the server's owner says so"
            )
        if idle > self._next:
            end = clock(self._seconds - idle)
            self._say(f"{self._where} has asked nothing since {clock(-idle)}; waiting until {end}")
            self._next *= 2


def clock(seconds: float) -> str:
    """The time of day so many seconds from now."""
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%d %b %H:%M:%S} UTC"
