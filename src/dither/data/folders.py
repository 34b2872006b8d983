"""A folder of .npy files as a data set: records too many for memory stay on the disk.

    records/x.npy         [records, features], or images [records, h, w(, c)]; any plain numbers
    records/y.npy         [records]: class numbers 0, 1, 2, ..., or text
    records/x_test.npy    and y_test.npy, where the test records are given
    records/groups.npy    [records]: who holds each record, for partition = "column" (groups_test.npy likewise)
    records/classes.json  a list of the class names; without it they are read from the labels

Labels and groups are held in memory. The files are read through once, for their digests (by which a ledger and a
checkpoint know the records) and to see that every number is finite.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dither.data.dataset import Dataset, stratified_split
from dither.data.mapped import Mapped, zeros_aligned
from dither.data.tables import held_out_count, npz_classes, npz_labels
from dither.errors import DataError

STREAM = ("auto", "yes", "no")
FILES = ("x.npy", "y.npy", "x_test.npy", "y_test.npy", "groups.npy", "groups_test.npy", "classes.json")
_PIECE = 8 << 20  # bytes read at a time


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
    x, y = _pair(folder, "")
    given = Path(test_path).expanduser() if test_path else folder
    if test_path and not given.is_dir():
        raise DataError(f"test_path={str(test_path)!r} is no folder; beside a folder of records give another one")
    x_test, y_test = None, None
    if test_path:
        x_test, y_test = _pair(given, "")
    elif (folder / "x_test.npy").exists() or (folder / "y_test.npy").exists():
        x_test, y_test = _pair(folder, "_test")
    if x_test is not None and (
        x_test.shape[1:] != x.shape[1:] or (x_test.dtype == np.uint8) != (x.dtype == np.uint8)
    ):
        raise DataError(
            f"{folder.name!r}: test records have shape {x_test.shape[1:]} and type {x_test.dtype}, training "
            f"records {x.shape[1:]} and {x.dtype}"
        )
    image_shape = x.shape[1:] if x.ndim >= 3 else ()
    named = _classes(folder)
    classes, read = npz_classes({} if named is None else {"classes": np.array(named)}, y, folder.name)
    labels = npz_labels(y, classes, folder.name)
    groups, groups_test = _groups(folder, "groups.npy", len(y)), None
    scale = 255.0 if x.dtype == np.uint8 and x.ndim >= 3 else 1.0
    records = Mapped([x], scale=scale)
    if x_test is None or y_test is None:
        rows, test_rows = stratified_split(labels, held_out_count(len(labels), test_fraction), seed)
        rows, test_rows = rows.astype(np.int32), test_rows.astype(np.int32)
        records_test, labels_test = records[test_rows], labels[test_rows]
        records, labels = records[rows], labels[rows]
        if groups is not None:
            groups, groups_test = groups[rows], groups[test_rows]
    else:
        records_test, labels_test = Mapped([x_test], scale=scale), npz_labels(y_test, classes, given.name)
        groups_test = _groups(given, "groups.npy" if test_path else "groups_test.npy", len(y_test))
    digest = folder_digest(folder) + (folder_digest(given) if test_path else "")
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
        digest=hashlib.sha256(digest.encode()).hexdigest(),
    )


def arrays_of(path: str | os.PathLike[str], *, classes: tuple[str, ...], labels: str) -> tuple[Mapped, Any]:
    """`x` (and `y`, unless labels="ignore") of a folder, for a model of those classes."""
    folder = Path(path).expanduser()
    if labels == "ignore" and not (folder / "y.npy").exists():
        x = _open(folder, "x.npy")
        _check_numbers(folder, "x.npy", x)
        y = None
    else:
        x, y = _pair(folder, "")
    scale = 255.0 if x.dtype == np.uint8 and x.ndim >= 3 else 1.0
    return Mapped([x], scale=scale), None if y is None or labels == "ignore" else npz_labels(
        y, classes, folder.name
    )


def folder_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 over the names and contents of a folder's files, read in pieces."""
    folder = Path(path).expanduser()
    if not (folder / "x.npy").is_file():
        raise DataError(f"folder {str(folder)!r} has no file x.npy; {', '.join(FILES)} are looked for there")
    digest = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            digest.update(f"{name} {_examined(folder / name)[0]}\n".encode())
    return digest.hexdigest()


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


