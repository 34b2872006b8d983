"""Private statistics of tables that institutions hold: counts, means, quantiles, categories, with one ε for all.

statistics = dither.statistics(["north.csv", "south.csv"], epsilon=0.5)
statistics.column("age").mean                     # an estimate with an interval that includes the noise

Everything is a count. Each institution counts its records into cells and adds a discrete Gaussian to every cell
(exact, on the integers: `privacy.discrete`); means are counts of small units. What one record can change is known
beforehand, so that ε is fixed, and charged, before the first look. docs/privacy.md has the proof.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import norm

from dither.accounting import ZERO_OUT, gaussian_mu
from dither.accounting.ledger import Charge, Ledger
from dither.errors import DataError, SpecError
from dither.experiment.folder import to_json
from dither.privacy.discrete import Words, discrete_gaussian, os_words
from dither.types import ExactNoise, Release, Sampling

if TYPE_CHECKING:
    import pandas as pd

NUMBER, CATEGORY, EMPTY = "number", "category", "empty"
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARES = {"kinds": 0.1, "ranges": 0.2, "names": 0.2, "cells": 0.35, "sums": 0.15}  # of μ²
_BINS = 64  # of a number's range
_UNITS = 1 << 16  # in which sums are counted: of the largest value that a record may have
_EXPONENTS = range(-20, 41)  # ranges are found among powers of two
_ROUNDING = 4.0  # variance of a discrete Gaussian that the proof gives away (s = 2, docs/privacy.md)
_FLOATS = 1e-10  # more noise, relatively, than all that float64 may have lost in μ, shares and variances
_LONGEST = 100  # characters of a text that count
_DISTANCE = 1e-24  # of all cells of all questions from a rounded Gaussian: below 10^9 of them, 10^-33 each
_CONFIDENCE = 1.96


class Estimate(NamedTuple):
    """A value, and an interval that holds the exact one with 95% confidence, the noise included."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class ColumnStatistics:
    """One column. Numbers have a range, mean, standard deviation and quantiles; categories have a count each."""

    name: str
    kind: str
    present: Estimate
    range: tuple[float, float] | None = None
    mean: Estimate | None = None
    std: Estimate | None = None
    quantiles: Mapping[float, Estimate] = field(default_factory=dict)
    categories: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """Private statistics of all columns, and what they cost."""

    columns: tuple[ColumnStatistics, ...]
    epsilon: float
    delta: float
    institutions: int

    def column(self, name: str) -> ColumnStatistics:
        for each in self.columns:
            if each.name == name:
                return each
        raise SpecError(f"column={name!r} is not one of {', '.join(each.name for each in self.columns)}")

    def to_json(self) -> str:
        return to_json(asdict(self), indent=2)

    def rows(self) -> list[dict[str, str]]:
        """One line for each column, for a table."""
        return [
            {
                "column": each.name,
                "kind": each.kind,
                "records": f"{each.present.value:,.0f} ± {each.present.high - each.present.value:,.0f}",
                "mean": str(each.mean) if each.mean else "",
                "median": str(each.quantiles[0.5]) if each.quantiles else "",
                "1% to 99%": f"{each.quantiles[0.01].value:.4g} to {each.quantiles[0.99].value:.4g}"
                if each.quantiles
                else "",
                "categories": ", ".join(f"{name} {count.value:,.0f}" for name, count in each.categories.items()),
            }
            for each in self.columns
        ]


class Counting:
    """Counts over institutions, with noise, within one privacy budget.

    A record that is blanked (zero-out) changes at most `touched` cells of a question by 1 each: the counts move by
    √touched. Noise of variance touched/(share μ²) makes them √share·μ-Gaussian-DP, also when questions follow from
    earlier answers (μ² adds up).
    """

    def __init__(
        self, tables: Sequence[pd.DataFrame], epsilon: float, delta: float, words: Words = os_words
    ) -> None:
        self.tables, self._words = list(tables), words
        self.mu, self.slip = _mu_and_slip(epsilon, delta)
        self._left = 1.0

    def variance(self, touched: int, share: float) -> float:
        """Of the noise on one institution's counts."""
        return touched / (share * self.mu**2) * (1.0 + _FLOATS) + _ROUNDING

    def noise_std(self, touched: int, share: float) -> float:
        """Of one institution's counts."""
        return math.sqrt(self.variance(touched, share))

    def threshold(self, columns: int, share: float) -> float:
        """Noisy counts above it are shown by name: of a name that one record alone has, in no column but for the
        chance `slip`."""
        return 2 + self.noise_std(columns, share) * float(norm.isf(self.slip / columns))

    def noisy(self, counts: Sequence[np.ndarray], touched: int, share: float) -> list[np.ndarray]:
        """The counts of every institution, whole numbers, with noise."""
        if share > self._left + 1e-12:
            raise SpecError(f"share={share:g} is more than the {self._left:g} of the budget that is left")
        self._left -= share
        variance = Fraction(self.variance(touched, share))
        return [
            exact + discrete_gaussian(exact.size, variance, words=self._words).reshape(exact.shape)
            for exact in (np.asarray(each, np.int64) for each in counts)
        ]

    def total(
        self, count: Callable[[pd.DataFrame], np.ndarray], touched: int, share: float
    ) -> tuple[np.ndarray, float]:
        """The sum over the institutions, and the standard deviation of its noise."""
        answers = self.noisy([count(table) for table in self.tables], touched, share)
        return np.sum(answers, axis=0), self.noise_std(touched, share) * math.sqrt(len(self.tables))


