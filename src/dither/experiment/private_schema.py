"""A schema estimated from private counts: `dither data schema --private`.

Only the header of the tables is public. What a column holds, its bounds, scale, fill value and categories are
estimated from private counts (`experiment.counting`), in three questions of every column:

1. a survey: numbers or texts, and between which powers of two the numbers lie; and whether the label's classes
   are a usual pair such as 0 and 1, whose names are public;
2. a closer look: a histogram of that range, or the names of categories that enough records have;
3. counts by class of the label: bounds, centre and scale, median, and whether a column is a copy of the label.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from dither.data.drafts import DROPPED, ID_NAME, Draft, rounded_bounds
from dither.data.schema import OTHER, PRIVATE, PUBLIC, Categorical, Column, Label, Numeric, Schema, SchemaPrivacy
from dither.errors import DataError, SpecError, did_you_mean
from dither.experiment import counting
from dither.experiment.counting import CATEGORIES, HISTOGRAM, NAMES, Counter, Counting, Question
from dither.experiment.statistics import (
    CATEGORY,
    EMPTY,
    NUMBER,
    Range,
    inner_range,
    merged,
    significant,
    survey,
    zoom,
)
from dither.privacy.discrete import Words, os_words

TASKS = ("auto", "classification", "regression")
USUAL = ("0 1", "-1 1", "1 2", "no yes", "n y", "false true", "f t", "negative positive", "neg pos", "alive dead")
_PAIRS = [way(pair).split() for pair in USUAL for way in (str.lower, str.title, str.upper)]
_SHARES = {"survey": 0.33, "usual": 0.07, "look": 0.27, "cells": 0.33}  # of μ²
_CONSTANT = 0.99  # share of one value from which on a column says nothing
_TOLD = 0.05  # of the values: where the noise is more, a constant cannot be told
_COVERED = 0.5  # share of the values that the listed categories must cover
_OTHERS = 0.02  # share of the labels that may be neither of a usual pair
_CLASSES_COVER = 0.9  # share of the labels that the listed classes must cover
_FOUND = 5  # tables in which a class of fewer than one record in so many would not be found need declared classes
_COPY = 0.05  # of the errors of a constant: a column that leaves fewer is a copy of the label
_CLEAR = 0.3  # of these errors: where three deviations of the noise are more, nothing can be told


@dataclass(frozen=True)
class Wanted:
    """What the owner asks for: the label, which task, declared classes, columns to drop or to keep."""

    label: str
    task: str = "auto"
    classes: tuple[str, ...] = ()
    drop: Collection[str] = ()
    keep: Collection[str] = field(default=())

    @property
    def finds_classes(self) -> bool:
        """Whether counts have to say which classes the label has."""
        return not self.classes and self.task != "regression"

    def features(self, header: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Columns that may be features, and why the others are not: by their names alone."""
        for column in (self.label, *self.drop, *self.keep):
            if column not in header:
                kind = "label column" if column == self.label else "column"
                raise DataError(f"{kind} {column!r} is not in every table{did_you_mean(column, header)}")
        if self.task not in TASKS:
            raise SpecError(f"task={self.task!r} is not one of {', '.join(map(repr, TASKS))}")
        if self.classes and (self.task == "regression" or len(set(self.classes)) < max(len(self.classes), 2)):
            why = "a number has none" if self.task == "regression" else "give at least two, each once"
            raise SpecError(f"classes {', '.join(self.classes)}: {why}")
        excluded = dict.fromkeys(self.drop, DROPPED)
        for name in header:
            if ID_NAME.search(name) and name not in (*self.keep, *self.drop, self.label):
                excluded[name] = "is named like an id"
        features = [name for name in header if name != self.label and name not in excluded]
        if not features:
            raise DataError(f"the tables have no column besides {self.label!r} that can be a feature")
        return features, excluded


