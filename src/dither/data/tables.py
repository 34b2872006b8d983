"""CSV and Parquet files as tables, the same from either format; `schema` reads their columns.

A CSV file may use any common delimiter, encoding and decimal mark. Delimiter and encoding follow from the header
and the byte order mark, and a cell is read by itself: no record decides how another one is read.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

StrPath = str | os.PathLike[str]

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_DELIMITERS = (",;\t|", "^~:\x01\x1f")  # the second ones only where the header has none of the first
_LAST = "\x1e"  # what a row is made of that is put after the last one (the ASCII record separator)
_MORE = "more"  # the column of a cell beyond the last one: a delimiter may end a row
_UNEQUAL = re.compile(r".*Expected (\d+) fields in line (\d+), saw (\d+)")  # as pandas says it
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_OTHER_FORMATS = {
    b"PK\x03\x04": "an Excel or zip file",
    b"\xd0\xcf\x11\xe0": "an Excel file",
    b"\x1f\x8b": "a gzip file",
}


# Files


def read_table(path: StrPath) -> pd.DataFrame:
    """Read a CSV file (every cell as text; the schema decides what is a number) or a Parquet file."""
    import pandas as pd

    path = existing_file(path)
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DataError(
            f"{path.name!r}: suffix {suffix!r} is not supported; give .csv (any delimiter), .parquet or .npz"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path.name!r} is empty; it needs a header and at least one row")
    try:
        frame = _read_parquet(path) if suffix == ".parquet" else _read_csv(path)
    except DataError:
        raise
    except Exception as error:  # pandas and pyarrow raise many unrelated kinds for one bad file
        why = _UNEQUAL.sub(_too_long, first_line(error))
        raise DataError(f"{path.name!r} cannot be read as a {suffix[1:]} table: {why}") from None
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    check_table(frame, path.name)
    return frame


def _too_long(said: re.Match[str]) -> str:
    most, line, cells = map(int, said.groups())  # of `_uneven_rows`, which reads one line and one cell more
    return f"line {line - 1} has {cells} cells, the header {most - 1}; correct the line"


def check_table(frame: pd.DataFrame, name: str) -> None:
    """`DataError` if a table has no rows, or two columns of one name."""
    if len(frame) == 0:
        raise DataError(f"{name!r} has a header but no rows; it needs at least one")
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DataError(f"{name!r} has two columns called {repeated[0]!r}; rename one")


def _read_parquet(path: Path) -> pd.DataFrame:
    """A Parquet file. Whole numbers are floats, as in pandas if a cell is missing."""
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    for field in parquet.read_schema(path):
        if pa.types.is_nested(field.type):
            raise DataError(
                f"{path.name!r}: column {field.name!r} holds {field.type} in every cell; make columns of its parts"
            )
    frame = pd.read_parquet(path)
    whole = frame.select_dtypes("integer", exclude="timedelta").columns
    return frame.astype(dict.fromkeys(whole, np.float64))


def _read_csv(path: Path) -> pd.DataFrame:
    """A CSV file, every cell as text."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    text = _as_utf8(path).replace(b"\r\n", b"\n").replace(b"\r", b"\n").lstrip(b"\n")
    header = text[: text.find(b"\n") + 1 or None]
    if header.lower().startswith(b"sep="):  # how Excel names the delimiter
        delimiter, text = header[4:5].decode(), text[len(header) :]
    else:
        delimiter = _delimiter(header.decode("utf-8"))
    text = _without_spaces_before_quotes(text, delimiter)
    names = _names(text, delimiter)
    # One more row, to be found again: a quote that is never closed would take the rest of the file for one cell.
    text += f"\n{delimiter.join([_LAST] * len(names))}\n".encode()
    numbers = [str(number) for number in range(len(names))]  # two columns may have one name
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(text),
            read_options=arrow_csv.ReadOptions(block_size=1 << 24, column_names=numbers, skip_rows_after_names=1),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(numbers, pa.string()), strings_can_be_null=False
            ),
        )
        frame: pd.DataFrame = table.to_pandas()
    except pa.ArrowInvalid:  # rows of unequal length: pandas reads the others alike
        frame = _uneven_rows(text, delimiter, numbers)
        if (longer := np.flatnonzero(frame.pop(_MORE).fillna("").to_numpy() != "")).size:
            raise DataError(
                f"{path.name!r}: row {longer[0] + 1} has more cells than the header; correct the row"
            ) from None
    if not len(frame) or (frame.iloc[-1] != _LAST).any():
        raise DataError(f"{path.name!r} has a quote that is never closed; save the table as CSV (UTF-8) again")
    frame = frame.iloc[:-1].set_axis(names, axis=1)
    return frame if delimiter == "," else frame.apply(_with_points)


def _uneven_rows(text: bytes, delimiter: str, columns: list[str]) -> pd.DataFrame:
    """The rows after the header, and what a row has in one more cell. pandas would take the first row for the
    measure of all: a row of our own comes first, so that no record says how long another one may be."""
    import pandas as pd

    first = delimiter.join([_LAST] * (len(columns) + 1)).encode() + b"\n"
    frame: pd.DataFrame = pd.read_csv(
        io.BytesIO(first + text),
        sep=delimiter,
        dtype=str,
        header=None,
        names=[*columns, _MORE],
        keep_default_na=False,
        skipinitialspace=True,
        index_col=False,
        encoding="utf-8",
    )
    return frame.iloc[2:].reset_index(drop=True)


