"""A draft schema for a user's own table: which columns are features, and values to start from.

A draft is read from the records, so each of its values is marked "read from data": the owner replaces or confirms
them. Bounds are rounded, and rare categories are left out, but neither is a proof of privacy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.data.schema import (
    LARGEST,
    OTHER,
    READ_FROM_DATA,
    Categorical,
    Column,
    Label,
    Numeric,
    Schema,
    factorize,
    is_number_column,
    number_column,
    parse_numbers,
    propose_task,
)
from dither.data.tables import StrPath, join_tables, read_table, table_files
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

MAX_CATEGORIES = 64  # a column of names must not become a million features
MAX_CLASSES = 1000
DROPPED = "was dropped on request"
UNSHARED = "is not in every table"
_COVERED = 0.8  # share of the rows that the listed categories must cover
_FEW = 100  # rows below which nothing is said about a column but that it is empty or constant
_RARE = 10  # rows below which a category of a large table is left to "(other)"
ID_NAME = re.compile(
    r"(?i:(^|[_\W])(id|uuid|guid|key|mrn|ssn|number|nr)$|^(patient|person|subject)$)|(?<=[a-z])(Id|ID|Nr)$",
    re.ASCII,
)
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
    r"([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*(Z|[+-]\d{2}:?\d{2}|[AaPp][Mm])?)?"
)


# "$1,200", "97%", "1.200,50": a number to a reader
_SIGNED = re.compile(r"[+-]?[$€£¥]?\s?(\d{1,3}([,.' ]\d{3})+|\d+)([.,]\d+)?\s?[%$€£¥]?")
_ALIKE = 0.95  # of the texts that must look like a date, or like a number with signs


class Draft(NamedTuple):
    """A draft schema, and why each column that it leaves out is left out."""

    schema: Schema
    excluded: dict[str, str]

    def lines(self, *, counts: bool = True) -> list[str]:
        """A line for each column that is left out, with the option that keeps it. Without `counts` it says nothing
        exact about the records, as in a file that will be shared."""
        return [
            f"left out: {column!r} {why if counts else why.partition(':')[0]}"
            + f" (--keep {column!r} keeps it)" * (why != DROPPED and not why.startswith(UNSHARED))
            for column, why in self.excluded.items()
        ]


# reason: the keywords are the options of `dither data schema`
def draft(
    table: StrPath | Sequence[StrPath] | pd.DataFrame,
    label: str,
    *,
    name: str = "",
    drop: Collection[str] = (),
    keep: Collection[str] = (),
    task: str = "auto",
    on_read: Callable[[Path, pd.DataFrame], None] | None = None,
) -> Draft:
    """Draft a schema for a file, for several, or for a table in memory. Columns that cannot be features (ids,
    dates, free text, constants, copies of the label, categories with too many levels) are left out unless they
    are in `keep`; so are those in `drop`. `on_read` gets each table as it was read."""
    frames, name = _read(table, name)
    if on_read is not None:
        for file, each in frames.items():
            on_read(file, each)
    known = list(dict.fromkeys(str(column) for each in frames.values() for column in each.columns))
    for column in (label, *drop, *keep):
        if column not in known:
            kind = "label column" if column == label else "column"
            raise DataError(f"{kind} {column!r} is not in {name!r}{did_you_mean(column, known)}")
    kept = [each.drop(columns=list({*drop} & {*each.columns} - {label})) for each in frames.values()]
    frame = join_tables(list(frames), kept) if len(kept) > 1 else kept[0]
    present = [str(column) for column in frame.columns]
    features = [column for column in present if column != label and column not in drop]
    if not features:
        raise DataError(f"{name!r} has no column besides {label!r}; at least one feature is needed")
    target = _draft_label(frame[label], label, task)
    labels = factorize(frame[label])[0] if target.bounds is None else number_column(frame[label], label)
    columns: list[Column] = []
    excluded: dict[str, str] = dict.fromkeys(drop, DROPPED)
    for column in features:
        drafted = _Drafting(frame[column], column, labels, target)
        why = drafted.why_no_feature()
        if why and column not in keep:
            excluded[column] = why
        else:
            columns.append(drafted.column())
    if not columns:
        reasons = "; ".join(f"{column!r} {why}" for column, why in list(excluded.items())[:3])
        raise DataError(f"{name!r} has no column that can be a feature: {reasons}; name one in --keep, or add one")
    return Draft(Schema(label=target, columns=tuple(columns), name=name), excluded)


def _read(table: Any, name: str) -> tuple[dict[Path, pd.DataFrame], str]:
    """The tables, by file, and a name for them."""
    import pandas as pd

    if isinstance(table, pd.DataFrame):
        return {Path(): table}, name or "data"
    if files := table_files(table):
        return {file: read_table(file) for file in files}, name or files[0].resolve().parent.name
    return {Path(table): read_table(table)}, name or os.path.basename(os.fspath(table))


def _draft_label(series: pd.Series, name: str, task: str) -> Label:
    codes, texts = factorize(series)
    if task == "auto":
        task = propose_task(parse_numbers(texts))
    if task == "regression":
        values = number_column(series, name)
        bounds = rounded_bounds(float(np.nanmin(values)), float(np.nanmax(values)))
        return Label(name, bounds=bounds, bounds_from=READ_FROM_DATA)
    if len(texts) < 2:
        content = f"only {texts[0]!r}" if texts else "no value"
        raise DataError(
            f"label column {name!r} has {len(texts)} class ({content}); at least 2 are needed to train"
        )
    if len(texts) > min(MAX_CLASSES, max(50, len(codes) // 2)):
        raise DataError(
            f"label column {name!r} has {len(texts)} different values in {len(codes)} rows: too many classes; "
            f"choose another column, bin the values, or, if they are numbers, set task='regression'"
        )
    spellings: dict[str, str] = {}
    for text in texts:
        other = spellings.setdefault(text.casefold(), text)
        if other != text and len(text) > 1:  # "a" and "A" may be letters to tell apart
            raise DataError(
                f"label column {name!r} has classes that differ only in case, {other!r} and {text!r}; write them "
                "alike, or list the classes in a schema"
            )
    as_numbers = parse_numbers(texts)
    if not np.isnan(as_numbers).any():  # "2" before "10"
        texts = [texts[index] for index in np.argsort(as_numbers, kind="stable")]
    return Label(name, tuple(texts), READ_FROM_DATA)


class _Drafting:
    """One column: what is wrong with it as a feature, and its place in the schema."""

    def __init__(self, series: pd.Series, name: str, labels: np.ndarray, target: Label) -> None:
        self.series, self.name, self.labels, self.target = series, name, labels, target
        self.is_number = is_number_column(series)
        if self.is_number:
            values = number_column(series, name)
            self.held = ~np.isnan(values)
            self.values: np.ndarray = values[self.held]
            self.levels, self.codes = np.unique(self.values, return_inverse=True)
            self.texts: list[str] = []
        else:
            codes, self.texts = factorize(series)
            self.held = codes >= 0
            self.codes = codes[self.held]
            self.levels = np.arange(len(self.texts))
        self.counts = np.bincount(self.codes, minlength=len(self.levels))

    def why_no_feature(self) -> str:
        """Why the column should not be a feature; empty if nothing speaks against it."""
        rows, levels = len(self.codes), len(self.levels)
        if levels == 0:
            return "holds no values"
        if levels == 1:
            return "has the same value in every row"
        if rows < _FEW:
            return ""
        if self._is_date():
            return "holds dates or durations: turn them into numbers, such as an age or the days between two dates"
        if not self.is_number and self._share(_SIGNED) >= _ALIKE:
            return f"holds numbers with other characters: write values such as {self.texts[-1]!r} as plain numbers"
        if self._is_id():
            grows = " that increase from row to row" if self.is_number and self._grows() else ""
            return f"looks like an id: {levels:,} different values in {rows:,} rows{grows}"
        if self._copies_label():
            return f"follows from the label {self.target.column!r}, or the label from it"
        if not self.is_number:
            words = float(np.mean([len(text.split()) for text in self.texts[:1000]]))
            if words >= 3 and levels > max(MAX_CATEGORIES, rows // 20):
                return f"is free text: {levels:,} different values"
            top = np.sort(self.counts)[::-1][:MAX_CATEGORIES].sum()
            if levels > MAX_CATEGORIES and top < _COVERED * rows:
                return f"has too many different values for categories: {levels:,}; group them"
        return ""

    def _is_date(self) -> bool:
        import pandas as pd

        kind = self.series.dtype
        if pd.api.types.is_datetime64_any_dtype(kind) or pd.api.types.is_timedelta64_dtype(kind):
            return True
        if self.is_number:  # 20240131
            day, month, year = self.levels % 100, self.levels // 100 % 100, self.levels // 10_000
            parts = ((day, 1, 31), (month, 1, 12), (year, 1900, 2100))
            whole = bool((self.levels == np.round(self.levels)).all())
            return whole and all(bool(((part >= low) & (part <= high)).all()) for part, low, high in parts)
        return self._share(_DATE) >= _ALIKE

    def _share(self, pattern: re.Pattern[str]) -> float:
        """The share of the different texts that look like this."""
        some = self.texts[:: max(len(self.texts) // 200, 1)]
        return float(np.mean([pattern.fullmatch(text) is not None for text in some]))

    def _is_id(self) -> bool:
        rows, levels = len(self.codes), len(self.levels)
        named = ID_NAME.search(self.name) is not None and levels > rows // 20
        if not self.is_number:
            single = float(np.mean([" " not in text for text in self.texts[:1000]])) > 0.95
            return single and (named or levels > 0.9 * rows)
        if not bool((self.levels == np.round(self.levels)).all()) or abs(self.levels).max() > 2**53:
            return False
        return named or (levels > rows // 20 and self._grows()) or levels == rows

    def _grows(self) -> bool:
        return bool(np.mean(np.diff(self.values) > 0) > 0.99)

    def _copies_label(self) -> bool:
        labels = self.labels[self.held]
        if self.target.bounds is not None:
            if not self.is_number or len(self.levels) < 3:
                return False
            both = ~np.isnan(labels)
            return bool(abs(np.corrcoef(labels[both], self.values[both])[0, 1]) > 0.999999)
        if len(self.levels) > 20 or len(np.unique(labels)) < 2:
            return False
        pairs = len(np.unique(labels.astype(np.int64) * len(self.levels) + self.codes))
        of_the_label = pairs == len(np.unique(labels))
        return of_the_label or (pairs == len(self.levels) and int(self.counts.min()) >= _RARE)

    def column(self) -> Column:
        """The column with values read from the records."""
        if not len(self.levels):
            raise DataError(f"column {self.name!r} holds no values; leave it out of --keep")
        if self.is_number:
            bounds = rounded_bounds(*np.quantile(self.values, (0.005, 0.995)).tolist())
            return Numeric.with_bounds(self.name, bounds, READ_FROM_DATA)
        enough = self.counts >= (_RARE if len(self.codes) >= 100 * _RARE else 1)
        kept = [index for index in np.argsort(-self.counts, kind="stable")[:MAX_CATEGORIES] if enough[index]]
        texts = tuple(sorted(self.texts[index] for index in kept)) or (self.texts[int(np.argmax(self.counts))],)
        return Categorical(self.name, texts, OTHER, READ_FROM_DATA)


def rounded_bounds(low: float, high: float) -> tuple[float, float]:
    """Round bounds outwards to multiples of 1, 2 or 5 times a power of ten, and to 0 where that is near. Those
    that no schema may have stay as they are."""
    if max(-low, high) > LARGEST:
        return low, high
    if not high - low > 1 / LARGEST:
        margin = max(1.0, abs(low) * 1e-12)
        low, high = low - margin, high + margin
    if 0 < low < high / 4:
        low = 0.0
    exponent = math.floor(math.log10((high - low) / 20))
    power = 10.0**exponent
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 20 >= high - low)
    return (round(math.floor(low / step) * step, -exponent), round(math.ceil(high / step) * step, -exponent))
