"""`Dataset`: a data set as arrays, however it came in; and the seeded streams this room draws from."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dither.data.mapped import Mapped
from dither.errors import DataError

if TYPE_CHECKING:
    from dither.data.schema import Schema


class Dataset(NamedTuple):
    """Training and test records of one data set.

    `x_*` are float32 [records, features] (images flattened, in [0, 1]); `y_*` are int32 class numbers.
    `groups*` hold the values of the partition column, one a record, where one was asked for.
    `covered` is False when the encoding used values read from the records themselves: no ε then covers
    that step, and `notes` says which values. Of a folder, digested as it was read, `digest` covers every file and
    `ledger_digest` the records and labels alone; where records are streamed, `x_*` are `Mapped`.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    feature_names: tuple[str, ...]
    image_shape: tuple[int, ...]  # () for tables
    schema: Schema | None
    groups: np.ndarray | None
    groups_test: np.ndarray | None
    notes: tuple[str, ...]
    covered: bool
    digest: str = ""
    ledger_digest: str = ""
    rows: np.ndarray | None = None  # of one's own file: each record as a number (`data.rows`)

    @property
    def streamed(self) -> bool:
        """The records stay on the disk."""
        return isinstance(self.x_train, Mapped)


def pool(dataset: Dataset) -> Dataset:
    """All records as training records, the test part left empty.

    For the papers that pool Adult's 48,842 records and let each device split its own rows
    (see `per_client_split`).
    """
    groups = dataset.groups
    if groups is not None and dataset.groups_test is not None:
        groups = np.concatenate([groups, dataset.groups_test])
    total = len(dataset.y_train) + len(dataset.y_test)
    return dataset._replace(
        x_train=joined(dataset),
        y_train=np.concatenate([dataset.y_train, dataset.y_test]),
        x_test=dataset.x_test[:0],
        y_test=dataset.y_test[:0],
        groups=groups,
        groups_test=None if dataset.groups_test is None else dataset.groups_test[:0],
        notes=(*dataset.notes, f"training and test records pooled: {total:,} in all"),
    )


def joined(dataset: Dataset) -> np.ndarray:
    """Training and test records one after the other; on the disk, where they are streamed."""
    if isinstance(dataset.x_train, Mapped) and isinstance(dataset.x_test, Mapped):
        return Mapped.joined(dataset.x_train, dataset.x_test)  # type: ignore[return-value]
    return np.concatenate([dataset.x_train, dataset.x_test])


def public_part(dataset: Dataset, part: str, fraction: float) -> Dataset:
    """The training records that are declared public ("public"), or the others ("private").

    Which record is where depends on its row number alone, never on a seed of a run or on what the record says: the
    two parts of one fraction never share a row, whoever asks, and a replaced record stays in its part. The test
    part is left as it is.
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
    """The random stream of one purpose under one seed: the same on every machine and in every process."""
    if seed < 0:
        raise DataError(f"seed={seed} is negative; give 0 or a positive integer")
    # Not hash(): Python salts it anew in every process.
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, name])))


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `weights` that sum to `total` (Hamilton's method)."""
    quotas = np.asarray(weights, dtype=np.float64) * (total / np.sum(weights))
    counts = np.floor(quotas).astype(np.int64)
    left = total - int(counts.sum())
    # A stable sort, so that ties go to the earlier class on every machine.
    counts[np.argsort(-(quotas - counts), kind="stable")[:left]] += 1
    return counts


def stratified_split(labels: np.ndarray, test_count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, test), both ascending: `test_count` test rows, the classes in proportion."""
    if not 0 <= test_count < len(labels):
        raise DataError(f"{test_count} test records asked of {len(labels)}; at least one must stay for training")
    rng = stream(seed, "test split")
    values, class_of = np.unique(labels, return_inverse=True)
    test_counts = largest_remainder(np.bincount(class_of), test_count)
    chosen = [
        rng.permutation(np.flatnonzero(class_of == index))[: test_counts[index]] for index in range(len(values))
    ]
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.concatenate(chosen)] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
