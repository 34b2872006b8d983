"""A folder of .npy files: the records of an .npz, in memory or on the disk, and what is wrong with a folder."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dither import data
from dither.data import arrays, dataset
from dither.errors import DataError


def records(count=300, shape=(5,), kind=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (count, *shape)).astype(kind)
    return x, rng.integers(0, 3, count)


def write(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def whole(records):
    if isinstance(records, np.ndarray):
        return records
    found = np.zeros(records.shape, np.float32)
    records.read(np.arange(len(records)), found)
    return found


@pytest.mark.parametrize(
    ("shape", "kind"), [((5,), np.float32), ((5,), ">f8"), ((4, 4), np.uint8), ((3, 3, 2), np.uint8), ((5,), bool)]
)
@pytest.mark.parametrize("given_test", [False, True])
def test_a_folder_holds_what_an_npz_holds(tmp_path, shape, kind, given_test):
    x, y = records(shape=shape, kind=kind)
    arrays = {"x": x, "y": y}
    if given_test:
        x_test, y_test = records(40, shape, kind, seed=1)
        arrays |= {"x_test": x_test, "y_test": y_test}
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    else:
        np.savez(tmp_path / "a.npz", x=x, y=y)
    folder = write(tmp_path / "a", **arrays)
    expected = data.load(path=tmp_path / "a.npz", seed=3)
    for stream in ("yes", "no"):
        found = data.load(path=folder, seed=3, stream=stream)
        assert found.streamed == (stream == "yes")
        for name in ("x_train", "y_train", "x_test", "y_test"):
            one, other = whole(getattr(found, name)), getattr(expected, name)
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), name
        assert (found.classes, found.image_shape, found.notes) == (
            expected.classes,
            expected.image_shape,
            expected.notes,
        )


def test_rows_are_read_in_any_order_from_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_ROWS", 16)  # many pieces, shared by several threads
    (x, _), (more, _) = records(200), records(100, seed=1)
    folder = write(tmp_path / "a", x=x, more=more)
    one, other = (data.MappedArray([np.load(folder / f"{name}.npy", mmap_mode="r")]) for name in ("x", "more"))
    both = data.MappedArray.concatenate(one[np.arange(0, 200, 2)], other)
    expected = np.concatenate([x[::2], more])
    assert both.shape == expected.shape
    assert both.nbytes == expected.nbytes
    for rows in (np.arange(200), np.random.default_rng(0).permutation(200), np.array([199, 0, 0, 120])):
        out = np.full((250, 5), -1, np.float32)
        both.read(rows, out)
        np.testing.assert_array_equal(out[: len(rows)], expected[rows])
        assert (out[len(rows) :] == -1).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped memory")
def test_pages_that_were_read_do_not_stay_in_memory(tmp_path):
    folder = write(tmp_path / "a", x=np.ones((40_000, 256), np.float32))  # 41 MB
    array = np.load(folder / "x.npy", mmap_mode="r")

    def resident():
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = next(number for number, line in enumerate(lines) if line.endswith(str(folder / "x.npy")))
        return 1024 * next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    for rows in (np.arange(40_000), np.random.default_rng(0).permutation(40_000)[:5000]):
        out = np.zeros((len(rows), 256), np.float32)
        np.take(array, rows, axis=0, out=out, mode="clip")
        assert resident() > 20e6  # what a mapping does by itself
        data.MappedArray([array]).read(rows, out)
        assert (out == 1).all()
        assert resident() < 4e6


def test_streamed_records_are_never_turned_into_an_array_by_accident(tmp_path):
    x, y = records()
    found = data.load(path=write(tmp_path / "a", x=x, y=y), stream="yes")
    for careless in (np.asarray, lambda a: np.concatenate([a, a]), np.mean):
        with pytest.raises(DataError, match=r"240 records .* are streamed from disk"):
            careless(found.x_train)


def test_auto_streams_what_half_of_the_free_memory_lacks(tmp_path, monkeypatch):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y)
    for free, streamed in ((2 * x.nbytes + 1, False), (2 * x.nbytes - 1, True)):
        monkeypatch.setattr(arrays, "free_memory", lambda free=free: free)
        assert data.load(path=folder).streamed == streamed
    monkeypatch.undo()
    assert 0 < arrays.free_memory() < float("inf")


def test_groups_and_classes_of_a_folder(tmp_path):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y, groups=np.repeat(["b", "a", "c"], 100))
    (folder / "classes.json").write_text(json.dumps(["x", "y", "z"]))
    found = data.load(path=folder, stream="yes")
    assert found.classes == ("x", "y", "z")
    assert found.covered
    assert not found.notes
    clients = data.partition(found, kind="column", num_clients=0, seed=0)
    assert clients.names == ("a", "b", "c")
    assert clients.size.sum() == 240
    for client, name in enumerate(clients.names):
        assert (found.groups[clients.rows(client)] == name).all()
        assert (np.diff(clients.rows(client)) > 0).all()


def test_groups_of_given_test_records(tmp_path):
    (x, y), (x_test, y_test) = records(), records(50, seed=1)
    parts = {"groups": np.arange(300) % 7, "groups_test": np.arange(50) % 7}
    folder = write(tmp_path / "a", x=x, y=y, x_test=x_test, y_test=y_test, **parts)
    found = data.load(path=folder, stream="yes")
    assert found.groups.flags.owndata, "still mapped"
    pooled = data.pool(found)
    clients = data.partition(pooled, kind="column", num_clients=7, seed=0)
    assert clients.size.sum() == 350
    np.testing.assert_array_equal(
        clients.rows(3), np.flatnonzero(np.append(np.arange(300), np.arange(50)) % 7 == 3)
    )


def test_the_ledger_knows_records_and_labels_alone_and_a_checkpoint_every_file(tmp_path):
    (x, y), (x_test, y_test) = records(), records(50, seed=1)
    folder = write(tmp_path / "a", x=x, y=y)
    first = data.folder_digest(folder)
    found = [data.load(path=folder, stream=stream) for stream in ("yes", "no")]
    for files in ({"groups": np.arange(300) % 7}, {"x_test": x_test, "y_test": y_test}, {"groups_test": y_test}):
        found.append(data.load(path=write(folder, **files), stream="yes"))
    (folder / "classes.json").write_text('["a", "b", "c"]')
    found.append(data.load(path=folder, stream="yes"))
    found.append(data.load(path=write(tmp_path / "b", x=x, y=y), test_path=folder, stream="yes"))
    assert {each.ledger_digest for each in found} == {first} == {data.folder_digest(folder)}
    assert found[0].digest == found[1].digest
    assert len({each.digest for each in found}) == len(found) - 1
    x[17, 3] += 1
    changed = data.folder_digest(write(folder, x=x))
    y[17] = (y[17] + 1) % 3
    assert len({first, changed, data.folder_digest(write(folder, y=y))}) == 3


def test_a_write_through_a_mapping_is_another_data_set(tmp_path):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y)
    before, status = data.load(path=folder, stream="yes"), (folder / "x.npy").stat()
    np.load(folder / "x.npy", mmap_mode="r+")[17, 3] += 1
    os.utime(folder / "x.npy", ns=(status.st_atime_ns, status.st_mtime_ns))  # as a mapping may leave it
    after = data.load(path=folder, stream="yes")
    assert after.ledger_digest != before.ledger_digest
    assert after.digest != before.digest


def test_what_is_digested_is_what_is_read(tmp_path, monkeypatch):
    x, y = records()
    folder, other = write(tmp_path / "a", x=x, y=y), write(tmp_path / "b", x=x + 1)
    before = data.load(path=folder, stream="yes")
    examine = arrays._examine

    def replaced(*arguments):
        if (other / "x.npy").exists():
            os.replace(other / "x.npy", folder / "x.npy")
        return examine(*arguments)

    monkeypatch.setattr(arrays, "_examine", replaced)
    found = data.load(path=folder, stream="no")
    assert not (other / "x.npy").exists()
    assert found.x_train.tobytes() == whole(before.x_train).tobytes()
    assert found.ledger_digest == before.ledger_digest != data.folder_digest(folder)
    assert np.array_equal(found.record_hashes.whole, before.record_hashes.whole)


def test_a_number_that_is_not_finite_is_found_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 1024)
    x, y = records()
    for row, column, value in ((0, 0, np.nan), (151, 2, np.inf), (299, 4, -np.inf)):
        bad = x.copy()
        bad[row, column] = value
        folder = write(tmp_path / f"a{row}", x=bad, y=y)
        with pytest.raises(
            DataError, match=f"feature {column} of record {row} in x.npy is {value}, which is not finite"
        ):
            data.load(path=folder, stream="yes")
    large = x.astype(np.float64)
    large[7, 1] = 1e300  # finite, and not as the float32 that it becomes
    with pytest.raises(DataError, match="feature 1 of record 7"):
        data.load(path=write(tmp_path / "large", x=large, y=y), stream="yes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "has no file y.npy"),
        ({"y": np.zeros(7, int)}, r"x.npy has shape \(300, 5\) and y.npy has shape \(7,\)"),
        ({"x": np.zeros(300)}, r"x.npy has shape \(300,\)"),
        ({"x": np.array([["a"]] * 300)}, "numbers are needed"),
        ({"x": np.asfortranarray(np.zeros((300, 5), np.float32))}, "column by column"),
        ({"y": np.zeros(300, int)}, "the labels have 1 class"),
        ({"groups": np.zeros(3)}, r"groups.npy has shape \(3,\) for 300 records"),
        ({"y_test": np.zeros(3, int)}, "has no file x_test.npy"),
        ({"x_test": np.zeros((3, 4), np.float32), "y_test": np.zeros(3, int)}, r"test records have shape \(4,\)"),
        ({"x": np.array([[{}]] * 300, object)}, "cannot be read as .npy"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path, change, message):
    x, y = records()
    folder = write(tmp_path / "a", **{k: v for k, v in ({"x": x, "y": y} | change).items() if v is not None})
    with pytest.raises(DataError, match=message):
        data.load(path=folder, stream="yes")


def test_a_file_longer_than_its_array_is_refused(tmp_path):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y)
    with (folder / "y.npy").open("ab") as file:
        np.save(file, y)
    behind = (folder / "y.npy").stat().st_size // 2
    with pytest.raises(DataError, match=rf"y.npy' has {behind:,} extra bytes after its records"):
        data.load(path=folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x_test.npy", "x_test.npy' is a link to 'gone', which does not exist"),
        ("groups.npy", "groups.npy' is a link to 'gone'"),
        ("classes.json", "classes.json' cannot be read as JSON: .*No such file"),
    ],
)
def test_a_link_to_nowhere_is_not_an_absent_file(tmp_path, name, message):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y)
    (folder / name).symlink_to("gone")
    with pytest.raises(DataError, match=message):
        data.load(path=folder)


def test_more_records_than_can_be_numbered_are_refused(tmp_path, monkeypatch):
    (x, y), (x_test, y_test) = records(), records(50, seed=1)
    folder = write(tmp_path / "a", x=x, y=y, x_test=x_test, y_test=y_test)
    monkeypatch.setattr(arrays, "_MAX_RECORDS", 350)
    assert len(data.load(path=folder, stream="yes").x_test) == 50
    monkeypatch.setattr(arrays, "_MAX_RECORDS", 349)
    with pytest.raises(DataError, match="300 training and 50 test records; at most 349 together"):
        data.load(path=folder)


def test_what_a_folder_does_not_take_is_said(tmp_path):
    x, y = records()
    folder = write(tmp_path / "a", x=x, y=y)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(DataError, match=r"label is given, but a folder of .npy files holds arrays"):
        data.load(path=folder, label="outcome")
    with pytest.raises(DataError, match=r"is not a folder of .npy files"):
        data.load(path=tmp_path / "a.npz", stream="yes")
    with pytest.raises(DataError, match=r"is not a folder, but data\.path is"):
        data.load(path=folder, test_path=tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"is a folder; give a .csv, .parquet or .npz file"):
        data.read_table(folder)
    (folder / "classes.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="must be a list of class names"):
        data.load(path=folder)


def test_a_test_folder_beside_the_records(tmp_path):
    (x, y), (x_test, y_test) = records(), records(50, seed=1)
    found = data.load(
        path=write(tmp_path / "a", x=x, y=y), test_path=write(tmp_path / "b", x=x_test, y=y_test), stream="yes"
    )
    assert whole(found.x_test).tobytes() == x_test.tobytes()
    assert len(found.x_train) == 300
    assert found.groups_test is None
    pooled = data.pool(found)
    assert whole(pooled.x_train).tobytes() == np.concatenate([x, x_test]).tobytes()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [(np.arange(100), 100), (np.arange(100) % 3, 3), (np.arange(100) + 25, 0), (np.arange(100) % 30 * 2, 59)],
)
def test_whole_numbers_are_classes_where_each_is_there_or_there_are_few(labels, classes):
    """A label such as a length of stay, in days, is a number to predict."""
    options = dataset.LoadOptions(test_fraction=0)
    loaded = arrays.arrays_in_memory(np.zeros((100, 2)), labels, None, options)
    assert len(loaded.classes) == classes
    assert (loaded.label_bounds is None) == (classes > 0)
    with pytest.raises(DataError, match="a class has the number 1,000,000,000; number them 0, 1, 2"):
        arrays.arrays_in_memory(np.zeros((2, 2)), np.array([0, 10**9]), None, options)
