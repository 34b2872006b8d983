"""Private evaluation: how good a model is on records that institutions hold, with an ε of its own.

Each institution counts its records by label and score, with noise (`experiment.counting`). Accuracy, AUC,
calibration and the errors of a regression follow from the sums. A record touches one cell: a small ε suffices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dither import models
from dither.accounting.ledger import Ledger
from dither.data import row_split
from dither.experiment import counting
from dither.experiment.counting import Counter, Counting, Question
from dither.experiment.folder import to_json
from dither.experiment.metrics import NAMES, probabilities_of
from dither.experiment.report import Report
from dither.experiment.statistics import Estimate
from dither.privacy.discrete import Words, os_words

_BINS = 32  # of a predicted probability: even, so that 0.5 is a border
_WIDE = 2.2  # standard deviations: some more than 1.96, as scores are ratios of noisy counts
_REDRAWN = 200  # times that the noise is drawn again, for the intervals


@dataclass(frozen=True)
class PrivateScores:
    """Scores with intervals that include the noise, and the trivial predictor's beside them."""

    model: Mapping[str, Estimate]
    trivial: Mapping[str, Estimate]
    calibration: tuple[tuple[float, Estimate], ...]  # predicted probability, how often it was right
    records: int  # public: how many there are (zero-out)
    epsilon: float
    delta: float

    def to_json(self) -> str:
        return to_json(self, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrivateScores:
        saved = json.loads(text)
        model, trivial = (
            {name: Estimate(*each) for name, each in saved[who].items()} for who in ("model", "trivial")
        )
        calibration = tuple((at, Estimate(*each)) for at, each in saved["calibration"])
        return cls(model, trivial, calibration, saved["records"], saved["epsilon"], saved["delta"])

    def rows(self) -> list[dict[str, str]]:
        """One line for the model and one for the trivial predictor."""
        return [
            {"": who, **{NAMES[name]: str(scores[name]) if name in scores else "" for name in self.model}}
            for who, scores in (("the model", self.model), ("a constant", self.trivial))
        ]


# reason: keyword options of a public function
def evaluate_privately(
    report: Report,
    data: Sequence[str | Path],
    *,
    epsilon: float,
    delta: float = 1e-5,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    held_out: bool = False,
    words: Words | Sequence[Words] = os_words,
) -> PrivateScores:
    """Scores of a trained run on the labelled records of several institutions, one file each; with `held_out` on
    those of each file that training left out by their row numbers (data.split = "rows"). Every file is charged
    before anything is counted."""
    counting.check_budget(epsilon, delta)
    tables = [scored_table(report, path, held_out=held_out) for path in data]
    book = Ledger(ledger or Ledger.default_path())
    counting.charge(book, data, epsilon, delta, what="evaluation", lists_names=False, new_ledger=new_ledger)
    counter = Counting(tables, epsilon, delta, words, lists_names=False)
    return private_scores(counter, report.classes, report.label.bounds, epsilon, delta)


def private_scores(
    counter: Counter, classes: Sequence[str], bounds: tuple[float, float] | None, epsilon: float, delta: float
) -> PrivateScores:
    """Scores from the counts of scored tables (`scored_table`)."""
    if not classes:
        return _regression(counter, bounds or (0.0, 1.0), epsilon, delta)
    return _classification(counter, len(classes), epsilon, delta)


def scored_table(report: Report, path: str | Path, *, held_out: bool = False) -> pd.DataFrame:
    """What a model says of each record of a file, and the truth. What is not finite counts as no knowledge."""
    outputs, y = report.outputs(path)
    if held_out:
        kept = row_split(len(y), report.spec.data.test_fraction, report.spec.seed)[1]
        outputs, y = outputs[kept], y[kept]
    return score_columns(outputs, y, report.model.task, len(report.classes))


def score_columns(outputs: np.ndarray, y: np.ndarray, task: str, num_classes: int) -> pd.DataFrame:
    """Of each record: the predicted class, its probability and the true class; of a regression truth and error. A
    blank (a label below 0) has no truth: it is counted outside the classes, where no score looks, or nowhere."""
    if not num_classes:
        predicted = np.clip(np.nan_to_num(np.asarray(models.predict(outputs, task), np.float64), nan=0.5), 0, 1)
        truth = np.where(y >= 0, np.clip(np.asarray(y, np.float64), 0.0, 1.0), np.nan)
        return pd.DataFrame({"error": np.abs(predicted - truth), "truth": truth})
    probabilities = probabilities_of(outputs)
    best = probabilities.argmax(axis=1)
    positive = probabilities[:, 1] if num_classes == 2 else probabilities.max(axis=1)
    right = np.where(y >= 0, y == 1 if num_classes == 2 else y == best, -1)
    return pd.DataFrame({"probability": positive, "predicted": best, "truth": y, "right": right})


def _estimates(
    counts: np.ndarray, std: float, scores: Callable[[np.ndarray], Mapping[str, float]]
) -> dict[str, Estimate]:
    """Scores of noisy counts; their intervals by drawing the same noise again on top, which costs no ε."""
    rng = np.random.default_rng(0)  # of the interval's width, nothing that is released
    again = [scores(counts + std * rng.standard_normal(counts.shape)) for _ in range(_REDRAWN)]
    value = scores(counts)
    spreads = {name: _WIDE * float(np.std([each[name] for each in again])) for name in value}
    return {
        name: Estimate(value[name], value[name] - spreads[name], value[name] + spreads[name]) for name in value
    }


# Classes


def _classification(counter: Counter, num_classes: int, epsilon: float, delta: float) -> PrivateScores:
    binary = num_classes == 2
    # Records by predicted probability, and by whether the second class (or the prediction) is true.
    curve = Question(
        counting.HISTOGRAM,
        ("probability",),
        1.0 if binary else 0.5,
        ((0.0, 1.0),),
        bins=_BINS,
        label="right",
        classes=("0", "1"),
    )
    (cells,), std = counter.total(curve)
    cells = cells[:2]
    if binary:
        model, trivial = _estimates(cells, std, _binary_scores), _estimates(cells, std, _majority)
    else:
        names = tuple(map(str, range(num_classes)))
        confusion = Question(
            counting.CATEGORIES, ("predicted",), 0.5, categories=(names,), label="truth", classes=names
        )
        (table,), table_std = counter.total(confusion)
        table = table[:num_classes, :num_classes]
        model = _estimates(table, table_std, _class_scores)
        trivial = _estimates(table.sum(axis=1, keepdims=True), table_std * math.sqrt(num_classes), _majority)
    return PrivateScores(model, trivial, _calibration(cells, std), counter.records, epsilon, delta)


def _binary_scores(cells: np.ndarray) -> dict[str, float]:
    negative, positive = cells.astype(np.float64)
    total, centres = _positive(cells.sum()), (np.arange(_BINS) + 0.5) / _BINS
    half = _BINS // 2
    below = np.cumsum(negative) - negative / 2
    pairs = _positive(negative.sum()) * _positive(positive.sum())
    return {
        "accuracy": (negative[:half].sum() + positive[half:].sum()) / total,
        "auc": float(positive @ below) / pairs,
        "log_loss": -float(positive @ np.log(centres) + negative @ np.log1p(-centres)) / total,
        "brier": float(positive @ (1 - centres) ** 2 + negative @ centres**2) / total,
    }


def _class_scores(table: np.ndarray) -> dict[str, float]:
    hits = np.diag(table).astype(np.float64)
    both = np.maximum(1.0, table.sum(axis=0) + table.sum(axis=1))
    return {"accuracy": hits.sum() / _positive(table.sum()), "f1": float(np.mean(2 * hits / both))}


def _majority(cells: np.ndarray) -> dict[str, float]:
    """Of always saying the class that most records have."""
    return {"accuracy": float(cells.sum(axis=1).max()) / _positive(cells.sum())}


def _calibration(cells: np.ndarray, std: float) -> tuple[tuple[float, Estimate], ...]:
    """How often a prediction was right, in eighths of the probability, where counts stand out of their noise."""
    width = _BINS // 8
    wrong, right = cells.reshape(2, 8, width).sum(axis=2).astype(np.float64)
    spread = 1.96 * std * math.sqrt(width)
    described = []
    for at in range(8):
        total = wrong[at] + right[at]
        if total > 4 * spread:
            share, error = float(right[at] / total), float(spread / total)
            described.append(((at + 0.5) / 8, Estimate(share, max(0.0, share - error), min(1.0, share + error))))
    return tuple(described)


def _positive(value: float) -> float:
    return max(1.0, float(value))


# Numbers


def _regression(counter: Counter, bounds: tuple[float, float], epsilon: float, delta: float) -> PrivateScores:
    width, count = bounds[1] - bounds[0], _positive(counter.records)
    parts, std = counter.total(Question(counting.SUMS, ("error", "truth"), 1.0, ((0.0, 1.0), (0.0, 1.0))))

    def scores(units: np.ndarray) -> dict[str, float]:
        absolute, square, truth, truth_square = (units / (counting.UNITS * count)).tolist()
        return {
            "r2": 1 - square / max(truth_square - truth**2, 1e-12),
            "rmse": width * math.sqrt(max(0.0, square)),
            "mae": width * absolute,
        }

    def constant(units: np.ndarray) -> dict[str, float]:
        _, _, truth, truth_square = (units / (counting.UNITS * count)).tolist()
        return {"r2": 0.0, "rmse": width * math.sqrt(max(0.0, truth_square - truth**2))}

    totals = np.concatenate([part[0] for part in parts])
    model, trivial = _estimates(totals, std, scores), _estimates(totals, std, constant)
    return PrivateScores(model, trivial, (), counter.records, epsilon, delta)
