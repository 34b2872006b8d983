"""Array files to a `Dataset`: .npz files, folders of .npy files (which may stay on disk), and idx files.

    records/x.npy         [records, features], or images [records, h, w(, c)]; any plain numbers
    records/y.npy         [records]: class numbers 0, 1, 2, ..., or text; for regression numbers
    records/x_test.npy    and y_test.npy, where test records are given
    records/groups.npy    [records]: the client of each record, for partition = "column" (groups_test.npy likewise)
    records/classes.json  a list of the class names; without it they are read from the labels

A .npz file holds arrays of the same names (or x_train, y_train). Images are flattened, and divided by 255 if
they are uint8.

Labels and groups of a folder are copied into memory. Each load reads the records once, for their digest and to
check that every number is finite, through the same mapping that training uses: the file cannot be swapped in
between, and if it is written to, no more is read. A checkpoint identifies the folder by all of its files; a ledger
identifies the records by x.npy and y.npy only, so that an added file does not open a fresh budget.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.data.dataset import (
    Dataset,
    LoadOptions,
    MappedArray,
    Part,
    blocks,
    check_not_written,
    last_written,
    make_dataset,
    zeros_aligned,
)
from dither.data.hashing import RecordHasher, RecordHashes, file_digest, hash_arrays, join_hashes
from dither.data.schema import (
    NOT_COVERED,
    PUBLIC,
    READ_FROM_DATA,
    Encoded,
    Label,
    canonical,
    propose_task,
    scaled_labels,
)
from dither.data.tables import StrPath, existing_file, first_line
from dither.errors import DataError, did_you_mean

FOLDER_FILES = ("x.npy", "y.npy", "x_test.npy", "y_test.npy", "groups.npy", "groups_test.npy", "classes.json")
_BLOCK_BYTES = 8 << 20  # read at a time
_MAX_CLASSES = 1 << 16
_LONGEST_HEADER = 4 + 4 * 255  # of an idx file
_MAX_RECORDS = 2**31 - 1  # row numbers are int32


class _StoredPart(NamedTuple):
    """The training or the test records of a file or folder, as they are stored."""

    name: str
    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None

    @property
    def scale(self) -> float:
        return 255.0 if self.x.dtype == np.uint8 and self.x.ndim >= 3 else 1.0

    def checked(self, suffix: str = "") -> _StoredPart:
        """The same part; `DataError` if its arrays do not belong together. Their names end in `suffix`."""
        x, y, groups = self.x, self.y, self.groups
        problem = ""
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
            shapes = f"x{suffix} has shape {x.shape} and y{suffix} has shape {y.shape}"
            problem = f"{shapes}; [records, ...] and [records] are needed"
        elif len(x) == 0:
            problem = f"x{suffix} is empty; at least one record is needed"
        elif groups is not None and groups.shape != y.shape:
            problem = f"groups{suffix} has shape {groups.shape} for {len(y):,} records; give one per record"
        if problem:
            raise DataError(f"{self.name!r}: {problem}")
        return self


# .npz files


def load_npz(path: StrPath, options: LoadOptions = LoadOptions()) -> Dataset:
    """Load arrays `x, y`, or `x_train, y_train, x_test, y_test`, as they are.

    Labels are whole numbers 0, 1, 2, ..., or text; for regression any numbers. An array `classes` names the
    classes; without it they are read from the labels, and the notes say so.
    """
    path = existing_file(path)
    arrays = _open_npz(path)
    split = "x_train" in arrays
    train = _npz_part(arrays, "_train" if split else "", path.name)
    test = None
    if options.test_path:
        other_path = existing_file(options.test_path)
        other = _open_npz(other_path)
        test = _npz_part(other, "_test" if "x_test" in other else "", other_path.name)
    elif split and "x_test" in arrays:
        test = _npz_part(arrays, "_test", path.name)
    dataset = _assemble(train, test, _in_memory, arrays.get("classes"), options)
    hashes = _hash_npz(arrays, path.name)
    if test is not None and not options.test_path:
        dataset = dataset._replace(test_rows=np.arange(hashes.whole.shape[1])[-len(test.y) :])
    elif test is not None:
        dataset = dataset._replace(test_hashes=hash_arrays(test.x, test.y))
    return dataset._replace(record_hashes=hashes)


def read_arrays(path: StrPath, *, label: Label, labels: str = "required") -> Encoded:
    """Arrays `x` (and `y`, unless labels="ignore") of a .npz file, for a model of those classes or bounds."""
    path = existing_file(path)
    arrays = _open_npz(path)
    if labels == "ignore":
        x = _in_memory(_StoredPart(path.name, _npz_array(arrays, "x", path.name), np.zeros(0)))
        return Encoded(x, None, _feature_names(x.shape[1]))
    part = _npz_part(arrays, "", path.name)
    x = _in_memory(part)
    return Encoded(x, label_numbers(part.y, label, path.name), _feature_names(x.shape[1]))


def arrays_in_memory(x: Any, y: Any, groups: Any, options: LoadOptions) -> Dataset:
    """A data set of arrays that were given in Python."""
    part = _StoredPart(
        "data", np.asarray(x), np.asarray(y), None if groups is None else np.asarray(groups)
    ).checked()
    dataset = _assemble(part, None, _in_memory, None, options)
    hashes = hash_arrays(part.x, part.y)
    digest = hashlib.sha256(np.sort(hashes.whole[0]).tobytes()).hexdigest()
    return dataset._replace(record_hashes=hashes, ledger_digest=digest)


def hash_npz(path: Path) -> RecordHashes:
    """The hash of each record of a .npz file (`data.hashing`), test records included."""
    return _hash_npz(_open_npz(existing_file(path)), path.name)


def _hash_npz(arrays: dict[str, np.ndarray], name: str) -> RecordHashes:
    """Training records first, test records last."""
    suffixes = [suffix for suffix in ("_train", "", "_test") if f"x{suffix}" in arrays] or [""]
    parts = [_npz_part(arrays, suffix, name) for suffix in suffixes]
    return join_hashes([hash_arrays(part.x, part.y) for part in parts])


def _open_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:  # zip, pickle and format errors are one thing to the user: not a plain .npz
        raise DataError(f"{path.name!r} cannot be read as .npz: {first_line(error)}") from None


def _npz_array(arrays: dict[str, np.ndarray], key: str, name: str) -> np.ndarray:
    if key not in arrays:
        raise DataError(f"{name!r} has no array {key!r}{did_you_mean(key, arrays) if arrays else ''}")
    return arrays[key]


def _npz_part(arrays: dict[str, np.ndarray], suffix: str, name: str) -> _StoredPart:
    x, y = (_npz_array(arrays, f"{key}{suffix}", name) for key in "xy")
    return _StoredPart(name, x, y).checked(suffix)


def _in_memory(part: _StoredPart) -> np.ndarray:
    """The records as float32 [records, features], all finite."""
    _check_numeric(part.x, part.name, "x")
    flat = np.ascontiguousarray(part.x.reshape(len(part.x), -1).astype(np.float32) / np.float32(part.scale))
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        raise DataError(_not_finite(part.name, "x", flat, int(bad[0])))
    return flat


# Folders of .npy files


def load_folder(path: StrPath, options: LoadOptions = LoadOptions(), *, stream: str = "auto") -> Dataset:
    """Load the arrays of a folder. With `stream` "yes", `x_train` and `x_test` are `MappedArray`; with "no" they
    are read into memory; "auto" reads them unless they would take more than half of the free memory."""
    folder, test_path = Path(path).expanduser(), options.test_path
    train, train_digest, record_hashes = _read_part(folder, "")
    test_folder = Path(test_path).expanduser() if test_path else folder
    if test_path and not test_folder.is_dir():
        raise DataError(
            f"test_path={str(test_path)!r} is not a folder, but data.path is; give a folder of test records"
        )
    test, test_digest, test_hashes = None, "", None
    if test_path or _exists(folder, "x_test.npy") or _exists(folder, "y_test.npy"):
        test, test_digest, test_hashes = _read_part(test_folder, "" if test_path else "_test")
        _check_test_folder(train, test)
    classes = _declared_classes(folder)
    declared = None if classes is None else np.array(classes)
    dataset = _assemble(train, test, _mapped, declared, options)
    size = dataset.x_train.nbytes + dataset.x_test.nbytes
    if stream == "no" or (stream == "auto" and 2 * size <= free_memory()):
        x_train, x_test = _read_both(dataset.x_train, dataset.x_test)
        dataset = dataset._replace(x_train=x_train, x_test=x_test)
    digests = [train_digest, test_digest, _digest(train.groups), json.dumps(classes)]
    if test is not None:
        digests.append(_digest(test.groups))
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    dataset = dataset._replace(record_hashes=record_hashes, test_hashes=test_hashes)
    return dataset._replace(digest=digest, ledger_digest=train_digest)


def open_folder(path: StrPath, *, label: Label, labels: str) -> tuple[MappedArray, np.ndarray | None]:
    """`x` (and `y`, unless labels="ignore") of a folder, for a model of those classes or bounds."""
    folder = Path(path).expanduser()
    if labels == "ignore" and not (folder / "y.npy").exists():
        x = _open_npy(folder, "x.npy")
        _check_records(folder, "x.npy", x)
        part = _StoredPart(folder.name, x, np.zeros(0))
    else:
        part, *_ = _read_part(folder, "")
    y = None if labels == "ignore" else label_numbers(part.y, label, folder.name)
    return _mapped(part), y


def folder_digest(path: StrPath) -> str:
    """The `ledger_digest` of a folder: SHA-256 of its records and labels, whatever other files it holds."""
    return _read_part(Path(path).expanduser(), "")[1]


def content_digest(path: StrPath) -> str:
    """SHA-256 of a file's bytes, or of a folder's records and labels."""
    return folder_digest(path) if Path(path).expanduser().is_dir() else file_digest(path)


def check_unchanged(path: StrPath, content: str) -> None:
    """`DataError` unless a file or folder still has this digest: what was read must be what is charged."""
    if content_digest(path) != content:
        raise DataError(f"{str(path)!r} changed after it was read; start again")


def hash_folder(path: Path) -> RecordHashes:
    """The hash of each record of a folder (`data.hashing`)."""
    return _read_part(path, "")[2]


def free_memory() -> float:
    """Bytes that this process may still take, on the machine or in its container."""
    free = float("inf")
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        free = float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: half of the built-in memory
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    group = Path("/sys/fs/cgroup")
    # The limit of a container, in either version of control groups. Its use includes the page cache, so that the
    # estimate errs on the safe side.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no container, or one without a limit
            free = min(free, float((group / limit).read_text()) - float((group / used).read_text()))
    return free


def _read_both(train: Any, test: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both parts in one piece of memory, test records last, which pooling them need not copy."""
    memory = zeros_aligned((len(train) + len(test), train.shape[1]), train.dtype)
    x_train, x_test = memory[: len(train)], memory[len(train) :]
    train.read(np.arange(len(train)), x_train)
    test.read(np.arange(len(test)), x_test)
    return x_train, x_test


