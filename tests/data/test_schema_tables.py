"""A user's own files: CSV, Parquet, .npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.errors import DataError


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
    text = data.draft_schema(patients, "outcome").to_toml()
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
    schema = data.draft_schema(patients, "outcome")
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
    with pytest.warns(pd.errors.ParserWarning):
        frame = data.read_table(path)
    assert frame["a"].tolist() == ["1", "3"]


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
    with pytest.raises(DataError, match=r"suffix '\.xlsx' is not supported; give a \.csv"):
        data.load(path=tmp_path / "t.xlsx", label="x")
    (tmp_path / "t.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as a parquet table"):
        data.load(path=tmp_path / "t.parquet", label="x")
    schema = data.draft_schema(patients, "outcome")
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
