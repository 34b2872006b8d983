"""The state of a run, from the files of its folder: `dither federation status`, and GET /health of `dither serve`.

It says the same as the server's own output: rounds, names of parties, whom it waits for. It contains no records,
updates or scores.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dither.errors import ConfigError, FederationError
from dither.experiment.folder import is_free
from dither.federation import keys

_SOON_DAYS = 30  # before a certificate expires
_CONNECTIONS = 16  # of the endpoint at once


def of_folder(folder: Path) -> dict[str, Any]:
    """Of a run's folder, or of a folder with keys."""
    if (folder / "federation.json").is_file():
        return _members(folder)
    if (folder / "server" / "federation.json").is_file():
        return _members(folder / "server")
    if (folder / "progress.jsonl").is_file():
        return _run(folder)
    raise ConfigError(f"{str(folder)!r} is neither a federation's run folder nor a folder of its keys")


def _run(folder: Path) -> dict[str, Any]:
    """Of a run folder, where a server that was killed has said nothing of its end."""
    facts = RunStatus(folder).facts()
    at_work = any(path.is_file() and not is_free(path) for path in (folder / "serve.lock", folder / "lock"))
    if at_work or facts["state"] in ("done", "failed"):
        return facts
    why = "no server is running in this folder; the same `dither serve` command continues the run"
    return facts | {"healthy": False, "state": "stopped", "why": why}


def _members(folder: Path) -> dict[str, Any]:
    keyring = keys.Keyring.load(folder)
    certificate = folder / "server.pem" if (folder / "server.pem").is_file() else folder / "ca.pem"
    left = (keys.expiry(certificate) - datetime.now(UTC)).days
    return {
        "healthy": left >= 0,
        "parties": [party.name for party in keyring.parties],
        "fingerprint": keyring.fingerprint,
        "certificate_expires_in_days": left,
        "advice": "issue a new one: dither federation renew" if left < _SOON_DAYS else "",
    }


class RunStatus:
    """How a run stands by its progress.jsonl, of which each call reads what is new."""

    def __init__(self, folder: Path) -> None:
        self._path, self._at = folder / "progress.jsonl", 0
        self._facts: dict[str, Any] = {"state": "starting", "round": 0, "of": None, "joined": [], "missing": []}

    def facts(self) -> dict[str, Any]:
        """State (starting, waiting, running, done, failed), completed rounds, who is waited for, why it failed."""
        if self._path.is_file():
            self._at, events = new_events(self._path, self._at)
            for event in events:
                self._hear(event)
        return {"healthy": self._facts["state"] != "failed", **self._facts}

    def _hear(self, event: dict[str, Any]) -> None:
        facts, kind = self._facts, event.get("event")
        facts["newest"] = event.get("time")
        if kind == "up":
            facts |= {"state": "starting", "why": "", "waiting_for": []}
        elif kind == "joined":
            facts["joined"] = sorted({*facts["joined"], event["party"]})
        elif kind == "waiting":
            facts |= {"state": "waiting", "waiting_for": event["parties"], "to": event["to"]}
        elif kind == "start":
            facts |= {"state": "running", "round": event["done"], "of": event["rounds"]}
        elif kind == "round":
            facts |= {"state": "running", "round": event["round"] + 1, "of": event["of"]}
            facts |= {"missing": event["missing"], "waiting_for": [], "to": ""}
        elif kind == "done":
            facts |= {"state": "done", "waiting_for": [], "to": ""}
        elif kind == "failed":
            facts |= {"state": "failed", "why": event["error"]}


def new_events(path: Path, at: int) -> tuple[int, list[dict[str, Any]]]:
    """What was written to a progress.jsonl after place `at`, and the place after it. A line that a full disk cut
    off is passed over."""
    with open(path, "rb") as file:
        file.seek(at)
        content = file.read()
    end, events = content.rfind(b"\n") + 1, []
    for line in content[:end].splitlines():
        with suppress(ValueError):
            events.append(json.loads(line))
    return at + end, events


class _Server(ThreadingHTTPServer):
    """Takes few connections at once: the oldest makes room for a new one."""

    daemon_threads = True
    request_queue_size = 128  # strangers that connect in a burst do not make others wait for a second attempt

    def __init__(self, *arguments: Any) -> None:
        self._open: deque[Any] = deque()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > _CONNECTIONS:
            with suppress(OSError):
                self._open.popleft().shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)


class Endpoint:
    """`with Endpoint(host, port, run folder)`: answers GET /health, 200 or 503."""

    def __init__(self, host: str, port: int, folder: Path) -> None:
        began, progress, reading = time.monotonic(), RunStatus(folder), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0
            server_version, sys_version = "dither", ""

            def do_GET(self) -> None:
                if self.path != "/health":
                    self.send_error(404)
                    return
                with reading:
                    facts = progress.facts()
                body = json.dumps(facts | {"seconds": round(time.monotonic() - began)}).encode()
                self.send_response(200 if facts["healthy"] else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: requests are not events."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise FederationError(
                f"cannot answer on {host}:{port}: {error.strerror}; give another --health"
            ) from None
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
