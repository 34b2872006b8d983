"""Questions to parties and their answers: signed, matched, asked again when a party comes back.

A party is reached at an address of the transport, which it is asked for by a hello: only the holder of its
identity key can answer that. A question stays open until it is answered, refused or the caller stops waiting; a
party that connects anew is asked again, because it may have died with the question in its hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dither.errors import FederationError, ProtocolAbort
from dither.federation import keys, messages
from dither.federation.transport import Transport

_LOOK_SECONDS = 0.5  # between two looks at who is connected
_GRACE_SECONDS = 3.0  # for a party that is not connected to come back, where the others suffice
_LONGEST_REASON = 400  # characters
_MOST_RECORDS = 2**31 - 1
_VERSIONS = ("dither", "jax", "numpy", "python")


class Failures(NamedTuple):
    """Parties whose answer does not count, and why. Those in neither gave none."""

    refused: dict[str, str]  # they said so
    false: dict[str, str]  # they sent what no honest party sends

    @property
    def reasons(self) -> dict[str, str]:
        return self.refused | self.false


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

    def look(self, *, now: bool = False) -> None:
        """See who is connected, greet whoever came, and hear their hellos."""
        if now or time.monotonic() - self._looked >= _LOOK_SECONDS:
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

    def ask(
        self,
        kind: str,
        questions: Mapping[str, tuple[Mapping[str, Any], Mapping[str, np.ndarray | bytes]]],
        *,
        seconds: float,
        take: Callable[[str, messages.SignedMessage], None],
        enough: Callable[[], bool] = lambda: False,
        least: int | None = None,
        on_wait: Callable[[set[str]], None] = lambda missing: None,
    ) -> Failures:
        """Ask each party its question; `take(party, answer)` for each answer, which raises where no honest party
        would have sent it. Ends when all have answered, when `enough()`, after `seconds`, or when `least` have
        answered and nobody else is connected."""
        until = time.monotonic() + seconds
        bodies = {name: self._pack(name, kind, *question) for name, question in questions.items()}
        quoted = {name: messages.digest(body) for name, body in bodies.items()}
        waiting, without = set(bodies), Failures({}, {})
        sent: dict[str, str] = {}  # message id -> party
        marks: dict[str, str] = {}  # party -> mark of the node it was sent to
        last: dict[str, float] = {}  # party -> when it was asked
        seen = time.monotonic()  # when somebody we wait for was last connected
        while waiting:
            due = {
                address: name
                for name in sorted(waiting)
                if (address := self._address.get(name)) is not None
                and marks.get(name) != self._marks.get(address, marks.get(name))
                and time.monotonic() - last.get(name, -_LOOK_SECONDS) >= _LOOK_SECONDS  # whatever it answers
            }
            if due:
                left = max(until - time.monotonic(), 1.0)
                pushed = self.transport.push({at: bodies[name] for at, name in due.items()}, ttl=left + 60.0)
                for address, number in pushed.items():
                    name = due[address]
                    sent[number], marks[name], last[name] = name, self._marks[address], time.monotonic()
                    self.bytes_down[name] = self.bytes_down.get(name, 0) + len(bodies[name])
            for number, body in self.transport.pull(list(sent)) if sent else []:
                name = sent.pop(number)
                if name not in waiting:
                    continue
                if body is None:
                    marks.pop(name, None)  # it will never be answered: ask again when the party is there
                    continue
                message = self._read({name: self._public[name]}, body, quoted[name])
                self.bytes_up[name] = self.bytes_up.get(name, 0) + len(body)
                waiting.discard(name)
                try:
                    if message is None:
                        raise FederationError(self.strange[-1])
                    if message.kind == "refused":
                        without.refused[name] = _plain(str(message.fields.get("why", "no reason given")))
                    else:
                        take(name, message)
                except (FederationError, ProtocolAbort) as error:
                    without.false[name] = _plain(str(error))
            if not waiting or enough() or time.monotonic() > until:
                break
            on_wait(waiting)
            self.look()
            if waiting & self.present():
                seen = time.monotonic()
            answered = len(bodies) - len(waiting) - len(without.reasons)
            if least is not None and answered >= least and time.monotonic() - seen > _GRACE_SECONDS:
                break
            self.transport.pause()
        return without

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
    return {"records": records, "versions": {name: _plain(str(theirs.get(name)))[:40] for name in _VERSIONS}}


def _plain(text: str) -> str:
    """A party's words as they may be shown and kept: printable, and not too many."""
    return "".join(each if each.isprintable() else " " for each in text)[:_LONGEST_REASON]
