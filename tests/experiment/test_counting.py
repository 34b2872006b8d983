"""Tests of `dither.experiment.counting`: what a record can change, the noise, and questions from strangers."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

import dither
from dither.accounting import gaussian_delta, gaussian_mu, proven
from dither.errors import DataError, SpecError
from dither.experiment import counting, evaluation, statistics
from dither.experiment.counting import Columns, Counting, Institution, Question
from dither.simulation.aggregation import seeded_words
from tests.experiment.test_statistics import seeded, tables

NASTY = [
    {"age": 1e308, "change": -1e-300, "sex": "m", "code": "x"},
    {"age": math.inf, "change": "1e400", "sex": " f ", "code": ""},
    {"age": "forty", "change": "text", "sex": 3, "code": None},
    {"age": -(2.0**40), "change": 2.0**70, "sex": "f" * 10_000, "code": "\x00"},
    {"age": "18446744073709551615", "change": "-", "sex": "unknown", "code": "9" * 5000},
]


@pytest.fixture
def asked(monkeypatch):
    """(question, exact counts) of every question that is answered; of names the counts of all texts."""
    seen, spend, noisy = [], Institution.spend, Institution._noisy

    def spending(self, question):
        seen.append((question, []))
        return spend(self, question)

    def watching(self, counts, std):
        seen[-1][1].append(np.asarray(counts, np.float64).reshape(-1))
        return noisy(self, counts, std)

    monkeypatch.setattr(Institution, "spend", spending)
    monkeypatch.setattr(Institution, "_noisy", watching)
    return seen


@pytest.mark.parametrize("record", NASTY)
def test_blanking_a_record_moves_no_question_further_than_its_noise_is_for(asked, record):
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
    assert {question.kind for question, _ in blanked} == {*counting._COUNTERS, counting.NAMES} - {counting.WEIGHTS}
    moved = 0.0
    for (question, counts), (_, others) in zip(with_record, blanked, strict=True):
        if question.kind == counting.NAMES:  # one more cell, for a text that nobody else has
            assert all(abs(one.size - other.size) <= 1 for one, other in zip(counts, others, strict=True))
            continue
        square = float(np.sum(np.square(counts[0] - others[0])))
        assert square <= question.touched
        moved += square
    assert moved > 0


@pytest.mark.parametrize("kind", ["binary", "several", "numbers"])
def test_one_record_moves_no_score_further_than_its_noise_is_for(asked, kind):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3 if kind == "several" else 2, 50)
    y[0] = 1  # the ranks are of positive records
    outputs = rng.normal(size=(50, 3) if kind == "several" else 50)
    number = {"binary": 2, "several": 3, "numbers": 0}[kind]
    table = evaluation.score_columns(outputs, y, "regression" if kind == "numbers" else "classification", number)
    worlds = []
    for frame in (table, table.iloc[1:], table.iloc[:1]):
        asked.clear()
        counter = Counting([frame], 1.0, 1e-5, seeded(0), lists_names=False)
        evaluation.private_scores(counter, range(number), (0.0, 1.0), 1.0, 1e-5)
        worlds.append(list(asked))
    for (question, counts), (_, others), (_, alone) in zip(*worlds, strict=True):
        assert np.sum(np.square(counts[0] - others[0])) <= question.touched
        assert 0 < np.sum(np.square(alone[0])) <= question.touched
    assert sum(question.share for question, _ in worlds[0]) <= 1


def test_shares_and_noise_make_the_mu_that_is_charged():
    assert sum(statistics._SHARES.values()) == pytest.approx(1.0)
    counter = Counting([], 0.5, 1e-5)
    release = counting.release(0.5, 1e-5)
    assert counter.mu == 1 / release.noise_std <= gaussian_mu(0.5, 1e-5)
    questions = [Question("names", tuple("abcdefg"), share) for share in statistics._SHARES.values()]
    total = sum(7 / (counting.noise_std(question, counter.mu) ** 2 - 4) for question in questions)
    assert math.sqrt(total) == pytest.approx(counter.mu)
    for epsilon in (0.01, 0.5, 20.0):
        for names in (True, False):
            released = counting.release(epsilon, 1e-5, lists_names=names)
            charged = proven([((released,), 1)], 1e-5, view="upload")
            assert 0.99 * epsilon < charged.value <= epsilon * (1 + 1e-6)


def test_a_share_is_not_spent_twice():
    counter = Counting(tables(1), 1.0, 1e-5)
    counter.total(Question("survey", ("age",), 0.7))
    with pytest.raises(SpecError, match="left"):
        counter.total(Question("survey", ("age",), 0.4))


@pytest.mark.parametrize("share", [-0.5, 0.0, math.nan])
def test_no_question_gives_budget_back(share):
    institution = Institution(Columns(tables(1)[0]), 1.0, 0.0)
    with pytest.raises(SpecError, match="a question with share"):
        institution.answer(Question("survey", ("age",), share))
    assert institution.left == 1.0


def test_without_names_in_the_budget_none_is_listed():
    counter = Counting(tables(1), 50.0, 1e-5, lists_names=False)
    assert counter.names(Question("names", ("sex",), 1.0)) == [[]]


def test_noise_has_its_variance():
    question = Question("histogram", ("a",), 0.5, ((0.0, 1.0),), bins=4000)
    (noise,), std = Counting([pd.DataFrame({"a": [None, None]})], 1.0, 1e-5, seeded(3)).total(question)
    assert np.std(noise) == pytest.approx(std, rel=0.06)


def test_numbers_read_the_same_whatever_the_file_declares():
    values = [1.0, -0.5, 1e300, math.inf, math.nan, 3.0]
    declared = Columns(pd.DataFrame({"a": values}))
    texts = Columns(pd.DataFrame({"a": ["1", "-0.5", "1e300", "inf", "", "3.0"]}))
    np.testing.assert_array_equal(declared.numbers("a"), texts.numbers("a"))
    assert declared.kinds("a") == texts.kinds("a") == (0, 1, 4)


def test_an_empty_cell_changes_how_no_other_cell_is_read():
    """Parquet has whole numbers, which become floats where a cell is empty."""
    whole = pd.DataFrame({"a": [2**60 + 1, 7, 3]})
    blanked = pd.DataFrame({"a": [2**60 + 1, 7, None]})
    for read in (lambda columns: columns.numbers("a")[:2], lambda columns: np.array(columns.texts("a")[1])[:2]):
        np.testing.assert_array_equal(read(Columns(whole))[:1], read(Columns(blanked))[:1])


def test_powers_of_two_are_exact():
    edges = 2.0 ** np.arange(-19.0, 40.0)
    below, above = np.nextafter(edges, 0), np.nextafter(edges, np.inf)
    for values, first in ((edges, -19), (below, -20), (above, -19)):
        cells = counting._powers_of_two(np.concatenate([values, -values]))
        positive = np.flatnonzero(cells[len(counting.EXPONENTS) + 1 :])
        np.testing.assert_array_equal(positive, first + 20 + np.arange(len(edges)))
        np.testing.assert_array_equal(cells, cells[::-1])
    tiny = counting._powers_of_two(np.array([0.0, -0.0, 1e-9, -1e-9, 5e-324]))
    assert tiny[len(counting.EXPONENTS)] == tiny.sum() == 5


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_the_chance_of_a_lone_name_follows_the_share(share):
    """A server that asks again and again, with small shares, sees a name that one record has no more often."""
    question, slip = Question("names", ("sex",), share), 1e-9
    std = counting.noise_std(question, 1.0)
    threshold = 2 + std * norm.isf(slip * share)
    for count, listed in ((math.floor(threshold), [[]]), (math.floor(threshold) + 1, [["f"]])):
        institution = Institution(Columns(pd.DataFrame({"sex": ["f"]})), 1.0, slip)
        institution._noisy = lambda counts, std, count=count: np.array([count])
        assert institution.names(question) == listed


GOOD = Question("histogram", ("a",), 0.5, ((0.0, 1.0),)).to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "exact"},
        {"share": 0.0},
        {"share": 1e-5},
        {"share": math.nan},
        {"share": 2.0},
        {"columns": []},
        {"ranges": []},
        {"ranges": [[1.0, 1.0]]},
        {"ranges": [[0.0, math.inf]]},
        {"bins": 10**9},
        {"bins": 0},
        {"kind": "categories"},
        {"columns": None},
        {"ranges": [[0.0]]},
    ],
)
def test_questions_from_strangers_are_checked(change):
    assert Question.from_dict(GOOD).to_dict() == GOOD
    with pytest.raises(SpecError, match="a question"):
        Question.from_dict({**GOOD, **change})


WEIGHED = Question(
    "weights", ("a",), 0.5, ((0.0, 1.0),), bins=2, label="b", classes=("x", "y"), weights=((0.0, 0.5, -1.0, 1.0),)
).to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [[0.0, 0.5, -1.0, 1.0001]]},
        {"weights": [[0.0, 0.5, -1.0, math.nan]]},
        {"weights": [[0.0, 0.5, -1.0]]},
        {"weights": [[0.0, 0.5, -1.0, 1.0], [0.0]]},
        {"weights": []},
        {"weights": [["a", 0, 0, 0]]},
        {"label": ""},
        {"bins": 3},
        {"classes": []},
    ],
)
def test_weights_from_strangers_are_checked(change):
    assert Question.from_dict(WEIGHED).to_dict() == WEIGHED
    with pytest.raises(SpecError, match="a question"):
        Question.from_dict({**WEIGHED, **change})


def test_weights_of_many_parts_are_a_question_too_large():
    """One row of weights for each of 150,000 columns: a question of 2 MiB had a party fill 19 GB."""
    parts = {"bins": 1 << 12, "classes": ("x",), "weights": ((0.0,) * (1 << 12),)}
    columns = tuple(map(str, range(200)))
    many = Question.from_dict(WEIGHED)._replace(columns=columns, ranges=((0.0, 1.0),) * 200, **parts)
    with pytest.raises(SpecError, match="more than 1,048,576 cells"):
        Question.from_dict(many.to_dict())
    assert Question.from_dict(many._replace(columns=columns[:100], ranges=((0.0, 1.0),) * 100).to_dict())


def test_a_column_is_asked_for_once():
    """The names of one column's categories, 150,000 times over, filled the memory of a party."""
    with pytest.raises(SpecError, match="names a column twice"):
        Question.from_dict(Question("names", ("a", "b", "a"), 0.5).to_dict())