# reason: keyword options of a public function
def private_schema(
    files: Sequence[str | Path],
    wanted: Wanted,
    *,
    epsilon: float,
    delta: float = 1e-5,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    words: Words | Sequence[Words] = os_words,
) -> Draft:
    """Estimate a schema for the tables of institutions, one file each. Every file is charged before the first
    look."""
    counting.check_budget(epsilon, delta)
    contents = counting.digests(files)
    tables = [counting.read(file) for file in files]
    header = counting.shared_columns(tables)
    wanted.features(header)
    charged = counting.charge(ledger, files, contents, epsilon, delta, what="schema", new_ledger=new_ledger)
    privacy = SchemaPrivacy(epsilon, delta, charged)
    name = Path(files[0]).resolve().parent.name if len(files) > 1 else Path(files[0]).name
    schema, excluded = estimate_schema(Counting(tables, epsilon, delta, words), header, wanted, privacy, name)
    return Draft(schema, {**excluded, **counting.unshared_columns(tables)})


def estimate_schema(
    counter: Counter, header: Sequence[str], wanted: Wanted, privacy: SchemaPrivacy, name: str
) -> Draft:
    """A schema from private counts, and why each column that it leaves out is left out."""
    features, excluded = wanted.features(header)
    kinds, _, ranges = survey(counter, [*features, wanted.label], _SHARES["survey"])
    excluded |= {column: "holds hardly any values" for column in features if kinds[column] == EMPTY}
    numbers = {column: ranges[column] for column in features if kinds[column] == NUMBER}
    texts = [column for column in features if kinds[column] == CATEGORY]
    usual = _usual_classes(counter, wanted.label) if wanted.finds_classes else wanted.classes
    label_number = kinds[wanted.label] == NUMBER and wanted.task != "classification" and not usual
    named = [*texts, *([] if usual else [wanted.label])]
    look = (_SHARES["look"] + _SHARES["usual"] * (not wanted.finds_classes)) / max(
        1, len(numbers) + len(named) + label_number
    )
    closer = {**numbers, **({wanted.label: ranges[wanted.label]} if label_number else {})}
    closer = zoom(counter, closer, look * len(closer)) if closer else {}
    listed = counter.names(Question(NAMES, tuple(named), look * len(named))) if named else []
    categories = {column: tuple(names) for column, names in zip(named, listed, strict=True) if names}
    label = _Label(wanted, usual or categories.pop(wanted.label, ()), closer.pop(wanted.label, None))
    excluded |= {
        column: "has no value that enough records share: it may be an id, a date or free text"
        for column in texts
        if column not in categories
    }
    estimated = _Estimates(counter, label, closer, categories, numbers)
    columns: list[Column] = []
    for column in features:
        why = excluded.get(column) or estimated.why_no_feature(column)
        if why and (column not in wanted.keep or column in excluded):
            excluded[column] = why
        else:
            columns.append(estimated.column(column))
    if not columns:
        raise DataError(f"no column of {name!r} can be a feature at this ε: use --keep COLUMN, or a larger ε")
    return Draft(Schema(estimated.label(), tuple(columns), name, privacy), excluded)


class LeastClass(NamedTuple):
    """How many records must share a class for the schema to find it, if every column holds texts."""

    usual: int  # of all tables, where the classes are one of `USUAL`
    named: int  # of one table, whatever it is called

    def __str__(self) -> str:
        pairs = ", ".join(pair.replace(" ", "/") for pair in USUAL)
        return (
            f"a class is found if {self.named:,} records of one table have it, or {self.usual:,} of all tables "
            f"for {pairs}"
        )


def check_classes(
    wanted: Wanted, header: Sequence[str], records: Sequence[int], budget: tuple[float, float]
) -> LeastClass:
    """What classes need at this (ε, δ). `DataError`, before anything is spent, where usual ones need more than a
    fifth of all records and others more than a fifth of the largest table."""
    mu, slip = counting.mu_and_slip(*budget)
    names = Question(NAMES, (wanted.label,), _SHARES["look"] / (len(wanted.features(header)[0]) + 1))
    pairs = _usual_question(wanted.label)
    std = counting.total_std(pairs, mu, len(records))
    named = counting.name_threshold(names, mu, slip)
    least = LeastClass(math.ceil(_usual_least(pairs, std)), math.ceil(named))
    enough = least.named <= max(records) / _FOUND or least.usual <= sum(records) / _FOUND
    if wanted.finds_classes and not enough:
        raise DataError(
            f"label {wanted.label!r}: at this ε, {least}; the tables have {sum(records):,} records, the largest "
            f"one {max(records):,}: declare the classes (--classes yes,no; data.classes in "
            "a federation), or say that the label is a number (--task regression)"
        )
    return least