def _mu_and_slip(epsilon: float, delta: float) -> tuple[float, float]:
    """μ of all counts together, and the chance that a name which only one record has is shown. That chance counts
    1 + exp(ε) times; the rest of δ is the Gaussian's."""
    factor = 1.0 + math.exp(min(epsilon, 600.0))
    slip = delta * min(1e-4, 0.1 / factor)
    return gaussian_mu(epsilon, delta - slip * factor), slip


def release(epsilon: float, delta: float) -> Release:
    """What all questions together reveal, for a ledger: one Gaussian, and a name that slips through."""
    mu, slip = _mu_and_slip(epsilon, delta)
    sampling = Sampling("full", 1.0, ZERO_OUT, slip)
    return Release("uplink", 1.0 / mu, 1.0, 1, sampling, "private statistics", exact=ExactNoise(0.0, _DISTANCE))


# reason: keyword options of a public function
def statistics(
    data: Any,
    *,
    epsilon: float,
    delta: float = 1e-5,
    columns: Sequence[str] = (),
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    public: bool = False,
    words: Words = os_words,
) -> Statistics:
    """Private statistics of one table or of several, one for each institution. Every file is charged before the
    first look, to `ledger` or to the user's own. Data frames have no account: they must be declared `public`."""
    given = list(data) if isinstance(data, list | tuple) else [data]
    tables = [read(each) for each in given]
    check(tables, epsilon, delta, columns)
    if not public:
        charge(Ledger(ledger or Ledger.default_path()), given, epsilon, delta, new_ledger=new_ledger)
    described = describe(Counting(tables, epsilon, delta, words), _columns(tables, columns))
    return Statistics(described, epsilon, delta, len(tables))


def describe(counting: Counting, names: Sequence[str]) -> tuple[ColumnStatistics, ...]:
    """The columns of these names; all questions together use the whole budget."""
    kinds, present = _kinds(counting, names)
    numbers = [name for name in names if kinds[name] == NUMBER]
    texts = [name for name in names if kinds[name] == CATEGORY]
    described = {**_numbers(counting, numbers, present), **_categories(counting, texts)}
    return tuple(ColumnStatistics(name, kinds[name], present[name], **described.get(name, {})) for name in names)


