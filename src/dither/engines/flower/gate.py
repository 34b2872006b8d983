"""What the outside reaches of a SuperLink: TLS, and the calls of nodes alone.

A SuperLink offers everything on one port: to nodes the Fleet API, but also the Control API, by which anyone may
start a run (and thus a program on the server) or register nodes, and the Runtime API of running apps. So the
SuperLink listens on 127.0.0.1, and this gate listens on the address given and passes on nothing but the Fleet
calls below.
"""

from __future__ import annotations

import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dither.errors import FederationError

_CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "pull-object",
    "push-object",
    "confirm-message-received",
    "get-run",
    "get-fab",
)
_OPEN = frozenset(f"/v1/fleet/{call}" for call in _CALLS)
_MOST_BYTES = 1 << 28
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host", b"content-length", b"upgrade"})


class Gate:
    """A server in a thread of this process. `with Gate(...)` until it is to stop."""

    def __init__(self, host: str, port: int, *, inside: str, certificate: Path, key: Path, ca: Path) -> None:
        import httpx
        import uvicorn

        trust = ssl.create_default_context(cafile=str(ca))
        self._client = httpx.AsyncClient(
            base_url=f"https://{inside}",
            verify=trust,
            timeout=60.0,
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                host=host,
                port=port,
                ssl_certfile=str(certificate),
                ssl_keyfile=str(key),
                log_level="critical",
                access_log=False,
                interface="asgi3",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._address = f"{host}:{port}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Gate:
        self._thread.start()
        until = time.monotonic() + 10
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise FederationError(
                    f"cannot listen on {self._address}: it is in use, or not an address of this host"
                )
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5.0)

    def _run(self) -> None:
        with suppress(SystemExit):  # uvicorn's way of saying that the address is taken; `__enter__` reports it
            self._server.run()

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI: one request in, one out."""
        if scope["type"] != "http":
            return
        if scope["method"] != "POST" or scope["path"] not in _OPEN:
            await _answer(send, 404, [])
            return
        body = bytearray()
        while True:
            part = await receive()
            if part["type"] != "http.request":
                return
            body += part.get("body", b"")
            if len(body) > _MOST_BYTES:
                await _answer(send, 413, [])
                return
            if not part.get("more_body"):
                break
        import httpx

        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        try:
            found = await self._client.post(scope["path"], content=bytes(body), headers=headers)
        except httpx.HTTPError:
            await _answer(send, 502, [])
            return
        kept = [
            (name, value)
            for name, value in found.headers.raw
            if name.lower() not in _HOP and name.lower() != b"content-encoding"
        ]
        await _answer(send, found.status_code, kept, found.content)


async def _answer(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