def test_weights_are_summed_by_class_and_part():
    """What a record can move is the length of the longest column of weights, in units."""
    question = Question.from_dict({**WEIGHED, "weights": [[0.0, 0.5, -1.0, 1.0], [0.25, 0.5, 0.0, 0.0]]})
    frame = pd.DataFrame({"a": [0.1, 0.9, 0.9, 0.2, 9.0, 0.1, None], "b": ["x", "x", "x", "y", "y", "z", "y"]})
    sums = counting._weights(question, Columns(frame))
    np.testing.assert_array_equal(sums / counting.UNITS, [[0.0 + 0.5 + 0.5 - 1.0 + 1.0, 0.25 + 0.5 + 0.5]])
    assert question.touched == counting.UNITS**2
    assert question._replace(weights=((0.5, 0.0, 0.0, 0.0),) * 2).touched == counting.UNITS**2 // 2


def test_a_category_that_is_asked_for_twice_counts_once():
    question = Question("categories", ("sex",), 1.0, categories=(("f", "f", "m"),))
    counts = counting._categories(question, Columns(pd.DataFrame({"sex": ["f"]})))
    assert counts.sum() == 1


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(DataError, match="'weight' is not in the table"):
        Counting(tables(1), 1.0, 1e-5).total(Question("survey", ("weight",), 0.5))


