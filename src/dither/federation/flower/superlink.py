"""Flower's side of `dither serve`: the SuperLink as a process of ours, and the gate before it.

A SuperLink offers everything on one port: to nodes the Fleet API, but also the Control API, by which anyone may
start a run (and thus a program on the server) or register nodes, and the Runtime API of running apps. So the
SuperLink listens on 127.0.0.1. The gate listens on the address given and passes on nothing but the Fleet calls
below.

A node signs the time in the headers of every call. The gate checks that before it looks at a body: of a stranger
it reads headers of some kilobytes, from a few connections at once, for a few seconds. Bodies of nodes are handed
on as they come, at most `most_bytes` long, so the gate's memory does not grow with them.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn

from dither.errors import FederationError
from dither.federation.flower import APP, QUIET, SUPERLINK, TlsFiles, fleet
from dither.federation.keys import Keyring
from dither.federation.local import Event, TransportServer, free_port

_START_SECONDS = 60.0
_NAME = "dither"
_CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
)
_OPEN = frozenset(f"/v1/fleet/{call}" for call in _CALLS)
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host", b"upgrade"})
_STRANGERS = 64  # connections at once on which no node has shown itself yet
_STRANGER_SECONDS = 10.0  # for each of them to do so
_HEADER_BYTES = 1 << 14
_CONNECTIONS = 8  # of one node at once
_POOLS = 16  # of connections inward: with each call httpx looks at all connections of a pool
_NODE_SECONDS = 90.0  # for a node's next call, and for a call's answer
_SLOWEST = 1 << 16  # bytes a second, in either direction
_SMALL = 1 << 20  # the longest body of a call that carries no upload


# The SuperLink


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


# The gate


class _Peer:
    """A connection: whose it is, and until when it may stay as it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.node = connection, b""
        self.until = time.monotonic() + _STRANGER_SECONDS

    def cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # the server's loop sees its end, and closes it


class _Listener(socket.socket):
    """A listening socket that remembers whom it let in."""

    peers: dict[tuple[str, int], _Peer]
    accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.accepted += 1
        for at, peer in list(self.peers.items()):
            if peer.connection.fileno() < 0:  # closed
                del self.peers[at]
        strangers = [at for at, peer in self.peers.items() if not peer.node]
        if len(strangers) >= _STRANGERS:  # the longest silent one of the host that has most of them makes room
            ((busiest, _),) = Counter(host for host, _ in strangers).most_common(1)
            self.peers.pop(next(at for at in strangers if at[0] == busiest)).cut()
        self.peers[address[:2]] = _Peer(connection)
        return connection, address


