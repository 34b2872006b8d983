"""Tables and array files to a `Dataset`: CSV, Parquet, and .npz."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dither.data import cells, rows
from dither.data.dataset import Dataset, stratified_split
from dither.data.drafting import draft_from_frame
from dither.data.schema import Encoded, Schema
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".parquet")
NO_GROUP = "(missing)"


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The raw cells of a CSV (as text; the schema decides what is a number) or Parquet file."""
    import pandas as pd

    path = existing_file(path)
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DataError(f"{path.name!r}: suffix {suffix!r} is not supported; give a .csv, .parquet or .npz file")
    if path.stat().st_size == 0:
        raise DataError(f"{path.name!r} is empty; it needs a header and at least one row")
    try:
        if suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            # index_col=False: a trailing comma must not shift the columns by one.
            frame = pd.read_csv(
                path,
                dtype=str,
                keep_default_na=False,
                skipinitialspace=True,
                index_col=False,
                encoding="utf-8-sig",
            )
    except Exception as error:  # pandas and pyarrow raise many unrelated kinds for one bad file
        raise DataError(f"{path.name!r} cannot be read as a {suffix[1:]} table: {_first_line(error)}") from None
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if len(frame) == 0:
        raise DataError(f"{path.name!r} has a header but no rows; it needs at least one")
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DataError(f"{path.name!r} has two columns called {repeated[0]!r}; rename one")
    return frame


def existing_file(path: str | os.PathLike[str]) -> Path:
    """The path, or a clear error."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; here a .csv, .parquet or .npz file is needed")
    if not path.is_file():
        raise DataError(f"file {str(path)!r} not found; check the path")
    return path


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_table(
    path: str | os.PathLike[str],
    *,
    test_path: str | os.PathLike[str] = "",
    label: str = "",
    schema: Schema | None = None,
    encoding: str = "minmax",
    features: str = "all",
    test_fraction: float = 0.2,
    group_column: str = "",
    seed: int = 0,
) -> Dataset:
    """A user's own table. Without a schema one is drafted in memory, and the notes say what that means."""
    frame = read_table(path)
    name = Path(path).name
    if schema is None:
        if not label:
            raise DataError(f'no label column was named for {name!r}; give label = "COLUMN" or a schema')
        # The institution a record comes from is not a fact about the record.
        exclude = [group_column] if group_column and group_column != label else []
        schema = draft_from_frame(frame, label, name=name, exclude=exclude)
    elif label and label != schema.label.column:
        raise DataError(
            f"label={label!r}, but the schema's label column is {schema.label.column!r}; make them agree"
        )
    test_frame = read_table(test_path) if test_path else None
    found = dataset_from_frames(
        name,
        frame,
        test_frame,
        schema,
        encoding,
        features,
        test_fraction=test_fraction,
        group_column=group_column,
        seed=seed,
    )
    return found._replace(rows=rows.of_table(frame))


def dataset_from_frames(
    name: str,
    frame: pd.DataFrame,
    test_frame: pd.DataFrame | None,
    schema: Schema,
    encoding: str,
    features: str,
    *,
    test_fraction: float = 0.2,
    group_column: str = "",
    seed: int = 0,
) -> Dataset:
    """Encode by the schema; cut off a stratified test part where there is no test table."""
    train = schema.encode(frame, encoding, features)
    x_train, y_train = train.x, _labels(train)
    groups = _groups(frame, group_column)
    if test_frame is not None:
        test = schema.encode(test_frame, encoding, features)
        x_test, y_test, groups_test = test.x, _labels(test), _groups(test_frame, group_column)
    else:
        kept, test_rows = stratified_split(y_train, held_out_count(len(y_train), test_fraction), seed)
        x_test, y_test = x_train[test_rows], y_train[test_rows]
        x_train, y_train = x_train[kept], y_train[kept]
        groups_test = None if groups is None else groups[test_rows]
        groups = None if groups is None else groups[kept]
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=schema.label.classes,
        feature_names=train.feature_names,
        image_shape=(),
        schema=schema,
        groups=groups,
        groups_test=groups_test,
        notes=schema.coverage_notes(),
        covered=schema.covered,
    )


