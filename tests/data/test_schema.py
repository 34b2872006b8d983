"""The schema: encoding, files, provenance, digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.data.schema import OTHER, READ_FROM_DATA, number_column
from dither.errors import DataError


def small_schema(**changes: object) -> data.Schema:
    age = data.Numeric("age", bounds=(0, 100), standard=(40, 20), missing=50)
    ward = data.Categorical("ward", ("north", "south"), missing="south")
    label = data.Label("outcome", ("alive", "dead"))
    return data.Schema(**{"label": label, "columns": (age, ward), "name": "patients", **changes})  # type: ignore[arg-type]


def frame(**columns: list) -> pd.DataFrame:
    rows = {"age": ["10", "", "250"], "ward": ["north", "?", "attic"], "outcome": ["dead", "alive", "alive"]}
    return pd.DataFrame({**rows, **columns})


def test_minmax_clamps_imputes_and_keeps_the_unknown_apart() -> None:
    x, y, names = small_schema().encode(frame())
    assert names == ("age", "ward=north", "ward=south", f"ward={OTHER}")
    np.testing.assert_allclose(x, [[0.1, 1, 0, 0], [0.5, 0, 1, 0], [1.0, 0, 0, 1]])
    assert x.dtype == np.float32
    assert y is not None
    assert y.dtype == np.int32
    assert y.tolist() == [1, 0, 0]


def test_standard_uses_the_public_centre_and_scale() -> None:
    x = small_schema().encode(frame(), "standard").x
    np.testing.assert_allclose(x[:, 0], [(10 - 40) / 20, (50 - 40) / 20, (100 - 40) / 20])


def test_categorical_and_ordinal_features() -> None:
    categorical = small_schema().encode(frame(), features="categorical")
    assert categorical.feature_names == ("ward=north", "ward=south", f"ward={OTHER}")
    np.testing.assert_array_equal(categorical.x, [[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    ordinal = small_schema().encode(frame(), features="ordinal")
    assert ordinal.feature_names == ("age", "ward")
    np.testing.assert_allclose(ordinal.x, [[0.1, 0], [0.5, 0.5], [1.0, 1.0]])


def test_width_does_not_depend_on_the_rows() -> None:
    one_row = frame().iloc[:1]
    assert small_schema().encode(one_row).x.shape == (1, 4)


def test_same_cells_from_parquet_types() -> None:
    typed = pd.DataFrame(
        {"age": [10, None, 250.0], "ward": ["north", None, "attic"], "outcome": ["dead", "alive", "alive"]}
    )
    np.testing.assert_array_equal(small_schema().encode(typed).x, small_schema().encode(frame()).x)


def test_whole_numbers_are_one_class_however_they_are_written() -> None:
    schema = small_schema(label=data.Label("outcome", ("0", "1")))
    for outcome in (["1", "0", "0"], [1, 0, 0], [1.0, 0.0, 0.0], ["1.0", "0.0", "0"]):
        assert schema.encode_labels(frame(outcome=outcome)).tolist() == [1, 0, 0]


def test_save_and_load_agree(tmp_path: Path) -> None:
    schema = small_schema()
    schema.save(tmp_path / "schema.toml")
    loaded = data.Schema.load(tmp_path / "schema.toml")
    assert loaded == schema
    assert loaded.digest() == schema.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["schema.toml"]


def test_digest_sees_content_and_not_layout(tmp_path: Path) -> None:
    text = small_schema().to_toml()
    path = tmp_path / "schema.toml"
    path.write_text("# a comment\n" + text.replace("[0.0, 100.0]", "[ 0,\n 100 ]"))
    assert data.Schema.load(path).digest() == small_schema().digest()
    changed = small_schema(columns=(data.Numeric("age", (0, 101), (40, 20), 50), small_schema().columns[1]))
    assert changed.digest() != small_schema().digest()


def test_digest_is_stable() -> None:
    """Pinned: parties on different versions compare these."""
    assert small_schema().digest() == "fb9cc5745bdcebb4b98ec7ceccf0b3a0eccfc0a6237ffb6837b90facedfad759"


def test_values_read_from_data_are_listed(tmp_path: Path) -> None:
    assert small_schema().covered
    assert small_schema().coverage_notes() == ()
    age = small_schema().columns[0]._replace(bounds_from=READ_FROM_DATA)  # type: ignore[call-arg]
    schema = small_schema(columns=(age,))
    assert schema.read_from_data == ("bounds of 'age'",)
    assert not schema.covered
    assert schema.coverage_notes() == ("preprocessing not covered: bounds of 'age' were read from the data",)


def test_a_file_that_does_not_say_where_its_values_came_from_is_not_covered(tmp_path: Path) -> None:
    """Unknown fails closed: a schema written by hand needs one line that says "public"."""
    path = tmp_path / "schema.toml"
    text = """
