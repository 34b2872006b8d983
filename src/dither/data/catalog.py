"""The data sets Dither knows by name, and `load`, which loads them and a user's own files."""

from __future__ import annotations

import hashlib
import io
import os
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dither.data.arrays import arrays_in_memory, hash_folder, hash_npz, load_folder, load_npz, read_idx
from dither.data.dataset import (
    Dataset,
    LoadOptions,
    Source,
    blank_features,
    dataset_from_sources,
    dataset_from_tables,
    stratified_split,
    zeros_aligned,
)
from dither.data.downloads import Download, Origin, Progress, obtain
from dither.data.drafts import draft
from dither.data.hashing import RecordHashes, file_digest, hash_table
from dither.data.schema import Schema, with_label_bounds
from dither.data.tables import StrPath, check_table, join_tables, read_table, table_files
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
    "income",
)  # fmt: skip
STREAM = ("auto", "yes", "no")

Images = tuple[np.ndarray, np.ndarray]  # (images [n, height, width], labels [n])


class CatalogEntry(NamedTuple):
    """One data set of `catalog.toml`. `download` is None for those that come with scikit-learn."""

    name: str
    kind: str  # "table" or "images"
    summary: str
    records: str
    classes: tuple[str, ...] = ()  # of images; a table's are in its schema
    notes: tuple[str, ...] = ()
    test_records: int = 0  # of images that are published without a test part
    transposed: bool = False  # published with rows and columns exchanged
    largest: int = 255  # grey value
    scikit_learn: str = ""  # the function that loads it
    download: Download | None = None


def entries() -> dict[str, CatalogEntry]:
    """Every data set Dither knows by name."""
    catalog: dict[str, CatalogEntry] = {}
    for name, listed in _read_toml("catalog.toml").items():
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in listed.items()}
        if "parts" in values:
            origins = tuple(Origin(**{**each, "files": tuple(each["files"])}) for each in values.pop("origins"))
            values["download"] = Download(name, values.pop("folder"), values.pop("parts"), origins)
        catalog[name] = CatalogEntry(name, **values)
    return catalog


def _entry(name: str) -> CatalogEntry:
    catalog = entries()
    if name not in catalog:
        raise DataError(f"unknown data set {name!r}{did_you_mean(name, catalog)}")
    return catalog[name]


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("dither.data").joinpath(name).read_text(encoding="utf-8"))


def packaged_schema(name: str) -> Schema:
    """The schema of public values that ships with Dither for a table of the catalog."""
    return Schema.from_dict(_read_toml(f"schemas/{name}.toml"))


# What is published


def _from_scikit_learn(entry: CatalogEntry) -> Any:
    from sklearn import datasets

    return getattr(datasets, entry.scikit_learn)()


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


def adult_labels(path: Path, classes: Sequence[str]) -> np.ndarray:
    """The class numbers of Adult's records, read without pandas."""
    number_of = {name: number for number, name in enumerate(classes)}
    lines = path.read_text(encoding="utf-8").splitlines()
    labels = (line.rpartition(",")[2].strip().rstrip(".") for line in lines)
    return np.array([number_of[label] for label in labels if label in number_of], np.int32)