def _labels(encoded: Encoded) -> np.ndarray:
    if encoded.y is None:
        raise DataError("the table was encoded without its label; encode it with labels='required'")
    return encoded.y


def _groups(frame: pd.DataFrame, column: str) -> np.ndarray | None:
    if not column:
        return None
    if column not in frame.columns:
        present = [str(name) for name in frame.columns]
        raise DataError(f"partition column {column!r} is not in the table{did_you_mean(column, present)}")
    return cells.text(frame[column], NO_GROUP)


def held_out_count(rows: int, test_fraction: float) -> int:
    """How many of `rows` are kept for testing."""
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test_fraction={test_fraction} must be at least 0 and below 1")
    return round(rows * test_fraction)


def encode_features(
    schema: Schema | str | os.PathLike[str],
    path: str | os.PathLike[str],
    encoding: str = "minmax",
    features: str = "all",
    *,
    labels: str = "if present",
) -> Encoded:
    """A file to predict on, encoded exactly as the training data were. The label column may be absent."""
    if not isinstance(schema, Schema):
        schema = Schema.load(schema)
    return schema.encode(read_table(path), encoding, features, labels=labels)


def read_arrays(path: str | os.PathLike[str], *, classes: tuple[str, ...], labels: str = "required") -> Encoded:
    """Arrays `x` (and `y`, unless labels="ignore") of a .npz file, for a model of those classes."""
    path = existing_file(path)
    arrays = _open_npz(path)
    if "x" not in arrays:
        raise DataError(f"{path.name!r} has no array 'x'{did_you_mean('x', arrays) if arrays else ''}")
    x = _flat(arrays["x"], path.name)
    names = tuple(f"x{index}" for index in range(x.shape[1]))
    if labels == "ignore":
        return Encoded(x, None, names)
    _, y = _xy(arrays, "", path.name)
    return Encoded(x, npz_labels(y, classes, path.name), names)


