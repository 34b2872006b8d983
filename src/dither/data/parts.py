"""Parts of records that tell them apart: two tables of the same people still share them when columns were added,
removed or changed.

A part is a subset of a record's cells, as the sum of their hashes: order and number of the other columns do not
matter. Each record has `_HALVES` parts of the cells that a hash of their own value picks, one in two. As that
looks at nothing else, k columns that were added or removed leave about 2^-k of these parts as they were. The whole
record is a part too, and in tables of up to `_LEFT_OUT` columns the record without any one of its cells.

Most parts say little: many people are 40 and married. A part of the information I = -Σ log2(share of the cell's
value in its column) is expected in n 2^-I of n other records, if columns were independent. So a part needs
I >= log2(n) + `_BITS`. No cell has more than log2(n): even people who are numbered alike in two tables would have
to agree in `_BITS` bits besides. But columns are not independent. So parts are taken in the order of I, largest
first, as long as at most `_REPEATED` of them occur in two different records of the table. By the estimate of Good
and Turing, about that share would occur in as many records of other people from the same population.

In tables of few small numbers, cells tell people apart only together with their columns. Hence parts of cells with
the names of their columns are collected as well. Columns that number the rows are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MAX_COLUMNS = 256  # wider records have no parts
_HALVES = 8
_LEFT_OUT = 16
_BITS = 8
_REPEATED = 0.002
_BINS = 16  # bits: values of a column are counted by so much of their hash
_KEPT = 1 << 18  # parts in memory: of more, those with the smallest hashes
_ROWS = 1 << 14  # records at a time


class _Found(NamedTuple):
    """Parts, a number of the record that each is of, and its information."""

    parts: np.ndarray
    records: np.ndarray
    information: np.ndarray


class Parts:
    """Collects the parts of records that come block by block; of very many, those whose hash begins with
    `zeros` zeros."""

    def __init__(self, width: int, names: Sequence[str] | None = None) -> None:
        self.zeros = 0
        self._salts = None if names is None else np.array([_salt(name) for name in names], np.uint64)
        self._factors = mix(np.arange(width, dtype=np.uint64)) | np.uint64(1)
        self._counts = np.zeros((width, 1 << _BINS), np.int32)
        self._records, self._kept = 0, 0
        self._found: list[_Found] = []

    def add(self, cells: np.ndarray) -> None:
        """Take the hashes of the cells (uint64 [columns, records], 0 if empty)."""
        for start in range(0, cells.shape[1], _ROWS):
            block = cells[:, start : start + _ROWS]
            if self._salts is not None:
                block = np.where(block == 0, block, mix(block ^ self._salts[:, None]))
            for found in self._of(block):
                self._found.append(found)
                self._kept += len(found.parts)
            if self._kept > _KEPT:
                self.zeros += 1
                self._found = [self._sampled(*self._all())]
                self._kept = len(self._found[0].parts)

    def _of(self, cells: np.ndarray) -> Iterator[_Found]:
        """The parts of some records."""
        information = self._information(cells)
        whole, known = cells.sum(axis=0), information.sum(axis=0)
        records = self._factors @ cells
        yield self._sampled(whole, records, known)
        picks = mix(cells)
        for number in range(_HALVES):
            chosen = (picks >> np.uint64(number)) & np.uint64(1)
            parts = (cells * chosen).sum(axis=0)
            kept = np.flatnonzero(_in_sample(parts, self.zeros))
            yield _Found(parts[kept], records[kept], (information[:, kept] * chosen[:, kept]).sum(axis=0))
        for column in range(len(cells) if len(cells) <= _LEFT_OUT else 0):
            yield self._sampled(whole - cells[column], records, known - information[column])

    def _information(self, cells: np.ndarray) -> np.ndarray:
        """-log2 of the share of each value among those of its column so far."""
        self._records += cells.shape[1]
        bins = (cells >> np.uint64(64 - _BINS)).astype(np.int64)
        shares = np.empty(cells.shape, np.float32)
        for counts, places, row in zip(self._counts, bins, shares, strict=True):
            counts += np.bincount(places, minlength=1 << _BINS).astype(np.int32)
            row[:] = counts[places]
        shares[cells == 0] = self._records
        information: np.ndarray = np.log2(np.float32(self._records) / shares)
        return information

    def _sampled(self, parts: np.ndarray, records: np.ndarray, information: np.ndarray) -> _Found:
        kept = _in_sample(parts, self.zeros)
        return _Found(parts[kept], records[kept], information[kept])

    def _all(self) -> _Found:
        return _Found(*(np.concatenate(each) for each in zip(*self._found, strict=True)))

    def distinctive(self) -> np.ndarray:
        """The parts that tell records apart."""
        if not self._kept:
            return np.zeros(0, np.uint64)
        parts, records, information = self._all()
        order = np.argsort(parts)
        parts, records = parts[order], records[order]
        starts = np.flatnonzero(np.append(True, parts[1:] != parts[:-1]))
        counts = np.diff(np.append(starts, len(parts)))
        other = np.append(False, records[1:] != records[:-1])
        other[starts] = False
        repeated = np.logical_or.reduceat(other, starts)
        parts, information = parts[starts], information[order[starts]]
        order = np.argsort(-information, kind="stable")
        share = np.cumsum((counts * repeated)[order]) / np.cumsum(counts[order])
        enough = information[order] >= np.log2(self._records) + _BITS
        taken = np.flatnonzero(enough & (share <= _REPEATED))
        return parts[np.sort(order[: taken[-1] + 1])] if len(taken) else parts[:0]


def numbers_rows(codes: np.ndarray) -> bool:
    """Whether a column of numbers (as the bits of float32) counts the rows: whole numbers, each once, hardly any
    left out."""
    if len(codes) < 2 or codes.max() >= 2**32:
        return False
    values = codes.astype(np.uint32).view(np.float32)
    low, high = float(values.min()), float(values.max())
    if not high - low < 2 * len(codes) or (values != np.floor(values)).any():
        return False
    return int(np.bincount((values - np.float32(low)).astype(np.int64)).max()) == 1


def sample(parts: np.ndarray, zeros: int) -> np.ndarray:
    """Those whose hash begins with so many zeros: of two tables the same ones."""
    kept: np.ndarray = parts[_in_sample(parts, zeros)]
    return kept


def _in_sample(parts: np.ndarray, zeros: int) -> np.ndarray:
    return mix(parts) <= np.uint64((2**64 - 1) >> zeros)


def mix(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), after its step."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def _salt(name: str) -> int:
    plain = " ".join(name.split()).lower()
    return int.from_bytes(
        hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )
