"""Which records a data set holds, as a keyed sketch: it shows whether two data sets share records, and reveals
nothing without the key.

Each record is a 64-bit number (`dither.data.hashing`). SipHash-2-4 (Aumasson and Bernstein 2012) maps it to one
that looks random without the key. The sketch of a data set is the K smallest of its distinct numbers
(bottom-k sampling, Cohen and Kaplan 2007): a uniform sample of its distinct records, the same ones wherever they
are met again.

How much is shared. Let t be the largest number in B's sketch (∞ if it holds all of B), b the size of that
sketch, a = |A below t| and x = |A and B below t|; x is counted over all of A, which is available at that time.
Given their counts, the records of B below t are a uniform sample of B and those of A one of A. So x/b estimates
the share of B that is in A and x/a the share of A that is in B, with variance at most p(1-p)/b and p(1-p)/a. The
larger of the two, x/m with m = min(a, b), is the share p of the smaller set.

When that is too much. If p is above 1%, at most x of m are shared with probability about P[Bin(m, 1%) <= x] or
less. So two data sets pass if x = 0, or if this probability is at most 1%. A share above 1% is then
overlooked with probability at most 1% if m >= 459 (0.99^459 = 1%), and for smaller m only if no shared
record is in the sample. If one set is r times as large as the other, m is about K/r: small parts of very large
sets do not show. If the sketch holds all of B (fewer than K records), x/m is exact and is compared with 1%
directly.

Columns that came, went or changed places. Such records share no number. So the parts of records that tell them
apart (`dither.data.parts`) have a sketch of their own, which is asked if the records share nothing. Other people
of one population have about 0.2% of these parts in common. Two data sets are taken for the same people if at
least 8 parts are shared, and surely more than 1% of them: P[Bin(m, 1%) >= x] is at most 0.1%.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dither.data.hashing import RecordHashes

K = 1024
SHARE = 0.01  # of the smaller data set: what two data sets may have in common by chance
_RISK = 0.01  # probability to overlook a larger share
_CHANCE = 0.001  # probability to see a larger share of parts where there is none
_LEAST_PARTS = 8  # one record has several
_BLOCK = 1 << 15  # numbers hashed at a time: they stay in a core's cache


class Sketch(NamedTuple):
    """The K smallest keyed numbers of the records with columns in order, of those with columns in any order (none
    if there are too many columns), and of their parts, or a sample of them (`data.hashing.RecordHashes`). Sketches
    of old have no parts (None): only with those are columns in any order compared."""

    ordered: np.ndarray
    mixed: np.ndarray
    parts: np.ndarray | None = None
    zeros: int = 0

    def encode(self) -> dict[str, str]:
        """For a JSON file."""
        numbers = {"ordered": self.ordered, "mixed": self.mixed}
        numbers |= {} if self.parts is None else {"parts": self.parts}
        texts = {name: base64.b64encode(each.astype("<u8").tobytes()).decode() for name, each in numbers.items()}
        return {**texts, **({"zeros": str(self.zeros)} if self.zeros else {})}

    @classmethod
    def decode(cls, fields: dict[str, str]) -> Sketch:
        """The inverse of `encode`."""

        def numbers(name: str) -> np.ndarray:
            return np.frombuffer(base64.b64decode(fields[name]), "<u8")

        parts = numbers("parts") if "parts" in fields else None
        return cls(numbers("ordered"), numbers("mixed"), parts, int(fields.get("zeros", 0)))


class Overlap(NamedTuple):
    """What two data sets have in common: the share of the smaller one's records, or, if `parts`, of the parts that
    tell its records apart. 0 if it may be chance. `people`: such parts are shared, or records of many columns, so
    that equal records are the same people's."""

    share: float
    parts: bool = False
    people: bool = False

    def __str__(self) -> str:
        share = f"{100 * self.share:.3g}%"
        if self.parts:
            return f"{share} of what tells the smaller one's records apart, in columns that both have"
        return f"{share} of the smaller one's records"


class Scan(NamedTuple):
    """All records of a data set gone through: its sketch, and which numbers of the known sketches it holds."""

    sketch: Sketch
    present: tuple[np.ndarray, ...]
    wide: bool = False

    def shared(self, other: Sketch) -> Overlap:
        """What is in both, as an estimate."""
        ordered, mixed = (_distinct(each) for each in (self.sketch.ordered, self.sketch.mixed))
        share = _shared(self.sketch.ordered, self.present[0], other.ordered)
        # A sketch of old: rows that only the order of their columns tells apart say nothing without it.
        if other.parts is None and 2 * mixed >= ordered:
            share = max(share, _shared(self.sketch.mixed, self.present[1], other.mixed))
        parts = _shared_parts(self.sketch, self.present[2], other)
        people = parts > 0 or (self.wide and share > 0)
        return Overlap(share, people=people) if share else Overlap(parts, parts=True, people=people)


