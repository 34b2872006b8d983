"""Real processes for tests: `dither serve` and `dither join` on loopback, ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dither.experiment.folder import RunFolder, write_text
from dither.federation.local import free_port
from tests.federation.parties import NAMES, Parties, simulated

FLOWER = pytest.mark.skipif(find_spec("flwr") is None, reason="needs dither[deploy]")
FLARE = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs dither[nvflare]")
TRANSPORTS = [pytest.param("flower", marks=FLOWER), pytest.param("nvflare", marks=FLARE)]


@dataclass
class Processes:
    """A federation in a folder, as processes."""

    parties: Parties
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    through: dict[str, int] = field(default_factory=dict)  # party -> port by which it reaches the server
    more: tuple[str, ...] = ()  # options of every `dither join`
    taps: Path | None = None  # where processes write down what they are given (tests/e2e/faults)
    transport: str = "flower"
    own_kits: bool = False  # NVIDIA FLARE: each party makes its own private key

    def __post_init__(self) -> None:
        self.folder = self.parties.folder
        if self.transport == "nvflare":
            from dither.federation.nvflare import kits

            if self.own_kits:
                own_kits(self.folder / "keys", self.parties.names, self.port)
            else:
                kits.provision(self.folder / "keys", self.parties.names, host="localhost", port=self.port)
        write_text(self.folder / "spec.toml", self.parties.spec.to_toml())

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)
        if self.transport == "nvflare":
            from dither.federation.nvflare import system

            for name in self.parties.names:
                system.end_relay(self.folder / "keys" / "parties" / name)

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
                *(("--label", self.parties.label) if self.parties.label else ()),
                "--server",
                f"127.0.0.1:{self.through.get(name, self.port)}",
            ),
            *("--federation", str(own), "--ledger", str(self.folder / f"{name}.sqlite"), "--yes", "--test"),
            *(*self.more, *more),
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

    def faults(self, name: str, phases: list[tuple[str, int | None]]) -> None:
        """Let a process kill itself in each of these phases, once each (tests/e2e/faults)."""
        folder = self._faults(name)
        folder.mkdir()
        (folder / "faults.json").write_text(json.dumps(phases), encoding="utf-8")

    def died(self, name: str) -> int:
        """How often it has killed itself."""
        return len(list(self._faults(name).glob("done-*")))

    def _faults(self, name: str) -> Path:
        return self.folder / f"faults-{name}"

    def revive(self, seconds: float) -> None:
        """Start whoever was killed again, until the server is done."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, process in list(self.running.items()):
                code = process.poll()
                if name == "server" and code is not None and code != -signal.SIGKILL:
                    return
                if code == -signal.SIGKILL:
                    if name == "server":
                        self.serve()
                    else:
                        self.join(name)
            time.sleep(0.1)
        raise AssertionError(f"not done after {seconds:.0f} s: {self.output('server')}")

    def wait(self, name: str, seconds: float) -> int:
        code = self.running[name].wait(seconds)
        del self.running[name]
        return code

    def start_until_round(self, number: int, seconds: float) -> None:
        """Start the server and all parties, and wait until so many rounds are complete."""
        self.serve()
        self.join_all()
        self.until_round(number, seconds)

    def until_round(self, number: int, seconds: float) -> None:
        """Wait until so many rounds are complete."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(rounds(self)) >= number:
                return
            server = self.running.get("server")
            assert server is None or server.poll() is None, self.output("server")
            time.sleep(0.2)
        raise AssertionError(f"round {number} was not reached: {self.output('server')}")

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _start(self, name: str, *arguments: str) -> None:
        environment = {**os.environ}
        if self.taps is not None:
            environment["DITHER_TEST_TAPS"] = str(self.taps)
        if self._faults(name).is_dir():
            environment["DITHER_TEST_FAULTS"] = str(self._faults(name))
        if {"DITHER_TEST_TAPS", "DITHER_TEST_FAULTS"} & set(environment):
            path = [str(Path(__file__).parent / "faults"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(each for each in path if each)
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "dither", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )


def rounds(run: Processes) -> list[dict[str, Any]]:
    return run.parties.coordinator().journal.rounds()


def summary(run: Processes) -> dict[str, Any]:
    return json.loads((run.folder / "run" / "summary.json").read_text())


def ledgers(run: Processes, kills: Mapping[str, int] | None = None) -> dict[str, list[int]]:
    """The rounds in each ledger, each once: those whose update a party computed. Where the others go on without a
    party that was killed, also at most one round a kill, which it had paid for and was not asked for again: a
    ledger may count too much, never too little."""
    run.parties.nodes = {name: run.parties.node(name) for name in NAMES}
    charged = {name: run.parties.charged(name) for name in NAMES}
    for name in NAMES:
        (log,) = (run.folder / "keys" / "parties" / name / "runs").glob("*/log.jsonl")
        computed = {json.loads(line)["round"] for line in log.read_text().splitlines()}
        counted = {line["round"] for line in rounds(run) if name in line["counted"]}
        paid_alone = set(charged[name]) - computed
        assert charged[name] == sorted(computed | paid_alone), name
        assert counted <= computed, name
        assert len(paid_alone) <= (kills or {}).get(name, 0), name
    return charged


def same_bits(parties: Parties) -> None:
    """The server has, bit for bit, what the simulator computes."""
    checkpoint = RunFolder(parties.folder / "run").load_checkpoint()
    for ours, theirs in zip(checkpoint.leaves, simulated(parties.experiment, "loop"), strict=False):
        np.testing.assert_array_equal(ours, theirs)


def own_kits(folder: Path, names: tuple[str, ...], port: int) -> None:
    """FLARE's kits from the parties' own requests."""
    from dither.federation import keys
    from dither.federation.nvflare import kits

    kits.establish(folder, host="localhost", port=port)
    for name in names:
        home, signed = folder / "parties" / name, folder / f"{name}.signed.zip"
        kits.approve(folder, name, kits.request(home, name), signed)
        kits.package(home, signed, keys.transport_ca(folder))
