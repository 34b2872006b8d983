"""`Dataset`: a data set as arrays, from whatever file, in memory or on disk; its parts and splits; which client
holds which rows."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.data.hashing import RecordHashes
from dither.data.schema import Label, Schema, text_column
from dither.data.tables import StrPath
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

# Records on disk

_ROWS = 1024  # rows copied before their pages are released
_READERS = 4  # concurrent copies: a disk answers several requests in the time of one
_AROUND = 64 << 10  # bytes that the system maps around a row that is read
_NEAR = 32 << 10  # mean distance of rows in bytes up to which reading ahead pays


class MappedArray:
    """Records that stay on disk: rows of memory-mapped arrays, one array after the other, as float32 `[records,
    features]`.

    It has a shape, can be sliced and indexed like an array, and holds row numbers only; `read` fills a given array
    with some of its rows. Converting it to an array in memory is refused, because that is what it exists to avoid.
    Images are flattened and divided by `scale` (255 for bytes), as in `load_npz`.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(self, arrays: Sequence[np.ndarray], *, scale: float = 1.0) -> None:
        self._files = [_File.of(array) for array in arrays]
        self._ends = np.append(0, np.cumsum([len(array) for array in arrays]))
        self._rows = np.arange(self._ends[-1], dtype=np.int32)
        self._scale = np.float32(scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(records, features)."""
        return len(self._rows), self._files[0].array.shape[1]

    @property
    def nbytes(self) -> int:
        """The size of the records in memory, if they were read."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice | np.ndarray) -> MappedArray:
        """Some of the records, still on disk."""
        return self._with(self._rows[rows])

    def _with(self, rows: np.ndarray) -> MappedArray:
        other = object.__new__(MappedArray)
        other.__dict__.update(self.__dict__, _rows=rows)
        return other

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise DataError(
            f"{len(self):,} records ({self.nbytes / 1e9:.3g} GB) are streamed from disk, which only `dither run` "
            "supports; set data.stream='no' to read them into memory, or use fewer records"
        )

    @staticmethod
    def concatenate(one: MappedArray, other: MappedArray) -> MappedArray:
        """The records of both, one after the other."""
        if one._files is other._files:
            return one._with(np.concatenate([one._rows, other._rows]))
        both = MappedArray([file.array for file in (*one._files, *other._files)], scale=float(one._scale))
        return both._with(np.concatenate([one._rows, other._rows + np.int32(one._ends[-1])]))

    def read(self, rows: np.ndarray, out: np.ndarray, stop: threading.Event | None = None) -> None:
        """Copy the given rows to the front of `out`; ascending rows are quickest. Once `stop` is set, the read
        ends soon with `CancelledError`."""
        chosen = self._rows[rows]
        if len(chosen) == 0:
            return
        for file in self._files:
            file.check()
            file.advise(chosen)
        share = max(_ROWS, -(-len(chosen) // _READERS))
        cuts = [*range(0, len(chosen), share), len(chosen)]
        if len(cuts) == 2:
            self._copy(chosen, out, stop)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            jobs = [pool.submit(self._copy, chosen[a:b], out[a:b], stop) for a, b in pairwise(cuts)]
        for job in jobs:
            job.result()

    def _copy(self, chosen: np.ndarray, out: np.ndarray, stop: threading.Event | None) -> None:
        for at in range(0, len(chosen), _ROWS):
            if stop is not None and stop.is_set():
                raise CancelledError("the read was stopped")
            some = chosen[at : at + _ROWS]
            target = out[at : at + len(some)]
            for file, (first, end) in zip(self._files, pairwise(self._ends.tolist()), strict=True):
                here = (some >= first) & (some < end)
                if here.all():
                    file.take(some - first, target)
                    break
                if here.any():
                    part = np.empty((int(here.sum()), self.shape[1]), np.float32)
                    file.take(some[here] - first, part)
                    target[here] = part
            if self._scale != 1:
                target /= self._scale


class _File(NamedTuple):
    """An array in a mapped file; `offset` is where in the map it begins. `written` says which file it is, and when
    it was last written to."""

    array: np.ndarray
    map: mmap.mmap | None
    offset: int
    written: tuple[int, int] | None = None

    @classmethod
    def of(cls, array: np.ndarray) -> _File:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        flat, written = array.reshape(len(array), -1), last_written(array)
        if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
            return cls(flat, None, 0, written)
        return cls(flat, base, array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data, written)

    def check(self) -> None:
        """`DataError` if the file was written to since: its records would be others than those charged."""
        check_not_written(self.array, self.written)

    def advise(self, rows: np.ndarray) -> None:
        """Tell the system whether reading ahead pays."""
        if self.map is not None:
            span = (int(rows.max()) - int(rows.min())) * self.array.strides[0]
            self.map.madvise(mmap.MADV_NORMAL if span <= _NEAR * len(rows) else mmap.MADV_RANDOM)

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows, and release their pages."""
        if self.array.dtype == np.float32:
            np.take(self.array, rows, axis=0, out=out, mode="clip")  # "raise" would go through a copy
        else:
            out[...] = self.array[rows]
        row_bytes = self.array.strides[0]
        self.release(int(rows.min()) * row_bytes, (int(rows.max()) + 1) * row_bytes)

    def release(self, first: int, stop: int) -> None:
        """Release the pages of these bytes, which count as this process's memory until then. They stay in the
        system's cache."""
        if self.map is not None:
            first = (self.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
            margin = _AROUND // mmap.PAGESIZE * mmap.PAGESIZE
            first, stop = max(first - margin, 0), min(self.offset + stop + margin, len(self.map))
            self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)


def last_written(array: np.ndarray) -> tuple[int, int] | None:
    """Of an array in a mapped file: which file lies at its path, and when it was last written to."""
    try:
        status = os.stat(getattr(array, "filename", None) or "")
    except OSError:  # in memory, or gone
        return None
    return status.st_ino, status.st_mtime_ns


def check_not_written(array: np.ndarray, since: tuple[int, int] | None) -> None:
    """`DataError` if an array's file was written to after this (`last_written`). Another file in its place does no
    harm: the array stays the one that is mapped."""
    now = last_written(array)
    if now is not None and since is not None and now[0] == since[0] and now != since:
        name = str(getattr(array, "filename", ""))
        raise DataError(f"{name!r} was written to while its records were in use; start again")


def blocks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """All numbers of an array in file order, as blocks of whole records of about `size` bytes; the pages of a
    mapped file are released after each block."""
    file, numbers = _File.of(array), array.reshape(-1)
    record, each = int(np.prod(array.shape[1:])), array.itemsize
    step = max(size // (each * record), 1) * record
    for at in range(0, len(numbers), step):
        yield numbers[at : at + step]
        file.release(at * each, min(at + step, len(numbers)) * each)


def zeros_aligned(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Zeros aligned to 64 bytes, which JAX uses on a CPU without a copy. Memory is taken as it is filled."""
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(kind).reshape(shape)


# Data sets

MISSING_GROUP = "(missing)"


class Source(NamedTuple):
    """One institution's file among several: the client's name, the file, and the hash of each record. Of records
    that were given in Python, `digest` is that of all of them; of a file, `content` is the SHA-256 of its bytes as
    they were before it was read. `test_rows` are the rows that are held out of training."""

    name: str
    path: Path
    record_hashes: RecordHashes
    digest: str = ""
    content: str = ""
    test_rows: np.ndarray | None = None


class Dataset(NamedTuple):
    """Training and test records of one data set.

    `x_*` are float32 [records, features] (images flattened, in [0, 1]); `y_*` are int32 class numbers, or, for
    regression, float32 labels scaled by `label_bounds` to [0, 1] (`classes` is then empty). If records are
    streamed from disk, `x_*` are `MappedArray`. `groups*` hold the partition column, one value per
    record. `covered` is False if the encoding used values read from the records: no ε covers that step, and
    `notes` say which values. For a folder, `digest` covers every file and `ledger_digest` only the records and
    labels. `sources` are the files, if each institution has one; `groups` then name the file.
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
    record_hashes: RecordHashes | None = None  # of a user's own file: `data.hashing`
    label_bounds: tuple[float, float] | None = None  # of a regression
    sources: tuple[Source, ...] = ()
    content: str = ""  # SHA-256 of the one file's bytes, before it was read
    test_rows: np.ndarray | None = None  # rows of the one file that are held out of training
    test_hashes: RecordHashes | None = None  # of test records which `record_hashes` do not hold

    @property
    def streamed(self) -> bool:
        """Whether the records stay on disk."""
        return isinstance(self.x_train, MappedArray)

    @property
    def blank(self) -> bool:
        """Whether the records are left out: `x_*` are then `blank_features`."""
        return not self.streamed and len(self.y_train) > 1 and self.x_train.strides[0] == 0


def blank_features(records: int, features: int) -> np.ndarray:
    """Zeros that take no memory, for those who need labels and shapes alone, such as the accountant."""
    return np.broadcast_to(np.float32(0), (records, features))


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
    """Training records, then test records; still on disk if they are streamed, and blank if they are blank."""
    if dataset.blank:
        return blank_features(len(dataset.x_train) + len(dataset.x_test), dataset.x_train.shape[1])
    if isinstance(dataset.x_train, MappedArray) and isinstance(dataset.x_test, MappedArray):
        return MappedArray.concatenate(dataset.x_train, dataset.x_test)
    return np.concatenate([dataset.x_train, dataset.x_test])


def public_part(dataset: Dataset, part: str, fraction: float) -> Dataset:
    """The training records that are declared public ("public"), or the others ("private").

    The part of a record depends on the number of its row in its file, never on a run's seed, on which records are
    held out, on rows that are appended, or on the record itself: for one fraction the two parts never share a row,
    and a replaced record stays in its part. Of the rows of an own file that are held out, the public part has the
    public ones; other test records are unchanged.
    """
    if part not in ("public", "private"):
        raise DataError(f"part={part!r} is not one of 'public', 'private'")
    total, numbers, draws = len(dataset.y_train), _rows_in_files(dataset), stream(0, "public part")
    if numbers is None:  # of the catalogue, whose training records are the same ones for everybody
        is_public = np.zeros(total, dtype=bool)
        is_public[draws.permutation(total)[: round(fraction * total)]] = True
    else:
        among = draws.random(int(numbers.max()) + 1)[numbers] < fraction
        is_public, tested = among[:total], among[total:]
        if part == "public" and len(tested) == len(dataset.y_test):
            tests = dataset.groups_test
            dataset = dataset._replace(
                x_test=dataset.x_test[tested],
                y_test=dataset.y_test[tested],
                groups_test=None if tests is None else tests[tested],
            )
    if is_public.all() or not is_public.any():
        raise DataError(
            f"public_fraction={fraction:g} of {total:,} training records leaves one of the parts empty; choose "
            f"another share"
        )
    rows = np.flatnonzero(is_public if part == "public" else ~is_public)
    return dataset._replace(
        x_train=dataset.x_train[rows],
        y_train=dataset.y_train[rows],
        groups=None if dataset.groups is None else dataset.groups[rows],
        notes=(*dataset.notes, f"{len(rows):,} of {total:,} training records: the {part} part"),
    )


def _rows_in_files(dataset: Dataset) -> np.ndarray | None:
    """The number that each record's row has in its file, held-out ones last; None for a set of the catalogue."""
    files = dataset.sources or ([dataset] if dataset.record_hashes is not None else [])
    hashes = [each.record_hashes.whole for each in files if each.record_hashes is not None]
    held_out = [np.zeros(0, np.int64) if each.test_rows is None else each.test_rows for each in files]
    kept = [np.setdiff1d(np.arange(each.shape[1]), out) for each, out in zip(hashes, held_out, strict=True)]
    # Where records were pooled, those that were held out come last.
    return np.concatenate([*kept, *held_out]) if files else None


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
    """Row numbers (train, test), both ascending: `test_count` test rows, the classes in proportion. Labels of a
    regression (fractions) are not stratified."""
    if not 0 <= test_count < len(labels):
        raise DataError(
            f"{test_count} test records of {len(labels)} were requested; at least one must remain for training"
        )
    rng = stream(seed, "test split")
    if labels.dtype.kind == "f":
        labels = np.zeros(len(labels), np.int32)
    class_of = np.unique(labels, return_inverse=True)[1]
    test_counts = largest_remainder(np.bincount(class_of), test_count)
    chosen = [rng.permutation(np.flatnonzero(class_of == at))[:count] for at, count in enumerate(test_counts)]
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.concatenate(chosen)] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def row_split(count: int, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, test), both ascending, that follow from the number of rows alone: no record decides
    where another one goes."""
    held, order = _test_count(count, test_fraction), stream(seed, "row split").permutation(count)
    return np.sort(order[held:]), np.sort(order[:held])


def row_split_sizes(count: int, test_fraction: float) -> tuple[int, int]:
    """How many rows (train, test) `row_split` gives: nothing is allocated, whoever says how many there are."""
    held = _test_count(count, test_fraction)
    return count - held, held


def _test_count(count: int, test_fraction: float) -> int:
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test_fraction={test_fraction} must be at least 0 and below 1")
    return round(count * test_fraction)


def hold_out(dataset: Dataset, test_fraction: float, seed: int, *, by_rows: bool = False) -> Dataset:
    """Move `test_fraction` of the training records to the test part, stratified by class or by row number."""
    x, y, groups = dataset.x_train, dataset.y_train, dataset.groups
    if by_rows:
        train, test = row_split(len(y), test_fraction, seed)
    else:
        train, test = stratified_split(y, _test_count(len(y), test_fraction), seed)
    return dataset._replace(
        x_train=x[train],
        y_train=y[train],
        x_test=x[test],
        y_test=y[test],
        groups=None if groups is None else groups[train],
        groups_test=None if groups is None else groups[test],
        test_rows=test,
    )


class LoadOptions(NamedTuple):
    """How files become a data set; see `data.load`."""

    label: str = ""
    schema: Schema | StrPath = ""
    test_path: StrPath = ""
    encoding: str = "minmax"
    features: str = "all"
    group_column: str = ""
    test_fraction: float = 0.2
    seed: int = 0
    task: str = "auto"
    label_bounds: tuple[float, ...] = ()
    split_by_rows: bool = False


Part = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # features, labels, groups


def make_dataset(
    name: str, label: Label, train: Part, test: Part | None, options: LoadOptions, **known: Any
) -> Dataset:
    """A data set of two parts, with what else is `known` of it; without test records, a part of the others is held
    out."""
    x, y, groups = train
    x_test, y_test, groups_test = test or (x[:0], y[:0], None)
    parts: dict[str, Any] = {"x_train": x, "y_train": y, "groups": groups}
    parts |= {"x_test": x_test, "y_test": y_test, "groups_test": groups_test}
    dataset = Dataset(name, **parts, classes=label.classes, label_bounds=label.bounds, **known)
    if test is not None:
        return dataset
    return hold_out(dataset, options.test_fraction, options.seed, by_rows=options.split_by_rows)


def dataset_from_tables(
    name: str, train: pd.DataFrame, test: pd.DataFrame | None, schema: Schema, options: LoadOptions
) -> Dataset:
    """Encode tables by the schema; without a test table, hold out a part of the rows."""
    given_test = None if test is None else _encode(test, schema, options)
    names, notes = schema.feature_names(options.features), schema.coverage_notes()
    known: dict[str, Any] = {"feature_names": names, "schema": schema, "notes": notes, "covered": schema.covered}
    return make_dataset(name, schema.label, _encode(train, schema, options), given_test, options, **known)


def dataset_from_sources(
    sources: Sequence[Source],
    tables: Sequence[pd.DataFrame],
    test: pd.DataFrame | None,
    schema: Schema,
    options: LoadOptions,
) -> Dataset:
    """One table for each institution. Each is encoded by itself, and split by itself if no test table is given.
    Its training records are those that the institution would have in a federation."""
    holders: dict[bytes, str] = {}
    for source in sources:  # a record that two clients hold reveals more than either proof says
        other = holders.setdefault(np.sort(source.record_hashes.whole[0]).tobytes(), source.name)
        if other != source.name:
            raise DataError(
                f"{other!r} and {source.name!r} hold the same records; give each institution's records once"
            )
    nothing = None if test is None else test[:0]
    parts = [
        dataset_from_tables(source.name, table, nothing, schema, options)
        for source, table in zip(sources, tables, strict=True)
    ]
    if not options.group_column:
        parts = [
            part._replace(
                groups=np.full(len(part.y_train), source.name), groups_test=np.full(len(part.y_test), source.name)
            )
            for source, part in zip(sources, parts, strict=True)
        ]
    if test is not None:
        scored = dataset_from_tables("", test[:0], test, schema, options)
        nobody = np.full(len(scored.y_test), MISSING_GROUP)
        parts.append(scored._replace(groups=nobody[:0], groups_test=nobody))
    arrays = ("x_train", "y_train", "x_test", "y_test", "groups", "groups_test")
    joined: dict[str, Any] = {key: np.concatenate([getattr(part, key) for part in parts]) for key in arrays}
    held_out = [part.test_rows for part in parts[: len(sources)]]
    named = [source._replace(test_rows=rows) for source, rows in zip(sources, held_out, strict=True)]
    return parts[0]._replace(**joined, sources=tuple(named), test_rows=None)


def _encode(frame: pd.DataFrame, schema: Schema, options: LoadOptions) -> Part:
    """(features, class numbers, groups)."""
    x = schema.encode(frame, options.encoding, options.features, labels="ignore").x
    y = schema.encode_labels(frame)
    if not options.group_column:
        return x, y, None
    if options.group_column not in frame.columns:
        hint = did_you_mean(options.group_column, [str(name) for name in frame.columns])
        raise DataError(f"partition column {options.group_column!r} is not in the table{hint}")
    return x, y, text_column(frame[options.group_column], MISSING_GROUP)


# Partitions: the kinds that the papers use. A `ClientPartition` holds row numbers and copies no records. Clients
# may differ in size; padding is the engine's task. Every kind is deterministic in the seed, and every client has
# at least one record.

PARTITIONS = ("iid", "one-class", "similarity", "dirichlet", "column", "files")
DIRICHLET_DRAWS = 100


class ClientPartition(NamedTuple):
    """The rows of each client: `order[start[k] : start[k] + size[k]]` belong to client k."""

    order: np.ndarray  # int32 [total], row numbers grouped by client
    start: np.ndarray  # int32 [num_clients]
    size: np.ndarray  # int32 [num_clients]
    names: tuple[str, ...]

    def rows(self, client: int) -> np.ndarray:
        """The row numbers of one client."""
        start = int(self.start[client])
        return self.order[start : start + int(self.size[client])]


# reason: the keywords are the keys of [data] in a spec
def partition(
    dataset_or_labels: Dataset | np.ndarray | Sequence[int],
    *,
    kind: str,
    num_clients: int,
    seed: int,
    similarity: float = 0.0,
    alpha: float = 0.5,
    groups: np.ndarray | Sequence[str] | None = None,
    records_per_client: int = 0,
) -> ClientPartition:
    """Distribute the training records over clients.

    `kind` is one of:

    - "iid": a uniform random split; sizes differ by at most one.
    - "one-class": each client holds one class; the clients per class are in proportion to its frequency.
    - "similarity": `similarity` percent of each client's records are i.i.d.; the rest is sorted by label and cut
      into equal runs (Karimireddy et al. 2020).
    - "dirichlet": each class is spread over clients by Dirichlet(`alpha`) shares, so sizes differ (Li et al.
      2022). With `records_per_client`, each client has that size and its own Dirichlet mix of classes (Hsu et
      al. 2019).
    - "column": each value of a column of the table is one client; `num_clients` is then 0 or their number.
    - "files": each file is one client, if the records were loaded from several; `num_clients` as above.

    `records_per_client` > 0 gives every client exactly that many records and leaves the rest unused.
    """
    if isinstance(dataset_or_labels, Dataset):
        labels = dataset_or_labels.y_train
        groups = dataset_or_labels.groups if groups is None else groups
    else:
        labels = np.asarray(dataset_or_labels)
    if kind not in PARTITIONS:
        raise DataError(f"unknown partition {kind!r}{did_you_mean(str(kind), PARTITIONS)}")
    if kind in ("one-class", "dirichlet") and labels.dtype.kind == "f":
        raise DataError(
            f"partition {kind!r} deals out classes, but the label is a number; use 'iid', 'similarity' or 'column'"
        )
    if records_per_client < 0:
        raise DataError(f"records_per_client={records_per_client} is negative; give 0 for all records")
    rng = stream(seed, "partition")
    if kind == "files":
        if not isinstance(dataset_or_labels, Dataset) or not dataset_or_labels.sources:
            raise DataError("partition 'files' needs several files: a folder, a pattern or a list as data.path")
        files = tuple(source.name for source in dataset_or_labels.sources)
        values = np.asarray(dataset_or_labels.groups)
        return _by_group(values, files, "there are {} files", num_clients, records_per_client, rng)
    if kind == "column":
        if groups is None:
            raise DataError(
                "a column partition needs the column: load the data with group_column='COLUMN' (for a folder of "
                "arrays, add groups.npy to it)"
            )
        values = np.asarray(groups)
        if len(values) != len(labels):
            raise DataError(f"groups has {len(values)} values for {len(labels)} records; one per record is needed")
        names = tuple(str(name) for name in np.unique(values))
        return _by_group(values, names, "the column has {} values", num_clients, records_per_client, rng)
    if num_clients < 1:
        raise DataError(f"num_clients={num_clients}; at least 1 client is needed")
    if num_clients > len(labels):
        raise DataError(
            f"num_clients={num_clients} exceeds the {len(labels)} records: client {len(labels)} would be "
            f"empty; use at most {len(labels)} clients"
        )
    needed = num_clients * records_per_client
    if needed > len(labels):
        raise DataError(
            f"{num_clients} clients x {records_per_client} records = {needed}, but there are {len(labels)}; "
            f"lower num_clients or records_per_client"
        )
    if kind == "one-class":
        rows = _one_class(labels, num_clients, records_per_client, rng)
    elif kind == "dirichlet" and records_per_client:
        rows = _dirichlet_mixes(labels, num_clients, records_per_client, alpha, rng)
    elif kind == "dirichlet":
        rows = _dirichlet_shares(labels, num_clients, alpha, rng)
    else:
        # "iid" is 100% similarity.
        percent = 100.0 if kind == "iid" else similarity
        rows = _similarity(labels, num_clients, records_per_client, percent, rng)
    return _partition(rows, tuple(f"client {client}" for client in range(num_clients)))


def per_client_split(
    partition: ClientPartition, *, fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int
) -> tuple[ClientPartition, ClientPartition, ClientPartition]:
    """Split each client's rows at random into train, test and validation; all index the same array.

    The first two sizes are rounded down and the third part takes the rest (3,052 -> 2,441 / 305 / 306).
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1.0) > 1e-9:
        raise DataError(f"fractions={tuple(fractions)} must be three numbers >= 0 that sum to 1")
    rng = stream(seed, "per-client split")
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for client, name in enumerate(partition.names):
        rows = rng.permutation(partition.rows(client))
        # The small addend undoes products such as 0.29 * 100 = 28.999999999999996.
        first = math.floor(fractions[0] * len(rows) + 1e-9)
        second = first + math.floor(fractions[1] * len(rows) + 1e-9)
        for part, piece, fraction in zip(parts, np.split(rows, [first, second]), fractions, strict=True):
            if fraction > 0 and len(piece) == 0:
                raise DataError(
                    f"{name!r} has {len(rows)} records, too few for a part of {fraction:g}; use fewer "
                    f"clients or other fractions"
                )
            part.append(piece)
    train, test, validation = (_partition(part, partition.names) for part in parts)
    return train, test, validation


# Each kind returns the rows of every client.


def _similarity(
    labels: np.ndarray, num_clients: int, records_per_client: int, percent: float, rng: np.random.Generator
) -> list[np.ndarray]:
    if not 0.0 <= percent <= 100.0:
        raise DataError(f"similarity={percent} is a percentage; give a number from 0 to 100")
    total = num_clients * records_per_client or len(labels)
    rows = rng.permutation(len(labels))[:total]
    sizes = np.full(num_clients, total // num_clients)
    sizes[: total % num_clients] += 1
    shared = np.round(sizes * percent / 100.0).astype(np.int64)
    alike, rest = rows[: shared.sum()], rows[shared.sum() :]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    alike_parts = np.split(alike, np.cumsum(shared)[:-1])
    sorted_parts = np.split(rest, np.cumsum(sizes - shared)[:-1])
    return [np.concatenate(parts) for parts in zip(alike_parts, sorted_parts, strict=True)]


def clients_per_class(counts: np.ndarray, num_clients: int) -> np.ndarray:
    """Clients per class, in proportion to its records by largest remainder, at least one."""
    if num_clients < len(counts):
        raise DataError(
            f"num_clients={num_clients} is below the {len(counts)} classes; one-class needs one client per class"
        )
    clients = largest_remainder(counts, num_clients)
    while clients.min() == 0:
        clients[np.argmax(clients)] -= 1
        clients[np.argmin(clients)] += 1
    return clients


def _one_class(
    labels: np.ndarray, num_clients: int, records_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    values, counts = np.unique(labels, return_counts=True)
    parts: list[np.ndarray] = []
    for value, count, clients in zip(values, counts, clients_per_class(counts, num_clients), strict=True):
        rows = rng.permutation(np.flatnonzero(labels == value))
        if records_per_client:
            needed = int(clients) * records_per_client
            if needed > count:
                raise DataError(
                    f"class {value} has {count} records, but {clients} clients x {records_per_client} "
                    f"records = {needed}; lower records_per_client to {count // clients} or less"
                )
            rows = rows[:needed]
        parts += np.array_split(rows, clients)
    return parts


def _dirichlet_shares(
    labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    _check_alpha(alpha)
    class_rows = [rng.permutation(np.flatnonzero(labels == value)) for value in np.unique(labels)]
    # A small alpha sometimes leaves a client empty: draw again, as Li et al. do.
    for _ in range(DIRICHLET_DRAWS):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(class_rows))
        cuts = [
            np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            for share, rows in zip(shares, class_rows, strict=True)
        ]
        pieces = [np.split(rows, cut) for rows, cut in zip(class_rows, cuts, strict=True)]
        parts = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
        empty = [client for client, part in enumerate(parts) if len(part) == 0]
        if not empty:
            return parts
    raise DataError(
        f"client {empty[0]} was still empty after {DIRICHLET_DRAWS} draws (alpha={alpha}, "
        f"num_clients={num_clients}); raise alpha, use fewer clients, or set records_per_client for equal sizes"
    )


def _dirichlet_mixes(
    labels: np.ndarray, num_clients: int, records_per_client: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    _check_alpha(alpha)
    class_rows = [rng.permutation(np.flatnonzero(labels == value)) for value in np.unique(labels)]
    left = np.array([len(rows) for rows in class_rows])
    used = np.zeros_like(left)
    parts: list[np.ndarray] = []
    for mix in rng.dirichlet(np.full(len(class_rows), alpha), size=num_clients):
        taken = np.zeros_like(left)
        while (short := records_per_client - int(taken.sum())) > 0:
            # An exhausted class leaves the mix; a mix of exhausted classes only becomes uniform.
            open_classes = left - used - taken > 0
            weights = np.where(open_classes, mix, 0.0)
            weights = weights if weights.sum() > 1e-12 else open_classes.astype(np.float64)
            drawn = rng.multinomial(short, weights / weights.sum())
            taken += np.minimum(drawn, left - used - taken)
        pieces = zip(class_rows, used, taken, strict=True)
        parts.append(np.concatenate([rows[first : first + count] for rows, first, count in pieces]))
        used += taken
    return parts


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(f"alpha={alpha} must be a positive number")


# reason: one parameter for each fact of a partition
def _by_group(
    groups: np.ndarray,
    names: tuple[str, ...],
    what: str,
    num_clients: int,
    records_per_client: int,
    rng: np.random.Generator,
) -> ClientPartition:
    """One client for each name; the rows of each are ascending."""
    if num_clients not in (0, len(names)):
        raise DataError(
            f"num_clients={num_clients}, but {what.format(len(names))}; set num_clients to {len(names)} or 0"
        )
    values, client_of, counts = np.unique(groups, return_inverse=True, return_counts=True)
    # One sort for all clients.
    rows_by_value = np.split(np.argsort(client_of, kind="stable"), np.cumsum(counts)[:-1])
    rows_of = dict(zip(map(str, values), rows_by_value, strict=True))
    parts = [rows_of[name] for name in names]
    if records_per_client:
        for name, rows in zip(names, parts, strict=True):
            if len(rows) < records_per_client:
                raise DataError(
                    f"client {name!r} has {len(rows)} records, records_per_client={records_per_client}; "
                    f"lower it to {len(rows)} or less"
                )
        parts = [rng.permutation(rows)[:records_per_client] for rows in parts]
    return _partition(parts, names)


def _partition(rows: Sequence[np.ndarray], names: tuple[str, ...]) -> ClientPartition:
    size = np.array([len(part) for part in rows], dtype=np.int32)
    start = (np.cumsum(size) - size).astype(np.int32)
    return ClientPartition(np.concatenate(rows).astype(np.int32), start, size, names)
