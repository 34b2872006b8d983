"""Records as numbers: what does not matter, and what does."""

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.data import hashing

FRAME = pd.DataFrame(
    {
        "age": [34, 51, 0, 7],
        "weight": [70.25, 0.1, -3.5, None],
        "site": ["North", "east", "", "x y"],
        "ok": [True, False] * 2,
    }
)


def same(one, other, kinds=(0, 1)):
    return all(sorted(one[kind]) == sorted(other[kind]) for kind in kinds)


@pytest.fixture
def plain(tmp_path):
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    return data.hash_records(tmp_path / "a.csv").whole


def test_what_does_not_matter(tmp_path, plain):
    text = (tmp_path / "a.csv").read_text()
    assert plain.shape == (2, 4)
    assert len(np.unique(plain[0])) == len(np.unique(plain[1])) == 4
    (tmp_path / "b.csv").write_bytes(("\ufeff" + text.replace("\n", "\r\n") + "\r\n").encode())
    assert np.array_equal(data.hash_records(tmp_path / "b.csv").whole, plain), "line ends, a byte order mark"
    FRAME.to_parquet(tmp_path / "a.parquet")
    assert np.array_equal(data.hash_records(tmp_path / "a.parquet").whole, plain), "the kind of file"
    (tmp_path / "c.csv").write_text("\n".join(["a,b,c,d", *text.splitlines()[:0:-1]]))
    assert same(data.hash_records(tmp_path / "c.csv").whole, plain), "names of columns, order of rows"
    respelled = (
        "age,weight,site,ok\n34.0, 7.025e1,NORTH ,TRUE\n+51,.1,East,false\n-0,-3.50,?,true\n7.00,NaN,X  Y,0\n"
    )
    (tmp_path / "d.csv").write_text(respelled)
    assert np.array_equal(data.hash_records(tmp_path / "d.csv").whole, plain), "spelling"
    turned = hashing.hash_table(FRAME[["ok", "site", "weight", "age"]]).whole
    assert same(turned, plain, kinds=[1]), "order of columns"
    assert not same(turned, plain, kinds=[0])
    assert np.array_equal(hashing.hash_table(FRAME.assign(empty="")).whole, plain), "a column with nothing in it"
    narrow = FRAME.astype({"weight": np.float32, "age": np.int8})
    assert np.array_equal(hashing.hash_table(narrow).whole, plain), "the type of numbers"


@pytest.mark.parametrize("column", ["age", "weight", "site", "ok"])
def test_a_changed_cell_is_another_record(plain, column):
    other = FRAME.copy()
    other.loc[1, column] = {"age": 52, "weight": 0.1001, "site": "west", "ok": True}[column]
    changed = hashing.hash_table(other).whole != plain
    assert changed[:, 1].all()
    assert not changed[:, [0, 2, 3]].any()


def test_arrays_are_a_table_with_the_label_last(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 5)).astype(np.float32), rng.integers(0, 3, 300)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    found = data.hash_records(tmp_path / "a.npz").whole
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "x.npy", x.astype(np.float64))
    np.save(folder / "y.npy", y.astype(np.int32))
    assert np.array_equal(data.hash_records(folder).whole, found)
    pd.DataFrame(x).assign(label=y).to_csv(tmp_path / "a.csv", index=False)
    assert np.array_equal(data.hash_records(tmp_path / "a.csv").whole, found)
    np.savez(tmp_path / "b.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    assert np.array_equal(data.hash_records(tmp_path / "b.npz").whole, found)
    wide = rng.integers(0, 256, (50, 9, 9)).astype(np.uint8)
    assert hashing.hash_arrays(wide, y[:50]).whole.shape == (1, 50)


def test_a_folder_is_read_in_pieces_of_whole_records(tmp_path, monkeypatch):
    from dither.data import arrays

    x, y = np.random.default_rng(1).normal(size=(500, 7)).astype(np.float32), np.arange(500) % 2
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 100)  # three records and a bit
    loaded = data.load(path=tmp_path)
    assert np.array_equal(loaded.record_hashes.whole, hashing.hash_arrays(x, y).whole)
    assert len(np.intersect1d(loaded.record_hashes.parts, hashing.hash_arrays(x, y).parts)) > 1000
