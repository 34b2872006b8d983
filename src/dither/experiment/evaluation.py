"""Private evaluation: how good a model is on records that institutions hold, with an ε of its own.

Each institution counts its records by label and score, with noise (`statistics.Counting`). Accuracy, AUC,
calibration and the errors of a regression follow from the sums. A record touches one cell: a small ε suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dither import models
from dither.accounting.ledger import Ledger
from dither.experiment.folder import to_json
from dither.experiment.metrics import NAMES, probabilities_of
from dither.experiment.report import Report
from dither.experiment.statistics import Counting, Estimate, charge, check
from dither.privacy.discrete import Words, os_words

_BINS = 32  # of a predicted probability: even, so that 0.5 is a border
_UNITS = 1 << 16  # in which errors of a regression are counted
_REDRAWN = 200  # times that the noise is drawn again, for the intervals


@dataclass(frozen=True)
class PrivateScores:
    """Scores with intervals that include the noise, and the trivial predictor's beside them."""

    model: Mapping[str, Estimate]
    trivial: Mapping[str, Estimate]
    calibration: tuple[tuple[float, Estimate], ...]  # predicted probability, how often it was right
    records: Estimate
    epsilon: float
    delta: float

    def to_json(self) -> str:
        return to_json(asdict(self), indent=2)

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
    words: Words = os_words,
) -> PrivateScores:
    """Scores of a trained run on the labelled records of several institutions, one file each. Every file is
    charged before anything is counted."""
    tables = [_scored(report, path) for path in data]
    check(tables, epsilon, delta)
    book = Ledger(ledger or Ledger.default_path())
    charge(book, data, epsilon, delta, what="evaluation", new_ledger=new_ledger)
    counting = Counting(tables, epsilon, delta, words)
    if not report.classes:
        return regression_scores(counting, report.label.bounds or (0.0, 1.0), epsilon, delta)
    return classification_scores(counting, len(report.classes), epsilon, delta)


def _scored(report: Report, path: str | Path) -> pd.DataFrame:
    """What a model says of each record of a file, and the truth. What is not finite counts as no knowledge."""
    outputs, y = report.outputs(path)
    if not report.classes:
        predicted = np.asarray(models.predict(outputs, report.model.task), np.float64)
        return pd.DataFrame({"predicted": _fraction(predicted), "truth": _fraction(y)})
    probabilities = probabilities_of(outputs)
    finite = np.isfinite(probabilities).all(axis=1, keepdims=True)
    probabilities = np.where(finite, probabilities, 1.0 / probabilities.shape[1])
    best = probabilities.argmax(axis=1)
    positive = probabilities[:, 1] if probabilities.shape[1] == 2 else probabilities.max(axis=1)
    return pd.DataFrame({"probability": positive, "predicted": best, "truth": y})


def _fraction(values: np.ndarray) -> np.ndarray:
    """Within 0 to 1, 0.5 for what is no number."""
    return np.clip(np.nan_to_num(np.asarray(values, np.float64), nan=0.5), 0.0, 1.0)


def _estimates(
    counts: np.ndarray, std: float, scores: Callable[[np.ndarray], Mapping[str, float]]
) -> dict[str, Estimate]:
    """Scores of noisy counts; their intervals by drawing the same noise again on top, which costs no ε."""
    rng = np.random.default_rng(0)  # of the interval's width, nothing that is released
    again = [scores(counts + std * rng.standard_normal(counts.shape)) for _ in range(_REDRAWN)]
    value = scores(counts)
    spreads = {name: 1.96 * float(np.std([each[name] for each in again])) for name in value}
    return {
        name: Estimate(value[name], value[name] - spreads[name], value[name] + spreads[name]) for name in value
    }


# Classes


def classification_scores(counting: Counting, num_classes: int, epsilon: float, delta: float) -> PrivateScores:
    binary = num_classes == 2

    def curve(table: pd.DataFrame) -> np.ndarray:
        """Records by predicted probability, and by whether the second class (or the prediction) is true."""
        right = table["truth"] == 1 if binary else table["truth"] == table["predicted"]
        place = np.minimum((table["probability"].to_numpy() * _BINS).astype(int), _BINS - 1)
        cells = np.bincount(place + _BINS * right.to_numpy(), minlength=2 * _BINS)
        return cells.reshape(2, _BINS)

    def confusion(table: pd.DataFrame) -> np.ndarray:
        cells = table["truth"].to_numpy(int) * num_classes + table["predicted"].to_numpy(int)
        return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)

    cells, std = counting.total(curve, 1, 1.0 if binary else 0.5)
    if binary:
        model, trivial = _estimates(cells, std, _binary_scores), _estimates(cells, std, _majority)
    else:
        table, table_std = counting.total(confusion, 1, 0.5)
        model = _estimates(table, table_std, _class_scores)
        trivial = _estimates(table.sum(axis=1, keepdims=True), table_std * math.sqrt(num_classes), _majority)
    return PrivateScores(model, trivial, _calibration(cells, std), _total(cells, std), epsilon, delta)


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


def _total(cells: np.ndarray, std: float) -> Estimate:
    value, spread = float(cells.sum()), 1.96 * std * math.sqrt(cells.size)
    return Estimate(value, max(0.0, value - spread), value + spread)


def _positive(value: float) -> float:
    return max(1.0, float(value))


# Numbers


def regression_scores(
    counting: Counting, bounds: tuple[float, float], epsilon: float, delta: float
) -> PrivateScores:
    width = bounds[1] - bounds[0]

    def sums(table: pd.DataFrame) -> np.ndarray:
        """Records, and in units: |error|, error², truth, truth². Each is at most one unit a record."""
        truth = table["truth"].to_numpy(np.float64)
        error = table["predicted"].to_numpy(np.float64) - truth
        each = (np.ones_like(truth), np.abs(error), error**2, truth, truth**2)
        return np.array([np.rint(values * _UNITS).astype(np.int64).sum() for values in each])

    totals, std = counting.total(sums, 5 * _UNITS**2, 1.0)

    def scores(units: np.ndarray) -> dict[str, float]:
        count, absolute, square, truth, truth_square = (units / _UNITS).tolist()
        count = _positive(count)
        spread = truth_square / count - (truth / count) ** 2
        return {
            "r2": 1 - (square / count) / max(spread, 1e-12),
            "rmse": width * math.sqrt(max(0.0, square / count)),
            "mae": width * absolute / count,
        }

    def constant(units: np.ndarray) -> dict[str, float]:
        count, _, _, truth, truth_square = (units / _UNITS).tolist()
        count = _positive(count)
        return {"r2": 0.0, "rmse": width * math.sqrt(max(0.0, truth_square / count - (truth / count) ** 2))}

    records = Estimate(*(float(totals[0] + e) / _UNITS for e in (0.0, -1.96 * std, 1.96 * std)))
    return PrivateScores(
        _estimates(totals, std, scores), _estimates(totals, std, constant), (), records, epsilon, delta
    )
