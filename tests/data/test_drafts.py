"""Draft schemas: which columns are features, and what is proposed for them."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.data.drafts import ID_NAME, MAX_CATEGORIES, draft, rounded_bounds
from dither.data.schema import OTHER
from dither.errors import DataError

ROWS = 400


def table(**columns: object) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    label = np.where(rng.random(ROWS) < 0.3, "yes", "no")
    return pd.DataFrame({"age": rng.normal(50, 12, ROWS).round(1), **columns, "ill": label})


def test_a_draft_marks_everything(patients: Path, tmp_path: Path) -> None:
    draft = data.draft(patients, "outcome").schema
    values = 1 + 3 + 1 + 1  # classes; age: bounds, standard, missing; ward, hospital: categories
    assert len(draft.read_from_data) == values
    assert draft.label.classes == ("alive", "dead")
    assert [type(column).__name__ for column in draft.columns] == ["Numeric", "Categorical", "Categorical"]
    assert draft.columns[1].missing == OTHER
    draft.save(tmp_path / "draft.toml")
    assert data.Schema.load(tmp_path / "draft.toml") == draft


def dates(style: str) -> list[str]:
    return pd.date_range("2020-01-05", periods=ROWS, freq="7h").strftime(style).tolist()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.arange(ROWS) + 10_000, "looks like an id"),
        ([f"P{number:05d}" for number in range(ROWS)], "looks like an id"),
        (dates("%Y-%m-%d"), "holds dates"),
        (dates("%d.%m.%Y"), "holds dates"),
        (dates("%m/%d/%y %H:%M"), "holds dates"),
        (dates("%Y%m%d"), "holds dates"),
        (pd.date_range("2020-01-05", periods=ROWS), "holds dates"),
        (pd.to_timedelta(np.arange(ROWS) % 90, unit="h"), "holds dates or durations"),
        (
            [f"${number % 90}" for number in range(ROWS)],
            "holds numbers with other characters: write values such as '$9'",
        ),
        ([f"{number % 90},5 %" for number in range(ROWS)], "holds numbers with other characters"),
        ([f"1,{number:03d},000" for number in range(ROWS)], "holds numbers with other characters"),
        (["NL"] * ROWS, "same value in every row"),
        ([""] * ROWS, "holds no values"),
        ([f"patient {number} was seen again" for number in range(ROWS)], "is free text"),
        (
            [f"code {number % 150}" for number in range(ROWS)],
            "too many different values for categories: 150; group them",
        ),
    ],
)
def test_columns_that_are_no_features_are_left_out(column: object, words: str) -> None:
    drafted = draft(table(odd=column), "ill", name="t")
    assert words in drafted.excluded["odd"]
    assert [each.name for each in drafted.schema.columns] == ["age"]


@pytest.mark.parametrize("copied", [{"yes": "1", "no": "0"}, {"yes": "RE", "no": "FI"}])
def test_copies_of_the_label_are_left_out(copied: dict) -> None:
    frame = table()
    frame["copy"] = frame["ill"].map(copied)
    assert "follows from the label 'ill'" in draft(frame, "ill", name="t").excluded["copy"]
    frame.loc[frame.index[frame["ill"] == "yes"][0], "copy"] = copied["no"]
    assert "copy" not in draft(frame, "ill", name="t").excluded


def test_ordinary_columns_stay() -> None:
    rng = np.random.default_rng(1)
    frame = table(
        income=rng.integers(10_000, 90_000, ROWS),
        visits=rng.poisson(2, ROWS),
        year=rng.integers(1950, 2000, ROWS),
        huge=rng.normal(size=ROWS) * 1e300,
        job=rng.choice(["nurse", "teacher", "driver"], ROWS),
        city=[f"city {min(number % 100, 3 if number % 10 else 99)}" for number in range(ROWS)],
    )
    assert draft(frame, "ill", name="t").excluded == {}


def test_what_to_drop_and_what_to_keep() -> None:
    frame = table(patient_id=np.arange(ROWS), ward=["a", "b"] * (ROWS // 2))
    drafted = draft(frame, "ill", name="t", drop=["ward"], keep=["patient_id"])
    assert [column.name for column in drafted.schema.columns] == ["age", "patient_id"]
    assert drafted.excluded == {"ward": "was dropped on request"}
    with pytest.raises(DataError, match="column 'wart' is not in 't'; did you mean 'ward'"):
        draft(frame, "ill", name="t", drop=["wart"])
    with pytest.raises(DataError, match="no column that can be a feature: 'patient_id' looks like an id"):
        draft(frame[["patient_id", "ill"]], "ill", name="t")


def test_frequent_categories_are_kept_where_they_cover_most_rows() -> None:
    names = [f"name {number}" for number in range(80)] + [f"name {number % 5}" for number in range(ROWS - 80)]
    (_, column) = draft(table(who=names), "ill", name="t").schema.columns
    assert isinstance(column, data.Categorical)
    assert len(column.categories) == MAX_CATEGORIES


def test_classes_that_differ_in_case_are_named() -> None:
    frame = pd.DataFrame({"x": range(4), "label": ["yes", "Yes", "no", "no"]})
    with pytest.raises(DataError, match="differ only in case, 'Yes' and 'yes'; write them alike"):
        draft(frame, "label", name="t")
    assert draft(frame.assign(label=list("aAbB")), "label", name="t").schema.label.classes == (
        "A",
        "B",
        "a",
        "b",
    )


def test_draft_orders_numeric_classes_as_numbers() -> None:
    frame = pd.DataFrame({"x": range(12), "label": [str(number) for number in range(12)]})
    assert draft(frame, "label", name="t").schema.label.classes == tuple(str(n) for n in range(12))


@pytest.mark.parametrize(
    ("read", "proposed"),
    [
        ((18.3, 93.1), (0, 95)),
        ((82, 174), (80, 175)),
        ((-0.031, 0.027), (-0.035, 0.03)),
        ((5, 5), (4, 6)),
        ((1e-300, 9.2e-300), (0, 9.5e-300)),
        ((1.7e12 + 3, 1.7e12 + 44), (1.7e12, 1.7e12 + 45)),
        ((1e20, 1e20), (1e20 - 1e8, 1e20 + 1e8)),
        ((5e-324, 1e-323), (-1, 1)),
    ],
)
def test_bounds_are_rounded_outwards(read: tuple[float, float], proposed: tuple[float, float]) -> None:
    assert rounded_bounds(*read) == pytest.approx(proposed, rel=1e-14)


@pytest.mark.parametrize("column", ["x", "label"])
def test_numbers_that_no_bounds_can_hold_are_named(column: str) -> None:
    """An OverflowError: the distance of ±1e308 is infinite."""
    numbers = np.sin(np.arange(200.0)) * 1.7e308
    frame = pd.DataFrame({"x": np.arange(200) / 3, "label": np.arange(200) / 7} | {column: numbers})
    with pytest.raises(DataError, match=rf"bounds of '{column}': -1.\de\+308 to 1.\de\+308.*correct the numbers"):
        draft(frame, "label")


def test_a_draft_proposes_regression_and_can_be_told_otherwise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels, x = rng.permutation(np.arange(700) % 307), rng.normal(size=700)
    pd.DataFrame({"x": x, "twice": labels * 2 + 1, "label": labels}).to_csv(tmp_path / "table.csv", index=False)
    drafted = data.draft(tmp_path / "table.csv", "label")
    assert drafted.schema.label.bounds == (0, 320)
    assert drafted.schema.read_from_data[0] == "bounds of 'label'"
    assert "follows from the label" in drafted.excluded["twice"]
    classes = data.draft(tmp_path / "table.csv", "label", task="classification").schema
    assert len(classes.label.classes) == 307
    public = data.with_label_bounds(drafted.schema, (0, 500))
    assert (public.label.bounds, public.label.bounds_from) == ((0, 500), "public")
    with pytest.raises(DataError, match="lists classes of 'label'"):
        data.with_label_bounds(classes, (0, 500))


def test_a_messy_table_of_six_institutions(tmp_path: Path) -> None:
    """`benchmarks/messy.py` in small: six dialects are one table, and no odd column becomes a feature."""
    path = Path(__file__).parents[2] / "benchmarks" / "messy.py"
    module = runpy.run_path(str(path))
    files = module["make"](tmp_path / "hospitals", records=2000, test_records=100)
    assert len(files) == 6
    dataset = data.load(path=tmp_path / "hospitals", label="readmitted", test_fraction=0)
    assert [source.name for source in dataset.sources] == ["coast", "east", "hills", "north", "south", "west"]
    columns = {column.name for column in dataset.schema.columns}
    odd = {"patient_id", "visit", "admitted", "discharged", "postcode", "diagnosis_code", "country", "software"}
    odd |= {"remarks", "contact", "readmitted_code", "bill_type"}
    assert len(columns) == 47
    assert not columns & odd
    assert dataset.x_train.shape[0] == len(dataset.y_train) == 2000
    assert 0.05 < dataset.y_train.mean() < 0.12  # the rare class is read from all six


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *(
            (name, True)
            for name in ("id", "ID", "PATIENT_ID", "Patient Id", "patientId", "MRN", "Patient", "subject")
        ),
        *((name, False) for name in ("paid", "covid", "monkey", "GRID", "patient_age", "patients", "inpatient")),
    ],
)
def test_names_of_ids_in_any_spelling(name, named):
    assert (ID_NAME.search(name) is not None) == named


def test_a_column_that_one_table_lacks_can_be_dropped(tmp_path):
    """Headers were compared before columns were dropped: no schema of the common columns could be drafted."""
    frame = pd.DataFrame({"age": [*range(20, 80)] * 3, "ward": ["a", "b", "c"] * 60, "ill": ["no", "yes"] * 90})
    frame.to_csv(tmp_path / "north.csv", index=False)
    frame.drop(columns="ward").to_csv(tmp_path / "south.csv", index=False)
    with pytest.raises(DataError, match=r"has no column 'ward'.*--drop ward"):
        draft(tmp_path, "ill")
    drafted = draft(tmp_path, "ill", drop=["ward"])
    assert [column.name for column in drafted.schema.columns] == ["age"]
    assert drafted.excluded == {"ward": "was dropped on request"}
    with pytest.raises(DataError, match="did you mean 'ward'"):
        draft(tmp_path, "ill", drop=["wrd"])
