"""A SuperLink as a process of ours: started, told which nodes to let in, given the app to run; gone when we are
gone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dither.errors import FederationError
from dither.federation.flower import QUIET, TlsFiles, fleet
from dither.federation.local import free_port, separate_process, stop

_START_SECONDS = 60.0
_NAME = "dither"


class SuperLink:
    """`with SuperLink(...)`: listens on 127.0.0.1 at a free port, with TLS and node authentication."""

    def __init__(self, folder: Path, tls: TlsFiles, env: Mapping[str, str]) -> None:
        self.folder, self._tls = folder, tls
        self.port = free_port()
        self.inside = f"127.0.0.1:{self.port}"
        self._env = environment(folder, **env)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SuperLink:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\naddress = "{self.inside}"\n'
            f'root-certificates = "{self._tls.ca.resolve()}"\n',
            encoding="utf-8",
        )
        command = [
            *_program("flower-superlink"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-certfile", str(self._tls.certificate), "--ssl-keyfile", str(self._tls.key)),
            *("--ssl-ca-certfile", str(self._tls.ca)),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ]
        log = open(self.folder / "superlink.log", "ab")  # the child writes it
        self._process = subprocess.Popen(
            command,
            env=self._env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            **separate_process(),
        )
        log.close()
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if not self.alive():
                break
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.1)
        raise FederationError(f"Flower's SuperLink did not start; see {self.folder / 'superlink.log'}")

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            stop(self._process)
            self._process = None

    def register(self, public_key: str, name: str) -> None:
        """Let in the node with this key (OpenSSH)."""
        fleet.register(self.inside, self._tls.ca, public_key, name)

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
