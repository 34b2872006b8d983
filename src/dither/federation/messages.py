"""Signed messages between the coordinator and the parties, and the coordinator's mailbox.

A message is a header, arrays, and the sender's signature, as bytes:

    magic "DTHR", version, length of the header, header as JSON, the arrays' bytes, Ed25519 signature over all of
    it

The header names the federation, the kind, the sender and the receiver; an answer quotes the digest of the message
it answers, so an old answer cannot stand for a new one. Reading is strict: exact lengths, known types of numbers,
no bytes left over, no text that cannot be written. What cannot be read is a `FederationError` that names the
reason.

The `Mailbox` asks parties and matches their answers. A party is reached at an address of the transport, which it
is asked for by a hello: only the holder of its identity key can answer that. A question stays open until it is
answered, refused or the caller stops waiting; a party that reconnects is asked again, because it may have died
with the question in its hands. `Transport` is how messages travel: `federation.flower` or `federation.nvflare`.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dither.errors import FederationError, ProtocolAbort
from dither.federation.keys import Identity, Keyring, verify

SERVER = "(server)"  # no party may have brackets in its name
ANYONE = "(anyone)"  # the receiver of a hello, whose name is yet to be learnt
_HEAD = struct.Struct("<4sBI")
_MAGIC, _VERSION = b"DTHR", 1
_SIGNATURE = 64
_MOST_HEADER = 2 << 20
_MOST_BYTES = 1 << 31
_TYPES = ("<f4", "<i4", "<u4", "<u8", "|u1")


class SignedMessage(NamedTuple):
    """A message whose signature was checked."""

    kind: str
    sender: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    digest: str  # of all its bytes

    def bytes(self, name: str) -> bytes:
        """An array of bytes."""
        return self.array(name, "|u1").tobytes()

    def array(self, name: str, kind: str | None = None) -> np.ndarray:
        """An array that must be there."""
        if name not in self.arrays:
            raise FederationError(f"a {self.kind!r} message without {name!r}")
        array = self.arrays[name]
        if kind is not None and array.dtype.str != kind:
            raise FederationError(f"{name!r} in a {self.kind!r} message has type {array.dtype}, expected {kind}")
        return array

    def model(self, shapes: Sequence[tuple[tuple[int, ...], Any]]) -> list[np.ndarray]:
        """The arrays of the model that is broadcast, which must have these shapes and types."""
        leaves = [self.array(f"m{number}") for number in range(len(shapes))]
        for leaf, (shape, dtype) in zip(leaves, shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                raise FederationError(f"the broadcast has {leaf.dtype} {leaf.shape}, expected {dtype} {shape}")
        return leaves

    def field(self, name: str, kind: type) -> Any:
        """A header field that must be there with that type."""
        value = self.fields.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FederationError(f"a {self.kind!r} message whose {name!r} is {value!r}, not {kind.__name__}")
        return value


# reason: a message's header, and what it carries
def pack(
    identity: Identity,
    *,
    federation: str,
    kind: str,
    sender: str,
    to: str,
    fields: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray | bytes] | None = None,
    answers: str = "",
) -> bytes:
    """A signed message. `answers` is the digest of the message that is answered."""
    listed, bodies = [], []
    for name, given in (arrays or {}).items():
        array = np.frombuffer(given, np.uint8) if isinstance(given, bytes) else np.asarray(given, order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype.str not in _TYPES:
            raise FederationError(f"array {name!r} has type {array.dtype}, which messages do not carry")
        listed.append([name, array.dtype.str, list(array.shape)])
        bodies.append(array.tobytes())
    header = {
        "federation": federation,
        "kind": kind,
        "from": sender,
        "to": to,
        "nonce": secrets.token_hex(16),
        "answers": answers,
        "fields": dict(fields or {}),
        "arrays": listed,
    }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    content = b"".join([_HEAD.pack(_MAGIC, _VERSION, len(text)), text, *bodies])
    return content + identity.sign(content)


def unpack(
    content: bytes, *, federation: str, to: str, keys: Mapping[str, bytes], answers: str = ""
) -> SignedMessage:
    """The message in these bytes, if one of `keys` (sender to public key) signed it for this receiver."""
    if not _HEAD.size + _SIGNATURE <= len(content) <= _MOST_BYTES:
        raise FederationError(f"a message of {len(content)} bytes")
    magic, version, length = _HEAD.unpack_from(content)
    if magic != _MAGIC or version != _VERSION:
        raise FederationError("not a message of this version of Dither")
    end = len(content) - _SIGNATURE
    if length > min(_MOST_HEADER, end - _HEAD.size):
        raise FederationError(f"a header of {length} bytes in a message of {len(content)}")
    try:
        header = json.loads(content[_HEAD.size : _HEAD.size + length])
        json.dumps(header, ensure_ascii=False).encode()  # halves of a character could be read, but not written
        kind, sender, fields = str(header["kind"]), str(header["from"]), dict(header["fields"])
        listed = [(str(name), str(dtype), tuple(shape)) for name, dtype, shape in header["arrays"]]
        addressed = (header["federation"], header["to"], header["answers"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FederationError(f"a header that cannot be read: {type(error).__name__}") from None
    if sender not in keys:
        raise FederationError(f"a message from {sender!r}, who is unknown here")
    if not verify(keys[sender], content[end:], content[:end]):
        raise FederationError(f"a message in the name of {sender!r} that it did not sign")
    if addressed[0] != federation:
        raise FederationError("a message of another federation")
    if addressed[1] != to and not (addressed[1] == ANYONE and kind == "hello"):
        raise FederationError(f"a message for {addressed[1]!r}, not for {to!r}")
    if addressed[2] != answers:
        raise FederationError(f"a {kind!r} message from {sender!r} that answers another question (a replay?)")
    arrays, at = {}, _HEAD.size + length
    for name, dtype, shape in listed:
        sizes_fit = all(type(side) is int and side >= 0 for side in shape)
        # Also of an empty array NumPy multiplies the sides that are not 0.
        if dtype not in _TYPES or not sizes_fit or len(shape) > 8 or math.prod(filter(None, shape)) > _MOST_BYTES:
            raise FederationError(f"array {name!r} of type {dtype!r} and shape {shape}")
        stop = at + np.dtype(dtype).itemsize * math.prod(shape)
        if stop > end:
            raise FederationError(f"array {name!r} is cut off")
        arrays[name] = np.frombuffer(content[at:stop], dtype).reshape(shape)
        at = stop
    if at != end:
        raise FederationError(f"{end - at} bytes too many in a {kind!r} message")
    return SignedMessage(kind, sender, fields, arrays, digest(content))


def printable(text: str) -> str:
    """Text of another's as it may be shown: nothing in it reaches a terminal but letters."""
    return "".join(each if each.isprintable() else " " for each in text)