class Gate:
    """A server in a thread of this process. `with Gate(...)` until it is to stop. `nodes` are the public keys
    (OpenSSH) of those who may pass."""

    def __init__(self, host: str, port: int, *, inside: str, tls: TlsFiles, nodes: Collection[str]) -> None:
        self.most_bytes = _SMALL  # of an upload; more when the agreement is known
        self.open = True  # else nodes are told to come back: who is inside does not know them yet
        self._keys = fleet.signing_keys(nodes)
        trust = ssl.create_default_context(cafile=str(tls.ca))
        self._clients = [
            httpx.AsyncClient(
                base_url=f"https://{inside}",
                verify=trust,
                timeout=60.0,
                limits=httpx.Limits(max_connections=4 * _CONNECTIONS, max_keepalive_connections=_CONNECTIONS),
            )
            for _ in range(_POOLS)
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                ssl_certfile=str(tls.certificate),
                ssl_keyfile=str(tls.key),
                log_level="critical",
                access_log=False,
                interface="asgi3",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=int(_NODE_SECONDS),
                loop="asyncio",  # which asks `_Listener.accept`
                http="h11",  # whose headers have a longest length
                h11_max_incomplete_event_size=_HEADER_BYTES,
                ws="none",
                backlog=_STRANGERS,
            )
        )
        self._host, self._port, self.address = host, port, f"{host}:{port}"
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._listeners: list[_Listener] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._watch = threading.Thread(target=self._cut_slow_peers, daemon=True)
        self._over = threading.Event()

    def __enter__(self) -> Gate:
        try:
            self._listen()
            self._thread.start()
            until = time.monotonic() + 10
            while not self._server.started:
                if not self._thread.is_alive() or time.monotonic() > until:
                    raise OSError
                time.sleep(0.02)
        except OSError:
            self.__exit__()
            raise FederationError(
                f"cannot listen on {self.address}: it is in use, or not an address of this host"
            ) from None
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        for listener in self._listeners:
            listener.close()

    def _listen(self) -> None:
        addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            listener = _Listener(family, kind, protocol)
            self._listeners.append(listener)
            listener.peers = self._peers
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)

    def _run(self) -> None:
        self._server.run(sockets=list(self._listeners))

    def _cut_slow_peers(self) -> None:
        """Slow in TLS, in headers, in a body, in taking an answer: one limit of time for each."""
        counted = 0
        while not self._over.wait(0.25):
            accepted = sum(listener.accepted for listener in self._listeners)
            if accepted - counted > _STRANGERS:  # what TLS leaves of a connection are cycles of 300 kB
                counted = accepted
                gc.collect()
            for peer in list(self._peers.values()):
                if peer.until < time.monotonic():
                    peer.cut()

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI: one request in, one out."""
        if scope["type"] != "http":
            return
        headers, peer = dict(scope["headers"]), self._peers.get(scope["client"])
        length = headers.get(b"content-length", b"0")
        most = self.most_bytes if scope["path"].endswith("/push-messages") else _SMALL
        if scope["method"] != "POST" or scope["path"] not in _OPEN:
            return await _refuse(send, 404)
        if peer is None or not (node := fleet.signer(headers, self._keys)):
            return await _refuse(send, 401)
        if not self.open:
            return await _refuse(send, 502)
        if not peer.node and sum(each.node == node for each in self._peers.values()) >= _CONNECTIONS:
            return await _refuse(send, 429)
        if b"transfer-encoding" in headers or not length.isdigit():
            return await _refuse(send, 411)
        if len(length) > 12 or int(length) > most:
            return await _refuse(send, 413)
        peer.node = node
        peer.until = time.monotonic() + _NODE_SECONDS + int(length) / _SLOWEST
        await self._pass_on(scope, receive, send, peer)
        peer.until = time.monotonic() + _NODE_SECONDS

    async def _pass_on(self, scope: dict[str, Any], receive: Any, send: Any, peer: _Peer) -> None:
        async def body() -> Any:
            more = True
            while more:
                part = await receive()
                if part["type"] != "http.request":
                    raise httpx.ReadError("the node went away")
                more = part.get("more_body", False)
                yield part.get("body", b"")

        begun = False
        kept = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        try:
            client = self._clients[hash(peer.node) % _POOLS]
            async with client.stream("POST", scope["path"], content=body(), headers=kept) as answer:
                peer.until += int(answer.headers.get("content-length", 0)) / _SLOWEST
                back = [(name, value) for name, value in answer.headers.raw if name.lower() not in _HOP]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": back})
                begun = True
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except httpx.HTTPError:
            if begun:
                peer.cut()
            else:
                await _refuse(send, 502)


async def _refuse(send: Any, status: int) -> None:
    """An answer before the body is read: the connection ends with it."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class FlowerServer(SuperLink):
    """A SuperLink that knows the parties before they reach it, behind its gate."""

    def __init__(
        self, run_folder: Path, keys_folder: Path, address: tuple[str, int], env: Mapping[str, str]
    ) -> None:
        tls, self._parties = TlsFiles.of(keys_folder), Keyring.load(keys_folder).parties
        super().__init__(run_folder, tls, {**env, SUPERLINK: "1"})
        nodes = [party.node_key for party in self._parties]
        self._gate = Gate(*address, inside=self.inside, tls=tls, nodes=nodes)
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
        for party in self._parties:
            self.register(party.node_key, party.name)
        self._gate.open = True

    def submit(self, config: Mapping[str, str], on_event: Event) -> None:
        self.run(APP, config)

    def hear(self, facts: Mapping[str, Any]) -> None:
        if "upload_bytes" in facts:
            self._gate.most_bytes = int(facts["upload_bytes"])