def _usual_question(label: str) -> Question:
    names = sorted({name for pair in _PAIRS for name in pair})
    return Question(CATEGORIES, (label,), _SHARES["usual"], categories=(tuple(names),))


def _usual_classes(counter: Counter, label: str) -> tuple[str, ...]:
    """The pair of usual names that the label has, if nearly all of its values are these two: the names are public,
    so that counts with noise are enough to choose by."""
    question = _usual_question(label)
    (cells,), std = counter.total(question)
    counts = dict(zip(question.categories[0], cells[0].tolist(), strict=False))  # the last cell is of all others
    pair = max(_PAIRS, key=lambda pair: min(counts[name] for name in pair))
    rest = np.where([name in pair for name in (*counts, "")], 0, cells[0])
    strays = len(significant(rest - _OTHERS * cells[0].sum(), std, 1e-4))
    found = min(counts[name] for name in pair) > _usual_least(question, std) and not strays
    return tuple(pair) if found else ()


def _usual_least(question: Question, std: float) -> float:
    """The count from which on a usual name stands out of its noise."""
    return float(-std * ndtri(0.01 / len(question.categories[0])))


class _Label:
    """The label before its cells are counted: its classes, or the range of a number."""

    def __init__(self, wanted: Wanted, classes: tuple[str, ...], range: Range | None) -> None:
        self.wanted, self.range = wanted, range
        self.classes = wanted.classes or tuple(sorted(classes, key=_number_first))


