"""One attempt of one round: who is summed, who seals the sum, who shares a mask with whom.

Everything here is public and follows from the announcement, so server and clients compute it alike. The digest of
an attempt covers the roster, the round, the attempt, the threshold, the vector's length and the ids; all keys of
the attempt are derived with it. Clients that were told different things therefore share no mask, and their uploads
never sum to anything.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from dither.errors import ProtocolAbort
from dither.secagg import graph, primitives
from dither.secagg.messages import MAX_ATTEMPT, MAX_CLIENTS, MAX_DIMENSION, MAX_ROUND, SERVER, Message, Reader
from dither.secagg.roster import Roster

_FIELDS = struct.Struct("<32sIQI")


@dataclass(frozen=True)
class Cohort:
    """What an announcement says."""

    roster: Roster
    round_index: int
    attempt: int
    threshold: int
    dimension: int
    ids: tuple[int, ...]

    def check(self) -> Cohort:
        """Itself, or `ProtocolAbort` where summing it would protect too little."""
        rules, size = self.roster.rules, len(self.ids)
        if not (0 <= self.round_index <= MAX_ROUND and 0 <= self.attempt <= MAX_ATTEMPT):
            raise ProtocolAbort(f"round {self.round_index}, attempt {self.attempt} is out of range")
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
        if 2 * self.threshold <= size + rules.colluders:
            raise ProtocolAbort(
                f"threshold {self.threshold} is too low for a cohort of {size} with {rules.colluders} colluders: "
                f"two sums could be opened; at least {(size + rules.colluders) // 2 + 1} is safe"
            )
        if rules.neighbours and graph.disconnected(size, rules.colluders, rules.neighbours) > graph.FAILURE:
            enough = graph.degree(size, rules.colluders) or "all (0)"
            raise ProtocolAbort(
                f"neighbours={rules.neighbours} are too few for a cohort of {size} with {rules.colluders} "
                f"colluders: use {enough}"
            )
        if not 1 <= self.dimension <= MAX_DIMENSION:
            raise ProtocolAbort(f"vectors of {self.dimension} words; 1 to {MAX_DIMENSION} are possible")
        return self

    def pack(self) -> bytes:
        fields = _FIELDS.pack(self.roster.digest, self.threshold, self.dimension, len(self.ids))
        return fields + struct.pack(f"<{len(self.ids)}I", *self.ids)

    @classmethod
    def read(cls, message: Message, roster: Roster) -> Cohort:
        """The cohort in a server's announcement, checked."""
        reader = Reader(message)
        if not primitives.same(reader.view(32, "the roster's digest"), roster.digest):
            raise ProtocolAbort(f"{message.name}: it speaks of another roster")
        threshold = reader.number(4, "the threshold", most=MAX_CLIENTS)
        dimension = reader.number(8, "the vector's length", most=MAX_DIMENSION)
        count = reader.number(4, "the number of clients", most=MAX_CLIENTS)
        ids = tuple(reader.number(4, "an id", most=SERVER - 1) for _ in range(count))
        reader.done()
        return cls(roster, message.round_index, message.attempt, threshold, dimension, ids).check()

    @functools.cached_property
    def digest(self) -> bytes:
        place = struct.pack("<QI", self.round_index, self.attempt)
        return primitives.digest(b"dither secagg cohort, version 1\n", place, self.pack())

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
        """The ids in an order that everyone can compute and nobody chooses."""
        return sorted(self.ids, key=lambda who: primitives.digest(self.digest, purpose, struct.pack("<I", who)))

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
