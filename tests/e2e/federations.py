"""Real processes for tests: `dither serve` and `dither join` on loopback, ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from dither.engines.flower.superlink import free_port
from dither.runs import write_text
from tests.federation.parties import Parties


@dataclass
class Processes:
    """A federation in a folder, as processes."""

    parties: Parties
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.parties.folder
        write_text(self.folder / "spec.toml", self.parties.spec.to_toml())

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def serve(self, *more: str) -> None:
        self._start(
            "server",
            "serve",
            str(self.folder / "spec.toml"),
            *("--federation", str(self.folder / "keys" / "server"), "--address", f"127.0.0.1:{self.port}"),
            *("--out", str(self.folder / "run"), "--wait", "600", *more),
        )

    def join(self, name: str, *more: str) -> None:
        own = self.folder / "keys" / "parties" / name
        self._start(
            name,
            "join",
            *(
                "--data",
                str(self.parties.file(name)),
                "--label",
                "diagnosis",
                "--server",
                f"127.0.0.1:{self.port}",
            ),
            *("--federation", str(own), "--ledger", str(self.folder / f"{name}.sqlite"), "--yes", "--test", *more),
        )

    def join_all(self) -> None:
        for name in self.parties.names:
            self.join(name)

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and whatever it started in its group."""
        process = self.running.pop(name)
        if process.poll() is None:
            os.kill(process.pid, how)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait(self, name: str, seconds: float) -> int:
        code = self.running[name].wait(seconds)
        del self.running[name]
        return code

    def until_round(self, number: int, seconds: float) -> None:
        """Wait until so many rounds are complete."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(self.parties.coordinator().journal.rounds()) >= number:
                return
            server = self.running.get("server")
            assert server is None or server.poll() is None, self.output("server")
            time.sleep(0.2)
        raise AssertionError(f"round {number} was not reached: {self.output('server')}")

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _start(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "dither.cli", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
