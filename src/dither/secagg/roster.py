"""Who belongs to a federation, with which keys and under which rules: agreed once, at enrolment.

The roster quotes every member's hello, signature included, so that a server cannot put its own X25519 key beside
someone's signing key. Its digest enters every pair's seed: two clients that were shown different rosters share
nothing, even if both had confirmed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dither.errors import ProtocolAbort, SpecError
from dither.secagg import primitives
from dither.secagg.messages import MAX_CLIENTS, SERVER, Kind, Message, Reader, rebuild

_RULES = struct.Struct("<BIIII")


class Rules(NamedTuple):
    """What everyone agrees on before enrolling; a roster with other rules is refused.

    `colluders` is c, how many clients may work together with the server. `threshold` is how many answers open a
    sum; 0 takes the smallest safe number for the cohort a round begins with. `neighbours` is how many other
    clients each one shares masks with; 0 is all of them.
    """

    modulus_bits: int = 32
    threshold: int = 0
    colluders: int = 0
    min_clients: int = 2
    neighbours: int = 0

    def check(self) -> Rules:
        """Itself, or `SpecError` where the rules protect nobody."""
        if self.modulus_bits not in (32, 64):
            raise SpecError(f"modulus_bits={self.modulus_bits} is not one of 32, 64")
        if not 0 <= self.colluders <= MAX_CLIENTS:
            raise SpecError(f"colluders={self.colluders} must lie in 0 to {MAX_CLIENTS}")
        if not self.colluders + 2 <= self.min_clients <= MAX_CLIENTS:
            raise SpecError(
                f"min_clients={self.min_clients} must be at least colluders + 2 = {self.colluders + 2}: "
                "in a smaller sum the colluders would read the one client that is left"
            )
        if self.threshold and not self.colluders + 2 <= self.threshold <= MAX_CLIENTS:
            raise SpecError(f"threshold={self.threshold} must be at least colluders + 2 = {self.colluders + 2}")
        if self.neighbours < 0 or self.neighbours % 2 or self.neighbours > MAX_CLIENTS:
            raise SpecError(f"neighbours={self.neighbours} must be 0 (all) or an even number")
        return self

    def threshold_for(self, cohort_size: int) -> int:
        """How many answers open a sum in a round that begins with that many clients (2·threshold > size + c)."""
        return self.threshold or (cohort_size + self.colluders) // 2 + 1

    @property
    def word_bytes(self) -> int:
        return self.modulus_bits // 8

    def pack(self) -> bytes:
        return _RULES.pack(*self)


class Member(NamedTuple):
    """A client's public keys and its signature under them (that of its hello)."""

    id: int
    signing: bytes
    agreement: bytes
    nonce: bytes  # fresh at every enrolment, so that no roster can be shown twice
    signature: bytes

    @property
    def keys(self) -> bytes:
        return self.signing + self.agreement + self.nonce

    def check(self, federation: bytes) -> None:
        """Return if the client with this signing key signed this agreement key for this federation and id."""
        primitives.check_agreement(self.agreement)
        _check_quoted(Kind.HELLO, federation, self.id, self.keys, self.signature, self.signing)

    @classmethod
    def from_hello(cls, message: Message) -> Member:
        """The member a hello speaks of, its signature verified under the key that it brings."""
        reader = Reader(message)
        signing, agreement = reader.take(32, "the signing key"), reader.take(32, "the agreement key")
        nonce = reader.take(32, "the nonce")
        reader.done()
        primitives.check_agreement(agreement)
        message.verify(signing)
        return cls(message.sender, signing, agreement, nonce, message.signature)


@functools.lru_cache(1 << 15)  # a pure function; many clients in one process ask the same question
def _check_quoted(
    kind: Kind, federation: bytes, who: int, payload: bytes, signature: bytes, public: bytes
) -> None:
    rebuild(kind, federation, who, payload, signature).verify(public)


@dataclass(frozen=True)
class Roster:
    """All members, by ascending id."""

    federation: bytes
    rules: Rules
    members: Mapping[int, Member]

    def pack(self) -> bytes:
        listed = b"".join(struct.pack("<I", who) + m.keys + m.signature for who, m in self.members.items())
        return self.rules.pack() + struct.pack("<I", len(self.members)) + listed

    @functools.cached_property
    def digest(self) -> bytes:
        return primitives.digest(b"dither secagg roster, version 1\n", self.federation, self.pack())

    def member(self, who: int) -> Member:
        if who not in self.members:
            raise ProtocolAbort(f"client {who} is not on the roster")
        return self.members[who]

    def check_confirmation(self, who: int, signature: bytes) -> None:
        """Return if that member signed this roster's digest."""
        _check_quoted(Kind.CONFIRM, self.federation, who, self.digest, signature, self.member(who).signing)

    @classmethod
    def make(cls, federation: bytes, rules: Rules, members: Iterable[Member]) -> Roster:
        """A roster of members that were checked one by one, or `ProtocolAbort` where they do not fit together."""
        listed = sorted(members)
        if len(listed) < rules.min_clients:
            raise ProtocolAbort(f"a roster of {len(listed)} clients, min_clients is {rules.min_clients}")
        for what, values in (
            ("id", [m.id for m in listed]),
            ("signing key", [m.signing for m in listed]),
            ("agreement key", [m.agreement for m in listed]),
        ):
            if len(set(values)) < len(values):
                raise ProtocolAbort(f"two members of the roster have the same {what}")
        return cls(federation, rules, {m.id: m for m in listed})

    @classmethod
    def read(cls, message: Message) -> Roster:
        """The roster in a server's message, every quoted hello verified."""
        return _read(message.federation, bytes(message.payload))


@functools.lru_cache(8)  # as above: what a thousand simulated clients are shown is read once
def _read(federation: bytes, payload: bytes) -> Roster:
    message = rebuild(Kind.ROSTER, federation, SERVER, payload, b"")
    reader = Reader(message)
    rules = Rules(*_RULES.unpack(reader.take(_RULES.size, "the rules")))
    count = reader.number(4, "the number of members", most=MAX_CLIENTS)
    members: list[Member] = []
    for _ in range(count):
        who = reader.number(4, "an id", most=SERVER - 1)
        if members and who <= members[-1].id:
            raise ProtocolAbort(f"{message.name}: ids are not in ascending order at {who}")
        members.append(Member(who, *(reader.take(size, "a member") for size in (32, 32, 32, 64))))
    reader.done()
    for member in members:
        member.check(federation)
    return Roster.make(federation, rules, members)
