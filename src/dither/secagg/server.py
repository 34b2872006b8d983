"""The server's side of secure aggregation: bytes in, bytes out; no sockets, no clocks, no threads.

The caller decides when to stop waiting. A refused message changes nothing; its sender may send the right one.
Uploads are added as they arrive, so the server holds one vector, however many clients there are. `save` stores the
state of the open round, but no uploads. After a restart, an attempt that was collecting starts again (send
`announcement()` again; clients answer with the same bytes), and one that was being opened is abandoned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dither.errors import ProtocolAbort
from dither.secagg import primitives, shamir
from dither.secagg.client import CIPHERTEXT_BYTES, SEAL_ENTRY
from dither.secagg.graph import Rules
from dither.secagg.messages import SERVER, Kind, Message, Reader, by_client, parse
from dither.secagg.roster import AnnouncedCohort, Member, Roster, Session


@dataclass
class _Seal:
    """What a committee member attached to its upload."""

    commitment: bytes
    commitments: dict[int, bytes]
    ciphertexts: dict[int, bytes]
    shares: dict[int, bytes] = field(default_factory=dict)  # in the clear, each the one committed to
    seed: bytes = b""  # what they join to, if that is what was committed to
    released: bool = False  # whether its maker has answered a dispute


@dataclass
class _OpenAttempt:
    """The attempt that is open."""

    cohort: AnnouncedCohort
    total: np.ndarray
    uploaded: set[int] = field(default_factory=set)
    seals: dict[int, _Seal] = field(default_factory=dict)
    unsealing: bool = False
    answers: dict[int, bytes] = field(default_factory=dict)  # to `unseal`, as they came
    over: bool = False  # opened, or a restart came between

    @classmethod
    def empty(cls, cohort: AnnouncedCohort, *, over: bool = False) -> _OpenAttempt:
        return cls(cohort, np.zeros(cohort.dimension, np.dtype(f"<u{cohort.roster.rules.word_bytes}")), over=over)


class ServerSession(Session):
    """The coordinator of a federation. `pins` (id to Ed25519 public key) is whom it enrols; None: anyone."""

    role, number = "server", SERVER

    def __init__(
        self,
        *,
        federation: bytes,
        rules: Rules,
        pins: Mapping[int, bytes] | None = None,
        signing: bytes | None = None,
    ) -> None:
        super().__init__(federation, rules, pins, signing)
        self._members: dict[int, Member] = {}
        self._confirmations: dict[int, bytes] = {}
        self._attempt: _OpenAttempt | None = None

    # Enrolment

    def hello(self, message: bytes) -> int:
        """Enrol a client; returns its id."""
        received = parse(message, federation=self.federation, expect=Kind.HELLO)
        if self.roster is not None:
            raise ProtocolAbort(f"{received.name}: the roster is closed")
        member = Member.from_hello(received)
        if self.pins is not None and self.pins.get(member.id) != member.signing:
            raise ProtocolAbort(f"client {member.id} says hello with a key that is not the pinned one")
        if self._members.get(member.id, member) != member:
            raise ProtocolAbort(f"client {member.id} is enrolled with other keys")
        for other in self._members.values():
            if other.id != member.id and {other.signing, other.agreement} & {member.signing, member.agreement}:
                raise ProtocolAbort(f"client {member.id} says hello with a key of client {other.id}")
        self._members[member.id] = member
        return member.id

    def make_roster(self) -> bytes:
        """Close the roster; the message that shows it to every client."""
        if self.roster is None:
            self.roster = Roster.make(self.federation, self.rules, self._members.values())
        return self._pack(Kind.ROSTER, self.roster.pack())

    def confirm(self, message: bytes) -> None:
        """Take a client's signature under the roster's digest."""
        roster = self._roster()
        received = parse(message, federation=self.federation, expect=Kind.CONFIRM)
        received.verify(roster.member(received.sender).signing)
        if not primitives.same(received.payload, roster.digest):
            raise ProtocolAbort(f"client {received.sender} confirms another roster")
        self._confirmations[received.sender] = received.signature

    def confirmed(self) -> bytes:
        """Everyone's signatures, for everyone."""
        roster = self._roster()
        missing = sorted(set(roster.members) - set(self._confirmations))
        if missing:
            raise ProtocolAbort(f"the roster is not confirmed by clients {_some(missing)}")
        return self._pack(
            Kind.CONFIRMED, roster.digest + b"".join(self._confirmations[who] for who in roster.members)
        )

    # Rounds

    def announce(self, round_index: int, cohort: Iterable[int], dimension: int, asked: bytes = bytes(32)) -> bytes:
        """Open a round, or the next attempt of the open one; the message for every client of the cohort, with the
        digest of what each of them is `asked`."""
        roster, before = self._roster(), self._attempt
        if set(self._confirmations) != set(roster.members):
            raise ProtocolAbort("announcement before enrolment is complete")
        ids = tuple(sorted(int(who) for who in cohort))
        attempt, threshold = 0, self.rules.threshold_for(len(ids))
        if before is not None and round_index == before.cohort.round_index:
            if before.over or before.unsealing:
                raise ProtocolAbort(
                    f"round {round_index} is over: its attempt {before.cohort.attempt} is being opened"
                )
            attempt, threshold = before.cohort.attempt + 1, before.cohort.threshold
        opened = AnnouncedCohort(roster, round_index, attempt, threshold, dimension, ids, asked)
        opened.check_after(None if before is None else before.cohort)
        opened.check()
        self._attempt = _OpenAttempt.empty(opened)
        return self.announcement()

    def announcement(self) -> bytes:
        """The announcement of the open attempt, again."""
        cohort = self._open().cohort
        return self._pack(Kind.ANNOUNCE, cohort.pack(), cohort)

    def standing(self, round_index: int) -> str:
        """Whether a round is "new", "open" (it has been announced) or "over"; for a server that was restarted."""
        newest = self._attempt
        if newest is None or newest.cohort.round_index < round_index:
            return "new"
        done = newest.cohort.round_index > round_index or newest.over or newest.unsealing
        return "over" if done else "open"

    def reannounce(self) -> bytes:
        """A new attempt with the clients whose uploads have arrived; `ProtocolAbort` if they are too few."""
        open_ = self._open()
        cohort = open_.cohort
        return self.announce(cohort.round_index, open_.uploaded, cohort.dimension, cohort.asked)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Whom the open attempt sums."""
        return self._open().cohort.ids

    @property
    def attempt(self) -> int:
        return self._open().cohort.attempt

    @property
    def missing(self) -> tuple[int, ...]:
        """Whose upload is not in."""
        open_ = self._open()
        return tuple(who for who in open_.cohort.ids if who not in open_.uploaded)

    def upload(self, message: bytes) -> None:
        """Add a client's masked vector to the sum."""
        received, open_ = self._from_member(message, Kind.UPLOAD)
        cohort, who = open_.cohort, received.sender
        if open_.over:
            raise ProtocolAbort(f"{received.name}: this attempt is over")
        if who in open_.uploaded:
            raise ProtocolAbort(f"replay: {received.name} was already received")
        reader = Reader(received, cohort.digest)
        expected = 32 + SEAL_ENTRY * len(cohort.ids) if who in cohort.committee else 0
        length = reader.number(4, "the seal's length", most=2**32 - 1)
        if length != expected:
            raise ProtocolAbort(f"{received.name}: a seal of {length} bytes, expected {expected}")
        seal = None
        if expected:
            seal = _Seal(reader.take(32, "the seal's commitment"), {}, {})
            for other in cohort.ids:
                seal.commitments[other] = reader.take(32, "a share's commitment")
                seal.ciphertexts[other] = reader.take(CIPHERTEXT_BYTES, "an encrypted share")
        vector = reader.view(cohort.dimension * self.rules.word_bytes, "the masked vector")
        reader.done()
        open_.total += np.frombuffer(vector, open_.total.dtype)
        open_.uploaded.add(who)
        if seal is not None:
            open_.seals[who] = seal

    def unseal(self) -> dict[int, bytes]:
        """Ask to open the sum: for each client of the cohort the encrypted shares that are for it."""
        open_ = self._open()
        if self.missing:
            raise ProtocolAbort(
                f"the uploads of clients {_some(self.missing)} have not arrived; reannounce without them"
            )
        cohort = open_.cohort
        open_.unsealing = True
        requests = {}
        for who in cohort.ids:
            shares = by_client((member, open_.seals[member].ciphertexts[who]) for member in cohort.committee)
            requests[who] = self._pack(Kind.UNSEAL, cohort.digest + shares, cohort)
        return requests

    def shares(self, message: bytes) -> None:
        """Take a client's answer to `unseal`."""
        received, open_ = self._from_member(message, Kind.SHARES)
        cohort, who = open_.cohort, received.sender
        if not open_.unsealing:
            raise ProtocolAbort(f"{received.name}: nothing is being unsealed")
        if who in open_.answers:
            raise ProtocolAbort(f"replay: {received.name} was already received")
        reader = Reader(received, cohort.digest)
        for member, share in reader.of_committee(cohort.committee, shamir.SHARE_BYTES, "share"):
            self._keep_share(open_, member, who, share)
        open_.answers[who] = message

    @property
    def ready(self) -> bool:
        """Whether there are enough shares of every seal, each the one that its maker committed to."""
        open_ = self._open()
        return all(len(seal.shares) >= open_.cohort.threshold for seal in open_.seals.values())

    @property
    def disputed(self) -> list[tuple[int, int]]:
        """Shares that were no use: who made it, who answered without it. One of the two lies."""
        open_ = self._open()
        return [(maker, who) for maker, seal in open_.seals.items() for who in open_.answers.keys() - seal.shares]

    def disputes(self) -> dict[int, bytes]:
        """For each maker of a seal that lacks shares: the answers without its share, for it to release them."""
        open_, requests = self._open(), {}
        for maker, seal in open_.seals.items():
            without = [message for who, message in open_.answers.items() if who not in seal.shares]
            if len(seal.shares) < open_.cohort.threshold <= len(open_.answers):
                quoted = b"".join(struct.pack("<I", len(message)) + message for message in without)
                body = open_.cohort.digest + struct.pack("<I", len(without)) + quoted
                requests[maker] = self._pack(Kind.DISPUTE, body, open_.cohort)
        return requests

    def released(self, message: bytes) -> None:
        """Take a maker's answer to its dispute."""
        received, open_ = self._from_member(message, Kind.RELEASE)
        maker = received.sender
        if maker not in open_.seals or not open_.unsealing:
            raise ProtocolAbort(f"{received.name}: nobody asked for it")
        reader = Reader(received, open_.cohort.digest)
        listed = reader.by_client(shamir.SHARE_BYTES, "share", most=len(open_.cohort.ids))
        reader.done()
        for who, share in listed:
            if who in open_.answers:
                self._keep_share(open_, maker, who, share)
        open_.seals[maker].released = True

    def liars(self) -> dict[int, str]:
        """Makers of seals that are caught in a lie, and in which. Nobody honest is among them, as long as no more
        than `colluders` clients lie: an honest maker's shares join to the seed that it committed to, and it
        releases whichever are asked for (docs/secagg.md)."""
        open_, liars = self._open(), {}
        for maker, seal in open_.seals.items():
            without = len(open_.answers.keys() - seal.shares)
            if len(seal.shares) >= open_.cohort.threshold:
                if not self._seed(open_, maker):
                    liars[maker] = "it committed to a seal that is not the one it shared"
            elif without and (seal.released or without > self.rules.colluders):
                liars[maker] = f"it made a seal that cannot be opened: {without} of its shares are useless"
        return liars

    def open(self) -> np.ndarray:
        """Take the seals off: the sum of the cohort's vectors modulo 2^k."""
        open_ = self._open()
        cohort = open_.cohort
        if not self.ready:
            raise ProtocolAbort(f"{len(open_.answers)} shares received, threshold is {cohort.threshold}")
        for maker, why in self.liars().items():
            raise ProtocolAbort(f"client {maker}: {why}")
        if not open_.over:
            keys = [cohort.seal_key(self._seed(open_, member), member) for member in cohort.committee]
            primitives.mask(open_.total, [(key, -1) for key in keys])
            open_.over = True
        return open_.total

    # Inside

    @staticmethod
    def _keep_share(open_: _OpenAttempt, maker: int, who: int, share: bytes) -> None:
        """Keep a share if it is the one that its maker committed to."""
        seal, number = open_.seals[maker], open_.cohort.number(who)
        if primitives.same(open_.cohort.commitment(maker, number, share), seal.commitments[who]):
            seal.shares[who] = share

    @staticmethod
    def _seed(open_: _OpenAttempt, maker: int) -> bytes:
        """The seed that a seal's shares join to; empty if that is not the one committed to."""
        seal, cohort = open_.seals[maker], open_.cohort
        if not seal.seed:
            shares = sorted((cohort.number(who), share) for who, share in seal.shares.items())
            with suppress(ProtocolAbort):
                seed = shamir.join(dict(shares[: cohort.threshold]), threshold=cohort.threshold)
                if primitives.same(cohort.commitment(maker, 0, seed), seal.commitment):
                    seal.seed = seed
        return seal.seed

    def _roster(self) -> Roster:
        if self.roster is None:
            raise ProtocolAbort("the roster is not closed yet")
        return self.roster

    def _open(self) -> _OpenAttempt:
        if self._attempt is None:
            raise ProtocolAbort("no round is open")
        return self._attempt

    def _from_member(self, message: bytes, kind: Kind) -> tuple[Message, _OpenAttempt]:
        """A message of this attempt by a client of its cohort."""
        open_, roster = self._open(), self._roster()
        received = parse(message, federation=self.federation, expect=kind)
        member = roster.member(received.sender)
        self._check_place(received, open_.cohort)
        if received.sender not in open_.cohort.ids:
            raise ProtocolAbort(f"{received.name}: not in this cohort")
        received.verify(member.signing)
        return received, open_

    def _own_state(self) -> dict[str, Any]:
        newest = self._attempt
        return {
            "members": list(self._members.values()),
            "confirmations": self._confirmations,
            "attempt": newest and {**newest.cohort.to_dict(), "over": newest.unsealing or newest.over},
        }

    @classmethod
    def _from_state(cls, state: Mapping[str, Any], **shared: Any) -> Self:
        session = cls(**shared)
        for who, *keys in state["members"]:
            member = Member(int(who), *map(bytes.fromhex, keys))
            member.check(session.federation)
            session._members[member.id] = member
        session._confirmations = {int(who): bytes.fromhex(saved) for who, saved in state["confirmations"].items()}
        return session

    def _take_up(self, cohort: AnnouncedCohort, saved: Mapping[str, Any]) -> None:
        self._attempt = _OpenAttempt.empty(cohort, over=bool(saved["over"]))


def _some(ids: Iterable[int]) -> str:
    """The first few of many ids."""
    listed = list(ids)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
