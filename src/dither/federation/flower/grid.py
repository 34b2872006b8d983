"""The coordinator's side: messages over the Grid of a Flower ServerApp, asked for every 30 ms, then ever less.

`Grid.send_and_receive` would sleep 3 s between two looks, and `Grid.pull_messages` waits for minutes on the answer
of a node that was killed in the middle of it. So one call asks which answers there are, and each of them is
fetched by itself, in a thread that may wait as long as it likes. As in `fleet`, the calls lie below Flower's
documented interface.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

from dither.federation.flower.fleet import UnreadableMessage, body_of, content, inflated

_SHORT, _LONG = 0.03, 0.3  # seconds between two looks: right after something came or went, and at most
_LOOK_SECONDS = 0.1  # how long fetching may take before the others are handed on
_SECONDS = 600.0  # for an answer that was begun to become complete


class GridTransport:
    """Implements `dither.federation.transport.Transport`."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._rest = _SHORT
        self._coming: dict[str, Future[bytes | None]] = {}  # question -> its answer, which is being fetched

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
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        unanswered = [number for number in ids if number not in self._coming]
        if unanswered:
            answer = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=unanswered))
            for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                self._coming[message.metadata.reply_to_message_id] = self._fetch(message.metadata, tree)
        wait(self._coming.values(), _LOOK_SECONDS)
        done = [number for number, coming in self._coming.items() if coming.done()]
        found = [(number, self._coming.pop(number).result()) for number in done]
        if found:
            self._rest = _SHORT
        return [(number, body) for number, body in found if number in ids]

    def _fetch(self, metadata: Any, tree: Any) -> Future[bytes | None]:
        """One answer. The thread is a daemon's: one that waits in vain keeps nobody from leaving."""
        found: Future[bytes | None] = Future()

        def fetch() -> None:
            try:
                found.set_result(self._answer(metadata, tree))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=fetch, daemon=True).start()
        return found

    def _answer(self, metadata: Any, tree: Any) -> bytes | None:
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        client, node = self._grid._runtime_client, self._grid.node
        until = time.monotonic() + _SECONDS

        def part(number: str) -> bytes | None:
            pause = _SHORT
            while time.monotonic() < until:
                answer = client.PullObject(PullObjectRequest(node=node, run_id=metadata.run_id, object_id=number))
                if not answer.object_found:
                    break
                if answer.object_available:
                    return bytes(answer.object_content)
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
            return None

        try:
            whole = inflated(tree, part)
        except UnreadableMessage:
            return b""  # no message of ours either: whoever sent it is named for that
        if whole is None:
            return None  # its sender died in the middle of it
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=metadata.run_id, message_object_id=metadata.message_id)
        )
        return (body_of(whole) or b"") if whole.has_content() else None

    def pause(self) -> None:
        time.sleep(self._rest)
        self._rest = min(1.3 * self._rest, _LONG)