def _pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = _open(folder, f"x{part}.npy"), _open(folder, f"y{part}.npy")
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{folder.name!r}: x{part}.npy has shape {x.shape} and y{part}.npy has shape {y.shape}; "
            "[records, ...] and [records] are needed"
        )
    if len(x) >= 2**31:
        raise DataError(f"{folder.name!r}: x{part}.npy has {len(x):,} records; at most 2^31 - 1 can be numbered")
    _check_numbers(folder, f"x{part}.npy", x)
    return x, np.asarray(y)


def _open(folder: Path, name: str) -> np.ndarray:
    path = folder / name
    if not path.is_file():
        raise DataError(f"folder {str(folder)!r} has no file {name}; {', '.join(FILES)} are looked for there")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # format, pickle and mapping errors are one thing to the user: not a plain .npy
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{str(path)!r} cannot be read as .npy: {first}") from None
    if not isinstance(array, np.ndarray) or array.ndim == 0 or len(array) == 0:
        raise DataError(f"{str(path)!r} is empty; at least one record is needed")
    return array


def _check_numbers(folder: Path, name: str, x: np.ndarray) -> None:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{folder.name!r}: {name} has type {x.dtype}; numbers are needed")
    if not x.flags.c_contiguous:
        raise DataError(
            f"{folder.name!r}: {name} is stored column by column (Fortran order), where a record is spread over "
            "the whole file; save numpy.ascontiguousarray of it"
        )
    bad = _examined(folder / name)[1]
    if bad >= 0:
        row, column = divmod(bad, int(np.prod(x.shape[1:])))
        raise DataError(
            f"{folder.name!r}: feature {column} of record {row} in {name} is {x.reshape(-1)[bad]}, not finite; "
            "correct it or remove the record"
        )


def _groups(folder: Path, name: str, count: int) -> np.ndarray | None:
    if not (folder / name).exists():
        return None
    groups = _open(folder, name)
    if groups.shape != (count,):
        raise DataError(f"{folder.name!r}: {name} has shape {groups.shape} for {count:,} records; one a record")
    return groups


def _classes(folder: Path) -> list[str] | None:
    path = folder / "classes.json"
    if not path.exists():
        return None
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        raise DataError(f'{str(path)!r} must be a list of class names, as ["no", "yes"]')
    return [str(name) for name in classes]


def _examined(path: Path) -> tuple[str, int]:
    """SHA-256 of a file and, of records, the place of the first number that is not finite (-1: none)."""
    status = path.stat()
    return _examine(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _examine(path: Path, size: int, changed: int) -> tuple[str, int]:
    """One reading serves digest and check; a file of the same size and time is the one that was read before."""
    del size, changed
    dtype, header = None, 0
    if path.name.startswith("x"):
        array = _open(path.parent, path.name)
        header = int(getattr(array, "offset", 0))
        dtype = array.dtype if array.dtype.kind == "f" else None
    digest, bad, at = hashlib.sha256(), -1, 0
    buffer = np.empty(_PIECE, np.uint8)
    with path.open("rb", buffering=0) as file:
        digest.update(file.read(header))
        while count := _fill(file, buffer):
            digest.update(buffer[:count].data)
            if dtype is not None and bad < 0 and count >= dtype.itemsize:
                numbers = buffer[: count - count % dtype.itemsize].view(dtype)
                # Both ends finite, all finite: as quick as memory, while isfinite writes an array. As float32,
                # which is what the records become.
                with np.errstate(over="ignore", invalid="ignore"):
                    if not np.isfinite(np.array([numbers.max(), numbers.min()]).astype(np.float32)).all():
                        bad = at + int(np.flatnonzero(~np.isfinite(numbers.astype(np.float32)))[0])
                at += len(numbers)
    return digest.hexdigest(), bad


def _fill(file: Any, buffer: np.ndarray) -> int:
    """Read until the buffer is full or the file ends: a single read may give less."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:].data)):
        done += count
    return done
