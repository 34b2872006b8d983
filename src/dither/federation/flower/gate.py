"""The gate before Flower's SuperLink: TLS, and the calls of registered nodes alone.

A SuperLink offers everything at one port: to nodes the Fleet API, but also the Control API, by which anyone may
start a run (and thus a program on the server) or register nodes, and the Runtime API of running apps. So the
SuperLink listens on 127.0.0.1. The gate listens on the address given and passes on nothing but the Fleet calls
below.

A node signs the time in the headers of every call. The gate checks that before it looks at a body: of a stranger
it reads headers of some kilobytes, from a few connections at once, for a few seconds. Bodies of nodes are handed
on as they come, at most `most_bytes` long, so the gate's memory does not grow with them.

A call for a question costs the SuperLink the same whether there is one or not. So the gate keeps a node's call
until the coordinator hints that it has asked this node something, and answers it itself if that takes too long.
"""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import ssl
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn

from dither.errors import FederationError
from dither.federation.flower import TlsFiles, fleet

_ACTIVATE, _PULL, _PUSH = (f"/v1/fleet/{call}" for call in ("activate-node", "pull-messages", "push-messages"))
_OPEN = frozenset({_ACTIVATE, _PULL, _PUSH, "/v1/fleet/deactivate-node", "/v1/fleet/send-node-heartbeat"})
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host", b"upgrade"})
_STRANGERS = 64  # connections at once on which no node has shown itself yet, or as many as there are nodes
_STRANGER_SECONDS = 10.0  # for each of them to do so
_HEADER_BYTES = 1 << 14
_CONNECTIONS = 8  # of one node at once
_NODE_SECONDS = 90.0  # for a node's next call, and for a call's answer
_CALL_SECONDS = 0.1  # more for each node: all of them may call at once
_SLOWEST = 1 << 16  # bytes a second, in either direction
_SMALL = 1 << 20  # the longest body of a call that carries no upload
_TINY = 1 << 10  # and of one that waits here
_INSIDE_SECONDS = 3.0  # for a connection inward to be used again: the SuperLink closes it after 5
_INSIDE = {_PULL: 16, _PUSH: 128}  # such calls that are inside at once
_HOLD_SECONDS = 15.0, 0.03  # for a call to wait here for a question, and more for each node
_SURE_SECONDS = 60.0  # after which a node's call is passed on even so, in case a hint was lost
_SURE_PULLS = 5.0  # of those a second, of all nodes together


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
    strangers: int  # at most
    accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.accepted += 1
        for at, peer in list(self.peers.items()):
            if peer.connection.fileno() < 0:  # closed
                del self.peers[at]
        strangers = [at for at, peer in self.peers.items() if not peer.node]
        if len(strangers) >= self.strangers:  # the longest silent one of the host that has most of them makes room
            ((busiest, _),) = Counter(host for host, _ in strangers).most_common(1)
            self.peers.pop(next(at for at in strangers if at[0] == busiest)).cut()
        self.peers[address[:2]] = _Peer(connection)
        return connection, address


# Questions that wait inside


@dataclass
class _Pending:
    """What the gate knows of the questions that wait for a node."""

    due: float = math.inf  # how many; infinite where nobody knows
    passed: float = 0.0  # when the node's call for one was last passed on
    hint: asyncio.Future[bool] | None = None  # what the call that waits here waits for

    def tell(self, due: bool) -> None:
        if self.hint is not None and not self.hint.done():
            self.hint.set_result(due)


