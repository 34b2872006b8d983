"""How good a model is on labelled records, beside the best constant prediction.

The metrics are scikit-learn's, and tests hold them to it; they are computed here because its import takes longer
than a small run. Scores on public test records follow from the released model and are released with it; scores on
anybody's private records are exact and stay local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dither.models import Model

NAMES = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "f1": "F1",
    "log_loss": "log loss",
    "brier": "Brier",
    "r2": "R²",
    "rmse": "RMSE",
    "mae": "MAE",
}
_MAIN = ("accuracy", "r2")
_MOST_CONFUSED = 50  # classes up to which the confusion matrix is kept
_CALIBRATION_BINS = 10


@dataclass(frozen=True)
class CalibrationBin:
    """Records whose predicted probability is about the same: its mean, and how often the prediction was right."""

    predicted: float
    observed: float
    records: int


@dataclass(frozen=True)
class TestScores:
    """Scores of a model, and of the trivial predictor, on the same records. Metrics that are not defined there
    (such as AUC where all records have one class) are left out.

    Two classes: AUC, average precision, F1, Brier score and calibration are those of the second class. More
    classes: means over classes (one against the rest), the multi-class Brier score, calibration of the predicted
    class. `confusion[i][j]` counts records of class i that were predicted as class j.
    """

    __test__ = False  # no class of tests, whatever its name

    records: int
    model: dict[str, float]
    trivial: dict[str, float]
    trivial_predictor: str
    confusion: tuple[tuple[int, ...], ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()

    def beside_evaluations(self) -> dict[str, float]:
        """What an evaluation does not have: metrics but accuracy and R², and the trivial predictor's score."""
        score = next((self.trivial[name] for name in _MAIN if name in self.trivial), math.nan)
        return {**{name: value for name, value in self.model.items() if name not in _MAIN}, "trivial": score}

    def text(self, predictor: str = "model") -> str:
        """All metrics but accuracy and R² in one line, of the "model" or the "trivial" predictor."""
        values = getattr(self, predictor)
        return ", ".join(
            f"{text} {values[name]:.4g}" for name, text in NAMES.items() if name in values and name not in _MAIN
        )


def classification_scores(probabilities: np.ndarray, y: np.ndarray, classes: Sequence[str]) -> TestScores:
    """Scores of class probabilities `[n, classes]` against class numbers."""
    # A network that diverged may give NaN: no class is then more likely than another.
    probabilities = np.where(np.isfinite(probabilities), probabilities, 1 / len(classes)).astype(np.float64)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    shares = np.bincount(y, minlength=len(classes)) / len(y)
    constant = np.broadcast_to(shares, probabilities.shape)
    predicted = probabilities.argmax(axis=1)
    confusion: tuple[tuple[int, ...], ...] = ()
    if len(classes) <= _MOST_CONFUSED:
        confusion = tuple(tuple(row) for row in _confusion(y, predicted, len(classes)).tolist())
    return TestScores(
        records=len(y),
        model=_class_metrics(probabilities, y),
        trivial=_class_metrics(constant, y),
        trivial_predictor=f"always {classes[int(shares.argmax())]!r}",
        confusion=confusion,
        calibration=_calibration(probabilities, y),
    )


def _confusion(y: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(y * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def _class_metrics(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    num_classes = probabilities.shape[1]
    binary = num_classes == 2
    truth, table = np.eye(num_classes)[y], _confusion(y, probabilities.argmax(axis=1), num_classes)
    right, actual, claimed = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    values = {"accuracy": right.sum() / len(y)}
    present = np.flatnonzero(actual)
    if len(present) > 1:  # classes that are not there have no curve
        curves = [_curve_areas(truth[:, k], probabilities[:, k]) for k in ([1] if binary else present)]
        values["auc"], values["average_precision"] = np.mean(curves, axis=0)
    f1 = 2 * right / np.maximum(actual + claimed, 1)
    values["f1"] = f1[1] if binary else f1[actual + claimed > 0].mean()
    likely = np.clip(probabilities[np.arange(len(y)), y], np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
    values["log_loss"] = -np.log(likely).mean()
    squares = np.square(probabilities - truth)
    values["brier"] = squares[:, 1].mean() if binary else squares.sum(axis=1).mean()
    return {name: float(value) for name, value in values.items()}


def _curve_areas(truth: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """AUC and average precision of one class: sums over the distinct scores, from the highest down."""
    distinct, place = np.unique(-scores, return_inverse=True)
    hits = np.cumsum(np.bincount(place, weights=truth, minlength=len(distinct)))
    false = np.cumsum(np.bincount(place, weights=1 - truth, minlength=len(distinct)))
    new_hits, new_false = np.diff(hits, prepend=0), np.diff(false, prepend=0)
    auc = np.sum(new_false * (hits - new_hits / 2)) / (hits[-1] * false[-1])
    precision = np.sum(new_hits * hits / (hits + false)) / hits[-1]
    return float(auc), float(precision)


def _calibration(probabilities: np.ndarray, y: np.ndarray) -> tuple[CalibrationBin, ...]:
    if probabilities.shape[1] == 2:
        predicted, right = probabilities[:, 1], y == 1
    else:
        predicted, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    place = np.minimum((predicted * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1)
    return tuple(
        CalibrationBin(float(predicted[here].mean()), float(right[here].mean()), int(here.sum()))
        for here in (place == number for number in range(_CALIBRATION_BINS))
        if here.any()
    )


def regression_scores(predicted: np.ndarray, labels: np.ndarray) -> TestScores:
    """Scores of predicted numbers, in the unit of the labels."""
    predicted, labels = (np.asarray(values, np.float64) for values in (predicted, labels))
    mean, median = float(labels.mean()), float(np.median(labels))
    trivial = _number_metrics(np.full(len(labels), mean), labels)
    trivial["mae"] = _number_metrics(np.full(len(labels), median), labels)["mae"]
    return TestScores(
        records=len(labels),
        model=_number_metrics(predicted, labels),
        trivial=trivial,
        trivial_predictor=f"always the mean, {mean:.4g} (MAE: the median, {median:.4g})",
    )


def _number_metrics(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    errors = predicted - labels
    squares, spread = np.square(errors).sum(), np.square(labels - labels.mean()).sum()
    values = {"rmse": np.sqrt(squares / len(labels)), "mae": np.abs(errors).mean()}
    if len(labels) > 1:
        values["r2"] = 1 - squares / spread if spread else float(squares == 0)
    return {name: float(value) for name, value in values.items()}


def probabilities_of(scores: np.ndarray) -> np.ndarray:
    """Class probabilities `[n, classes]`, in float64: float32 reaches 0 and 1, where the log loss ends."""
    from scipy.special import softmax

    both = np.stack([np.zeros_like(scores), scores], axis=1) if scores.ndim == 1 else scores
    probabilities: np.ndarray = softmax(both, axis=1)
    return probabilities


def evaluate(
    model: Model,
    scores: np.ndarray,
    y: np.ndarray,
    *,
    classes: Sequence[str],
    label_bounds: tuple[float, float] | None,
) -> TestScores:
    """Scores of a model from what it says of each record, and the encoded labels; without blanks (below 0)."""
    from dither import models

    scores, y = scores[y >= 0], y[y >= 0]
    if label_bounds is None:
        return classification_scores(probabilities_of(scores.astype(np.float64)), y, classes)
    low, high = label_bounds
    predicted = np.nan_to_num(np.asarray(models.predict(scores, model.task)), nan=0.5)
    return regression_scores(low + (high - low) * predicted, low + (high - low) * y)
