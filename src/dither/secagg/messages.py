"""Every message as bytes: a fixed header, a payload, a signature over both.

    offset  bytes  what (integers are little-endian)
         0      4  magic "DSAG"
         4      1  version of the protocol, 2
         5      1  kind (below)
         6     32  federation: its id
        38      8  round          0 while enrolling
        46      4  attempt        0 while enrolling
        50      4  sender         a client's id, or 2^32 - 1 for the server
        54      8  payload's length
        62      n  payload
      62+n     64  Ed25519 signature by the sender

What is signed is a label and the SHA-256 digest of all that stands before the signature: a vector of megabytes is
read once to sign it (plain Ed25519 reads it twice) and by the faster hash. There is one way to write each message;
`parse` takes no other, and leaves no byte unread. Whatever is wrong raises `ProtocolAbort` with the reason.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dither.errors import ProtocolAbort
from dither.secagg import primitives, shamir
from dither.secagg.graph import MAX_CLIENTS

MAGIC = b"DSAG"
VERSION = 2
SERVER = 2**32 - 1  # the server's sender number; clients are below
MAX_DIMENSION = 1 << 30
MAX_ROUND = 2**63 - 1
MAX_ATTEMPT = 2**31 - 1

_HEADER = struct.Struct("<4sBB32sQIIQ")
HEADER_BYTES = _HEADER.size
_LABEL = b"dither secagg message, version 1\n"


class Kind(enum.IntEnum):
    """What a message is for. Client to server: odd; server to clients: even."""

    HELLO = 1  # my public keys
    ROSTER = 2  # everyone's public keys
    CONFIRM = 3  # the digest of the roster I was shown
    CONFIRMED = 4  # everyone's signature under that digest
    UPLOAD = 5  # a masked vector; from a committee member also encrypted shares of its seal
    ANNOUNCE = 6  # who is summed in this attempt
    SHARES = 7  # my shares of the committee's seals, in the clear
    UNSEAL = 8  # the encrypted shares that are for you
    RELEASE = 9  # shares of my own seal, in the clear, for those who could not use theirs
    DISPUTE = 10  # the answers of those who could not use your share


# The largest payload of each kind. The state machines know the exact length where there is one.
_LARGEST = {
    Kind.HELLO: 96,
    Kind.ROSTER: 64 + 164 * MAX_CLIENTS,
    Kind.CONFIRM: 32,
    Kind.CONFIRMED: 32 + 64 * MAX_CLIENTS,
    Kind.UPLOAD: 36 + 8 * MAX_DIMENSION + 93 * MAX_CLIENTS + 32,
    Kind.ANNOUNCE: 80 + 4 * MAX_CLIENTS,
    Kind.SHARES: 36 + 37 * MAX_CLIENTS,
    Kind.UNSEAL: 36 + 65 * MAX_CLIENTS,
    Kind.RELEASE: 36 + 37 * MAX_CLIENTS,
    Kind.DISPUTE: 1 << 30,
}


class Message(NamedTuple):
    """A parsed message whose signature is still to be checked, by `verify`."""

    kind: Kind
    federation: bytes
    round_index: int
    attempt: int
    sender: int
    payload: memoryview
    signature: bytes
    signed: bytes

    @property
    def name(self) -> str:
        who = "the server" if self.sender == SERVER else f"client {self.sender}"
        return f"{self.kind.name.lower()} of {who}, round {self.round_index}, attempt {self.attempt}"

    def verify(self, public: bytes) -> None:
        """Return if the sender holds the private half of this key."""
        primitives.verify(public, self.signature, self.signed, f"the sender of this {self.name}")


# reason: a message's header, and what it carries
def pack(
    kind: Kind,
    federation: bytes,
    sender: int,
    payload: bytes,
    sign: Callable[[bytes], bytes],
    *,
    round_index: int = 0,
    attempt: int = 0,
) -> bytes:
    """A message, signed."""
    header = _header(kind, federation, sender, len(payload), round_index, attempt)
    return b"".join((header, payload, sign(_LABEL + primitives.digest(header, payload))))


def rebuild(kind: Kind, federation: bytes, sender: int, payload: bytes, signature: bytes) -> Message:
    """Someone else's enrolment message from its parts: what a roster quotes is verified like the original."""
    header = _header(kind, federation, sender, len(payload), 0, 0)
    signed = _LABEL + primitives.digest(header, payload)
    return Message(kind, federation, 0, 0, sender, memoryview(payload), signature, signed)


def _header(kind: Kind, federation: bytes, sender: int, length: int, round_index: int, attempt: int) -> bytes:
    if not (0 <= round_index <= MAX_ROUND and 0 <= attempt <= MAX_ATTEMPT):
        raise ProtocolAbort(f"round {round_index}, attempt {attempt} is out of range")
    return _HEADER.pack(MAGIC, VERSION, kind, federation, round_index, attempt, sender, length)


