"""A first schema, read from a table. Every value in it is marked "read from data": it is for the owner of
the records to replace them by what is publicly known."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from dither.data import cells
from dither.data.schema import READ_FROM_DATA, Categorical, Column, Label, Numeric, Schema
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

MAX_CATEGORIES = 64  # the rarer ones go to "(other)": a column of names must not become a million features
MAX_CLASSES = 1000


def draft_schema(path: str | os.PathLike[str], label: str, *, exclude: Collection[str] = ()) -> Schema:
    """A schema for a CSV or Parquet file; `exclude` names columns that are no features (an id, say)."""
    from dither.data.tables import read_table

    return draft_from_frame(read_table(path), label, name=os.path.basename(os.fspath(path)), exclude=exclude)


def draft_from_frame(frame: pd.DataFrame, label: str, *, name: str, exclude: Collection[str] = ()) -> Schema:
    """The same for a table already in memory."""
    present = [str(column) for column in frame.columns]
    for column in (label, *exclude):
        if column not in present:
            kind = "label column" if column == label else "column"
            hint = did_you_mean(column, present)
            if len(present) == 1 and ";" in present[0]:
                hint = "; the file seems to be separated by ';', save it with commas"
            raise DataError(f"{kind} {column!r} is not in {name!r}{hint}")
    features = [column for column in present if column != label and column not in exclude]
    if not features:
        raise DataError(f"{name!r} has no column besides {label!r}; at least one feature is needed")
    columns = tuple(_draft_column(frame[column], column) for column in features)
    return Schema(label=_draft_label(frame[label], label), columns=columns, name=name)


def _draft_label(series: pd.Series, name: str) -> Label:
    codes, texts = cells.factor(series)
    if len(texts) < 2:
        held = f"only {texts[0]!r}" if texts else "no value"
        raise DataError(f"label column {name!r} has {len(texts)} class ({held}); at least 2 are needed to train")
    if len(texts) > min(MAX_CLASSES, max(50, len(codes) // 2)):
        raise DataError(
            f"label column {name!r} has {len(texts)} different values in {len(codes)} rows; Dither "
            f"classifies: name a column of classes, or bin the values"
        )
    as_numbers = cells.parse_numbers(texts)
    if not np.isnan(as_numbers).any():  # "2" before "10"
        texts = [texts[index] for index in np.argsort(as_numbers, kind="stable")]
    return Label(name, tuple(texts), READ_FROM_DATA)


def _draft_column(series: pd.Series, name: str) -> Column:
    if cells.is_number_column(series):
        values = cells.numbers(series, name)
        values = values[~np.isnan(values)]
        if len(values) == 0:
            raise DataError(f"column {name!r} holds no value at all; remove it from the table")
        distinct, counts = np.unique(values, return_counts=True)
        scale = float(values.std())
        return Numeric(
            name,
            bounds=(float(distinct[0]), float(distinct[-1])),
            standard=(float(values.mean()), scale if scale > 0 else 1.0),
            missing=float(distinct[np.argmax(counts)]),
            bounds_from=READ_FROM_DATA,
            standard_from=READ_FROM_DATA,
            missing_from=READ_FROM_DATA,
        )
    codes, texts = cells.factor(series)
    if not texts:
        raise DataError(f"column {name!r} holds no value at all; remove it from the table")
    counts = np.bincount(codes[codes >= 0], minlength=len(texts))
    by_frequency = np.argsort(-counts, kind="stable")
    kept = sorted(texts[index] for index in by_frequency[:MAX_CATEGORIES])
    return Categorical(name, tuple(kept), texts[by_frequency[0]], READ_FROM_DATA, READ_FROM_DATA)
