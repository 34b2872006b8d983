"""The data sets Dither knows by name, and `load`, the front door for those and for a user's own files."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dither.data.dataset import Dataset
from dither.data.folders import load_folder
from dither.data.images import image_dataset, read_idx, split_images, upright
from dither.data.published import ADULT, EMNIST_BALANCED, EMNIST_BYMERGE, FASHION_MNIST, MNIST, MNIST_5K
from dither.data.schema import Schema
from dither.data.sources import Progress, Remote, obtain
from dither.data.tables import dataset_from_frames, load_npz, load_table
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
    "income",
)  # fmt: skip
DIGIT_CLASSES = tuple("0123456789")
FASHION_CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")  # the official mapping file
BYMERGE_TEST_RECORDS = 16_323  # leaves 100,000 for training: 40 users x 2,500 (DP-SCAFFOLD)


class Options(NamedTuple):
    """What `load` was asked for, for the loaders of named sets."""

    encoding: str
    features: str
    schema: Schema | None
    group_column: str
    data_dir: str | os.PathLike[str] | None
    progress: Progress | None


class Entry(NamedTuple):
    """One named data set. `remote` is None for those that come with scikit-learn."""

    name: str
    summary: str
    records: str
    remote: Remote | None
    load: Callable[[Options], Dataset]


# Loaders


def packaged_schema(name: str) -> Schema:
    """The schema of public values that ships with Dither for a table of the catalog."""
    import tomllib

    text = resources.files("dither.data").joinpath("schemas", f"{name}.toml").read_text(encoding="utf-8")
    return Schema.from_dict(tomllib.loads(text))


def read_adult(path: Path) -> pd.DataFrame:
    """Adult's records in either published form: the original files, or CSVs with a header."""
    import pandas as pd

    with path.open(encoding="utf-8") as file:
        first = file.readline()
    # The CSVs start with a header, the original test file with the line "|1x3 Cross validator".
    skip = 1 if first.startswith(("age,", "|")) else 0
    frame = pd.read_csv(
        path, header=None, names=list(ADULT_COLUMNS), skiprows=skip, dtype=str, keep_default_na=False,
        skipinitialspace=True,
    )  # fmt: skip
    frame["income"] = frame["income"].str.rstrip(".")  # the original test file writes "<=50K."
    return frame


def _load_adult(options: Options) -> Dataset:
    files = obtain(ADULT, data_dir=options.data_dir, progress=options.progress)
    schema = options.schema or packaged_schema("adult")
    train, test = read_adult(files["train"]), read_adult(files["test"])
    return dataset_from_frames(
        "adult", train, test, schema, options.encoding, options.features, group_column=options.group_column
    )


def _load_breast_cancer(options: Options) -> Dataset:
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    frame = pd.DataFrame(bunch.data, columns=list(bunch.feature_names))
    frame["diagnosis"] = [str(bunch.target_names[target]) for target in bunch.target]
    schema = options.schema or packaged_schema("breast-cancer")
    return dataset_from_frames(
        "breast-cancer",
        frame,
        None,
        schema,
        options.encoding,
        options.features,
        group_column=options.group_column,
    )


def _load_digits(options: Options) -> Dataset:
    _images_only("digits", options)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    train, test = split_images(bunch.images, bunch.target, round(0.2 * len(bunch.target)))
    return image_dataset("digits", train, test, DIGIT_CLASSES, largest=16)