def digest(content: bytes) -> str:
    """What an answer quotes."""
    return hashlib.sha256(content).hexdigest()


def asked_digest(leaves: Sequence[np.ndarray], question: Mapping[str, Any] | None = None) -> bytes:
    """Of what all parties of a round are asked: the model that is broadcast, of known shapes, and the question."""
    hasher = hashlib.sha256(json.dumps(question, sort_keys=True).encode())
    for leaf in leaves:
        hasher.update(np.ascontiguousarray(leaf).data)
    return hasher.digest()


# The mailbox

_LOOK_SECONDS = 0.5  # between two looks at who is connected
GRACE_SECONDS = 3.0  # for a party that is not connected to come back, where the others suffice
_LONGEST_REASON = 400  # characters
_MOST_RECORDS = 2**31 - 1
Question = tuple[Mapping[str, Any], Mapping[str, np.ndarray | bytes]]  # fields and arrays
Take = Callable[[str, SignedMessage], None]  # what is done with a party's answer
_VERSIONS = ("dither", "jax", "numpy", "python")


class Transport(Protocol):
    """Messages out, answers in. An address is a number that stays with a node while the transport lives."""

    def nodes(self) -> dict[int, str]:
        """Who is connected, each with a mark that changes when it reconnects."""

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        """Send one message to each address; their ids. Where there is no id, nothing was sent."""

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        """Answers that have come; None for a message that will never be answered."""

    def pause(self) -> None:
        """Wait a little."""


class TransportRestart(Exception):
    """The transport must be restarted: it cannot reach a party that has come back."""


