"""The coordinator's side: messages over the Grid of a Flower ServerApp, asked for every 30 ms, then ever less.

`Grid.send_and_receive` would sleep 3 s between two looks; `push_messages` and `pull_messages` leave that to us. A
node that is killed in the middle of its answer leaves a message without its content, and `pull_messages` waits for
that for minutes. So each message is asked for by itself, in a thread that may wait as long as it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

from dither.engines.flower.fleet import body_of, content

_SHORT, _LONG = 0.03, 0.3  # seconds between two looks: right after something came or went, and at most
_LOOK_SECONDS = 0.1  # how long a look may take before the others are handed on


class GridTransport:
    """Implements `dither.federation.transport.Transport`."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._rest = _SHORT
        self._looks: dict[str, Future[list[Any]]] = {}

    def nodes(self) -> dict[int, str]:
        return {
            int(node.node_id): node.last_activated_at for node in self._grid.get_nodes() if node.status == "online"
        }

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        from flwr.app import Message

        self._rest = _SHORT
        messages = [
            Message(content(body), dst_node_id=address, message_type="query", ttl=ttl)
            for address, body in bodies.items()
        ]
        numbers = list(self._grid.push_messages(messages))
        return {address: number for address, number in zip(bodies, numbers, strict=False) if number}

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        for number in ids:
            if number not in self._looks:
                self._looks[number] = self._look(number)
        wait(self._looks.values(), _LOOK_SECONDS)
        found = []
        for number in [number for number, look in self._looks.items() if look.done()]:
            for message in self._looks.pop(number).result():
                found.append((number, body_of(message)))
        if found:
            self._rest = _SHORT
        return [(number, body) for number, body in found if number in ids]

    def _look(self, number: str) -> Future[list[Any]]:
        """Ask for one answer. The thread is a daemon's: one that waits in vain keeps nobody from leaving."""
        found: Future[list[Any]] = Future()

        def look() -> None:
            try:
                found.set_result(list(self._grid.pull_messages([number])))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=look, daemon=True).start()
        return found

    def pause(self) -> None:
        time.sleep(self._rest)
        self._rest = min(1.3 * self._rest, _LONG)
