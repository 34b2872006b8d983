"""How good a model is on labelled records, by scikit-learn, beside the best constant prediction.

Scores on public test records follow from the released model and are released with it; scores on anybody's private
records are exact and stay local.
"""

from __future__ import annotations

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

    def text(self, predictor: str = "model") -> str:
        """All metrics but accuracy and R² in one line, of the "model" or the "trivial" predictor."""
        values = getattr(self, predictor)
        return ", ".join(
            f"{text} {values[name]:.4g}" for name, text in NAMES.items() if name in values and name not in _MAIN
        )


def classification_scores(probabilities: np.ndarray, y: np.ndarray, classes: Sequence[str]) -> TestScores:
    """Scores of class probabilities `[n, classes]` against class numbers."""
    from sklearn.metrics import confusion_matrix

    # A network that diverged may give NaN: no class is then more likely than another.
    probabilities = np.where(np.isfinite(probabilities), probabilities, 1 / len(classes)).astype(np.float64)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    shares = np.bincount(y, minlength=len(classes)) / len(y)
    constant = np.broadcast_to(shares, probabilities.shape)
    predicted = probabilities.argmax(axis=1)
    confusion: tuple[tuple[int, ...], ...] = ()
    if len(classes) <= _MOST_CONFUSED:
        table = confusion_matrix(y, predicted, labels=range(len(classes)))
        confusion = tuple(tuple(int(count) for count in row) for row in table)
    return TestScores(
        records=len(y),
        model=_class_metrics(probabilities, y),
        trivial=_class_metrics(constant, y),
        trivial_predictor=f"always {classes[int(shares.argmax())]!r}",
        confusion=confusion,
        calibration=_calibration(probabilities, y),
    )


def _class_metrics(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    from sklearn import metrics

    present = np.unique(y)
    num_classes = probabilities.shape[1]
    predicted, truth = probabilities.argmax(axis=1), np.eye(num_classes)[y]
    binary = num_classes == 2
    found = {"accuracy": metrics.accuracy_score(y, predicted)}
    if len(present) > 1:
        ones = [1] if binary else present.tolist()  # classes that are not there have no curve
        found["auc"] = metrics.roc_auc_score(truth[:, ones], probabilities[:, ones])
        found["average_precision"] = metrics.average_precision_score(truth[:, ones], probabilities[:, ones])
    average = "binary" if binary else "macro"
    found["f1"] = metrics.f1_score(y, predicted, average=average, zero_division=0)
    found["log_loss"] = metrics.log_loss(y, probabilities, labels=range(num_classes))
    squares = np.square(probabilities - truth)
    found["brier"] = squares[:, 1].mean() if binary else squares.sum(axis=1).mean()
    return {name: float(value) for name, value in found.items()}


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
    from sklearn import metrics

    found = {"r2": metrics.r2_score(labels, predicted)} if len(labels) > 1 else {}
    found["rmse"] = metrics.root_mean_squared_error(labels, predicted)
    found["mae"] = metrics.mean_absolute_error(labels, predicted)
    return {name: float(value) for name, value in found.items()}


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
    """Scores of a model from what it says of each record, and the encoded labels."""
    from dither import models

    if label_bounds is None:
        return classification_scores(probabilities_of(scores.astype(np.float64)), y, classes)
    low, high = label_bounds
    predicted = np.nan_to_num(np.asarray(models.predict(scores, model.task)), nan=0.5)
    return regression_scores(low + (high - low) * predicted, low + (high - low) * y)
