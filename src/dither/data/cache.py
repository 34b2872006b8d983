"""Encoded tables of the catalog, kept in the user's cache folder: reading them back needs no pandas.

A file's name is a digest of everything that determines its content: the published files, the schema, the encoding,
Dither's own code for tables and the version of NumPy. A file that cannot be read is made again. Your own records
are never kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dither.data.dataset import Dataset, TableOptions
from dither.data.schema import Schema

_KEPT = 8  # files, of tens of megabytes
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_NAMES = ("classes", "feature_names", "notes")
_CODE = ("cache.py", "catalog.py", "dataset.py", "schema.py", "tables.py")


def cached(
    name: str,
    schema: Schema,
    options: TableOptions,
    files: Mapping[str, Path],
    load: Callable[[], Dataset],
) -> Dataset:
    """What `load` gives for a table of the catalog, from the cache where it lies there."""
    folder = _folder()
    if folder is None or options.group_column:
        return load()
    path = folder / f"{name}-{_digest(schema, options, files)[:32]}.npz"
    try:
        with np.load(path, allow_pickle=False) as archive:
            content: dict[str, Any] = {key: archive[key] for key in _ARRAYS}
            content |= {key: tuple(map(str, archive[key])) for key in _NAMES}
            return Dataset(name=name, schema=schema, covered=bool(archive["covered"]), **content)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        dataset = load()
    with suppress(OSError):  # a read-only home is no reason not to go on
        _write(path, dataset)
    return dataset


def _folder() -> Path | None:
    """Where encoded tables are kept; None with DITHER_DATA_CACHE=0."""
    wish = os.environ.get("DITHER_DATA_CACHE", "")
    if wish == "0":
        return None
    if wish:
        return Path(wish)
    from platformdirs import user_cache_path

    return user_cache_path("dither") / "encoded"


def _digest(schema: Schema, options: TableOptions, files: Mapping[str, Path]) -> str:
    code = resources.files("dither.data")
    parts = [np.__version__.encode(), schema.to_toml().encode(), repr(options).encode()]
    parts += [code.joinpath(name).read_bytes() for name in _CODE]
    parts += [files[part].read_bytes() for part in sorted(files)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _write(path: Path, dataset: Dataset) -> None:
    content = io.BytesIO()
    arrays: dict[str, Any] = {key: getattr(dataset, key) for key in _ARRAYS}
    arrays |= {key: np.array(getattr(dataset, key), dtype=np.str_) for key in _NAMES}
    np.savez(content, covered=np.array(dataset.covered), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_bytes(content.getvalue())
    beside.replace(path)
    for old in sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
