"""Private statistics and evaluation under attack: how far one record moves the counts of every question, against
the noise that is added to them.

`check_counts(rng)` draws tables, a budget and a record, asks all questions with the record, and once more with a
blank in its place, with the first world's noisy answers given back: both worlds are asked the same questions. The
distances of the exact counts and the measured noise are one Gaussian pair (R1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import chi2

from dither import accounting
from dither.experiment import evaluation, statistics
from dither.experiment.statistics import Counting
from dither.privacy.discrete import Words

_TRIALS = 2048  # draws of each question's noise


class Question(NamedTuple):
    """The exact counts of every institution, how many cells a record is said to touch, and the share of μ²."""

    counts: list[np.ndarray]
    touched: int
    share: float


class CountsCase(NamedTuple):
    """What was drawn, and what is asked of tables."""

    values: dict[str, Any]
    sizes: tuple[int, ...]
    with_record: list[pd.DataFrame]
    blanked: list[pd.DataFrame]
    ask: Callable[[Counting], object]
    epsilon: float
    delta: float


class WatchedCounting(Counting):
    """Remembers what is asked. With `answers` it gives those instead of its own."""

    def __init__(
        self, tables: Sequence[pd.DataFrame], case: CountsCase, words: Words, answers: list[Any] | None = None
    ) -> None:
        super().__init__(tables, case.epsilon, case.delta, words)
        self.asked: list[Question] = []
        self.given: list[list[np.ndarray]] = []
        self._answers = answers

    def noisy(self, counts: Sequence[np.ndarray], touched: int, share: float) -> list[np.ndarray]:
        own = super().noisy(counts, touched, share)
        self.asked.append(Question([np.asarray(each, np.int64) for each in counts], touched, share))
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
    for one, other in zip(first.asked, second.asked, strict=True):
        moved = sum(int(np.sum((a - b) ** 2)) for a, b in zip(one.counts, other.counts, strict=True))
        if moved:
            fresh = Counting([], case.epsilon, case.delta, words)
            (noise,) = fresh.noisy([np.zeros(_TRIALS, np.int64)], one.touched, one.share)
            measured = float(np.sum(noise.astype(np.float64) ** 2)) / chi2.ppf(error / 10, _TRIALS)
            squares += moved / measured
    release = statistics.release(case.epsilon, case.delta)
    proven = accounting.proven([((release,), 1)], case.delta, view="upload").value
    return case, proven, accounting.gaussian_epsilon(math.sqrt(squares), case.delta)


def draw_case(rng: np.random.Generator) -> CountsCase:
    """Tables of one to three institutions, and what is asked of them. The record is the first institution's."""
    epsilon, delta = round(float(rng.uniform(0.1, 8.0)), 2), float(rng.choice([1e-5, 1e-3]))
    sizes = tuple(int(rng.integers(40, 400)) for _ in range(int(rng.integers(1, 4))))
    kind = str(rng.choice(["statistics", "statistics", "two classes", "classes", "regression"]))
    tables, record, ask = (_described if kind == "statistics" else _scored)(rng, sizes, kind, epsilon, delta)
    first = pd.concat([tables[0], pd.DataFrame([record])], ignore_index=True).astype(object)
    blank = first.copy()
    blank.loc[len(blank) - 1] = None
    if kind != "statistics":  # a record that is not there
        first, blank = first.infer_objects(), tables[0]
    method = kind if kind == "statistics" else f"evaluation, {kind}"
    cells = {name: str(cell) for name, cell in record.items()}
    values = {"method": method, "epsilon": epsilon, "delta": delta, "record": cells}
    others = tables[1:]
    return CountsCase(values, sizes, [first, *others], [blank, *others], ask, epsilon, delta)


# reason: one table of what is drawn
def _described(
    rng: np.random.Generator, sizes: Sequence[int], kind: str, epsilon: float, delta: float
) -> tuple[list[pd.DataFrame], dict[str, Any], Callable[[Counting], object]]:
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
    return tables, record, lambda counting: statistics.describe(counting, list(record))


# reason: as above
def _scored(
    rng: np.random.Generator, sizes: Sequence[int], kind: str, epsilon: float, delta: float
) -> tuple[list[pd.DataFrame], dict[str, Any], Callable[[Counting], object]]:
    """What a model says of records, and the truth, as `evaluation` counts them."""
    if kind == "regression":
        tables = [pd.DataFrame({"predicted": rng.random(size), "truth": rng.random(size)}) for size in sizes]
        at_most = {"predicted": float(rng.choice([0.0, 1.0, 0.25])), "truth": 1.0}
        return tables, at_most, lambda c: evaluation.regression_scores(c, (0.0, 1.0), epsilon, delta)
    classes = 2 if kind == "two classes" else int(rng.integers(3, 6))
    tables = [
        pd.DataFrame(
            {
                "probability": rng.random(size),
                "predicted": rng.integers(0, classes, size),
                "truth": rng.integers(0, classes, size),
            }
        )
        for size in sizes
    ]
    one = {"probability": float(rng.choice([0.0, 0.5, 1.0])), "predicted": classes - 1, "truth": 1}
    return tables, one, lambda c: evaluation.classification_scores(c, classes, epsilon, delta)
