"""The cells of a table column as text or as numbers, the same from CSV and from Parquet.

Each distinct value is looked at once (`factor`), so the cost grows with the distinct values and not with
the rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

# What an empty cell looks like. "None" is not among them: it is a category in many tables.
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")
_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0+")


def canonical(value: Any) -> str:
    """One spelling a value: '1.0', 1.0 and 1 are all '1', wherever they were read from."""
    if isinstance(value, float | np.floating):
        value = repr(float(value))
    text = str(value).strip()
    return text.partition(".")[0] if _WHOLE_NUMBER.fullmatch(text) else text


def factor(series: pd.Series) -> tuple[np.ndarray, list[str]]:
    """(codes, texts): cell i reads `texts[codes[i]]`; a missing cell has code -1."""
    import pandas as pd

    raw_codes, raw_values = pd.factorize(series, use_na_sentinel=True)
    spelled = [canonical(value) for value in raw_values]
    texts = sorted(set(spelled) - set(MISSING))
    code_of = {text: code for code, text in enumerate(texts)}
    # The extra last entry answers the -1 of cells that pandas itself calls missing.
    translate = np.array([*(code_of.get(text, -1) for text in spelled), -1], dtype=np.int64)
    return translate[raw_codes], texts


def text(series: pd.Series, missing: str) -> np.ndarray:
    """The cells as text, missing ones as `missing`."""
    codes, texts = factor(series)
    return np.array([*texts, missing], dtype=object)[codes].astype(str)


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
    _, texts = factor(series)
    return bool(texts) and not bool(np.isnan(parse_numbers(texts)).any())


def numbers(series: pd.Series, column: str) -> np.ndarray:
    """The cells as float64, NaN where missing; text or an infinite value is an error that names its place."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series.dtype) and not pd.api.types.is_bool_dtype(series.dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        codes, texts = factor(series)
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