def test_seeded_counts_share_no_noise_with_each_other_or_with_the_rounds_of_a_run():
    counts = [
        tuple(counting.noise_words("seeded", 7, purpose, client)(4).tolist())
        for purpose in counting.PURPOSES
        for client in range(3)
    ]
    rounds = [tuple(seeded_words(7, index, client)(4).tolist()) for index in range(40) for client in range(3)]
    assert len({*counts, *rounds}) == len(counts) + len(rounds)


@pytest.mark.parametrize("epsilon", [0.1, 5.0, 8.0, 1000.0])
@pytest.mark.parametrize("names", [True, False])
def test_a_lone_name_takes_its_part_of_delta_and_the_counts_the_rest(epsilon, names):
    mu, slip = counting.mu_and_slip(epsilon, 1e-5, lists_names=names)
    factor = 1.0 + math.exp(min(epsilon, 600.0))
    assert slip == (1e-5 * min(1e-4, 0.1 / factor) if names else 0.0)
    assert slip * factor <= 0.1 * 1e-5 * (1 + 1e-12)
    assert gaussian_delta(epsilon, mu / (1 - 1e-4)) == pytest.approx(1e-5 - slip * factor, rel=1e-6)
    assert mu < gaussian_mu(epsilon, 1e-5)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"share": 1e-4}, True),
        ({"share": 0.99e-4}, False),
        ({"share": 1.0}, True),
        ({"share": 1.01}, False),
        ({"bins": 1}, True),
        ({"bins": 2**12}, True),
        ({"bins": 2**12 + 1}, False),
        ({"ranges": ((-0.9e300, 0.9e300),)}, True),
        ({"ranges": ((-1e300, 0.0),)}, False),
        ({"ranges": ((0.0, 1e300),)}, False),
        ({"ranges": ((0.0, 1e-300),)}, False),
        ({"ranges": ((0.0, 2e-300),)}, True),
        ({"ranges": ((0.0, 1.0), (0.0, 1.0))}, False),
        ({"bins": 2**12, "label": "b", "classes": tuple(map(str, range(255)))}, True),
        ({"bins": 2**12, "label": "b", "classes": tuple(map(str, range(256)))}, False),  # 2^20 cells, and no more
        ({"kind": "sums"}, True),
        ({"kind": "sums", "ranges": ()}, False),
        ({"kind": "categories", "categories": (("a",),)}, True),
        ({"kind": "categories", "categories": (("a",), ("b",))}, False),
    ],
)
def test_where_questions_end(change, allowed):
    question = Question("histogram", ("a",), 0.5, ((0.0, 1.0),))._replace(**change)
    if allowed:
        assert question.check() is question
    else:
        with pytest.raises(SpecError, match="a question"):
            question.check()


