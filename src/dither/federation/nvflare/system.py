"""FLARE's own processes: its server, with the job that is submitted to it, and at each party its client.

FLARE removes a client that dies from the running job. The client is therefore not a child of `dither join`,
which may be killed and restarted at any time, but of a small process, the relay. The relay restarts the client
if it dies, and ends when no `dither join` has used the party's folder for a while.

    python -m dither.federation.nvflare.system FOLDER
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from dither.errors import FederationError
from dither.experiment.folder import lock
from dither.federation import keys
from dither.federation.local import Event, TransportServer, answers_at, separate_process, stop
from dither.federation.nvflare import ADMIN_KIT, CONNECTED, KIT, SOCKET, kits

_START_SECONDS = 90.0
_LOOK_SECONDS = 5.0  # between two looks at who is connected
_ALONE_SECONDS = 60.0  # for a relay without a `dither join`
_END_SECONDS = 30.0  # for a relay to end
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # before a client is started again
_SETTLE_SECONDS = 12.0  # for sites to connect again before a job begins without them

# The server


class FlareServer(TransportServer):
    """`with FlareServer(...)`: FLARE's server on an address. Its jobs are in the run folder, which may be passed
    on. Its kits hold private keys: they are copied within the server's own folder, and gone when it ends."""

    name, log = "NVIDIA FLARE's server", "nvflare.log"
    controller = kits.CONTROLLER

    def __init__(
        self, run_folder: Path, keys_folder: Path, address: tuple[str, int], env: Mapping[str, str]
    ) -> None:
        super().__init__(run_folder, {**os.environ, **env})
        self._keys, (self._host, self._port) = keys_folder, address
        own = hashlib.sha256(str(run_folder).encode()).hexdigest()[:16]
        self._kits = keys_folder / "nvflare-runs" / own
        self._kit, self._admin_kit = self._kits / "server", self._kits / "admin"
        self.address = f"{self._host}:{self._port}"
        self._session: Any = None
        self._next_look = 0.0

    def start(self) -> None:
        for left in (self.folder / KIT, self._kits):  # by a killed server: its jobs are over
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(self._keys / KIT, self._kit)
        shutil.copytree(self._keys / ADMIN_KIT, self._admin_kit)
        self._place()
        command = [sys.executable, "-m", "nvflare.private.fed.app.server.server_train"]
        command += ["-m", str(self._kit), "-s", "fed_server.json", "--set", "secure_train=true"]
        self._launch([*command, "config_folder=config", f"org={kits.ORGANISATION}"])
        self._connect()
        for name in keys.revoked(self._keys):  # its certificate is still good for FLARE
            self._session.disable_client(name)

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
        raise self._died(f": is {self.address} in use?")

    def watch(self) -> bool:
        """Every few seconds the coordinator is told which sites are connected."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            kits.write(self.folder / KIT / CONNECTED, sorted(self.connected()))
        return self.alive()

    def end(self) -> None:
        if self._session is not None:
            with suppress(Exception):
                self._session.close()
            self._session = None
        super().end()
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

    def submit(self, config: Mapping[str, str], on_event: Event) -> None:
        """Wait for the sites and start the job there: at all of them or, once the run has begun, at those that
        come soon."""
        without, seconds = config["without"].split(","), float(config["wait"])
        sites = {party.name for party in keys.Keyring.load(self._keys).parties if party.name not in without}
        begun = (self.folder / "spec.toml").is_file()
        until, settled = time.monotonic() + seconds, time.monotonic()
        before: set[str] | None = None
        while (here := self.connected() & sites) != sites:
            if here != before:
                settled, before = time.monotonic(), here
                on_event("waiting", {"to": "connect", "parties": sorted(sites - here)})
            if begun and len(here) > 1 and time.monotonic() - settled > _SETTLE_SECONDS:
                break
            if not self.alive() or time.monotonic() > until:
                away = ", ".join(sorted(sites - here))
                raise FederationError(f"{away} did not connect within {seconds:.0f} s; start again later")
            time.sleep(0.5)
        self._submit(config, sorted(here))

    def _submit(self, config: Mapping[str, str], sites: list[str]) -> None:
        job = self.folder / KIT / "job"
        shutil.rmtree(job, ignore_errors=True)
        meta = {"name": "dither", "resource_spec": {}, "min_clients": len(sites)}
        kits.write(job / "meta.json", meta | {"deploy_map": {"app": ["server", *sites]}})
        workflow = {"id": "coordinator", "path": self.controller, "args": {"config": dict(config)}}
        executor = {"tasks": ["take_part"], "executor": {"path": kits.EXECUTOR, "args": {}}}
        for side, content in (("server", {"workflows": [workflow]}), ("client", {"executors": [executor]})):
            config_file = job / "app" / "config" / f"config_fed_{side}.json"
            kits.write(config_file, {"format_version": 2, "components": [], **content})
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


# The client at a party, and its relay


def start_relay(folder: Path, server: str) -> None:
    """Start the relay of this party to the server at HOST:PORT, unless it runs. One to another server is ended."""
    folder = folder.resolve()
    handle = lock(folder / "relay.lock")
    if handle is None:
        if kits.server_of(folder / KIT) == server:
            return
        end_relay(folder)
        handle = lock(folder / "relay.lock", _END_SECONDS)
    if handle is None:
        raise FederationError(f"NVIDIA FLARE's client of {str(folder)!r} does not end: see nvflare.log there")
    handle.close()
    kits.point_site(folder / KIT, server)
    with open(folder / "nvflare.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def end_relay(folder: Path) -> None:
    """End the relay: this party's run is over."""
    handle = lock(folder / "relay.lock")
    if handle is not None:  # it has ended
        handle.close()
        return
    with suppress(ValueError, ProcessLookupError):
        os.kill(int((folder / "relay.lock").read_text(encoding="ascii")), signal.SIGTERM)


def socket_of(folder: Path) -> Path:
    """Where `dither join` answers."""
    return folder.resolve() / "node.sock"


def _client(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nvflare.private.fed.app.client.client_train", "-m", str(folder / KIT)]
    command += ["-s", "fed_client.json", "--set", "secure_train=true", f"uid={keys.party_name(folder)}"]
    command += ["config_folder=config", f"org={kits.ORGANISATION}"]
    environment = {**os.environ, SOCKET: str(socket_of(folder))}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **separate_process())


def relay(folder: Path) -> None:
    """Run until nobody needs it."""
    own = lock(folder / "relay.lock")
    if own is None:
        return
    own.truncate(0)
    own.write(str(os.getpid()))
    own.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    client, pause, used = _client(folder), _FIRST_PAUSE, time.monotonic()
    try:
        while time.monotonic() - used < _ALONE_SECONDS:
            time.sleep(0.5)
            if client.poll() is not None:
                time.sleep(pause)
                client, pause = _client(folder), min(2 * pause, _LONGEST_PAUSE)
            if answers_at(socket_of(folder)):
                used = time.monotonic()
    finally:
        stop(client)


if __name__ == "__main__":
    relay(Path(sys.argv[1]).resolve())