def _number_first(text: str) -> tuple[int, float, str]:
    """ "2" before "10", numbers before words."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


class _Estimates:
    """The third question, and what follows from it."""

    def __init__(
        self,
        counter: Counter,
        label: _Label,
        ranges: Mapping[str, Range],
        categories: Mapping[str, tuple[str, ...]],
        outer: Mapping[str, Range],
    ) -> None:
        self._label, self._records, self._outer = label, counter.records, outer
        target, classes = label.wanted.label, label.classes
        share = _SHARES["cells"] / (len(ranges) + len(categories) + 1 + (label.range is not None))
        self._ranges, self._names = dict(ranges), {**categories, target: classes}
        lists = tuple(self._names.values())
        counts, self._std = counter.total(
            Question(
                CATEGORIES, tuple(self._names), share * len(lists), categories=lists, label=target, classes=classes
            )
        )
        self._cells = dict(zip(self._names, counts, strict=True))
        if label.range is not None:
            self._ranges[target] = label.range
        if self._ranges:
            bounds = tuple(self._ranges.values())
            question = Question(
                HISTOGRAM, tuple(self._ranges), share * len(bounds), bounds, label=target, classes=classes
            )
            counts, _ = counter.total(question)
            self._cells |= {name: part for name, part in zip(self._ranges, counts, strict=True) if name in ranges}
            self._label_cells = counts[-1].sum(axis=0)
        # A sum over the classes has the noise of all of them.
        self._sum_std = self._std * math.sqrt(len(label.classes) + 1)

    def label(self) -> Label:
        """Its classes where they cover nearly all records, otherwise the bounds of a number."""
        wanted, classes = self._label.wanted, self._label.classes
        if wanted.classes:
            return Label(wanted.label, classes, PUBLIC)
        per_class = self._per_class()
        covered = float(per_class.sum()) >= _CLASSES_COVER * self._records
        if self._label.range is not None and (wanted.task == "regression" or not covered or len(classes) > 64):
            bounds = inner_range(self._label.range, self._label_cells, self._sum_std, 0.1)
            return Label(wanted.label, bounds=rounded_bounds(*bounds), bounds_from=PRIVATE)
        if len(classes) < 2:
            raise DataError(
                f"label column {wanted.label!r} has {len(classes)} class that enough records share at this ε; "
                "declare its classes (--classes yes,no), or spend a larger ε"
            )
        return Label(wanted.label, classes, PRIVATE)

    def _per_class(self) -> np.ndarray:
        """Records of each class: the diagonal of the label by itself."""
        cells = self._cells[self._label.wanted.label]
        return np.maximum(np.diag(cells)[: len(self._label.classes)], 0)

    def why_no_feature(self, column: str) -> str:
        """Why a column should not be a feature; empty where nothing speaks against it."""
        cells = self._cells[column]
        totals = cells.sum(axis=0)
        values = max(1.0, float(totals.sum()))
        alone = len(significant(totals, self._sum_std, 1e-4)) == 1
        noise = 2.5 * self._sum_std * math.sqrt(totals.size)  # of all cells together
        if alone and noise < _TOLD * values and float(totals.max()) > _CONSTANT * values - noise:
            return "has the same value in nearly every record"
        if column in self._names and float(totals[:-1].sum()) < _COVERED * values:
            return "has too many different values for categories: group them"
        if self._copies_label(cells):
            return f"follows from the label {self._label.wanted.label!r}, or the label from it"
        return ""

    def _copies_label(self, cells: np.ndarray) -> bool:
        """Whether the column determines nearly every label."""
        per_class = self._per_class()
        if len(per_class) < 2:
            return False
        errors = float(per_class.sum() - per_class.max())  # of a constant
        cells = cells[: len(per_class)]
        seen = significant(cells.sum(axis=0), self._std * math.sqrt(len(per_class)))
        left = float(np.sum(np.sort(cells[:, seen], axis=0)[:-1]))
        left += max(
            0.0, float(per_class.sum() - cells[:, seen].sum())
        )  # values too rare to stand out explain nothing
        noise = 3 * self._std * math.sqrt(max(1, len(seen) * len(per_class)))
        return noise < _CLEAR * errors and left < _COPY * errors + noise

    def column(self, name: str) -> Column:
        """The column with its estimated values."""
        if name in self._names:
            return Categorical(name, self._names[name], OTHER, PRIVATE)
        counts = self._cells[name].sum(axis=0).astype(np.float64)
        low, high = self._ranges[name]
        first, last = inner_range((low, high), counts, self._sum_std, 0.1)
        counts, std = merged(counts, self._sum_std)
        seen = significant(counts, 0.5 * std)  # half as strict: the rest would be noise alone
        if not len(seen):
            return Numeric.with_bounds(name, rounded_bounds(first, last), PRIVATE)
        edges = np.linspace(low, high, len(counts) + 1)
        centres, weights = ((edges[:-1] + edges[1:]) / 2)[seen], counts[seen] / counts[seen].sum()
        mean = float(weights @ centres)
        bin_width = (high - low) / len(counts)
        scale = math.sqrt(float(weights @ (centres - mean) ** 2) + bin_width**2 / 12)
        median = float(np.interp(0.5, np.cumsum(weights) - weights / 2, centres))
        # Tails lie in bins too thin to stand out: three scales around the mean hold them, if the survey saw any.
        least, most = self._outer[name]
        first, last = max(least, min(first, mean - 3 * scale)), min(most, max(last, mean + 3 * scale))
        standard = (_rounded(mean, scale), _rounded(scale, scale))
        missing, bounds = _rounded(median, scale), rounded_bounds(first, last)
        return Numeric(name, bounds, standard, missing, PRIVATE, PRIVATE, PRIVATE)


def _rounded(value: float, scale: float) -> float:
    """Rounded to the largest power of ten that is at most a tenth of the scale."""
    step = 10.0 ** math.floor(math.log10(scale / 10))
    return float(f"{round(value / step) * step:.12g}")
