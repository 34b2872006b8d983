"""Tests of `dither.experiment.statistics`: private counts, means, quantiles and categories."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import dither
from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.errors import DataError, DitherError, SpecError
from dither.experiment import counting, evaluation, private_schema, report, statistics
from dither.experiment.statistics import survey


@pytest.mark.parametrize("steps", [statistics._SHARES, evaluation._SHARES, private_schema._SHARES])
def test_the_steps_share_all_of_the_budget(steps):
    assert sum(steps.values()) == pytest.approx(1.0, abs=1e-12)


def seeded(seed):
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, 2**64, count, np.uint64)


def tables(count=3, records=3000, seed=0):
    rng = np.random.default_rng(seed)
    return [
        pd.DataFrame(
            {
                "age": rng.integers(18, 90, records),
                "change": rng.normal(-3.0, 2.0, records),
                "sex": rng.choice(["f", "m"], records),
                "code": [f"{site}-{row}" for row in range(records)],
                "empty": [None] * records,
            }
        )
        for site in range(count)
    ]


def test_estimates_are_near_and_their_intervals_hold_the_exact_values():
    everyone = pd.concat(tables())
    inside, of_categories = [], []
    for seed in range(6):
        result = dither.statistics(tables(), public=True, epsilon=5.0, words=seeded(seed))
        assert [each.kind for each in result.columns] == ["number", "number", "category", "category", "empty"]
        age, change = result.column("age"), result.column("change")
        assert 88 < age.range[1] <= 128.0
        assert -16.0 <= change.range[0] < -7.0
        assert set(result.column("sex").categories) == {"f", "m"}
        for column in (age, change):
            values = everyone[column.name]
            inside += [
                column.std.low <= values.std() <= column.std.high,
                column.present.low <= len(values) <= column.present.high,
                column.mean.low <= values.mean() <= column.mean.high,
                column.quantiles[0.5].low <= values.median() <= column.quantiles[0.5].high,
            ]
        for name, count in result.column("sex").categories.items():
            of_categories.append(count.low <= (everyone["sex"] == name).sum() <= count.high)
    assert np.mean(inside) >= 0.9
    assert np.mean(of_categories) >= 0.9


class NoisySurvey:
    """Half of the records have a number, or a text, or a text or a mark."""

    records = 10_000

    def total(self, question):
        rng, std = np.random.default_rng(0), 50.0
        parts = rng.normal(0, std, (len(question.columns), 1, *question.shapes()[0][1:]))
        parts[0::3, 0, counting.NUMBER_CELL] += 5000
        parts[1::3, 0, counting.TEXT_CELL] += 5000
        parts[2::3, 0, counting.TEXT_CELL] += 4000
        parts[2::3, 0, counting.MARK_CELL] += 1000
        return list(parts), std


def test_intervals_of_how_many_records_have_a_value_hold_it_in_95_of_100_cases():
    names = list(map(str, range(6000)))
    _, present, _ = survey(NoisySurvey(), names, 1.0)
    inside = np.array([each.low <= 5000 <= each.high for each in present.values()]).reshape(-1, 3)
    np.testing.assert_allclose(inside.mean(axis=0), 0.95, atol=0.015)


def test_a_name_that_one_record_has_is_not_shown():
    result = dither.statistics(tables(), public=True, epsilon=50.0, words=seeded(1))
    assert result.column("code").categories == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [({"epsilon": 0.0}, "epsilon=0"), ({"epsilon": math.nan}, "epsilon=nan"), ({"delta": 1.0}, "delta=1")],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(SpecError, match=message):
        dither.statistics(tables(1), public=True, **{"epsilon": 1.0, **values})


def test_wrong_tables_are_named():
    with pytest.raises(DataError, match="'weight' is not in every table"):
        dither.statistics(tables(1), public=True, epsilon=1.0, columns=["weight"])
    with pytest.raises(DataError, match="no column in common"):
        dither.statistics([pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})], public=True, epsilon=1.0)
    with pytest.raises(SpecError, match="int is not a table"):
        dither.statistics([3], public=True, epsilon=1.0)


def test_the_command_charges_every_file_before_it_looks(tmp_path):
    files = []
    for site, table in enumerate(tables(2, 500)):
        files.append(str(tmp_path / f"site{site}.csv"))
        table.to_csv(files[-1], index=False)
    book = str(tmp_path / "ledger.sqlite")

    def stats(*more):
        return CliRunner().invoke(app, ["stats", *files, "--epsilon", "1", "--ledger", book, *more])

    assert stats("--columns", "weight").exit_code != 0
    first = stats("--json")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["epsilon"] == 1.0
    ledger = Ledger(book)
    assert len(ledger.datasets()) == 2  # a wrong column cost nothing
    assert {round(spent.epsilon, 3) for each in ledger.datasets() for spent in ledger.spent(each)} == {1.0}
    assert "H3" not in CliRunner().invoke(app, ["budget", "show", "--ledger", book]).output  # the noise is exact
    stats("--quiet")
    assert all(1.2 < spent.epsilon < 1.6 for each in ledger.datasets() for spent in ledger.spent(each))


@pytest.mark.parametrize(
    "command",
    [
        ["stats", "site.csv", "--epsilon", "1"],
        ["data", "schema", "site.csv", "--label", "age", "--private", "--epsilon", "1"],
        ["evaluate", "run", "--data", "site.csv", "--epsilon", "1"],
    ],
    ids=["stats", "schema", "evaluate"],
)
def test_an_interruption_says_that_something_may_be_charged(tmp_path, monkeypatch, command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(counting.Institution, "answer", interrupted)
    monkeypatch.setattr(report, "load", lambda _: None)
    monkeypatch.setattr(evaluation, "evaluate_privately", interrupted)
    tables(1, 300)[0].to_csv(tmp_path / "site.csv", index=False)
    monkeypatch.chdir(tmp_path)
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130
    assert "its ε may be charged already (dither budget show FILE)" in " ".join(stopped.output.split())


def test_nothing_is_counted_without_a_charge(tmp_path):
    with pytest.raises(SpecError, match="declare public=True"):
        dither.statistics(tables(1), epsilon=1.0)
    file, book = tmp_path / "site.csv", tmp_path / "ledger.sqlite"
    tables(1, 300)[0].to_csv(file, index=False)
    with pytest.raises(SpecError, match="epsilon=0"):
        dither.statistics(file, epsilon=0.0, ledger=book)
    assert not book.exists()
    dither.statistics(file, epsilon=1.0, ledger=book, words=seeded(0))
    ledger = Ledger(book)
    assert [round(each.epsilon, 3) for dataset in ledger.datasets() for each in ledger.spent(dataset)] == [1.0]
    tables(1, 300)[0].rename(columns={"age": "years"}).to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DitherError, match="share 100%"):  # the same people under another name
        dither.statistics(tmp_path / "other.csv", epsilon=1.0, ledger=book)
