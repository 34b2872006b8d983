"""Who belongs to a federation, with which keys, agreed once; who is in one sum; and what
both sides of the protocol have in common (`Session`).

The roster quotes every member's hello, signature included, so that a server cannot put its own X25519 key beside
someone's signing key. Its digest enters every pair's seed: two clients that were shown different rosters share
nothing, even if both had confirmed.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from dither.errors import ConfigError, ProtocolAbort, SpecError
from dither.secagg import primitives
from dither.secagg.graph import MAX_CLIENTS, Rules
from dither.secagg.messages import (
    MAX_ATTEMPT,
    MAX_DIMENSION,
    MAX_ROUND,
    SERVER,
    Kind,
    Message,
    Reader,
    pack,
    rebuild,
)

_RULES = struct.Struct("<BIIII")
_COHORT = struct.Struct("<32s32sIQI")
_STATE_VERSION = 2


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
        """The member that a hello describes, with its signature verified under the key that it brings."""
        reader = Reader(message)
        signing, agreement = reader.take(32, "the signing key"), reader.take(32, "the agreement key")
        member = cls(message.sender, signing, agreement, reader.take(32, "the nonce"), message.signature)
        reader.done()
        member.check(message.federation)
        return member


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
        return _RULES.pack(*self.rules) + struct.pack("<I", len(self.members)) + listed

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
        """A roster of members that were checked one by one, or `ProtocolAbort` if they do not fit together."""
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


@functools.lru_cache(8)  # as above: what a thousand simulated clients are shown is read once
def read_roster(federation: bytes, payload: bytes) -> Roster:
    """The roster in a server's message, every quoted hello verified."""
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


