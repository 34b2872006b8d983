"""CSV and Parquet files, and their columns as text or as numbers, the same from either format.

Each distinct value of a column is looked at once (`factorize`), so the cost grows with the distinct values and not
with the rows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

StrPath = str | os.PathLike[str]

TABLE_SUFFIXES = (".csv", ".parquet")
# What an empty cell looks like. "None" is not among them: it is a category in many tables.
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")
_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0+")


# Files


def read_table(path: StrPath) -> pd.DataFrame:
    """Read a CSV file (every cell as text; the schema decides what is a number) or a Parquet file."""
    import pandas as pd

    path = existing_file(path)
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DataError(f"{path.name!r}: suffix {suffix!r} is not supported; give a .csv, .parquet or .npz file")
    if path.stat().st_size == 0:
        raise DataError(f"{path.name!r} is empty; it needs a header and at least one row")
    try:
        if suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            # index_col=False: a trailing comma must not shift the columns by one.
            frame = pd.read_csv(
                path,
                dtype=str,
                keep_default_na=False,
                skipinitialspace=True,
                index_col=False,
                encoding="utf-8-sig",
            )
    except Exception as error:  # pandas and pyarrow raise many unrelated kinds for one bad file
        raise DataError(f"{path.name!r} cannot be read as a {suffix[1:]} table: {first_line(error)}") from None
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if len(frame) == 0:
        raise DataError(f"{path.name!r} has a header but no rows; it needs at least one")
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DataError(f"{path.name!r} has two columns called {repeated[0]!r}; rename one")
    return frame


def existing_file(path: StrPath) -> Path:
    """The path of a file that exists, or a clear error."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; give a .csv, .parquet or .npz file")
    if not path.is_file():
        raise DataError(f"file {str(path)!r} not found; check the path")
    return path


def first_line(error: Exception) -> str:
    """The first line of an error message, or the error's type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Columns


def canonical(value: Any) -> str:
    """One spelling for each value: '1.0', 1.0 and 1 are all '1', wherever they were read from."""
    if isinstance(value, float | np.floating):
        value = repr(float(value))
    text = str(value).strip()
    return text.partition(".")[0] if _WHOLE_NUMBER.fullmatch(text) else text


def factorize(series: pd.Series) -> tuple[np.ndarray, list[str]]:
    """(codes, texts): cell i reads `texts[codes[i]]`; a missing cell has code -1."""
    import pandas as pd

    raw_codes, raw_values = pd.factorize(series, use_na_sentinel=True)
    spelled = [canonical(value) for value in raw_values]
    texts = sorted(set(spelled) - set(MISSING))
    code_of = {text: code for code, text in enumerate(texts)}
    # The extra last entry answers the -1 of cells that pandas itself calls missing.
    translate = np.array([*(code_of.get(text, -1) for text in spelled), -1], dtype=np.int64)
    return translate[raw_codes], texts


def text_column(series: pd.Series, missing: str) -> np.ndarray:
    """A column as text, with `missing` for its missing cells."""
    codes, texts = factorize(series)
    column: np.ndarray = np.array([*texts, missing], dtype=object)[codes].astype(str)
    return column


def parse_numbers(texts: list[str]) -> np.ndarray:
    """Float64 values; NaN for what is not a number."""
    import pandas as pd

    return np.asarray(pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce"), dtype=np.float64)


def is_number_column(series: pd.Series) -> bool:
    """Whether every cell that is not missing is a number. True/False columns are categories."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(series.dtype):
        return False
    if pd.api.types.is_numeric_dtype(series.dtype):
        return True
    _, texts = factorize(series)
    return bool(texts) and not bool(np.isnan(parse_numbers(texts)).any())


def number_column(series: pd.Series, column: str) -> np.ndarray:
    """A column as float64, NaN where missing; text or an infinite value is an error that names its row."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series.dtype) and not pd.api.types.is_bool_dtype(series.dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        codes, texts = factorize(series)
        parsed = parse_numbers(texts)
        if np.isnan(parsed).any():
            code = int(np.flatnonzero(np.isnan(parsed))[0])
            row = int(np.flatnonzero(codes == code)[0]) + 1
            raise DataError(
                f"column {column!r} is numeric, but row {row} holds {texts[code]!r}; correct the cell, or "
                f"declare the column categorical in the schema"
            )
        values = np.append(parsed, np.nan)[codes]
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        row = int(infinite[0])
        raise DataError(
            f"column {column!r}, row {row + 1}: the value {values[row]} is not finite; correct it or leave "
            f"the cell empty"
        )
    return values
