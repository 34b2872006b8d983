"""`Dataset`: a data set as arrays, from whatever file; its parts and splits; seeded random streams."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dither.data.memmap import MappedArray
from dither.data.schema import Schema
from dither.data.tables import text_column
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

MISSING_GROUP = "(missing)"


class Dataset(NamedTuple):
    """Training and test records of one data set.

    `x_*` are float32 [records, features] (images flattened, in [0, 1]); `y_*` are int32 class numbers. Where
    records are streamed from disk, `x_*` are `MappedArray`. `groups*` hold the partition column, one value per
    record. `covered` is False when the encoding used values read from the records: no ε covers that step, and
    `notes` say which values. Of a folder, `digest` covers every file and `ledger_digest` the records and labels
    only.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    feature_names: tuple[str, ...]
    image_shape: tuple[int, ...] = ()  # () for tables
    schema: Schema | None = None
    groups: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    covered: bool = False
    digest: str = ""
    ledger_digest: str = ""
    record_hashes: np.ndarray | None = None  # of a user's own file: `data.hashing`

    @property
    def streamed(self) -> bool:
        """Whether the records stay on disk."""
        return isinstance(self.x_train, MappedArray)


def pool(dataset: Dataset) -> Dataset:
    """All records as training records, with an empty test part.

    For papers that pool Adult's 48,842 records and let each device split its own rows (`per_client_split`).
    """
    groups = dataset.groups
    if groups is not None and dataset.groups_test is not None:
        groups = np.concatenate([groups, dataset.groups_test])
    total = len(dataset.y_train) + len(dataset.y_test)
    return dataset._replace(
        x_train=all_records(dataset),
        y_train=np.concatenate([dataset.y_train, dataset.y_test]),
        x_test=dataset.x_test[:0],
        y_test=dataset.y_test[:0],
        groups=groups,
        groups_test=None if dataset.groups_test is None else dataset.groups_test[:0],
        notes=(*dataset.notes, f"training and test records pooled: {total:,} in all"),
    )


def all_records(dataset: Dataset) -> np.ndarray:
    """Training records, then test records; still on disk where they are streamed."""
    if isinstance(dataset.x_train, MappedArray) and isinstance(dataset.x_test, MappedArray):
        return MappedArray.concatenate(dataset.x_train, dataset.x_test)
    return np.concatenate([dataset.x_train, dataset.x_test])


def public_part(dataset: Dataset, part: str, fraction: float) -> Dataset:
    """The training records that are declared public ("public"), or the others ("private").

    The part of a record depends on its row number only, never on a run's seed or on the record itself: for one
    fraction the two parts never share a row, and a replaced record stays in its part. Test records are unchanged.
    """
    if part not in ("public", "private"):
        raise DataError(f"part={part!r} is not one of 'public', 'private'")
    total = len(dataset.y_train)
    count = round(fraction * total)
    if not 0 < count < total:
        raise DataError(
            f"public_fraction={fraction:g} of {total:,} training records leaves one of the parts empty"
        )
    is_public = np.zeros(total, dtype=bool)
    is_public[stream(0, "public part").permutation(total)[:count]] = True
    rows = np.flatnonzero(is_public if part == "public" else ~is_public)
    return dataset._replace(
        x_train=dataset.x_train[rows],
        y_train=dataset.y_train[rows],
        groups=None if dataset.groups is None else dataset.groups[rows],
        notes=(*dataset.notes, f"{len(rows):,} of {total:,} training records: the {part} part"),
    )


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random generator of one purpose under one seed, the same on every machine and in every process."""
    if seed < 0:
        raise DataError(f"seed={seed} is negative; give 0 or a positive integer")
    # Not hash(): Python salts it anew in every process.
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, name])))


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `weights` that sum to `total` (Hamilton's method)."""
    quotas = np.asarray(weights, dtype=np.float64) * (total / np.sum(weights))
    counts: np.ndarray = np.floor(quotas).astype(np.int64)
    left = total - int(counts.sum())
    # A stable sort, so that ties go to the earlier class on every machine.
    counts[np.argsort(-(quotas - counts), kind="stable")[:left]] += 1
    return counts


def stratified_split(labels: np.ndarray, test_count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, test), both ascending: `test_count` test rows, the classes in proportion."""
    if not 0 <= test_count < len(labels):
        raise DataError(
            f"{test_count} test records of {len(labels)} were requested; at least one must remain for training"
        )
    rng = stream(seed, "test split")
    values, class_of = np.unique(labels, return_inverse=True)
    test_counts = largest_remainder(np.bincount(class_of), test_count)
    chosen = [
        rng.permutation(np.flatnonzero(class_of == index))[: test_counts[index]] for index in range(len(values))
    ]
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.concatenate(chosen)] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def hold_out(dataset: Dataset, test_fraction: float, seed: int) -> Dataset:
    """Move `test_fraction` of the training records, stratified by class, to the test part."""
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test_fraction={test_fraction} must be at least 0 and below 1")
    x, y, groups = dataset.x_train, dataset.y_train, dataset.groups
    train, test = stratified_split(y, round(len(y) * test_fraction), seed)
    return dataset._replace(
        x_train=x[train],
        y_train=y[train],
        x_test=x[test],
        y_test=y[test],
        groups=None if groups is None else groups[train],
        groups_test=None if groups is None else groups[test],
    )


class TableOptions(NamedTuple):
    """How tables become arrays; see `data.load`."""

    encoding: str = "minmax"
    features: str = "all"
    group_column: str = ""
    test_fraction: float = 0.2
    seed: int = 0


def dataset_from_tables(
    name: str, train: pd.DataFrame, test: pd.DataFrame | None, schema: Schema, options: TableOptions
) -> Dataset:
    """Encode tables by the schema; without a test table, hold out a stratified part of the rows."""
    x, y, groups = _encode(train, schema, options)
    x_test, y_test, groups_test = (x[:0], y[:0], None) if test is None else _encode(test, schema, options)
    dataset = Dataset(
        name=name,
        x_train=x,
        y_train=y,
        x_test=x_test,
        y_test=y_test,
        classes=schema.label.classes,
        feature_names=schema.feature_names(options.features),
        schema=schema,
        groups=groups,
        groups_test=groups_test,
        notes=schema.coverage_notes(),
        covered=schema.covered,
    )
    return hold_out(dataset, options.test_fraction, options.seed) if test is None else dataset


def _encode(
    frame: pd.DataFrame, schema: Schema, options: TableOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(features, class numbers, groups)."""
    x = schema.encode(frame, options.encoding, options.features, labels="ignore").x
    y = schema.encode_labels(frame)
    if not options.group_column:
        return x, y, None
    if options.group_column not in frame.columns:
        hint = did_you_mean(options.group_column, [str(name) for name in frame.columns])
        raise DataError(f"partition column {options.group_column!r} is not in the table{hint}")
    return x, y, text_column(frame[options.group_column], MISSING_GROUP)