def _mapped(part: _StoredPart) -> MappedArray:
    return MappedArray([part.x], scale=part.scale)


def _read_part(folder: Path, suffix: str) -> tuple[_StoredPart, str, RecordHashes]:
    """(records, labels and groups, SHA-256 of records and labels, hash of each record)."""
    names = [f"{key}{suffix}.npy" for key in ("x", "y", "groups")]
    x, y = (_open_npy(folder, name) for name in names[:2])
    groups = np.array(_open_npy(folder, names[2])) if _exists(folder, names[2]) else None
    part = _StoredPart(folder.name, x, np.array(y), groups).checked(f"{suffix}.npy")
    if len(x) > _MAX_RECORDS:
        raise DataError(
            f"{folder.name!r}: {names[0]} has {len(x):,} records; at most {_MAX_RECORDS:,} can be used"
        )
    hasher = RecordHasher(math.prod(x.shape[1:]) + 1, y=part.y)
    digests = f"{_check_records(folder, names[0], x, hasher)}\n{_digest(part.y)}"
    return part, hashlib.sha256(digests.encode()).hexdigest(), hasher.hashes()


def _check_test_folder(train: _StoredPart, test: _StoredPart) -> None:
    if test.scale != train.scale:
        raise DataError(
            f"{train.name!r}: test records have type {test.x.dtype}, training records {train.x.dtype}; save both "
            "as the same type"
        )
    if len(train.x) + len(test.x) > _MAX_RECORDS:
        raise DataError(
            f"{train.name!r}: {len(train.x):,} training and {len(test.x):,} test records; at most "
            f"{_MAX_RECORDS:,} together can be used"
        )


