"""Inputs that once led users astray, each answered in one line. A label with 7.8% positives: test_advice.py."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import dither
from dither.cli import app

ROWS = 700


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pd.DataFrame({"age": rng.normal(50, 12, ROWS).round(1), "ill": rng.choice(["no", "yes"], ROWS)})


def drafted(folder, label="ill"):
    out = folder / "draft.toml"
    result = CliRunner().invoke(
        app, ["data", "schema", str(folder / "tables"), "--label", label, "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    return result.output.splitlines(), out.read_text()


@pytest.mark.parametrize(
    ("column", "answer"),
    [
        (
            np.arange(ROWS) + 1000,
            "looks like an id: 700 different values in 700 rows that increase from row to row",
        ),
        ([f"P{number:05d}" for number in range(ROWS)], "looks like an id: 700 different values in 700 rows"),
        (
            [f"code {number % 150}" for number in range(ROWS)],
            "has too many different values for categories: 150; group them",
        ),
    ],
)
def test_ids_and_columns_of_many_levels_are_left_out_with_the_option_that_keeps_them(
    table, column, answer, tmp_path
):
    (tmp_path / "tables").mkdir()
    table.assign(odd=column).to_csv(tmp_path / "tables" / "a.csv", index=False)
    lines, text = drafted(tmp_path)
    (line,) = [line for line in lines if line.startswith("left out: 'odd'")]
    assert answer in line
    assert line.endswith("(--keep 'odd' keeps it)")
    (comment,) = [line for line in text.splitlines() if line.startswith("# left out: 'odd'")]  # in the file too
    assert comment.endswith("(--keep 'odd' keeps it)")
    assert not any(letter.isdigit() for letter in comment)  # which is shared one day
    assert len(dither.data.Schema.load(tmp_path / "draft.toml").columns) == 1


def test_a_label_of_many_numbers_is_a_regression(table, tmp_path):
    (tmp_path / "tables").mkdir()
    cost = np.random.default_rng(1).permutation(np.arange(ROWS) % 307)
    table.assign(cost=cost).to_csv(tmp_path / "tables" / "a.csv", index=False)
    lines, _ = drafted(tmp_path, label="cost")
    (line,) = [line for line in lines if "this is a draft for regression" in line]
    assert "within 0 to 320" in line  # rounded: nobody's own number
    assert "--task classification" in line


def test_one_file_for_each_hospital_is_one_client_each(table, tmp_path):
    (tmp_path / "tables").mkdir()
    for number, name in enumerate(["north", "south", "west"]):
        table.iloc[number::3].to_csv(tmp_path / "tables" / f"{name}.csv", index=False)
    dataset = dither.data.load(path=tmp_path / "tables", label="ill", test_fraction=0)
    assert [source.name for source in dataset.sources] == ["north", "south", "west"]
