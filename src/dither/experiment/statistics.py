"""Private statistics of tables that institutions hold: counts, means, quantiles, categories, with one ε for all.

statistics = dither.statistics(["north.csv", "south.csv"], epsilon=0.5)
statistics.column("age").mean                     # an estimate with an interval that includes the noise

Everything is a count (`experiment.counting`). Three questions describe every column: a survey (kinds and ranges),
a closer look (a histogram of the range, or the names of categories), and the counts themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from dither.data import hash_table
from dither.errors import SpecError
from dither.experiment import counting
from dither.experiment.build import refuse_charged
from dither.experiment.counting import Counter, Counting, Question
from dither.experiment.folder import to_json
from dither.privacy.discrete import Words, os_words

NUMBER, CATEGORY, EMPTY = "number", "category", "empty"
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARES = {"survey": 0.3, "look": 0.25, "cells": 0.3, "sums": 0.15}  # of μ²
_CONFIDENCE = 1.96
_MOST = 0.8  # share of the values that bins which stand out of the noise must hold between them


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
    left_out: Mapping[str, str] = field(default_factory=dict)  # columns that only some tables have

    def column(self, name: str) -> ColumnStatistics:
        for each in self.columns:
            if each.name == name:
                return each
        raise SpecError(f"column={name!r} is not one of {', '.join(each.name for each in self.columns)}")

    def to_json(self) -> str:
        return to_json(self, indent=2)

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
    contents = counting.digests(given)
    tables = [counting.read(each) for each in given]
    counting.check_budget(epsilon, delta)
    names = counting.shared_columns(tables, columns)
    if public:
        for each, table in zip(given, tables, strict=True):
            refuse_charged("data" if each is table else str(each), hash_table(table))
    else:
        counting.charge(ledger, given, contents, epsilon, delta, new_ledger=new_ledger)
    described = describe(Counting(tables, epsilon, delta, words), names)
    left_out = {} if columns else counting.unshared_columns(tables)
    return Statistics(described, epsilon, delta, len(tables), left_out)


def describe(counter: Counter, names: Sequence[str]) -> tuple[ColumnStatistics, ...]:
    """Statistics of these columns, by questions whose shares add up to the whole budget."""
    kinds, present, ranges = survey(counter, names, _SHARES["survey"])
    numbers = {name: ranges[name] for name in names if kinds[name] == NUMBER}
    texts = [name for name in names if kinds[name] == CATEGORY]
    look, cells = (_SHARES[step] / max(1, len(numbers) + len(texts)) for step in ("look", "cells"))
    described: dict[str, dict[str, Any]] = {}
    if numbers:
        closer = zoom(counter, numbers, look * len(numbers))
        described |= _numbers(counter, closer, present, cells * len(numbers))
    if texts:
        listed = counter.names(Question(counting.NAMES, tuple(texts), look * len(texts)))
        described |= _categories(counter, dict(zip(texts, listed, strict=True)), cells * len(texts))
    return tuple(ColumnStatistics(name, kinds[name], present[name], **described.get(name, {})) for name in names)


Range = tuple[float, float]


def survey(
    counter: Counter, names: Sequence[str], share: float
) -> tuple[dict[str, str], dict[str, Estimate], dict[str, Range]]:
    """Whether a column holds numbers, text or nothing, how many records have a value, and the powers of two
    between which its numbers lie."""
    parts, std = counter.total(Question(counting.SURVEY, tuple(names), share))
    kinds, present, ranges = {}, {}, {}
    for name, part in zip(names, parts, strict=True):
        cells = part[0].astype(np.float64)
        mark, text, number = cells[counting.MARK_CELL], cells[counting.TEXT_CELL], cells[counting.NUMBER_CELL]
        kinds[name] = NUMBER if number >= 9 * text else CATEGORY
        added = (number, text) if kinds[name] == NUMBER else (number, text, mark)
        values = min(max(0.0, float(sum(added))), float(counter.records))
        spread = _CONFIDENCE * math.sqrt(len(added)) * std
        present[name] = Estimate(values, max(0.0, values - spread), values + spread)
        if values <= 2 * spread:
            kinds[name] = EMPTY
        ranges[name] = power_range(cells, std, (0.0, 1.0))
    return kinds, present, ranges


def power_range(cells: np.ndarray, std: float, otherwise: Range) -> Range:
    """The powers of two between which a survey's counts stand out of their noise."""
    edges = [2.0**e for e in (*counting.EXPONENTS, counting.EXPONENTS[-1] + 1)]
    lows = [*(-edge for edge in reversed(edges[1:])), -edges[0], *edges[:-1]]
    highs = [*(-edge for edge in reversed(edges[:-1])), edges[0], *edges[1:]]
    # Strict: a single cell that stands out by chance would make the range useless
    seen = significant(cells[counting.POWER_CELLS :], std, 1e-5)
    if not len(seen):
        return otherwise
    low, high = lows[int(seen[0])], highs[int(seen[-1])]
    zero = len(counting.EXPONENTS)
    low = 0.0 if seen[0] >= zero else low
    return (low, 0.0 if seen[-1] <= zero and low < 0 else high)