def scan(rows: RecordHashes, key: bytes, known: Sequence[Sketch] = ()) -> Scan:
    """Sketch the records under a key of 16 bytes."""
    sketches: list[np.ndarray] = []
    present: list[np.ndarray] = []
    nothing = np.zeros(0, np.uint64)
    mixed = rows.whole[1] if len(rows.whole) > 1 else nothing
    for kind, numbers in enumerate((rows.whole[0], mixed, rows.parts)):
        stored = (nothing if each[kind] is None else each[kind] for each in known)
        wanted = np.unique(np.concatenate([nothing, *stored]))
        found = np.zeros(len(wanted), bool)
        least = nothing
        for at in range(0, len(numbers), _BLOCK):
            keyed = siphash(numbers[at : at + _BLOCK], key)
            if len(wanted):
                place = np.minimum(np.searchsorted(wanted, keyed), len(wanted) - 1)
                found[place[wanted[place] == keyed]] = True
            if len(least) == K:
                keyed = keyed[keyed < least[-1]]
            if len(keyed):
                least = np.unique(np.concatenate([least, keyed]))[:K]
        sketches.append(least)
        present.append(wanted[found])
    ordered, mixed, parts = sketches
    return Scan(Sketch(ordered, mixed, parts, rows.zeros), tuple(present), rows.wide)


def overlap(one: RecordHashes, other: RecordHashes) -> Overlap:
    """What two data sets that are both at hand have in common."""
    # All of the smaller one are looked for: of a large one's sketch it may hold none.
    small, large = sorted((one, other), key=lambda rows: rows.whole.shape[1])
    known = scan(small, bytes(16)).sketch
    return scan(large, bytes(16), [known]).shared(known)


def _distinct(least: np.ndarray) -> float:
    """How many distinct records a data set has, by the size of its K-th smallest number."""
    return float(len(least)) if len(least) < K else (K - 1) / (float(least[-1]) / 2.0**64)


def _shared(own: np.ndarray, present: np.ndarray, other: np.ndarray) -> float:
    if not len(own) or not len(other):
        return 0.0
    count = int(np.isin(other, present).sum())
    whole = len(other) < K
    below = len(own) if whole else int((own <= other[-1]).sum())
    compared = min(below, len(other))  # where `own` stops before `other` does, K of both are below
    if count == 0:
        return 0.0
    if count <= SHARE * compared:
        likely = sum(math.comb(compared, i) * SHARE**i * (1 - SHARE) ** (compared - i) for i in range(count + 1))
        if whole or likely <= _RISK:
            return 0.0
    return min(count / max(compared, 1), 1.0)


def _shared_parts(own: Sketch, present: np.ndarray, other: Sketch) -> float:
    """The share of distinctive parts that is in both; 0 if it may be chance."""
    if own.parts is None or other.parts is None or not len(own.parts) or not len(other.parts):
        return 0.0
    count = int(np.isin(other.parts, present).sum())
    last = 2.0**64 if len(other.parts) < K else float(other.parts[-1])
    below = float((own.parts <= last).sum())
    if len(own.parts) == K:
        below = max(below, K * last / float(own.parts[-1]))
    zeros = max(own.zeros, other.zeros)  # what both have looked at
    both = below / 2 ** (zeros - own.zeros), len(other.parts) / 2 ** (zeros - other.zeros)
    compared = max(round(min(both)), count)
    chance = 1 - sum(math.comb(compared, i) * SHARE**i * (1 - SHARE) ** (compared - i) for i in range(count))
    return count / compared if count >= _LEAST_PARTS and chance <= _CHANCE else 0.0


def siphash(numbers: np.ndarray, key: bytes) -> np.ndarray:
    """SipHash-2-4 of each 64-bit number (its 8 bytes, little-endian) under a key of 16 bytes."""
    k0, k1 = np.frombuffer(key, "<u8")
    state = [
        np.full(len(numbers), word, np.uint64)
        for word in (
            k0 ^ np.uint64(0x736F6D6570736575),
            k1 ^ np.uint64(0x646F72616E646F6D),
            k0 ^ np.uint64(0x6C7967656E657261),
            k1 ^ np.uint64(0x7465646279746573),
        )
    ]
    spare = np.empty(len(numbers), np.uint64)
    message: Any
    for message in (numbers, np.uint64(8 << 56)):  # the number, then its length
        state[3] ^= message
        _rounds(state, spare, 2)
        state[0] ^= message
    state[2] ^= np.uint64(0xFF)
    _rounds(state, spare, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _rounds(v: list[np.ndarray], spare: np.ndarray, count: int) -> None:
    def turn(word: np.ndarray, bits: int) -> None:
        np.right_shift(word, np.uint64(64 - bits), out=spare)
        word <<= np.uint64(bits)
        word |= spare

    for _ in range(count):
        for (a, b, x), (c, d, y) in (((0, 1, 13), (2, 3, 16)), ((2, 1, 17), (0, 3, 21))):
            v[a] += v[b]
            v[c] += v[d]
            turn(v[b], x)
            turn(v[d], y)
            v[b] ^= v[a]
            v[d] ^= v[c]
            turn(v[a], 32)
