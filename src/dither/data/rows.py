"""Each record as a 64-bit number, the same however the file is written: names and order of columns, order of rows,
line ends, spelling of numbers, case and spaces of text do not matter.

A cell is the bits of its value as float32, or a hash of its text in lower case; an empty cell is 0. A row is two
numbers: the sum of its cells times a constant of each column (so that columns may be renamed), and the sum of its
cells' hashes (so that they may change places). The second says too little where a row has many cells of few
values: above `MIXED` columns there is only the first. Neither is kept: a ledger puts them through a keyed hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.data.cells import MISSING

if TYPE_CHECKING:
    import pandas as pd

MIXED = 64  # most columns that may change places
_WORDS = {"true": "1", "false": "0"}
_PIECE = 1 << 20  # cells hashed at a time


def of_file(path: str | os.PathLike[str]) -> np.ndarray:
    """The records of one's own file or folder."""
    from dither.data import folders, tables

    own = Path(path).expanduser()
    if own.is_dir():
        return folders.folder_rows(own)
    return tables.npz_rows(own) if own.suffix.lower() == ".npz" else of_table(tables.read_table(own))


def of_table(frame: pd.DataFrame) -> np.ndarray:
    """uint64 [1 or 2, rows] of a table as it was read."""
    found = Rows(frame.shape[1], len(frame))
    for number, name in enumerate(frame.columns):
        found.add(number, _codes(frame[name]))
    return found.sums


def of_arrays(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """uint64 [1 or 2, records] of records and their labels: a table whose last column is the label."""
    found = Rows(int(np.prod(x.shape[1:])) + 1)
    step = max(_PIECE // max(found.width, 1), 1)
    for at in range(0, len(x), step):
        found.add_records(x[at : at + step])
    return found.labelled(y)


class Rows:
    """Sums over the columns that were added so far, of rows that come piece by piece."""

    def __init__(self, width: int, count: int = 0) -> None:
        self.width = width
        self._factors = _hashed(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
        self.sums = np.zeros((2 if width <= MIXED else 1, count), np.uint64)
        self._pieces: list[np.ndarray] = []

    def add(self, column: int, codes: np.ndarray) -> None:
        """The cells of one column."""
        self.sums[0] += codes * self._factors[column]
        if len(self.sums) == 2:
            self.sums[1] += np.where(codes == 0, codes, _hashed(codes))

    def add_records(self, block: np.ndarray) -> None:
        """The next records, all columns but the label."""
        codes = _number_codes(block.reshape(len(block), -1))
        sums = np.zeros((len(self.sums), len(block)), np.uint64)
        sums[0] = codes @ self._factors[: codes.shape[1]]
        if len(sums) == 2:
            sums[1] = np.where(codes == 0, codes, _hashed(codes)).sum(axis=1)
        self._pieces.append(sums)

    def labelled(self, y: np.ndarray) -> np.ndarray:
        """All records that were added, with their labels."""
        import pandas as pd

        self.sums, self._pieces = np.concatenate(self._pieces, axis=1), []
        self.add(self.width - 1, _codes(pd.Series(y)))
        return self.sums


def _codes(column: pd.Series) -> np.ndarray:
    """A number for each cell: equal where the values are; 0 where it is empty."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    if pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        return _number_codes(column.to_numpy(dtype=np.float64, na_value=np.nan))
    try:
        texts: Any = pa.array(column)
        return _number_codes(np.asarray(pc.cast(texts, pa.float64()), np.float64))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        pass  # not all of them are numbers
    places, values = pd.factorize(column, use_na_sentinel=True)
    return np.append(_text_codes([str(value) for value in values]), np.uint64(0))[places]


def _text_codes(texts: Sequence[str]) -> np.ndarray:
    """Codes of distinct cells, of which some may be numbers."""
    import pandas as pd

    plain = [" ".join(text.split()) for text in texts]
    plain = ["" if text in MISSING else _WORDS.get(text.lower(), text.lower()) for text in plain]
    values = pd.to_numeric(pd.Series(plain, dtype=object), errors="coerce").to_numpy(np.float64)
    codes = _number_codes(values)
    for at in np.flatnonzero(np.isnan(values)):
        if plain[at]:
            digest = hashlib.blake2b(plain[at].encode("utf-8", "surrogatepass"), digest_size=8).digest()
            codes[at] = int.from_bytes(digest, "little")
    return codes


def _number_codes(values: np.ndarray) -> np.ndarray:
    """The bits of each value as float32, which is what a model gets to see; 0 for 0, -0 and NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32) + np.float32(0)
    codes = narrow.view(np.uint32).astype(np.uint64)
    codes[np.isnan(narrow)] = 0
    return codes


def _hashed(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), after its step."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))