class Hints:
    """Datagrams on 127.0.0.1: the coordinator tells whom it has asked something, and is told that an answer has
    passed the gate. They save calls that would find nothing. Where one is lost, a call comes later; where one is
    false, it comes in vain."""

    def __init__(self) -> None:
        self._line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._line.bind(("127.0.0.1", 0))
        self._line.setblocking(False)
        self.address = f"127.0.0.1:{self._line.getsockname()[1]}"
        self._coordinator: Any = None
        self._pending: dict[bytes, _Pending] = {}  # public key of a node -> what waits for it
        self._numbers: dict[bytes, int] = {}  # public key -> number

    def listen(self) -> None:
        """In the loop that runs."""
        asyncio.get_running_loop().add_reader(self._line, self._hear)

    def _hear(self) -> None:
        with suppress(OSError, ValueError):
            body, self._coordinator = self._line.recvfrom(1 << 16)
            asked = set(array("Q", body))
            for node, number in self._numbers.items():
                if number in asked:
                    self._pending[node].due += 1
                    self._pending[node].tell(True)

    def answered(self) -> None:
        """An answer has passed."""
        with suppress(OSError):
            if self._coordinator is not None:
                self._line.sendto(b"", self._coordinator)

    def connected(self, node: bytes, answer: bytes) -> None:
        """A node is connected; the SuperLink's answer tells its number."""
        self._pending.setdefault(node, _Pending()).tell(False)
        self._pending[node], self._numbers[node] = _Pending(), fleet.number_in(answer)

    async def wait(self, node: bytes, gone: asyncio.Future[Any]) -> _Pending | None:
        """Wait until there may be a question for this node. None where there is none after a while, and where the
        node has gone or has called again on another connection."""
        pending = self._pending.setdefault(node, _Pending())
        pending.tell(False)
        if not pending.due:
            pending.hint = hint = asyncio.get_running_loop().create_future()
            seconds, more = _HOLD_SECONDS
            seconds += more * len(self._pending)
            await asyncio.wait({hint, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or (hint.done() and not hint.result()):
                return None
        sure = pending.passed + max(_SURE_SECONDS, len(self._pending) / _SURE_PULLS)
        return pending if pending.due or time.monotonic() > sure else None

    def close(self) -> None:
        self._line.close()


# Calls inward


class _Line:
    """A connection to the SuperLink, for one call after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._http = reader, writer, h11.Connection(h11.CLIENT)
        self._free_since = 0.0

    async def ask(self, request: h11.Request, body: AsyncIterator[bytes]) -> Any:
        """The head of the answer; `parts` gives its body."""
        self._write(request)
        async for part in body:
            self._write(h11.Data(data=part))
            await self._writer.drain()
        self._write(h11.EndOfMessage())
        await self._writer.drain()
        while isinstance(head := await self._event(), h11.InformationalResponse):
            pass
        return head

    async def parts(self) -> AsyncIterator[bytes]:
        while isinstance(part := await self._event(), h11.Data):
            yield bytes(part.data)

    def _write(self, event: Any) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(1 << 16))
        return event

    def is_usable(self) -> bool:
        return time.monotonic() < self._free_since + _INSIDE_SECONDS and not self._reader.at_eof()

    def is_free(self) -> bool:
        """Whether its call is complete, so that another may follow."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._free_since = time.monotonic()
        return True

    def close(self) -> None:
        self._writer.close()


class _Lines:
    """Connections to the SuperLink. Each is kept for a moment, in case it is needed again."""

    def __init__(self, inside: str, trust: ssl.SSLContext) -> None:
        self.name, self._trust = inside, trust
        self._free: deque[_Line] = deque()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[_Line]:
        while self._free and not self._free[0].is_usable():  # the one that was unused for longest
            self._free.popleft().close()
        if self._free:
            line = self._free.pop()
        else:
            host, _, port = self.name.rpartition(":")
            line = _Line(*await asyncio.open_connection(host, int(port), ssl=self._trust))
        try:
            yield line
        finally:
            if line.is_free():
                self._free.append(line)
            else:
                line.close()


# The gate


class Gate:
    """A server in a thread of this process. `with Gate(...)` until it is to stop. `nodes` are the public keys
    (OpenSSH) of those who may pass. Without `hints`, no call waits here."""

    # reason: where it listens, who is inside, who may pass, and how it shows itself
    def __init__(
        self,
        host: str,
        port: int,
        *,
        inside: str,
        tls: TlsFiles,
        nodes: Collection[str],
        hints: Hints | None = None,
    ) -> None:
        self.most_bytes = _SMALL  # of an upload; more when the agreement is known
        self.open = True  # else nodes are told to come back: who is inside does not know them yet
        self._keys, self._hints = fleet.signing_keys(nodes), hints
        self._lines = _Lines(inside, ssl.create_default_context(cafile=str(tls.ca)))
        self._slots = {path: asyncio.Semaphore(most) for path, most in _INSIDE.items()}
        self._seconds = _NODE_SECONDS + _CALL_SECONDS * len(self._keys)
        self._strangers = max(_STRANGERS, len(self._keys))  # who may all come at once
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                ssl_certfile=str(tls.certificate),
                ssl_keyfile=str(tls.key),
                log_level="critical",
                access_log=False,
                interface="asgi3",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=int(self._seconds),
                loop="asyncio",  # which asks `_Listener.accept`
                http="h11",  # whose headers have a longest length
                h11_max_incomplete_event_size=_HEADER_BYTES,
                ws="none",
                backlog=self._strangers,
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
        if self._hints is not None:
            self._hints.close()

    def _listen(self) -> None:
        addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            listener = _Listener(family, kind, protocol)
            self._listeners.append(listener)
            listener.peers, listener.strangers = self._peers, self._strangers
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)

    def _run(self) -> None:
        async def serve() -> None:
            if self._hints is not None:
                self._hints.listen()
            await self._server.serve(sockets=list(self._listeners))

        asyncio.run(serve())

    def _cut_slow_peers(self) -> None:
        """Slow in TLS, in headers, in a body, in taking an answer: one limit of time for each."""
        counted = 0
        while not self._over.wait(0.25):
            accepted = sum(listener.accepted for listener in self._listeners)
            if accepted - counted > self._strangers:  # what TLS leaves of a connection are cycles of 300 kB
                counted = accepted
                gc.collect()
            for peer in list(self._peers.values()):
                if peer.until < time.monotonic():
                    peer.cut()

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI: one request in, one out."""
        if scope["type"] != "http":
            return
        headers, peer, path = dict(scope["headers"]), self._peers.get(scope["client"]), scope["path"]
        length = headers.get(b"content-length", b"0")
        if scope["method"] != "POST" or path not in _OPEN:
            return await _answer(send, 404)
        if peer is None or not (node := fleet.signer(headers, self._keys)):
            return await _answer(send, 401)
        if not self.open:
            return await _answer(send, 502)
        if not peer.node and sum(each.node == node for each in self._peers.values()) >= _CONNECTIONS:
            return await _answer(send, 429)
        if b"transfer-encoding" in headers or not length.isdigit():
            return await _answer(send, 411)
        if len(length) > 12 or int(length) > {_PUSH: self.most_bytes, _PULL: _TINY}.get(path, _SMALL):
            return await _answer(send, 413)
        peer.node = node
        peer.until = time.monotonic() + self._seconds + int(length) / _SLOWEST
        await self._serve(scope, receive, send, peer)
        peer.until = time.monotonic() + self._seconds

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any, peer: _Peer) -> None:
        """A call of a node's: pass it on, for a question when there may be one, and keep in mind what follows."""
        hints, path = self._hints, scope["path"]
        if hints is None:
            await self._pass_on(scope, _parts(receive), send, peer)
        elif path == _PULL:
            body = [part async for part in _parts(receive)]
            gone = asyncio.ensure_future(receive())
            pending = await hints.wait(peer.node, gone)
            gone.cancel()
            if pending is None:
                return await _answer(send, 200)  # which says that there is none
            due, pending.due, pending.passed = pending.due, 0, time.monotonic()
            found = await self._pass_on(scope, _each(body), send, peer)
            pending.due += due if found is None else due - 1 if found and due else 0
        else:
            found = await self._pass_on(scope, _parts(receive), send, peer)
            if path == _ACTIVATE and found:
                hints.connected(peer.node, found)
            elif path == _PUSH and found:
                hints.answered()

    async def _pass_on(
        self, scope: dict[str, Any], body: AsyncIterator[bytes], send: Any, peer: _Peer
    ) -> bytes | None:
        """The beginning of the answer if the SuperLink took the call."""
        begun, found, path = False, b"", scope["path"]
        kept = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        request = h11.Request(method="POST", target=path, headers=[("host", self._lines.name), *kept])
        try:
            async with AsyncExitStack() as stack:
                async with self._slots.get(path, nullcontext()), asyncio.timeout(peer.until - time.monotonic()):
                    line = await stack.enter_async_context(self._lines.one())
                    head = await line.ask(request, body)
                back = [(name, value) for name, value in head.headers if name not in _HOP]
                peer.until += int(dict(back).get(b"content-length", 0)) / _SLOWEST
                await send({"type": "http.response.start", "status": head.status_code, "headers": back})
                begun = True
                async for part in line.parts():
                    found = found or part[:_TINY]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            return found if head.status_code == 200 else None
        except (OSError, h11.ProtocolError, EOFError):
            if begun:
                peer.cut()
            else:
                await _answer(send, 502)
        return None


async def _parts(receive: Any) -> AsyncIterator[bytes]:
    """The body of a call, as it comes."""
    more = True
    while more:
        part = await receive()
        if part["type"] != "http.request":
            raise EOFError("the node went away")
        more = part.get("more_body", False)
        yield part.get("body", b"")


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _answer(send: Any, status: int) -> None:
    """An answer of the gate's own. Where it is no, the body was not read: the connection ends with it."""
    headers = [(b"content-length", b"0")] + ([(b"connection", b"close")] if status != 200 else [])
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