def _exists(folder: Path, name: str) -> bool:
    """A broken link counts as existing, so that opening it says what is missing."""
    return os.path.lexists(folder / name)


def _open_npy(folder: Path, name: str) -> np.ndarray:
    path = folder / name
    if path.is_symlink() and not path.exists():
        raise DataError(f"{str(path)!r} is a link to {os.readlink(path)!r}, which does not exist")
    if not path.is_file():
        raise DataError(
            f"folder {str(folder)!r} has no file {name}; it may hold {', '.join(FOLDER_FILES)}, or tables (.csv, "
            ".tsv, .parquet), one for each institution"
        )
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # format, pickle and mapping errors are one thing to the user: not a plain .npy
        raise DataError(f"{str(path)!r} cannot be read as .npy: {first_line(error)}") from None
    if not isinstance(array, np.memmap) or array.ndim == 0 or array.nbytes == 0:
        raise DataError(f"{str(path)!r} is empty; at least one record is needed")
    trailing = path.stat().st_size - array.offset - array.nbytes
    if trailing:
        raise DataError(
            f"{str(path)!r} has {trailing:,} extra bytes after its records; save exactly one array in it"
        )
    return array


def _check_records(folder: Path, name: str, x: np.ndarray, hasher: RecordHasher | None = None) -> str:
    """Check the records and return their digest; one read for the check, the digest and the hashes."""
    _check_numeric(x, folder.name, name)
    if not x.flags.c_contiguous:
        raise DataError(
            f"{folder.name!r}: {name} is stored column by column (Fortran order), so each record is spread over "
            "the whole file; save numpy.ascontiguousarray of it"
        )
    written = last_written(x)
    digest, bad = _examine(x, hasher)
    if bad >= 0:
        raise DataError(_not_finite(folder.name, name, x.reshape(len(x), -1), bad))
    check_not_written(x, written)
    return digest