def _load_mnist_5k(options: Options) -> Dataset:
    _images_only("mnist-5k", options)
    path = obtain(MNIST_5K, data_dir=options.data_dir, progress=options.progress)["images"]
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    train, test = split_images(table[:, :-1].reshape(-1, 28, 28), table[:, -1], len(table) // 5)
    notes = ("5,000 images of MNIST, 500 a digit, not the full set",)
    return image_dataset("mnist-5k", train, test, DIGIT_CLASSES, notes=notes)


def _load_idx(remote: Remote, classes: tuple[str, ...], transposed: bool = False) -> Callable[[Options], Dataset]:
    def load_parts(options: Options) -> Dataset:
        _images_only(remote.name, options)
        files = obtain(remote, data_dir=options.data_dir, progress=options.progress)
        parts = {part: read_idx(path) for part, path in files.items()}
        for part in ("train images", "test images"):
            parts[part] = upright(parts[part]) if transposed else parts[part]
        train = (parts["train images"], parts["train labels"])
        return image_dataset(remote.name, train, (parts["test images"], parts["test labels"]), classes)

    return load_parts


def _load_bymerge(options: Options) -> Dataset:
    _images_only("emnist-bymerge", options)
    files = obtain(EMNIST_BYMERGE, data_dir=options.data_dir, progress=options.progress)
    images, labels = read_idx(files["test images"]), read_idx(files["test labels"])
    train, test = split_images(images, labels, BYMERGE_TEST_RECORDS)
    notes = (
        "EMNIST ByMerge test part, not the Balanced set: the same 47 classes, unequal in size",
        f"split here, stratified, into {len(train[1]):,} training and {len(test[1]):,} test images",
    )
    train, test = (upright(train[0]), train[1]), (upright(test[0]), test[1])
    return image_dataset("emnist-bymerge", train, test, EMNIST_CLASSES, notes=notes)


def _images_only(name: str, options: Options) -> None:
    """A column or a schema means nothing for images: say so. (How columns are encoded does not matter where
    there are none, so that a preset made for tables runs on images too.)"""
    for key, value, default in (("group_column", options.group_column, ""), ("schema", options.schema, None)):
        if value != default:
            shown = value if isinstance(value, str) else "..."
            raise DataError(f"{key}={shown!r} is for tables, but {name!r} holds images; leave it out")


_ENTRIES = (
    Entry("adult", "census income, 14 columns, 2 classes", "32,561 + 16,281", ADULT, _load_adult),
    Entry("mnist", "handwritten digits, 28 x 28", "60,000 + 10,000", MNIST, _load_idx(MNIST, DIGIT_CLASSES)),
    Entry("mnist-5k", "a 5,000-image subset of MNIST", "4,000 + 1,000", MNIST_5K, _load_mnist_5k),
    Entry(
        "fashion-mnist",
        "clothes, 28 x 28, 10 classes",
        "60,000 + 10,000",
        FASHION_MNIST,
        _load_idx(FASHION_MNIST, FASHION_CLASSES),
    ),
    Entry(
        "emnist-balanced",
        "handwritten characters, 47 classes",
        "112,800 + 18,800",
        EMNIST_BALANCED,
        _load_idx(EMNIST_BALANCED, EMNIST_CLASSES, transposed=True),
    ),
    Entry(
        "emnist-bymerge",
        "EMNIST ByMerge test part, 47 classes, not balanced",
        "100,000 + 16,323",
        EMNIST_BYMERGE,
        _load_bymerge,
    ),
    Entry("digits", "handwritten digits, 8 x 8, inside scikit-learn", "1,438 + 359", None, _load_digits),
    Entry("breast-cancer", "tumours, 30 numbers, inside scikit-learn", "455 + 114", None, _load_breast_cancer),
)


def entries() -> dict[str, Entry]:
    """Every data set Dither knows by name."""
    return {entry.name: entry for entry in _ENTRIES}


def _entry(name: str) -> Entry:
    known = entries()
    if name not in known:
        raise DataError(f"unknown data set {name!r}{did_you_mean(name, known)}")
    return known[name]


def get(
    name: str, *, data_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Fetch and verify the files of a named set; () for those that come with scikit-learn."""
    remote = _entry(name).remote
    return () if remote is None else tuple(obtain(remote, data_dir=data_dir, progress=progress).values())


def load(
    name: str = "",
    *,
    path: str | os.PathLike[str] = "",
    test_path: str | os.PathLike[str] = "",
    label: str = "",
    schema: Schema | str | os.PathLike[str] = "",
    encoding: str = "minmax",
    features: str = "all",
    data_dir: str | os.PathLike[str] | None = None,
    test_fraction: float = 0.2,
    group_column: str = "",
    seed: int = 0,
    stream: str = "auto",
    progress: Progress | None = None,
) -> Dataset:
    """A data set by its `name`, or a user's own file by its `path` (.csv, .parquet or .npz, or a folder of .npy).

    encoding, features   see `Schema.encode`
    schema               a `Schema` or a schema.toml; without one, your own table gets a draft in memory
    test_path            a second file of test records; without it, `test_fraction` of the rows, chosen by
                         `seed` and stratified by class (the split of a named set is fixed)
    group_column         a column whose values `partition(kind="column")` will use
    data_dir             a folder with local copies of the named sets, looked at before anything is downloaded
    stream               of a folder: whether its records stay on the disk (see `load_folder`)
    progress             is called with one short line for each thing that takes time
    """
    if bool(name) == bool(path):
        given = (
            f"both name={name!r} and path={str(path)!r} are given" if name else "neither name nor path is given"
        )
        raise DataError(f"{given}; give exactly one")
    folder = bool(path) and Path(path).expanduser().is_dir()
    if stream == "yes" and not folder:
        raise DataError(
            f"stream='yes', but {name or str(path)!r} is no folder of .npy files (x.npy, y.npy); leave it out, or "
            "save the records as such a folder"
        )
    agreed: Schema | None = None
    if schema and not folder:
        agreed = schema if isinstance(schema, Schema) else Schema.load(schema)
    if name:
        entry = _entry(name)
        for key, value in (("label", label), ("test_path", test_path)):
            if value:
                raise DataError(f"{key}={str(value)!r} is for your own files; leave it out with name={name!r}")
        return entry.load(Options(encoding, features, agreed, group_column, data_dir, progress))
    if folder or Path(path).suffix.lower() == ".npz":
        what = "folder of .npy files" if folder else ".npz file"
        for key, unused in (
            ("schema", bool(schema)),
            ("label", bool(label)),
            ("group_column", bool(group_column)),
        ):
            if unused:
                raise DataError(f"{key} is given, but a {what} holds arrays, used as they are; leave it out")
        if folder:
            return load_folder(path, test_path=test_path, test_fraction=test_fraction, seed=seed, stream=stream)
        return load_npz(path, test_path=test_path, test_fraction=test_fraction, seed=seed)
    return load_table(
        path, test_path=test_path, label=label, schema=agreed, encoding=encoding, features=features,
        test_fraction=test_fraction, group_column=group_column, seed=seed,
    )  # fmt: skip