def significant(counts: np.ndarray, std: float, chance: float = 0.01) -> np.ndarray:
    """Where counts stand out of their noise: by chance in one of a hundred such rows."""
    return np.flatnonzero(counts > -std * ndtri(chance / counts.size))


def zoom(counter: Counter, ranges: Mapping[str, Range], share: float) -> dict[str, Range]:
    """The part of each range that holds the numbers, a quarter wider on either side."""
    parts, std = counter.total(Question(counting.HISTOGRAM, tuple(ranges), share, tuple(ranges.values())))
    return {name: inner_range(ranges[name], part[0], std, 0.25) for name, part in zip(ranges, parts, strict=True)}


def merged(counts: np.ndarray, std: float) -> tuple[np.ndarray, float]:
    """Bins, added up in pairs until most of the values lie between those that stand out, and their noise: where it
    hides nearly all bins, the few that exceed it by chance say nothing about the others."""
    while len(counts) % 2 == 0:
        seen = significant(counts, std)
        if len(seen) and counts[seen[0] : seen[-1] + 1].sum() >= _MOST * counts.sum():
            break
        counts, std = counts.reshape(-1, 2).sum(axis=1), std * math.sqrt(2)
    return counts, std


def inner_range(range: Range, counts: np.ndarray, std: float, margin: float) -> Range:
    """The range between the first and the last bin that stand out of the noise, and some more of its width."""
    counts, std = merged(counts, std)
    seen = significant(counts, std)
    if not len(seen):
        return range
    low, high = range
    edges = np.linspace(low, high, len(counts) + 1)
    first, last = float(edges[seen[0]]), float(edges[seen[-1] + 1])
    more = margin * (last - first)
    return max(low, first - more), min(high, last + more)


def _numbers(
    counter: Counter, ranges: Mapping[str, Range], present: Mapping[str, Estimate], share: float
) -> dict[str, dict[str, Any]]:
    """Quantiles, mean and standard deviation of columns of numbers."""
    cells, cell_std = counter.total(Question(counting.HISTOGRAM, tuple(ranges), share, tuple(ranges.values())))
    totals, total_std = counter.total(
        Question(counting.SUMS, tuple(ranges), _SHARES["sums"], tuple(ranges.values()))
    )
    described = {}
    for (name, (low, high)), counts, sums in zip(ranges.items(), cells, totals, strict=True):
        number = max(1.0, present[name].value)
        mean, square = (sums[0] / (counting.UNITS * number)).tolist()
        mean = min(1.0, max(0.0, mean))
        spread = (_CONFIDENCE * total_std / counting.UNITS + mean * (present[name].high - number)) / number
        variance, wide = square - mean**2, (1 + 2 * mean) * spread
        stds = (math.sqrt(max(0.0, variance + error)) for error in (0.0, -wide, wide))
        described[name] = {
            "range": (low, high),
            "mean": Estimate(*(low + (high - low) * v for v in (mean, mean - spread, mean + spread))),
            "std": Estimate(*((high - low) * each for each in stds)),
            "quantiles": _quantiles(counts[0], cell_std, low, high),
        }
    return described


def _quantiles(counts: np.ndarray, std: float, low: float, high: float) -> dict[float, Estimate]:
    """Quantiles by the running sum of noisy cells, made increasing."""
    running = np.maximum.accumulate(np.cumsum(counts).astype(np.float64))
    edges = np.linspace(low, high, counting.BINS + 1)
    total = max(1.0, float(running[-1]))
    spread = _CONFIDENCE * std * math.sqrt(counting.BINS)

    def at(rank: float) -> float:
        return float(np.interp(rank, np.append(0.0, np.maximum(running, 0.0)), edges))

    return {
        level: Estimate(at(level * total), at(level * total - spread), at(level * total + spread))
        for level in LEVELS
    }


def _categories(counter: Counter, listed: Mapping[str, Sequence[str]], share: float) -> dict[str, dict[str, Any]]:
    """How many records of all institutions have each of the listed categories."""
    categories = tuple(map(tuple, listed.values()))
    parts, std = counter.total(Question(counting.CATEGORIES, tuple(listed), share, categories=categories))
    spread, described = _CONFIDENCE * std, {}
    for (name, names), part in zip(listed.items(), parts, strict=True):
        ordered = sorted(zip(names, part[0].tolist(), strict=False), key=lambda pair: -pair[1])
        counts = {each: Estimate(value, max(0.0, value - spread), value + spread) for each, value in ordered}
        described[name] = {"categories": counts}
    return described