def _names(text: bytes, delimiter: str) -> list[str]:
    """The column names of a CSV file: its first row."""
    head = text[: 1 << 20].decode("utf-8", errors="replace")
    return next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), [])


def _without_spaces_before_quotes(text: bytes, delimiter: str) -> bytes:
    """The text without spaces between a delimiter and a quote, so that every reader takes it for a quoted cell."""
    if b' "' not in text:
        return text
    between = re.escape(delimiter.encode()) + rb"\n"
    cell = rb'(^|[%b])(?: +(?="))?((?:"[^"]*+")*+[^%b]*+)' % (between, between)
    return re.sub(cell, rb"\1\2", text)


def _as_utf8(path: Path) -> bytes:
    """The content of a text file in UTF-8, without a byte order mark. A byte that is not UTF-8 is read as
    Windows-1252: a rule for each byte, so that no record changes how another one is read."""
    content = path.read_bytes()
    for magic, kind in _OTHER_FORMATS.items():
        if content.startswith(magic):
            raise DataError(f"{path.name!r} is {kind}, not a text file; save the table as CSV (UTF-8)")
    encoding = next((name for mark, name in _ENCODINGS.items() if content.startswith(mark)), "")
    if not encoding and b"\0" in content[:2]:  # UTF-16 without a mark
        encoding = "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    try:
        if encoding:
            return content.decode(encoding).encode("utf-8")
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        if encoding:
            fix = f"cannot be read as {encoding} (byte {error.start:,}); save it as CSV (UTF-8)"
            raise DataError(f"{path.name!r} {fix}") from None
        return content.decode("utf-8", errors="dither-windows-1252").encode("utf-8")
    return content


def _windows_1252(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    byte = error.object[error.start : error.start + 1]
    try:
        return byte.decode("cp1252"), error.start + 1
    except UnicodeDecodeError:
        return byte.decode("latin-1"), error.start + 1


codecs.register_error("dither-windows-1252", _windows_1252)


def _delimiter(header: str) -> str:
    """The delimiter of a CSV file, by its header alone."""
    unquoted = re.sub(r'"[^"]*"', "", header)
    for candidates in _DELIMITERS:
        best = max(candidates, key=unquoted.count)
        if best in unquoted:
            return best
    return ","


def _with_points(column: pd.Series) -> pd.Series:
    """A column of text with decimal points where numbers have a decimal comma."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    cells: Any = pa.array(column)
    if not pc.any(pc.match_substring(cells, ",")).as_py():
        return column
    grouped = pc.match_substring_regex(cells, r"^\s*[+-]?\d{1,3}(\.\d{3})+,\d+\s*$")
    cells = pc.if_else(grouped, pc.replace_substring(cells, ".", ""), cells)
    cells = pc.replace_substring_regex(cells, r"^\s*([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)\s*$", r"\1.\2")
    return pd.Series(cells.to_pandas(), dtype=column.dtype, index=column.index)


def table_files(path: StrPath | Collection[StrPath]) -> list[Path]:
    """The tables of several institutions, one file each: those of a list as they come, those of a folder or of a
    pattern (`data/*.csv`) by name. Empty where `path` is one file or a folder of arrays."""
    if not isinstance(path, str | os.PathLike):
        files = [existing_file(each) for each in path]
        if not files:
            raise DataError("data.path is an empty list; give at least one file")
    else:
        place = Path(path).expanduser()
        if place.is_dir():
            files = [file for file in place.iterdir() if file.suffix.lower() in TABLE_SUFFIXES]
            if (place / "x.npy").exists() or (place / "y.npy").exists() or not files:
                return []
        elif any(letter in str(path) for letter in "*?[") and not place.exists():
            files = [
                file for file in Path(place.anchor).glob(str(place.relative_to(place.anchor))) if file.is_file()
            ]
            if not files:
                raise DataError(f"no file matches {str(path)!r}; check the pattern")
        else:
            return []
        files = sorted(file for file in files if not file.name.startswith((".", "~")))
    for file in files:
        if file.suffix.lower() not in TABLE_SUFFIXES:
            raise DataError(
                f"{file.name!r} is not a table; with several files, each must be .csv, .tsv or .parquet"
            )
    return files


def join_tables(files: Collection[Path], tables: Collection[pd.DataFrame]) -> pd.DataFrame:
    """The rows of several tables with the same columns, in whatever order."""
    import pandas as pd

    first, *others = tables
    first_file, *other_files = files
    for file, table in zip(other_files, others, strict=True):
        for name in sorted(set(map(str, first.columns)) ^ set(map(str, table.columns))):
            has, lacks = (first_file, file) if name in first.columns else (file, first_file)
            raise DataError(
                f"{lacks.name!r} has no column {name!r}, which {has.name!r} has; rename or add it, or use a "
                f"schema without it (`dither data schema FILES... --drop {name}`)"
            )
    columns = {}
    for name in first.columns:
        parts = [table[name] for table in tables]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.astype(str) for part in parts]
        columns[name] = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(columns)


def existing_file(path: StrPath) -> Path:
    """The path of a file that exists, or a clear error."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; give a .csv, .parquet or .npz file")
    if not path.is_file():
        raise DataError(f"file {str(path)!r} not found; check the path")
    return path


def first_line(error: Exception) -> str:
    """The first line of an error message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