def _declared_classes(folder: Path) -> list[str] | None:
    path = folder / "classes.json"
    if not _exists(folder, path.name):
        return None
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        raise DataError(f'{str(path)!r} must be a list of class names, such as ["no", "yes"]')
    return [str(name) for name in classes]


def _digest(array: np.ndarray | None) -> str:
    return "" if array is None else _examine(array)[0]


def _examine(array: np.ndarray, hasher: RecordHasher | None = None) -> tuple[str, int]:
    """SHA-256 of an array (type, shape and bytes) and the position of its first number that is not finite (-1:
    none), in one read that also passes the records to `hasher`."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    bad, position = -1, 0
    for numbers in blocks(array, _BLOCK_BYTES):
        digest.update(numbers.view(np.uint8).data)
        if array.dtype.kind == "f" and bad < 0:
            # All are finite if the extremes are: as fast as memory, whereas isfinite writes an array. Checked as
            # float32, which is what the records become.
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(np.array([numbers.max(), numbers.min()]).astype(np.float32)).all():
                    bad = position + int(np.flatnonzero(~np.isfinite(numbers.astype(np.float32)))[0])
        if hasher is not None:
            hasher.add_records(numbers.reshape(-1, hasher.width - 1))
        position += len(numbers)
    return digest.hexdigest(), bad


# idx files


def read_idx(path: Path, *, blank: bool = False) -> np.ndarray:
    """The uint8 array of a verified idx file (magic number, dimensions, bytes), gzipped or not; if `blank`, zeros
    of its shape that take no memory."""
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        header = zlib.decompressobj(zlib.MAX_WBITS | 16)
        content = header.decompress(content, _LONGEST_HEADER) if blank else gzip.decompress(content)
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if blank:
        return np.broadcast_to(np.uint8(0), shape)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# Shared by .npz files and folders


def _assemble(
    train: _StoredPart,
    test: _StoredPart | None,
    features: Callable[[_StoredPart], Any],
    declared_classes: np.ndarray | None,
    options: LoadOptions,
) -> Dataset:
    """A `Dataset` with class numbers (or scaled labels) and a test part: the given one, or a share of the training
    records, stratified by class."""
    label = _array_label(declared_classes, train, options)
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise DataError(
            f"{train.name!r}: test records have shape {test.x.shape[1:]}, training records {train.x.shape[1:]}"
        )

    def encoded(part: _StoredPart) -> Part:
        return features(part), label_numbers(part.y, label, part.name), part.groups

    image_shape = train.x.shape[1:] if train.x.ndim >= 3 else ()
    what = "the classes were" if label.bounds is None else "the bounds of the label were"
    read = READ_FROM_DATA in (label.classes_from, label.bounds_from)
    known: dict[str, Any] = {
        "feature_names": _feature_names(math.prod(train.x.shape[1:])),
        "image_shape": (*image_shape, 1) if len(image_shape) == 2 else image_shape,
        "notes": (f"{NOT_COVERED}: {what} read from the data",) if read else (),
        "covered": not read,
    }
    return make_dataset(train.name, label, encoded(train), test and encoded(test), options, **known)


def _feature_names(count: int) -> tuple[str, ...]:
    return tuple(f"x{index}" for index in range(count))


def _array_label(declared: np.ndarray | None, train: _StoredPart, options: LoadOptions) -> Label:
    """Classes or bounds of the labels, and whether they had to be read from the labels."""
    task = "regression" if options.label_bounds else options.task
    if task == "auto" and declared is None and train.y.dtype.kind in "fiu":
        # Classes, if they are 0, 1, ..., all of them
        whole = train.y.dtype.kind != "f" and len(np.unique(train.y)) == train.y.max() + 1
        task = "classification" if whole else propose_task(train.y.astype(np.float64))
    if task != "regression":
        classes, read = _class_names(declared, train)
        return Label("y", classes, READ_FROM_DATA if read else PUBLIC)
    if train.y.dtype.kind not in "fiu":
        raise DataError(f"{train.name!r}: task='regression' needs numbers as labels, not {train.y.dtype}")
    low, high = options.label_bounds or (float(train.y.min()), float(train.y.max()))
    if not low < high:
        raise DataError(f"{train.name!r}: every label is {low:g}; give label_bounds, or labels that differ")
    return Label("y", bounds=(low, high), bounds_from=PUBLIC if options.label_bounds else READ_FROM_DATA)


def label_numbers(y: np.ndarray, label: Label, name: str) -> np.ndarray:
    """The class number of each label, or the label scaled by its bounds to [0, 1]."""
    if label.bounds is None:
        return class_numbers(y, label.classes, name)
    if y.dtype.kind not in "fiu":
        raise DataError(f"{name!r}: the labels have type {y.dtype}; a regression needs numbers")
    return scaled_labels(y, label.bounds, f"label of {name!r}")


def _class_names(declared: np.ndarray | None, train: _StoredPart) -> tuple[tuple[str, ...], bool]:
    """The class names, and whether they had to be read from the labels."""
    read = declared is None
    if declared is not None:
        classes = tuple(canonical(value) for value in declared)
    elif train.y.dtype.kind in "iu":
        if train.y.max() >= _MAX_CLASSES:
            raise DataError(f"{train.name!r}: a class has the number {train.y.max():,}; number them 0, 1, 2, ...")
        classes = tuple(str(value) for value in range(int(train.y.max()) + 1))
    else:
        classes = tuple(sorted({canonical(value) for value in np.unique(train.y)}))
    if len(classes) < 2 or (read and len(np.unique(train.y)) < 2):
        raise DataError(f"{train.name!r}: the labels have 1 class; at least 2 are needed to train")
    return classes, read


def class_numbers(y: np.ndarray, classes: tuple[str, ...], name: str) -> np.ndarray:
    """The class number of each label."""
    if y.dtype.kind in "iu":
        if y.min() < 0 or y.max() >= len(classes):
            raise DataError(
                f"{name!r}: labels run from {y.min()} to {y.max()}, but there are {len(classes)} classes; "
                f"number them 0 to {len(classes) - 1}"
            )
        return y.astype(np.int32)
    number_of = {value: number for number, value in enumerate(classes)}
    values, inverse = np.unique(y, return_inverse=True)
    texts = [canonical(value) for value in values]
    for text in texts:
        if text not in number_of:
            raise DataError(f"{name!r}: label {text!r} is not a class{did_you_mean(text, classes)}")
    numbers: np.ndarray = np.array([number_of[text] for text in texts], dtype=np.int32)[inverse]
    return numbers


def _check_numeric(x: np.ndarray, where: str, name: str) -> None:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{where!r}: {name} has type {x.dtype}; numbers are needed")


def _not_finite(where: str, name: str, x: np.ndarray, position: int) -> str:
    row, column = divmod(position, x.shape[1])
    return (
        f"{where!r}: feature {column} of record {row} in {name} is {x[row, column]}, which is not finite; correct "
        "it or remove the record"
    )
