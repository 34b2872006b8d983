"""Tests of `dither.experiment.statistics`: private counts, means, quantiles and categories."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
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
    with pytest.raises(SpecError, match="declare public=True"):
        dither.statistics([file, *tables(1)], epsilon=1.0, ledger=book)
    with pytest.raises(SpecError, match="epsilon=0"):
        dither.statistics(file, epsilon=0.0, ledger=book)
    assert not book.exists()
    dither.statistics(file, epsilon=1.0, ledger=book, words=seeded(0))
    ledger = Ledger(book)
    assert [round(each.epsilon, 3) for dataset in ledger.datasets() for each in ledger.spent(dataset)] == [1.0]
    tables(1, 300)[0].rename(columns={"age": "years"}).to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DitherError, match="share 100%"):  # the same people under another name
        dither.statistics(tmp_path / "other.csv", epsilon=1.0, ledger=book)


class Answers:
    """Answers every question with the counts that are given for its kind, at a noise of that std."""

    def __init__(self, std, records=1000, **parts):
        self.std, self.records, self.parts = std, records, parts

    def total(self, question):
        return self.parts[question.kind], self.std

    def names(self, question):
        return self.parts[question.kind]


def surveyed(mark=0, text=0, number=0, powers=None):
    cells = np.zeros((1, counting.POWER_CELLS + 2 * len(counting.EXPONENTS) + 1), np.int64)
    cells[0, :3] = mark, text, number
    for power, count in (powers or {}).items():
        cells[0, counting.POWER_CELLS + len(counting.EXPONENTS) + power] = count
    return cells


@pytest.mark.parametrize(
    ("part", "kind", "present"),
    [
        (surveyed(number=900, text=100), "number", (1000, 1000 - 19.6 * math.sqrt(2), 1000 + 19.6 * math.sqrt(2))),
        (surveyed(number=899, text=100), "category", (999, 999 - 19.6 * math.sqrt(3), 999 + 19.6 * math.sqrt(3))),
        (surveyed(mark=200, text=300), "category", (500, 500 - 19.6 * math.sqrt(3), 500 + 19.6 * math.sqrt(3))),
        (surveyed(mark=200, number=300), "number", (300, 300 - 19.6 * math.sqrt(2), 300 + 19.6 * math.sqrt(2))),
        (surveyed(number=2000), "number", (1000, 1000 - 19.6 * math.sqrt(2), 1000 + 19.6 * math.sqrt(2))),
        (surveyed(number=55), "empty", (55, 55 - 19.6 * math.sqrt(2), 55 + 19.6 * math.sqrt(2))),
        (surveyed(number=56), "number", (56, 56 - 19.6 * math.sqrt(2), 56 + 19.6 * math.sqrt(2))),
        (surveyed(number=-30), "empty", (0, 0, 19.6 * math.sqrt(3))),
    ],
)
def test_a_column_is_what_nine_of_ten_cells_are_and_empty_below_its_noise(part, kind, present):
    kinds, found, _ = survey(Answers(10.0, survey=[part]), ["a"], 1.0)
    assert kinds["a"] == kind
    assert found["a"] == pytest.approx(present)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([5.0], (0.0, 8.0)),
        ([5.0, 900.0], (0.0, 1024.0)),
        ([-5.0], (-8.0, 0.0)),
        ([-5.0, -900.0], (-1024.0, 0.0)),
        ([-900.0, 5.0], (-1024.0, 8.0)),
        ([0.0, 5.0], (0.0, 8.0)),
        ([0.0], (0.0, 2.0**-20)),
        ([-5.0, 0.0], (-8.0, 0.0)),
        ([1e-6], (0.0, 2.0**-19)),
        ([-1e-6], (-(2.0**-19), 0.0)),
        ([1e30], (0.0, 2.0**41)),
        ([-1e30, 1e30], (-(2.0**41), 2.0**41)),
        ([], (-1.0, 3.0)),
    ],
)
def test_the_survey_finds_the_powers_of_two_that_hold_the_numbers_and_0(values, found):
    cells = np.concatenate([np.zeros(counting.POWER_CELLS), 1000 * counting._powers_of_two(np.array(values))])
    assert statistics.power_range(cells, 1.0, (-1.0, 3.0)) == found


def test_counts_stand_out_where_noise_alone_would_not_in_a_hundred_rows():
    """Of 64 cells of noise with std 2: above 2 · 3.6 by chance in one of a hundred rows."""
    limit = -2.0 * norm.ppf(0.01 / 64)
    counts = np.zeros(64)
    counts[5], counts[9] = limit * 1.0001, limit * 0.9999
    assert statistics.significant(counts, 2.0).tolist() == [5]
    limit = -2.0 * norm.ppf(1e-5 / 64)
    counts[5], counts[9] = limit * 1.0001, limit * 0.9999
    assert statistics.significant(counts, 2.0, 1e-5).tolist() == [5]


@pytest.mark.parametrize(
    ("filled", "found"),
    [((2, 5), (1.5, 7.0)), ((0, 1), (0.0, 2.5)), ((7, 7), (6.75, 8.0)), ((), (0.0, 8.0))],
)
def test_a_closer_look_leaves_a_quarter_on_either_side(filled, found):
    """Bins of width 1 in 0 to 8: between the first and the last that stand out, and no further than the range."""
    counts = np.zeros(8)
    counts[list(filled)] = 1000
    if filled == (2, 5):
        found = (2 - 0.25 * 4, 6 + 0.25 * 4)
    assert statistics.inner_range((0.0, 8.0), counts, 1.0, 0.25) == found


def test_a_range_is_not_that_of_the_few_bins_that_exceed_the_noise_by_chance():
    """15,000 values over 0 to 96, 300 in each of 48 bins: one or none of them stands out of a noise of 300."""
    generator = np.random.default_rng(0)
    for _ in range(100):
        counts = np.where(np.arange(64) < 48, 15_000 / 48, 0) + generator.normal(0, 300, 64)
        low, high = statistics.inner_range((0.0, 128.0), counts, 300.0, 0.1)
        assert low <= 32
        assert high >= 64


def test_bins_are_merged_only_where_the_noise_hides_them():
    counts = np.zeros(64)
    counts[[3, 40]] = 1000
    assert statistics.merged(counts, 1.0)[0] is counts
    assert statistics.merged(np.zeros(64), 1.0)[0].tolist() == [0]


def test_mean_and_deviation_follow_from_the_sums_with_all_of_their_noise():
    """500 numbers in 10 to 30, of mean 15 and mean square (in the range's units) 0.1; 20 may be missing."""
    low, high, number, std = 10.0, 30.0, 500.0, 65536.0
    sums = np.array([[0.25, 0.1]]) * number * counting.UNITS
    counter = Answers(std, histogram=[np.full((1, 64), 8)], sums=[sums])
    present = {"a": statistics.Estimate(number, number - 20, number + 20)}
    described = statistics._numbers(counter, {"a": (low, high)}, present, 0.5)["a"]
    assert described["range"] == (low, high)
    spread = (1.96 * 1.0 + 0.25 * 20) / number
    assert described["mean"] == pytest.approx((15.0, 15.0 - 20 * spread, 15.0 + 20 * spread))
    variance, wide = 0.1 - 0.25**2, (1 + 2 * 0.25) * spread
    expected = [20 * math.sqrt(variance + error) for error in (0.0, -wide, wide)]
    assert described["std"] == pytest.approx(expected)
    assert set(described["quantiles"]) == set(statistics.LEVELS)


def test_a_mean_stays_in_its_range_and_a_deviation_above_zero():
    for share, value in ((-0.1, 10.0), (1.2, 30.0)):
        sums = np.array([[share, 0.0]]) * 500 * counting.UNITS
        counter = Answers(1.0, histogram=[np.full((1, 64), 8)], sums=[sums])
        present = {"a": statistics.Estimate(500.0, 480.0, 520.0)}
        described = statistics._numbers(counter, {"a": (10.0, 30.0)}, present, 0.5)["a"]
        assert described["mean"].value == pytest.approx(value)
        assert described["std"].low == 0.0


def test_quantiles_are_read_off_the_running_sum():
    """64 bins of 0 to 64, ten records in each: ranks are the numbers themselves, ten times."""
    counts = np.full(64, 10.0)
    for level, found in statistics._quantiles(counts, 0.5, 0.0, 64.0).items():
        moved = 1.96 * 0.5 * math.sqrt(64) / 10
        expected = (64 * level, max(0.0, 64 * level - moved), min(64.0, 64 * level + moved))
        assert found == pytest.approx(expected, abs=1e-9)
    # what noise takes away is given back before the next bin: ranks never fall
    counts[31:33] = [30.0, -10.0]
    noisy = statistics._quantiles(counts, 0.0, 0.0, 64.0)
    assert noisy[0.5].value == pytest.approx(31 + 10 / 30, abs=0.05)
    assert [each.value for each in noisy.values()] == sorted(each.value for each in noisy.values())


def test_categories_come_with_their_noise_the_largest_first():
    counter = Answers(4.0, categories=[np.array([[5, 100, 30, 7]])])  # the last: all others
    described = statistics._categories(counter, {"a": ("x", "y", "z")}, 0.5)["a"]["categories"]
    assert list(described) == ["y", "z", "x"]
    assert described["y"] == pytest.approx((100, 100 - 7.84, 100 + 7.84))
    assert described["x"] == pytest.approx((5, 0.0, 12.84))


def test_statistics_are_shown_as_a_table_and_as_json():
    result = dither.statistics(tables(1), public=True, epsilon=50.0, words=seeded(0))
    with pytest.raises(SpecError, match="column='weight' is not one of age, change, sex, code, empty"):
        result.column("weight")
    rows = {row["column"]: row for row in result.rows()}
    assert list(rows) == ["age", "change", "sex", "code", "empty"]
    assert rows["age"]["records"].startswith(("2,9", "3,0"))
    assert rows["age"]["median"] == str(result.column("age").quantiles[0.5])
    first, last = (result.column("age").quantiles[level].value for level in (0.01, 0.99))
    assert rows["age"]["1% to 99%"] == f"{first:.4g} to {last:.4g}"
    assert rows["sex"]["mean"] == rows["sex"]["median"] == rows["sex"]["1% to 99%"] == ""
    assert "f 1," in rows["sex"]["categories"]
    assert json.loads(result.to_json())["institutions"] == 1


def test_a_power_of_two_stands_out_where_noise_would_in_one_of_100_000_rows():
    powers = 2 * len(counting.EXPONENTS) + 1
    limit = -3.0 * norm.ppf(1e-5 / powers)
    for count, found in ((limit * 1.001, (0.0, 8.0)), (limit * 0.999, (-1.0, 3.0))):
        cells = np.zeros(counting.POWER_CELLS + powers)
        cells[counting.POWER_CELLS :] = count * counting._powers_of_two(np.array([5.0]))
        assert statistics.power_range(cells, 3.0, (-1.0, 3.0)) == found


def test_a_zoom_shows_a_quarter_more_on_either_side():
    counts = np.zeros((1, 64))
    counts[0, 20:30] = 100
    zoomed = statistics.zoom(Answers(1.0, histogram=[counts]), {"a": (0.0, 64.0)}, 0.5)
    assert zoomed == {"a": (20 - 2.5, 30 + 2.5)}
