"""Private statistics, schemas and evaluation under attack: how far one record moves the counts of every question,
against the noise that is added to them.

`check_counts(rng)` draws tables, a budget and a record, asks all questions with the record, and once more with a
blank in its place, with the first world's noisy answers given back: both worlds are asked the same questions. The
distances of the exact counts and the measured noise are one Gaussian pair (R1).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import chi2

from dither import accounting
from dither.data.schema import SchemaPrivacy
from dither.errors import DataError
from dither.experiment import counting, evaluation, statistics
from dither.experiment.counting import Columns, Counter, Institution, Question
from dither.experiment.private_schema import Wanted, estimate_schema
from dither.privacy.discrete import Words

_TRIALS = 2048  # draws of each question's noise


class CountsCase(NamedTuple):
    """What was drawn, and what is asked of tables."""

    values: dict[str, Any]
    sizes: tuple[int, ...]
    with_record: list[pd.DataFrame]
    blanked: list[pd.DataFrame]
    ask: Callable[[Counter], object]
    epsilon: float
    delta: float
    lists_names: bool


class WatchedInstitution(Institution):
    """Remembers the exact counts of each question."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.counts: list[list[np.ndarray]] = []

    def spend(self, question: Question) -> float:
        self.counts.append([])
        return super().spend(question)

    def _noisy(self, counts: np.ndarray, std: float) -> np.ndarray:
        self.counts[-1].append(np.asarray(counts, np.int64).reshape(-1))
        return super()._noisy(counts, std)


class WatchedCounting(counting.Counting):
    """Remembers what is asked. With `answers` it gives those in place of its own."""

    def __init__(
        self, tables: Sequence[pd.DataFrame], case: CountsCase, words: Words, answers: list[Any] | None = None
    ) -> None:
        super().__init__(tables, case.epsilon, case.delta, words, lists_names=case.lists_names)
        self.watched = [WatchedInstitution(each.table, each.mu, each.slip, words) for each in self.institutions]
        self.institutions = list(self.watched)
        self.asked: list[Question] = []
        self.given: list[Any] = []
        self._answers = answers

    def total(self, question: Question) -> tuple[list[np.ndarray], float]:
        answer: tuple[list[np.ndarray], float] = self._remembered(question, super().total(question))
        return answer

    def names(self, question: Question) -> list[list[str]]:
        answer: list[list[str]] = self._remembered(question, super().names(question))
        return answer

    def _remembered(self, question: Question, own: Any) -> Any:
        self.asked.append(question)
        self.given.append(own if self._answers is None else self._answers[len(self.given)])
        return self.given[-1]


def check_counts(rng: np.random.Generator, error: float) -> tuple[CountsCase, float, float]:
    """A drawn case, what is proved of it, and what is exhibited, wrong with probability `error`."""
    case = draw_case(rng)

    def words(count: int) -> np.ndarray:
        return rng.integers(0, 2**64, count, np.uint64)

    first = WatchedCounting(case.with_record, case, words)
    case.ask(first)
    second = WatchedCounting(case.blanked, case, words, first.given)
    case.ask(second)
    squares = 0.0
    for number, question in enumerate(first.asked):
        worlds = [[each.counts[number] for each in world.watched] for world in (first, second)]
        parts = zip(*(itertools.chain.from_iterable(world) for world in worlds), strict=True)
        # A text that nobody else has is one more cell of its list; δ covers that it is shown.
        moved = sum(int(np.sum((a - b) ** 2)) for a, b in parts if a.size == b.size)
        if moved:
            squares += moved * chi2.ppf(error / 10, _TRIALS) / float(np.sum(_noise(question, case, words) ** 2))
    release = counting.release(case.epsilon, case.delta, lists_names=case.lists_names)
    proven = accounting.proven([((release,), 1)], case.delta, view="upload").value
    return case, proven, accounting.gaussian_epsilon(math.sqrt(squares), case.delta)


def _noise(question: Question, case: CountsCase, words: Words) -> np.ndarray:
    """Some of a question's noise, as an institution draws it."""
    mu, slip = counting.mu_and_slip(case.epsilon, case.delta, lists_names=case.lists_names)
    institution = Institution(Columns(pd.DataFrame()), mu, slip, words)
    return institution._noisy(np.zeros(_TRIALS, np.int64), institution.spend(question)).astype(np.float64)