def parse(data: bytes, *, federation: bytes, expect: Kind) -> Message:
    """The message, of the kind that is due, or `ProtocolAbort`. The signature is not looked at yet."""
    if not isinstance(data, bytes):
        raise ProtocolAbort(f"a message is bytes, not {type(data).__name__}")
    if len(data) < HEADER_BYTES + primitives.SIGNATURE_BYTES:
        raise ProtocolAbort(f"truncated: {len(data)} bytes are less than header and signature")
    magic, version, number, whose, round_index, attempt, sender, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolAbort(f"not a secure-aggregation message: it begins with {magic!r}")
    if version != VERSION:
        raise ProtocolAbort(f"protocol version {version}, this is version {VERSION}")
    try:
        kind = Kind(number)
    except ValueError:
        raise ProtocolAbort(f"unknown kind of message: {number}") from None
    if kind != expect:
        raise ProtocolAbort(f"got {kind.name.lower()}, expected {expect.name.lower()}")
    if whose != federation:
        raise ProtocolAbort(f"{kind.name.lower()} of another federation, {whose.hex()[:16]}…")
    if (sender == SERVER) != (kind % 2 == 0):
        only = "the server sends" if kind % 2 == 0 else "clients send"
        raise ProtocolAbort(f"{kind.name.lower()} with sender {sender}: only {only} it")
    if length > _LARGEST[kind]:
        raise ProtocolAbort(f"oversized: {kind.name.lower()} with {length} bytes, at most {_LARGEST[kind]}")
    expected = HEADER_BYTES + length + primitives.SIGNATURE_BYTES
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "oversized"
        raise ProtocolAbort(f"{what}: {kind.name.lower()} has {len(data)} bytes, its header says {expected}")
    if round_index > MAX_ROUND or attempt > MAX_ATTEMPT or (kind <= Kind.CONFIRMED and (round_index or attempt)):
        raise ProtocolAbort(f"{kind.name.lower()} with round {round_index}, attempt {attempt}: out of range")
    end = HEADER_BYTES + length
    signed = _LABEL + primitives.digest(memoryview(data)[:end])
    return Message(
        kind, whose, round_index, attempt, sender, memoryview(data)[HEADER_BYTES:end], data[end:], signed
    )


class Reader:
    """Reads a payload from front to back and insists that nothing is left. It begins with the `digest` of the
    roster or cohort that it is about, if one is expected."""

    def __init__(self, message: Message, digest: bytes = b"") -> None:
        self._name, self._rest = message.name, message.payload
        what = "roster" if message.kind in (Kind.CONFIRMED, Kind.ANNOUNCE) else "cohort"
        if digest and not primitives.same(self.view(32, f"the {what}'s digest"), digest):
            raise ProtocolAbort(f"{self._name}: it is about another {what}")

    def take(self, count: int, what: str) -> bytes:
        return bytes(self.view(count, what))

    def view(self, count: int, what: str) -> memoryview:
        if count > len(self._rest):
            raise ProtocolAbort(f"{self._name}: truncated, {what} needs {count} bytes, {len(self._rest)} are left")
        part, self._rest = self._rest[:count], self._rest[count:]
        return part

    def number(self, size: int, what: str, *, most: int) -> int:
        value = int.from_bytes(self.view(size, what), "little")
        if value > most:
            raise ProtocolAbort(f"{self._name}: oversized, {what} is {value}, at most {most}")
        return value

    def by_client(self, size: int, what: str, *, most: int) -> list[tuple[int, bytes]]:
        """A list of at most so many entries: a client's id, and bytes."""
        count = self.number(4, f"the number of {what}s", most=most)
        return [(self.number(4, "an id", most=SERVER - 1), self.take(size, f"a {what}")) for _ in range(count)]

    def of_committee(self, committee: tuple[int, ...], size: int, what: str) -> list[tuple[int, bytes]]:
        """The last of the payload: an entry for each member of the committee, in its order."""
        listed = self.by_client(size, what, most=len(committee))
        self.done()
        if tuple(member for member, _ in listed) != committee:
            raise ProtocolAbort(f"{self._name}: seals of {[m for m, _ in listed]}, the committee is {committee}")
        return listed

    def done(self) -> None:
        if len(self._rest):
            raise ProtocolAbort(f"{self._name}: oversized, {len(self._rest)} bytes too many")


def by_client(entries: Iterable[tuple[int, bytes]]) -> bytes:
    """A list as `Reader.by_client` reads it."""
    listed = [struct.pack("<I", who) + body for who, body in entries]
    return struct.pack("<I", len(listed)) + b"".join(listed)


def round_bytes(
    length: int, cohort_size: int, *, modulus_bits: int = 32, colluders: int = 0
) -> tuple[float, float]:
    """Bytes a client sends and receives in a round, at the mean over a cohort: the masked vector of `length`
    words, the seals of the committee, their shares on the way back, announcement and unsealing."""
    envelope, encrypted = HEADER_BYTES + primitives.SIGNATURE_BYTES, shamir.SHARE_BYTES + primitives.SEAL_OVERHEAD
    committee = colluders + 1
    seal = 32 + (32 + encrypted) * cohort_size
    upload = envelope + 32 + 4 + length * (modulus_bits // 8) + seal * committee / cohort_size
    answer = envelope + 36 + (4 + shamir.SHARE_BYTES) * committee
    announcement = envelope + 80 + 4 * cohort_size
    request = envelope + 36 + (4 + encrypted) * committee
    return upload + answer, float(announcement + request)
