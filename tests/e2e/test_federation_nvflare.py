"""What only NVIDIA FLARE could let anybody do: its server and sites as processes, mutual TLS, loopback.

What holds over both transports is in test_federation.py and test_federation_faults.py."""

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from dither.federation import keys
from dither.federation.local import answer_at, free_port
from dither.federation.nvflare import KIT, kits, system
from dither.federation.nvflare.system import FlareServer

pytestmark = pytest.mark.slow


def test_a_revoked_party_does_not_connect(tmp_path):
    """Although its certificate is good for NVIDIA FLARE: else it could send messages to the other sites."""
    names, port = ["ann", "bob", "cat"], free_port()
    keys.create(tmp_path / "keys", names, hosts=["localhost"])
    kits.provision(tmp_path / "keys", names, host="localhost", port=port)
    keys.revoke(tmp_path / "keys", "cat")
    homes = [tmp_path / "keys" / "parties" / name for name in ("bob", "cat")]
    (tmp_path / "run").mkdir()
    server = FlareServer(tmp_path / "run", tmp_path / "keys" / "server", ("127.0.0.1", port), {})
    try:
        with server:
            for home in homes:
                system.start_relay(home, f"127.0.0.1:{port}")
            until, log = time.monotonic() + 200, tmp_path / "run" / "nvflare.log"
            while "bob" not in server.connected() or "Reject disabled client" not in log.read_text():
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.5)
            assert server.connected() == {"bob"}
    finally:
        for home in homes:
            system.end_relay(home)


class HostileServer(FlareServer):
    """Submits a job whose client side is a program of its choice."""

    program: Path

    def _submit(self, config, sites):
        job = self.folder / KIT / "job"
        kits.write(job / "meta.json", {"name": "x", "min_clients": 1, "deploy_map": {"app": ["server", *sites]}})
        workflow = {"id": "x", "path": kits.CONTROLLER, "args": {"config": dict(config)}}
        executor = {"path": "subprocess.Popen", "args": {"args": ["touch", str(self.program)]}}
        files = {
            "config_fed_server.json": {"workflows": [workflow], "components": []},
            "config_fed_client.json": {
                "executors": [{"tasks": ["take_part"], "executor": executor}],
                "components": [],
            },
        }
        for name, content in files.items():
            kits.write(job / "app" / "config" / name, {"format_version": 2, **content})
        self._session.submit_job(str(job))


def test_a_server_runs_nothing_at_a_site_and_reads_nothing_there(tmp_path):
    """With the coordinator's certificate, whatever the server itself allows: another class in a job, and the shell
    commands of an administrator."""
    names, port = ["ann", "bob"], free_port()
    keys.create(tmp_path / "keys", names, hosts=["localhost"])
    kits.provision(tmp_path / "keys", names, host="localhost", port=port)
    rights = tmp_path / "keys" / "server" / KIT / "local" / "authorization.json"
    kits.write(rights, {"format_version": "1.0", "permissions": {"project_admin": "any"}})
    homes, over = [tmp_path / "keys" / "parties" / name for name in names], threading.Event()
    server = HostileServer(tmp_path, tmp_path / "keys" / "server", ("127.0.0.1", port), {})
    server.program = tmp_path / "it-ran"
    try:
        with server:
            for home in homes:
                answer = {"target": answer_at, "args": (system.socket_of(home), lambda body: body)}
                threading.Thread(**answer, kwargs={"until": over.is_set}, daemon=True).start()
                system.start_relay(home, f"127.0.0.1:{port}")
            server.submit({"run": str(tmp_path), "without": "", "wait": "200"}, lambda event, facts: None)
            logs, until = [home / "nvflare.log" for home in homes], time.monotonic() + 120
            while not all("ComponentNotAuthorized" in log.read_text() for log in logs):
                assert time.monotonic() < until, logs[0].read_text()[-3000:]
                time.sleep(0.5)
            for name in names:
                with pytest.raises(Exception, match=r"(?i)not authorized|authorization"):
                    server._session.cat_target(name, file="log.txt")
    finally:
        over.set()
        for home in homes:
            system.end_relay(home)
    assert not server.program.exists()