def check(tables: Sequence[pd.DataFrame], epsilon: float, delta: float, columns: Sequence[str] = ()) -> None:
    """Refuse what `statistics` cannot do, before anything is charged."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise SpecError(f"epsilon={epsilon} must be a finite number above 0")
    if not 0 < delta < 1:
        raise SpecError(f"delta={delta} must lie between 0 and 1")
    _columns(tables, columns)


# reason: what is released of which files, and where it is charged
def charge(
    ledger: Ledger,
    given: Sequence[Any],
    epsilon: float,
    delta: float,
    *,
    what: str = "statistics",
    new_ledger: bool = False,
) -> None:
    """Charge private statistics to the account of every file. `BudgetExhausted` says that one cannot pay; those
    before it stay charged."""
    from dither.accounting.ledger.runs import EVERY_RECORD, data_id
    from dither.data import hash_records

    run = f"{what}-{os.urandom(16).hex()}"
    asked = [Charge(EVERY_RECORD, [((release(epsilon, delta),), 1)])]
    if any(not isinstance(each, str | Path) for each in given):
        raise SpecError("data frames cannot be charged to a ledger: give files, or declare public=True")
    for file in map(Path, given):
        dataset = data_id(ledger, path=str(file))
        ledger.identify(dataset, partial(hash_records, file), file=file.name, new_ledger=new_ledger)
        ledger.charge(run, dataset, asked, rounds=(0, 1), plan=lambda: asked)


def read(each: Any) -> pd.DataFrame:
    """A data frame, or the table in a file."""
    import pandas as pd

    if isinstance(each, pd.DataFrame):
        return each
    if not isinstance(each, str | Path):
        raise SpecError(f"{type(each).__name__} is not a table; give files or pandas data frames")
    from dither.data import read_table

    table: pd.DataFrame = read_table(each)
    return table


def _columns(tables: Sequence[pd.DataFrame], wanted: Sequence[str]) -> list[str]:
    """The columns to describe: names are public."""
    shared = [name for name in map(str, tables[0].columns) if all(name in table.columns for table in tables)]
    for name in wanted:
        if name not in shared:
            raise DataError(f"column {name!r} is not in every table; these are: {', '.join(shared)}")
    if not (wanted or shared):
        raise DataError("the tables have no column in common; give every file the same header")
    return list(wanted) or shared


# Cells. Of every column a record touches one cell in each of these.


def _by_cell(column: pd.Series, function: Callable[[Any], Any], missing: Any) -> np.ndarray:
    """`function` of each cell by itself. What pandas would infer from a whole column (a type, a format of dates)
    depends on single records, so that one record could change how all others are counted."""
    import pandas as pd

    try:
        codes, distinct = pd.factorize(column.astype(object))
    except TypeError:  # cells that cannot be hashed, such as lists
        codes, distinct = pd.factorize(column.map(str, na_action="ignore").astype(object))
    values: np.ndarray = np.array([*map(function, distinct), missing])[codes]  # code -1: no value
    return values


def _number(cell: Any) -> float:
    try:
        value = math.nan if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if math.isfinite(value) else math.nan


def _text(cell: Any) -> str:
    if isinstance(cell, Number | np.generic):
        return f"{_number(cell):.17g}"
    return str(cell)[:_LONGEST].strip()


def _as_numbers(table: pd.DataFrame, name: str) -> np.ndarray:
    """The column as finite numbers, NaN for everything else."""
    return _by_cell(table[name], _number, math.nan)


def _as_text(table: pd.DataFrame, name: str) -> np.ndarray:
    """The column as stripped text, of long cells the beginning, empty where a value is missing."""
    return _by_cell(table[name], _text, "")


def _kinds(counting: Counting, names: Sequence[str]) -> tuple[dict[str, str], dict[str, Estimate]]:
    """Whether a column holds numbers, text or nothing, and how many records have a value."""

    def count(table: pd.DataFrame) -> np.ndarray:
        counts = []
        for name in names:
            number = np.isfinite(_as_numbers(table, name))
            text = ~number & (_as_text(table, name) != "")
            counts.append([number.sum(), text.sum()])
        return np.array(counts)

    counts, std = counting.total(count, len(names), _SHARES["kinds"])
    kinds, present = {}, {}
    for name, (number, text) in zip(names, counts.tolist(), strict=True):
        spread = _CONFIDENCE * math.sqrt(2) * std
        total = max(0.0, float(number + text))
        present[name] = Estimate(total, max(0.0, total - spread), total + spread)
        kinds[name] = EMPTY if total <= 2 * spread else NUMBER if number >= 9 * text else CATEGORY
    return kinds, present


def _exponent_cells(values: np.ndarray) -> np.ndarray:
    """How many values lie in each power of two: the negative ones from the largest down, 0, the positive ones."""
    values = values[np.isfinite(values)]
    size = np.clip(np.floor(np.log2(np.maximum(np.abs(values), 1e-300))), _EXPONENTS[0], _EXPONENTS[-1])
    tiny = np.abs(values) < 2.0 ** _EXPONENTS[0]
    place = np.where(tiny, 0, np.sign(values) * (size - _EXPONENTS[0] + 1)).astype(np.int64)
    cells: np.ndarray = np.bincount(place + len(_EXPONENTS), minlength=2 * len(_EXPONENTS) + 1)
    return cells


def _range(counts: np.ndarray, std: float) -> tuple[float, float]:
    """The powers of two between which the counts stand out of their noise."""
    edges = [2.0**e for e in (*_EXPONENTS, _EXPONENTS[-1] + 1)]
    lows = [*(-edge for edge in reversed(edges[1:])), -edges[0], *edges[:-1]]
    highs = [*(-edge for edge in reversed(edges[:-1])), edges[0], *edges[1:]]
    seen = np.flatnonzero(counts > std * norm.isf(0.01 / counts.size))
    if not len(seen):
        return (0.0, 1.0)
    low, high = lows[int(seen[0])], highs[int(seen[-1])]
    zero = len(_EXPONENTS)
    low = 0.0 if seen[0] >= zero else low
    return (low, 0.0 if seen[-1] <= zero and low < 0 else high)


def _numbers(
    counting: Counting, names: Sequence[str], present: Mapping[str, Estimate]
) -> dict[str, dict[str, Any]]:
    """Range, quantiles, mean and standard deviation of columns of numbers."""
    if not names:
        return {}
    counts, std = counting.total(
        lambda table: np.array([_exponent_cells(_as_numbers(table, name)) for name in names]),
        len(names),
        _SHARES["ranges"],
    )
    ranges = [_range(row, std) for row in counts]

    def scaled(table: pd.DataFrame, at: int) -> np.ndarray:
        """The values inside the range, from 0 to 1."""
        low, high = ranges[at]
        values = _as_numbers(table, names[at])
        return np.asarray(np.clip((values[np.isfinite(values)] - low) / (high - low), 0.0, 1.0))

    def histograms(table: pd.DataFrame) -> np.ndarray:
        places = (np.minimum((scaled(table, at) * _BINS).astype(np.int64), _BINS - 1) for at in range(len(names)))
        return np.array([np.bincount(place, minlength=_BINS) for place in places])

    def sums(table: pd.DataFrame) -> np.ndarray:
        units = (np.rint(scaled(table, at) * _UNITS).astype(np.int64) for at in range(len(names)))
        return np.array([[unit.sum(), (unit * unit // _UNITS).sum()] for unit in units])

    cells, cell_std = counting.total(histograms, len(names), _SHARES["cells"] / 2)
    # A record adds up to `_UNITS` to two cells of each column: as much as 2 · _UNITS² cells by 1 each, in square.
    totals, total_std = counting.total(sums, 2 * len(names) * _UNITS**2, _SHARES["sums"])
    described = {}
    for at, name in enumerate(names):
        low, high = ranges[at]
        number = max(1.0, present[name].value)
        mean, square = (totals[at] / (_UNITS * number)).tolist()
        mean = min(1.0, max(0.0, mean))
        spread = (_CONFIDENCE * total_std / _UNITS + mean * (present[name].high - number)) / number
        variance, wide = square - mean**2, (1 + 2 * mean) * spread
        stds = (math.sqrt(max(0.0, variance + error)) for error in (0.0, -wide, wide))
        described[name] = {
            "range": (low, high),
            "mean": Estimate(*(low + (high - low) * v for v in (mean, mean - spread, mean + spread))),
            "std": Estimate(*((high - low) * each for each in stds)),
            "quantiles": _quantiles(cells[at], cell_std, low, high),
        }
    return described


def _quantiles(counts: np.ndarray, std: float, low: float, high: float) -> dict[float, Estimate]:
    """Quantiles by the running sum of noisy cells, made increasing."""
    running = np.maximum.accumulate(np.cumsum(counts).astype(np.float64))
    edges = np.linspace(low, high, _BINS + 1)
    total = max(1.0, float(running[-1]))
    spread = _CONFIDENCE * std * math.sqrt(_BINS)

    def at(rank: float) -> float:
        return float(np.interp(rank, np.append(0.0, np.maximum(running, 0.0)), edges))

    return {
        level: Estimate(at(level * total), at(level * total - spread), at(level * total + spread))
        for level in LEVELS
    }


def _distinct(table: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The texts of a column, and how many records have each."""
    distinct, counts = np.unique(_as_text(table, name), return_counts=True)
    return distinct[distinct != ""], counts[distinct != ""]


