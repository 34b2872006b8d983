"""How the coordinator reaches nodes. Flower is one way (`federation.flower`); `Local` is another, inside one
process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Protocol


class Transport(Protocol):
    """Messages out, answers in. An address is a number that stays with a node while the transport lives."""

    def nodes(self) -> dict[int, str]:
        """Who is connected, each with a mark that changes when it connects anew."""

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        """Send one message to each address; their ids. Where there is no id, nothing was sent."""

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        """Answers that have come; None for a message that will never be answered."""

    def pause(self) -> None:
        """Wait a little."""


class Local:
    """Nodes in this process: each is a function from a message to its answer. None: it does not answer (yet)."""

    def __init__(self, answer: Mapping[int, Callable[[bytes], bytes | None]]) -> None:
        self.answer = dict(answer)
        self.marks = dict.fromkeys(self.answer, "0")
        self._answers: dict[str, bytes | None] = {}
        self._open: dict[str, tuple[int, bytes]] = {}

    def nodes(self) -> dict[int, str]:
        return {address: self.marks[address] for address in self.answer}

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        del ttl
        ids = {}
        for address, body in bodies.items():
            if address in self.answer:
                ids[address] = secrets.token_hex(8)
                self._open[ids[address]] = (address, body)
        return ids

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        found: list[tuple[str, bytes | None]] = []
        for each in ids:
            if each in self._open:
                address, body = self._open.pop(each)
                reply = self.answer[address](body) if address in self.answer else None
                if reply is not None:
                    found.append((each, reply))
        return found

    def pause(self) -> None:
        pass