def test_the_last_share_may_be_rounded():
    institution = Institution(Columns(tables(1)[0]), 1.0, 0.0)
    question = Question("histogram", ("age",), 0.1, ((0.0, 1.0),))
    for share in (0.1, 0.2, 0.3, 0.4 + 5e-10):
        institution.spend(question._replace(share=share))
    assert institution.left == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(SpecError, match="more than the"):
        institution.spend(question._replace(share=1e-4))
    with pytest.raises(SpecError, match="names are a list, not counts"):
        Institution(Columns(tables(1)[0]), 1.0, 0.0).answer(Question("names", ("sex",), 0.1))


@pytest.mark.parametrize(
    ("question", "squared"),
    [
        (Question("survey", ("a", "b"), 0.5), 2 * 2),
        (Question("names", ("a", "b", "c"), 0.5), 3),
        (Question("histogram", ("a",), 0.5, ((0.0, 1.0),)), 1),
        (Question("categories", ("a", "b"), 0.5, categories=((), ())), 2),
        (Question("sums", ("a", "b"), 0.5, ((0.0, 1.0),) * 2), 2 * 2 * 2**32),
    ],
)
def test_what_one_record_may_move_follows_from_the_question(question, squared):
    assert question.touched == squared
    assert counting.noise_std(question, 0.2) == pytest.approx(math.sqrt(squared / (0.5 * 0.04) + 4))
    assert counting.total_std(question, 0.2, 9) == pytest.approx(3 * counting.noise_std(question, 0.2))


def test_names_that_are_listed_are_the_most_frequent_and_not_too_long():
    frame = pd.DataFrame({"a": ["x"] * 30 + ["y"] * 50 + ["z" * 1000] * 40 + ["z" * 1001] * 60 + [None] * 9})
    institution = Institution(Columns(frame), 1.0, 1e-9)
    institution._noisy = lambda counts, std: np.asarray(counts)
    assert institution.names(Question("names", ("a",), 1.0)) == [["y", "z" * 1000, "x"]]
    many = pd.DataFrame({"a": [str(i) for i in range(70) for _ in range(100 + i)]})
    institution = Institution(Columns(many), 1.0, 1e-9)
    institution._noisy = lambda counts, std: np.asarray(counts)
    assert institution.names(Question("names", ("a",), 1.0)) == [[str(i) for i in range(69, 5, -1)]]
