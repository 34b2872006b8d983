"""ServerApp and ClientApp: what Flower starts.

The ServerApp runs the coordinator. The ClientApp is for SuperNodes that exist already: Flower starts a process for
every message, and that process hands the message over a Unix socket to `dither join --behind-supernode`, which
holds data, keys and compiled programs. The socket lies in the party's folder, which nobody else may enter; its
path is the node configuration's "dither-socket".
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dither.federation.flower import SUPERLINK
from dither.federation.flower.fleet import PartyMessages, SuperNodeMessages, body_of, content
from dither.federation.local import hand_over

_FIRST_PAUSE, _LONGEST_PAUSE = 0.03, 0.3  # seconds between two looks: right after something came, and at most
_LOOK_SHARE = 4.0  # times as long as the last look took: a SuperLink with much to do is asked less often
_HINTS_AT_ONCE = 1000  # nodes in a datagram


class GridTransport:
    """Implements `dither.federation.messages.Transport`: to parties that `dither join`, or to SuperNodes. `hints`
    is the address at which the gate hears who was asked, and from which it tells of answers (`gate.Hints`)."""

    def __init__(self, grid: Grid, *, supernodes: bool = False, hints: str = "") -> None:
        self._grid, self._pause, self._looked, self._missing = grid, _FIRST_PAUSE, 0.0, 0
        self._messages = SuperNodeMessages(grid) if supernodes else PartyMessages(grid)
        self._hints: socket.socket | None = None
        if hints:
            host, _, port = hints.rpartition(":")
            self._hints = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._hints.connect((host, int(port)))

    def nodes(self) -> dict[int, str]:
        return {
            int(node.node_id): node.last_activated_at for node in self._grid.get_nodes() if node.status == "online"
        }

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        self._pause = _FIRST_PAUSE
        messages = [
            Message(content(body), dst_node_id=address, message_type="query", ttl=ttl)
            for address, body in bodies.items()
        ]
        numbers = self._messages.push(messages, ttl=ttl)
        if self._hints is not None:
            addresses = list(bodies)
            for at in range(0, len(addresses), _HINTS_AT_ONCE):
                with suppress(OSError):
                    self._hints.send(array("Q", addresses[at : at + _HINTS_AT_ONCE]))
        return {address: number for address, number in zip(bodies, numbers, strict=False) if number}

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        if self._hints is not None:
            self._hints.setblocking(False)
            with suppress(OSError):  # none left
                while True:
                    self._hints.recv(1)
        asked = time.monotonic()
        answers = self._messages.pull(ids)
        self._looked = time.monotonic() - asked
        self._missing += len(ids) - len(answers)
        if answers:
            self._pause = _FIRST_PAUSE
        return answers

    def pause(self) -> None:
        """Until all answers that were missing have passed the gate, or for a while."""
        if self._hints is None or not self._missing:
            time.sleep(max(self._pause, _LOOK_SHARE * self._looked))
            self._pause = min(1.3 * self._pause, _LONGEST_PAUSE)
        else:
            until = time.monotonic() + max(_LONGEST_PAUSE, _LOOK_SHARE * self._looked)
            with suppress(OSError):
                while self._missing and (left := until - time.monotonic()) > 0:
                    self._hints.settimeout(left)
                    self._hints.recv(1)
                    self._missing -= 1
        self._missing = 0


def server_app(coordinate: Callable[[Any, Mapping[str, Any]], None] | None = None) -> ServerApp:
    """A ServerApp that calls `coordinate(transport, run configuration)`: by default that of `dither serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from dither.federation import serving

        hints = os.environ.get(SUPERLINK, "")
        transport = GridTransport(grid, supernodes=not hints, hints=hints)
        (coordinate or serving.coordinate)(transport, dict(context.run_config))

    return app


def client_app() -> ClientApp:
    """A ClientApp that hands messages to the process behind the socket."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        path = context.node_config.get("dither-socket")
        if not path:
            raise RuntimeError("start the SuperNode with --node-config 'dither-socket=\"PATH\"'")
        answer = hand_over(Path(str(path)), body_of(message) or b"")
        return Message(content(answer), reply_to=message)

    return app
