"""Parts of records: the same people share them whatever columns came or went, other people do not."""

import numpy as np
import pandas as pd
import pytest

from dither import data
from dither.accounting.ledger import sketch
from dither.data.hashing import hash_arrays, hash_table, join_hashes
from dither.data.parts import MAX_COLUMNS, numbers_rows
from dither.errors import DataError

KEY = bytes(range(16))


def shared(new, old):
    known = sketch.scan(old, KEY).sketch
    return sketch.scan(new, KEY, [known]).shared(known)


def answers(seed, count=1000, questions=10, most=6):
    numbers = np.random.default_rng(seed).integers(1, most, (count, questions))
    return pd.DataFrame(numbers, columns=[f"question {i}" for i in range(questions)])


@pytest.fixture(scope="module")
def adult():
    try:
        path, _ = data.get("adult")
    except DataError as error:
        pytest.skip(str(error))
    table = pd.read_csv(path, header=None, nrows=3000, skipinitialspace=True)
    return table.rename(columns=str).drop_duplicates()


def test_disjoint_people_of_one_population_share_nothing(adult):
    """Whatever values are common, and if both tables number their rows."""
    for old, new in (
        (adult[::2], adult[1::2]),
        (adult[::2], adult[1::2].drop(columns="1")),
        (adult[::2].drop(columns="2"), adult[1::2].drop(columns=["2", "8"])),
        (answers(1), answers(2)),
        (answers(1, questions=20), answers(2, questions=20)),
        (answers(1, questions=30, most=3), answers(2, questions=30, most=3)),
    ):
        for numbered in (False, True):
            tables = [each.assign(id=np.arange(len(each))) if numbered else each for each in (old, new)]
            assert not shared(*(hash_table(each) for each in tables)).share


@pytest.mark.parametrize("column", ["0", "2", "9", "14"])  # "2" tells people apart best
def test_the_same_people_are_recognised_without_a_column(adult, column):
    less = adult.drop(columns=column)
    old = hash_table(adult)
    changed = [less, less[::3], less.rename(columns="c{}".format)[::-1], pd.concat([less[300:], less[:30]])]
    for new in changed:
        found = shared(hash_table(new), old)
        assert found.parts
        assert found.share > 0.02
    assert shared(old, hash_table(less)).share > 0.02, "the other way round: a column more"


def test_answers_to_questions_are_recognised_by_the_questions_names():
    old, less = hash_table(answers(1)), answers(1).drop(columns="question 3")
    assert shared(hash_table(less), old).share > 0.05
    assert shared(hash_table(answers(1).assign(site="north")), old).share > 0.05
    assert not shared(hash_table(less.rename(columns=str.upper)[::-1].set_axis(range(9), axis=1)), old).share


def test_arrays_and_tables_have_the_same_parts():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 6)).astype(np.float32), rng.integers(0, 2, 3000)
    old, table = hash_arrays(x, y), pd.DataFrame(x).assign(y=y)
    assert shared(hash_table(table.drop(columns=2)), old).share > 0.05
    assert shared(hash_arrays(x[:, :5], y), old).share > 0.1
    two = join_hashes([hash_arrays(x[:1000, 1:], y[:1000]), hash_arrays(x[1000:, 1:], y[1000:])])
    assert shared(two, old).share > 0.1
    wide = rng.normal(size=(20, MAX_COLUMNS)).astype(np.float32)
    assert not len(hash_arrays(wide, y[:20]).parts)


def test_of_many_parts_a_sample_is_kept():
    """The same ones of both tables: of 12,000 of 24,000 people, in other columns."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24_000, 9)).round(2), np.zeros(24_000)
    many, some = hash_arrays(x, y), hash_arrays(x[:12_000, 1:], y[:12_000])
    assert many.zeros > some.zeros >= 0
    assert len(many.parts) < 2**18
    assert shared(many, some).share > 0.05
    assert shared(some, many).share > 0.05


def test_columns_that_number_the_rows_are_known():
    def numbers(*values):
        return numbers_rows(np.array(values, np.float32).view(np.uint32).astype(np.uint64))

    assert numbers(5, 3, 4, 9)
    assert numbers(0, 1)
    assert not numbers(0, 1, 1)
    assert not numbers(0.5, 1, 2)
    assert not numbers(1, 20, 300)
    assert not numbers(1)
    assert not numbers_rows(np.array([2**40, 2**41], np.uint64))


@pytest.mark.parametrize("values", [["1"], ["a", "b"]])
def test_very_many_records_of_few_values_have_no_part_that_tells_them_apart(values, monkeypatch):
    """Too many equal parts for the memory: once none of their hashes was in the sample, there was a traceback."""
    monkeypatch.setattr("dither.data.parts._KEPT", 64)
    for count in (1, 7, 500):
        assert not len(hash_table(pd.DataFrame({"only": values * count})).parts)
