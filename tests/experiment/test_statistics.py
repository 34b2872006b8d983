"""Tests of `dither.experiment.statistics`: private counts, means, quantiles and categories."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import dither
from dither.accounting import gaussian_mu, proven
from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.errors import DataError, DitherError, SpecError
from dither.experiment import statistics


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
    inside = []
    for seed in range(6):
        result = dither.statistics(tables(), public=True, epsilon=3.0, words=seeded(seed))
        assert [each.kind for each in result.columns] == ["number", "number", "category", "category", "empty"]
        age, change = result.column("age"), result.column("change")
        assert age.range == (0.0, 128.0)
        assert change.range[0] in (-16.0, -8.0)
        assert set(result.column("sex").categories) == {"f", "m"}
        for column in (age, change):
            values = everyone[column.name]
            inside += [
                column.std.low <= values.std() <= column.std.high,
                column.present.low <= len(values) <= column.present.high,
                column.mean.low <= values.mean() <= column.mean.high,
                column.quantiles[0.5].low <= values.median() <= column.quantiles[0.5].high,
            ]
        exact = (everyone["sex"] == "f").sum()
        inside.append(
            result.column("sex").categories["f"].low <= exact <= result.column("sex").categories["f"].high
        )
    assert np.mean(inside) >= 0.9


def test_a_name_that_one_record_has_is_not_shown():
    result = dither.statistics(tables(), public=True, epsilon=50.0, words=seeded(1))
    assert result.column("code").categories == {}


NASTY = [
    {"age": 1e308, "change": -1e-300, "sex": "m", "code": "x"},
    {"age": math.inf, "change": "1e400", "sex": " f ", "code": ""},
    {"age": "forty", "change": "text", "sex": 3, "code": None},
    {"age": -(2.0**40), "change": 2.0**70, "sex": "f" * 10_000, "code": "\x00"},
]


@pytest.mark.parametrize("record", NASTY)
def test_blanking_a_record_moves_no_question_further_than_its_noise_is_for(monkeypatch, record):
    """The exact counts of every question with the record and with a blank in its place."""
    asked = []
    noisy = statistics.Counting.noisy

    def watch(self, counts, touched, share):
        asked.append(([np.asarray(each, np.float64) for each in counts], touched))
        return noisy(self, counts, touched, share)

    monkeypatch.setattr(statistics.Counting, "noisy", watch)
    worlds = []
    for last in (record, dict.fromkeys(record)):
        asked.clear()
        frame = pd.concat(
            [tables(1)[0].astype(object), pd.DataFrame([{**last, "empty": None}])], ignore_index=True
        )
        dither.statistics(frame, public=True, epsilon=1.0, words=seeded(2))
        worlds.append(list(asked))
    with_record, blanked = worlds
    assert len(with_record) == len(blanked) == 6
    moved = 0.0
    for (counts, touched), (others, same) in zip(with_record, blanked, strict=True):
        assert touched == same
        if counts[0].shape != others[0].shape:  # names: one more cell, for a text that nobody else has
            assert abs(counts[0].size - others[0].size) <= 2
            continue
        square = float(np.sum(np.square(counts[0] - others[0])))
        assert square <= touched
        moved += square
    assert moved > 0


def column_types():
    """A column that pandas types by all of its cells, and a cell in its last place that changes that type."""
    dates = pd.to_datetime(pd.Series(["2020-01-01", "2021-05-05"]))
    return {
        "whole numbers, one missing": (pd.Series([1, 2]), None),
        "large whole numbers, one missing": (pd.Series([2**53 + 1, 2**60]), None),
        "whole numbers, one fraction": (pd.Series([1, 2]), 0.5),
        "true or false, one missing": (pd.Series([True, False]), None),
        "dates, one missing": (dates, None),
        "dates, one with a time of day": (dates, pd.Timestamp("2022-01-01 10:30")),
        "text, one very long": (pd.Series(["a", "b"]), "x" * 10_000),
        "numbers as text, one that is none": (pd.Series(["1", "2.50"]), "?"),
        "lists, one missing": (pd.Series([[1], [2, 3]]), None),
    }


@pytest.mark.parametrize("name", column_types())
def test_no_cell_changes_how_others_are_read(name):
    column, last = column_types()[name]
    alone = pd.DataFrame({"c": column})
    longer = pd.DataFrame({"c": pd.concat([column, pd.Series([last])], ignore_index=True)})
    blanked = pd.DataFrame({"c": pd.concat([column, pd.Series([None])], ignore_index=True)})
    for read in (statistics._as_numbers, statistics._as_text):
        np.testing.assert_array_equal(read(longer, "c")[:-1], read(alone, "c"))
        np.testing.assert_array_equal(read(blanked, "c")[:-1], read(alone, "c"))
    assert np.isnan(statistics._as_numbers(blanked, "c")[-1])
    assert statistics._as_text(blanked, "c")[-1] == ""
    assert len(statistics._as_text(longer, "c")[-1]) <= 100


@pytest.mark.parametrize(("epsilon", "columns"), [(0.1, 1), (1.0, 7), (8.0, 3), (50.0, 1)])
def test_a_name_that_one_record_has_is_shown_as_rarely_as_is_charged(epsilon, columns):
    """The tail of the discrete Gaussian itself, summed."""
    counting = statistics.Counting([], epsilon, 1e-5)
    threshold, variance = counting.threshold(columns, 0.2), counting.variance(columns, 0.2)
    values = np.arange(math.floor(threshold - 1) + 1, threshold + 40 * math.sqrt(variance) + 40)
    everything = np.arange(-values[-1], values[-1] + 1)
    shown = np.exp(-(values**2) / (2 * variance)).sum() / np.exp(-(everything**2) / (2 * variance)).sum()
    assert 0 < columns * shown <= counting.slip
    assert counting.slip * (1 + math.exp(epsilon)) <= 0.1 * 1e-5 * (1 + 1e-9)


def test_shares_and_noise_make_the_mu_that_is_charged():
    assert sum(statistics._SHARES.values()) == pytest.approx(1.0)
    counting = statistics.Counting([], 0.5, 1e-5)
    release = statistics.release(0.5, 1e-5)
    assert counting.mu == 1 / release.noise_std <= gaussian_mu(0.5, 1e-5)
    total = sum(7 / (counting.noise_std(7, share) ** 2 - 4) for share in statistics._SHARES.values())
    assert counting.mu * (1 - 1e-9) < math.sqrt(total) < counting.mu
    for epsilon in (0.01, 0.5, 20.0):
        charged = proven([((statistics.release(epsilon, 1e-5),), 1)], 1e-5, view="upload")
        assert 0.99 * epsilon < charged.value <= epsilon * (1 + 1e-6)


def test_a_share_is_not_spent_twice():
    counting = statistics.Counting(tables(1), 1.0, 1e-5)
    counting.total(lambda table: np.array([len(table)]), 1, 0.7)
    with pytest.raises(SpecError, match="left"):
        counting.total(lambda table: np.array([len(table)]), 1, 0.4)


def test_noise_has_its_variance():
    counting = statistics.Counting([pd.DataFrame({"a": [1]})], 1.0, 1e-5, seeded(3))
    noise, std = counting.total(lambda table: np.zeros(4000, np.int64), 1, 0.5)
    assert np.std(noise) == pytest.approx(std, rel=0.06)


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
