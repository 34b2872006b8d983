"""A folder of .npy files as a data set: records too many for memory stay on the disk.

    records/x.npy         [records, features], or images [records, h, w(, c)]; any plain numbers
    records/y.npy         [records]: class numbers 0, 1, 2, ..., or text
    records/x_test.npy    and y_test.npy, where the test records are given
    records/groups.npy    [records]: who holds each record, for partition = "column" (groups_test.npy likewise)
    records/classes.json  a list of the class names; without it they are read from the labels

Labels and groups are copied into memory. Each load reads the files through once, for their digests and to see that
every number is finite, by the very mappings that it hands on: no other file can come between. A checkpoint knows
the folder by all of its files; a ledger knows the records by x.npy and y.npy alone, so that a file put beside them
opens no fresh budget.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.data import rows
from dither.data.dataset import Dataset, stratified_split
from dither.data.mapped import Mapped, pieces, zeros_aligned
from dither.data.tables import held_out_count, npz_classes, npz_labels
from dither.errors import DataError

STREAM = ("auto", "yes", "no")
FILES = ("x.npy", "y.npy", "x_test.npy", "y_test.npy", "groups.npy", "groups_test.npy", "classes.json")
_PIECE = 8 << 20  # bytes read at a time
_MOST = 2**31 - 1  # records that can be numbered


class _Part(NamedTuple):
    """Records, their labels, the digest of both, and each record as a number."""

    x: np.ndarray
    y: np.ndarray
    digest: str
    rows: np.ndarray


def load_folder(
    path: str | os.PathLike[str],
    *,
    test_path: str | os.PathLike[str] = "",
    test_fraction: float = 0.2,
    seed: int = 0,
    stream: str = "auto",
) -> Dataset:
    """The arrays of a folder. With `stream` "yes" `x_train` and `x_test` are `Mapped`; with "no" they are read
    into memory; "auto" reads them unless they would take more than half of the memory that is free."""
    folder = Path(path).expanduser()
    x, y, ledger_digest, numbers = _pair(folder, "")
    given = Path(test_path).expanduser() if test_path else folder
    if test_path and not given.is_dir():
        raise DataError(f"test_path={str(test_path)!r} is no folder; beside a folder of records give another one")
    test = None
    if test_path:
        test = _pair(given, "")
    elif _is_there(folder, "x_test.npy") or _is_there(folder, "y_test.npy"):
        test = _pair(folder, "_test")
    if test is not None:
        _check_test(folder.name, x, test.x)
    image_shape = x.shape[1:] if x.ndim >= 3 else ()
    named = _classes(folder)
    classes, read = npz_classes({} if named is None else {"classes": np.array(named)}, y, folder.name)
    labels = npz_labels(y, classes, folder.name)
    groups, groups_test = _groups(folder, "groups.npy", len(y)), None
    digest = [ledger_digest, test.digest if test else "", _digest(groups), json.dumps(named)]
    scale = 255.0 if x.dtype == np.uint8 and x.ndim >= 3 else 1.0
    records = Mapped([x], scale=scale)
    if test is None:
        kept, test_rows = stratified_split(labels, held_out_count(len(labels), test_fraction), seed)
        kept, test_rows = kept.astype(np.int32), test_rows.astype(np.int32)
        records_test, labels_test = records[test_rows], labels[test_rows]
        records, labels = records[kept], labels[kept]
        if groups is not None:
            groups, groups_test = groups[kept], groups[test_rows]
    else:
        records_test, labels_test = Mapped([test.x], scale=scale), npz_labels(test.y, classes, given.name)
        groups_test = _groups(given, "groups.npy" if test_path else "groups_test.npy", len(test.y))
        digest.append(_digest(groups_test))
    size = records.nbytes + records_test.nbytes
    streamed = stream == "yes" or (stream == "auto" and 2 * size > free_memory())
    held: Any = (records, records_test) if streamed else _whole(records, records_test)
    return Dataset(
        name=folder.name,
        x_train=held[0],
        y_train=labels,
        x_test=held[1],
        y_test=labels_test,
        classes=classes,
        feature_names=tuple(f"x{index}" for index in range(records.shape[1])),
        image_shape=tuple(int(side) for side in (*image_shape, *((1,) if len(image_shape) == 2 else ()))),
        schema=None,
        groups=groups,
        groups_test=groups_test,
        notes=("preprocessing not covered: the classes were read from the data",) if read else (),
        covered=not read,
        digest=hashlib.sha256("\n".join(digest).encode()).hexdigest(),
        ledger_digest=ledger_digest,
        rows=numbers,
    )


def arrays_of(path: str | os.PathLike[str], *, classes: tuple[str, ...], labels: str) -> tuple[Mapped, Any]:
    """`x` (and `y`, unless labels="ignore") of a folder, for a model of those classes."""
    folder = Path(path).expanduser()
    if labels == "ignore" and not (folder / "y.npy").exists():
        x = _open(folder, "x.npy")
        _check_numbers(folder, "x.npy", x)
        y = None
    else:
        x, y, *_ = _pair(folder, "")
    scale = 255.0 if x.dtype == np.uint8 and x.ndim >= 3 else 1.0
    return Mapped([x], scale=scale), None if y is None or labels == "ignore" else npz_labels(
        y, classes, folder.name
    )


def folder_digest(path: str | os.PathLike[str]) -> str:
    """The `ledger_digest` of a folder: SHA-256 of its records and labels, whatever lies beside them."""
    return _pair(Path(path).expanduser(), "").digest


def folder_rows(path: Path) -> np.ndarray:
    """Each record of a folder as a number (`data.rows`)."""
    return _pair(path, "").rows


def free_memory() -> float:
    """Bytes that this process may still take: of the machine, or of the container it is in."""
    free = float("inf")
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        free = float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # another system: half of what is built in
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    group = Path("/sys/fs/cgroup")
    # A container's limit, by either version of control groups. Its use has the system's cache in it: careful.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no container, or one without a limit
            free = min(free, float((group / limit).read_text()) - float((group / used).read_text()))
    return free


def _whole(train: Mapped, test: Mapped) -> tuple[np.ndarray, np.ndarray]:
    """The records in memory, the test records behind the others, as a simulation wants them."""
    found = zeros_aligned((len(train) + len(test), train.shape[1]), train.dtype)
    x, x_test = found[: len(train)], found[len(train) :]
    train.read(np.arange(len(train)), x)
    test.read(np.arange(len(test)), x_test)
    return x, x_test


def _pair(folder: Path, part: str) -> _Part:
    x, y = _open(folder, f"x{part}.npy"), _open(folder, f"y{part}.npy")
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{folder.name!r}: x{part}.npy has shape {x.shape} and y{part}.npy has shape {y.shape}; "
            "[records, ...] and [records] are needed"
        )
    if len(x) > _MOST:
        raise DataError(f"{folder.name!r}: x{part}.npy has {len(x):,} records; at most {_MOST:,} can be numbered")
    y, found = np.array(y), rows.Rows(int(np.prod(x.shape[1:])) + 1)
    both = f"{_check_numbers(folder, f'x{part}.npy', x, found)}\n{_digest(y)}"
    return _Part(x, y, hashlib.sha256(both.encode()).hexdigest(), found.labelled(y))


def _check_test(name: str, x: np.ndarray, x_test: np.ndarray) -> None:
    if x_test.shape[1:] != x.shape[1:] or (x_test.dtype == np.uint8) != (x.dtype == np.uint8):
        raise DataError(
            f"{name!r}: test records have shape {x_test.shape[1:]} and type {x_test.dtype}, training "
            f"records {x.shape[1:]} and {x.dtype}"
        )
    if len(x) + len(x_test) > _MOST:
        raise DataError(
            f"{name!r}: {len(x):,} training and {len(x_test):,} test records; at most {_MOST:,} together can be "
            "numbered"
        )


def _is_there(folder: Path, name: str) -> bool:
    """A link to nowhere is there, too: opening it says what is missing."""
    return os.path.lexists(folder / name)


def _open(folder: Path, name: str) -> np.ndarray:
    path = folder / name
    if path.is_symlink() and not path.exists():
        raise DataError(f"{str(path)!r} is a link to {os.readlink(path)!r}, which is not there")
    if not path.is_file():
        raise DataError(f"folder {str(folder)!r} has no file {name}; {', '.join(FILES)} are looked for there")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # format, pickle and mapping errors are one thing to the user: not a plain .npy
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{str(path)!r} cannot be read as .npy: {first}") from None
    if not isinstance(array, np.memmap) or array.ndim == 0 or array.nbytes == 0:
        raise DataError(f"{str(path)!r} is empty; at least one record is needed")
    behind = path.stat().st_size - array.offset - array.nbytes
    if behind:
        raise DataError(
            f"{str(path)!r} has {behind:,} bytes after its records, which nothing would read or check; save one "
            "array in it"
        )
    return array


def _check_numbers(folder: Path, name: str, x: np.ndarray, found: rows.Rows | None = None) -> str:
    """Refuse what no record can be; digest and rows come of the same reading."""
    if x.dtype.kind not in "fiub":
        raise DataError(f"{folder.name!r}: {name} has type {x.dtype}; numbers are needed")
    if not x.flags.c_contiguous:
        raise DataError(
            f"{folder.name!r}: {name} is stored column by column (Fortran order), where a record is spread over "
            "the whole file; save numpy.ascontiguousarray of it"
        )
    digest, bad = _examined(x, found)
    if bad >= 0:
        row, column = divmod(bad, int(np.prod(x.shape[1:])))
        raise DataError(
            f"{folder.name!r}: feature {column} of record {row} in {name} is {x.reshape(-1)[bad]}, not finite; "
            "correct it or remove the record"
        )
    return digest


def _groups(folder: Path, name: str, count: int) -> np.ndarray | None:
    if not _is_there(folder, name):
        return None
    groups = np.array(_open(folder, name))
    if groups.shape != (count,):
        raise DataError(f"{folder.name!r}: {name} has shape {groups.shape} for {count:,} records; one a record")
    return groups


def _classes(folder: Path) -> list[str] | None:
    path = folder / "classes.json"
    if not _is_there(folder, path.name):
        return None
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        raise DataError(f'{str(path)!r} must be a list of class names, as ["no", "yes"]')
    return [str(name) for name in classes]


def _digest(array: np.ndarray | None) -> str:
    return "" if array is None else _examined(array)[0]


def _examined(array: np.ndarray, found: rows.Rows | None = None) -> tuple[str, int]:
    """SHA-256 of an array (its type, its shape, its bytes) and the place of the first number in it that is not
    finite (-1: none), in one reading; its records go to `found` meanwhile."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    bad, at = -1, 0
    for numbers in pieces(array, _PIECE):
        digest.update(numbers.view(np.uint8).data)
        if array.dtype.kind == "f" and bad < 0:
            # Both ends finite, all finite: as quick as memory, while isfinite writes an array. As float32, which
            # is what the records become.
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(np.array([numbers.max(), numbers.min()]).astype(np.float32)).all():
                    bad = at + int(np.flatnonzero(~np.isfinite(numbers.astype(np.float32)))[0])
        if found is not None:
            found.add_records(numbers.reshape(-1, found.width - 1))
        at += len(numbers)
    return digest.hexdigest(), bad
