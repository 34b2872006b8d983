"""Questions to parties and their answers: signed, matched, asked again when a party comes back.

A party is reached at an address of the transport, which it is asked for by a hello: only the holder of its
identity key can answer that. A question stays open until it is answered, refused or the caller stops waiting; a
party that connects anew is asked again, because it may have died with the question in its hands.

`Transport` is how messages travel; Flower is one way (`federation.flower`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dither.errors import FederationError, ProtocolAbort
from dither.federation import keys, messages

_LOOK_SECONDS = 0.5  # between two looks at who is connected
GRACE_SECONDS = 3.0  # for a party that is not connected to come back, where the others suffice
_LONGEST_REASON = 400  # characters
_MOST_RECORDS = 2**31 - 1
Question = tuple[Mapping[str, Any], Mapping[str, np.ndarray | bytes]]  # fields and arrays
Take = Callable[[str, messages.SignedMessage], None]  # what is done with a party's answer
_VERSIONS = ("dither", "jax", "numpy", "python")


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


class TransportRestart(Exception):
    """The transport must be started anew: it cannot reach a party that has come back."""


class Failures(NamedTuple):
    """Parties whose answer does not count, and why. Those in neither gave none."""

    refused: dict[str, str]  # they said so
    invalid: dict[str, str]  # they sent what no honest party sends

    @property
    def reasons(self) -> dict[str, str]:
        return self.refused | self.invalid


@dataclass
class _Exchange:
    """One question to several parties, while it is open."""

    bodies: dict[str, bytes]  # party -> the message to it
    waiting: set[str]
    failures: Failures = field(default_factory=lambda: Failures({}, {}))
    sent: dict[str, str] = field(default_factory=dict)  # message id -> party
    marks: dict[str, str] = field(default_factory=dict)  # party -> mark of the node it was sent to
    asked: dict[str, float] = field(default_factory=dict)  # party -> when it was asked


class Mailbox:
    """Everything the coordinator says and hears."""

    def __init__(self, transport: Transport, federation: keys.Keyring, identity: keys.Identity) -> None:
        self.transport, self.keyring, self._identity = transport, federation, identity
        self._public = {party.name: party.identity for party in federation.parties}
        self._address: dict[str, int] = {}
        self._marks: dict[int, str] = {}
        self._hellos: dict[str, tuple[int, str]] = {}  # message id -> address, digest of the question
        self._asked: dict[int, str] = {}  # the mark under which an address was last greeted
        self._looked = 0.0
        self.greeted: dict[str, dict[str, Any]] = {}  # party -> its hello
        self.strange: list[str] = []  # what was heard and could not be used
        self.bytes_up: dict[str, int] = {}
        self.bytes_down: dict[str, int] = {}

    def present(self) -> set[str]:
        """Parties that are connected now and have said hello."""
        return {name for name, address in self._address.items() if address in self._marks}

    def look(self) -> None:
        """See who is connected, greet whoever came, and hear their hellos."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._marks = self.transport.nodes()
            fresh = {at: mark for at, mark in self._marks.items() if self._asked.get(at) != mark}
            for address, mark in fresh.items():
                hello = self._pack(messages.ANYONE, "hello", {}, {})
                for at, number in self.transport.push({address: hello}, ttl=60.0).items():
                    self._hellos[number] = (at, messages.digest(hello))
                self._asked[address] = mark
        for number, body in self.transport.pull(list(self._hellos)) if self._hellos else []:
            address, quoted = self._hellos.pop(number)
            message = self._read(self._public, body, quoted) if body is not None else None
            if message is not None and message.kind == "hello" and (facts := _facts(message)) is not None:
                self._address[message.sender] = address
                self.greeted[message.sender] = facts

    # reason: what is asked, what is done with answers, and four ways for it to end
    def ask(
        self,
        kind: str,
        questions: Mapping[str, Question],
        *,
        seconds: float,
        take: Take,
        enough: Callable[[], bool] = lambda: False,
        least: int | None = None,
        on_wait: Callable[[set[str]], None] = lambda missing: None,
    ) -> Failures:
        """Ask each party its question; `take(party, answer)` for each answer, which raises where no honest party
        would have sent it. Ends when all have answered, when `enough()`, after `seconds`, or when `least` have
        answered and nobody else is connected."""
        until = time.monotonic() + seconds
        bodies = {name: self._pack(name, kind, *question) for name, question in questions.items()}
        exchange = _Exchange(bodies, set(bodies))
        seen = time.monotonic()  # when somebody we wait for was last connected
        while exchange.waiting:
            self._send(exchange, ttl=max(until - time.monotonic(), 1.0) + 60.0)
            self._receive(exchange, take)
            if not exchange.waiting or enough() or time.monotonic() > until:
                break
            on_wait(exchange.waiting)
            self.look()
            if exchange.waiting & self.present():
                seen = time.monotonic()
            answered = len(bodies) - len(exchange.waiting) - len(exchange.failures.reasons)
            if least is not None and answered >= least and time.monotonic() - seen > GRACE_SECONDS:
                break
            self.transport.pause()
        return exchange.failures

    def _send(self, exchange: _Exchange, *, ttl: float) -> None:
        """Send the question to each party that is connected and was not asked since it connected."""
        due = {
            address: name
            for name in sorted(exchange.waiting)
            if (address := self._address.get(name)) is not None
            and exchange.marks.get(name) != self._marks.get(address, exchange.marks.get(name))
            and time.monotonic() - exchange.asked.get(name, -_LOOK_SECONDS) >= _LOOK_SECONDS  # whatever it answers
        }
        pushed = (
            self.transport.push({at: exchange.bodies[name] for at, name in due.items()}, ttl=ttl) if due else {}
        )
        for address, number in pushed.items():
            name = due[address]
            exchange.sent[number], exchange.marks[name] = name, self._marks[address]
            exchange.asked[name] = time.monotonic()
            self.bytes_down[name] = self.bytes_down.get(name, 0) + len(exchange.bodies[name])

    def _receive(self, exchange: _Exchange, take: Take) -> None:
        for number, body in self.transport.pull(list(exchange.sent)) if exchange.sent else []:
            name = exchange.sent.pop(number)
            if name not in exchange.waiting:
                continue
            if body is None:
                exchange.marks.pop(name, None)  # it will never be answered: ask again when the party is there
                continue
            message = self._read({name: self._public[name]}, body, messages.digest(exchange.bodies[name]))
            self.bytes_up[name] = self.bytes_up.get(name, 0) + len(body)
            exchange.waiting.discard(name)
            try:
                if message is None:
                    raise FederationError(self.strange[-1])
                if message.kind == "refused":
                    why = str(message.fields.get("why", "no reason given"))
                    exchange.failures.refused[name] = _plain(why)
                else:
                    take(name, message)
            except (FederationError, ProtocolAbort) as error:
                exchange.failures.invalid[name] = _plain(str(error))

    def _read(self, public: Mapping[str, bytes], body: bytes, quoted: str) -> messages.SignedMessage | None:
        try:
            return messages.unpack(
                body, federation=self.keyring.id, to=messages.SERVER, keys=public, answers=quoted
            )
        except FederationError as error:
            self.strange.append(str(error))
            return None

    def _pack(self, name: str, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
        return messages.pack(
            self._identity,
            federation=self.keyring.id,
            kind=kind,
            sender=messages.SERVER,
            to=name,
            fields=fields,
            arrays=arrays,
        )


def _facts(hello: messages.SignedMessage) -> dict[str, Any] | None:
    """What a party says of itself, as far as it is asked; None where it does not say that."""
    records, theirs = hello.fields.get("records"), hello.fields.get("versions")
    if not isinstance(records, int) or isinstance(records, bool) or not 0 <= records <= _MOST_RECORDS:
        return None
    if not isinstance(theirs, dict):
        return None
    facts = {"records": records, "versions": {name: _plain(str(theirs.get(name)))[:40] for name in _VERSIONS}}
    if "epsilon" in hello.fields:  # a target of its own
        target = hello.fields["epsilon"]
        if not isinstance(target, int | float) or isinstance(target, bool) or not 0 < target < math.inf:
            return None
        facts["epsilon"] = float(target)
    return facts


def _plain(text: str) -> str:
    """A party's words as they may be shown and kept: printable, and not too many."""
    return messages.printable(text)[:_LONGEST_REASON]
