"""Each record as a 64-bit hash, the same however the file is written: names and order of columns, order of rows,
line ends, spelling of numbers, case and spaces of text do not matter.

A cell is the bits of its value as float32, or a hash of its text in lower case; an empty cell is 0. A record has
two hashes: the sum of its cells times a constant of each column (so that columns may be renamed), and the sum of
its cells' hashes (so that columns may change places). The second says too little where a record has many cells
of few values: above `MAX_UNORDERED_COLUMNS` there is only the first. `data.parts` hashes parts of records too (so
that columns may come and go). Nothing of this is stored: a ledger puts it through a keyed hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.data.parts import MAX_COLUMNS, Parts, mix, numbers_rows, sample
from dither.data.schema import cast_numbers
from dither.data.tables import StrPath, existing_file

if TYPE_CHECKING:
    import pandas as pd

MAX_UNORDERED_COLUMNS = 64
_EMPTY = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")  # fixed: ledgers compare hashes of all times
_BOOLEANS = {"true": "1", "false": "0"}
_BLOCK_CELLS = 1 << 20  # cells hashed at a time


def file_digest(path: StrPath) -> str:
    """SHA-256 of a file's bytes."""
    with existing_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RecordHashes(NamedTuple):
    """The hashes of records: `whole` (uint64 [1 or 2, records]: columns in order, in any order), and of the parts
    that tell them apart (`data.parts`), which are all of them or those whose hash begins with `zeros` zeros.
    `wide` records have too many columns for parts, and for two people's to be equal by chance."""

    whole: np.ndarray
    parts: np.ndarray
    zeros: int = 0
    wide: bool = False


def join_hashes(hashes: Sequence[RecordHashes]) -> RecordHashes:
    """The hashes of all records."""
    zeros = max(each.zeros for each in hashes)
    parts = np.unique(np.concatenate([each.parts for each in hashes]))
    whole, wide = np.concatenate([each.whole for each in hashes], axis=1), any(each.wide for each in hashes)
    return RecordHashes(whole, sample(parts, zeros), zeros, wide)


def hash_table(frame: pd.DataFrame) -> RecordHashes:
    """The hashes of the records of a table as it was read."""
    names, codes = list(map(str, frame.columns)), np.empty(frame.shape[::-1], np.uint64)
    for row, name in zip(codes, frame.columns, strict=True):
        row[:] = _codes(frame[name])
    hasher = RecordHasher(len(codes), names)
    step = max(_BLOCK_CELLS // max(hasher.width, 1), 1)
    for start in range(0, codes.shape[1], step):
        hasher.add(codes[:, start : start + step])
    return hasher.hashes()


def hash_arrays(x: np.ndarray, y: np.ndarray) -> RecordHashes:
    """The hashes of records and their labels: a table whose last column is the label."""
    hasher = RecordHasher(int(np.prod(x.shape[1:])) + 1, y=y)
    step = max(_BLOCK_CELLS // hasher.width, 1)
    for start in range(0, len(x), step):
        hasher.add_records(x[start : start + step])
    return hasher.hashes()


class RecordHasher:
    """Hashes of records with `width` columns, which may have names; they come block by block. `y` are the labels
    of records that come without them."""

    def __init__(self, width: int, names: Sequence[str] | None = None, y: Any = ()) -> None:
        import pandas as pd

        self.width = width
        self._kinds = 2 if width <= MAX_UNORDERED_COLUMNS else 1
        self._factors = mix(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
        self._labels = _codes(pd.Series(y))
        self._blocks, self._records = [np.zeros((self._kinds, 0), np.uint64)], 0
        both = (None,) if names is None else (None, names)
        self._parts = [Parts(width, each) for each in both] if width <= MAX_COLUMNS else []

    def add_records(self, block: np.ndarray) -> None:
        """Hash the next records, all columns but the label."""
        codes = np.empty((len(block), self.width), np.uint64)
        codes[:, :-1] = _number_codes(block.reshape(len(block), -1))
        codes[:, -1] = self._labels[self._records : self._records + len(block)]
        self.add(codes.T)

    def add(self, codes: np.ndarray) -> None:
        """Hash the next records, given as the codes of their cells (uint64 [columns, records])."""
        self._records += codes.shape[1]
        sums = [self._factors @ codes]
        cells = _mix_nonzero(codes) if self._kinds == 2 or self._parts else codes[:0]
        if self._kinds == 2:
            sums.append(cells.sum(axis=0))
        self._blocks.append(np.stack(sums))
        if self._parts:
            cells[[numbers_rows(column) for column in codes]] = 0
        for parts in self._parts:
            parts.add(cells)

    def hashes(self) -> RecordHashes:
        """Those of all records that were added."""
        whole: np.ndarray = np.concatenate(self._blocks, axis=1)
        zeros = max((parts.zeros for parts in self._parts), default=0)
        found = [np.zeros(0, np.uint64), *(parts.distinctive() for parts in self._parts)]
        return RecordHashes(whole, sample(np.concatenate(found), zeros), zeros, wide=not self._parts)


def _codes(column: pd.Series) -> np.ndarray:
    """A number for each cell: equal where the values are equal, 0 if the cell is empty."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(column.dtype):
        return _number_codes(column.to_numpy(dtype=np.float64, na_value=np.nan))
    numbers = cast_numbers(column, _EMPTY)
    if numbers is not None:
        return _number_codes(numbers)
    places, values = pd.factorize(column, use_na_sentinel=True)
    codes: np.ndarray = np.append(_text_codes([str(value) for value in values]), np.uint64(0))[places]
    return codes


def _text_codes(texts: Sequence[str]) -> np.ndarray:
    """Codes of distinct cells, of which some may be numbers."""
    import pandas as pd

    plain = [" ".join(text.split()) for text in texts]
    plain = ["" if text in _EMPTY else _BOOLEANS.get(text.lower(), text.lower()) for text in plain]
    values = pd.to_numeric(pd.Series(plain, dtype=object), errors="coerce").to_numpy(np.float64)
    codes = _number_codes(values)
    for index in np.flatnonzero(np.isnan(values)):
        if plain[index]:
            digest = hashlib.blake2b(plain[index].encode("utf-8", "surrogatepass"), digest_size=8).digest()
            codes[index] = int.from_bytes(digest, "little")
    return codes


def _number_codes(values: np.ndarray) -> np.ndarray:
    """The bits of each value as float32, which is what a model gets to see; 0 for 0, -0 and NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32) + np.float32(0)
    codes = narrow.view(np.uint32).astype(np.uint64)
    codes[np.isnan(narrow)] = 0
    return codes


def _mix_nonzero(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 0, codes, mix(codes))
