"""The coordinator's side: messages over the Grid of a Flower ServerApp, asked for every 30 ms, then ever less.

`Grid.send_and_receive` would sleep 3 s between two looks; `push_messages` and `pull_messages` leave that to us.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from dither.engines.flower.fleet import body_of, content

_SHORT, _LONG = 0.03, 0.3  # seconds between two looks: right after something came or went, and at most


class GridTransport:
    """Implements `dither.federation.transport.Transport`."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._rest = _SHORT

    def nodes(self) -> dict[int, str]:
        found = {}
        for node in self._grid.get_nodes():
            info = node if hasattr(node, "node_id") else None
            if info is None:
                found[int(node)] = "connected"
            elif info.status == "online":
                found[int(info.node_id)] = info.last_activated_at
        return found

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
        found = [
            (message.metadata.reply_to_message_id, body_of(message))
            for message in self._grid.pull_messages(list(ids))
        ]
        if found:
            self._rest = _SHORT
        return found

    def pause(self) -> None:
        time.sleep(self._rest)
        self._rest = min(1.3 * self._rest, _LONG)
