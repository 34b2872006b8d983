"""FLARE's side of `dither serve`: the server's process, and the job that is submitted to it."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from dither.errors import FederationError
from dither.federation import keys
from dither.federation.local import separate_process, stop
from dither.federation.nvflare import ADMIN_KIT, CONNECTED, KIT, kits

_START_SECONDS = 90.0
_LOOK_SECONDS = 5.0  # between two looks at who is connected
_SETTLE_SECONDS = 12.0  # for sites to connect again before a job begins without them

# The server


class FlareServer:
    """`with FlareServer(...)`: FLARE's server on an address. Its jobs are in the run folder, which may be passed
    on. Its kits hold private keys: they are copied within the server's own folder, and gone when it ends."""

    controller = kits.CONTROLLER

    def __init__(
        self, run_folder: Path, keys_folder: Path, address: tuple[str, int], env: Mapping[str, str]
    ) -> None:
        self.folder, self._env = run_folder, {**os.environ, **env}
        self._keys, (self._host, self._port) = keys_folder, address
        own = hashlib.sha256(str(run_folder).encode()).hexdigest()[:16]
        self._kits = keys_folder / "nvflare-runs" / own
        self._kit, self._admin_kit = self._kits / "server", self._kits / "admin"
        self.address = f"{self._host}:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Any = None
        self._next_look = 0.0

    def __enter__(self) -> FlareServer:
        for left in (self.folder / KIT, self._kits):  # by a killed server: its jobs are over
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(self._keys / KIT, self._kit)
        shutil.copytree(self._keys / ADMIN_KIT, self._admin_kit)
        self._place()
        command = [sys.executable, "-m", "nvflare.private.fed.app.server.server_train"]
        command += ["-m", str(self._kit), "-s", "fed_server.json", "--set", "secure_train=true"]
        command += ["config_folder=config", f"org={kits.ORGANISATION}"]
        with open(self.folder / "nvflare.log", "ab") as log:
            streams: dict[str, Any] = {
                "stdout": log,
                "stderr": subprocess.STDOUT,
                "stdin": subprocess.DEVNULL,
            }
            self._process = subprocess.Popen(command, env=self._env, **streams, **separate_process())
        try:
            self._connect()
            for name in keys.revoked(self._keys):  # its certificate is still good for FLARE
                self._session.disable_client(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _place(self) -> None:
        """Where it listens, and where its own files go."""
        startup = self._kit / "startup" / "fed_server.json"
        config = kits.read(startup)
        config["servers"][0]["service"]["target"] = f"{self._host}:{self._port}"
        config["servers"][0] |= {"admin_server": self._host, "admin_port": self._port}
        kits.write(startup, config)
        local = self._kit / "local" / "resources.json"
        resources = kits.read(local)
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(
            self.folder / KIT / "snapshots"
        )
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(self.folder / KIT / "jobs")
        kits.write(local, resources)
        admin = self._admin_kit / "startup" / "fed_admin.json"
        config = kits.read(admin)
        config["admin"] |= {"host": _reachable(self._host), "port": self._port}
        kits.write(admin, config)

    def _connect(self) -> None:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        until = time.monotonic() + _START_SECONDS
        while self.alive() and time.monotonic() < until:
            # It is not up yet, whatever FLARE calls that; and it prints what is not for our standard output.
            with suppress(Exception), redirect_stdout(io.StringIO()):
                self._session = new_secure_session(kits.ADMIN, str(self._admin_kit), timeout=5.0)
                return
            time.sleep(0.2)
        raise FederationError(
            f"NVIDIA FLARE's server did not start; is {self._host}:{self._port} in use? See "
            f"{self.folder / 'nvflare.log'}"
        )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self) -> bool:
        """Whether it is alive; every few seconds the coordinator is told which sites are connected."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            kits.write(self.folder / KIT / CONNECTED, sorted(self.connected()))
        return self.alive()

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            with suppress(Exception):
                self._session.close()
            self._session = None
        if self._process is not None:
            stop(self._process)
            self._process = None
        shutil.rmtree(self._kits, ignore_errors=True)

    def connected(self) -> set[str]:
        """Sites whose FLARE client is connected."""
        if self._session is None:
            return set()
        with suppress(Exception):  # the session may have expired
            return {each.name for each in self._session.get_connected_client_list()}
        with suppress(FederationError):
            self._connect()
        return set()

    def run(
        self,
        config: Mapping[str, str],
        sites: Collection[str],
        *,
        everybody: bool,
        on_wait: Callable[[set[str]], None],
        seconds: float,
    ) -> None:
        """Wait for the sites, all of them or those that come soon, and start the job there."""
        until, settled, before = time.monotonic() + seconds, time.monotonic(), set[str]()
        while True:
            here = self.connected() & set(sites)
            settled = time.monotonic() if here != before else settled
            before = here
            enough = not everybody and len(here) > 1 and time.monotonic() - settled > _SETTLE_SECONDS
            if here == set(sites) or enough:
                break
            if not self.alive() or time.monotonic() > until:
                away = ", ".join(sorted(set(sites) - here))
                raise FederationError(f"{away} did not connect within {seconds:.0f} s; start again later")
            on_wait(set(sites) - here)
            time.sleep(0.5)
        self._submit(config, sorted(here))

    def _submit(self, config: Mapping[str, str], sites: list[str]) -> None:
        job = self.folder / KIT / "job"
        shutil.rmtree(job, ignore_errors=True)
        meta = {"name": "dither", "resource_spec": {}, "min_clients": len(sites)}
        kits.write(job / "meta.json", meta | {"deploy_map": {"app": ["server", *sites]}})
        workflow = {"id": "coordinator", "path": self.controller, "args": {"config": dict(config)}}
        kits.write(
            job / "app" / "config" / "config_fed_server.json",
            {"format_version": 2, "workflows": [workflow], "components": []},
        )
        executor = {"tasks": ["take_part"], "executor": {"path": kits.EXECUTOR, "args": {}}}
        kits.write(
            job / "app" / "config" / "config_fed_client.json",
            {"format_version": 2, "executors": [executor], "components": []},
        )
        try:
            self._session.submit_job(str(job))
        except Exception as error:  # FLARE's API has many kinds
            raise FederationError(f"NVIDIA FLARE does not take the job: {error}") from None


def _reachable(host: str) -> str:
    """How this machine itself reaches a server that listens there."""
    try:
        return "localhost" if ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return host