[label]
column = "outcome"
classes = ["alive", "dead"]
[[columns]]
name = "age"
type = "numeric"
bounds = [0, 120]
[[columns]]
name = "ward"
type = "categorical"
categories = ["north", "south"]
"""
    path.write_text(text)
    schema = data.Schema.load(path)
    assert not schema.covered
    assert 'add origin = "public"' in schema.coverage_notes()[0]
    path.write_text('origin = "public"\n' + text)
    schema = data.Schema.load(path)
    assert schema.covered
    assert schema.columns[0] == data.Numeric("age", (0, 120), (60, 20), 60)  # the rest follows from the bounds
    assert schema.columns[1].missing == OTHER
    path.write_text('origin = "secret"\n' + text)
    with pytest.raises(DataError, match="origin of the schema='secret'"):
        data.Schema.load(path)


def test_a_short_file_holds_the_whole_schema(tmp_path: Path) -> None:
    age, ward = small_schema().columns
    schemas = [
        small_schema(),
        small_schema(columns=(age._replace(standard_from=READ_FROM_DATA), ward)),
        small_schema(columns=(data.Numeric.with_bounds("age", (0, 9)), ward._replace(missing=OTHER))),
        small_schema(label=data.Label("outcome", bounds=(0, 1), bounds_from=READ_FROM_DATA)),
    ]
    for schema in schemas:
        schema.save(tmp_path / "schema.toml")
        assert data.Schema.load(tmp_path / "schema.toml") == schema
    assert data.Schema.load(tmp_path / "schema.toml").as_public().covered


def test_labels_may_be_absent_or_ignored() -> None:
    schema, features_only = small_schema(), frame().drop(columns="outcome")
    assert schema.encode(features_only, labels="if present").y is None
    assert schema.encode(frame(outcome=["?", "x", "y"]), labels="ignore").y is None
    with pytest.raises(DataError, match="'outcome' of the schema is not in the table"):
        schema.encode(features_only)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"age": ["10", "inf", "3"]}, ["'age'", "row 2", "inf", "not finite"]),
        ({"age": ["10", "old", "3"]}, ["'age'", "row 2", "'old'", "categorical"]),
        ({"outcome": ["dead", "alive", "alife"]}, ["'alife'", "row 3", "did you mean 'alive'"]),
        ({"outcome": ["dead", "", "alive"]}, ["'outcome'", "row 2", "empty"]),
    ],
)
def test_bad_cells_are_named(columns: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        small_schema().encode(frame(**columns))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="column 'ward' of the schema is not in the table; did you mean 'wards'"):
        small_schema().encode(frame().rename(columns={"ward": "wards"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("bounds = [0.0, 100.0]", "bounds = [100, 0]"), ["'age'", "low=100.0", "high=0.0"]),
        (("bounds = [0.0, 100.0]", "bounds = [0, inf]"), ["'age'", "finite", "inf"]),
        (("bounds = [0.0, 100.0]", "bounds = [-1e308, 1e308]"), ["'age'", "-1e+308", "±1e+307"]),
        (("standard = [40.0, 20.0]", "standard = [40, 0]"), ["'age'", "scale=0.0"]),
        (("bounds_from", "bound_from"), ["'age'", "unknown key 'bound_from'", "did you mean 'bounds_from'"]),
        (('bounds_from = "public"', 'bounds_from = "secret"'), ["'secret'"]),
        (('type = "numeric"', 'type = "number"'), ["'number'", "did you mean 'numeric'"]),
        (('["alive", "dead"]', '["alive"]'), ["'outcome'", "1 class"]),
        (('["alive", "dead"]', '["alive", "alive"]'), ["'alive'", "twice"]),
        (('["north", "south"]', '["north", "north"]'), ["'north'", "twice"]),
        (('column = "outcome"', 'column = "age"'), ["'age'", "also a feature"]),
        (("missing = 50.0\n", ""), ["'age'", "missing_from, but no missing"]),
        (("bounds = [0.0, 100.0]\n", ""), ["'age'", "needs the key", "'bounds'"]),
        (("[label]", "[label"), ["cannot be read"]),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, change: tuple[str, str], words: list[str]) -> None:
    text = small_schema().to_toml()
    assert change[0] in text
    path = tmp_path / "schema.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(DataError) as caught:
        data.Schema.load(path)
    for word in (*words, "schema.toml"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_choices_and_files() -> None:
    with pytest.raises(DataError, match="encoding='min-max' is unknown; did you mean 'minmax'"):
        small_schema().encode(frame(), "min-max")
    with pytest.raises(DataError, match="features='categoric'"):
        small_schema().encode(frame(), features="categoric")
    with pytest.raises(DataError, match=r"'nowhere\.toml' not found"):
        data.Schema.load("nowhere.toml")
    numbers_only = small_schema(columns=small_schema().columns[:1])
    with pytest.raises(DataError, match="no categorical column"):
        numbers_only.encode(frame(), features="categorical")


def test_marks_for_a_missing_number_are_no_texts() -> None:
    """A weight with "k.A." in some cells was left out of a draft."""
    read = number_column(pd.Series(["81", "k.A.", "n.a.", "-"]), "weight")
    assert read.tolist()[0] == 81.0
    assert np.isnan(read[1:]).all()


def test_a_constant_column_encodes_to_zero() -> None:
    schema = small_schema(columns=(data.Numeric("age", (7, 7), (7, 1), 7),))
    assert schema.encode(frame(age=["7", "7", "9"])).x.tolist() == [[0.0], [0.0], [0.0]]


# Regression


def test_labels_of_a_regression_are_clamped_and_scaled_by_their_bounds() -> None:
    schema = small_schema(label=data.Label("stay", bounds=(0, 40)))
    y = schema.encode(frame(stay=["10", "-5", "99"])).y
    assert y is not None
    assert y.dtype == np.float32
    assert y.tolist() == [0.25, 0, 1]  # never below 0, which would mark a blanked record
    assert data.Schema.from_dict(schema.to_dict()) == schema
    assert schema.covered
    with pytest.raises(DataError, match="label column 'stay' is empty in row 2"):
        schema.encode(frame(stay=["10", "", "99"]))
    with pytest.raises(DataError, match="low=5 must be below high=5"):
        small_schema(label=data.Label("stay", bounds=(5, 5)))


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([0, 1] * 50, "classification"),
        (range(47), "classification"),  # letters and digits, numbered
        (range(100, 407), "regression"),  # became 307 classes, and accuracy 0.028
        (np.linspace(0, 1, 11), "regression"),
        ([1.5, 2.5, 3.5], "classification"),
        ([1.0, np.nan], "classification"),
    ],
)
def test_a_label_of_many_numbers_is_proposed_as_regression(values: list[float], task: str) -> None:
    assert data.propose_task(np.asarray(values, float)) == task