def load_npz(
    path: str | os.PathLike[str],
    *,
    test_path: str | os.PathLike[str] = "",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Arrays `x, y`, or `x_train, y_train, x_test, y_test`, used as they are.

    Images ([n, h, w] or [n, h, w, c]) are flattened, and divided by 255 when they are uint8. Labels are
    whole numbers 0, 1, 2, ..., or text. An array `classes` names the classes; without it they are read
    from the labels, which the notes then say.
    """
    path = existing_file(path)
    arrays = _open_npz(path)
    split = "x_train" in arrays
    x, y = _xy(arrays, "_train" if split else "", path.name)
    x_test, y_test = None, None
    if test_path:
        held_out = existing_file(test_path)
        other = _open_npz(held_out)
        x_test, y_test = _xy(other, "_test" if "x_test" in other else "", held_out.name)
    elif split and "x_test" in arrays:
        x_test, y_test = _xy(arrays, "_test", path.name)
    image_shape = x.shape[1:] if x.ndim >= 3 else ()
    if len(image_shape) == 2:
        image_shape = (*image_shape, 1)
    if x_test is not None and x_test.shape[1:] != x.shape[1:]:
        raise DataError(
            f"{path.name!r}: test records have shape {x_test.shape[1:]}, training records {x.shape[1:]}"
        )
    classes, read = npz_classes(arrays, y, path.name)
    labels = npz_labels(y, classes, path.name)
    flat = _flat(x, path.name)
    if x_test is None or y_test is None:
        kept, test_rows = stratified_split(labels, held_out_count(len(labels), test_fraction), seed)
        flat_test, labels_test = flat[test_rows], labels[test_rows]
        flat, labels = flat[kept], labels[kept]
    else:
        flat_test, labels_test = _flat(x_test, path.name), npz_labels(y_test, classes, path.name)
    note = "preprocessing not covered: the classes were read from the data"
    return Dataset(
        name=path.name,
        x_train=flat,
        y_train=labels,
        x_test=flat_test,
        y_test=labels_test,
        classes=classes,
        feature_names=tuple(f"x{index}" for index in range(flat.shape[1])),
        image_shape=tuple(int(side) for side in image_shape),
        schema=None,
        groups=None,
        groups_test=None,
        notes=(note,) if read else (),
        covered=not read,
        rows=_rows(arrays, path.name),
    )


def npz_rows(path: Path) -> np.ndarray:
    """Each record of a .npz file as a number (`data.rows`), test records too."""
    return _rows(_open_npz(existing_file(path)), path.name)


def _rows(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    parts = [part for part in ("", "_train", "_test") if f"x{part}" in arrays] or [""]
    return np.concatenate([rows.of_arrays(*_xy(arrays, part, name)) for part in parts], axis=1)


def _open_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:  # zip, pickle and format errors are one thing to the user: not a plain .npz
        raise DataError(f"{path.name!r} cannot be read as .npz: {_first_line(error)}") from None


def _xy(arrays: dict[str, np.ndarray], part: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    for key in (f"x{part}", f"y{part}"):
        if key not in arrays:
            raise DataError(f"{name!r} has no array {key!r}{did_you_mean(key, arrays) if arrays else ''}")
    x, y = arrays[f"x{part}"], arrays[f"y{part}"]
    if len(x) == 0:
        raise DataError(f"{name!r}: array {f'x{part}'!r} is empty; at least one record is needed")
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{name!r}: x{part} has shape {x.shape} and y{part} has shape {y.shape}; "
            f"[records, ...] and [records] are needed"
        )
    return x, y


def npz_classes(arrays: dict[str, np.ndarray], y: np.ndarray, name: str) -> tuple[tuple[str, ...], bool]:
    """The class names, and whether they had to be read from the labels."""
    if "classes" in arrays:
        classes, read = tuple(cells.canonical(value) for value in arrays["classes"]), False
    elif y.dtype.kind in "iu":
        classes, read = tuple(str(value) for value in range(int(y.max()) + 1)), True
    else:
        classes, read = tuple(sorted({cells.canonical(value) for value in np.unique(y)})), True
    if len(classes) < 2 or (read and len(np.unique(y)) < 2):
        raise DataError(f"{name!r}: the labels have 1 class; at least 2 are needed to train")
    return classes, read


def npz_labels(y: np.ndarray, classes: tuple[str, ...], name: str) -> np.ndarray:
    """The class number of each label."""
    if y.dtype.kind in "iu":
        if y.min() < 0 or y.max() >= len(classes):
            raise DataError(
                f"{name!r}: labels run from {y.min()} to {y.max()}, but there are {len(classes)} classes; "
                f"number them 0 to {len(classes) - 1}"
            )
        return y.astype(np.int32)
    number_of: dict[str, int] = {value: number for number, value in enumerate(classes)}
    values, inverse = np.unique(y, return_inverse=True)
    numbers: list[int] = []
    for value in values:
        text = cells.canonical(value)
        if text not in number_of:
            raise DataError(f"{name!r}: label {text!r} is not a class{did_you_mean(text, classes)}")
        numbers.append(number_of[text])
    return np.array(numbers, dtype=np.int32)[inverse]


def _flat(x: np.ndarray, name: str) -> np.ndarray:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{name!r}: features have type {x.dtype}; numbers are needed")
    scale: Any = np.float32(255.0) if x.dtype == np.uint8 and x.ndim >= 3 else np.float32(1.0)
    flat = np.ascontiguousarray(x.reshape(len(x), -1).astype(np.float32) / scale)
    bad = np.argwhere(~np.isfinite(flat))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise DataError(
            f"{name!r}: feature {column} of record {row} is {flat[row, column]}, not finite; correct it or "
            f"remove the record"
        )
    return flat
