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
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

K = 1024
SHARE = 0.01  # of the smaller data set: what two data sets may have in common by chance
_RISK = 0.01  # probability to overlook a larger share
_BLOCK = 1 << 15  # numbers hashed at a time: they stay in a core's cache


class Sketch(NamedTuple):
    """The K smallest keyed numbers of the records with columns in order, and of those with columns in any
    order (none if there are too many columns)."""

    ordered: np.ndarray
    mixed: np.ndarray

    def encode(self) -> dict[str, str]:
        """For a JSON file."""
        return {
            name: base64.b64encode(each.astype("<u8").tobytes()).decode() for name, each in self._asdict().items()
        }

    @classmethod
    def decode(cls, fields: dict[str, str]) -> Sketch:
        """The inverse of `encode`."""
        return cls(*(np.frombuffer(base64.b64decode(fields[name]), "<u8") for name in cls._fields))


class Scan(NamedTuple):
    """All records of a data set gone through: its sketch, and which numbers of the known sketches it holds."""

    sketch: Sketch
    present: tuple[np.ndarray, ...]

    def shared(self, other: Sketch) -> float:
        """The estimated share of the smaller data set that is in both; 0 if it may be chance."""
        ordered, mixed = (_distinct(each) for each in self.sketch)
        # Rows that only the order of their columns tells apart say nothing without it.
        kinds = [0, 1] if 2 * mixed >= ordered else [0]
        return max(_shared(self.sketch[kind], self.present[kind], other[kind]) for kind in kinds)


def scan(rows: np.ndarray, key: bytes, known: Sequence[Sketch] = ()) -> Scan:
    """Sketch the records `rows` (uint64 [1 or 2, records]: in order, in any order) under a key of 16 bytes."""
    sketches, present = [], []
    for kind in range(2):
        wanted = np.unique(np.concatenate([np.zeros(0, np.uint64), *(each[kind] for each in known)]))
        found = np.zeros(len(wanted), bool)
        least = np.zeros(0, np.uint64)
        numbers = rows[kind] if kind < len(rows) else rows[0, :0]
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
    return Scan(Sketch(*sketches), tuple(present))


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