@dataclass
class Replies:
    """Parties by what became of a question to them. Those in none of these gave no answer."""

    counted: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)  # and why: they said so
    invalid: dict[str, str] = field(default_factory=dict)  # they sent what no honest party sends

    @property
    def reasons(self) -> dict[str, str]:
        return self.refused | self.invalid


@dataclass
class _Exchange:
    """One question to several parties, while it is open."""

    bodies: dict[str, bytes]  # party -> the message to it
    waiting: set[str]
    replies: Replies = field(default_factory=Replies)
    sent: dict[str, str] = field(default_factory=dict)  # message id -> party
    marks: dict[str, str] = field(default_factory=dict)  # party -> mark of the node it was sent to
    asked: dict[str, float] = field(default_factory=dict)  # party -> when it was asked


class Mailbox:
    """Everything the coordinator says and hears."""

    def __init__(self, transport: Transport, federation: Keyring, identity: Identity) -> None:
        self.transport, self.keyring, self._identity = transport, federation, identity
        self._public = {party.name: party.identity for party in federation.parties}
        self._address: dict[str, int] = {}
        self._marks: dict[int, str] = {}
        self._hellos: dict[str, tuple[int, str]] = {}  # message id -> address, digest of the question
        self._asked: dict[int, str] = {}  # the mark under which an address was last greeted
        self._looked = 0.0
        self.greeted: dict[str, dict[str, Any]] = {}  # party -> its hello
        self.strange = ""  # why what was heard last could not be used
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
            if fresh:
                hello = self._pack(ANYONE, "hello", {}, {})
                for at, number in self.transport.push(dict.fromkeys(fresh, hello), ttl=60.0).items():
                    self._hellos[number] = (at, digest(hello))
                self._asked |= fresh
        for number, body in self.transport.pull(list(self._hellos)) if self._hellos else []:
            address, quoted = self._hellos.pop(number)
            if body is None:  # it was lost on the way: greet again
                self._asked.pop(address, None)
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
    ) -> Replies:
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
            answered = least is not None and len(exchange.replies.counted) >= least
            if answered and time.monotonic() - seen > GRACE_SECONDS:
                break
            self.transport.pause()
        return exchange.replies

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
            message = self._read({name: self._public[name]}, body, digest(exchange.bodies[name]))
            self.bytes_up[name] = self.bytes_up.get(name, 0) + len(body)
            exchange.waiting.discard(name)
            try:
                if message is None:
                    raise FederationError(self.strange)
                if message.kind == "refused":
                    why = str(message.fields.get("why", "no reason given"))
                    exchange.replies.refused[name] = _plain(why)
                else:
                    take(name, message)
                    exchange.replies.counted.add(name)
            except (FederationError, ProtocolAbort) as error:
                exchange.replies.invalid[name] = _plain(str(error))

    def _read(self, public: Mapping[str, bytes], body: bytes, quoted: str) -> SignedMessage | None:
        try:
            return unpack(body, federation=self.keyring.id, to=SERVER, keys=public, answers=quoted)
        except FederationError as error:
            self.strange = _plain(str(error))
            return None

    def _pack(self, name: str, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
        return pack(
            self._identity,
            federation=self.keyring.id,
            kind=kind,
            sender=SERVER,
            to=name,
            fields=fields,
            arrays=arrays,
        )


def _facts(hello: SignedMessage) -> dict[str, Any] | None:
    """What a party says of itself, as far as it is asked; None where it does not say that."""
    records, theirs = hello.fields.get("records"), hello.fields.get("versions")
    if not isinstance(records, int) or isinstance(records, bool) or not 0 <= records <= _MOST_RECORDS:
        return None
    if not isinstance(theirs, dict):
        return None
    facts = {"records": records, "versions": {name: _plain(str(theirs.get(name)))[:40] for name in _VERSIONS}}
    if "epsilon" in hello.fields:  # a target of its own
        target = hello.fields["epsilon"]
        if not isinstance(target, int | float) or isinstance(target, bool) or not 0 < target < 1e300:
            return None
        facts["epsilon"] = float(target)
    return facts


def _plain(text: str) -> str:
    """A party's words as they may be shown and kept: printable, and not too many."""
    return printable(text)[:_LONGEST_REASON]