@dataclass(frozen=True)
class AnnouncedCohort:
    """One attempt of one round: who is summed, who seals the sum, who shares a mask with whom.

    All of it is public and follows from the announcement, so server and clients compute it alike. The digest
    covers the roster, the round, the attempt, the threshold, the vector's length, the ids and `asked`, the digest
    of what the clients were asked; all keys of the attempt are derived with it. Clients that were sent different
    announcements therefore share no mask, and their uploads never sum to anything.
    """

    roster: Roster
    round_index: int
    attempt: int
    threshold: int
    dimension: int
    ids: tuple[int, ...]
    asked: bytes = bytes(32)

    def __str__(self) -> str:
        return f"round {self.round_index}, attempt {self.attempt}"

    def check(self) -> AnnouncedCohort:
        """Itself, or `ProtocolAbort` where summing it would protect too little."""
        rules, size = self.roster.rules, len(self.ids)
        if not (0 <= self.round_index <= MAX_ROUND and 0 <= self.attempt <= MAX_ATTEMPT):
            raise ProtocolAbort(f"{self} is out of range")
        if list(self.ids) != sorted(set(self.ids)):
            raise ProtocolAbort("the cohort's ids are not in strictly ascending order")
        for who in self.ids:
            self.roster.member(who)
        if size < 2:
            raise ProtocolAbort(f"a cohort of {size}: the sum would be the client's own vector")
        if size < rules.min_clients:
            raise ProtocolAbort(f"a cohort of {size} clients, min_clients is {rules.min_clients}")
        if rules.threshold and self.threshold != rules.threshold:
            raise ProtocolAbort(f"threshold {self.threshold}, the rules say {rules.threshold}")
        if self.threshold > size:
            raise ProtocolAbort(f"a cohort of {size} clients, threshold is {self.threshold}")
        try:
            rules.check_sum(size, self.threshold)
        except SpecError as error:
            raise ProtocolAbort(str(error)) from None
        if not 1 <= self.dimension <= MAX_DIMENSION:
            raise ProtocolAbort(f"vectors of {self.dimension} words; 1 to {MAX_DIMENSION} are possible")
        return self

    def check_after(self, before: AnnouncedCohort | None) -> None:
        """`ProtocolAbort` unless it may follow the newest attempt so far: as the first one of a later round, or as
        the next one of the same round, for fewer of its clients."""
        if before is None or self.round_index > before.round_index:
            if self.attempt:
                raise ProtocolAbort(f"wrong attempt: {self}, a round begins with attempt 0")
            return
        if self.round_index < before.round_index:
            raise ProtocolAbort(
                f"wrong round: {self.round_index} is over after {before}: round numbers must increase"
            )
        if self.attempt <= before.attempt:
            raise ProtocolAbort(f"wrong attempt: {self.attempt} is over, the newest is {before}")
        if self.attempt > before.attempt + 1:  # who chose the number would choose committee and ring
            raise ProtocolAbort(f"wrong attempt: {self} comes after attempt {before.attempt}")
        added = set(self.ids) - set(before.ids)
        if added:
            raise ProtocolAbort(f"client {min(added)} joins in {self}: a later attempt may only lose clients")
        if len(self.ids) == len(before.ids):
            raise ProtocolAbort(f"{self} loses nobody: it would only change the committee")
        fixed = (self.threshold, self.dimension, self.asked)
        if fixed != (before.threshold, before.dimension, before.asked):
            raise ProtocolAbort(f"{self} changes the round's threshold or length, or what is asked")

    def to_dict(self) -> dict[str, Any]:
        """All but the roster, as a session saves it."""
        place = {"round": self.round_index, "number": self.attempt}
        fixed = {"threshold": self.threshold, "dimension": self.dimension, "asked": self.asked}
        return {**place, **fixed, "ids": self.ids}

    @classmethod
    def from_dict(cls, roster: Roster, saved: Mapping[str, Any]) -> AnnouncedCohort:
        keys = ("round", "number", "threshold", "dimension")
        round_index, attempt, threshold, dimension = (int(saved[key]) for key in keys)
        ids = tuple(int(who) for who in saved["ids"])
        asked = bytes.fromhex(saved["asked"])
        return cls(roster, round_index, attempt, threshold, dimension, ids, asked).check()

    def pack(self) -> bytes:
        fields = _COHORT.pack(self.roster.digest, self.asked, self.threshold, self.dimension, len(self.ids))
        return fields + struct.pack(f"<{len(self.ids)}I", *self.ids)

    @classmethod
    def read(cls, message: Message, roster: Roster) -> AnnouncedCohort:
        """The cohort in a server's announcement, checked."""
        reader = Reader(message, roster.digest)
        asked = reader.take(32, "the digest of what is asked")
        threshold = reader.number(4, "the threshold", most=MAX_CLIENTS)
        dimension = reader.number(8, "the vector's length", most=MAX_DIMENSION)
        count = reader.number(4, "the number of clients", most=MAX_CLIENTS)
        ids = tuple(reader.number(4, "an id", most=SERVER - 1) for _ in range(count))
        reader.done()
        return cls(roster, message.round_index, message.attempt, threshold, dimension, ids, asked).check()

    @functools.cached_property
    def digest(self) -> bytes:
        place = struct.pack("<QI", self.round_index, self.attempt)
        return primitives.digest(b"dither secagg cohort, version 2\n", place, self.pack())

    @functools.cached_property
    def committee(self) -> tuple[int, ...]:
        """The colluders + 1 clients that seal the sum, by ascending id: at least one of them is honest."""
        return tuple(sorted(self._shuffled(b"committee")[: self.roster.rules.colluders + 1]))

    def number(self, who: int) -> int:
        """Which share of a seal is that client's: 1 to the cohort's size."""
        return self._places[who] + 1

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {who: place for place, who in enumerate(self.ids)}

    def neighbours(self, who: int) -> tuple[int, ...]:
        """Who shares a mask with this client (Bell et al. 2020: a ring in random order, k/2 on either side)."""
        half = self.roster.rules.neighbours // 2
        if not half or 2 * half >= len(self.ids) - 1:
            return tuple(other for other in self.ids if other != who)
        ring, place = self._ring
        here, size = place[who], len(ring)
        return tuple(ring[(here + step) % size] for step in (*range(-half, 0), *range(1, half + 1)))

    @functools.cached_property
    def _ring(self) -> tuple[list[int], dict[int, int]]:
        ring = self._shuffled(b"graph")
        return ring, {who: place for place, who in enumerate(ring)}

    def _shuffled(self, purpose: bytes) -> list[int]:
        """The ids in an order that everyone can compute and nobody chooses: not by what is asked, either."""
        place = replace(self, asked=bytes(32)).digest
        return sorted(self.ids, key=lambda who: primitives.digest(place, purpose, struct.pack("<I", who)))

    # Keys of this attempt, from what two clients share (or from a seal's seed)

    def mask_key(self, pair_seed: bytes) -> bytes:
        """The stream that the lower id adds and the higher subtracts (errata C5: one seed and a sign rule)."""
        return primitives.expand(pair_seed, b"dither secagg v1 mask\n" + self.digest)

    def share_key(self, pair_seed: bytes, sender: int, receiver: int) -> bytes:
        return primitives.expand(pair_seed, b"dither secagg v1 share\n" + self.share_context(sender, receiver))

    def share_context(self, sender: int, receiver: int) -> bytes:
        """What an encrypted share is bound to: federation, round, attempt, ids (by the digest), and its way."""
        return self.roster.federation + self.digest + struct.pack("<II", sender, receiver)

    def seal_key(self, seed: bytes, member: int) -> bytes:
        return primitives.expand(seed, b"dither secagg v1 seal\n" + self.digest + struct.pack("<I", member))

    def commitment(self, member: int, number: int, secret: bytes) -> bytes:
        """Of a share (its number from 1), or of the seed itself (number 0). Hides what has 256 bits of entropy."""
        return primitives.digest(
            b"dither secagg commitment, version 1\n", self.digest, struct.pack("<II", member, number), secret
        )


