"""Each record as a 64-bit hash, the same however the file is written: names and order of columns, order of rows,
line ends, spelling of numbers, case and spaces of text do not matter.

A cell is the bits of its value as float32, or a hash of its text in lower case; an empty cell is 0. A record has
two hashes: the sum of its cells times a constant of each column (so that columns may be renamed), and the sum of
its cells' hashes (so that columns may change places). The second says too little where a record has many cells
of few values: above `MAX_UNORDERED_COLUMNS` there is only the first. Neither is stored: a ledger puts them
through a keyed hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dither.data.schema import cast_numbers
from dither.data.tables import StrPath, existing_file
from dither.errors import DataError

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


def check_unchanged(path: StrPath, content: str) -> None:
    """`DataError` unless a file's bytes still have this SHA-256: what was read must be what is charged."""
    if file_digest(path) != content:
        raise DataError(f"{str(path)!r} changed after it was read; start again")


def hash_table(frame: pd.DataFrame) -> np.ndarray:
    """uint64 [1 or 2, records] of a table as it was read."""
    hasher = RecordHasher(frame.shape[1])
    hashes = np.zeros((hasher.kinds, len(frame)), np.uint64)
    for number, name in enumerate(frame.columns):
        hashes += hasher.column(number, frame[name])
    return hashes


def hash_arrays(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """uint64 [1 or 2, records] of records and their labels: a table whose last column is the label."""
    hasher = RecordHasher(int(np.prod(x.shape[1:])) + 1)
    step = max(_BLOCK_CELLS // hasher.width, 1)
    for start in range(0, len(x), step):
        hasher.add_records(x[start : start + step])
    return hasher.with_labels(y)


class RecordHasher:
    """Hashes of records with `width` columns; records may come block by block."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.kinds = 2 if width <= MAX_UNORDERED_COLUMNS else 1
        self._factors = _mix(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
        self._blocks: list[np.ndarray] = []

    def column(self, number: int, column: pd.Series) -> np.ndarray:
        """What one column adds to the hashes of all records."""
        codes = _codes(column)
        sums = [codes * self._factors[number]]
        if self.kinds == 2:
            sums.append(_mix_nonzero(codes))
        return np.stack(sums)

    def add_records(self, block: np.ndarray) -> None:
        """Hash the next records, all columns but the label."""
        codes = _number_codes(block.reshape(len(block), -1))
        sums = [codes @ self._factors[: codes.shape[1]]]
        if self.kinds == 2:
            sums.append(_mix_nonzero(codes).sum(axis=1))
        self._blocks.append(np.stack(sums))

    def with_labels(self, y: np.ndarray) -> np.ndarray:
        """The hashes of all records added so far, with their labels."""
        import pandas as pd

        hashes: np.ndarray = np.concatenate(self._blocks, axis=1)
        hashes += self.column(self.width - 1, pd.Series(y))
        return hashes


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
    return np.where(codes == 0, codes, _mix(codes))


def _mix(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), after its step."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))