def draw_case(rng: np.random.Generator) -> CountsCase:
    """Tables of one to three institutions, and what is asked of them. The record is the first institution's."""
    epsilon, delta = round(float(rng.uniform(0.1, 8.0)), 2), float(rng.choice([1e-5, 1e-3]))
    sizes = tuple(int(rng.integers(40, 400)) for _ in range(int(rng.integers(1, 4))))
    kind = str(rng.choice(["statistics", "schema", "two classes", "classes", "regression"]))
    of_tables = kind in ("statistics", "schema")
    tables, record, ask = (_described if of_tables else _scored)(rng, sizes, kind, epsilon, delta)
    first = pd.concat([tables[0], pd.DataFrame([record])], ignore_index=True).astype(object)
    blank = first.copy()
    blank.loc[len(blank) - 1] = None
    if not of_tables:  # a record that is not there
        first, blank = first.infer_objects(), tables[0]
    method = kind if of_tables else f"evaluation, {kind}"
    cells = {name: str(cell) for name, cell in record.items()}
    values = {"method": method, "epsilon": epsilon, "delta": delta, "record": cells}
    others = tables[1:]
    both = [first, *others], [blank, *others]
    return CountsCase(values, sizes, *both, ask, epsilon, delta, lists_names=of_tables)


# reason: one table of what is drawn
def _described(
    rng: np.random.Generator, sizes: Sequence[int], kind: str, epsilon: float, delta: float
) -> tuple[list[pd.DataFrame], dict[str, Any], Callable[[Counter], object]]:
    """Columns of numbers and of text, and a record that touches as much as it can, or a strange one."""
    numbers, texts = int(rng.integers(0, 4)), int(rng.integers(0, 3))
    numbers += not numbers + texts
    tables = [
        pd.DataFrame(
            {f"number {at}": rng.normal(10.0**at, 3.0, size) for at in range(numbers)}
            | {f"text {at}": rng.choice(["a", "b", "c"], size) for at in range(texts)}
        )
        for size in sizes
    ]
    strange = rng.choice(np.array([1e12, "1e12", np.inf, -1e300, "a", 2.0**-30, 3], object), numbers).tolist()
    cells = [1e12] * numbers if rng.random() < 0.6 else strange
    record = {f"number {at}": cell for at, cell in enumerate(cells)} | {f"text {at}": "a" for at in range(texts)}
    if kind == "statistics":
        return tables, record, lambda counter: statistics.describe(counter, list(record))
    wanted, privacy = Wanted(next(reversed(record)), "auto"), SchemaPrivacy(epsilon, delta)

    def ask(counter: Counter) -> None:
        with contextlib.suppress(DataError):  # no column is a feature: what noisy answers say
            estimate_schema(counter, list(record), wanted, privacy, "tables")

    return tables, record, ask


# reason: as above
def _scored(
    rng: np.random.Generator, sizes: Sequence[int], kind: str, epsilon: float, delta: float
) -> tuple[list[pd.DataFrame], dict[str, Any], Callable[[Counter], object]]:
    """What a model says of records, and the truth, as `evaluation` counts them."""
    classes = {"regression": 0, "two classes": 2}.get(kind, int(rng.integers(3, 6)))
    if not classes:
        tables = [pd.DataFrame({"error": rng.random(size), "truth": rng.random(size)}) for size in sizes]
        record: dict[str, Any] = {"error": float(rng.choice([1.0, 0.75, 0.0])), "truth": 1.0}
    else:
        scale = float(rng.choice([0.01, 1.0, 100.0]))
        tables = [
            pd.DataFrame(
                {
                    "score": rng.normal(scale=scale, size=size) if classes == 2 else rng.random(size),
                    "predicted": rng.integers(0, classes, size),
                    "truth": rng.integers(0, classes, size),
                    "right": rng.integers(0, 2, size),
                }
            )
            for size in sizes
        ]
        record = {
            "score": float(rng.choice([-1e12, 0.0, 1.0, 40.0])) if classes == 2 else float(rng.choice([0.0, 1.0])),
            "predicted": classes - 1,
            "truth": 1,
            "right": 1,
        }
    names = tuple(map(str, range(classes)))
    return tables, record, lambda counter: evaluation.private_scores(counter, names, (0.0, 1.0), epsilon, delta)
