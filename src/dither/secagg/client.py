"""The client's side of secure aggregation: bytes in, bytes out; no sockets, no clocks, no threads.

A client keeps eight rules, whatever it is sent (why they suffice: docs/secagg.md):

1. Round numbers only increase, and the attempts of a round are numbered 0, 1, 2, ... without gaps.
2. A later attempt sums a proper subset of the clients of every earlier attempt in which it took part, with the
   same threshold and length.
3. An attempt has one vector: the same announcement again gets the same bytes, and anything else under the same
   numbers is refused.
4. It unseals only the newest attempt for which it uploaded, and only one attempt of a round.
5. After unsealing, it makes no further upload in that round.
6. It refuses a cohort without itself, with strangers, below `min_clients`, or with a threshold at which two sums
   could be opened.
7. It releases a share of its own seal only for a client that has unsealed that very attempt, with a signature.
8. It refuses an announcement with another digest than that of what it was itself asked.

`save` preserves the rules across a restart: store the state before a message leaves the process. Never restore
an old
copy: a client that forgets an upload could mask a second vector with the same stream.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dither.errors import ProtocolAbort
from dither.secagg import primitives, shamir
from dither.secagg.graph import Rules
from dither.secagg.messages import SERVER, Kind, Message, Reader, by_client, parse
from dither.secagg.primitives import AgreementKey
from dither.secagg.roster import AnnouncedCohort, Roster, Session, read_roster

CIPHERTEXT_BYTES = shamir.SHARE_BYTES + primitives.SEAL_OVERHEAD
SEAL_ENTRY = 32 + CIPHERTEXT_BYTES  # of a seal, for each client: commitment and encrypted share
NO_SHARE = b"\xff" * shamir.SHARE_BYTES  # no element of the field: what I was sent is no share


@dataclass
class _AnsweredAttempt:
    """The newest attempt this client uploaded for: enough to make the same upload again, and no other."""

    cohort: AnnouncedCohort
    plaintext: bytes  # the vector's digest
    seed: bytes  # of this client's seal, and the seal; both empty outside the committee
    seal: bytes
    unsealed: bool = False


class ClientSession(Session):
    """One member of a federation.

    `server` is the server's Ed25519 public key, which must be known from elsewhere. So are `pins`, the Ed25519 key
    of each member by its id: a roster must show these and nobody else. None takes whom the server brings.
    """

    role = "client"

    # reason: who one is, whom one trusts, and keys that tests and restarts bring
    def __init__(
        self,
        who: int,
        *,
        federation: bytes,
        server: bytes,
        rules: Rules,
        pins: Mapping[int, bytes] | None = None,
        signing: bytes | None = None,
        agreement: bytes | None = None,
    ) -> None:
        if not 0 <= who < SERVER:
            raise ProtocolAbort(f"client id {who} is not in 0 to {SERVER - 1}")
        super().__init__(federation, rules, pins, signing)
        self.who = self.number = who
        self.server = server
        self.agreement = AgreementKey(agreement or primitives.fresh_key())
        # With a fresh nonce an old roster shows other keys than these: who enrols anew with the same keys but
        # without its state shares new seeds with everyone, and masks no second vector with a stream it has used.
        self.nonce = primitives.fresh_key()
        self.enrolled = False
        self._attempt: _AnsweredAttempt | None = None
        self._seeds: dict[int, bytes] = {}

    @property
    def place(self) -> tuple[int, int]:
        """The newest round and attempt that this client uploaded for; (-1, 0) before the first."""
        newest = self._attempt
        return (-1, 0) if newest is None else (newest.cohort.round_index, newest.cohort.attempt)

    # Enrolment

    def hello(self) -> bytes:
        """My public keys, for the server."""
        return self._pack(Kind.HELLO, self._keys)

    def confirm(self, message: bytes) -> bytes:
        """Check the roster, and sign its digest."""
        roster = read_roster(self.federation, bytes(self._from_server(message, Kind.ROSTER).payload))
        if roster.rules != self.rules:
            raise ProtocolAbort(f"the roster's rules {roster.rules} are not those agreed on, {self.rules}")
        shown = roster.member(self.who)
        if shown.keys != self._keys:
            raise ProtocolAbort(f"the roster shows keys for client {self.who} that are not its own")
        if self.pins is not None:
            for who, public in self.pins.items():
                if roster.member(who).signing != public:
                    raise ProtocolAbort(f"client {who} is on the roster with a key that is not the pinned one")
            others = set(roster.members) - set(self.pins)
            if others:
                raise ProtocolAbort(f"client {min(others)} is on the roster, but not pinned")
        if self.roster is not None and self.roster.digest != roster.digest:
            raise ProtocolAbort("a second roster: this client confirmed another one")
        self.roster = roster
        return self._pack(Kind.CONFIRM, roster.digest)

    def confirmed(self, message: bytes) -> None:
        """Check that every member signed the digest of the roster that this client was shown."""
        if self.roster is None:
            raise ProtocolAbort("confirmations arrived before a roster")
        reader = Reader(self._from_server(message, Kind.CONFIRMED), self.roster.digest)
        signatures = {who: reader.take(primitives.SIGNATURE_BYTES, "a signature") for who in self.roster.members}
        reader.done()
        for who, signature in signatures.items():
            self.roster.check_confirmation(who, signature)
        self.enrolled = True

    # Rounds

    def announced(self, message: bytes, asked: bytes = bytes(32)) -> AnnouncedCohort:
        """What an announcement asks for, if this client would upload for it. Changes nothing."""
        return self._accept(message, asked)[0]

    def upload(self, message: bytes, vector: np.ndarray, asked: bytes = bytes(32)) -> bytes:
        """The vector, masked for the announced cohort, and sealed if this client is of the committee. It answers
        what has the digest `asked`."""
        cohort, answered = self._accept(message, asked)
        words = np.dtype(f"<u{self.rules.word_bytes}")
        if not isinstance(vector, np.ndarray) or vector.dtype != words or vector.shape != (cohort.dimension,):
            given = f"{vector.dtype} {vector.shape}" if isinstance(vector, np.ndarray) else type(vector).__name__
            raise ProtocolAbort(
                f"the vector is {given}, but {cohort.dimension} words of {words.name} were announced"
            )
        masked = np.array(vector, words)  # a copy
        plaintext = primitives.digest(masked.data.cast("B"))
        if answered is not None and not primitives.same(answered.plaintext, plaintext):
            raise ProtocolAbort(f"{cohort} was answered with another vector")
        streams = [
            (cohort.mask_key(self._pair_seed(other)), 1 if self.who < other else -1)
            for other in cohort.neighbours(self.who)
        ]
        if answered is None:
            seed = primitives.fresh_key() if self.who in cohort.committee else b""
            answered = _AnsweredAttempt(cohort, plaintext, seed, self._seal(cohort, seed) if seed else b"")
        if answered.seed:
            streams.append((cohort.seal_key(answered.seed, self.who), 1))
        primitives.mask(masked, streams)
        seal = struct.pack("<I", len(answered.seal)) + answered.seal
        answer = self._pack(Kind.UPLOAD, b"".join((cohort.digest, seal, masked.data.cast("B"))), cohort)
        self._attempt = answered
        return answer

    def unseal(self, message: bytes) -> bytes:
        """My shares of the committee's seals: with enough of them the server can open this attempt's sum."""
        newest, _, reader = self._about_newest(message, Kind.UNSEAL)
        cohort, shares = newest.cohort, []
        for member, ciphertext in reader.of_committee(cohort.committee, CIPHERTEXT_BYTES, "encrypted share"):
            try:
                share = self._decrypt(cohort, ciphertext, member, self.who)
                shamir.read(share)
            except ProtocolAbort:
                share = NO_SHARE
            shares.append((member, share))
        newest.unsealed, newest.seed = True, b""  # what is not needed any more is forgotten
        return self._pack(Kind.SHARES, cohort.digest + by_client(shares), cohort)

    def release(self, message: bytes) -> bytes:
        """Shares of my own seal for those who could not use what I sent them: the server can then check them."""
        newest, received, reader = self._about_newest(message, Kind.DISPUTE)
        cohort = newest.cohort
        if not newest.seal:
            raise ProtocolAbort(f"{received.name}: this client sealed nothing")
        answer = []
        for _ in range(reader.number(4, "the number of answers", most=len(cohort.ids))):
            quoted = reader.take(reader.number(4, "an answer's length", most=2**32 - 1), "an answer")
            shares = parse(quoted, federation=self.federation, expect=Kind.SHARES)
            if shares.sender not in cohort.ids or not primitives.same(bytes(shares.payload[:32]), cohort.digest):
                raise ProtocolAbort(f"{received.name}: {shares.name} is not about {cohort}")
            shares.verify(self._enrolled_roster().member(shares.sender).signing)
            at = 32 + SEAL_ENTRY * cohort.number(shares.sender)
            ciphertext = newest.seal[at - CIPHERTEXT_BYTES : at]
            answer.append((shares.sender, self._decrypt(cohort, ciphertext, self.who, shares.sender)))
        reader.done()
        return self._pack(Kind.RELEASE, cohort.digest + by_client(answer), cohort)

    # Inside

    @property
    def _keys(self) -> bytes:
        return self.signing.public + self.agreement.public + self.nonce

    def _accept(self, message: bytes, asked: bytes) -> tuple[AnnouncedCohort, _AnsweredAttempt | None]:
        """The cohort of an acceptable announcement, and the attempt if it is the one already answered."""
        cohort = AnnouncedCohort.read(self._from_server(message, Kind.ANNOUNCE), self._enrolled_roster())
        if self.who not in cohort.ids:
            raise ProtocolAbort(f"client {self.who} is not in the announced cohort")
        if not primitives.same(cohort.asked, asked):
            raise ProtocolAbort(f"{cohort} is announced for something else than what this client was asked")
        newest = self._attempt
        if newest is None or cohort.round_index != newest.cohort.round_index:
            cohort.check_after(None if newest is None else newest.cohort)
            return cohort, None
        if newest.unsealed:
            raise ProtocolAbort(
                f"round {cohort.round_index} is over: this client unsealed its attempt {newest.cohort.attempt}"
            )
        if cohort.attempt == newest.cohort.attempt:
            if cohort.digest != newest.cohort.digest:
                raise ProtocolAbort(f"{cohort} was announced before with another cohort")
            return cohort, newest
        cohort.check_after(newest.cohort)
        return cohort, None

    def _about_newest(self, message: bytes, kind: Kind) -> tuple[_AnsweredAttempt, Message, Reader]:
        """A message about the newest attempt that this client uploaded for, read up to its digest."""
        received, newest = self._from_server(message, kind), self._attempt
        if newest is None:
            raise ProtocolAbort(f"{kind.name.lower()} before any upload")
        self._check_place(received, newest.cohort)
        return newest, received, Reader(received, newest.cohort.digest)

    def _decrypt(self, cohort: AnnouncedCohort, ciphertext: bytes, sender: int, receiver: int) -> bytes:
        """The share that one made for the other; this client is one of them."""
        other = sender if receiver == self.who else receiver
        return primitives.decrypt(
            cohort.share_key(self._pair_seed(other), sender, receiver),
            ciphertext,
            cohort.share_context(sender, receiver),
            f"client {sender}'s share for client {receiver}",
        )

    def _seal(self, cohort: AnnouncedCohort, seed: bytes) -> bytes:
        """The commitment to a seal's seed; for each client a commitment to its share, and the share encrypted."""
        shares = shamir.split(seed, shares=len(cohort.ids), threshold=cohort.threshold)
        parts = [cohort.commitment(self.who, 0, seed)]
        for who, share in zip(cohort.ids, shares, strict=True):
            key = cohort.share_key(self._pair_seed(who), self.who, who)
            parts.append(cohort.commitment(self.who, cohort.number(who), share))
            parts.append(primitives.encrypt(key, share, cohort.share_context(self.who, who)))
        return b"".join(parts)

    def _pair_seed(self, other: int) -> bytes:
        """256 bits that only this client and the other can compute (with itself: only this client)."""
        if other not in self._seeds:
            roster = self._enrolled_roster()
            low, high = sorted((self.who, other))
            info = b"dither secagg v1 pair\n" + roster.federation + struct.pack("<II", low, high)
            secret = self.agreement.shared(roster.member(other).agreement)
            self._seeds[other] = primitives.hkdf(secret, info, salt=roster.digest)
        return self._seeds[other]

    def _enrolled_roster(self) -> Roster:
        if self.roster is None or not self.enrolled:
            raise ProtocolAbort("announcement before enrolment is complete")
        return self.roster

    def _from_server(self, message: bytes, kind: Kind) -> Message:
        received = parse(message, federation=self.federation, expect=kind)
        received.verify(self.server)
        return received

    def _own_state(self) -> dict[str, Any]:
        attempt: dict[str, Any] | None = None
        if self._attempt is not None:
            attempt = {**vars(self._attempt), **self._attempt.cohort.to_dict()}
            del attempt["cohort"]
        keys = {"signing": self.signing.private, "agreement": self.agreement.private, "nonce": self.nonce}
        return {"who": self.who, "server": self.server, "enrolled": self.enrolled, "attempt": attempt, **keys}

    @classmethod
    def _from_state(cls, state: Mapping[str, Any], **shared: Any) -> Self:
        server, agreement, nonce = (bytes.fromhex(state[key]) for key in ("server", "agreement", "nonce"))
        session = cls(int(state["who"]), server=server, agreement=agreement, **shared)
        session.nonce, session.enrolled = nonce, bool(state["enrolled"])
        return session

    def _take_up(self, cohort: AnnouncedCohort, saved: Mapping[str, Any]) -> None:
        plaintext, seed, seal = (bytes.fromhex(saved[key]) for key in ("plaintext", "seed", "seal"))
        self._attempt = _AnsweredAttempt(cohort, plaintext, seed, seal, bool(saved["unsealed"]))