class Session:
    """What a client and the server have in common: their federation, its rules, a signing key and a roster; and a
    state that survives a restart.

    A client's state holds its private keys and, while a round is open, the seed of its seal: anyone who reads it
    can read what the client masks. Keep it as you would keep a TLS key. Store the newest state before a message
    leaves the process, and never restore an older one: the rules protect a client only as far as its state
    remembers. A server's state holds public keys alone, because run folders are passed on.
    """

    role: ClassVar[str]
    number: int  # as the sender of messages

    def __init__(
        self, federation: bytes, rules: Rules, pins: Mapping[int, bytes] | None, signing: bytes | None
    ) -> None:
        if len(federation) != 32:
            raise ProtocolAbort(f"a federation's id has 32 bytes, not {len(federation)}")
        self.federation, self.rules = federation, rules.check()
        self.pins = None if pins is None else dict(pins)
        self.signing = primitives.SigningKey(signing or primitives.fresh_key())
        self.roster: Roster | None = None

    def save(self) -> bytes:
        """All that `load` needs, with a checksum."""
        state = {
            "dither-secagg": self.role,
            "version": _STATE_VERSION,
            "federation": self.federation,
            "rules": self.rules,
            "pins": self.pins,
            "roster": self.roster and self.roster.pack(),
            **self._own_state(),
        }
        body = json.dumps(_as_json(state)).encode()
        return body + b"\n" + primitives.digest(body).hex().encode()

    @classmethod
    def load(cls, data: bytes, signing: bytes | None = None) -> Self:
        """The session as it was when `save` was called. A server's private key is not saved: it is `signing`."""
        try:
            body, _, checksum = data.partition(b"\n")  # without one in a state of an earlier version
            if checksum and primitives.digest(body).hex().encode() != checksum:
                raise ProtocolAbort(f"the saved state of the {cls.role} (secagg.json) is damaged: start a new run")
            state = json.loads(body)
            if not isinstance(state, dict) or state.get("dither-secagg") != cls.role:
                raise ProtocolAbort(f"this is not the saved state of a {cls.role}")
            if state.get("version") != _STATE_VERSION:
                raise ProtocolAbort(f"state of version {state.get('version')!r}, this is version {_STATE_VERSION}")
            pins = state["pins"]
            session = cls._from_state(
                state,
                federation=bytes.fromhex(state["federation"]),
                rules=Rules(*state["rules"]),
                pins=None if pins is None else {int(who): bytes.fromhex(key) for who, key in pins.items()},
                signing=signing or bytes.fromhex(state["signing"]),
            )
            if (roster := state["roster"]) is not None:
                session.roster = read_roster(session.federation, bytes.fromhex(roster))
            if (attempt := state["attempt"]) is not None and session.roster is not None:
                session._take_up(AnnouncedCohort.from_dict(session.roster, attempt), attempt)
            return session
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ProtocolAbort(f"the saved state of the {cls.role} is damaged: {error}") from error

    def _own_state(self) -> dict[str, Any]:
        """What is saved of this side alone, its newest attempt among it."""
        raise NotImplementedError

    @classmethod
    def _from_state(cls, state: Mapping[str, Any], **shared: Any) -> Self:
        raise NotImplementedError

    def _take_up(self, cohort: AnnouncedCohort, saved: Mapping[str, Any]) -> None:
        """Go on with the newest attempt."""
        raise NotImplementedError

    @staticmethod
    def _check_place(received: Message, cohort: AnnouncedCohort) -> None:
        """`ProtocolAbort` unless the message is about this attempt."""
        if received.round_index != cohort.round_index:
            raise ProtocolAbort(f"wrong round: {received.name}, the newest is {cohort}")
        if received.attempt != cohort.attempt:
            raise ProtocolAbort(f"wrong attempt: {received.name}, the newest is {cohort}")

    def _pack(self, kind: Kind, payload: bytes, cohort: AnnouncedCohort | None = None) -> bytes:
        place = {} if cohort is None else {"round_index": cohort.round_index, "attempt": cohort.attempt}
        return pack(kind, self.federation, self.number, payload, self.signing.sign, **place)


def _as_json(value: Any) -> Any:
    """Bytes as hexadecimal digits, whole numbers as keys as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, tuple | list) else value
