"""`MappedArray`: records that stay on disk, as rows of memory-mapped arrays, read when they are needed.

It has a shape, can be sliced and indexed like an array, and holds row numbers only; `read` fills a given array
with some of its rows. Converting it to an array in memory is refused, because that is what it exists to avoid.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dither.errors import DataError

_ROWS = 1024  # rows copied before their pages are released
_READERS = 4  # concurrent copies: a disk answers several requests in the time of one
_AROUND = 64 << 10  # bytes that the system maps around a row that is read
_NEAR = 32 << 10  # mean distance of rows in bytes up to which reading ahead pays


class MappedArray:
    """Rows of arrays on disk, one array after the other, as float32 `[records, features]`.

    Images are flattened, and divided by `scale` (255 where they are bytes), as `load_npz` does.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(self, arrays: Sequence[np.ndarray], *, scale: float = 1.0) -> None:
        self._files = [_File.of(array) for array in arrays]
        self._ends = np.append(0, np.cumsum([len(array) for array in arrays]))
        self._rows = np.arange(self._ends[-1], dtype=np.int32)
        self._scale = np.float32(scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(records, features)."""
        return len(self._rows), self._files[0].array.shape[1]

    @property
    def nbytes(self) -> int:
        """The size of the records in memory, if they were read."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice | np.ndarray) -> MappedArray:
        """Some of the records, still on disk."""
        return self._with(self._rows[rows])

    def _with(self, rows: np.ndarray) -> MappedArray:
        other = object.__new__(MappedArray)
        other.__dict__.update(self.__dict__, _rows=rows)
        return other

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise DataError(
            f"{len(self):,} records ({self.nbytes / 1e9:.3g} GB) are streamed from disk, which only `dither run` "
            "supports; set data.stream='no' to read them into memory, or use fewer records"
        )

    @staticmethod
    def concatenate(one: MappedArray, other: MappedArray) -> MappedArray:
        """The records of both, one after the other."""
        if one._files is other._files:
            return one._with(np.concatenate([one._rows, other._rows]))
        both = MappedArray([file.array for file in (*one._files, *other._files)], scale=float(one._scale))
        return both._with(np.concatenate([one._rows, other._rows + np.int32(one._ends[-1])]))

    def read(self, rows: np.ndarray, out: np.ndarray, stop: threading.Event | None = None) -> None:
        """Copy the given rows to the front of `out`; ascending rows are quickest. Once `stop` is set, the read
        ends soon with `CancelledError`."""
        chosen = self._rows[rows]
        if len(chosen) == 0:
            return
        for file in self._files:
            file.advise(chosen)
        share = max(_ROWS, -(-len(chosen) // _READERS))
        cuts = [*range(0, len(chosen), share), len(chosen)]
        if len(cuts) == 2:
            self._copy(chosen, out, stop)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            jobs = [pool.submit(self._copy, chosen[a:b], out[a:b], stop) for a, b in pairwise(cuts)]
        for job in jobs:
            job.result()

    def _copy(self, chosen: np.ndarray, out: np.ndarray, stop: threading.Event | None) -> None:
        for at in range(0, len(chosen), _ROWS):
            if stop is not None and stop.is_set():
                raise CancelledError("the read was stopped")
            some = chosen[at : at + _ROWS]
            target = out[at : at + len(some)]
            for file, (first, end) in zip(self._files, pairwise(self._ends.tolist()), strict=True):
                here = (some >= first) & (some < end)
                if here.all():
                    file.take(some - first, target)
                    break
                if here.any():
                    part = np.empty((int(here.sum()), self.shape[1]), np.float32)
                    file.take(some[here] - first, part)
                    target[here] = part
            if self._scale != 1:
                target /= self._scale


class _File(NamedTuple):
    """An array in a mapped file; `offset` is where in the map it begins."""

    array: np.ndarray
    map: mmap.mmap | None
    offset: int

    @classmethod
    def of(cls, array: np.ndarray) -> _File:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        flat = array.reshape(len(array), -1)
        if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
            return cls(flat, None, 0)
        return cls(flat, base, array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data)

    def advise(self, rows: np.ndarray) -> None:
        """Tell the system whether reading ahead pays."""
        if self.map is not None:
            span = (int(rows.max()) - int(rows.min())) * self.array.strides[0]
            self.map.madvise(mmap.MADV_NORMAL if span <= _NEAR * len(rows) else mmap.MADV_RANDOM)

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows, and release their pages."""
        if self.array.dtype == np.float32:
            np.take(self.array, rows, axis=0, out=out, mode="clip")  # "raise" would go through a copy
        else:
            out[...] = self.array[rows]
        row_bytes = self.array.strides[0]
        self.release(int(rows.min()) * row_bytes, (int(rows.max()) + 1) * row_bytes)

    def release(self, first: int, stop: int) -> None:
        """Release the pages of these bytes, which count as this process's memory until then. They stay in the
        system's cache."""
        if self.map is not None:
            first = (self.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
            margin = _AROUND // mmap.PAGESIZE * mmap.PAGESIZE
            first, stop = max(first - margin, 0), min(self.offset + stop + margin, len(self.map))
            self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)


def blocks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """All numbers of an array in file order, as blocks of whole records of about `size` bytes; the pages of a
    mapped file are released after each block."""
    file, numbers = _File.of(array), array.reshape(-1)
    record, each = int(np.prod(array.shape[1:])), array.itemsize
    step = max(size // (each * record), 1) * record
    for at in range(0, len(numbers), step):
        yield numbers[at : at + step]
        file.release(at * each, min(at + step, len(numbers)) * each)


def zeros_aligned(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Zeros aligned to 64 bytes, which JAX uses on a CPU without a copy. Memory is taken as it is filled."""
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(kind).reshape(shape)
