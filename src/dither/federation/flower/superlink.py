"""Flower's side of `dither serve`: the SuperLink as a process of ours, behind the gate."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dither.errors import FederationError
from dither.federation.flower import APP, QUIET, SUPERLINK, TlsFiles, fleet
from dither.federation.flower.gate import Gate, Hints
from dither.federation.keys import Keyring, PartyKeys
from dither.federation.local import Event, TransportServer, free_port

_START_SECONDS = 60.0
_NAME = "dither"


class SuperLink(TransportServer):
    """`with SuperLink(...)`: listens on 127.0.0.1 at a free port, with TLS and node authentication."""

    name, log = "Flower's SuperLink", "superlink.log"

    def __init__(self, folder: Path, tls: TlsFiles, env: Mapping[str, str]) -> None:
        super().__init__(folder, environment(folder, **env))
        self._tls, self.port = tls, free_port()
        self.inside = f"127.0.0.1:{self.port}"

    def start(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\naddress = "{self.inside}"\n'
            f'root-certificates = "{self._tls.ca.resolve()}"\n',
            encoding="utf-8",
        )
        certificate, key, ca = map(str, self._tls)
        command = [*_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certfile", ca]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self._launch(command)
        until = time.monotonic() + _START_SECONDS
        while self.alive() and time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.1)
        raise self._died()

    def register(self, parties: Sequence[PartyKeys]) -> None:
        """Let in these parties' nodes."""
        fleet.register(self.inside, self._tls.ca, {party.name: party.node_key for party in parties})

    def run(self, source: Path, config: Mapping[str, str]) -> None:
        """Start the Flower app in that folder."""
        app = self.folder / "flwr" / "app"
        shutil.rmtree(app, ignore_errors=True)
        shutil.copytree(source, app, ignore=shutil.ignore_patterns("__pycache__"))
        settings = " ".join(f'{name}="{value}"' for name, value in config.items())
        command = [*_program("flwr"), "run", str(app), _NAME, "--run-config", settings]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise FederationError(f"`flwr run` failed: {lines[-1] if lines else done.returncode}")


def environment(folder: Path, **env: str) -> dict[str, str]:
    """For a program of Flower that keeps its files in this folder. It calls others by name: those beside this
    Python come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr"), **env, "PATH": path}


def _program(name: str) -> list[str]:
    """A program of Flower, of this very environment."""
    path = Path(sys.executable).parent / name
    if path.is_file():
        return [str(path)]
    elsewhere = shutil.which(name)
    if elsewhere is None:
        raise FederationError(f"{name} is not installed next to {sys.executable}")
    return [elsewhere]


class FlowerServer(SuperLink):
    """A SuperLink that knows the parties before they reach it, behind its gate."""

    def __init__(
        self, run_folder: Path, keys_folder: Path, address: tuple[str, int], env: Mapping[str, str]
    ) -> None:
        tls, self._parties = TlsFiles.of(keys_folder), Keyring.load(keys_folder).parties
        hints = Hints()
        super().__init__(run_folder, tls, {**env, SUPERLINK: hints.address})
        nodes = [party.node_key for party in self._parties]
        self._gate = Gate(*address, inside=self.inside, tls=tls, nodes=nodes, hints=hints)
        self.address = self._gate.address

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._gate.__enter__()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.__exit__()
        super().__exit__()

    def start(self) -> None:
        self._gate.open = False
        super().start()
        self.register(self._parties)
        self._gate.open = True

    def submit(self, config: Mapping[str, str], on_event: Event) -> None:
        self.run(APP, config)

    def hear(self, facts: Mapping[str, Any]) -> None:
        if "upload_bytes" in facts:
            self._gate.most_bytes = int(facts["upload_bytes"])