def _read_tables(entry: CatalogEntry, files: Mapping[str, Path]) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Training records, and test records if they are published."""
    if files:
        return read_adult(files["train"]), read_adult(files["test"])
    import pandas as pd

    bunch = _from_scikit_learn(entry)
    frame = pd.DataFrame(bunch.data, columns=list(bunch.feature_names))
    frame["diagnosis"] = [str(bunch.target_names[target]) for target in bunch.target]
    return frame, None


def _read_images(entry: CatalogEntry, files: Mapping[str, Path], blank: bool) -> tuple[Images, Images]:
    """Training and test images; of idx files, if `blank`, labels and shapes alone. A split of our own is the
    same for everyone: results on a named set must be comparable."""
    if entry.scikit_learn:
        bunch = _from_scikit_learn(entry)
        images, labels = bunch.images, bunch.target
    elif "images" in files:  # a CSV file whose last column is the label
        table = np.loadtxt(files["images"], delimiter=",", dtype=np.uint8)
        images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    else:
        read = {part: read_idx(path, blank=blank and part.endswith("images")) for part, path in files.items()}
        images, labels = upright(read["test images"], entry), read["test labels"]
        if not entry.test_records:
            return (upright(read["train images"], entry), read["train labels"]), (images, labels)
    train, test = stratified_split(labels, entry.test_records, seed=0)
    if not any(images.strides):  # blank
        return (images[: len(train)], labels[train]), (images[: len(test)], labels[test])
    return (images[train], labels[train]), (images[test], labels[test])


def upright(images: np.ndarray, entry: CatalogEntry) -> np.ndarray:
    """Images as one sees them: EMNIST is published with rows and columns exchanged (Cohen et al. 2017)."""
    return images.transpose(0, 2, 1) if entry.transposed else images


def _image_dataset(entry: CatalogEntry, train: Images, test: Images) -> Dataset:
    """Images as flat rows in [0, 1], scaled by the largest grey value. Both parts are in one piece of memory, so
    that pooling them needs no copy."""
    (height, width), count = train[0].shape[1:], len(train[0])
    shape, blank = (count + len(test[0]), height * width), not any(train[0].strides)
    x = blank_features(*shape) if blank else zeros_aligned(shape, np.dtype(np.float32))
    for images, rows in () if blank else ((train[0], x[:count]), (test[0], x[count:])):
        np.multiply(images.reshape(rows.shape), np.float32(1.0 / entry.largest), out=rows, dtype=np.float32)
    return Dataset(
        name=entry.name,
        x_train=x[:count],
        y_train=train[1].astype(np.int32),
        x_test=x[count:],
        y_test=test[1].astype(np.int32),
        classes=entry.classes,
        feature_names=tuple(f"pixel {row},{column}" for row in range(height) for column in range(width)),
        image_shape=(height, width, 1),
        notes=entry.notes,
        covered=True,
    )


def get(
    name: str,
    *,
    data_dir: StrPath | None = None,
    progress: Progress | None = None,
    download: bool = True,
) -> tuple[Path, ...]:
    """The verified files of a named set; () for those that come with scikit-learn. With `download=False`, a file
    that is not on this machine is an error."""
    published = _entry(name).download
    if published is None:
        return ()
    origins = published.origins if download else ()
    return tuple(obtain(published._replace(origins=origins), data_dir=data_dir, progress=progress).values())


# reason: the keywords are the keys of [data] in a spec
def load(
    name: str = "",
    *,
    path: StrPath | Sequence[StrPath] = "",
    test_path: StrPath = "",
    label: str = "",
    schema: Schema | StrPath = "",
    encoding: str = "minmax",
    features: str = "all",
    data_dir: StrPath | None = None,
    test_fraction: float = 0.2,
    group_column: str = "",
    seed: int = 0,
    stream: str = "auto",
    progress: Progress | None = None,
    task: str = "auto",
    label_bounds: Sequence[float] = (),
    records: Any = None,
    split_by_rows: bool = False,
    blank: bool = False,
) -> Dataset:
    """Load a data set by its `name`, or a user's own file by its `path` (.csv, .parquet, .npz, a folder of .npy).
    A folder, a pattern (`data/*.csv`) or a list of tables has one file for each institution.

    Args:
        encoding: How numeric columns are encoded (see `Schema.encode`).
        features: Which columns are used (see `Schema.encode`).
        schema: A `Schema` or a schema.toml. Without one, your own table gets a draft in memory.
        test_path: A second file with test records. Without it, `test_fraction` of the rows is held out, drawn with
            `seed` and stratified by class (the split of a named set is fixed).
        group_column: A column whose values `partition(kind="column")` will use.
        data_dir: A folder with local copies of the named sets, used before anything is downloaded.
        stream: Whether the records of a folder stay on disk: "auto", "yes" or "no" (see `load_folder`).
        progress: Called with one short line for each step that takes time.
        task: "classification", "regression", or "auto" (from the schema or the label's values).
        label_bounds: Public bounds of the label, for regression.
        records: Instead of a path: a DataFrame, a list or mapping of them (one for each institution), or arrays
            (x, y) or (x, y, groups).
        split_by_rows: Hold out rows of your own tables by their number alone, not stratified by class.
        blank: Labels and shapes are enough: a named set may have `blank_features`.
    """
    if records is None and bool(name) == bool(path):
        given = f"both name={name!r} and path={str(path)!r}" if name else "neither name nor path"
        raise DataError(f"{given} given; give exactly one")
    if stream not in STREAM:
        raise DataError(f"stream={stream!r} is unknown{did_you_mean(stream, STREAM)}")
    how = (encoding, features, group_column, test_fraction, seed, task, tuple(label_bounds), split_by_rows)
    options = LoadOptions(label, schema, test_path, *how)
    if records is not None:
        dataset = _load_records(records, options)
    elif name:
        if stream == "yes":
            raise _not_streamable(name)
        dataset = _load_named(_entry(name), options, data_dir, progress, blank)
    else:
        dataset = _load_files(path, options, stream)
    actual = "classification" if dataset.label_bounds is None else "regression"
    if task not in ("auto", actual):
        has = f"{len(dataset.classes)} classes" if dataset.classes else "bounds instead of classes"
        raise DataError(
            f"task={task!r}, but the label of {dataset.name!r} has {has}; change its schema, or leave task out"
        )
    return dataset


def hash_records(path: StrPath) -> RecordHashes:
    """The hash of each record of a user's own file or folder (`data.hashing`)."""
    file = Path(path).expanduser()
    if file.is_dir():
        return hash_folder(file)
    return hash_npz(file) if file.suffix.lower() == ".npz" else hash_table(read_table(file))


def _load_named(
    entry: CatalogEntry, options: LoadOptions, data_dir: StrPath | None, progress: Progress | None, blank: bool
) -> Dataset:
    for key in ("label", "test_path"):
        if value := getattr(options, key):
            raise DataError(f"{key}={str(value)!r} is for your own files; leave it out with name={entry.name!r}")
    if entry.kind != "table":
        # How columns are encoded is ignored, so that a preset made for tables runs on images too.
        for key in ("group_column", "schema"):
            if value := getattr(options, key):
                shown = value if isinstance(value, str) else "..."
                raise DataError(f"{key}={shown!r} is for tables, but {entry.name!r} holds images; leave it out")
    files = {} if entry.download is None else obtain(entry.download, data_dir=data_dir, progress=progress)
    schema = _schema(options.schema)
    if options.label_bounds and schema is None:
        raise DataError(
            f"label_bounds is for regression, but the label of {entry.name!r} has classes; leave it out"
        )
    if entry.kind != "table":
        return _image_dataset(entry, *_read_images(entry, files, blank))
    agreed = with_label_bounds(schema, options.label_bounds) if schema else packaged_schema(entry.name)
    # The split of a named set is the same for everyone: results must be comparable.
    options = options._replace(schema="", test_fraction=0.2, seed=0)

    if blank and entry.name == "adult" and not (schema or options.group_column):
        names, classes = agreed.feature_names(options.features), agreed.label.classes
        y, y_test = (adult_labels(files[part], classes) for part in ("train", "test"))
        x, x_test = (blank_features(len(labels), len(names)) for labels in (y, y_test))
        return Dataset(entry.name, x, y, x_test, y_test, classes, names, schema=agreed, covered=agreed.covered)

    def encode() -> Dataset:
        return dataset_from_tables(entry.name, *_read_tables(entry, files), agreed, options)

    return cached(entry.name, agreed, options, files, encode) if files else encode()


def _load_files(path: StrPath | Sequence[StrPath], options: LoadOptions, stream: str) -> Dataset:
    """A user's own file, files or folder."""
    files = table_files(path)
    is_folder = not files and Path(cast(StrPath, path)).expanduser().is_dir()
    if stream == "yes" and not is_folder:
        raise _not_streamable(repr(str(path)))
    several, path = bool(files), files[0] if files else Path(cast(StrPath, path))
    if several or not (is_folder or path.suffix.lower() == ".npz"):
        files = files or [path]
        names = _client_names(files) if several else [path.name]
        contents = [file_digest(file) for file in files]
        tables = [read_table(file) for file in files]
        sources = [
            Source(name, file, hash_table(table), content=content)
            for name, file, table, content in zip(names, files, tables, contents, strict=True)
        ]
        name = path.resolve().parent.name if several else path.name
        return _load_tables(name, sources, tables, options, several=several)
    kind = "folder of .npy files" if is_folder else ".npz file"
    for key in ("schema", "label", "group_column"):
        if getattr(options, key):
            raise DataError(f"{key} is given, but a {kind} holds arrays, which are used as they are; leave it out")
    if is_folder:
        return load_folder(path, options, stream=stream)
    content = file_digest(path)
    return load_npz(path, options)._replace(content=content)


def _load_records(records: Any, options: LoadOptions) -> Dataset:
    """Records that were given in Python. A ledger knows them by the hashes of the records, in any order."""
    import pandas as pd

    if isinstance(records, tuple):
        if len(records) not in (2, 3):
            raise DataError(f"data is a tuple of {len(records)}; give arrays as (X, y) or (X, y, groups)")
        x, y, groups = (*records, None)[:3]
        return arrays_in_memory(x, y, groups, options)
    named = records if isinstance(records, Mapping) else {"data": records}
    if isinstance(records, list):
        named = {f"client {number}": table for number, table in enumerate(records)}
    if not named or not all(isinstance(frame, pd.DataFrame) for frame in named.values()):
        raise DataError(
            f"data is a {type(records).__name__}; give a pandas DataFrame, a list or mapping of them (one for "
            "each institution), or arrays as a tuple (X, y) or (X, y, groups)"
        )
    tables = [frame.rename(columns=str).reset_index(drop=True) for frame in named.values()]
    sources = []
    for name, table in zip(map(str, named), tables, strict=True):
        check_table(table, name)
        for column in table.select_dtypes("object"):
            if not table[column].map(pd.api.types.is_hashable).all():
                raise DataError(f"column {column!r} of {name!r} holds lists; make columns of their parts")
        hashes = hash_table(table)
        sources.append(
            Source(name, Path(name), hashes, hashlib.sha256(np.sort(hashes.whole[0]).tobytes()).hexdigest())
        )
    return _load_tables("data", sources, tables, options, several=not isinstance(records, pd.DataFrame))


def _load_tables(
    name: str, sources: Sequence[Source], tables: Sequence[pd.DataFrame], options: LoadOptions, *, several: bool
) -> Dataset:
    """A table, or those of several institutions."""
    one = bool(options.schema) or not several
    frame = tables[0] if one else join_tables([source.path for source in sources], tables)
    schema, notes = _own_schema(frame, name, options)
    test = read_table(options.test_path) if options.test_path else None
    if several:
        for source, table in zip(sources, tables, strict=True):
            try:
                schema.check_columns(table)
            except DataError as error:
                raise DataError(f"{source.path.name!r}: {error}") from None
        dataset = dataset_from_sources(sources, tables, test, schema, options)
    else:
        dataset = dataset_from_tables(name, frame, test, schema, options)
        only = sources[0]
        dataset = dataset._replace(
            record_hashes=only.record_hashes, ledger_digest=only.digest, content=only.content
        )
    hashes = None if test is None else hash_table(test)
    return dataset._replace(notes=(*dataset.notes, *notes), test_hashes=hashes)


def _not_streamable(what: str) -> DataError:
    return DataError(
        f"stream='yes', but {what} is not a folder of .npy files (x.npy, y.npy); leave it out, or save the "
        "records as such a folder"
    )


def _client_names(files: Sequence[Path]) -> list[str]:
    """The name of each client: its file's, as short as they differ."""
    for names in ([file.stem for file in files], [file.name for file in files], [str(file) for file in files]):
        if len(set(names)) == len(names):
            return names
    raise DataError("data.path lists a file twice; list each institution's file once")


def _own_schema(frame: pd.DataFrame, name: str, options: LoadOptions) -> tuple[Schema, tuple[str, ...]]:
    """The schema of a user's own table, and notes. Without a schema, a draft is made in memory."""
    agreed, label = _schema(options.schema), options.label
    notes: tuple[str, ...] = ()
    if agreed is None:
        if not label:
            raise DataError(f'no label column is given for {name!r}; give label = "COLUMN" or a schema')
        # The institution a record comes from is not a feature of the record.
        exclude = [options.group_column] if options.group_column and options.group_column != label else []
        task = "regression" if options.label_bounds else options.task
        agreed, excluded = draft(frame, label, name=name, drop=exclude, task=task)
        left_out = [repr(column) for column in excluded if column not in exclude]
        if left_out:
            notes = (f"left out of the features: {', '.join(left_out)} (`dither data schema` says why)",)
        if task == "auto" and agreed.label.bounds is not None:
            notes += (
                "regression, because the label has many different numbers; set task = 'classification' if they "
                "are names of classes",
            )
    elif label and label != agreed.label.column:
        raise DataError(
            f"label={label!r}, but the schema's label column is {agreed.label.column!r}; make them agree"
        )
    return with_label_bounds(agreed, options.label_bounds), notes


def _schema(schema: Schema | StrPath) -> Schema | None:
    if not schema:
        return None
    return schema if isinstance(schema, Schema) else Schema.load(schema)


# Encoded tables of the catalog, kept in the user's cache folder: reading them back needs no pandas. A file's
# name is a digest of everything that determines its content: the published files, the schema, the encoding,
# Dither's own code for tables and the version of NumPy. A file that cannot be read is made again. Your own
# records are never kept.

_CACHED_FILES = 8  # files, of tens of megabytes
_CACHED_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_CACHED_NAMES = ("classes", "feature_names", "notes")
_CODE = ("catalog.py", "dataset.py", "schema.py", "tables.py")


def cached(
    name: str,
    schema: Schema,
    options: LoadOptions,
    files: Mapping[str, Path],
    load: Callable[[], Dataset],
) -> Dataset:
    """What `load` returns for a table of the catalogue, from the cache if it is there."""
    folder = _cache_folder()
    if folder is None or options.group_column:
        return load()
    path = folder / f"{name}-{_cache_digest(schema, options, files)[:32]}.npz"
    try:
        with np.load(path, allow_pickle=False) as archive:
            content: dict[str, Any] = {key: archive[key] for key in _CACHED_ARRAYS}
            content |= {key: tuple(map(str, archive[key])) for key in _CACHED_NAMES}
            covered, bounds = bool(archive["covered"]), schema.label.bounds
            return Dataset(name=name, schema=schema, covered=covered, label_bounds=bounds, **content)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        dataset = load()
    with suppress(OSError):  # a read-only home is no reason not to go on
        _write_cached(path, dataset)
    return dataset


def _cache_folder() -> Path | None:
    """Where encoded tables are kept; None with DITHER_DATA_CACHE=0."""
    wish = os.environ.get("DITHER_DATA_CACHE", "")
    if wish == "0":
        return None
    if wish:
        return Path(wish)
    from platformdirs import user_cache_path

    return user_cache_path("dither") / "encoded"


def _cache_digest(schema: Schema, options: LoadOptions, files: Mapping[str, Path]) -> str:
    code = resources.files("dither.data")
    parts = [np.__version__.encode(), schema.to_toml().encode(), repr(options).encode()]
    parts += [code.joinpath(name).read_bytes() for name in _CODE]
    parts += [files[part].read_bytes() for part in sorted(files)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _write_cached(path: Path, dataset: Dataset) -> None:
    content = io.BytesIO()
    arrays: dict[str, Any] = {key: getattr(dataset, key) for key in _CACHED_ARRAYS}
    arrays |= {key: np.array(getattr(dataset, key), dtype=np.str_) for key in _CACHED_NAMES}
    np.savez(content, covered=np.array(dataset.covered), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_bytes(content.getvalue())
    beside.replace(path)
    for old in sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime)[:-_CACHED_FILES]:
        old.unlink(missing_ok=True)
