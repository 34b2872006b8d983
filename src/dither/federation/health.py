"""How a run stands, from the files of its folder: `dither federation status`, and GET /health of `dither serve`.

What is told is what the server's own output says: rounds, names of parties, whom it waits for. No record, no
update and no score is in it.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dither.errors import ConfigError, FederationError
from dither.federation import keys

_SOON_DAYS = 30  # before a certificate expires


def of_folder(folder: Path) -> dict[str, Any]:
    """Of a run's folder, or of a folder with keys."""
    if (folder / "federation.json").is_file():
        return _members(folder)
    if (folder / "server" / "federation.json").is_file():
        return _members(folder / "server")
    if (folder / "progress.jsonl").is_file():
        return of_run(folder)
    raise ConfigError(f"{str(folder)!r} is neither a federation's run folder nor a folder of its keys")


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


def of_run(folder: Path) -> dict[str, Any]:
    """State (waiting, running, done, failed), completed rounds, who is waited for, and why it failed."""
    facts: dict[str, Any] = {
        "healthy": True,
        "state": "starting",
        "round": 0,
        "of": None,
        "joined": [],
        "missing": [],
    }
    for line in (folder / "progress.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break  # cut off by a kill
        kind = event.get("event")
        facts["newest"] = event.get("time")
        if kind == "up":
            facts |= {"state": "starting", "why": "", "healthy": True, "waiting_for": []}
        elif kind == "joined":
            facts["joined"] = sorted({*facts["joined"], event["party"]})
        elif kind == "waiting":
            facts |= {"state": "waiting", "waiting_for": event["parties"], "to": event["to"]}
        elif kind == "start":
            facts |= {"state": "running", "round": event["done"], "of": event["rounds"]}
        elif kind == "round":
            facts |= {
                "state": "running",
                "round": event["round"] + 1,
                "of": event["of"],
                "missing": event["missing"],
            }
            facts |= {"waiting_for": [], "to": ""}
        elif kind == "done":
            facts |= {"state": "done", "waiting_for": [], "to": ""}
        elif kind == "failed":
            facts |= {"state": "failed", "healthy": False, "why": event["error"]}
    return facts


class Endpoint:
    """`with Endpoint(host, port, run folder)`: answers GET /health, 200 or 503."""

    def __init__(self, host: str, port: int, folder: Path) -> None:
        began = time.monotonic()

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                if self.path != "/health":
                    self.send_error(404)
                    return
                begun = (folder / "progress.jsonl").is_file()
                facts = of_run(folder) if begun else {"healthy": True, "state": "starting"}
                body = json.dumps(facts | {"seconds": round(time.monotonic() - began)}).encode()
                self.send_response(200 if facts["healthy"] else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: who asks is no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise FederationError(
                f"cannot answer on {host}:{port}: {error.strerror}; give another --health"
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
