"""Tests of `dither.data.catalog`: encoded tables of the catalog, read back instead of made again."""

import numpy as np
import pytest

from dither.data import catalog
from dither.data.catalog import packaged_schema
from dither.data.dataset import Dataset, TableOptions

SCHEMA = packaged_schema("breast-cancer")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_DATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train").write_text("first")
    return tmp_path


class Loader:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        x = np.full((3, 2), self.calls, np.float32)
        y = np.array([0, 1, 0], np.int32)
        return Dataset("t", x, y, x[:1], y[:1], ("a", "b"), ("u", "v"), schema=SCHEMA, notes=("n",), covered=True)


def same(one, other):
    for name in one._fields:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right, name


def test_the_second_load_reads_what_the_first_kept(folder):
    load, files = Loader(), {"train": folder / "train"}
    first = catalog.cached("t", SCHEMA, TableOptions(), files, load)
    same(catalog.cached("t", SCHEMA, TableOptions(), files, load), first)
    assert load.calls == 1


def test_other_files_options_or_groups_are_loaded_anew(folder):
    load, files = Loader(), {"train": folder / "train"}
    catalog.cached("t", SCHEMA, TableOptions(), files, load)
    catalog.cached("t", SCHEMA, TableOptions(encoding="standard"), files, load)
    (folder / "train").write_text("second")
    catalog.cached("t", SCHEMA, TableOptions(), files, load)
    assert load.calls == 3
    catalog.cached("t", SCHEMA, TableOptions(group_column="x"), files, load)
    catalog.cached("t", SCHEMA, TableOptions(group_column="x"), files, load)
    assert load.calls == 5


def test_a_damaged_file_is_made_again(folder):
    load, files = Loader(), {"train": folder / "train"}
    catalog.cached("t", SCHEMA, TableOptions(), files, load)
    (kept,) = (folder / "cache").glob("*.npz")
    content = bytearray(kept.read_bytes())
    content[len(content) // 3] ^= 0xFF
    kept.write_bytes(bytes(content))
    assert catalog.cached("t", SCHEMA, TableOptions(), files, load).x_train.flat[0] in (1, 2)
    kept.write_bytes(b"no archive")
    before = load.calls
    catalog.cached("t", SCHEMA, TableOptions(), files, load)
    assert load.calls == before + 1


def test_nothing_is_kept_when_the_cache_is_off(folder, monkeypatch):
    monkeypatch.setenv("DITHER_DATA_CACHE", "0")
    load = Loader()
    for _ in range(2):
        catalog.cached("t", SCHEMA, TableOptions(), {"train": folder / "train"}, load)
    assert load.calls == 2
    assert not (folder / "cache").exists()