def _categories(counting: Counting, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Categories that enough records of one institution have, with their counts over all institutions."""
    if not names:
        return {}
    threshold = counting.threshold(len(names), _SHARES["names"])
    values = [[_distinct(table, name) for name in names] for table in counting.tables]
    counts = [np.concatenate([count for _, count in each]) for each in values]
    listed: list[set[str]] = [set() for _ in names]
    for each, noisy in zip(values, counting.noisy(counts, len(names), _SHARES["names"]), strict=True):
        ends = np.cumsum([len(count) for _, count in each])
        for at, part in enumerate(np.split(noisy, ends[:-1])):
            listed[at] |= set(each[at][0][part > threshold].tolist())
    kept = [sorted(each) for each in listed]

    def count(table: pd.DataFrame) -> np.ndarray:
        cells = []
        for name, categories in zip(names, kept, strict=True):
            text = _as_text(table, name)
            cells += [int((text == category).sum()) for category in categories]
        return np.asarray(cells, np.int64)

    cells, cell_std = counting.total(count, len(names), _SHARES["cells"] / 2)
    spread, described, at = _CONFIDENCE * cell_std, {}, 0
    for name, categories in zip(names, kept, strict=True):
        values = cells[at : at + len(categories)].tolist()
        at += len(categories)
        ordered = sorted(zip(categories, values, strict=True), key=lambda pair: -pair[1])
        described[name] = {
            "categories": {
                category: Estimate(value, max(0.0, value - spread), value + spread) for category, value in ordered
            }
        }
    return described
